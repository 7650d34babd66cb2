"""What a Trainer plans for programs as users write them is what its own fit holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measured_runs import TRIES, fitted_peak
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright as lw


class Net(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Gan(lw.Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(128, 256), nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        made = self.generator(torch.randn(len(batch), 128, device=self.device))
        with self.toggled_optimizer(of_critic):
            loss = F.softplus(-self.critic(batch)).mean() + F.softplus(self.critic(made.detach())).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_critic, 1.0)
            of_critic.step()
        with self.toggled_optimizer(of_generator):
            loss = F.softplus(-self.critic(made)).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
        self.lr_schedulers().step()
        self.log("loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 10)]


class Repeats(Net):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.repeat(4, 1)


class LogsNumbers(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self(batch)
        loss = output[output.sum(1) > -1e9].square().mean()
        self.log("loss", loss.item())
        return None if torch.isnan(loss) else loss


def on_instance() -> Net:
    module = Net()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    return module


def schedule_free() -> Net:
    from schedulefree import AdamWScheduleFree

    module = Net()
    module.configure_optimizers = lambda: AdamWScheduleFree(module.parameters())  # type: ignore[method-assign]
    return module


PROGRAMS: dict[str, tuple[Callable[[], lw.Module], int, dict[str, Any]]] = {
    "gan": (Gan, 64, {}),
    "hooks": (Repeats, 256, {}),
    "numbers": (LogsNumbers, 512, {}),
    "checkpointing": (Net, 2048, {"activation_checkpointing": True}),
    "half of the blocks": (Net, 2048, {"activation_checkpointing": 0.5}),
    "float32 sums": (Net, 64, {"precision": "bf16-true", "grad_accumulation_dtype": "float32"}),
    "average": (Net, 64, {"callbacks": [lw.callbacks.EMA()]}),
    "optimizer of the instance": (on_instance, 64, {}),
    "schedule-free": (schedule_free, 64, {}),
}


def planned_and_fitted(name: str, strategy: str, size: int) -> tuple[float, float]:
    build, batch_size, options = PROGRAMS[name]
    rows: Any = range(3 * size * batch_size)
    loader = DataLoader(rows, batch_size=batch_size, collate_fn=lambda rows: torch.ones(len(rows), 256))
    shared = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False}

    def fit(rank: int, size: int) -> int:
        trainer = lw.Trainer(max_steps=2, devices=size, strategy=strategy, **shared, **options)
        return fitted_peak(trainer, build(), loader)

    plan = lw.Trainer(devices=1, **shared, **options).plan(build(), loader, devices=size)
    row = next(row for row in plan.rows if row.name == strategy)
    return row.peak, min(run_ranks(fit, size, connect=False)[0] for _ in range(1 if size == 1 else TRIES))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_holds_what_its_trainer_plans(name: str) -> None:
    planned, fitted = planned_and_fitted(name, "single_device", 1)
    # 1 %: counts of the Trainer, and what it logs.
    assert planned == pytest.approx(fitted, rel=0.01)


# fsdp only where a backward pass needs the most: gloo copies what it scatters, which other backends do not.
ON_RANKS = [("gan", "ddp"), ("gan", "fsdp"), ("average", "ddp"), ("float32 sums", "ddp")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), ON_RANKS)
def test_ranks_of_a_program_hold_what_its_trainer_plans(name: str, strategy: str) -> None:
    planned, fitted = planned_and_fitted(name, strategy, 2)
    # 3 %: with ranks the Trainer reads a batch ahead.
    assert planned == pytest.approx(fitted, rel=0.03)


def test_a_workspace_that_only_the_device_knows_is_named() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(256, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(x)[0]

    trainer = lw.Trainer(accelerator="cpu", devices=1, logger=False)
    plan = trainer.plan(Recurrent(), DataLoader(torch.randn(8, 4, 256), batch_size=4))
    assert "the workspace of recurrent layers is not counted" in str(plan)
