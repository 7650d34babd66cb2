"""What runs in processes of their own: `python tasks.py NAME DEVICES FILE`, started by processes.py.

A process can have one number of XLA devices only. Each task takes what the file holds and returns what is written to
`FILE.out`. The training is that of tests/support/conformance.py, with batches moved to the device.
"""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from conformance import SAMPLES, STEPS, Case, Net, TrainedNet, global_batch, make_optimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import STRATEGY_REGISTRY

State = dict[str, Tensor]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def make_strategy(name: str, options: dict[str, Any]) -> Any:
    return STRATEGY_REGISTRY.create(name, **options)


def on_host(module: nn.Module) -> State:
    return {name: value.detach().cpu().double() for name, value in module.state_dict().items()}


def train(devices: int, name: str, options: dict[str, Any], cases: list[Case]) -> list[tuple[State, State]]:
    """Train each case by hand on Fabric and with the Trainer."""
    return [(by_hand(devices, name, options, case), by_trainer(devices, name, options, case)) for case in cases]


def by_hand(devices: int, name: str, options: dict[str, Any], case: Case) -> State:
    fabric = lw.Fabric(
        accelerator="xla", strategy=make_strategy(name, options), devices=devices, precision=case.precision
    )
    fabric.launch()

    def set_up() -> tuple[Any, Any]:
        module = Net()
        # Made before the module is moved: what an optimizer holds must stay the module's.
        return fabric.setup(module, make_optimizer(case.optimizer, module))  # type: ignore[no-any-return]

    model, optimizer = set_up()
    file = Path(tempfile.mkdtemp(), "state.ckpt")
    for step in range(STEPS):
        if case.resumes and step == STEPS // 2:
            fabric.save(file, {"model": model, "optimizer": optimizer})
            model, optimizer = set_up()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fabric.load(file, {"model": model, "optimizer": optimizer})
        for part in range(case.accumulate):
            x, y = fabric.to_device(global_batch(step * case.accumulate + part))
            with fabric.no_backward_sync(model, enabled=part < case.accumulate - 1):
                loss = nn.functional.mse_loss(model(x), y.to(x.dtype))
                fabric.backward(loss / case.accumulate)
        if case.clip == "norm":
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        elif case.clip == "value":
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return on_host(model)


def data(case: Case) -> DataLoader[Any]:
    batches = [global_batch(number) for number in range(STEPS * case.accumulate)]
    return DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=SAMPLES)


def fit(
    strategy: Any, devices: int, case: Case, *, max_steps: int = STEPS, ckpt_path: Any = None, accelerator: str = "tpu"
) -> tuple[lw.Trainer, TrainedNet]:
    module = TrainedNet(case.optimizer)
    trainer = lw.Trainer(
        accelerator=accelerator, strategy=strategy, devices=devices, precision=case.precision, max_steps=max_steps,
        accumulate_grad_batches=case.accumulate, gradient_clip_algorithm=case.clip,
        gradient_clip_val={None: None, "norm": 0.1, "value": 0.01}[case.clip], **QUIET,
    )  # fmt: skip
    trainer.fit(module, data(case), ckpt_path=ckpt_path)
    return trainer, module


def by_trainer(devices: int, name: str, options: dict[str, Any], case: Case) -> State:
    def run(max_steps: int, ckpt_path: Any = None) -> tuple[lw.Trainer, TrainedNet]:
        return fit(make_strategy(name, options), devices, case, max_steps=max_steps, ckpt_path=ckpt_path)

    if case.resumes:
        file = Path(tempfile.mkdtemp(), "trainer.ckpt")
        trainer, module = run(STEPS // 2)
        trainer.save_checkpoint(file)
        trainer, module = run(STEPS, file)
    else:
        trainer, module = run(STEPS)
    assert trainer.global_step == STEPS
    return on_host(module.net)


# -- the Trainer -------------------------------------------------------------------------------------------------------


class Classifier(lw.Module):
    """A network with what XLA has its troubles with: running statistics, dropout, and counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))
        self.lines: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(output, batch[1]))
        self.log("acc", (output.argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lines.append((self.trainer.global_step, *counts()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def counts() -> tuple[int, int, int]:
    """Return the graphs compiled, the single numbers read and the graphs sent off at the end of a step so far."""
    import torch_xla.debug.metrics as metrics

    compiled = metrics.metric_data("CompileTime")
    read, sent = (metrics.counter_value(name) or 0 for name in ("aten::_local_scalar_dense", "MarkStep"))
    return compiled[0] if compiled else 0, read, sent


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(3))
    return x, (x.sum(1) > 0).long()


def verbs(devices: int, name: str, accelerator: str) -> dict[str, Any]:
    """Fit, validate, test and predict; resume the checkpoint on the CPU and what comes from there here."""
    x, y = points()
    train_loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    folder = Path(tempfile.mkdtemp())
    log_every = 10
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lw.Trainer(
        accelerator=accelerator, strategy=name, devices=devices, max_epochs=2, log_every_n_steps=log_every,
        callbacks=[lw.XLAStatsMonitor(), lw.ModelCheckpoint(folder, monitor="val_loss", save_last=True)],
        default_root_dir=folder, logger=lw.CSVLogger(folder), **quiet,
    )  # fmt: skip
    module = Classifier()
    trainer.fit(module, train_loader, loader)
    found: dict[str, Any] = {"lines": module.lines, "rank": (trainer.global_rank, trainer.world_size)}
    found["validate"] = trainer.validate(module, loader, verbose=False)
    found["test"] = trainer.test(module, loader, verbose=False)
    outputs = trainer.predict(module, loader)
    assert outputs is not None
    found["predict"] = [(one.device.type, tuple(one.shape)) for one in outputs]
    weights = on_host(module)
    found["weights"] = weights
    rows = next(folder.rglob("metrics.csv")).read_text().splitlines()
    found["columns"] = rows[0].split(",")
    saved = folder / "last.ckpt"
    plain = torch.load(saved, weights_only=True)
    found["saved"] = {key: value.device.type for key, value in plain["state_dict"].items()}
    found["same"] = all(torch.equal(plain["state_dict"][key].double(), value) for key, value in weights.items())

    def resume(file: Path, accelerator: str, strategy: str, count: int, epochs: int) -> lw.Trainer:
        again = lw.Trainer(
            accelerator=accelerator, strategy=strategy, devices=count, max_epochs=epochs,
            logger=False, enable_checkpointing=False, **quiet,
        )  # fmt: skip
        again.fit(Classifier(), train_loader, loader, ckpt_path=file)
        return again

    on_cpu = resume(saved, "cpu", "single_device", 1, 3)
    on_cpu.save_checkpoint(folder / "cpu.ckpt")
    found["resumed"] = [on_cpu.global_step, resume(folder / "cpu.ckpt", accelerator, name, devices, 4).global_step]
    # The same from one run: dropout and the order of data go on where they were.
    whole, part = Classifier(), Classifier()
    for target, epochs, file in ((whole, 2, None), (part, 1, None), (part, 2, folder / "one.ckpt")):
        lw.seed_everything(11, verbose=False)
        again = lw.Trainer(
            accelerator=accelerator, strategy=name, devices=devices, max_epochs=epochs,
            logger=False, enable_checkpointing=False, num_sanity_val_steps=0, **quiet,
        )  # fmt: skip
        again.fit(target, train_loader, loader, ckpt_path=file)
        if epochs == 1:
            again.save_checkpoint(folder / "one.ckpt")
            part = target
    found["exact"] = [on_host(whole), on_host(part)]
    return found


class TwoOptimizers(lw.Module):
    """Manual optimization with two optimizers, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.two(self.one(batch[0]).tanh()).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.one, self.two)]


def manual(devices: int, name: str) -> tuple[State, int]:
    """Train with two optimizers; return the weights, and how many graphs ran per step."""
    import torch_xla.debug.metrics as metrics

    module = TwoOptimizers()
    loader = DataLoader(TensorDataset(points()[0]), batch_size=8)
    ran: list[int] = []

    class Count(lw.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            ran.append(metrics.counter_value("MarkStep") or 0)

    lw.Trainer(
        accelerator="xla", strategy=name, devices=devices, max_epochs=1, callbacks=[Count()], **QUIET
    ).fit(module, loader)  # fmt: skip
    return on_host(module), ran[-1] - ran[-2]


# -- parts -------------------------------------------------------------------------------------------------------------


def shards(devices: int) -> dict[str, Any]:
    """Return how tensors lie on the devices after training, saving and loading."""
    import torch_xla

    lib = torch_xla._XLAC
    case = Case("32-true", 1, None, "adam")
    trainer, module = fit(make_strategy("xla_fsdp", {"auto_wrap_policy": {"Linear"}}), devices, case)
    file = Path(tempfile.mkdtemp(), "file.ckpt")
    before = counts()[0]
    trainer.save_checkpoint(file)
    compiled = counts()[0] - before
    trainer, module = fit(
        make_strategy("xla_fsdp", {"auto_wrap_policy": {"Linear"}}), devices, case, max_steps=STEPS + 1, ckpt_path=file
    )
    state = trainer.optimizers[0].state
    parameters = dict(module.net.named_parameters())
    weights = {name: value.clone() for name, value in on_host(module).items()}
    sent = sent_bytes()
    trainer.strategy.load_module_state_dict(module, weights)
    torch_xla.sync(wait=True)
    sent = sent_bytes() - sent
    return {
        "compiled_to_save": compiled,
        "parameters": {name: lib._get_xla_sharding_spec(one) for name, one in parameters.items()},
        "moments": {name: lib._get_xla_sharding_spec(state[one]["exp_avg"]) for name, one in parameters.items()},
        "part": tuple(lib._get_local_shards([parameters["first.weight"]])[0][0][0].shape),
        "tied": module.net.tied.weight is module.net.again.weight,
        "sent_to_load": sent,
        "same": all(torch.equal(value, weights[name]) for name, value in on_host(module).items()),
        "sizes": {name: one.numel() * one.element_size() for name, one in module.named_parameters()},
    }


def sent_bytes() -> float:
    """Return how many bytes were sent to devices; what every device gets counts for each."""
    import torch_xla.debug.metrics as metrics

    return metrics.metric_data("OutboundData")[1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def parts(devices: int, name: str) -> dict[str, Any]:
    """Return what collectives, loaders, the profiler and uneven batches do."""
    import torch_xla
    import torch_xla.debug.profiler as profiler

    fabric = lw.Fabric(accelerator="xla", strategy=name, devices=devices)
    fabric.launch()
    value = torch.arange(4.0, device=fabric.device)
    found: dict[str, Any] = {
        "reduced": fabric.all_reduce(value).tolist(),
        "gathered": fabric.all_gather(value).tolist(),
        "sent": fabric.broadcast({"a": 1}),
        "decision": fabric.strategy.reduce_boolean_decision(True),
    }
    fabric.barrier()
    lib = torch_xla._XLAC
    batch = {"x": torch.ones(8, 3, 2), "y": [torch.ones(8)], "z": torch.tensor(1.0), "name": "a"}
    moved = fabric.to_device(batch)
    found["cut"] = [lib._get_xla_sharding_spec(one) for one in (moved["x"], moved["y"][0], moved["z"])]
    uneven = fabric.to_device(torch.arange(7.0))
    found["uneven"] = (lib._get_xla_sharding_spec(uneven), (uneven * 2).sum().item())
    loader = DataLoader(TensorDataset(torch.arange(32.0).reshape(16, 2)), batch_size=8)
    ahead = [(one.sum(), lib._get_xla_sharding_spec(one)) for (one,) in fabric.strategy.process_dataloader(loader)]
    found["ahead"] = [(value.item(), spec) for value, spec in ahead]
    found["ours"] = [one.sum().item() for (one,) in fabric.setup_dataloaders(loader)]
    folder = Path(tempfile.mkdtemp())
    server = lw.XLAProfiler(port=free_port())
    profiler.start_trace(str(folder))
    # A step, its backward pass and evaluation have names, while graphs are cut inside of them.
    module = Classifier()
    x, y = points()
    loaders = DataLoader(TensorDataset(x, y), batch_size=64)
    lw.Trainer(
        accelerator="xla", strategy=name, devices=devices, max_steps=3, profiler=server, **QUIET
    ).fit(module, loaders, loaders)  # fmt: skip
    profiler.stop_trace()
    trace = b"".join(file.read_bytes() for file in folder.rglob("*.xplane.pb"))
    found["traced"] = [word for word in (b"run_training_step", b"backward", b"validation_step") if word in trace]
    return found


def refusals(devices: int) -> list[str]:
    """Return the messages for what cannot be, in a process whose runtime has so many devices already."""
    messages = []
    lw.Fabric(accelerator="xla", strategy="xla", devices=devices).launch()
    for arguments in (
        {"accelerator": "xla", "strategy": "xla", "devices": devices + 1},
        {"accelerator": "xla", "strategy": "single_device"},
        {"accelerator": "xla", "strategy": "ddp", "devices": 2},
        {"accelerator": "cpu", "strategy": "xla"},
        {"strategy": "xla_fsdp", "devices": devices, "precision": "16-mixed"},
        {"strategy": "xla", "devices": devices, "num_nodes": 2},
    ):
        try:
            lw.Fabric(**arguments).launch()  # type: ignore[arg-type]
            messages.append("")
        except lw.ConfigError as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    task, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    arguments = torch.load(path, weights_only=False)
    torch.save(globals()[task](count, *arguments), f"{path}.out")
