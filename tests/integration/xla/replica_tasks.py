"""What runs in replicas: `python replica_tasks.py NAME SIZE FILE`, as tasks.py. Started by test_replicas.py.

Tasks of "processes" fork a process per device, each with a runtime of its own: all of Loopwright is at work, and
tensors go through the hosts. Tasks of "threads" are what torch_xla's own launch makes of a CPU with several devices:
one process with a thread per device, in which XLA's own collectives run, with the patch of xla/support.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from conformance import SAMPLES, STEPS, Case, Net, TrainedNet, global_batch, make_optimizer
from cpu_replicas import BUILDING, ReplicaEnvironment, run_replicas
from ranks import run_ranks
from tasks import QUIET, counts, on_host
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import STRATEGY_REGISTRY

State = dict[str, Tensor]
LIMIT_S = 700.0


# -- training, by hand and with the Trainer ----------------------------------------------------------------------------


def by_hand(fabric: lw.Fabric, case: Case, file: Path) -> State:
    def set_up() -> tuple[Any, Any]:
        with BUILDING:
            module = Net()
        if fabric.global_rank:  # only rank 0's values count
            with torch.no_grad():
                module.head.weight.fill_(float("nan"))
        model = fabric.setup_module(module)
        return model, fabric.setup_optimizers(make_optimizer(case.optimizer, model))

    model, optimizer = set_up()
    for step in range(STEPS):
        if case.resumes and step == STEPS // 2:
            fabric.save(file, {"model": model, "optimizer": optimizer})
            model, optimizer = set_up()
            fabric.load(file, {"model": model, "optimizer": optimizer})
        for part in range(case.accumulate):
            x, y = (t.chunk(fabric.world_size)[fabric.global_rank] for t in global_batch(step * case.accumulate + part))
            x, y = fabric.to_device((x, y))
            with fabric.no_backward_sync(model, enabled=part < case.accumulate - 1):
                loss = nn.functional.mse_loss(model(x), y.to(x.dtype))
                fabric.backward(loss / case.accumulate)
        if case.clip == "norm":
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        elif case.clip == "value":
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad()
    fabric.barrier()
    state = fabric.strategy.module_state_dict(model._without_fabric)
    return {name: value.cpu().double() for name, value in state.items()}


def by_trainer(strategy: Any, size: int, case: Case, file: Path) -> State:
    batches = [global_batch(number) for number in range(STEPS * case.accumulate)]
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=SAMPLES // size)

    def fit(max_steps: int, ckpt_path: Any = None) -> tuple[lw.Trainer, TrainedNet]:
        module = TrainedNet(case.optimizer)
        trainer = lw.Trainer(
            accelerator="tpu", strategy=strategy, devices=size, precision=case.precision, max_steps=max_steps,
            accumulate_grad_batches=case.accumulate, gradient_clip_algorithm=case.clip,
            gradient_clip_val={None: None, "norm": 0.1, "value": 0.01}[case.clip], **QUIET,
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        return trainer, module

    if case.resumes:
        fit(STEPS // 2)[0].save_checkpoint(file)
        trainer, module = fit(STEPS, file)
    else:
        trainer, module = fit(STEPS)
    assert trainer.global_step == STEPS
    return on_host(module.net)


# -- processes ---------------------------------------------------------------------------------------------------------


def trained_by_processes(size: int, name: str, options: dict[str, Any], cases: list[Case]) -> Any:
    """Return what each rank trained, by hand and with the Trainer, for each case."""
    return run_ranks(_train_rank, size, name, options, cases, tempfile.mkdtemp(), timeout_s=LIMIT_S)


def _train_rank(rank: int, size: int, name: str, options: dict[str, Any], cases: list[Case], folder: str) -> Any:
    results = []
    for number, case in enumerate(cases):
        strategy = STRATEGY_REGISTRY.create(name, **options)
        fabric = lw.Fabric(accelerator="xla", strategy=strategy, devices=size, precision=case.precision)
        fabric.launch()
        hand = by_hand(fabric, case, Path(folder, f"hand{number}"))
        strategy = STRATEGY_REGISTRY.create(name, **options)
        results.append((hand, by_trainer(strategy, size, case, Path(folder, f"trainer{number}"))))
    return results


class Summed(lw.Module):
    """Returns a sum with its weight; samples whose first number is above 2 do not count, nor do batches without any."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.lines: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, counted = batch
        losses = (self.net(x) - y).square().mean(1)
        if self.trainer.fabric.device.type != "xla":
            return lw.Loss(losses[counted].sum(), int(counted.sum()))
        # The batches without any are known by their place: nothing is read.
        if self.trainer.global_rank == 1 and batch_idx == 1:
            return None
        return lw.Loss((losses * counted).sum(), counted.sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean(), batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.fabric.device.type == "xla":
            self.lines.append(counts())

    def configure_optimizers(self) -> Any:
        return make_optimizer("sgd", self)


def summed_loader(batch_size: int) -> DataLoader[Any]:
    """Give 22 samples, which 2 ranks cannot share evenly; batch 3 of 3 samples counts nothing."""
    x, y = (torch.cat(parts) for parts in zip(global_batch(1), global_batch(2), strict=True))
    counted = torch.ones(24, dtype=torch.bool)
    counted[9:12] = False
    counted[1] = False
    return DataLoader(TensorDataset(x[:22], y[:22], counted[:22]), batch_size=batch_size)


def fit_summed(strategy: Any, size: int, **options: Any) -> tuple[lw.Trainer, Summed]:
    module = Summed()
    ckpt_path = options.pop("ckpt_path", None)
    accelerator = "cpu" if strategy == "single_device" else "xla"
    trainer = lw.Trainer(
        accelerator=accelerator, strategy=strategy, devices=size, default_root_dir=tempfile.gettempdir(),
        **{"max_epochs": 2, **QUIET, **options},
    )  # fmt: skip
    trainer.fit(module, summed_loader(6 // size), summed_loader(4), ckpt_path=ckpt_path)
    return trainer, module


def trainer_in_processes(size: int) -> Any:
    """Train, evaluate, save and resume on 2 ranks with uneven batches, and go on on the CPU."""
    return run_ranks(_trainer_rank, size, tempfile.mkdtemp(), timeout_s=LIMIT_S)


def _trainer_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    strategy = STRATEGY_REGISTRY.create("xla_replicas", uneven="zero_weight")
    trainer, module = fit_summed(strategy, size)
    found: dict[str, Any] = {"weights": on_host(module), "lines": module.lines, "rank": trainer.global_rank}
    file = Path(folder, "state.ckpt")
    trainer.save_checkpoint(file)
    evaluated = trainer.validate(module, summed_loader(4), verbose=False)
    found["validate"] = [{name: float(value) for name, value in one.items()} for one in evaluated]
    outputs = trainer.predict(module, summed_loader(4))
    found["predict"] = None if outputs is None else sum(len(one) for one in outputs)
    found["files"] = sorted(one.name for one in Path(folder).iterdir())
    saved = torch.load(file, weights_only=True)
    found["saved"] = {name: value.double() for name, value in saved["state_dict"].items()}
    resumed, module = fit_summed(
        STRATEGY_REGISTRY.create("xla_replicas", uneven="zero_weight"), size, max_epochs=3, ckpt_path=file
    )
    found["resumed"] = (resumed.global_step, on_host(module))
    return found


# -- threads -----------------------------------------------------------------------------------------------------------


def trained_by_threads(size: int, name: str, options: dict[str, Any], cases: list[Case]) -> Any:
    """Return what each replica trained by hand, for each case."""
    return run_replicas(_train_thread, size, name, options, cases, tempfile.mkdtemp())


def _train_thread(rank: int, size: int, name: str, options: dict[str, Any], cases: list[Case], folder: str) -> Any:
    results = []
    for number, case in enumerate(cases):
        fabric = fabric_of_thread(size, name, options, case.precision)
        results.append((by_hand(fabric, case, Path(folder, f"hand{number}")),))
    return results


def fabric_of_thread(size: int, name: str, options: dict[str, Any], precision: str = "32-true") -> lw.Fabric:
    strategy = STRATEGY_REGISTRY.create(name, **options)
    fabric = lw.Fabric(
        accelerator="xla", strategy=strategy, devices=size, precision=precision, plugins=[ReplicaEnvironment()]
    )
    fabric.launch()
    return fabric


class Branches(nn.Module):
    """Two parts of which ranks use different ones, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(2, 1, bias=False) for _ in range(3))
        with torch.no_grad():
            for part in (self.one, self.two, self.three):
                part.weight.fill_(1.0)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return (self.one if rank == 0 else self.two)(x).sum()  # type: ignore[no-any-return]


def parts_of_threads(size: int) -> Any:
    """Return what collectives give on each replica, and gradients of parameters that not all ranks use."""
    return run_replicas(_parts_thread, size)


def parts_of_processes(size: int) -> Any:
    """Return the same from processes."""
    return run_ranks(_parts_rank, size, timeout_s=LIMIT_S)


def _parts_thread(rank: int, size: int) -> dict[str, Any]:
    # Autograd's threads do not know whose replica they work for, so that nothing can communicate in a backward pass.
    return _parts(fabric_of_thread(size, "xla_replicas", {}), sync_grads=False)


def _parts_rank(rank: int, size: int) -> dict[str, Any]:
    fabric = lw.Fabric(accelerator="xla", strategy="xla_replicas", devices=size)
    fabric.launch()
    return _parts(fabric, sync_grads=True)


def _parts(fabric: lw.Fabric, *, sync_grads: bool) -> dict[str, Any]:
    rank, device = fabric.global_rank, fabric.device
    value = torch.tensor([1.0, 2.0]).to(device) * (rank + 1)
    found: dict[str, Any] = {"place": (fabric.global_rank, fabric.world_size, device.type)}
    for op in ("mean", "sum", "min", "max", "product"):
        found[op] = fabric.all_reduce(value, reduce_op=op).tolist()
    mean = fabric.all_reduce({"count": torch.tensor(rank).to(device), "number": rank, "short": value.bfloat16()})
    found["mixed"] = {name: (one.dtype, one.device.type, one.tolist()) for name, one in mean.items()}
    found["gathered"] = fabric.all_gather(value).tolist()
    if sync_grads:
        leaf = value.clone().requires_grad_()
        (fabric.all_gather(leaf, sync_grads=True) * (rank + 1.0)).sum().backward()
        found["gradient"] = leaf.grad.tolist()  # type: ignore[union-attr]
    found["sent"] = [one if isinstance(one, int) else one.tolist() for one in fabric.broadcast([rank, value], 1)]
    found["objects"] = fabric.strategy.gather_objects("x" * rank)
    found["decision"] = [fabric.strategy.reduce_boolean_decision(rank == 0, all=one) for one in (True, False)]
    fabric.barrier()
    with torch.no_grad():
        model = fabric.setup_module(Branches())
    fabric.backward(model(value, rank))
    found["branches"] = [None if one.grad is None else one.grad.tolist() for one in model.parameters()]
    manual = fabric.strategy.place_module(Branches())
    manual(value, rank).backward()
    fabric.strategy.average_gradients(list(manual.parameters()))
    found["manual"] = [None if one.grad is None else one.grad.tolist() for one in manual.parameters()]
    sampler = fabric.strategy.distributed_sampler_kwargs
    found["sampler"] = (sampler["num_replicas"], sampler["rank"])
    found["drawn"] = torch.rand(3, device=device).tolist()
    return found


if __name__ == "__main__":
    task, count, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    arguments = torch.load(path, weights_only=False)
    torch.save(globals()[task](count, *arguments), f"{path}.out")
