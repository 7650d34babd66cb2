"""Plans of whole models: extrapolated blocks, forwards that read values, strategies that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import keep
from measured_runs import LlamaTask, measured, training
from tensor_models import MLP
from torch import Tensor, nn

import loopwright as lw
from loopwright.cli import run
from loopwright.planning import planner, simulation
from loopwright.planning.child_process import run_in_child
from loopwright.strategies.mesh import MeshStrategy

BATCH = torch.zeros(4, 32, dtype=torch.int64)


def build(blocks: int = 12) -> LlamaTask:
    return LlamaTask(blocks=blocks)


def test_a_plan_has_a_row_for_each_strategy_and_launches_nothing() -> None:
    plan = lw.plan(lambda: build(4), BATCH, devices=2, memory="1GB")
    names = ["single_device", "ddp", "fsdp", "fsdp + checkpointing", "mesh:tp=2", "mesh:pp=2"]
    assert [row.name for row in plan.rows] == names
    assert plan.left_out == {}
    assert not torch.distributed.is_initialized()
    single, ddp, fsdp, checkpointed, *_ = plan.rows
    assert ddp.peak - single.peak == ddp.held["gathered"] > 0
    assert fsdp.held["optimizer"] == pytest.approx(ddp.held["optimizer"] / 2, rel=0.01)
    assert checkpointed.peak < fsdp.peak < ddp.peak
    assert plan.rows[-1].bubble == pytest.approx(1 / 3)
    assert plan.best is ddp
    assert 'Write: lw.Trainer(strategy="ddp", devices=2)' in str(plan)


@pytest.mark.parametrize("name", keep(["ddp", "fsdp"], "fsdp"))
def test_a_long_model_is_extrapolated_from_two_short_ones(name: str) -> None:
    task = training()
    task = planner.Training(build, task.batch)
    choice = next(one for one in planner.choices(2) if one.name == name)
    extrapolated = planner.plan_choices(task, [choice], devices=2).rows[0]
    whole = run_in_child(lambda: planner.simulate(task, name, devices=2))
    assert extrapolated.peak == pytest.approx(whole.peak_bytes, rel=0.001)
    assert extrapolated.sent == pytest.approx(whole.sent_bytes, rel=0.001)


def test_recomputed_blocks_of_a_long_model_are_extrapolated_exactly() -> None:
    task = planner.Training(build, training().batch, checkpointing=True)
    extrapolated = run_in_child(lambda: planner.usage_of(task, planner.choices(1)[0]))
    whole = run_in_child(lambda: planner.simulate(task, "single_device"))
    assert extrapolated.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.001)


def test_recomputed_blocks_that_are_sharded_together_are_counted_exactly() -> None:
    batch = torch.zeros(16, 64, dtype=torch.int64)  # more activations than weights
    task = planner.Training(lambda: build(7), batch, checkpointing=True)
    choice = next(one for one in planner.choices(2) if one.name == "fsdp")
    planned = run_in_child(lambda: planner.usage_of(task, choice))
    whole = run_in_child(lambda: planner.simulate(task, "fsdp", devices=2))
    assert planned.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.001)


def test_sharded_parameters_are_cast_when_they_are_gathered_as_on_a_gpu() -> None:
    choice = next(one for one in planner.choices(2) if one.name == "fsdp")
    task = planner.Training(lambda: build(5), torch.zeros(1, 2, dtype=torch.int64), precision="bf16-mixed")
    planned = planner.plan_choices(task, [choice], devices=2).rows[0]
    on_cpu = run_in_child(lambda: planner.simulate(task, "fsdp", devices=2))
    assert planned.peak < 0.8 * on_cpu.peak_bytes  # where autocast keeps copies of all blocks


def test_stages_of_a_pipeline_hold_what_ranks_of_a_real_one_do() -> None:
    task = training(accumulate=2)
    make = lambda: MeshStrategy(pp=2, verify=False)  # noqa: E731
    real = measured(task, make, 2)
    for rank in (0, 1):
        planned = run_in_child(lambda rank=rank: planner.simulate(task, make(), devices=2, rank=rank))
        assert sum(planned.after_backward.values()) == pytest.approx(sum(real[rank].after_backward.values()), abs=2000)
        assert planned.peak_bytes == pytest.approx(real[rank].peak_bytes, rel=0.01)


class ReadsValues(LlamaTask):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.item())
        counted = torch.ones(4, device=loss.device)[torch.arange(4) * loss > 0]
        return loss * counted.mean() if torch.isfinite(loss) else loss


class ReadsArrays(LlamaTask):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(torch.from_numpy(batch.numpy()), batch_idx)


def test_numbers_that_a_step_reads_are_assumed_which_its_row_says() -> None:
    read, plain = (lw.plan(kind, BATCH, devices=2, memory="1GB") for kind in (ReadsValues, LlamaTask))
    assert read.best is not None
    assert read.rows[1].peak == pytest.approx(plain.rows[1].peak, abs=2000)
    assert "ddp, fsdp" in str(read)
    assert "the step reads values of tensors: planned with 1 for each number" in str(read)
    half, bfloat = (lw.plan(lambda: build(2), BATCH, precision=name).rows[0] for name in ("16-mixed", "bf16-mixed"))
    assert half.note == ""  # of a scaler, too
    assert half.held == bfloat.held


def test_a_forward_that_reads_arrays_falls_back_to_closed_forms_and_says_so() -> None:
    plan = lw.plan(ReadsArrays, BATCH, devices=2, memory="1GB")
    ddp = plan.rows[1]
    module = ReadsArrays()
    size = sum(one.numel() for one in module.parameters())
    assert sum(ddp.held.values()) == 20 * size + sum(one.nbytes for one in module.buffers()) > 20 * size
    assert "activations are not counted" in str(plan)
    assert plan.best is None


def test_what_cannot_be_split_is_left_out_with_the_reason() -> None:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    plan = lw.plan(lambda: nn.Linear(8, 8), torch.zeros(2, 8), devices=2, optimizer="sgd", loss=loss)
    assert set(plan.left_out) == {"fsdp + checkpointing", "mesh:tp=2", "mesh:pp=2"}
    assert plan.rows[0].held["optimizer"] == 0


def test_an_error_of_the_module_is_raised() -> None:
    class Broken(LlamaTask):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        lw.plan(Broken, BATCH)


PROGRAM = """
import sys
import torch
from measured_runs import LlamaTask
import loopwright as lw

def main():
    loader = torch.utils.data.DataLoader(torch.zeros(8, 32, dtype=torch.int64), batch_size=4)
    trainer = lw.Trainer(accelerator="gpu", devices=8, strategy="fsdp", precision="16-mixed", max_epochs=1)
    trainer.fit(LlamaTask(sys.argv[1]), loader)

main()
raise SystemExit("it trained")
"""


def test_the_command_runs_a_program_until_its_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    code = run(["plan", "--memory", "1GB", "--json", str(program), "sgd"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["best"] == "single_device"
    assert [row["held"]["optimizer"] for row in found["rows"]] == [0]
    assert run(["plan", str(program), "adam", "--memory", "1KB"]) == 1
    assert "on 1 device of 1.00 kB" in (out := capsys.readouterr().out)
    assert "Nothing fits" in out
    assert list(tmp_path.iterdir()) == [program]


def test_options_stand_anywhere_and_the_programs_are_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    program.write_text("import sys; print(sys.argv[1:])")
    assert run(["plan", str(program), "--lr", "0.1", "--devices", "4", "fit", "--", "--devices", "2"]) == 2
    assert "['--lr', '0.1', 'fit', '--devices', '2']" in capsys.readouterr().out


def test_a_program_without_a_fit_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text("")
    assert run(["plan", str(program)]) == 2
    assert "expected a call of Trainer.fit" in capsys.readouterr().err


class WholeOnly(MLP):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.w1(x)
        if hidden.shape[-1] != self.w1.out_features:
            raise IndexError("only whole")
        return self.w2(hidden * self.w3(x))


def test_a_module_that_fails_in_parts_only_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_whole() -> LlamaTask:
        task = build(2)
        for block in task.model.blocks:
            block.mlp = WholeOnly(64)
        return task

    monkeypatch.setattr(simulation, "_MOST_COMPUTED", 0)  # as of layers that are too large to compute with
    plan = lw.plan(build_whole, BATCH, devices=2)
    assert [row.name for row in plan.rows][:4] == ["single_device", "ddp", "fsdp", "fsdp + checkpointing"]
    assert plan.left_out == {"mesh:tp=2": "IndexError: only whole"}


class Scheduled(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        assert steps == 6  # 6 batches, 2 to a step, 2 epochs
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


@pytest.mark.parametrize("combine", [dict, lambda loaders: lw.data.CombinedLoader(loaders, "min_size")])
def test_a_trainer_plans_with_a_schedule_of_its_steps_and_with_several_loaders(combine: Any) -> None:
    trainer = lw.Trainer(accelerator="cpu", logger=False, max_epochs=2, accumulate_grad_batches=2)
    plan = trainer.plan(Scheduled(), combine({"x": [torch.zeros(4, 8)] * 6}))
    assert plan.rows[0].name == "single_device"
    assert plan.rows[0].held["optimizer"] > 0


def test_a_module_sets_up_the_data_that_it_plans_with() -> None:
    class OwnData(Scheduled):
        def setup(self, stage: str) -> None:
            self.batches = [{"x": torch.zeros(4, 8)}] * 6

        def train_dataloader(self) -> Any:
            return self.batches

    module = OwnData()
    trainer = lw.Trainer(accelerator="cpu", logger=False, max_epochs=2, accumulate_grad_batches=2)
    assert trainer.plan(module).rows[0].held["optimizer"] > 0
    assert not hasattr(module, "batches")


def test_checkpointing_is_tried_with_copies_of_the_module_where_they_lack_memory() -> None:
    task = planner.Training(lambda: build(4), BATCH.repeat(8, 1))

    def planned(memory: float | None, name: str, devices: int) -> Any:
        chosen = [one for one in planner.choices(devices) if one.name.startswith(name)]
        return planner.plan_choices(task, chosen, devices=devices, memory=memory)

    (ddp,) = planned(None, "ddp", 2).rows
    _, tight = planned(ddp.peak, "ddp", 2).rows
    assert tight.held["activations"] < 0.6 * ddp.held["activations"]
    assert tight.line == 'strategy="ddp", activation_checkpointing=True'
    alone = planned(ddp.peak - ddp.held["gathered"], "single_device", 1)
    assert alone.best is alone.rows[1]
    assert 'strategy="single_device", devices=1, activation_checkpointing=True' in str(alone)


def test_a_trainer_plans_with_its_precision_and_accumulation() -> None:
    loader = torch.utils.data.DataLoader(torch.zeros(8, 32, dtype=torch.int64), batch_size=4)
    module = LlamaTask()
    trainer = lw.Trainer(accelerator="cpu", devices=1, precision="bf16-true", accumulate_grad_batches=2, logger=False)
    row = trainer.plan(module, loader).rows[0]
    size = sum(one.numel() for one in module.parameters())
    assert row.held["optimizer"] == pytest.approx(2 * 2 * size, rel=0.01)
    assert row.held["gradients"] == pytest.approx(2 * size, rel=0.01)
    assert next(module.parameters()).dtype == torch.float32
