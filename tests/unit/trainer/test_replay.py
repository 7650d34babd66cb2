"""A fit that the environment turns into a replay: it makes one step again, bit for bit, and writes nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from toys import Net, net, pairs

import loopwright as lw
from loopwright.callbacks import SpikeDetection
from loopwright.cli.commands.replay import _read as read
from loopwright.cli.commands.replay import replay as replay_command
from loopwright.errors import ReplayEnd
from loopwright.trainer.checkpointing import program as program_module
from loopwright.trainer.checkpointing.program import HIDDEN, hide_secrets
from loopwright.trainer.replay import ReplayRequest, digest, norm_of


class Observed(Net):
    """Keeps what a user might have logged: losses of micro-batches, and the norm of the gradients."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.Adam(parameters, lr=0.01), dropout=0.5, norm=True)
        self.losses: list[float] = []
        self.steps: list[tuple[list[float], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm([one.grad for one in self.parameters() if one.grad is not None])
        self.steps.append((self.losses, norm.item()))
        self.losses = []


class OwnSteps(Observed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Jumps(Observed):
    """Its loss jumps at one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1e6 if (self.current_epoch, batch_idx) == (0, 9) else 1)


class Lowers(SpikeDetection):
    """Changes something after a rollback."""

    def after_rollback(self, trainer: Any, pl_module: Any, entry: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-3


def fit(module: Any, folder: Path, *callbacks: Any, **arguments: Any) -> lw.Trainer:
    lw.seed_everything(3)
    trainer = lw.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, default_root_dir=folder, logger="csv", log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, lw.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)], **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Subset(pairs(28), list(range(27, -1, -1))), batch_size=2, shuffle=True))
    return trainer


def listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(one): (one.stat().st_mtime_ns, one.read_bytes()) for one in folder.rglob("*") if one.is_file()}


def replay(
    monkeypatch: pytest.MonkeyPatch, module: Any, request: ReplayRequest, run: Path, *callbacks: Any, **arguments: Any
) -> Any:
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
    with pytest.raises(ReplayEnd):
        fit(module, run, *callbacks, **arguments)
    monkeypatch.delenv("LOOPWRIGHT_REPLAY")
    return json.loads(request.record_of(0).read_text())


@pytest.mark.parametrize(("kind", "accumulate", "step"), [(Observed, 2, 6), (Observed, 1, 17), (OwnSteps, 1, 9)])
def test_a_replay_has_the_figures_of_the_run_and_leaves_its_folder_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Any], accumulate: int, step: int
) -> None:
    run, folder = tmp_path / "run", tmp_path / "replay"
    folder.mkdir()
    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    if kind is Observed:
        arguments["gradient_clip_val"] = 0.1
    original = net(kind)
    fit(original, run, **arguments)
    checkpoint = next(run.rglob(f"*step={step // 4 * 4}.ckpt"))
    before = listing(run)

    request = ReplayRequest(step, str(folder), str(checkpoint), keeps_batch=True)
    record = replay(monkeypatch, net(kind), request, run, **arguments)

    losses, norm = original.steps[step]
    found = record["backward_losses"] or [one["loss"] for one in record["micro_batches"]]
    assert found == losses
    assert record["gradients"][0]["norm"] == norm
    assert record["began_at"] == step // 4 * 4
    assert listing(run) == before
    data = Subset(pairs(28), list(range(27, -1, -1)))
    batches = torch.load(request.batch_of(0), weights_only=True)
    for place, batch in zip(record["micro_batches"], batches, strict=True):
        for number, index in enumerate(place["samples"]):
            assert all(torch.equal(column[number], value) for column, value in zip(batch, data[index], strict=True))


def test_a_trial_of_a_search_is_not_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fit_after_search(module: Any, folder: Path) -> None:
        lw.seed_everything(3)
        trainer = lw.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[lw.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)],
        )  # fmt: skip
        module.lr = 0.01
        lw.Tuner(trainer).lr_find(module, DataLoader(pairs(28), batch_size=2), num_training=10, update_attr=False)
        module.losses, module.steps = [], []
        trainer.fit(module, DataLoader(pairs(28), batch_size=2))

    original = net(Observed)
    fit_after_search(original, tmp_path / "run")
    checkpoint = next((tmp_path / "run").rglob("*step=4.ckpt"))
    first = torch.load(checkpoint, weights_only=True)["loopwright"]["program"]["fit"]
    fit(net(Observed), tmp_path / "second")
    second = torch.load(next((tmp_path / "second").rglob("*step=4.ckpt")), weights_only=True)["loopwright"]
    assert second["program"]["fit"] == first + 1

    request = ReplayRequest(6, str(tmp_path), str(checkpoint))
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
    with pytest.raises(ReplayEnd):
        fit_after_search(net(Observed), tmp_path / "other")
    record = json.loads(request.record_of(0).read_text())
    assert [one["loss"] for one in record["micro_batches"]] == original.steps[6][0]


def test_a_run_that_is_not_the_first_of_its_program_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(net(Observed), tmp_path / "first")
    fit(net(Observed), tmp_path / "second")
    checkpoint = next((tmp_path / "second").rglob("*step=4.ckpt"))
    content = torch.load(checkpoint, weights_only=True)
    assert content["loopwright"]["program"]["fit"] > 0
    assert replay_command([str(checkpoint), "--step", "6"]) == 2
    assert "Expected a run that the program's first call of Trainer.fit made" in capsys.readouterr().err


def test_two_runs_without_checkpoints_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    assert replay_command([str(tmp_path / "one"), "--compare", str(tmp_path / "other"), "--step", "4"]) == 2
    found = capsys.readouterr().err
    assert f"Expected a checkpoint in {tmp_path / 'one'} that records how the program was started, got none." in found


def test_runs_on_different_numbers_of_ranks_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(net(Observed), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for path in (tmp_path / "other").rglob("*.ckpt"):
        content = torch.load(path, weights_only=True)
        content["loopwright"]["world_size"] = 2
        torch.save(content, path)
    assert replay_command([str(tmp_path / "one"), "--compare", str(tmp_path / "one"), "--step", "-1"]) == 2
    assert "Expected --step of 0 or more, got -1." in capsys.readouterr().err
    assert replay_command([str(tmp_path / "one"), "--compare", str(tmp_path / "other")]) == 2
    found = capsys.readouterr()
    assert "Expected two runs on the same number of ranks, got 1 and 2." in found.err
    assert "checkpoint diff" in found.err
    assert not found.out


def test_a_debugger_whose_input_ends_does_not_let_a_step_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as user:
        request = ReplayRequest(2, str(tmp_path), debug=0, terminal=user.pid)
        monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
        with pytest.raises(lw.ConfigError, match="The debugger was left before the end of the step"):
            fit(net(Observed), tmp_path)
        user.kill()
    assert not request.record_of(0).exists()


@pytest.mark.parametrize("begin", [0, 4, 8])
def test_a_replay_leaves_out_what_the_run_has_left_out(
    begin: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def spikes() -> Any:
        return SpikeDetection(on_spike="rollback", warmup=2, rtol=20.0)

    original, run = net(Jumps), tmp_path / "run"
    fit(original, run, spikes())
    (tmp_path / "replay").mkdir()
    checkpoint = str(next(run.rglob(f"*step={begin}.ckpt"))) if begin else None
    found = read(next(run.rglob("*step=12.ckpt")))
    assert found is not None
    request = ReplayRequest(9, str(tmp_path / "replay"), checkpoint, rolled_back_ns=found.rolled_back_ns)
    record = replay(monkeypatch, net(Jumps), request, run, spikes())
    assert [(one["batch_idx"], one["loss"]) for one in record["micro_batches"]] == [(10, original.steps[11][0][0])]
    assert record["gradients"][0]["norm"] == original.steps[11][1]  # after 10 steps, and two of them again


def test_a_replay_that_would_miss_what_followed_a_rollback_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spikes = Lowers(on_spike="rollback", warmup=2, rtol=20.0)
    fit(net(Jumps), tmp_path / "run", spikes)
    checkpoint = str(next((tmp_path / "run").rglob("*step=4.ckpt")))
    request = ReplayRequest(9, str(tmp_path), checkpoint, newest=checkpoint)
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
    with pytest.raises(lw.ConfigError, match="step 8, to which the run has returned and where SpikeDetection"):
        fit(net(Jumps), tmp_path / "run", spikes)


def test_a_replay_from_the_beginning_needs_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = net(Observed)
    fit(original, tmp_path / "run")
    request = ReplayRequest(1, str(tmp_path))
    record = replay(monkeypatch, net(Observed), request, tmp_path / "other")
    assert [one["loss"] for one in record["micro_batches"]] == original.steps[1][0]

    request.begun.unlink()
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
    monkeypatch.setattr(lw, "seed_everything", lambda seed: torch.seed())
    monkeypatch.delenv("PL_GLOBAL_SEED")
    with pytest.raises(lw.ConfigError, match="seed_everything"):
        fit(net(Observed), tmp_path / "other")


def test_a_replay_refuses_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(
        "LOOPWRIGHT_REPLAY", ReplayRequest(1, str(tmp_path), world_size=2).to_variable()["LOOPWRIGHT_REPLAY"]
    )
    with pytest.raises(lw.ConfigError, match="Expected the 2 ranks of the run, got 1"):
        fit(net(Observed), tmp_path / "run")


def test_anomaly_detection_is_on_in_the_step_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_nan = type("WithNan", (Net,), {"training_step": lambda self, batch, batch_idx: self.loss(batch) + (
        torch.sqrt(self(batch[0]).sum() * 0) if self.trainer.global_step in (1, 2) else 0)})  # fmt: skip
    request = ReplayRequest(2, str(tmp_path), anomaly=True)
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
    with pytest.warns(UserWarning, match="sqrt"), pytest.raises(RuntimeError, match="SqrtBackward"):
        fit(net(with_nan), tmp_path / "run")
    assert not torch.is_anomaly_enabled()


def test_the_progress_bar_is_told_of_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Bar(lw.callbacks.ProgressBar):
        ended_by: BaseException | None = None

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.ended_by = exception

    bar = Bar()
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", ReplayRequest(1, str(tmp_path)).to_variable()["LOOPWRIGHT_REPLAY"])
    lw.seed_everything(0)
    trainer = lw.Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[bar])
    with pytest.raises(ReplayEnd) as caught:
        trainer.fit(net(), DataLoader(pairs(8), batch_size=2))
    assert bar.ended_by is caught.value


def test_ids_of_the_data_set_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = pairs(8)
    data.ids = [f"image-{number}" for number in range(8)]  # type: ignore[attr-defined]
    request = ReplayRequest(1, str(tmp_path))
    monkeypatch.setenv("LOOPWRIGHT_REPLAY", request.to_variable()["LOOPWRIGHT_REPLAY"])
    lw.seed_everything(0)
    trainer = lw.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False)
    with pytest.raises(ReplayEnd):
        trainer.fit(net(), DataLoader(Subset(data, [7, 6, 5, 4]), batch_size=2))
    (found,) = json.loads(request.record_of(0).read_text())["micro_batches"]
    assert (found["samples"], found["ids"]) == ([2, 3], ["image-5", "image-4"])


def test_a_digest_sees_every_bit_and_every_kind_of_value() -> None:
    values: list[Any] = [
        torch.zeros(3), torch.tensor([0.0, 0.0, -0.0]), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1, 3),
        torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.complex64), torch.zeros(0), {"a": torch.zeros(3)},
        {"a": torch.zeros(3), "b": "text"}, [torch.zeros(3), 1], torch.zeros(3).to_sparse(), torch.tensor(1.0),
    ]  # fmt: skip
    found = [digest(value) for value in values]
    assert found == [digest(value) for value in values]
    assert len(set(found)) >= len(found) - 1  # the name of a tensor counts for nothing


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse invariant checks")
def test_a_digest_of_sets_and_of_tensors_that_numpy_does_not_have() -> None:
    assert repr({0, 8}) != repr({8, 0})  # as the order of texts differs between processes
    assert digest([{0, 8}, frozenset({0, 8})]) == digest([{8, 0}, frozenset({8, 0})]) != digest([{0, 9}, {0, 8}])
    rows, other = [torch.ones(2, 3), torch.ones(1, 3)], [torch.ones(2, 3), torch.zeros(1, 3)]
    for layout in (torch.strided, torch.jagged):
        one, again, third = (torch.nested.nested_tensor(part, layout=layout) for part in (rows, rows, other))
        assert digest(one) == digest(again) != digest(third)
    number = torch.tensor([1 + 2j])
    assert digest(number.conj()) == digest(torch.tensor([1 - 2j])) != digest(number)
    assert digest(torch.empty(3, device="meta")) != digest(torch.empty(4, device="meta"))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:.*quantized")
def test_norms_of_tensors_that_are_not_dense_floats() -> None:
    row = torch.sparse_coo_tensor([[1]], [[3.0, 4.0]], (4, 2))
    assert norm_of(row).item() == 5
    assert norm_of(torch.quantize_per_tensor(torch.tensor([3.0, 4.0]), 1.0, 0, torch.qint8)).item() == 5
    assert norm_of(torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn)).item() == 5
    assert norm_of(torch.empty(2, device="meta")).item() == 0


def test_a_checkpoint_records_the_program_without_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program_module, "_of_process", program_module._of_process.__wrapped__)
    monkeypatch.setenv("MY_TOKEN", "hush")
    (tmp_path / "elsewhere").mkdir()
    start = os.getcwd()
    monkeypatch.chdir(tmp_path / "elsewhere")  # as programs do that write there
    monkeypatch.setenv("PL_TRAINER_LOGGER", "https://me:hush@host/x")
    trainer = fit(net(Observed), tmp_path)
    program = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)["loopwright"]["program"]
    assert program["folder"] == start
    assert program["ranks_by"] == "program"
    assert "hush" not in str(program)
    assert program["variables"]["PL_TRAINER_LOGGER"] == f"https://{HIDDEN}@host/x"
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "program" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)["loopwright"]


def test_secrets_in_arguments_are_hidden() -> None:
    typed = "train.py --lr 0.1 --api-key abc --hf_token=abc logger.password=abc --eos_token </s> --num_tokens 5"
    shown = f"train.py --lr 0.1 --api-key {HIDDEN} --hf_token={HIDDEN} logger.password={HIDDEN} --eos_token </s> "
    assert " ".join(hide_secrets(typed.split())) == f"{shown}--num_tokens 5"
    assert hide_secrets(["--url=https://me:abc@host/x"]) == [f"--url=https://{HIDDEN}@host/x"]
    assert hide_secrets(["--token", "--verbose"]) == ["--token", "--verbose"]
    for argument in (
        "--url=https://host/x?a=1&token=abc", "https://me:a@bc@host/x", '--logger={"api_key": "abc"}',
        "{api_key:abc}", "Authorization: Bearer abc", "--pwd=abc", "hf_abcdefghijklmnopqrst", "KEY=abc",
        "--pass=abc", "--ssh-key=abc", "MY_PASSWORD=abc", "--cookie=abc",
    ):  # fmt: skip
        assert "bc" not in hide_secrets([argument])[0]
    assert hide_secrets(["--key", "abc", "--low-pass=5", "sort_key=x"]) == [
        "--key",
        HIDDEN,
        "--low-pass=5",
        "sort_key=x",
    ]
    assert hide_secrets(["-p", "abc"]) == ["-p", "abc"]  # it may be anything
    assert hide_secrets(["--pad-token", "abc", "--wandb-key", "abc"]) == ["--pad-token", "abc", "--wandb-key", HIDDEN]
