"""A Trainer that saves folders: ModelCheckpoint's books and files, faults of one rank, shared verification."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import signal
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_ranks import Ranks
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from loopwright.checkpoint import TorchCheckpointIO, load, reading, verify
from loopwright.checkpoint.sharded import copying, is_folder_checkpoint, stages
from loopwright.errors import CheckpointError, StopBySignal
from loopwright.strategies import FSDPStrategy
from loopwright.strategies.distributed import shards

# Any in this file: what users' steps take and return, and results that travel between processes.


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401  # here once, and not in every child


class Net(lw.Module):
    """Logs a score whose course is known: 5, 3, 4, 1, 2, 6, ... by step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        step = self.trainer.global_step
        self.log("score", torch.tensor([5.0, 3.0, 4.0, 1.0, 2.0, 6.0, 7.0, 8.0][step % 8]))
        return nn.functional.mse_loss(self.last(self.first(x).tanh()), y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self.last(self.first(x).tanh()), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-2)


class At(Callback):
    """Calls something when a step begins."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.action()


def loader(size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(72, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(72, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), batch_size=12 // size, shuffle=True)


def trainer_of(size: int, *callbacks: Any, form: str = "sharded", **arguments: Any) -> lw.Trainer:
    return lw.Trainer(
        accelerator="cpu", devices=size, strategy=FSDPStrategy(state_dict_type=form), precision="64-true",
        callbacks=list(callbacks), logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, **{"max_steps": 6, "enable_checkpointing": bool(callbacks), **arguments},
    )  # fmt: skip


def fit(size: int, *callbacks: Any, ckpt_path: Any = None, **arguments: Any) -> tuple[lw.Trainer, Net]:
    lw.seed_everything(5, verbose=False)
    trainer, module = trainer_of(size, *callbacks, **arguments), Net()
    trainer.fit(module, loader(size), ckpt_path=ckpt_path)
    return trainer, module


def whole(module: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        return [p.full_tensor().clone() if hasattr(p, "full_tensor") else p.clone() for p in module.parameters()]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def flip(path: Path) -> None:
    """Change one byte of the content of a file of a folder checkpoint, and keep its size and time."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    place = len(content) - 1 if path.suffix == ".safetensors" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextmanager
def said() -> Iterator[list[str]]:
    """Return what is logged in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("loopwright")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# -- ModelCheckpoint --------------------------------------------------------------------------------------------------


def best_and_last(rank: int, size: int, root: Path) -> None:
    """Keep two of each step's, and `last`; go on from a run that was killed, with its newest checkpoint torn."""

    def books(**options: Any) -> ModelCheckpoint:
        given = {"monitor": "score", "save_top_k": 2, "every_n_train_steps": 1, "save_last": True, **options}
        return ModelCheckpoint(root, "{step}", **given)

    straight = whole(fit(size)[1])
    first = books()
    fit(size, first, max_steps=5)
    assert names(root) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert Path(first.best_model_path).name == "step=4.ckpt"
    assert all(verify(root / name).sealed and is_folder_checkpoint(root / name) for name in names(root))
    # The newest one is torn: it is named, and the one before is taken.
    torch.distributed.barrier()
    if rank == 0:
        flip(next((root / "last.ckpt").glob("shard-*-00001-of-*")))
    torch.distributed.barrier()
    again = books()
    with warnings.catch_warnings(record=True) as told, said() as lines:
        warnings.simplefilter("always")
        trainer, module = fit(size, again, ckpt_path="last")
    assert any("last.ckpt is damaged and skipped" in str(one.message) for one in told) == (rank == 0)
    assert f"resuming from {root / 'step=5.ckpt'}" in lines
    assert all(torch.equal(one, other) for one, other in zip(whole(module), straight, strict=True))
    assert names(root) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    assert all(verify(root / name).sealed for name in names(root))
    assert load(root / "last.ckpt")["global_step"] == 6
    (metrics,) = trainer.test(module, loader(size), ckpt_path="best", verbose=False)
    (wanted,) = trainer.test(Net(), loader(size), ckpt_path=root / "step=4.ckpt", verbose=False)
    assert metrics == pytest.approx(wanted, rel=1e-12)  # the loader shuffles


def last_as_link(rank: int, size: int, root: Path) -> None:
    """Let `last` be a link to the newest folder; a kill came before it moved; then it is to be a folder."""
    fit(size, ModelCheckpoint(root, "{step}", every_n_train_steps=2, save_last="link"))
    assert names(root) == ["last.ckpt", "step=6.ckpt"]
    assert os.readlink(root / "last.ckpt") == "step=6.ckpt"
    assert verify(root / "last.ckpt").sealed
    torch.distributed.barrier()
    if rank == 0:
        (root / "last.ckpt").unlink()
    torch.distributed.barrier()
    fit(size, ModelCheckpoint(root, "{step}", every_n_train_steps=2, save_last=True), ckpt_path="last")
    assert names(root) == ["last.ckpt", "step=6.ckpt"]
    assert not os.path.islink(root / "last.ckpt")
    assert verify(root / "last.ckpt").sealed
    loaded = [load(root / name) for name in names(root)]
    assert all(torch.equal(loaded[0]["state_dict"][name], value) for name, value in loaded[1]["state_dict"].items())


def other_form(rank: int, size: int, root: Path) -> None:
    """Go on with the other form: what stood at a path that is written again makes way, and goes."""
    forms: list[tuple[str, Any, int]] = [
        ("full", True, 2), ("sharded", True, 4), ("full", True, 6), ("sharded", True, 8), ("sharded", "link", 10),
    ]  # fmt: skip
    for plugins in (None, lw.AsyncCheckpointIO()):
        folder = root / ("async" if plugins else "sync")
        for form, kind, steps in forms:
            last = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last=kind)
            fit(size, last, form=form, max_steps=steps, ckpt_path="last" if steps > 2 else None, plugins=plugins)
            case = (folder.name, form, kind, names(folder))
            assert names(folder) == ["last.ckpt", f"step={steps}.ckpt"], case
            assert os.path.islink(folder / "last.ckpt") == (kind == "link"), case
            assert is_folder_checkpoint(folder / "last.ckpt") == (form == "sharded"), case
            assert load(folder / "last.ckpt")["global_step"] == steps, case
            torch.distributed.barrier()


def retained(rank: int, size: int, root: Path) -> None:
    """Versions for names that are taken, and weights alone."""
    for _ in range(2):
        fit(size, ModelCheckpoint(root, "weights", every_n_train_steps=3, save_weights_only=True), max_steps=3)
    assert names(root) == ["weights-v1.ckpt", "weights.ckpt"]
    assert "optimizer_states" not in load(root / "weights.ckpt")
    with pytest.raises(CheckpointError, match="has weights only"):
        fit(size, ckpt_path=root / "weights.ckpt")


def full_disk(rank: int, size: int, root: Path) -> None:
    """Let rank 1 have no room at the second save."""

    def limit() -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))

    save = ModelCheckpoint(root, "{step}", every_n_train_steps=2, save_last=True, save_on_exception=True)
    with pytest.raises(CheckpointError, match="rank 1: .*File too large"):
        fit(size, save, At(3, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.distributed.barrier()  # rank 0 has cleaned up
    assert names(root) == ["last.ckpt", "step=2.ckpt"]
    assert Path(save.best_model_path).name == "step=2.ckpt"
    assert all(verify(root / name).sealed and load(root / name)["global_step"] == 2 for name in names(root))


def damaged(rank: int, size: int, root: Path) -> None:
    """Let one file of a folder be torn: every rank hears of it, though one has read it."""
    fit(size, ModelCheckpoint(root, "{step}", every_n_train_steps=2), max_steps=2)
    path = root / "step=2.ckpt"
    for file in sorted(path.iterdir()):
        torch.distributed.barrier()
        if rank == 0:
            flip(file)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match="damaged|manifest") as caught:
            fit(size, ckpt_path=path)
        notes = getattr(caught.value, "__notes__", [])
        has_read = torch.tensor(float(not any("was raised on rank" in note for note in notes)))
        torch.distributed.all_reduce(has_read)
        assert has_read == (2 if file.name == "manifest.json" else 1), (file.name, str(caught.value))
        if rank == 0:
            flip(file)


def on_two_ranks(rank: int, size: int, root: Path) -> None:
    best_and_last(rank, size, root / "best")
    last_as_link(rank, size, root / "link")
    other_form(rank, size, root / "form")
    retained(rank, size, root / "retained")
    damaged(rank, size, root / "damaged")
    full_disk(rank, size, root / "full")


def test_model_checkpoint_keeps_its_promises_with_folders(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path, connect=False)


# -- errors and kills -------------------------------------------------------------------------------------------------


def fail_alone(rank: int, size: int, root: Path, failing: int) -> Any:
    """Let one rank raise in a run that saves on exceptions; return what this rank logged."""

    def fail() -> None:
        if rank == failing:
            raise ValueError("a bad sample")

    save = ModelCheckpoint(root, "{step}", every_n_train_steps=2, save_on_exception=True)
    with said() as lines, pytest.raises((ValueError, lw.LoopwrightError), match="a bad sample"):
        fit(size, save, OnExceptionCheckpoint(root), At(3, fail))
    return lines


@pytest.mark.parametrize("failing", [0, 1])
def test_after_an_error_of_one_rank_nothing_is_gathered_and_nobody_waits(tmp_path: Path, failing: int) -> None:
    lines = run_ranks(fail_alone, 2, tmp_path, failing, connect=False)[0]  # collectives would wait for half an hour
    assert any("ModelCheckpoint: nothing is saved on" in line and "the model is sharded" in line for line in lines), (
        lines
    )
    assert any("OnExceptionCheckpoint: nothing" in line and "spread over all" in line for line in lines), lines
    assert names(tmp_path) == ["step=2.ckpt"]
    assert load(tmp_path / "step=2.ckpt")["global_step"] == 2


def stopped_by_signal(rank: int, size: int, root: Path) -> Any:
    def stop() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    save = ModelCheckpoint(root, "{step}", every_n_train_steps=50, save_on_exception=True)
    with pytest.raises(StopBySignal):
        fit(size, save, At(3, stop))
    lw.seed_everything(9, verbose=False)
    found = [*root.glob("*.ckpt")]
    _, module = fit(size, ckpt_path=found[0])
    return [path.name for path in found], whole(module)


def test_a_signal_stops_all_ranks_and_they_save_a_folder_together(tmp_path: Path) -> None:
    first, second = run_ranks(stopped_by_signal, 2, tmp_path, connect=False)
    straight, _ = run_ranks(run_straight, 2, connect=False)
    assert first[0] == second[0]
    (name,) = first[0]
    assert is_folder_checkpoint(tmp_path / name)
    for weights in (first[1], second[1]):
        assert all(torch.equal(one, other) for one, other in zip(weights, straight, strict=True))


def run_straight(rank: int, size: int, *_: Any) -> list[Tensor]:
    return whole(fit(size)[1])


def resume(rank: int, size: int, root: Path) -> list[Tensor]:
    return whole(fit(size, ModelCheckpoint(root, "{step}", every_n_train_steps=2), ckpt_path="last")[1])


def killed(rank: int, size: int, store: Any, root: Path, victim: int, stage: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), LOCAL_WORLD_SIZE=str(size))

    def arm() -> None:
        if rank == victim:
            stages.reached = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == stage else None

    fit(size, ModelCheckpoint(root, "{step}", every_n_train_steps=2), At(3, arm))


def test_a_rank_killed_during_a_save_is_named_and_the_run_goes_on_from_the_save_before(tmp_path: Path) -> None:
    straight = run_ranks(run_straight, 2, connect=False)
    for victim, stage in ((1, "shard-written"), (0, "cleaned")):
        root = tmp_path / f"{victim}-{stage}"
        ended = Ranks(killed, 2, root, victim, stage).wait()
        other = ended[1 - victim]
        case = f"{victim} {stage}: {other}"
        assert ended[victim].code == -signal.SIGKILL, case
        assert other.code not in (0, None), case
        assert f"rank {victim}" in other.said, case
        assert "without a report" in other.said, case
        # Committed, or not begun: the one before is removed only when the new one is whole.
        found = [name for name in names(root) if not name.startswith(".")]
        assert found == (["step=2.ckpt", "step=4.ckpt"] if stage == "cleaned" else ["step=2.ckpt"]), case
        assert all(verify(root / name).sealed for name in found), case
        for resumed, wanted in zip(run_ranks(resume, 2, root, connect=False), straight, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(resumed, wanted, strict=True)), case
        assert names(root) == ["step=6.ckpt"], case


# -- at a URL, and by hand --------------------------------------------------------------------------------------------


def at_a_url(rank: int, size: int) -> None:
    """Train on one process, whose memory is the store."""
    url = f"memory://{uuid.uuid4().hex}/run"
    save = ModelCheckpoint(url, "{step}", every_n_train_steps=1, monitor="score", save_top_k=2, save_last=True)
    _, straight = fit(size)
    fit(size, save, max_steps=4)
    import fsspec

    store = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    assert sorted(name.rpartition("/")[2] for name in store.ls(root, detail=False)) == [
        "last.ckpt", "step=2.ckpt", "step=4.ckpt"
    ]  # fmt: skip
    store.pipe_file(f"{root}/unfinished.ckpt/state-1-ab.ckpt", b"x")
    last = ModelCheckpoint(url, "{step}", every_n_train_steps=1, monitor="score", save_top_k=2, save_last=True)
    assert {path.rpartition("/")[2] for path in last.find_last(trainer_of(size, last))} == {
        "last.ckpt", "step=2.ckpt", "step=4.ckpt"
    }  # fmt: skip
    with said() as lines:
        _, module = fit(size, last, ckpt_path="last", form="full")
    assert any("resuming from memory:" in line for line in lines), lines
    assert all(torch.equal(one, other) for one, other in zip(whole(module), whole(straight), strict=True))
    assert store.isfile(f"{root}/last.ckpt")
    assert not store.exists(f"{root}/last-v1.ckpt")


class Slow(TorchCheckpointIO):
    """Writes on rank 0 when rank 1 is about to read."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None, **options: Any) -> None:
        while not self.flag.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        super().save_checkpoint(checkpoint, path, storage_options, **options)


def by_hand(rank: int, size: int, root: Path, strategy: str) -> None:
    """Read at once on both ranks what rank 0 alone is still writing."""
    plugin = lw.AsyncCheckpointIO(Slow(root / "flag"))
    fabric = lw.Fabric(
        accelerator="cpu", devices=size, plugins=plugin,
        strategy=FSDPStrategy(state_dict_type="full") if strategy == "fsdp" else strategy,
    )  # fmt: skip
    fabric.launch()
    model = fabric.setup_module(nn.Linear(4, 3))
    state = {"model": model, "step": 7}
    fabric.save(root / "a.ckpt", state)
    before = whole(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state["step"] = 0
    if rank == 1:
        (root / "flag").touch()
    fabric.load(root / "a.ckpt", state)
    assert state["step"] == 7
    assert all(torch.equal(one, other) for one, other in zip(whole(model), before, strict=True))
    fabric.teardown()


def test_fabric_waits_on_all_ranks_for_what_one_is_writing(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        (tmp_path / strategy).mkdir()
        run_ranks(by_hand, 2, tmp_path / strategy, strategy, connect=False)


class Racing(TorchCheckpointIO):
    """Lets another checkpoint take the place of the one at the path when rank 0 has read it and rank 1 has not."""

    def __init__(self, folder: Path, rank: int, *, times: int) -> None:
        self.folder, self.rank, self.left = folder, rank, times
        self.num_loads = 0

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: Any = True, *, lazy: bool = False, verify: bool = True
    ) -> Any:
        self.num_loads += 1
        flag = self.folder / f"read-{self.num_loads}-{self.left}"
        if self.rank == 1 and self.left:
            while not flag.exists():
                time.sleep(0.001)
            put(self.folder / ("second" if self.num_loads % 2 else "first"), path)
        self.left -= bool(self.left)
        loaded = super().load_checkpoint(path, map_location, weights_only, lazy=lazy, verify=verify)
        flag.touch()
        return loaded


def put(source: Path, path: Path) -> None:
    """Replace what is at the path, as a save does."""
    if source.is_dir():
        copying.copy(source, path)
    else:
        shutil.copy(source, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


def read_while_replaced(rank: int, size: int, root: Path, strategy: str) -> list[Any]:
    """Return, for 1, 2 and many replacements, what a rank has of its model when it has loaded, or the error."""
    reading._PAUSES_S = (0.0, 0.0)
    fabric = lw.Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(nn.Linear(4, 3))
    for value, name in ((1.0, "first"), (2.0, "second")):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        fabric.save(root / name, {"model": model, "value": value})
    found: list[Any] = []
    for times in (1, 2, 100):
        io = Racing(root / str(times), rank, times=times)
        path = root / f"{times}.ckpt"
        if rank == 0:
            io.folder.mkdir()
            put(root / "first", path)
            for name in ("first", "second"):
                (io.folder / name).symlink_to(root / name)
        fabric.barrier()
        fabric.strategy.checkpoint_io = io
        state: dict[str, Any] = {"model": model, "value": 0.0}
        try:
            fabric.load(path, state)
        except CheckpointError as error:
            found.append(str(error))
        else:
            own = torch.cat([part.detach().flatten() for part in shards.local(model.parameters())])
            found.append({state["value"], *own.tolist()})
        fabric.barrier()
    fabric.teardown()
    return found


def test_ranks_that_load_while_a_save_replaces_it_have_the_same_checkpoint(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        (tmp_path / strategy).mkdir()
        one, other = run_ranks(read_while_replaced, 2, tmp_path / strategy, strategy, connect=False)
        assert one[:2] == other[:2] == [{2.0}, {1.0}], strategy
        assert one[2] == other[2]
        # Rank 0 has read, and perhaps not yet looked again, when the other takes its place.
        assert re.match("rank (0, )?1 found another checkpoint at", one[2]), one[2]
        assert "3 times" in one[2]


def test_a_remote_folder_is_found_replaced_and_resumed() -> None:
    run_ranks(at_a_url, 1, connect=False)
