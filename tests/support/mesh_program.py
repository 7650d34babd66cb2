"""The training that every mesh must agree on with one process: a small language model in float64, by the Trainer.

Five AdamW steps of two micro-batches, clipping, a loss with weights, validations with an uneven end, logged sums, means
and metric objects. A global micro-batch has 4 samples, which the ranks that read different data share.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from tensor_models import PLAN, Llama, llama
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.loggers import DummyLogger
from loopwright.strategies import MeshStrategy, Strategy
from loopwright.strategies.distributed.shards import full_tensor, is_sharded
from loopwright.strategies.mesh.verify import saved_buffers
from loopwright.strategies.sharded import ShardedStrategy

__all__ = ["STEPS", "TRAINED", "Heard", "Joint", "Program", "Rows", "SaveAt", "fit", "mesh", "part_of", "whole"]

# Any in this file: batches, and options of the Trainer.

STEPS = 5
TRAINED, VALIDATED, LENGTH = 24, 10, 8
TENSOR_PLAN = {f"net.{name}": style for name, style in PLAN.items()}


class Program(lw.Module):
    """A language model, with what it read and which masks it drew.

    Args:
        dropout: Share of the positions whose logits are 0 in training.
        scales_logits: Whether the temperature is a factor of the logits, and not of the loss.
        kind: The model's class, a `Llama`.
        options: Of the model.

    Attributes:
        seen: Numbers of the samples of each training batch.
        masks: A mask drawn in each training step.
    """

    def __init__(
        self, *, dropout: float = 0.0, scales_logits: bool = True, kind: type[Llama] = Llama, **options: Any
    ) -> None:
        super().__init__()
        self.net = llama(kind, **options)
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.dropout, self.scales_logits = dropout, scales_logits
        self.counted = torchmetrics.SumMetric()
        self.seen: list[list[int]] = []
        self.masks: list[list[float]] = []

    def losses(self, batch: Any) -> lw.Loss:
        _, x, y = batch
        logits = self.net(x)
        if self.dropout and self.training:
            mask = F.dropout(torch.ones(logits.shape[:2], dtype=logits.dtype), self.dropout)
            self.masks.append(mask.flatten().tolist())
            logits = logits * mask[..., None]
        if self.scales_logits:
            logits = logits * self.temperature
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        return lw.Loss(total if self.scales_logits else total * self.temperature, (y != -100).sum())

    def training_step(self, batch: Any, batch_idx: int) -> lw.Loss:
        self.seen.append(batch[0].tolist())
        loss = self.losses(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("train_tokens", (batch[2] != -100).sum().double(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch))
        self.log("val_largest", batch[0].max().double(), reduce_fx="max")
        self.counted.update(batch[0].double().sum())
        self.log("val_counted", self.counted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Joint(Program):
    """Trains blocks by one optimizer, and the layers around them by another."""

    def configure_optimizers(self) -> Any:
        inner = list(self.net.blocks.parameters())
        held = {id(one) for one in inner}
        outer = [one for one in self.parameters() if id(one) not in held]
        return [torch.optim.AdamW(inner, lr=1e-2), torch.optim.SGD(outer, lr=1e-1)]


class Heard(logging.Handler):
    """Collects what torch logs about redistribution."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("torch.distributed.tensor").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class SaveAt(lw.Callback):
    """Saves after a step, in one form or in several.

    Args:
        step: Number of steps.
        paths: Path of the checkpoint; or those of several, by `state_dict_type`.
    """

    def __init__(self, step: int, paths: str | dict[str, str]) -> None:
        self.step, self.paths = step, paths

    def on_train_batch_end(self, trainer: lw.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step or not trainer.at_step_boundary:
            return
        if isinstance(self.paths, str):
            trainer.save_checkpoint(self.paths)
            return
        strategy = trainer.strategy
        for kind, path in self.paths.items():
            if isinstance(strategy, ShardedStrategy):
                strategy.plan = replace(strategy.plan, state_dict_type=kind)
            trainer.save_checkpoint(path)


class Rows(DummyLogger):
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 32, (count, LENGTH + 1), generator=generator)
    y = x[:, 1:].clone()
    lengths = torch.randint(2, LENGTH, (count,), generator=generator)
    y[torch.arange(LENGTH) >= lengths[:, None]] = -100
    return TensorDataset(torch.arange(count), x[:, :-1].contiguous(), y)


def mesh(**options: Any) -> MeshStrategy:
    """Return a mesh whose units are blocks; with tp, by the plan of the small model."""
    plan = {"tensor_plan": TENSOR_PLAN} if options.get("tp", 1) > 1 else {}
    return MeshStrategy(auto_wrap_policy={"Block"}, **{**plan, **options})


def fit(
    strategy: Strategy | str,
    size: int,
    *,
    data_size: int | None = None,
    module: Program | None = None,
    steps: int = STEPS,
    batch_size: int = 4,
    trained: int = TRAINED,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[lw.Trainer, Program, Rows]:
    """Train on this rank, one of `size`, of which `data_size` (None: all) read parts of a batch of `batch_size`."""
    micro = batch_size // (data_size or size)
    lw.seed_everything(1, verbose=False)
    module, rows = module or Program(), Rows()
    trainer = lw.Trainer(**{
        "accelerator": "cpu", "strategy": strategy, "devices": size, "precision": "64-true", "max_steps": steps,
        "logger": rows, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0,
        **options,
    })  # fmt: skip
    loader = DataLoader(samples(trained, 3), batch_size=micro, shuffle=True)
    trainer.fit(module, loader, DataLoader(samples(VALIDATED, 4), batch_size=micro), ckpt_path=ckpt_path)
    return trainer, module, rows


def part_of(module: nn.Module) -> dict[str, Tensor]:
    """Return what this rank has of a module's state, under the names of the module."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **saved_buffers(module)}


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return the full weights of this rank's stages. On every rank."""
    with torch.no_grad():
        state = part_of(module)
        return {n: full_tensor(v) if is_sharded(v) else v.clone() for n, v in state.items()}
