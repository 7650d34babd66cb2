"""Folders that DeepSpeed's engine has written on two processes: read on files alone, and trained on from."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import import_deepspeed, run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.checkpoint.deepspeed.folder import read_folder
from loopwright.checkpoint.tools.convert import write_as
from loopwright.checkpoint.tools.formats import Reading, open_checkpoint
from loopwright.checkpoint.tools.verify import check

# Folder: ZeRO stage, whether in bfloat16, and what else the configuration has.
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "0": (0, False, {}),
    "1": (1, False, {}),
    "2": (2, False, {"round_robin_gradients": True}),
    "3": (3, False, {"stage3_param_persistence_threshold": 0}),
    "0-bf16": (0, True, {}),
    "1-bf16": (1, True, {}),
    "2-bf16": (2, True, {}),
    "3-bf16": (3, True, {"sub_group_size": 20}),
}


class Net(nn.Module):
    """A tied weight, a frozen layer, buffers, and sizes that two ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 6)
        self.frozen = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mean", torch.tensor([0.1, 0.2]))
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.first(self.embed(x)).tanh()).tanh())
        result: Tensor = self.head(self.last(hidden)) * self.scale
        return result


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 7, (12,), generator=generator), torch.randint(0, 7, (12,), generator=generator)


def optimizer_of(net: nn.Module, *, is_reversed: bool = False) -> torch.optim.AdamW:
    """Return an optimizer of two groups; `is_reversed` lists parameters in another order, and frozen ones besides."""
    named = [one for one in net.named_parameters() if one[1].requires_grad or is_reversed]
    named = named[::-1] if is_reversed else named
    large = [one for _, one in named if one.ndim > 1]
    small = [one for _, one in named if one.ndim < 2]
    return torch.optim.AdamW(
        [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 0.005}], lr=0.01
    )


def start_engine(stage: int, is_bf16: bool, zero: dict[str, Any], **config: Any) -> Any:
    from loopwright.strategies.deepspeed.ops import import_deepspeed

    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    net = Net()
    optimizer = optimizer_of(net)
    config |= {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": is_bf16}, "steps_per_print": 10**9,
    }  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def train(engine: Any, steps: range, rank: int, size: int) -> list[float]:
    losses = []
    share = 12 // size
    for step in steps:
        x, y = (part[rank * share : (rank + 1) * share] for part in batch(step))
        loss = cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_tensors(engine: Any, stage: int, is_bf16: bool, zero: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return masters and moments of trained parameters, as DeepSpeed's own functions have them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    result: dict[str, dict[str, Tensor]] = {}
    inner = engine.optimizer
    masters = {}
    if stage in (1, 2):  # DeepSpeed looks for the state of torch's optimizers before the first step has made it
        inner._hp_optimizer_states_linked = False
        inner._lazy_init_hp_params_optimizer_state()
    if stage == 0 and is_bf16:
        pairs = zip(inner.fp16_groups, inner.fp32_groups, strict=True)
        masters = {id(half): full for halves, fulls in pairs for half, full in zip(halves, fulls, strict=True)}
    for name, one in engine.module.named_parameters():
        if not one.requires_grad:
            continue
        if zero.get("round_robin_gradients"):
            # DeepSpeed 0.19.8 looks for them where they would be in another order; the run below needs the moments.
            found = {"fp32": one}
        elif stage:
            found = {"fp32": safe_get_full_fp32_param(one)}
            found |= {key: safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")}
        else:
            own = masters.get(id(one), one)
            state = getattr(inner, "optimizer", inner).state[own]
            found = {"fp32": own, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        result[name] = {key: value.detach().float().clone() for key, value in found.items()}
    return result


def write_folders(rank: int, size: int, folder: str) -> Any:
    results = {}
    for name, (stage, is_bf16, zero) in CASES.items():
        engine = start_engine(stage, is_bf16, zero)
        train(engine, range(3), rank, size)
        engine.save_checkpoint(f"{folder}/{name}", client_state={"mine": {"epoch": 2}})
        tensors = engine_tensors(engine, stage, is_bf16, zero)
        results[name] = (tensors, train(engine, range(3, 6), rank, size))
    return results


class Folders:
    """What two ranks have written, and what they had in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ranks = run_ranks(write_folders, 2, str(path))
        self.tensors = {name: ranks[0][name][0] for name in CASES}
        self.losses = {
            name: [sum(both) / 2 for both in zip(*(one[name][1] for one in ranks), strict=True)] for name in CASES
        }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    import_deepspeed()
    return Folders(tmp_path_factory.mktemp("folders"))


def quietly(function: Any, *args: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(*args)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_weights_and_moments_are_the_engines_own_bit_for_bit(folders: Folders, name: str) -> None:
    tree = storage.load(folders.path / name)
    weights, optimizer = tree["state_dict"], tree["optimizer_states"][0]
    theirs = folders.tensors[name]
    assert list(weights) == list(Net().state_dict())
    assert all(torch.equal(weights[key], theirs[key]["fp32"]) for key in theirs)
    assert weights["head.weight"] is weights["embed.weight"]
    frozen = Net().frozen.weight
    assert torch.equal(weights["frozen.weight"], frozen.bfloat16().float() if CASES[name][1] else frozen)
    assert weights["count"].item() == 3
    assert {value.dtype for value in weights.values()} == {torch.float32, torch.int64}
    for group in optimizer["param_groups"]:
        # In stage 0 with float32 nothing says the names; the test below trains on from it.
        for number, own in zip(group["params"], group.get("param_names", ()), strict=name != "0"):
            entry = optimizer["state"][number]
            assert all(torch.equal(entry[key], theirs[own][key]) for key in theirs[own] if key != "fp32"), own
    assert (tree["global_step"], tree["mine"]) == (3, {"epoch": 2})
    assert tree["lr_schedulers"][0]["last_epoch"] == 3


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("0")])
def test_weights_are_those_of_zero_to_fp32_bit_for_bit(folders: Folders, name: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as theirs_of

    theirs = quietly(theirs_of, str(folders.path / name))
    ours = storage.load(folders.path / name)["state_dict"]
    assert all(torch.equal(ours[key], value.float() if value.is_floating_point() else value)
               for key, value in theirs.items())  # fmt: skip
    # It leaves out what is frozen in stage 1.
    assert {key for key in ours if key not in theirs} <= {"frozen.weight", "frozen.bias"}


def test_commands_know_the_form(folders: Folders, tmp_path: Path) -> None:
    path = folders.path / "3"
    opened = open_checkpoint(path, Reading())
    assert opened.format == "DeepSpeed folder"
    assert opened.metadata["ranks"] == "2"
    assert "records match" in check(path)
    write_as(opened, tmp_path / "one.ckpt", "checkpoint")
    one, all_of_it = storage.load(tmp_path / "one.ckpt"), storage.load(path)
    assert all(torch.equal(one["state_dict"][name], value) for name, value in all_of_it["state_dict"].items())


@pytest.mark.parametrize("name", ["1", "3"])
def test_a_universal_checkpoint_of_deepspeed_says_the_same(folders: Folders, name: str, tmp_path: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    source = folders.path / name / "global_step3"
    quietly(main, Namespace(
        input_folder=str(source), output_folder=str(tmp_path / "out"), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=True,
    ))  # fmt: skip
    ours, theirs = storage.load(tmp_path / "out"), storage.load(source)
    assert read_folder(tmp_path / "out").form == "DeepSpeed universal folder"
    flat = [
        {**tree["state_dict"], **{(number, key): value for number, entry in tree["optimizer_states"][0]["state"].items()
                                  for key, value in entry.items()}}
        for tree in (ours, theirs)
    ]  # fmt: skip
    assert set(flat[0]) == set(flat[1])
    assert all(torch.equal(flat[0][key], value) and flat[0][key].shape == value.shape for key, value in flat[1].items())
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]


# --- runs ------------------------------------------------------------------------------------------------------------


class Trained(Net, lw.Module):
    def __init__(self, is_reversed: bool = True) -> None:
        super().__init__()
        self.is_reversed = is_reversed
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, is_reversed=self.is_reversed)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Later(Dataset[tuple[Tensor, Tensor]]):
    """The samples of the steps 3, 4 and 5."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = batch(3 + index // 12)
        return x[index % 12], y[index % 12]


def resume(folder: str, strategy: Any = "auto", size: int = 1, **arguments: Any) -> Trained:
    module = Trained(**arguments)
    trainer = lw.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, max_steps=6, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Later(), batch_size=12 // size), ckpt_path=folder)
    assert trainer.global_step == 6
    return module


@pytest.mark.parametrize("name", ["0", "1", "2", "3"])
def test_one_process_goes_on_as_the_engine_does(folders: Folders, name: str) -> None:
    # In stage 0 nothing says the names, so that the optimizer must have the same parameters in the same order.
    module = resume(str(folders.path / name), is_reversed=name != "0")
    assert module.losses == pytest.approx(folders.losses[name], rel=1e-6)  # sums over ranks in another order


def resume_on_ranks(rank: int, size: int, folder: str) -> Any:
    cases = (("ddp", "1"), ("fsdp", "3"), ("deepspeed_stage_1", "2"))
    return [resume(f"{folder}/{name}", strategy, size).losses for strategy, name in cases]


def test_other_strategies_go_on_as_the_engine_does(folders: Folders) -> None:
    ranks = run_ranks(resume_on_ranks, 2, str(folders.path))
    for number, name in enumerate(("1", "3", "2")):
        losses = [sum(both) / 2 for both in zip(*(one[number] for one in ranks), strict=True)]
        assert losses == pytest.approx(folders.losses[name], rel=1e-6)


def load_universal(rank: int, size: int, folder: str) -> Any:
    results = []
    for stage in (1, 2):
        engine = start_engine(stage, False, {}, checkpoint={"load_universal": True})
        _, client = engine.load_checkpoint(folder)
        results.append((engine.global_steps, client["mine"], train(engine, range(3, 6), rank, size)))
    return results


def test_deepspeed_loads_a_converted_checkpoint_with_another_number_of_ranks(folders: Folders, tmp_path: Path) -> None:
    write_as(open_checkpoint(folders.path / "3", Reading()), tmp_path / "universal", "deepspeed")
    ranks = run_ranks(load_universal, 3, str(tmp_path / "universal"))
    for number in (0, 1):
        assert ranks[0][number][:2] == (3, {"epoch": 2})
        losses = [sum(all_of) / 3 for all_of in zip(*(one[number][2] for one in ranks), strict=True)]
        assert losses == pytest.approx(folders.losses["3"], rel=1e-6)


class Saving(Trained):
    folder = ""
    trained: dict[str, Tensor]

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.deepspeed_engine.save_checkpoint(f"{self.folder}/engine")
        self.trained = {name: value.clone() for name, value in self.state_dict().items()}


def save_of_ours(rank: int, size: int, folder: str) -> dict[str, Tensor]:
    module = Saving()
    module.folder = folder
    trainer = lw.Trainer(
        accelerator="cpu", strategy="deepspeed_stage_2", devices=size, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Later(), batch_size=6))
    return module.trained


def test_the_engine_of_our_strategy_saves_names_as_the_module_has_them(tmp_path: Path) -> None:
    trained, _ = run_ranks(save_of_ours, 2, str(tmp_path))
    theirs = storage.load(tmp_path / "engine")["state_dict"]
    assert list(theirs) == list(trained)
    assert all(torch.equal(theirs[name], value) for name, value in trained.items())
    assert torch.equal(Trained.load_from_checkpoint(tmp_path / "engine").first.weight, trained["first.weight"])
