"""Checkpoints between strategies and numbers of ranks, in both forms: a run goes on as if it had never stopped."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.checkpoint.sharded import is_folder_checkpoint
from loopwright.strategies import FSDPStrategy

# Any in this file: what users' steps take and return, and results that travel between processes.

SAVED_AT = 4  # steps, of 3 in an epoch: in the middle of the second one
STEPS = 7

# Another number of ranks adds gradients in another order, in float64; nothing else may differ.
TOLERANCE = 1e-10

RUNS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "auto", {}),
    "ddp2": (2, "ddp", {}),
    "fsdp1": (1, "fsdp", {}),
    "fsdp2": (2, "fsdp", {}),
    "fsdp3": (3, "fsdp", {}),
    "fsdp2x2": (4, "fsdp", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}),
}

FORMS = {"full": "full", "sharded": "sharded", "async": "sharded", "async-full": "full"}

SAVES = {
    "one": ["full"],
    "ddp2": ["full"],
    "fsdp1": ["sharded"],
    "fsdp2": ["full", "sharded", "async", "async-full"],
    "fsdp3": ["full", "sharded"],
    "fsdp2x2": ["full", "sharded"],
}

# Each checkpoint goes to where it came from (bit for bit), to fewer ranks and to more.
LOADS = {
    "one": ["one/full", "ddp2/full", "fsdp1/sharded", "fsdp2/async", "fsdp2x2/sharded"],
    "ddp2": ["ddp2/full", "fsdp2/sharded", "fsdp3/full"],
    "fsdp1": ["fsdp1/sharded", "fsdp3/sharded"],
    "fsdp2": [
        "fsdp2/full", "fsdp2/sharded", "fsdp2/async", "fsdp2/async-full", "one/full", "fsdp3/sharded", "fsdp2x2/full",
    ],
    "fsdp3": ["fsdp3/full", "fsdp3/sharded", "ddp2/full", "fsdp2/async", "fsdp2x2/sharded"],
    "fsdp2x2": ["fsdp2x2/sharded", "one/full", "fsdp3/sharded"],
}  # fmt: skip


# The same for a loop by hand.
LOADS_BY_HAND = {
    "one": ["fsdp3/sharded"],
    "ddp2": ["fsdp2/async"],
    "fsdp1": ["ddp2/full"],
    "fsdp2": ["one/full", "fsdp2/sharded", "fsdp2x2/sharded"],
    "fsdp3": ["fsdp2/async-full", "fsdp2/sharded"],
    "fsdp2x2": ["fsdp3/full"],
}


class Block(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.middle(x).tanh())


class Model(lw.Module):
    """A tied weight, dimensions that divide by nothing, a parameter without any, a buffer and a frozen layer."""

    def __init__(self, bias: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 5)
        self.block = Block()
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("decay", torch.tensor([1.0, 1.0]))
        self.bias = bias
        self.losses: list[float] = []
        self.draws: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.block(self.first(x).tanh())) * self.scale * self.decay[0] + self.bias

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.decay.mul_(0.99)
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(float(loss.detach()))
        self.draws.append(float(torch.rand(())))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y), batch_size=len(x), sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def samples(count: int = 72) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(count, 3, generator=generator, dtype=torch.float64))


def loader(size: int) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=12 // size, shuffle=True)


def strategy_of(run: str, form: str = "full") -> Any:
    _, name, options = RUNS[run]
    if name != "fsdp":
        return name
    return FSDPStrategy(auto_wrap_policy={Block}, state_dict_type=FORMS[form], **options)


def trainer_of(run: str, form: str = "full", **arguments: Any) -> lw.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    more = {"enable_checkpointing": "callbacks" in arguments, "max_steps": STEPS, "limit_val_batches": 0}
    return lw.Trainer(
        accelerator="cpu", devices=RUNS[run][0], strategy=strategy_of(run, form), precision="64-true",
        accumulate_grad_batches=2, plugins=lw.AsyncCheckpointIO() if form.startswith("async") else None,
        **{**quiet, **more, **arguments},
    )  # fmt: skip


def whole(module: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad():
        state = module.state_dict()
        return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for n, v in state.items()}


def results_of(trainer: lw.Trainer, module: Model) -> dict[str, Any]:
    assert trainer.global_step == STEPS
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"losses": module.losses, "draws": module.draws, "weights": whole(module), "rates": rates}


def save_all(rank: int, size: int, root: Path, run: str) -> dict[str, Any]:
    results = {}
    for form in SAVES[run]:
        lw.seed_everything(11, verbose=False)
        save = lw.ModelCheckpoint(root / run / form, "{step}", every_n_train_steps=SAVED_AT)
        trainer, module = trainer_of(run, form, callbacks=[save]), Model()
        trainer.fit(module, loader(size))
        results[form] = results_of(trainer, module)
        by_hand(run, form, save_to=root / run / form / "by hand.ckpt")
    return results


def load_all(rank: int, size: int, root: Path, run: str) -> dict[str, Any]:
    results = {}
    for source in LOADS[run]:
        torch.manual_seed(rank)  # what is not restored is not by chance what it was
        trainer, module = trainer_of(run), Model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        trainer.fit(module, loader(size), ckpt_path=root / source / f"step={SAVED_AT}.ckpt")
        results[source] = results_of(trainer, module)
    for source in LOADS_BY_HAND[run]:
        results[f"{source} by hand"] = by_hand(run, "full", load_from=root / source / "by hand.ckpt")
    return results


def by_hand(run: str, form: str, save_to: Path | None = None, load_from: Path | None = None) -> dict[str, Tensor]:
    """Do one half of a loop by hand, and save; or load, and do the other half. Return the weights."""
    fabric = lw.Fabric(
        accelerator="cpu", devices=RUNS[run][0], strategy=strategy_of(run, form), precision="64-true",
        plugins=lw.AsyncCheckpointIO() if form.startswith("async") else None,
    )  # fmt: skip
    fabric.launch()
    module = Model()
    trained = [one for one in module.parameters() if one.requires_grad]
    model, optimizer = fabric.setup(module, torch.optim.AdamW(trained, lr=0.02, eps=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if load_from is not None:
        fabric.load(load_from, state)
        assert state["step"] == 2
    x, y = samples().tensors
    for step in range(state["step"], state["step"] + 2):
        mine = slice(12 * step + fabric.global_rank, 12 * (step + 1), fabric.world_size)
        fabric.backward(nn.functional.mse_loss(model(x[mine]), y[mine]))
        optimizer.step()
        optimizer.zero_grad()
    if save_to is not None:
        fabric.save(save_to, {**state, "step": 2})
        if form.startswith("async"):
            fabric.load(save_to)  # so that it is complete
    return whole(module)


def mean_losses(results: list[dict[str, Any]]) -> Tensor:
    """Return the losses of the whole batches: ranks have equally large parts of them."""
    return torch.tensor([one["losses"] for one in results], dtype=torch.float64).mean(0)


def four_steps_by_hand() -> dict[str, Tensor]:
    model = Model().double()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02, eps=1e-2)
    for x, y in DataLoader(torch.utils.data.Subset(samples(), range(48)), batch_size=12):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401  # here once, and not in every child

    for name in (
        "checkpoint.sharded.writer",
        "checkpoint.saving.background",
        "fabric.on_all_ranks",
        "fabric.watch.watch",
        "callbacks.rank_zero",
        "strategies.distributed.collectives",
        "strategies.ddp.strategy",
        "strategies.fsdp.sharding",
        "trainer.loop.stop_points",
        "trainer.loop.rank_coordination",
        "trainer.metrics.ranks_metrics",
        "trainer.metrics.metric_objects",
        "precision.double",
        "data.distributed.choose",
        "data.distributed.evaluation",
        "fabric.launch.external",
    ):
        import_module(f"loopwright.{name}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Return the folder of all checkpoints, and for each run what each of its ranks came to without a stop."""
    root = tmp_path_factory.mktemp("matrix")
    runs = {run: run_ranks(save_all, size, root, run, connect=False) for run, (size, *_) in RUNS.items()}
    for run, forms in SAVES.items():
        for form in forms:
            path = root / run / form / f"step={SAVED_AT}.ckpt"
            assert is_folder_checkpoint(path) == (FORMS[form] == "sharded"), path
    return root, runs


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], case: str) -> None:
    assert found.keys() == wanted.keys(), case
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{case}: {name}")


@pytest.mark.slow
def test_a_resumed_run_equals_the_one_that_never_stopped(saved: tuple[Path, dict[str, list[Any]]]) -> None:
    root, runs = saved
    (one,) = [ranks["full"] for ranks in runs["one"]]
    wanted_by_hand = four_steps_by_hand()
    done = 2 * SAVED_AT
    for target, (size, *_) in RUNS.items():
        everywhere = run_ranks(load_all, size, root, target, connect=False)
        for source in LOADS[target]:
            case = f"{source} to {target}"
            found = [ranks[source] for ranks in everywhere]
            close({"losses": mean_losses(found)}, {"losses": mean_losses([one])[done:]}, case)
            for ranks in found:
                assert ranks["rates"] == one["rates"], case
                close(ranks["weights"], one["weights"], case)
            run, form = source.split("/")
            if run == target:
                for own, ranks in zip(runs[run], found, strict=True):
                    assert own[form]["losses"][done:] == ranks["losses"], case
                    assert own[form]["draws"][done:] == ranks["draws"], case
                    assert all(
                        torch.equal(ranks["weights"][name], value) for name, value in own[form]["weights"].items()
                    ), case
        for source in LOADS_BY_HAND[target]:
            for ranks in everywhere:
                close(ranks[f"{source} by hand"], wanted_by_hand, f"{source} to {target}, by hand")


@pytest.mark.slow
def test_folders_and_files_are_read_alike_where_nobody_trains(saved: tuple[Path, dict[str, list[Any]]]) -> None:
    root, _ = saved
    name = f"step={SAVED_AT}.ckpt"
    tested = {}
    for source in ("fsdp2/full", "fsdp2/sharded", "fsdp2/async", "fsdp2/async-full"):
        module = Model.load_from_checkpoint(root / source / name)
        assert module.bias == 0.25
        assert float(module.decay[0]) == pytest.approx(0.99 ** (2 * SAVED_AT), rel=1e-6)
        assert module.block.tied.weight is module.block.middle.weight
        (metrics,) = trainer_of("one").test(Model(), loader(1), ckpt_path=root / source / name, verbose=False)
        tested[source] = (metrics["test_loss"], [value.tolist() for value in whole(module).values()])
    values = list(tested.values())
    assert values[1:] == values[:-1]  # the same weights, whatever the form
