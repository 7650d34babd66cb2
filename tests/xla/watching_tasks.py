"""What watches XLA at work, and whether the host waits: `python watching_tasks.py NAME DEVICES FILE`, as tasks.py."""

from __future__ import annotations

import csv
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tasks import QUIET, Classifier, points
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw


class Capture(lw.Callback):
    """Ask the profiler's server for a trace in the middle of training, and end training once it is there."""

    def __init__(self, port: int, folder: Path) -> None:
        self._asks = threading.Thread(target=self._ask, args=(port, folder))

    @staticmethod
    def _ask(port: int, folder: Path) -> None:
        import torch_xla.debug.profiler as profiler

        profiler.trace(f"localhost:{port}", str(folder), duration_ms=1500)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            self._asks.start()
        trainer.should_stop = trainer.global_step > 5 and not self._asks.is_alive()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*points()), batch_size=64)


def watched(devices: int) -> dict[str, Any]:
    """Train with XLAProfiler and XLAStatsMonitor; return the trace that was captured and the rows that were logged."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    trainer = lw.Trainer(
        accelerator="xla", devices=devices, profiler=lw.XLAProfiler(port), logger=lw.CSVLogger(folder),
        callbacks=[lw.XLAStatsMonitor(), Capture(port, folder)], max_epochs=100_000, log_every_n_steps=4,
        **{key: value for key, value in QUIET.items() if key != "logger"},
    )  # fmt: skip
    trainer.fit(Classifier(), loader(), loader())
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("XLAStatsMonitor/reads")]
    traces = list(folder.rglob("*.xplane.pb"))
    return {"trace": b"".join(one.read_bytes() for one in traces), "traces": len(traces), "rows": rows}


def reported(devices: int) -> dict[str, Any]:
    """Train with the strategy that reports; return what was written to the error stream."""
    file = Path(tempfile.mkdtemp(), "errors")
    variables = {name: os.environ.get(name) for name in ("PT_XLA_DEBUG", "XLA_IR_DEBUG", "XLA_HLO_DEBUG")}
    errors = os.dup(2)
    with file.open("wb") as target:
        os.dup2(target.fileno(), 2)  # torch_xla writes past Python
        try:
            lw.Trainer(accelerator="xla", strategy="xla_debug", devices=devices, max_steps=2, **QUIET).fit(
                Classifier(), loader(), loader()
            )
        finally:
            os.dup2(errors, 2)
    return {"text": file.read_text(), "same": variables == {name: os.environ.get(name) for name in variables}}


def sent_ahead(devices: int) -> tuple[float, float]:
    """Return the seconds that sending a batch takes while a graph runs, and those that the graph takes from there."""
    import torch_xla
    import torch_xla.core.xla_model as xla_model

    fabric = lw.Fabric(accelerator="xla", devices=devices)
    fabric.launch()
    batch = torch.ones(512, 512)

    def send_off() -> None:
        value = fabric.to_device(batch)
        for _ in range(12):
            value = (value @ value).tanh()
        kept.append(value)
        torch_xla.sync()

    kept: list[Any] = []
    send_off()
    xla_model.wait_device_ops()
    send_off()  # compiled by then
    start = time.perf_counter()
    kept.append(fabric.to_device(batch))
    sent = time.perf_counter()
    xla_model.wait_device_ops()
    return sent - start, time.perf_counter() - sent


if __name__ == "__main__":
    task, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.save(globals()[task](count, *torch.load(path, weights_only=False)), f"{path}.out")
