"""What can be counted about the cost of the package: imported modules, frames, Python calls per step. No clocks."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import loopwright as lw

from .sources import ROOT

MOST_MODULES = 104
MOST_FRAMES = 6
# Fewer than in a handwritten loop: `backward`, `step` and `zero_grad` leave out what a plain step has no use for.
MOST_CALLS = -22
# Whether an iterable of the user's own draws from the global generators is watched: exact resume needs that.
MOST_CALLS_OF_AN_ITERABLE = -9
# Per micro-batch of a window of four that is clipped: torch's clipping looks for groups of tensors.
MOST_CALLS_OF_A_WINDOW = -15
# A batch of a validation has little to save calls at.
MOST_CALLS_OF_A_VALIDATION = 4


def python(program: str, folder: Path) -> str:
    """Run a program in a fresh interpreter, outside of the repository, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_torch_and_opens_nothing(tmp_path: Path) -> None:
    program = """
import sys
seen = []
def watch(event, args):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.fork", "os.putenv", "signal.")):
        seen.append(event)
sys.addaudithook(watch)
import os, signal
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
environment = dict(os.environ)
import loopwright
own = sorted(name for name in sys.modules if name.startswith("loopwright"))
assert own == ["loopwright", "loopwright.errors", "loopwright.lazy"], own
assert "torch" not in sys.modules, "torch"
assert "numpy" not in sys.modules, "numpy"
assert not seen, seen
assert environment == dict(os.environ)
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
assert "torch" not in sys.modules
dir(loopwright)
loopwright.ConfigError
loopwright.optim
assert "torch" not in sys.modules, "errors need torch"
"""
    python(program, tmp_path)


def test_the_trainer_adds_few_modules_over_torch(tmp_path: Path, record_property: Any) -> None:
    program = """
import torch, sys
before = set(sys.modules)
import loopwright as lw
lw.Trainer
added = sorted(set(sys.modules) - before)
print(" ".join(added))
"""
    added = python(program, tmp_path).split()
    foreign = [name for name in added if not name.startswith("loopwright")]
    record_property("modules", len(added))
    print(f"lw.Trainer adds {len(added)} modules over torch, {len(foreign)} of them not ours: {' '.join(foreign)}")
    assert len(added) <= MOST_MODULES, added
    heavy = ("torch._dynamo", "torch.utils.tensorboard", "numpy", "rich", "tqdm", "fsspec", "torchmetrics", "omegaconf")
    assert not [name for name in added if name.startswith(heavy)]


def test_defaults_import_nothing_for_a_terminal_or_for_urls_before_the_first_step(tmp_path: Path) -> None:
    program = """
import sys
import torch
import loopwright as lw


class Toy(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        print("loaded:", *sys.modules)


trainer = lw.Trainer(max_epochs=1, limit_train_batches=1, accelerator="cpu", devices=1)
trainer.fit(Toy(), [torch.randn(2, 4)])
"""
    lines = python(program, tmp_path).splitlines()
    loaded = next(line for line in lines if line.startswith("loaded:")).split()
    assert "loopwright.callbacks.progress.live" in loaded
    heavy = ("rich", "fsspec", "tensorboard", "torch.utils.tensorboard", "torch.distributed.checkpoint")
    assert not [name for name in loaded if name in heavy]


def test_no_file_is_imported_twice() -> None:
    # The root is the package: pytest must not import it again under the name of the clone's folder.
    by_file = defaultdict(set)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(ROOT) and ".venv" not in file:
            by_file[str(Path(file).resolve())].add(id(module))
            assert not name.startswith(f"{ROOT.name}.") or ROOT.name == "loopwright", name
    assert not {file: ids for file, ids in by_file.items() if len(ids) > 1}
    assert str(ROOT / "__init__.py") in by_file


# --- a training step ------------------------------------------------------------------------------------------------


class Toy(lw.Module):
    """A network of one layer that counts Python calls from one of its training steps to another."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.first, self.last = first, last
        self.calls = 0
        self.frames: list[str] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.first:
            sys.setprofile(self._count)
        elif batch_idx == self.last:
            sys.setprofile(None)
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                self.frames.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
                frame = frame.f_back
        return self.layer(batch).square().mean()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event == "call"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Validated(Toy):
    """The same, between two of its validation steps."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


STEPS = 50
QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Iterable:
    """Batches in memory, which no DataLoader gives: reading them must not disturb the generators of training."""

    def __len__(self) -> int:
        return STEPS + 20

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 4)] * len(self))


def from_loader() -> Any:
    return DataLoader(torch.ones(2 * (STEPS + 20), 4), batch_size=2, shuffle=True)


def by_hand(batches: Any) -> float:
    """Return the Python calls of a step of the loop that everybody writes."""
    toy = Toy(10, 10 + STEPS)
    optimizer = toy.configure_optimizers()
    toy.train()
    for index, batch in enumerate(batches):
        loss = toy.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return toy.calls / STEPS


@pytest.mark.parametrize("make_batches", [from_loader, Iterable], ids=["DataLoader", "iterable"])
@pytest.mark.parametrize(
    "options", [{"barebones": True}, {**QUIET, "log_every_n_steps": 0}, QUIET], ids=["barebones", "no log", "quiet"]
)
def test_a_step_makes_fewer_python_calls_than_the_handwritten_loop(
    options: dict[str, Any], make_batches: Callable[[], Any], record_property: Any
) -> None:
    gc.disable()  # a finaliser is a call, too
    try:
        toy = Toy(10, 10 + STEPS)
        lw.Trainer(accelerator="cpu", max_epochs=1, **options).fit(toy, make_batches())
        hand = by_hand(make_batches())
    finally:
        gc.enable()
        sys.setprofile(None)
    ours = toy.calls / STEPS
    record_property("calls", ours - hand)
    print(f"{ours:.2f} calls per step, by hand {hand:.2f}: {ours - hand:+.2f}")
    assert ours <= hand + (MOST_CALLS if make_batches is from_loader else MOST_CALLS_OF_AN_ITERABLE)


def test_a_clipped_window_makes_fewer_python_calls_than_the_handwritten_loop() -> None:
    gc.disable()
    try:
        toy, hand = Toy(8, 8 + 48), Toy(8, 8 + 48)
        options = {**QUIET, "accumulate_grad_batches": 4, "gradient_clip_val": 1.0}
        lw.Trainer(accelerator="cpu", max_epochs=1, **options).fit(toy, [torch.ones(2, 4)] * 64)
        optimizer = hand.configure_optimizers()
        hand.train()
        for index, batch in enumerate([torch.ones(2, 4)] * 64):
            loss = hand.training_step(batch, index) / 4
            loss.backward()
            if index % 4 == 3:
                torch.nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        gc.enable()
        sys.setprofile(None)
    print(f"{(toy.calls - hand.calls) / 48:+.2f} calls per micro-batch")
    assert toy.calls <= hand.calls + 48 * MOST_CALLS_OF_A_WINDOW


def test_a_validation_makes_few_more_python_calls_than_the_handwritten_loop() -> None:
    gc.disable()
    try:
        toy, hand = Validated(10, 10 + STEPS), Validated(10, 10 + STEPS)
        trainer = lw.Trainer(accelerator="cpu", **QUIET)
        trainer.validate(toy, [torch.ones(2, 4)] * (STEPS + 20), verbose=False)
        with torch.inference_mode():
            for index, batch in enumerate([torch.ones(2, 4)] * (STEPS + 20)):
                hand.validation_step(batch, index)
    finally:
        gc.enable()
        sys.setprofile(None)
    print(f"{(toy.calls - hand.calls) / STEPS:+.2f} calls per batch")
    assert toy.calls <= hand.calls + STEPS * MOST_CALLS_OF_A_VALIDATION


def test_few_frames_lie_between_fit_and_the_step() -> None:
    toy = Toy(10, 20)
    lw.Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(toy, from_loader())
    depth = [name.rsplit(".", 1)[-1] for name in toy.frames].index("fit") + 1
    print(f"{depth} frames: {' <- '.join(toy.frames[:depth])}")
    assert depth <= MOST_FRAMES, toy.frames[:depth]


# --- the start of a fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("walk", "most_calls", "most_changes"), [("start", 625, 250), ("ckpt_path", 1000, 285)])
def test_a_fit_starts_in_few_calls(walk: str, most_calls: int, most_changes: int) -> None:
    spec = importlib.util.spec_from_file_location("walks", ROOT / "benchmarks" / "walks.py")
    assert spec is not None
    assert spec.loader is not None
    walks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(walks)
    found = walks.run(walk)
    print(f"{walk}: {found['num_calls']} calls, {found['num_changes']} changes of folder, until on_train_start")
    assert found["num_calls"] <= most_calls
    assert found["num_changes"] <= most_changes
