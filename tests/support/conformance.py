"""One table of strategies, and the training that all of them must agree on.

A new strategy is one line in `STRATEGIES`. The training is a loop by hand on Fabric: the same global batches, seed and
steps, on any number of ranks and devices. A global micro-batch has 12 samples, which the ranks share.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import STRATEGY_REGISTRY

__all__ = [
    "STRATEGIES",
    "TOLERANCE",
    "Case",
    "Entry",
    "cases_for",
    "cases_of",
    "make_fabric",
    "plain_torch",
    "train",
    "train_all",
    "train_all_by_trainer",
]

State = dict[str, Tensor]

TOLERANCE = {
    "64-true": 1e-11,
    "32-true": 2e-5,
    "16-mixed": 1e-2,
    "bf16-mixed": 5e-2,
    "16-true": 3e-2,
    "bf16-true": 1e-1,
}
"""The largest difference from one process, as a share of the largest change of a weight in training: only the order of
additions differs, so it is a few times the precision of the gradients (or of the weights, for "true")."""


@dataclass(frozen=True)
class Entry:
    """A strategy and how it is tried.

    Attributes:
        name: What users type.
        size: Number of processes.
        devices: Number of devices, where one process has several.
        options: Further arguments.
        launcher: "ranks": forked by the test; "fork", "spawn", "popen": by Fabric.launch.
        is_exact: Whether the weights are the same bits as those of one process.
        is_one_recipe: Whether a loop by hand and the Trainer compute the same: "dp" averages the parts' losses in the
            Trainer, and the loop by hand takes the loss of the joined outputs.
        is_variant: Whether a few cases do: it differs from another entry in one thing.
        precisions: What it claims.
    """

    name: str
    size: int = 1
    devices: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    launcher: str = "ranks"
    is_exact: bool = False
    is_one_recipe: bool = True
    is_variant: bool = False
    precisions: tuple[str, ...] = tuple(TOLERANCE)

    def __str__(self) -> str:
        extra = "".join(
            f"-{key}={'partitioned' if value is PARTITIONED else value}" for key, value in self.options.items()
        )
        return f"{self.name}{extra}-{self.size}" + ("" if self.launcher == "ranks" else f"-{self.launcher}")


PARTITIONED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
FEW = ("64-true", "bf16-mixed")  # where a variant differs in how it communicates or starts, not in what it computes

STRATEGIES = (
    Entry("single_device", is_exact=True),
    Entry("dp", devices=2, is_one_recipe=False),
    Entry("dp", devices=3, is_one_recipe=False, precisions=FEW),
    Entry("ddp", size=2),
    Entry("ddp", size=3, precisions=FEW, is_variant=True),
    Entry("ddp", size=2, options={"static_graph": True}, precisions=FEW, is_variant=True),
    Entry(
        "ddp",
        size=2,
        options={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002},
        precisions=FEW,
        is_variant=True,
    ),
    Entry("ddp", size=2, options={"ddp_comm_hook": "allreduce"}, precisions=("64-true",), is_variant=True),
    Entry("ddp_find_unused_parameters_true", size=2, precisions=FEW, is_variant=True),
    Entry("ddp_fork", size=2, launcher="fork", precisions=("64-true",), is_variant=True),
    Entry("ddp_spawn", size=2, launcher="spawn", precisions=("64-true",), is_variant=True),
    Entry("ddp", size=2, launcher="popen", precisions=("64-true",), is_variant=True),
    # Units as small as they get, so that there is more than one.
    Entry("fsdp", size=2, options={"auto_wrap_policy": {"Linear"}}),
    Entry("fsdp", size=1, precisions=FEW, is_variant=True),
    Entry("fsdp", size=2, precisions=FEW, is_variant=True),
    Entry("fsdp", size=3, options={"auto_wrap_policy": {"Linear"}}, precisions=FEW, is_variant=True),
    Entry(
        "fsdp",
        size=4,
        options={"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
        precisions=FEW,
        is_variant=True,
    ),
    Entry("fsdp", size=2, options={"sharding_strategy": "SHARD_GRAD_OP"}, precisions=FEW, is_variant=True),
    Entry("fsdp", size=2, options={"sharding_strategy": "NO_SHARD"}, precisions=FEW, is_variant=True),
    Entry("fsdp", size=2, options={"state_dict_type": "full", "forward_prefetch": 2}, precisions=FEW, is_variant=True),
    Entry("fsdp", size=2, options={"state_dict_type": "sharded"}, precisions=FEW, is_variant=True),
    Entry("fsdp", size=2, options={"activation_checkpointing": {"Linear"}}, precisions=FEW, is_variant=True),
    Entry("fsdp_cpu_offload", size=2, precisions=FEW, is_variant=True),
    # Masters are float32, so there is no "64-true"; this CPU may have no float16.
    Entry("deepspeed", size=2, options={"stage": 0}, precisions=("32-true",), is_variant=True),
    Entry("deepspeed_stage_1", size=2, precisions=("bf16-mixed",), is_variant=True),
    Entry("deepspeed", size=2, precisions=("32-true", "bf16-mixed")),
    # No parameter is so small that it stays whole.
    Entry("deepspeed", size=2, options={"config": PARTITIONED}, precisions=("32-true", "bf16-mixed"), is_variant=True),
    Entry("deepspeed_stage_3_offload", size=2, precisions=("32-true",), is_variant=True),
)


@dataclass(frozen=True)
class Case:
    """What is trained."""

    precision: str = "32-true"
    accumulate: int = 1
    clip: str | None = None
    optimizer: str = "sgd"
    resumes: bool = False


def cases_for(precision: str) -> list[Case]:
    """Return all combinations in the precision in which a mistake shows best, and some in the others."""
    if precision == "64-true":
        combined = itertools.product((1, 3), (None, "norm", "value"), ("sgd", "adam"), (False, True))
        return [*(Case(precision, *one) for one in combined), Case(precision, 3, "agc", "sgd", True)]
    return [Case(precision, 1), Case(precision, 3, "norm", "sgd", True), Case(precision, 3, "value", "adam")]


def cases_of(entry: Entry, precision: str) -> list[Case]:
    """Return what a strategy is tried with: where each training starts processes of its own, a few cases do."""
    if entry.launcher == "ranks" and not entry.is_variant:
        return cases_for(precision)
    few = [Case(precision), Case(precision, 3, "norm", "adam", True)]
    return [*few, Case(precision, 3, "value", "sgd")] if entry.is_variant else few


class Net(nn.Module):
    """Layers of which one is used twice and one is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.again = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.again.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(self.norm(self.first(x)).tanh()).tanh()
        return self.head(self.tied(self.again(hidden)).tanh())


STEPS = 4
SAMPLES = 12


def global_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x.float(), torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64).float()


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    # A large eps: without it Adam turns the rounding of a gradient near 0 into a step of full size.
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-2)


def make_fabric(entry: Entry, precision: str) -> lw.Fabric:
    strategy = STRATEGY_REGISTRY.create(entry.name, **entry.options)
    return lw.Fabric(accelerator="cpu", strategy=strategy, devices=entry.devices or entry.size, precision=precision)


def train(fabric: lw.Fabric, case: Case, folder: str) -> State:
    """Train as a user would by hand, and return the weights in float64."""

    def set_up() -> tuple[Any, Any]:
        module = Net()
        model = fabric.setup_module(module)
        return model, fabric.setup_optimizers(make_optimizer(case.optimizer, model))

    model, optimizer = set_up()
    file = Path(folder, "state.ckpt")
    for step in range(STEPS):
        if case.resumes and step == STEPS // 2:
            fabric.save(file, {"model": model, "optimizer": optimizer})
            model, optimizer = set_up()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fabric.load(file, {"model": model, "optimizer": optimizer})
        for part in range(case.accumulate):
            x, y = (t.chunk(fabric.world_size)[fabric.global_rank] for t in global_batch(step * case.accumulate + part))
            with fabric.no_backward_sync(model, enabled=part < case.accumulate - 1):
                output = model(x)
                # torch 2.9 has no gradient of a loss of float64 and float32.
                loss = nn.functional.mse_loss(output, y.to(torch.promote_types(x.dtype, output.dtype)))
                fabric.backward(loss / case.accumulate)
        if case.clip == "norm":
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
        elif case.clip == "value":
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
        elif case.clip == "agc":
            fabric.clip_gradients(model, optimizer, agc_factor=0.01)
        optimizer.step()
        optimizer.zero_grad()
    fabric.barrier()
    return whole(model, fabric.strategy)


def whole(module: nn.Module, strategy: Any = None) -> State:
    """Return the weights in float64, whole where they are sharded."""
    if str(getattr(strategy, "strategy_name", "")) == "deepspeed":  # float32 masters, which the module has not
        gathered = strategy.gather_state(strategy.module_state_dict(getattr(module, "_without_fabric", module)))
        state = {name: value for name, value in strategy.broadcast(gathered).items() if isinstance(value, Tensor)}
    else:
        state = module.state_dict()
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {name: value.detach().double().clone() for name, value in full.items()}


def train_all(fabric: lw.Fabric, cases: list[Case], folder: str) -> list[State]:
    """Train all cases of one precision, one after the other."""
    return [train(fabric, case, folder) for case in cases]


class TrainedNet(lw.Module):
    """The same network for the Trainer."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.net = Net()
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y.to(x.dtype))

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.optimizer, self)


def train_by_trainer(entry: Entry, case: Case, folder: str) -> State:
    """Train with the Trainer, on this rank or in processes that it starts, and return the weights in float64."""
    batches = [global_batch(number) for number in range(STEPS * case.accumulate)]
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=SAMPLES // entry.size)

    def fit(max_steps: int, ckpt_path: str | None = None) -> tuple[lw.Trainer, TrainedNet]:
        module = TrainedNet(case.optimizer)
        trainer = lw.Trainer(
            accelerator="cpu", strategy=STRATEGY_REGISTRY.create(entry.name, **entry.options),
            devices=entry.devices or entry.size, precision=case.precision, max_steps=max_steps, logger=False,
            accumulate_grad_batches=case.accumulate, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_algorithm=case.clip,
            gradient_clip_val={None: None, "norm": 0.1, "value": 0.01, "agc": 0.01}[case.clip],
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        return trainer, module

    if case.resumes:
        trainer, module = fit(STEPS // 2)
        trainer.save_checkpoint(f"{folder}/trainer.ckpt")
        trainer, module = fit(STEPS, f"{folder}/trainer.ckpt")
    else:
        trainer, module = fit(STEPS)
    assert trainer.global_step == STEPS
    if entry.name.startswith("deepspeed"):
        return {name.removeprefix("net."): value for name, value in whole(trainer.model, trainer.strategy).items()}
    return whole(module.net)


def train_all_by_trainer(entry: Entry, cases: list[Case], folder: str) -> list[State]:
    """Train all cases of one precision, one after the other."""
    return [train_by_trainer(entry, case, folder) for case in cases]


def clip_adaptively_by_hand(module: nn.Module, factor: float) -> None:
    """Limit the gradient of each output by the norm of its weights: Brock et al. 2021, eq. 3."""
    for weights in module.parameters():
        if weights.grad is not None:
            units = (
                list(zip(weights.data, weights.grad, strict=True)) if weights.ndim > 1 else [(weights, weights.grad)]
            )
            for unit, gradient in units:
                limit = factor * max(float(unit.detach().norm()), 1e-3)
                if (norm := float(gradient.norm())) > limit:
                    gradient *= limit / norm


def plain_torch(case: Case) -> State:
    """Train without Loopwright, in float32 or float64, from first to last step."""
    dtype = torch.float64 if case.precision == "64-true" else torch.float32
    module = Net().to(dtype)
    optimizer = make_optimizer(case.optimizer, module)
    for step in range(STEPS):
        for part in range(case.accumulate):
            x, y = (t.to(dtype) for t in global_batch(step * case.accumulate + part))
            (nn.functional.mse_loss(module(x), y) / case.accumulate).backward()
        if case.clip == "norm":
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        elif case.clip == "value":
            nn.utils.clip_grad_value_(module.parameters(), 0.01)
        elif case.clip == "agc":
            clip_adaptively_by_hand(module, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().double() for name, value in module.state_dict().items()}
