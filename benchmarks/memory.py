"""How much memory a rank needs under each strategy, against the closed forms; run.py prints it.

This file is also the program that is measured: `python benchmarks/memory.py 2 ddp/32-true fsdp/bf16-mixed`. It counts
the storages of live tensors, which does not depend on the machine or its load, and notes the memory of the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from fsdp import (
    BATCH_SIZE,
    EXACT_MEMORY,
    MEMORY_WIDTH,
    Block,
    LiveTensors,
    Stack,
    local,
    make,
    peak_of_process,
    silence,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import loopwright as lw
from loopwright.strategies import Strategy

# Any in this file: what the measured program prints, and engines without types.

PRECISIONS = ("32-true", "bf16-mixed")
LIMIT_S = 120  # for one case
BUCKET = 1_200_000  # elements; a block has 1,049,600
SETTLING_READS = 30  # a hundredth of a second apart


# --- closed forms -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank for each parameter of the model, after the last backward pass of a window.

    Attributes:
        parameters: What the module computes with.
        gradients: Averaged ones.
        optimizer: Adam's two moments, and float32 masters where there are some.
        buffers: What the engine keeps beside them.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.buffers


def textbook(stage: int, ranks: int, *, is_mixed: bool = False) -> Bytes:
    """Return the bytes per parameter of ZeRO's arithmetic, with Adam.

    Args:
        stage: 0: everything on each rank, as with DDP; 1 shards the optimizer, 2 gradients, 3 parameters, too.
        ranks: Number of ranks.
        is_mixed: 16-bit parameters and gradients, with float32 masters in the optimizer; else all is float32, without.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1: 2 + 2 + 12 bytes; in float32 4 + 4 + 8.
    """
    narrow, wide = (2.0, 12.0) if is_mixed else (4.0, 8.0)
    return Bytes(
        narrow / (ranks if stage >= 3 else 1), narrow / (ranks if stage >= 2 else 1), wide / (ranks if stage else 1)
    )


def expected(strategy: str, precision: str, ranks: int) -> Bytes:
    """Return the bytes per parameter that a strategy of CASES needs here."""
    kind, _, detail = strategy.partition(" ")
    if kind == "deepspeed" and detail[0] != "0":
        # Stage 1 reduces gradients while they are made and keeps its part, as stage 2 does; it differs between
        # micro-batches. The engine steps float32 masters: of float32 parameters, too, where a textbook has none.
        plain = textbook(max(2, int(detail[0])), ranks, is_mixed=precision != "32-true")
        if detail.endswith("offload"):
            # In the host's memory: gradients in float32, and a buffer in which micro-batches are added up.
            return Bytes(plain.parameters, 4 / ranks, 12 / ranks, buffers=plain.gradients)
        return Bytes(plain.parameters, plain.gradients, 12 / ranks)
    if kind == "deepspeed":
        return textbook(0, ranks, is_mixed=precision != "32-true")
    # Weights and gradients are float32 under "bf16-mixed", too: autocast makes copies for a while.
    if kind == "fsdp" and detail != "NO_SHARD":
        return textbook(3, ranks)
    whole = textbook(0, ranks)
    # The reducer's buckets; gradients are views of them if asked for.
    return Bytes(4, 4, 8, buffers=4) if strategy == "ddp" else whole


# --- the cases --------------------------------------------------------------------------------------------------------


def _single() -> str:
    return "auto"


def _ddp(**options: Any) -> Callable[[], Strategy]:
    def build() -> Strategy:
        from loopwright.strategies import DDPStrategy

        return DDPStrategy(start_method="fork", **options)

    return build


def _fsdp(sharding: str) -> Callable[[], Strategy]:
    def build() -> Strategy:
        from loopwright.strategies import FSDPStrategy

        return FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy=sharding, start_method="fork")

    return build


def _deepspeed(stage: int, **options: Any) -> Callable[[], Strategy]:
    def build() -> Strategy:
        from loopwright.strategies import DeepSpeedStrategy

        sizes = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        return DeepSpeedStrategy(stage=stage, start_method="fork", **{**sizes, **options})

    return build


def _deepspeed_lean(stage: int) -> Callable[[], Strategy]:
    zero = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_max_live_parameters": BUCKET,
        "stage3_max_reuse_distance": 0,
    }
    return _deepspeed(stage, config={"zero_optimization": zero, "zero_allow_untested_optimizer": True})


CASES: dict[str, Callable[[], Strategy | str]] = {
    "single": _single,
    "ddp": _ddp(),
    "ddp views": _ddp(gradient_as_bucket_view=True),
    "fsdp NO_SHARD": _fsdp("NO_SHARD"),
    "fsdp SHARD_GRAD_OP": _fsdp("SHARD_GRAD_OP"),
    "fsdp FULL_SHARD": _fsdp("FULL_SHARD"),
    "deepspeed 0": _deepspeed(0),
    "deepspeed 1": _deepspeed(1),
    "deepspeed 2": _deepspeed(2),
    "deepspeed 3": _deepspeed(3),
    "deepspeed 3 lean": _deepspeed_lean(3),
    "deepspeed 1 offload": _deepspeed(1, offload_optimizer=True),
    "deepspeed 2 offload": _deepspeed(2, offload_optimizer=True),
    "deepspeed 3 offload": _deepspeed(3, offload_optimizer=True, offload_parameters=True),
}

ON_FOUR = ("fsdp FULL_SHARD", "deepspeed 1", "deepspeed 2", "deepspeed 3")


# --- tables for run.py ----------------------------------------------------------------------------------------------


def measure_memory_of_strategies(*, is_quick: bool) -> dict[str, Any]:
    """Measure every case in processes of its own, on two ranks and on four."""
    names = ("single", "fsdp FULL_SHARD", "deepspeed 2", "deepspeed 3") if is_quick else tuple(CASES)
    rows = []
    for ranks in (2,) if is_quick else (2, 4):
        chosen = [name for name in names if ranks == 2 or name in ON_FOUR]
        rows += run_limited(ranks, [f"{name}/{one}" for one in PRECISIONS[: 1 if is_quick else 2] for name in chosen])
    return {"rows": rows}


def run_limited(ranks: int, cases: Iterable[str]) -> list[dict[str, Any]]:
    """Run this program on some cases and return their numbers; it and all that it started end at its time limit."""
    command = [sys.executable, __file__, str(ranks), *cases]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **EXACT_MEMORY}
    # Its own session: the program's own children end with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S * (len(command) - 3))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{err}")
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows


# --- the measured program ---------------------------------------------------------------------------------------------


def storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for one in tensors:
        if isinstance(one, Tensor):
            yield local(one).untyped_storage()


class Allocated(LiveTensors):
    """Live tensors that have memory (DeepSpeed keeps shapes as meta tensors), and what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname.strip("_")
            calls = self.sent.setdefault(name, [0, 0])
            whole = [sum(one.nbytes for one in tree_leaves(part) if isinstance(one, Tensor)) for part in args]
            calls[0] += 1
            calls[1] += max(whole)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's memory from now on, if it has any."""
        if not tensor.is_meta:
            super().watch(tensor)


class Parts:
    """Says what the live storages of a rank are for; a storage is counted once, for the first that has it."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    def sizes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state."""
        seen: set[int] = set()
        found = {}
        for name, tensors in (
            ("parameters", self._parameters()),
            ("gradients", self._gradients()),
            ("optimizer", self._state()),
        ):
            own = {id(one): one for one in storages(tensors)}
            found[f"{name}_bytes"] = sum(one.nbytes() for key, one in own.items() if key not in seen)
            seen |= set(own)
        return found

    def _root(self) -> Any:
        from loopwright.strategies.deepspeed.engine import EngineOptimizer

        raw = getattr(self._optimizer, "optimizer", self._optimizer)
        return raw.root if type(raw) is EngineOptimizer else None

    def _parameters(self) -> Iterator[Tensor]:
        for one in self._model.parameters():
            yield getattr(one, "ds_tensor", one)

    def _gradients(self) -> Iterator[Any]:
        root = self._root()
        yield from (one.grad for one in self._model.parameters())
        if root is not None:
            yield from root.gradient_shards()

    def _state(self) -> Iterator[Any]:
        raw = self._optimizer
        yield from (one for group in raw.param_groups for one in group["params"])
        yield from tree_leaves([*raw.state.values()])
        root = self._root()
        if root is not None:
            yield from getattr(root.engine.optimizer, "fp32_partitioned_groups_flat", ())  # masters of stage 3


def settled_bytes(live: LiveTensors) -> int:
    """Return the bytes that are alive once nothing else lets go of any.

    A thread of gloo holds what it has sent for a moment after the caller's wait() has returned; on a busy machine the
    caller is at the next line by then.
    """
    lowest = live.live_bytes()
    for _ in range(SETTLING_READS):
        time.sleep(0.01)
        lowest = min(lowest, live.live_bytes())
    return lowest


def measure(fabric: lw.Fabric) -> dict[str, Any]:
    """Return what rank 0 has: before an optimizer step, between two of them, and at most."""
    found: dict[str, Any] = {}
    batch = torch.randn(BATCH_SIZE, MEMORY_WIDTH)

    def forward_and_backward(model: nn.Module, x: Tensor) -> None:
        fabric.backward(model(x))

    def set_up(width: int) -> tuple[Any, Any]:
        with fabric.init_module():
            stack = make(width) if width == MEMORY_WIDTH else Stack(width)
        model = fabric.setup_module(stack)
        return model, fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-3))

    with silence():
        model, optimizer = set_up(64)  # what is imported and connected at the first time
        forward_and_backward(model, batch[:, :64])
        optimizer.step()
        optimizer.zero_grad()
        with Allocated() as live:
            before = settled_bytes(live)
            with peak_of_process(found, "process_bytes"):
                model, optimizer = set_up(MEMORY_WIDTH)
                for number in range(3):
                    live.peak_bytes, live.sent = 0, {}
                    forward_and_backward(model, batch)
                    if number == 2:
                        found |= Parts(model, optimizer).sizes()
                        found["before_step_bytes"] = settled_bytes(live) - before
                        found["backward_peak_bytes"], live.peak_bytes = live.peak_bytes - before, 0
                    optimizer.step()
                    optimizer.zero_grad()
            found["step_peak_bytes"] = live.peak_bytes - before
            found["resting_bytes"] = settled_bytes(live) - before
            found["sent"], live.sent = live.sent, {}
            with fabric.no_backward_sync(model):
                forward_and_backward(model, batch)
            found["accumulating_bytes"] = settled_bytes(live) - before
            forward_and_backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    found["elements"] = sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())
    return found


def run_case(name: str, precision: str, ranks: int) -> dict[str, Any]:
    count = 1 if name == "single" else ranks
    options: dict[str, Any] = {"accelerator": "cpu", "devices": count, "precision": precision}
    fabric = lw.Fabric(strategy=CASES[name](), **options)
    numbers: dict[str, Any] = fabric.launch(measure)
    return {"name": name, "precision": precision, "ranks": count, **numbers}


def main() -> None:
    import loopwright.strategies.deepspeed.engine
    import loopwright.strategies.fsdp.strategy  # noqa: F401  # once, and not in each process

    for case in sys.argv[2:]:
        name, _, precision = case.rpartition("/")
        # A process for each case, which forks its ranks: none inherits the memory of another.
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            print(json.dumps(pool.submit(run_case, name, precision, int(sys.argv[1])).result()), flush=True)


if __name__ == "__main__":
    main()
