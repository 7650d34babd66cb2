"""MeshStrategy with pipeline stages: the results of one process on the same global batches."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.mesh.pipeline import Pipeline
from loopwright.strategies.mesh.pipeline.stages import runner_of

# Any in this file: batches, and results that travel between processes.

WIDTH, WORDS, STEPS, MICRO = 8, 12, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return cast(Tensor, x + self.mix(self.norm(x)).tanh() * scale)


class Decoder(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = torch.linspace(0.5, 1.5, ids.shape[1], dtype=x.dtype)[:, None]
        for block in self.blocks:
            x = block(x, scale)
        return cast(Tensor, self.head(self.norm(x)))


class Net(lw.Module):
    """Nothing in it knows of stages."""

    def __init__(self, *, tied: bool = False, is_sum: bool = False) -> None:
        super().__init__()
        self.model = Decoder(tied=tied)
        self.is_sum = is_sum
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, targets = batch
        self.calls += 1
        logits = self.model(ids)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        self.log("loss", each.mean(), on_step=True, on_epoch=True)
        if self.is_sum:
            kept = targets.flatten() != 3
            return lw.Loss(each[kept].sum(), kept.sum())
        return each.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, targets = batch
        logits = self.model(ids)
        self.log("val", nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cast(Tensor, self.model(batch[0]).argmax(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(batch_size: int, count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(0, WORDS, (count, 5), generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(ids, targets), batch_size=batch_size)


def trainer_of(size: int, strategy: Strategy | str, **arguments: Any) -> lw.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "strategy": strategy, "devices": size, "precision": "64-true", "max_epochs": 1,
        "logger": False, "accumulate_grad_batches": MICRO, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return lw.Trainer(**{**defaults, **arguments})


def full(value: Tensor) -> Tensor:
    return cast(Any, value).full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


class Seen(lw.Callback):
    """Collects logged losses at each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.losses.append(float(outputs["loss"]))


def fit(
    size: int, strategy: Strategy | str, *, replicas: int = 1, clip: float | None = 0.5, fault: Any = None, **of: Any
) -> dict[str, Any]:
    lw.seed_everything(1, verbose=False)
    module = Net(**of)
    seen = Seen()
    trainer = trainer_of(size, strategy, gradient_clip_val=clip, callbacks=[seen])
    micro = 4 // replicas
    trainer.fit(module, data(micro, 4 * MICRO * STEPS), data(micro, 12))
    with torch.no_grad():
        weights = {name: full(value) for name, value in module.named_parameters()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    runner = runner_of(module)
    schedules = 0 if runner is None else len(runner.schedules)
    return {
        "weights": weights, "metrics": metrics, "losses": seen.losses, "calls": module.calls, "schedules": schedules,
    }  # fmt: skip


def run(rank: int, size: int, strategy: Strategy | str, arguments: dict[str, Any]) -> dict[str, Any]:
    return fit(size, strategy, **arguments)


def compare(size: int, mesh: MeshStrategy, *, bound: float = 1e-12, **arguments: Any) -> list[dict[str, Any]]:
    whole = {name: value for name, value in arguments.items() if name != "replicas"}
    expected = run_ranks(run, 1, "auto", whole, connect=False)[0]
    ranks = run_ranks(run, size, mesh, arguments, connect=False)
    found: dict[str, Tensor] = {}
    for one in ranks:
        found.update(one["weights"])
    alias = "model.head.weight" if arguments.get("tied") else ""
    found.pop(alias, None)
    assert found.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        difference = (found[name] - value).abs().max()
        assert difference <= bound, (name, difference)
    for one in ranks:
        assert one["schedules"] == 1  # all windows but the first
        assert {"loss_epoch", "val"} <= one["metrics"].keys()
        for name in ("loss_epoch", "val"):
            assert abs(one["metrics"][name] - expected["metrics"][name]) <= 1e-13, (name, one["metrics"], expected)
    if arguments.get("replicas", 1) == 1:
        last = next(one for one in ranks if one["losses"])
        assert max(abs(a - b) for a, b in zip(last["losses"], expected["losses"], strict=True)) <= 1e-13
    return ranks


ALL = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev")


@pytest.mark.parametrize("schedule", ALL)
def test_two_stages_give_the_bits_of_one_process(schedule: str) -> None:
    ranks = compare(2, MeshStrategy(pp=2, pipeline=Pipeline(schedule=schedule)), bound=0.0, clip=None)
    # training_step ran once a stage and micro-batch; what it counts on the module counts once.
    assert [one["calls"] for one in ranks] == [MICRO * STEPS] * 2


@pytest.mark.parametrize(
    ("size", "mesh", "arguments"),
    [
        (2, MeshStrategy(pp=2), {}),
        (2, MeshStrategy(pp=2), {"tied": True}),
        (2, MeshStrategy(pp=2), {"is_sum": True}),
        (2, MeshStrategy(pp=2, pipeline=Pipeline(schedule="zbv")), {"tied": True, "is_sum": True}),
        (4, MeshStrategy(pp=4), {"tied": True}),
        (4, MeshStrategy(pp=2, fsdp=2), {"replicas": 2}),
        (4, MeshStrategy(pp=2, dp=2, fsdp=1), {"replicas": 2, "tied": True}),
        (4, MeshStrategy(pp=2, fsdp=2), {"replicas": 2, "is_sum": True, "tied": True}),
        (4, MeshStrategy(pp=2, fsdp=2, pipeline=Pipeline(schedule="zbv")), {"replicas": 2}),
    ],
    ids=[
        "pp", "pp tied", "pp sums", "zbv", "pp 4", "pp x fsdp", "pp x dp", "pp x fsdp sums tied", "zbv x fsdp",
    ],
)  # fmt: skip
def test_stages_give_the_results_of_one_process(size: int, mesh: MeshStrategy, arguments: dict[str, Any]) -> None:
    compare(size, mesh, **arguments)


def predict(rank: int, size: int, strategy: Strategy | str, batch_size: int) -> Any:
    lw.seed_everything(1, verbose=False)
    outputs = trainer_of(size, strategy).predict(Net(), data(batch_size, 10))
    return [None if one is None else one.tolist() for one in cast(list[Any], outputs)]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_predictions_are_those_of_one_process(schedule: str) -> None:
    mesh = MeshStrategy(pp=2, fsdp=2, pipeline=Pipeline(schedule=schedule))
    expected = run_ranks(predict, 1, "auto", 2, connect=False)[0]  # five batches: one rank has none at the end
    assert all(found == expected for found in run_ranks(predict, 4, mesh, 2, connect=False))


PLAN = {"model.blocks.*.mix": "colwise_gather_output"}
PARTS = {**PLAN, "model.head": "colwise_gather_output"}


@pytest.mark.parametrize(
    ("size", "mesh", "replicas"),
    [
        (4, MeshStrategy(pp=2, tp=2, tensor_plan=PLAN, pipeline=Pipeline(schedule="zbv")), 1),
        (4, MeshStrategy(pp=2, tp=2, tensor_plan=PARTS, loss_parallel=True), 1),
        (8, MeshStrategy(pp=2, fsdp=2, tp=2, tensor_plan=PARTS, loss_parallel=True), 2),
        (8, MeshStrategy(pp=2, dp=2, fsdp=2), 4),
    ],
    ids=["pp x tp", "loss in parts", "pp x fsdp x tp", "pp x dp x fsdp"],
)
def test_stages_with_other_axes(size: int, mesh: MeshStrategy, replicas: int) -> None:
    compare(size, mesh, replicas=replicas)
