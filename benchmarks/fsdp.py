"""The overhead of a trainer over a hand-written loop with fully_shard, and the memory of a rank; run.py prints it.

This file is also the program that is measured, which starts the other processes itself:
`python benchmarks/fsdp.py steps 30 3 1`, `python benchmarks/fsdp.py memory 2`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import loopwright as lw
from loopwright.strategies import FSDPStrategy

# Any in this file: what the measured programs print, and torch's untyped hooks.

RANKS = 2
MODES = ("hand", "fabric", "trainer")
NAMES = ("hand-written fully_shard", "Fabric", "Trainer")
BLOCKS = 8
WIDTHS = (128, 512, 1024)  # a block has about WIDTH**2 elements
BATCH_SIZE = 8
WARM_UP = 5
MEMORY_WIDTH = 1024

# Large tensors get separate pages, which are freed immediately: the memory of the process is that of its tensors.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


# --- tables for run.py ----------------------------------------------------------------------------------------------


def measure_fsdp(*, num_steps: int, rounds: int, is_quick: bool = False) -> dict[str, Any]:
    """Measure in processes of their own: steps and calls on two ranks, memory on one, two and four."""
    sizes = run_program(__file__, "steps", num_steps, rounds, 1 if is_quick else len(WIDTHS))["sizes"]
    memory = [run_program(__file__, "memory", ranks, **EXACT_MEMORY) for ranks in ((2,) if is_quick else (1, 2, 4))]
    return {"sizes": sizes, "memory": memory}


def run_program(*arguments: object, python: str = sys.executable, **variables: str) -> dict[str, Any]:
    """Run a program and return the numbers of the one line of JSON that it prints.

    The first argument is a file, or the name of a module in a folder below this one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **variables}
    is_file = str(arguments[0]).endswith(".py")
    command = [python, *([] if is_file else ["-m"]), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr}")
    numbers: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return numbers


# --- what is trained --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One unit: a layer that adds to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        more: Tensor = self.layer(x).relu()
        return x + more


class Stack(nn.Module):
    """Blocks of equal size, whose forward returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the loss, shape ()."""
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Step(lw.Module):
    """The same for the Trainer."""

    def __init__(self, stack: Stack, mark: Callable[[], object]) -> None:
        super().__init__()
        self.stack = stack
        self._mark = mark

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._mark()
        loss: Tensor = self.stack(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def make(width: int) -> Stack:
    """Return a stack that always has the same weights."""
    torch.manual_seed(0)
    return Stack(width)


def shard_by_hand(stack: Stack) -> Stack:
    from torch.distributed.fsdp import fully_shard

    for block in stack.blocks:
        fully_shard(block)
    fully_shard(stack)
    return stack


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def strategy() -> FSDPStrategy:
    return FSDPStrategy(auto_wrap_policy={Block})


def trainer_for(ranks: int, **options: Any) -> lw.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return lw.Trainer(accelerator="cpu", devices=ranks, strategy=strategy(), **{**quiet, "max_epochs": 1, **options})


# --- steps and calls --------------------------------------------------------------------------------------------------


class Marks:
    """Notes time, or calls of Python and C functions, at the beginning of each step."""

    def __init__(self, *, counts_calls: bool) -> None:
        self.counts_calls = counts_calls
        self.values: list[tuple[float, float]] = []
        self._counts = {"call": 0, "c_call": 0}

    def note(self) -> None:
        if self.counts_calls:
            self.values.append((self._counts["call"], self._counts["c_call"]))
        else:
            self.values.append((time.perf_counter(), time.process_time()))

    def __enter__(self) -> Marks:
        if self.counts_calls:
            gc.collect()
            gc.disable()  # what it calls comes now and then
            sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event in self._counts:
            self._counts[event] += 1

    def differences(self) -> list[tuple[float, float]]:
        """Return what each step took, without the first ones."""
        kept = self.values[WARM_UP:]
        return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(kept)]


def train(mode: str, fabric: lw.Fabric, width: int, data: list[Tensor], marks: Marks) -> nn.Module:
    """Train one epoch in one of the ways and return the module."""
    own = data[fabric.global_rank :: fabric.world_size]
    stack = make(width)
    if mode == "hand":
        shard_by_hand(stack)
        optimizer = optimizer_of(stack)
        with marks:
            for batch in own:
                marks.note()
                loss = stack(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    elif mode == "fabric":
        model, ready = fabric.setup(stack, optimizer_of(stack))
        with marks:
            for batch in own:
                marks.note()
                loss = model(batch)
                ready.zero_grad()
                fabric.backward(loss)
                ready.step()
    else:
        module = Step(stack, marks.note)
        trainer = trainer_for(fabric.world_size)
        with marks:
            trainer.fit(module, data)
    return stack


def local_parts(module: nn.Module) -> list[Tensor]:
    return [local(one).detach().clone() for one in module.parameters()]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, in the memory that a DTensor has."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def time_steps(num_steps: int, rounds: int, num_sizes: int) -> None:
    """Print the time of a step hand-written, with Fabric and with the Trainer, in turns on the same processes."""
    fabric = lw.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy())
    fabric.launch()

    def run(mode: str, width: int, data: list[Tensor], marks: Marks) -> list[Tensor]:
        return local_parts(train(mode, fabric, width, data, marks))

    sizes = [
        measure_size(run, width, num_steps, rounds, counts_calls=width == WIDTHS[0]) for width in WIDTHS[:num_sizes]
    ]
    if fabric.is_global_zero:
        print(json.dumps({"sizes": sizes}), flush=True)


def measure_size(
    run: Callable[[str, int, list[Tensor], Marks], list[Tensor]],
    width: int,
    num_steps: int,
    rounds: int,
    *,
    counts_calls: bool,
) -> dict[str, Any]:
    """Return times and calls of a step in each of the modes, in turns, and whether the weights are equal.

    Args:
        run: Trains in a mode, with a model of a width, on the batches of all ranks, and returns copies of the weights.
        width: Features of a layer.
        num_steps: Steps that count.
        rounds: How often each mode is timed.
        counts_calls: Whether calls are counted in one more round.
    """
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    calls: dict[str, tuple[float, float]] = {}
    weights: dict[str, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(BATCH_SIZE, width, generator=generator) for _ in range((num_steps + WARM_UP) * RANKS)]
    for is_counting in [False] * rounds + [True] * counts_calls:
        for mode in MODES:
            marks = Marks(counts_calls=is_counting)
            with silence():
                weights[mode] = run(mode, width, data, marks)
            if is_counting:
                python, c = zip(*marks.differences(), strict=True)
                calls[mode] = (min(python), min(c))  # threads that end, and the like, add some
            else:
                found[mode] += marks.differences()
    return {
        "elements": width * width + width,
        "calls": calls,
        "modes": {
            mode: {
                "wall_us": 1e6 * statistics.median(wall for wall, _ in values),
                "cpu_us": 1e6 * statistics.median(cpu for _, cpu in values),
                "weights_equal": all(map(torch.equal, weights["hand"], weights[mode])),
            }
            for mode, values in found.items()
        },
    }


# --- memory -----------------------------------------------------------------------------------------------------------


class LiveTensors(TorchDispatchMode):
    """Knows the storages that operations have made, and how many bytes were alive at most after one of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, Tensor):
                self.watch(local(one))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's memory from now on; those that operations take or make are counted anyway."""
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is not storage:
            self._storages[id(storage)] = weakref.ref(storage)

    def live_bytes(self) -> int:
        """Return the bytes of those that are alive; fully_shard gives memory back by resizing them to nothing."""
        alive = {key: storage for key, one in self._storages.items() if (storage := one()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def status_bytes(field: str) -> int:
    """Return a field of this process's status; Linux only."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


@contextlib.contextmanager
def peak_of_process(into: dict[str, Any], name: str) -> Iterator[None]:
    """Note how many bytes the process needed at most, over those that it had; nothing where the system does not say."""
    if not os.path.exists("/proc/self/clear_refs"):
        yield
        return
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # forget the highest memory so far
    before = status_bytes("VmRSS")
    yield
    into[name] = status_bytes("VmHWM") - before


def measure_memory(ranks: int) -> None:
    """Print what rank 0 needs: between two steps, at the peak of a step, and while the model is built."""
    fabric = lw.Fabric(accelerator="cpu", devices=ranks, strategy=strategy())
    fabric.launch()
    numbers: dict[str, Any] = {"ranks": ranks}
    batch = torch.randn(BATCH_SIZE, MEMORY_WIDTH)

    def step() -> None:
        fabric.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()

    with silence():
        with fabric.init_module():  # what is imported and connected at the first time
            warm = Stack(64)
        fabric.setup_module(warm)
        with peak_of_process(numbers, "build_process_bytes"):
            with fabric.init_module():
                stack = make(MEMORY_WIDTH)
            model = fabric.setup_module(stack)
        numbers["parameters"] = sum(one.numel() for one in stack.parameters())
        numbers["unit"] = sum(one.numel() for one in stack.blocks[0].parameters())
        optimizer = fabric.setup_optimizers(optimizer_of(model))
        step()
        with peak_of_process(numbers, "step_process_bytes"):
            step()
        with LiveTensors() as live:
            for one in [*stack.parameters(), *tree_leaves([*optimizer.state.values()])]:
                live.watch(local(one))
            step()
            numbers["resting_bytes"] = live.live_bytes()
        numbers["peak_bytes"] = live.peak_bytes
    if fabric.is_global_zero:
        print(json.dumps(numbers), flush=True)


def main() -> None:
    if sys.argv[1] == "steps":
        time_steps(*map(int, sys.argv[2:5]))
    else:
        measure_memory(int(sys.argv[2]))


if __name__ == "__main__":
    main()
