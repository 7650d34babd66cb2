from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.checkpoint import load, remove, save, storage, verify
from loopwright.errors import CheckpointError


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "state_dict": {"w": torch.randn(3, 2), "half": torch.ones(2, dtype=torch.bfloat16)},
        "text": "\u00e9",
        "number": 2**100,
        "nested": [{"a": (1, 2.5, None, True)}, {3}],
    }
    save(state, tmp_path / "a.ckpt")
    loaded = load(tmp_path / "a.ckpt")
    assert torch.equal(loaded["state_dict"].pop("w"), state["state_dict"].pop("w"))
    assert torch.equal(loaded["state_dict"].pop("half"), state["state_dict"].pop("half"))
    assert loaded == state


def test_parents_are_made_and_nothing_else_is_left(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, tmp_path / "a" / "b" / "c.ckpt")
    assert os.listdir(tmp_path / "a" / "b") == ["c.ckpt"]


@pytest.mark.parametrize(
    "name", ["\u00fcber.ckpt", "with space.ckpt", "n" * 240 + ".ckpt", "\u00fc" * 120 + ".ckpt", "noending"]
)
def test_all_file_names_work(tmp_path: Path, checkpoint: dict[str, Any], name: str) -> None:
    save(checkpoint, str(tmp_path / name))
    assert os.listdir(tmp_path) == [name]
    assert verify(tmp_path / name).sealed


def test_file_urls_are_local_paths(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, f"file://{tmp_path}/a%20b.ckpt")
    assert (tmp_path / "a b.ckpt").is_file()
    assert load(f"file://{tmp_path}/a%20b.ckpt")["epoch"] == 3


def test_relative_paths_and_the_home_folder_work(
    tmp_path: Path, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    save(checkpoint, "a.ckpt")
    save(checkpoint, "~/b.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]
    assert load("a.ckpt")["epoch"] == load("~/b.ckpt")["epoch"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path, saved: Path, checkpoint: dict[str, Any]) -> None:
    before = saved.read_bytes()
    link = tmp_path / "last.ckpt"
    link.symlink_to(saved)
    save({**checkpoint, "epoch": 9}, link)
    assert not link.is_symlink()
    assert saved.read_bytes() == before


def test_the_file_has_the_permissions_that_the_user_wants(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    before = os.umask(0o027)
    try:
        save(checkpoint, tmp_path / "a.ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.ckpt").stat().st_mode) == 0o640


@pytest.mark.parametrize("wanted", [True, False])
def test_the_users_crc_option_is_restored_and_not_used(
    tmp_path: Path, checkpoint: dict[str, Any], wanted: bool
) -> None:
    torch.serialization.set_crc32_options(wanted)
    try:
        save(checkpoint, tmp_path / "a.ckpt")
        assert torch.serialization.get_crc32_options() is wanted
        with pytest.raises(CheckpointError):
            save(checkpoint, tmp_path)
        assert torch.serialization.get_crc32_options() is wanted
    finally:
        torch.serialization.set_crc32_options(True)
    weight = checkpoint["state_dict"]["layer.weight"].numpy().tobytes()
    content = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "a.ckpt").write_bytes(content.replace(weight, weight[::-1]))
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        verify(tmp_path / "a.ckpt")


def test_stages_are_reached_in_order(
    tmp_path: Path, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(storage, "reached", seen.append)
    save(checkpoint, tmp_path / "a.ckpt")
    assert tuple(seen) == storage.STAGES


def test_the_file_and_its_folder_are_synced(
    tmp_path: Path, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(checkpoint, tmp_path / "new" / "a.ckpt")
    made, written, folder = synced
    assert made == tmp_path.name  # the new folder's entry
    assert written.startswith(".a.ckpt.tmp-")
    assert folder == "new"


def test_what_is_not_plain_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\['a'\]: "):
        save({"a": object()}, tmp_path / "new" / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_tensors_that_share_memory_under_two_dtypes_are_named(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"\['a'\] and checkpoint\['b'\] share memory") as raised:
        save({"a": tensor, "b": tensor.view(torch.int32)}, tmp_path / "a.ckpt")
    assert ".clone()" in str(raised.value)
    assert os.listdir(tmp_path) == []


def test_mmap_leaves_tensors_on_the_disk_and_saving_over_the_file_is_safe(
    saved: Path, checkpoint: dict[str, Any]
) -> None:
    loaded = load(saved, mmap=True)
    save({**checkpoint, "state_dict": {"layer.weight": torch.zeros(2, 3)}}, saved)
    assert loaded["state_dict"]["layer.weight"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_map_location_is_passed_on(saved: Path) -> None:
    assert load(saved, map_location="meta")["state_dict"]["layer.weight"].device.type == "meta"


def test_verification_can_be_left_out(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[content.index(torch.ones(2, 3).numpy().tobytes())] ^= 1
    saved.write_bytes(content)
    assert load(saved, verify=False)["epoch"] == 3
    with pytest.raises(FileNotFoundError):
        load(saved.with_name("missing.ckpt"), verify=False)
    with pytest.raises(CheckpointError, match="folder"):
        load(saved.parent, verify=False)


def test_a_foreign_file_with_a_bomb_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    torch.save({"a": Bomb(str(mark))}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="weights_only=False") as raised:
        load(tmp_path / "a.pt")
    assert "mkdir" in str(raised.value)
    assert isinstance(raised.value.__cause__, pickle.UnpicklingError)
    assert not mark.exists()


def test_a_foreign_file_is_unpickled_when_the_user_says_so(tmp_path: Path) -> None:
    torch.save({"a": range(3)}, tmp_path / "a.pt")
    assert load(tmp_path / "a.pt", weights_only=False) == {"a": range(3)}
    assert load(tmp_path / "a.pt", weights_only=False, verify=False) == {"a": range(3)}
    torch.save({"a": range(3)}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    assert load(tmp_path / "b.pt", weights_only=False) == {"a": range(3)}


def test_the_old_format_of_torch_loads(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert not verify(tmp_path / "a.pt").sealed
    assert load(tmp_path / "a.pt")["a"].tolist() == [1, 1]


def test_a_bomb_in_a_bare_pickle_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Bomb(str(mark)), protocol=2))
    with pytest.raises(CheckpointError):
        load(tmp_path / "a.ckpt")
    assert not mark.exists()


def test_a_file_like_lightnings_loads(tmp_path: Path) -> None:
    state = {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": torch.nn.Linear(2, 2).state_dict(),
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "hparams_name": "kwargs",
    }
    torch.save(state, tmp_path / "epoch=1.ckpt")
    loaded = load(tmp_path / "epoch=1.ckpt")
    assert list(loaded) == list(state)
    assert torch.equal(loaded["state_dict"]["weight"], state["state_dict"]["weight"])  # type: ignore[index]


def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="got a Tensor"):
        load(tmp_path / "a.pt")


def test_remove_takes_files_only(saved: Path) -> None:
    remove(saved)
    assert not saved.exists()
    remove(saved)
    with pytest.raises(CheckpointError, match="Is a directory"):
        remove(saved.parent)
    assert saved.parent.is_dir()


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import loopwright.checkpoint; "
        "heavy = {'numpy', 'fsspec', 'omegaconf', 'torch.distributed', 'torch._dynamo'}; "
        "print(sorted(heavy & set(sys.modules) - before))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"
