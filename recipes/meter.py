"""`Meter`: sets the number of steps when the data are known, and measures a training for its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..accelerators.usage import peak_memory_bytes, synchronize
from ..callbacks import Callback
from ..callbacks.monitors.measuring import LogSteps
from ..callbacks.summary.summary import count_elements
from ..errors import NonFiniteError
from ..fabric.peak_flops import get_available_flops
from ..fabric.throughput import Counts, per_second
from ..strategies.distributed.shards import local

if TYPE_CHECKING:
    from ..protocols import AnyBatch, AnyOutput, StateDict
    from ..trainer.trainer import Trainer
    from .step_plan import StepBudget

_IGNORED = -100


class Meter(Callback):
    """Sets the number of steps, counts tokens and seconds, and logs rates and norms at log boundaries.

    A training whose loss or weights are not finite ends with an error, before they are in a checkpoint.

    Counts are of all ranks, in checkpoints too, and continue in a resumed run. At log boundaries they are those of this
    rank, times the ranks that read different data.

    Args:
        make_plan: Returns the steps of the training; called when the data are set up, on every rank.
        describe_rows: Returns which records the rows of these numbers hold.
        limits_steps: Whether the Trainer ends after these steps, because `tokens` is given.

    Attributes:
        plan: The steps; None before the data are set up.
        totals: Counts and seconds of the training. `positions` include padding; `seconds` exclude validation.
        memory_bytes: Peak memory of each rank; empty before the end.
        parameters: Number of trained and of frozen parameters.
        flops_per_token: Estimate of the FLOPs of a training step: 6 per trained parameter and 4 per frozen one,
            without embeddings that are only looked up, and without attention scores.
        first_loss: Training loss of the first step, over all ranks.
        last_loss: Training loss of the last step, over all ranks.
        peak_flops: FLOP/s of one device; None if unknown.
    """

    def __init__(
        self, make_plan: Callable[[], StepBudget], describe_rows: Callable[[Iterable[int]], str], *, limits_steps: bool
    ) -> None:
        self._make_plan, self._describe_rows, self._limits_steps = make_plan, describe_rows, limits_steps
        self.plan: StepBudget | None = None
        self.totals: dict[str, float] = {"trained": 0, "positions": 0, "steps": 0, "seconds": 0.0}
        self.memory_bytes: list[int] = []
        self.parameters = (0, 0)
        self.flops_per_token = 0
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.peak_flops: float | None = None
        self._log_steps = LogSteps()
        # Of this rank in this run: positions are its samples, tokens with a label its items.
        self._counts = Counts(lambda batch: batch["labels"].numel(), lambda batch: (batch["labels"] != _IGNORED).sum())
        self._steps = self._began_at = 0
        self._ranks = 1
        self._device = torch.device("cpu")
        self._before: dict[str, float] | None = None  # None while nothing is measured

    def setup(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Set the number of steps: the rows are known, and the optimizer is not made yet."""
        if stage != "fit":
            return
        self.plan = self._make_plan()
        pl_module.num_steps = self.plan.num_steps  # type: ignore[assignment]  # an attribute of RecipeModule
        if self._limits_steps:
            trainer.fit_loop.max_steps = self.plan.num_steps

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Start the clock."""
        device = trainer.fabric.device
        run = trainer.present_run()
        assert run is not None
        run.watch.describe = partial(self._describe_batch, trainer, pl_module)
        self.parameters, self.flops_per_token = _count_parameters(pl_module)
        self.peak_flops = get_available_flops(device, trainer.precision_plugin.policy.compute_dtype)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._log_steps.start(trainer)
        self._ranks, self._device = trainer.strategy.topology.data_size, device
        self._steps, self._began_at = 0, trainer.global_step
        self._before = dict(self.totals)
        synchronize(device)
        self._counts.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Count the batch; log where the trainer logs."""
        if batch is not None:  # None on a rank that has no data left
            self._counts.add(batch)
        self._steps = trainer.global_step - self._began_at
        if self.first_loss is None and trainer.global_step:
            self.first_loss = _loss_of_step(trainer)  # on all ranks; waits for the device, once
        if self._log_steps.is_due(trainer, trainer.log_every_n_steps):
            self._log(trainer, pl_module)

    def _describe_batch(self, trainer: Trainer, module: Any, batch: int) -> str:
        """Return which records a micro-batch held, or those of the step before it, whose gradients were not finite."""
        progress = trainer.progress
        index = batch - (progress.total_batches - progress.batches_in_epoch)
        held = [(rows, norm) for at, rows, norm in module.recent if at == index][-1:]
        if not held:
            return ""
        ((rows, norm),) = held
        if norm is None or math.isfinite(norm):
            return self._describe_held([rows])
        held = [(rows, before) for at, rows, before in module.recent if at < index and before is not norm]
        window = [rows for rows, before in held if before is held[-1][1]]
        return f"after a step whose gradients had a norm of {float(norm)}: {self._describe_held(window)}"

    def _describe_held(self, rows: list[Tensor | None]) -> str:
        return self._describe_rows(number for one in rows if one is not None for number in one.tolist())

    def _log(self, trainer: Trainer, module: Any) -> None:
        before, self.totals = self.totals, self._read()  # a log boundary: the values of the step are read anyway
        steps, seconds, trained = (self.totals[name] - before[name] for name in ("steps", "seconds", "trained"))
        if not (steps and seconds):
            return
        row = {"tokens_per_step": trained / steps, **per_second({"trained_tokens": trained}, seconds)}
        rates: dict[str, float] = module.learning_rates
        if len({*rates.values()}) == 1:
            row["learning_rate"] = next(iter(rates.values()))
        else:
            row |= {f"learning_rate/{name}": rate for name, rate in rates.items()}
        if module.grad_norm is not None:
            row["grad_norm"] = float(module.grad_norm)
        trainer.log_metrics(row)

    def _read(self, counted: tuple[int, int] | None = None) -> dict[str, float]:
        """Return the totals until now; of this rank's counts, or with the given ones of all ranks."""
        if self._before is None:
            return dict(self.totals)
        seconds = self._counts.seconds(self._device)
        trained, positions = counted or tuple(count * self._ranks for count in self._own())
        now = {"trained": trained, "positions": positions, "steps": self._steps, "seconds": seconds}
        return {name: self._before[name] + value for name, value in now.items()}

    def on_validation_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Stop the clock of training."""
        if not trainer.sanity_checking:
            self._counts.pause(trainer.fabric.device)

    def on_validation_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Continue with the clock of training."""
        if not trainer.sanity_checking:
            self._counts.resume(trainer.fabric.device)

    def on_train_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Sum up; the ranks exchange their peaks of memory."""
        if self._steps:
            self.last_loss = _loss_of_step(trainer)
        self.totals = self._read(self._count_all(trainer))
        self.memory_bytes = trainer.strategy.gather_objects(peak_memory_bytes(trainer.fabric.device) or 0)
        self._before = None

    def _own(self) -> tuple[int, int]:
        """Return this rank's tokens with a label, which waits for the device, and its positions."""
        return int(self._counts.items), self._counts.samples

    def _count_all(self, trainer: Trainer) -> tuple[int, int]:
        """Return the tokens with a label and the positions of all ranks in this run. On every rank."""
        trained, positions = zip(*trainer.strategy.gather_objects(self._own()), strict=True)
        copies = len(trained) // trainer.strategy.topology.data_size  # ranks that train on the same rows
        return sum(trained) // copies, sum(positions) // copies

    def on_save_checkpoint(self, trainer: Trainer, pl_module: nn.Module, checkpoint: StateDict) -> None:
        """Save the counts of all ranks: their rows have different numbers of tokens.

        In a checkpoint that one rank saves alone, after an error, the others are assumed to have read as many as it.

        Raises:
            NonFiniteError: A weight is not finite; nothing is saved.
        """
        self._require_finite(trainer, pl_module)
        if self._before is not None and trainer.ranks_answer:
            checkpoint["callbacks"][self.state_key]["totals"] = self._read(self._count_all(trainer))

    def _require_finite(self, trainer: Trainer, module: nn.Module) -> None:
        """Refuse weights that the last step has made useless; the losses until then were finite."""
        trained = local(one for one in module.parameters() if one.requires_grad)
        is_finite = all(bool(part.isfinite().all()) for part in trained)
        if trainer.ranks_answer:
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite)
        if not is_finite:
            raise NonFiniteError(
                f"Expected finite weights after step {trainer.global_step}, got NaN or infinity, so no checkpoint is "
                "saved. The losses until then were finite: a gradient was not, or the step was too large.",
                fix="repeat the command with resume=force and a smaller learning_rate; it continues after the last "
                "checkpoint.",
            )

    def state_dict(self) -> StateDict:
        """Return what was measured; on rank 0, whose state is saved, this waits for the device."""
        return {
            "totals": self._read(),
            "memory_bytes": list(self.memory_bytes),
            "parameters": list(self.parameters),
            "flops_per_token": self.flops_per_token,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "peak_flops": self.peak_flops,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with the counts of the earlier run."""
        self.totals.update(state_dict["totals"])
        self.memory_bytes = list(state_dict["memory_bytes"])  # where fit ran in other processes, this brings it back
        trained, frozen = state_dict["parameters"]
        self.parameters = (trained, frozen)
        self.flops_per_token = state_dict["flops_per_token"]
        self.first_loss, self.last_loss = state_dict["first_loss"], state_dict["last_loss"]
        self.peak_flops = state_dict["peak_flops"]


def _loss_of_step(trainer: Trainer) -> float:
    """Return the training loss of the last step, over all ranks and their tokens. On every rank."""
    trainer.synchronize_metrics("train_loss")
    return float(trainer.callback_metrics["train_loss"])


def _count_parameters(module: nn.Module) -> tuple[tuple[int, int], int]:
    """Return the number of trained and of frozen parameters, and FLOPs per token."""
    sizes = {True: 0, False: 0}
    for one in module.parameters():
        sizes[one.requires_grad] += _size(one)
    looked_up = {True: 0, False: 0}
    model: Any = getattr(module, "model", None)  # a model of transformers
    table = getattr(model.get_input_embeddings(), "weight", None) if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if table is not None and getattr(head, "weight", None) is not table:  # a tied one is a matrix product as well
        looked_up[table.requires_grad] = _size(table)
    flops = 6 * (sizes[True] - looked_up[True]) + 4 * (sizes[False] - looked_up[False])
    return (sizes[True], sizes[False]), flops


def _size(parameter: Tensor) -> int:
    # Weights of 4 bits are packed; their state knows the shape.
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return count_elements(parameter) if shape is None else math.prod(shape)
