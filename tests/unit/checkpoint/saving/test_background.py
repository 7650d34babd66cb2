"""AsyncCheckpointIO: what is saved, when callers wait, and that no failure is lost."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loopwright as lw
from loopwright.checkpoint import AsyncCheckpointIO, TorchCheckpointIO, load, save, storage, verify
from loopwright.checkpoint.saving import background
from loopwright.errors import CheckpointError, ConfigError


class Gated(TorchCheckpointIO):
    """Writes when the gate is open, and notes what it does."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.has_begun = threading.Event()
        self.events: list[str] = []
        self.failure: BaseException | None = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None, **options: Any) -> None:
        self.events.append(f"begin {Path(path).name}")
        self.has_begun.set()
        assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        super().save_checkpoint(checkpoint, path, storage_options)
        self.events.append(f"end {Path(path).name}")


@pytest.fixture
def inner() -> Gated:
    return Gated()


def rich_checkpoint() -> dict[str, Any]:
    """Return a checkpoint with everything whose form could be lost in a copy."""
    base = torch.arange(24.0)
    weight = nn.Parameter(base[:6].view(2, 3))
    noted = torch.ones(2)
    noted.note = "own"  # type: ignore[attr-defined]
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return {
        "state_dict": module.state_dict(),  # an OrderedDict with _metadata
        "tied": {"a": weight, "b": weight, "row": base[3:6], "strided": base[::2], "t": base.view(4, 6).t()},
        "kinds": [torch.tensor([1 + 2j]).conj(), torch.eye(2).to_sparse(), torch.empty(0), torch.ones(2).bfloat16()],
        "graph": (torch.ones(2, requires_grad=True) * 2, noted),
        "plain": {"size": torch.Size([2]), "set": {1, 2}, "bytes": bytearray(b"ab"), 3: Counter("aab"), "none": None},
        "trusted": lw.Trusted(Path("x")),
    }


def test_the_file_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    checkpoint = rich_checkpoint()
    save(checkpoint, tmp_path / "sync.ckpt")
    plugin = AsyncCheckpointIO()
    for name in ("a.ckpt", "b.ckpt"):  # the second uses the memory of the first again
        plugin.save_checkpoint(checkpoint, tmp_path / name, also_to=[tmp_path / f"also-{name}"])
    plugin.teardown()
    expected = (tmp_path / "sync.ckpt").read_bytes()
    for name in ("a.ckpt", "b.ckpt", "also-a.ckpt", "also-b.ckpt"):
        assert (tmp_path / name).read_bytes() == expected
    tied = load(tmp_path / "a.ckpt")["tied"]
    tied["a"].data[0, 0] = 77
    assert tied["b"][0, 0] == tied["t"][0, 0] == 77


def test_a_save_returns_before_it_is_written_and_holds_the_state_of_then(tmp_path: Path, inner: Gated) -> None:
    weight, numbers = torch.zeros(3), [1, 2]
    plugin = AsyncCheckpointIO(inner)
    plugin.save_checkpoint({"w": weight, "view": weight[1:], "numbers": numbers}, tmp_path / "a.ckpt")
    weight += 5
    numbers.append(3)
    assert not (tmp_path / "a.ckpt").exists()
    inner.gate.set()
    plugin.wait()
    assert verify(tmp_path / "a.ckpt").sealed
    written = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert written["w"].tolist() == [0, 0, 0]
    assert written["numbers"] == [1, 2]


def test_the_next_save_waits_and_says_so_once(
    tmp_path: Path, inner: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_WORTH_SAYING_S", 0.0)
    plugin = AsyncCheckpointIO(inner)
    plugin.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    assert inner.has_begun.wait(30)
    threading.Timer(0.05, inner.gate.set).start()
    for name in ("b.ckpt", "c.ckpt"):
        plugin.save_checkpoint({"a": 1}, tmp_path / name)
    plugin.wait()
    assert inner.events == [f"{what} {name}.ckpt" for name in "abc" for what in ("begin", "end")]
    assert [record.message.partition(" s for ")[0][:13] for record in caplog.records] == ["a save waited"]


def test_loading_and_removing_wait_for_the_file(tmp_path: Path, inner: Gated) -> None:
    plugin = AsyncCheckpointIO(inner)
    path = tmp_path / "a.ckpt"
    for act in (lambda: plugin.load_checkpoint(path), lambda: plugin.remove_checkpoint(path)):
        inner.gate.clear()
        inner.has_begun.clear()
        plugin.save_checkpoint({"a": 1}, path)
        assert inner.has_begun.wait(30)
        threading.Timer(0.05, inner.gate.set).start()
        act()
        assert inner.events[-1] == "end a.ckpt"
    assert not path.exists()
    inner.failure = CheckpointError("disk full", fix="free space")
    plugin.save_checkpoint({"a": 2}, path)
    with pytest.raises(CheckpointError, match="disk full"):
        plugin.load_checkpoint(tmp_path / "." / "a.ckpt")


def test_a_failure_is_raised_once_by_the_next_call_that_waits(
    tmp_path: Path, inner: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    inner.gate.set()
    inner.failure = failure = CheckpointError("disk full", fix="free space")
    plugin = AsyncCheckpointIO(inner)
    for act in (lambda: plugin.save_checkpoint({"a": 2}, tmp_path / "b.ckpt"), plugin.wait, plugin.teardown):
        plugin.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
        with pytest.raises(CheckpointError) as caught:
            act()
        assert caught.value is failure
        assert f"{str(tmp_path / 'a.ckpt')!r} was saved in the background" in failure.__notes__[-1]
        plugin.teardown()
    assert sum("could not be saved in the background" in record.message for record in caplog.records) == 3

    heard: list[bool] = []
    plugin.on_failure = lambda: heard.append(True)
    plugin.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")

    def fail_and_tear_down() -> None:
        try:
            _ = 1 / 0
        finally:
            plugin.teardown()

    with pytest.raises(ZeroDivisionError):  # the first error is the one to see
        fail_and_tear_down()
    assert heard == [True]
    assert "a checkpoint could not be written, besides ZeroDivisionError" in caplog.text

    inner.failure = SystemExit(3)  # would end no thread of the caller's
    plugin.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="SystemExit: 3"):
        plugin.wait()


def test_content_that_cannot_be_saved_is_refused_at_once(tmp_path: Path, inner: Gated) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\['bad'\]: _?thread\.lock"):
        AsyncCheckpointIO().save_checkpoint({"bad": threading.Lock()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"an object of lock, which cannot be copied"):
        AsyncCheckpointIO(inner).save_checkpoint({"bad": threading.Lock()}, tmp_path / "a.ckpt")
    assert not inner.events
    with pytest.raises(ConfigError, match="Expected a CheckpointIO for AsyncCheckpointIO"):
        AsyncCheckpointIO(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not save in the background"):
        AsyncCheckpointIO(AsyncCheckpointIO())


class InMemory(TorchCheckpointIO):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None, **options: Any) -> None:
        self.kept.append(checkpoint)


def test_a_plugin_that_keeps_what_it_gets_keeps_it_and_may_hold_any_object(tmp_path: Path) -> None:
    plugin = pickle.loads(pickle.dumps(AsyncCheckpointIO(InMemory())))  # a Trainer that starts processes sends it
    inner = plugin.checkpoint_io
    weight = torch.zeros(1000)
    for value in range(3):
        plugin.save_checkpoint({"w": weight.fill_(value), "path": tmp_path}, tmp_path / "a.ckpt")
    plugin.teardown()
    assert [int(kept["w"][0]) for kept in inner.kept] == [0, 1, 2]
    assert inner.kept[0]["path"] == tmp_path


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("stage", ["opened", "synced", "renamed"])
def test_a_kill_during_a_write_leaves_a_complete_file(tmp_path: Path, stage: str) -> None:
    path = tmp_path / "a.ckpt"
    save({"w": torch.zeros(50_000)}, path)
    child = os.fork()
    if child == 0:
        storage.reached = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == stage else None
        plugin = AsyncCheckpointIO()
        plugin.save_checkpoint({"w": torch.ones(50_000)}, path)
        plugin.wait()
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert verify(path).sealed
    assert int(load(path)["w"][0]) == (stage == "renamed")


@pytest.mark.gpu
def test_a_copy_from_a_gpu_does_not_make_the_host_wait_and_holds_the_state_of_then(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 24, device="cuda")
    plugin = AsyncCheckpointIO()
    for value in range(3):
        weight.fill_(value)
        plugin.save_checkpoint({"w": weight, "view": weight[5:]}, tmp_path / f"{value}.ckpt")
        weight.fill_(-1)  # is queued behind the copy
    plugin.teardown()
    for value in range(3):
        written = load(tmp_path / f"{value}.ckpt")
        assert bool((written["w"] == value).all())
        assert written["w"].device.type == "cpu"
