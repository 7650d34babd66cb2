"""The overhead of a trainer over a hand-written loop with torch_xla, on the CPU's runtime; run.py prints it.

This file is also the program that is measured, with the python of .venv-xla, which `make test-xla` makes:
`.venv-xla/bin/python benchmarks/xla.py DEVICES STEPS ROUNDS SIZES`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from fsdp import Marks, Stack, Step, local_parts, make, optimizer_of, run_program, silence
from torch import Tensor
from torch.utils.data import DataLoader

import loopwright as lw

# Any in this file: what the measured program prints; torch_xla is not annotated.

NAMES = {
    "hand": "hand-written torch_xla",
    "ahead": "the same with MpDeviceLoader",
    "fabric": "Fabric",
    "trainer": "Trainer",
}
WIDTHS = (128, 512)  # eight blocks of about WIDTH**2 elements
BATCH_SIZE = 16
CALL_STEPS = 12  # enough where calls are counted
PYTHON = Path(__file__).resolve().parents[1] / ".venv-xla" / "bin" / "python"

# --- tables for run.py ----------------------------------------------------------------------------------------------


def measure_xla(*, num_steps: int, rounds: int, is_quick: bool = False) -> dict[str, Any]:
    """Measure in processes of their own, on one device and by SPMD on two; "skipped" says why nothing was measured."""
    if not PYTHON.exists():
        reason = "there is no .venv-xla, the environment with torch_xla: `make test-xla` creates it"
        print(f"skipping xla: {reason}", file=sys.stderr, flush=True)
        return {"skipped": reason}
    return {
        "devices": [
            run_program(
                __file__, devices, num_steps, rounds, 1 if is_quick else len(WIDTHS), python=str(PYTHON),
                PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices), TF_CPP_MIN_LOG_LEVEL="2",
            )
            for devices in ((1,) if is_quick else (1, 2))
        ]
    }  # fmt: skip


# --- the program ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Print what a step takes in each of the ways, in turns."""
    devices, num_steps, rounds, num_sizes = map(int, sys.argv[1:])
    if devices > 1:
        import torch_xla.runtime as runtime

        runtime.use_spmd()
    fabric = lw.Fabric(accelerator="xla", devices=devices)
    fabric.launch()
    ways: dict[str, Callable[[int, list[Tensor], Marks], Stack]] = {
        "hand": lambda width, data, marks: _by_hand(devices, width, data, marks),
        "ahead": lambda width, data, marks: _by_hand(devices, width, _ahead(devices, data), marks),
        "fabric": lambda width, data, marks: _by_fabric(fabric, width, data, marks),
        "trainer": lambda width, data, marks: _by_trainer(devices, width, data, marks),
    }
    sizes = []
    for width in WIDTHS[:num_sizes]:
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(BATCH_SIZE, width, generator=generator) for _ in range(num_steps)]
        found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in ways}
        weights: dict[str, list[Tensor]] = {}
        counted: dict[str, tuple[int, int]] = {}
        calls: dict[str, tuple[float, float]] = {}
        for counts_calls in [*[False] * rounds, True]:
            for mode, way in ways.items():
                marks = CountingMarks(counts_calls=counts_calls)
                with silence(), marks:
                    trained = way(width, data[:CALL_STEPS] if counts_calls else data, marks)
                weights.setdefault(mode, [one.cpu() for one in local_parts(trained)])
                if counts_calls:
                    python, c = zip(*marks.differences(), strict=True)
                    calls[mode] = (min(python), min(c))
                else:
                    found[mode] += marks.differences()
                    counted[mode] = marks.in_steady_state()
        sizes.append({"elements": width * width + width, "modes": _numbers(found, weights, counted, calls)})
    print(json.dumps({"devices": devices, "torch": torch.__version__, "sizes": sizes}), flush=True)


def _numbers(
    found: dict[str, list[tuple[float, float]]],
    weights: dict[str, list[Tensor]],
    counted: dict[str, tuple[int, int]],
    calls: dict[str, tuple[float, float]],
) -> dict[str, dict[str, Any]]:
    return {
        mode: {
            "wall_us": 1e6 * statistics.median(wall for wall, _ in values),
            "cpu_us": 1e6 * statistics.median(cpu for _, cpu in values),
            "compiled": counted[mode][0],
            "reads": counted[mode][1],
            "calls": calls[mode],
            "largest_difference": max(
                (one - other).abs().max().item() for one, other in zip(weights["hand"], weights[mode], strict=True)
            ),
        }
        for mode, values in found.items()
    }


class CountingMarks(Marks):
    """Notes, beside time or calls, how many graphs were compiled and how often the device was read until each step."""

    def __init__(self, *, counts_calls: bool) -> None:
        super().__init__(counts_calls=counts_calls)
        self._counters: list[tuple[int, int]] = []

    def note(self) -> None:
        if self.counts_calls:
            super().note()
            return
        import torch_xla.debug.metrics as metrics

        compiled, copied = (metrics.metric_data(name) for name in ("CompileTime", "TransferFromDeviceTime"))
        self._counters.append((compiled[0] if compiled else 0, copied[0] if copied else 0))
        super().note()

    def in_steady_state(self) -> tuple[int, int]:
        """Return the graphs compiled and the reads of the second half of the steps."""
        before, after = self._counters[len(self._counters) // 2], self._counters[-1]
        return after[0] - before[0], after[1] - before[1]


def _by_hand(devices: int, width: int, data: Iterable[Tensor], marks: Marks) -> Stack:
    """Train as torch_xla's documents do it."""
    import torch_xla

    device = torch_xla.device()
    stack = make(width).to(device)
    if devices > 1:
        import torch_xla.distributed.spmd as spmd

        for parameter in stack.parameters():
            spmd.mark_sharding(parameter, _mesh(devices), (None,) * parameter.ndim)
    optimizer = optimizer_of(stack)
    for batch in data:
        marks.note()
        loss = stack(_send(devices, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    return stack


def _send(devices: int, batch: Tensor) -> Tensor:
    """Return a batch on the device; one that MpDeviceLoader sent stays as it is."""
    import torch_xla

    if batch.device.type == "xla":
        return batch
    sent = batch.to(torch_xla.device())
    if devices > 1:
        import torch_xla.distributed.spmd as spmd

        spmd.mark_sharding(sent, _mesh(devices), ("data", None))
    return sent


def _ahead(devices: int, data: list[Tensor]) -> Iterable[Tensor]:
    """Return torch_xla's loader, whose thread sends batches ahead of the loop."""
    import torch_xla
    import torch_xla.distributed.parallel_loader as parallel_loader

    options: dict[str, Any] = {}
    if devices > 1:
        import torch_xla.distributed.spmd as spmd

        options["input_sharding"] = spmd.ShardingSpec(_mesh(devices), ("data", None))
    # It cuts graphs, too, unless its arguments prevent that; the loop does so.
    loader: Iterable[Tensor] = parallel_loader.MpDeviceLoader(
        DataLoader(data, batch_size=None), torch_xla.device(), batches_per_execution=2**62, **options  # type: ignore[arg-type]  # a list is a dataset
    )  # fmt: skip
    return loader


def _mesh(devices: int) -> Any:
    import torch_xla.distributed.spmd as spmd

    return spmd.get_global_mesh() or spmd.Mesh(list(range(devices)), (devices,), ("data",))


def _by_fabric(fabric: lw.Fabric, width: int, data: list[Tensor], marks: Marks) -> Stack:
    stack = make(width)
    model, optimizer = fabric.setup(stack, optimizer_of(stack))
    for batch in fabric.setup_dataloaders(data):
        marks.note()
        loss = model(batch)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    return stack


def _by_trainer(devices: int, width: int, data: list[Tensor], marks: Marks) -> Stack:
    module = Step(make(width), marks.note)
    trainer = lw.Trainer(
        accelerator="xla", devices=devices, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return module.stack


if __name__ == "__main__":
    main()
