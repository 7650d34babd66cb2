"""Averages of weights as in Lightning: which weights count, when batch norm is updated, and what checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn

from ....callbacks.averaging import stochastic_weight_averaging, weight_averaging
from ....protocols import AnyBatch, AnyOutput, StateDict
from ....trainer.loop.manual import loss_in_manual
from ....trainer.loop.schedule import LRSchedulerConfig
from ....trainer.run import FitRun
from ....trainer.trainer import Trainer

__all__ = ["EMAWeightAveraging", "StochasticWeightAveraging", "WeightAveraging"]


class WeightAveraging(weight_averaging.WeightAveraging):
    """Averages a copy of the module. A checkpoint's "state_dict" is the average.

    Args:
        device, use_buffers, kwargs: See `loopwright.WeightAveraging`.
    """

    def __init__(self, device: str | torch.device | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        super().__init__(device, use_buffers, **kwargs)
        self._lw_given_device, self._use_buffers, self._lw_functions = device, use_buffers, kwargs
        self._average_model: AveragedModel | None = None
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def setup(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Copy the module."""
        if stage == "fit":
            device = torch.device(self._lw_given_device) if self._lw_given_device is not None else trainer.fabric.device
            self._average_model = AveragedModel(pl_module, device, use_buffers=self._use_buffers, **self._lw_functions)

    def on_fit_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Do nothing."""

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Do nothing."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Update after a step, if that is requested."""
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._lw_update_copy(pl_module)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Update after an epoch, if that is requested."""
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._lw_update_copy(pl_module)
            self._latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Write the average into the module."""
        for average, own in self._lw_pairs(pl_module):
            own.data.copy_(average.data)

    def on_validation_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Do nothing."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Swap module and average."""
        self._lw_swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Swap them back."""
        self._lw_swap(pl_module)

    on_validation_end = on_test_start = on_test_end = on_predict_start = on_predict_end = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Do nothing."""

    def on_exception(self, trainer: Trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Do nothing."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: nn.Module, checkpoint: StateDict) -> None:
        """Let "state_dict" be the average, and keep the trained weights beside it."""
        if self._average_model is None:
            return
        average = self._average_model.state_dict()
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name.removeprefix("module."): value for name, value in average.items() if name.startswith("module.")
        }
        checkpoint["averaging_state"] = {
            name: value for name, value in average.items() if not name.startswith("module.")
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: nn.Module, checkpoint: StateDict) -> None:
        """Take average and trained weights out of a checkpoint."""
        if self._average_model is None:
            return
        if "averaging_state" not in checkpoint or "current_model_state" not in checkpoint:
            self._average_model.module.load_state_dict(checkpoint["state_dict"], strict=False)
            return
        average = {f"module.{name}": value for name, value in checkpoint["state_dict"].items()}
        self._average_model.load_state_dict({**average, **checkpoint["averaging_state"]})
        pl_module.load_state_dict(checkpoint["current_model_state"])

    def state_dict(self) -> StateDict:
        """Return the step of the last update."""
        return {"latest_update_step": self._latest_update_step}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take the step of the last update."""
        self._latest_update_step = state_dict["latest_update_step"]

    def forget_run(self) -> None:
        """Continue, as Lightning's callback does."""

    def _lw_update_copy(self, module: nn.Module) -> None:
        assert self._average_model is not None
        self._average_model.update_parameters(module)

    def _lw_pairs(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        if self._average_model is not None:
            average = self._average_model.module
            yield from zip(
                chain(average.parameters(), average.buffers()),
                chain(module.parameters(), module.buffers()),
                strict=True,
            )

    def _lw_swap(self, module: nn.Module) -> None:
        for average, own in self._lw_pairs(module):
            kept = average.data.clone()
            average.data.copy_(own.data)
            own.data.copy_(kept)


class EMAWeightAveraging(WeightAveraging):
    """An exponential average; see `loopwright.EMAWeightAveraging` for the arguments.

    Args:
        device, use_buffers, decay, update_every_n_steps, update_starting_at_step, update_starting_at_epoch, kwargs: See
            there.
    """

    def __init__(
        self,
        device: str | torch.device | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,  # Any: functions, see WeightAveraging
    ) -> None:
        if not kwargs:
            kwargs["avg_fn"] = get_ema_avg_fn(decay)
        super().__init__(device, use_buffers, **kwargs)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update now."""
        if step_idx is not None:
            begins = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return begins and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        return (
            epoch_idx is not None
            and self.update_starting_at_epoch is not None
            and (epoch_idx >= self.update_starting_at_epoch)
        )


class StochasticWeightAveraging(stochastic_weight_averaging.StochasticWeightAveraging):
    """Averages the weights with which each of the last epochs begins; batch norm is updated in one more epoch.

    Args:
        swa_lrs, swa_epoch_start, annealing_epochs, annealing_strategy, avg_fn, device: See
            `loopwright.StochasticWeightAveraging`.
    """

    _lw_copies: list[Tensor]

    def setup(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Copy the weights."""
        self._lw_copies = [one.detach().clone() for one in pl_module.parameters()]
        self._lw_schedule: SWALR | None = None
        self._lw_schedule_state: StateDict | None = None
        self._lw_momenta: dict[_BatchNorm, float | None] = {}
        self._lw_accumulation = 1

    @property
    def _initialized(self) -> bool:
        return self._lw_schedule is not None

    def on_fit_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Check the run, and make room for the epoch of batch norm."""
        limit = trainer.fit_loop.epoch_limit
        self._max_epochs = None if limit == -1 else limit
        self._lw_check(trainer, pl_module)
        if self._lw_norms(pl_module) and self._max_epochs is not None:
            trainer.fit_loop.max_epochs = self._max_epochs + 1
        if self._lw_schedule_state is not None:
            trainer.lr_scheduler_configs.clear()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Begin when it is time, average, or begin the epoch of batch norm."""
        epoch = trainer.current_epoch
        if self.swa_start <= epoch <= self.swa_end:
            if self._lw_schedule is None:
                self._lw_begin_schedule(trainer)
            if epoch > self._lw_latest_epoch:
                self._lw_average_now(pl_module)
                self._lw_latest_epoch = epoch
        if self._max_epochs is not None and epoch == self.swa_end + 1:
            self._lw_transfer(pl_module)
            self._lw_begin_norms(trainer, pl_module)

    def _lw_begin_schedule(self, trainer: Trainer) -> None:
        optimizer = trainer.optimizers[0]
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(optimizer.param_groups)
        for rate, group in zip(rates, optimizer.param_groups, strict=False):
            group["initial_lr"] = rate
        is_cos = self.annealing_strategy == "cos"
        last_epoch = int(trainer.fit_loop.epoch_limit) if is_cos else -1
        strategy: Any = self.annealing_strategy  # Any: here and below, narrower in torch's annotations
        swa_lr: Any = rates
        self._lw_schedule = SWALR(
            optimizer,
            swa_lr=swa_lr,
            anneal_epochs=self.annealing_epochs,
            anneal_strategy=strategy,
            last_epoch=last_epoch,
        )
        if self._lw_schedule_state is not None:
            self._lw_schedule.load_state_dict(self._lw_schedule_state)
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(self._lw_schedule)]

    @torch.no_grad()
    def _lw_average_now(self, module: nn.Module) -> None:
        count = torch.tensor(self.n_averaged)
        for average, own in zip(self._lw_copies, module.parameters(), strict=True):
            weight = own.detach().to(average.device)
            average.copy_(weight if not self.n_averaged else self._avg_fn(average, weight, count))
        self.n_averaged += 1

    @torch.no_grad()
    def _lw_transfer(self, module: nn.Module) -> None:
        for average, own in zip(self._lw_copies, module.parameters(), strict=True):
            own.detach().copy_(average)

    def _lw_begin_norms(self, trainer: Trainer, module: nn.Module) -> None:
        """Let the epoch that begins compute running statistics, without backward passes; its end makes one step."""
        for norm in self._lw_norms(module):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            assert norm.num_batches_tracked is not None
            norm.running_mean = torch.zeros_like(norm.running_mean)
            norm.running_var = torch.ones_like(norm.running_var)
            self._lw_momenta[norm], norm.momentum = norm.momentum, None
            norm.num_batches_tracked *= 0
        run = trainer.present_run()
        assert isinstance(run, FitRun)
        self._lw_accumulation = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = int(trainer.num_training_batches) + 1
        # A new plan: if the plan were changed in place, the timeline would still run its copy.
        run.plan = replace(run.plan, zero_grad=_do_nothing, loss_and_backward=loss_in_manual)

    @staticmethod
    def _lw_norms(module: nn.Module) -> list[_BatchNorm]:
        return [child for child in module.modules() if isinstance(child, _BatchNorm)]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Do nothing."""

    def on_train_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Write the average into the module, if training was not cut short."""
        last = trainer.current_epoch - 1
        if self._lw_momenta and last == self.swa_end + 1:
            trainer.accumulate_grad_batches = self._lw_accumulation
            trainer.fit_loop.max_epochs = self._max_epochs
            for norm, momentum in self._lw_momenta.items():
                norm.momentum = momentum
        elif last == self.swa_end or self._max_epochs is None:
            self._lw_transfer(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: nn.Module, exception: BaseException) -> None:
        """Do nothing."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: nn.Module, checkpoint: StateDict) -> None:
        """Do nothing."""

    def teardown(self, trainer: Trainer, pl_module: nn.Module, stage: str) -> None:
        """Do nothing."""

    def state_dict(self) -> StateDict:
        """Return the average and the state of its schedule."""
        return {
            "n_averaged": self.n_averaged,
            "latest_update_epoch": self._lw_latest_epoch,
            "scheduler_state": None if self._lw_schedule is None else self._lw_schedule.state_dict(),
            "copies": list(self._lw_copies),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take the average and the state of its schedule."""
        self.n_averaged, self._lw_latest_epoch = state_dict["n_averaged"], state_dict["latest_update_epoch"]
        self._lw_schedule_state = state_dict["scheduler_state"]
        self._lw_copies = [torch.as_tensor(one) for one in state_dict["copies"]]


def _do_nothing() -> None:
    """Leave gradients as they are."""
