"""Files of every form, converted on files alone: what comes back is what went in, and nothing in a file runs."""

from __future__ import annotations

import argparse
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import loopwright as lw
from loopwright.checkpoint import Trusted, Untrusted, storage
from loopwright.checkpoint.file.safetensors_file import TIED_KEY
from loopwright.checkpoint.file.streamed import save_streaming
from loopwright.checkpoint.tensors import StoredTensor, flatten, read_tensor
from loopwright.checkpoint.tools.convert import guess_format, rename, without_training, write_as
from loopwright.checkpoint.tools.diff import Tolerance, compare
from loopwright.checkpoint.tools.formats import Opened, Reading, open_checkpoint
from loopwright.errors import CheckpointError, ConfigError

LIGHTNING = Path(__file__).parents[3] / "fixtures" / "lightning-2.6.ckpt"


class Stored(StoredTensor):
    """A tensor that is read when it is asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("tensor", tensor.shape, tensor.dtype)
        self.tensor = tensor

    def _read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        return self.tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def differences(first: Any, second: Any, **tolerance: float) -> list[tuple[str, str]]:
    return [(found.kind, found.path) for found in compare(first, second, Tolerance(**tolerance))]


def opened(tree: dict[str, Any], **more: Any) -> Opened:
    return Opened("given", "checkpoint", tree, **more)


def rich_weights() -> dict[str, Any]:
    weight = torch.randn(5, 3)
    return {
        "a": weight, "tied": weight, "half": torch.randn(4).bfloat16(), "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]), "count": torch.tensor(7), "empty": torch.empty(0, 3),
        "turned": torch.arange(6).view(2, 3).t(), "u16": torch.tensor([60000], dtype=torch.uint16),
        "nan": torch.tensor([float("nan")]),
    }  # fmt: skip


def test_stored_tensors_are_written_as_torch_save_would_have(tmp_path: Path) -> None:
    base = torch.randn(10)
    shared = Stored(torch.randn(5, 3))
    weights = OrderedDict(
        a=shared, again=shared, half=Stored(torch.ones(2, 2).bfloat16()), empty=Stored(torch.empty(0, 3)),
        scalar=Stored(torch.tensor(3.0)), part=base[2:5], all=base,
    )  # fmt: skip
    weights.__dict__["_metadata"] = OrderedDict({"": {"version": 1}})
    tree = {"state_dict": weights, "nested": [{0: (1, Stored(torch.arange(6).view(2, 3).t()))}], "name": "x"}
    counted: list[int] = []
    save_streaming(tree, tmp_path / "streamed.ckpt", advance=counted.append)
    assert storage.verify(tmp_path / "streamed.ckpt").sealed
    loaded = torch.load(tmp_path / "streamed.ckpt", weights_only=True)
    assert not differences(tree, loaded)
    found = loaded["state_dict"]
    assert found["a"].data_ptr() == found["again"].data_ptr()
    assert found["part"].untyped_storage().data_ptr() == found["all"].untyped_storage().data_ptr()
    assert found._metadata == {"": {"version": 1}}
    assert sum(counted) == 60 + 8 + 4 + 40 + 48
    with pytest.raises(CheckpointError, match="object"):
        save_streaming({"a": shared, "b": object()}, tmp_path / "no.ckpt")
    assert os.listdir(tmp_path) == ["streamed.ckpt"]


def test_a_wrong_size_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    lie = Stored(torch.ones(3))
    lie.shape = torch.Size((4,))
    with pytest.raises(CheckpointError, match="16 bytes were expected"):
        save_streaming({"a": lie}, tmp_path / "no.ckpt")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("to", ["safetensors", "state-dict", "checkpoint", "sharded"])
def test_weights_survive_every_form_and_ties_stay(tmp_path: Path, to: str) -> None:
    weights = rich_weights()
    write_as(opened({"state_dict": weights}, is_bare=True), tmp_path / "out", to, num_shards=2)
    found = open_checkpoint(tmp_path / "out", Reading()).tree["state_dict"]
    assert not differences(weights, found)
    tied, first = found["tied"], found["a"]
    assert tied is first or tied.data_ptr() == first.data_ptr()


def test_safetensors_are_those_of_the_library(tmp_path: Path) -> None:
    weights = rich_weights()
    write_as(opened({"state_dict": weights}), tmp_path / "out.safetensors", "safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert set(loaded) == set(weights) - {"tied"}
    assert not differences(loaded, {name: value for name, value in weights.items() if name != "tied"})
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", TIED_KEY: '{"tied": "a"}'}
    save_file({"w": torch.ones(2)}, tmp_path / "theirs.safetensors", metadata={"made": "by"})
    theirs = open_checkpoint(tmp_path / "theirs.safetensors", Reading())
    assert (theirs.format, theirs.is_bare, theirs.metadata) == ("safetensors", True, {"made": "by"})
    assert torch.equal(read_tensor(theirs.tree["state_dict"]["w"]), torch.ones(2))
    content = (tmp_path / "theirs.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        open_checkpoint(tmp_path / "cut.safetensors", Reading())


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    weights = {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128), "_extra_state": {"x": 1}}
    with pytest.raises(CheckpointError, match=r"2 entries .*b: torch.complex128, _extra_state: dict"):
        write_as(opened({"state_dict": weights}), tmp_path / "no.safetensors", "safetensors")
    assert not os.listdir(tmp_path)


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", self.layer(batch).mean())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_state_dict_becomes_a_checkpoint_that_a_trainer_takes(tmp_path: Path, suffix: str) -> None:
    net = Net()
    weights = {f"model.{name}": value for name, value in net.state_dict().items()}
    source = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(weights, source)
    else:
        save_file(weights, source)
    bare = open_checkpoint(source, Reading())
    write_as(rename(bare, [("model.", "")]), tmp_path / "made.ckpt", "checkpoint")
    made = str(tmp_path / "made.ckpt")
    assert torch.equal(Net.load_from_checkpoint(made).layer.weight, net.layer.weight)
    trainer = lw.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_epochs=1
    )
    batch = torch.ones(2, 3)
    [said] = trainer.test(Net(), [batch], ckpt_path=made, verbose=False)
    assert said["mean"] == pytest.approx(net.layer(batch).mean().item())
    with pytest.raises(CheckpointError, match="weights only"):
        trainer.fit(Net(), [batch], ckpt_path=made)


def test_names_are_changed_where_weights_are_named() -> None:
    tree = {
        "state_dict": {"old.a": torch.ones(1), "old.b": torch.ones(1), "c": torch.ones(1)},
        "optimizer_states": [
            {"state": {"old.a": {"m": 1}}, "param_groups": [{"params": ["old.a", "c"]}]},
            {"state": {0: {"m": 1}}, "param_groups": [{"params": [0]}]},
        ],
        "loopwright": {"frozen": {"parameters": ["old.b"], "modules": []}},
    }
    found = rename(opened(tree), [("old.", "new.")]).tree
    assert list(found["state_dict"]) == ["new.a", "new.b", "c"]
    assert found["optimizer_states"][0] == {
        "state": {"new.a": {"m": 1}},
        "param_groups": [{"params": ["new.a", "c"]}],
    }
    assert found["optimizer_states"][1] == tree["optimizer_states"][1]
    assert found["loopwright"]["frozen"]["parameters"] == ["new.b"]
    assert list(tree["state_dict"]) == ["old.a", "old.b", "c"]
    with pytest.raises(ConfigError, match=r"--map x=y: no weight .*several weights would be called 'c'"):
        rename(opened(tree), [("x", "y"), ("old.a", "c")])


@pytest.mark.parametrize("to", ["checkpoint", "lightning", "state-dict", "safetensors", "sharded"])
def test_names_of_compiled_modules_become_plain_and_count_as_equal(to: str, tmp_path: Path) -> None:
    weights = {"net._orig_mod.0.weight": torch.ones(2), "other": torch.zeros(1)}
    write_as(opened({"state_dict": weights}, is_bare=True), tmp_path / "out", to)
    found = open_checkpoint(tmp_path / "out", Reading()).tree["state_dict"]
    assert sorted(found) == ["net.0.weight", "other"]
    assert not differences(weights, found)
    assert differences(weights, {**found, "net.0.weight": torch.zeros(2)}) == [("values", "net.0.weight")]


def test_weights_only_keeps_what_save_checkpoint_keeps() -> None:
    tree = {
        "state_dict": {}, "epoch": 1, "global_step": 2, "optimizer_states": [], "callbacks": {}, "own": 1,
        "hyper_parameters": {"a": 1}, "loopwright": {"schema": 1, "progress": {}, "rng": 3, "data": 4},
    }  # fmt: skip
    assert without_training(opened(tree)).tree == {
        "state_dict": {}, "epoch": 1, "global_step": 2, "hyper_parameters": {"a": 1},
        "loopwright": {"schema": 1, "progress": {}},
    }  # fmt: skip


def test_the_format_is_guessed_from_the_suffix() -> None:
    assert [guess_format(f"a{suffix}") for suffix in (".ckpt", ".safetensors", ".pt", ".pth")] == [
        "checkpoint", "safetensors", "state-dict", "state-dict",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="suffix '.bin'"):
        guess_format("a.bin")


def test_what_lightning_gets_has_the_fields_keys_and_counts(tmp_path: Path) -> None:
    tree = {
        "epoch": 2, "global_step": 8, "loopwright_version": "1", "state_dict": {"a": torch.ones(1)}, "callbacks": {},
        "optimizer_states": [], "lr_schedulers": [],
        "loopwright": {"schema": 1, "progress": {"epochs": 2, "steps": 8, "total_batches": 9, "batches_in_epoch": 1}},
    }  # fmt: skip
    write_as(opened(tree), tmp_path / "for.ckpt", "lightning")
    loaded = storage.load(tmp_path / "for.ckpt")
    theirs = storage.load(LIGHTNING)
    assert "loopwright" not in loaded
    assert set(loaded) <= set(theirs)
    ours, known = loaded["loops"]["fit_loop"], theirs["loops"]["fit_loop"]
    flat = [[path for path, _ in flatten(loop)] for loop in (ours, known)]
    assert sorted(flat[0]) == sorted(flat[1])
    assert ours["epoch_loop.batch_progress"]["current"]["processed"] == 1
    assert ours["epoch_progress"]["current"] == {"ready": 3, "completed": 2, "started": 3, "processed": 2}
    assert not ours["epoch_loop.batch_progress"]["is_last_batch"]
    again = lw.checkpoint.content.read(loaded, source="x")
    assert again.states["progress"]["steps"] == 8
    assert again.states["progress"]["epochs"] == 2
    assert again.states["progress"]["batches_in_epoch"] == 1


class Settings:
    def __init__(self) -> None:
        self.lr = 0.1


def foreign(tmp_path: Path) -> tuple[Path, Path]:
    """Write a checkpoint of another program with objects, one of which would make a folder; return both paths."""
    ran = tmp_path / "ran"
    path = tmp_path / "foreign.ckpt"
    tree = {
        "state_dict": {"w": torch.nn.Parameter(torch.ones(2)), "b": torch.zeros(1)},
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"args": argparse.Namespace(width=3), "path": Path("a/b"), "settings": Settings()},
        "callbacks": {"mine": Bomb(ran)},
        "list": [1, Settings()],
    }
    torch.save(tree, path)
    return path, ran


def test_objects_of_other_programs_are_listed_or_left_out_and_never_run(tmp_path: Path) -> None:
    path, ran = foreign(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)3 entries .*settings.*callbacks\['mine'\].*list.*--drop-objects"):
        open_checkpoint(path, Reading())
    found = open_checkpoint(path, Reading(drop_objects=True))
    assert len(found.dropped) == 3
    assert found.format == "Lightning checkpoint"
    assert found.tree["hyper_parameters"] == {"args": {"width": 3}, "path": "a/b"}
    assert torch.equal(found.tree["state_dict"]["w"], torch.ones(2))
    assert not ran.exists()
    write_as(found, tmp_path / "clean.ckpt", "checkpoint")
    assert storage.load(tmp_path / "clean.ckpt")["hyper_parameters"]["path"] == "a/b"
    open_checkpoint(path, Reading(trust=True, drop_objects=True))
    assert ran.exists()  # that is what trust means


@pytest.mark.parametrize(
    "pickled",
    [
        b"cbuiltins\neval\n(X\x08\x00\x00\x00exit(99)tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb.",  # sets an attribute of a function
        b"ctorch.storage\nUntypedStorage\n}X\x01\x00\x00\x00aK\x01sb.",  # and of a class
        b"\x82\x01.",
        b"(cos\nsystem\nX\x04\x00\x00\x00exito.",
        b"(X\x04\x00\x00\x00exitios\nsystem\n.",
    ],
)
def test_no_pickle_gets_at_functions_or_classes(tmp_path: Path, pickled: bytes) -> None:
    path = tmp_path / "evil.ckpt"
    torch.save({"a": 1}, path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, b"\x80\x02" + pickled if name.endswith("data.pkl") else content)
    try:
        found = open_checkpoint(path, Reading(drop_objects=True))
    except CheckpointError:
        found = None
    assert found is None or found.tree == {}
    assert not hasattr(torch.storage.UntypedStorage, "a")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "a")


def test_trusted_objects_go_along_unopened(tmp_path: Path) -> None:
    storage.save({"state_dict": {"a": torch.ones(1)}, "mine": Trusted(Settings())}, tmp_path / "a.ckpt")
    found = open_checkpoint(tmp_path / "a.ckpt", Reading())
    write_as(found, tmp_path / "b.ckpt", "checkpoint")
    write_as(found, tmp_path / "c.ckpt", "sharded")
    for name in ("b.ckpt", "c.ckpt"):
        again = open_checkpoint(tmp_path / name, Reading())
        assert isinstance(again.tree["mine"], Untrusted)
        assert not differences(found.tree, again.tree)
        assert storage.load(tmp_path / name, weights_only=False)["mine"].lr == 0.1


def test_the_old_format_of_torch_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = open_checkpoint(tmp_path / "old.pt", Reading())
    assert found.format == "state dict"
    assert torch.equal(found.tree["state_dict"]["a"], torch.ones(2))


# --- compare --------------------------------------------------------------------------------------------------------


def test_every_difference_is_found_and_described() -> None:
    first = {
        "w": torch.tensor([1.0, 2.0, 3.0]), "shape": torch.ones(2), "dtype": torch.ones(2),
        "gone": {"x": torch.ones(1)},
        "zero": torch.tensor([0.0]), "nan": torch.tensor([float("nan"), 1.0]), "lr": 0.1, "kind": 1,
        "list": [1, (2, 3)], "same": float("nan"),
    }  # fmt: skip
    second = {
        "w": torch.tensor([1.0, 2.5, 3.5]), "shape": torch.ones(3), "dtype": torch.ones(2).half(), "new": None,
        "zero": torch.tensor([-0.0]), "nan": torch.tensor([float("nan"), 1.0]), "lr": 0.2, "kind": 1.0,
        "list": [1, (2, 4), 5], "same": float("nan"),
    }  # fmt: skip
    found = {entry.path: entry for entry in compare(first, second, Tolerance(), num_values=1)}
    assert {path: entry.kind for path, entry in found.items()} == {
        "w": "values", "shape": "shape", "dtype": "dtype", "gone": "only in A", "new": "only in B", "zero": "values",
        "lr": "value", "kind": "value", "list/1/1": "value", "list/2": "only in B",
    }  # fmt: skip
    assert found["w"].detail == "2 of 3 elements differ, by at most 0.5; (1,): 2.0 != 2.5"
    assert (found["w"].count, found["w"].largest, found["zero"].largest) == (2, 0.5, 0.0)
    assert found["gone"].detail == "dict of 1 entry, 1 of them tensors"
    assert found["lr"].detail == "0.1 != 0.2"


def test_numbers_within_the_tolerance_are_equal() -> None:
    first = {"w": torch.tensor([1.0, float("inf"), float("nan")]), "n": torch.tensor([1]), "lr": 1.0}
    second = {"w": torch.tensor([1.01, float("inf"), float("nan")]), "n": torch.tensor([2]), "lr": 1.001}
    assert differences(first, second, rtol=0.1) == [("values", "n")]
    assert differences(first, second, atol=0.002) == [("values", "w"), ("values", "n")]
    [inf] = compare(torch.tensor([float("inf")]), torch.tensor([1.0]), Tolerance())
    assert inf.largest == float("inf")
