"""DeepSpeed's folders as files: made manually here, in the layout that integration/deepspeed/slow compares with the
engine's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.checkpoint import storage
from loopwright.checkpoint.content import fit_by_name
from loopwright.checkpoint.deepspeed.files import find_tag_folder, is_deepspeed_folder
from loopwright.checkpoint.deepspeed.folder import read_folder
from loopwright.checkpoint.deepspeed.partitions import Flat, Misfit, group_layouts, parameter_layouts
from loopwright.checkpoint.tools.formats import Reading, find_checkpoints, open_checkpoint
from loopwright.checkpoint.tools.verify import check
from loopwright.cli import run
from loopwright.errors import CheckpointError

WEIGHT, BIAS, FROZEN = torch.arange(15.0).view(5, 3), torch.tensor([0.5, 1.5, 2.5]), torch.arange(4.0) + 70
LONG = torch.cat([WEIGHT.reshape(-1), BIAS])  # 18 elements: two ranks fill it up to 20
GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}


class LossScaler:
    """Stand for DeepSpeed's, which is in every file of an optimizer."""


LossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"


class Bomb:
    """Run a program when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture(autouse=True)
def _deepspeed_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    module.LossScaler = LossScaler  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.fp16.loss_scaler", module)


def model(**changes: Any) -> dict[str, Any]:
    return {
        "module": {"weight": WEIGHT.half(), "bias": BIAS.half(), "frozen": FROZEN.half(), "tied": WEIGHT.half()},
        "buffer_names": [], "optimizer": None, "param_shapes": [{"weight": WEIGHT.shape, "bias": BIAS.shape}],
        "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {"tied": "weight"},
        "lr_scheduler": None, "global_steps": 7, "dp_world_size": 2, "ds_version": "0.16.4", "ds_config": {}, **changes,
    }  # fmt: skip


def optimizer_of(rank: int) -> dict[str, Any]:
    padded = torch.cat([LONG, torch.zeros(2)])
    own = slice(rank * 10, rank * 10 + 10)
    state = {"step": torch.tensor(7.0), "exp_avg": padded[own] * 2, "exp_avg_sq": padded[own] * 3}
    return {
        "optimizer_state_dict": {
            "loss_scaler": LossScaler(), "base_optimizer_state": {"state": {0: state}, "param_groups": [GROUP]},
            "single_partition_of_fp32_groups": [LONG[own]], "partition_count": [2], "zero_stage": 2,
        },
        "ds_config": {}, "ds_version": "0.16.4",
    }  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    """Write what two ranks save in stage 2."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    torch.save(model(**changes), tag / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save(optimizer_of(rank), tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return tag


def test_masters_and_moments_of_two_ranks_become_full_tensors(tmp_path: Path) -> None:
    write(tmp_path / "run", epoch=4)
    tree = storage.load(tmp_path / "run")
    weights = tree["state_dict"]
    assert list(weights) == ["weight", "bias", "frozen", "tied"]
    assert torch.equal(weights["weight"], WEIGHT)
    assert torch.equal(weights["bias"], BIAS)
    assert torch.equal(weights["frozen"], FROZEN)
    assert weights["tied"] is weights["weight"]
    (optimizer,) = tree["optimizer_states"]
    assert torch.equal(optimizer["state"][1]["exp_avg_sq"], BIAS * 3)
    assert optimizer["state"][0]["step"] is not optimizer["state"][1]["step"]  # torch counts them in place
    assert optimizer["param_groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "param_names": ["weight", "bias"]}
    ]
    assert (tree["epoch"], tree["global_step"], tree["lr_schedulers"]) == (4, 7, [])


def test_tensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path)
    weight = storage.load(tmp_path, lazy=True)["state_dict"]["weight"]
    assert weight.shape == (5, 3)
    assert torch.equal(weight.read((1, 1), (2, 2)), WEIGHT[1:3, 1:3])


def test_a_folder_of_lightning_keeps_lightnings_keys(tmp_path: Path) -> None:
    tag = write(tmp_path)
    tag.rename(tmp_path / "checkpoint")
    (tmp_path / "latest").unlink()
    content = model(epoch=1, global_step=9, hyper_parameters={"lr": 0.1}, callbacks={"A": {"b": 1}}, loops={})
    content["pytorch-lightning_version"] = "2.6.6"
    for key in ("module", "shared_params"):
        content[key] = {f"_forward_module.{name}": value for name, value in content[key].items()}
    content["shared_params"] = {"_forward_module.tied": "_forward_module.weight"}
    content["param_shapes"] = [{f"_forward_module.{name}": size for name, size in content["param_shapes"][0].items()}]
    torch.save(content, tmp_path / "checkpoint" / "mp_rank_00_model_states.pt")
    opened = open_checkpoint(tmp_path, Reading())
    assert opened.format == "DeepSpeed folder"
    tree = storage.load(tmp_path)
    assert list(tree["state_dict"]) == ["weight", "bias", "frozen", "tied"]
    assert tree["optimizer_states"][0]["param_groups"][0]["param_names"] == ["weight", "bias"]
    assert (tree["epoch"], tree["global_step"], tree["hyper_parameters"]) == (1, 9, {"lr": 0.1})
    assert tree["callbacks"] == {"A": {"b": 1}}


def test_lists_of_stage_3_with_one_group_of_two_subgroups(tmp_path: Path) -> None:
    shapes = [{"weight": WEIGHT.shape}, {"bias": BIAS.shape}]
    for rank in range(2):
        flat = [torch.cat([WEIGHT.reshape(-1), torch.zeros(1)])[rank * 8 : rank * 8 + 8],
                torch.cat([BIAS, torch.zeros(1)])[rank * 2 : rank * 2 + 2]]  # fmt: skip
        state = {number: {"step": torch.tensor(7.0), "exp_avg": part * 2} for number, part in enumerate(flat)}
        saved = {
            "fp32_flat_groups": flat, "partition_count": 2,
            "optimizer_state_dict": {"state": state, "param_groups": [{**GROUP, "params": [0, 1]}]},
        }  # fmt: skip
        fragment = {"frozen": FROZEN[rank * 2 : rank * 2 + 2]}
        content = model(param_shapes=shapes, frozen_param_shapes={"frozen": FROZEN.shape},
                        frozen_param_fragments=fragment)  # fmt: skip
        content["module"] = {name: torch.empty(0) for name in content["module"]}
        content["shared_params"] = {"tied": "weight"} if rank == 0 else {}
        torch.save(content, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": saved}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    tree = storage.load(tmp_path)
    assert torch.equal(tree["state_dict"]["weight"], WEIGHT)
    assert torch.equal(tree["state_dict"]["frozen"], FROZEN)
    assert torch.equal(tree["optimizer_states"][0]["state"][1]["exp_avg"], BIAS * 2)
    assert tree["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1]


def test_masters_of_stage_0_find_their_names_by_their_values(tmp_path: Path) -> None:
    fused = {"state": {0: {"exp_avg": LONG * 2, "step": 7}}, "param_groups": [GROUP]}
    masters = LONG * (1 + 1e-5)
    content = model(
        param_shapes=None, shared_params=None,
        optimizer={"optimizer_state_dict": fused, "fp32_groups_flat": [masters]},
    )  # fmt: skip
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    tree = storage.load(tmp_path)
    assert torch.equal(tree["state_dict"]["weight"], masters[:15].view(5, 3))
    assert torch.equal(tree["optimizer_states"][0]["state"][1]["exp_avg"], BIAS * 2)
    assert tree["optimizer_states"][0]["state"][0]["step"] == 7


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content"),
    [("mp_rank_00_model_states.pt", model), ("zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda: optimizer_of(1))],
)
def test_a_planted_program_is_refused_and_not_run(tmp_path: Path, file: str, content: Any) -> None:
    tag, mark = write(tmp_path / "run"), tmp_path / "ran"
    torch.save({**content(), "planted": Bomb(mark)}, tag / file)
    with pytest.raises(CheckpointError, match=rf"posix.system \(in {file}\)"):
        storage.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"posix.system"):
        open_checkpoint(tmp_path / "run", Reading())
    with pytest.raises(CheckpointError, match="never unpickled"):
        open_checkpoint(tmp_path / "run", Reading(trust=True))
    assert open_checkpoint(tmp_path / "run", Reading(drop_objects=True)).dropped
    assert storage.load(tmp_path / "run", weights_only=False)["global_step"] == 7
    assert not mark.exists()


def test_files_that_are_missing_or_of_another_save_are_named(tmp_path: Path) -> None:
    tag = write(tmp_path)
    second = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    third = tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 ranks have saved it, and there is zero_pp_rank_2.*: files of two"):
        check(tmp_path)
    third.unlink()
    (tag / f"bf16_{second.name}").write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=r"both bf16_zero_pp_rank_1.* and zero_pp_rank_1"):
        check(tmp_path)
    (tag / f"bf16_{second.name}").unlink()
    second.unlink()
    with pytest.raises(CheckpointError, match="the optimizer states of rank 1 are missing"):
        check(tmp_path)
    (tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="the optimizer states of all ranks are missing"):
        storage.load(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    raw = bytearray(file.read_bytes())
    at = raw.index(LONG[10:].numpy().tobytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        storage.load(tmp_path)
    with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        storage.verify_share(tmp_path, 2, 3)
    storage.verify_share(tmp_path, 0, 3)


def test_shapes_that_do_not_fit_the_masters_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, param_shapes=[{"weight": torch.Size([5, 4]), "bias": torch.Size([3])}])
    with pytest.raises(CheckpointError, match="group 0 need 23 elements, and the files have 18"):
        storage.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "pipeline stages"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "MoE"),
    ],
)
def test_models_that_are_sharded_differently_are_rejected(tmp_path: Path, file: str, what: str) -> None:
    (write(tmp_path) / file).touch()
    with pytest.raises(CheckpointError, match=what):
        read_folder(tmp_path)


def test_latest_names_a_folder_below_and_nothing_else(tmp_path: Path) -> None:
    tag = write(tmp_path / "a")
    assert find_tag_folder(tmp_path / "a") == tag
    assert find_tag_folder(tag) == tag
    write(tmp_path / "b")
    (tmp_path / "b" / "latest").write_text("../a/global_step7")
    (tmp_path / "b" / "other").mkdir()
    assert find_tag_folder(tmp_path / "b") == tmp_path / "b" / "global_step7"
    assert not is_deepspeed_folder(tmp_path)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["a", "b"]


# --- to DeepSpeed ----------------------------------------------------------------------------------------------------


def checkpoint_of_ours(*, is_named: bool) -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    parameters: Any = module.named_parameters() if is_named else module.parameters()
    optimizer = torch.optim.AdamW(parameters)
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {
        "epoch": 1, "global_step": 1, "state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 1}], "hyper_parameters": {"lr": 0.1}, "pytorch-lightning_version": "2.6",
    }  # fmt: skip


def test_a_checkpoint_goes_to_a_universal_folder_and_back(tmp_path: Path) -> None:
    ours = checkpoint_of_ours(is_named=True)
    torch.save(ours, tmp_path / "ours.ckpt")
    assert run(["checkpoint", "convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "ds"), "--to", "deepspeed"]) == 0
    assert run(["checkpoint", "convert", str(tmp_path / "ds"), str(tmp_path / "back.ckpt")]) == 0
    assert run(["checkpoint", "diff", str(tmp_path / "ours.ckpt"), str(tmp_path / "back.ckpt")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.ckpt", "ds", "ours.ckpt"]


def test_without_names_there_is_no_universal_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(checkpoint_of_ours(is_named=False), tmp_path / "ours.ckpt")
    assert run(["checkpoint", "convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "ds"), "--to", "deepspeed"]) == 2
    assert "named_parameters()" in capsys.readouterr().err
    assert not (tmp_path / "ds").exists()


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    torch.save(checkpoint_of_ours(is_named=True), tmp_path / "ours.ckpt")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo").touch()
    words = [
        "checkpoint",
        "convert",
        str(tmp_path / "ours.ckpt"),
        str(tmp_path / "mine"),
        "--to",
        "deepspeed",
        "--force",
    ]
    assert run(words) == 2
    assert (tmp_path / "mine" / "photo").exists()


# --- parts -----------------------------------------------------------------------------------------------------------


def test_pieces_lie_across_parts() -> None:
    flat = Flat([torch.arange(3.0), torch.arange(3.0, 4.0), torch.empty(0), torch.arange(4.0, 9.0)])
    for start in range(9):
        for size in range(1, 10 - start):
            found: Tensor = torch.cat(flat.pieces(start, size))
            assert found.tolist() == list(range(start, start + size))


def test_alignment_between_parameters_is_passed_over() -> None:
    layouts = group_layouts([{"a": (3,), "b": (2,)}], [8], [[1, 2]], 2)
    assert layouts["b"].slices == ((0, 4, 2),)
    with pytest.raises(Misfit):
        group_layouts([{"a": (3,), "b": (2,)}], [12], [[1, 2]], 2)


def test_each_rank_has_a_run_of_each_parameter() -> None:
    layouts = parameter_layouts([{"a": (5,)}, {"b": (1,)}], [4, 4])
    assert layouts["a"].slices == ((0, 0, 3), (1, 0, 2))
    assert layouts["b"].slices == ((0, 3, 1), (1, 3, 0))


def test_a_state_with_names_fits_another_order_and_frozen_ones() -> None:
    state = {
        "state": {0: {"exp_avg": "a"}, 1: {"exp_avg": "b"}},
        "param_groups": [{"lr": 1, "params": [0, 1], "param_names": ["a", "b"]}],
    }
    assert fit_by_name(state, [["b", "frozen", "a"]]) == {
        "state": {0: {"exp_avg": "b"}, 2: {"exp_avg": "a"}},
        "param_groups": [{"lr": 1, "params": [0, 1, 2]}],
    }
    assert fit_by_name(state, [["a", "c"]]) == state
