"""What watches XLA at work, and whether the host waits: `python watching_tasks.py NAME DEVICES FILE`, as tasks.py."""

from __future__ import annotations

import csv
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tasks import QUIET, Classifier, free_port, points
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
        trainer.should_stop = trainer.global_step >= 96 and not self._asks.is_alive()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*points()), batch_size=64)


def watched(devices: int) -> dict[str, Any]:
    """Train with XLAProfiler and XLAStatsMonitor; return the trace that was captured and the rows that were logged."""
    folder = Path(tempfile.mkdtemp())
    port = free_port()
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


class Slow(lw.Module):
    """Reads a tensor in each step, or takes other shapes in each."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.reads = reads
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch.unsqueeze(-1)).square().mean()
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.losses.append(loss.detach())
        if self.reads and loss > 1e9:
            raise AssertionError
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Messages(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def warned(devices: int) -> dict[str, Any]:
    """Return what is said of steps that read, of steps with shapes of their own, and of steps that do neither."""
    messages = Messages()
    logging.getLogger("loopwright.strategies.xla.slowdowns").addHandler(messages)
    found: dict[str, Any] = {}
    # 10 steps warm up, 20 are judged, and one is run line by line. Each shape is compiled, so that there are few.
    same, other = [3] * 31, [3] * 10 + list(range(11, 22)) + [3] * 9
    for name, reads, sizes in (("nothing", False, same), ("reads", True, same), ("shapes", False, other)):
        batches = [torch.ones(4, size) for size in sizes]
        module = Slow(reads=reads)
        trainer = lw.Trainer(accelerator="xla", devices=devices, max_epochs=1, **QUIET)
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        most = trainer.callback_metrics["most"].item()
        found[name] = (list(messages.texts), most == max(loss.item() for loss in module.losses))
        messages.texts.clear()
    return found


def gradients_before(devices: int) -> str:
    """Return what is said where another device computed gradients first."""
    torch.ones((), requires_grad=True).clone().backward()
    try:
        lw.Fabric(accelerator="xla", devices=devices).launch()
    except lw.errors.LaunchError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    task, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.save(globals()[task](count, *torch.load(path, weights_only=False)), f"{path}.out")
