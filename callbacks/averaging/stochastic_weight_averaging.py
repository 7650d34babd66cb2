"""`StochasticWeightAveraging`: a constant learning rate in the last epochs, and the mean of their weights.

Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization", algorithm 1.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import ConfigError
from .base import Averaging
from .batch_norm_pass import renew_running_statistics
from .weights import check_fit, clean_name, clones_of, in_memory, part_of, refuse_engines, tensors_of, write

if TYPE_CHECKING:
    from ...protocols import ParamGroup, StateDict
    from ...trainer import Trainer
    from ..base import AnyModule

_log = logging.getLogger(__name__)

AvgFn = Callable[[Tensor, Tensor, Tensor], Tensor]


class StochasticWeightAveraging(Averaging):
    """Train the last epochs at a separate learning rate, and end with the mean of the weights of these epochs.

    The average covers the weights at the beginning of the first of these epochs and at the end of each. The learning
    rate anneals to `swa_lrs` within `annealing_epochs`, and the module's schedules pause. At the end of training, the
    average is written into the module, and a pass over the training data without gradients updates batch norm
    statistics.

    Checkpoints contain the trained weights in "state_dict" and the average in this callback's state, so that resuming
    is exact. A checkpoint that is saved after `trainer.fit` has returned contains the average.

    Args:
        swa_lrs: Final learning rate, or a list with one for each parameter group, those of all optimizers in order.
        swa_epoch_start: First epoch, counted from 1; or, as a float from 0 to 1, a fraction of `max_epochs`.
        annealing_epochs: Number of epochs until the rate reaches `swa_lrs`; 0 sets it at once.
        annealing_strategy: Shape of the annealing, "cos" or "linear".
        avg_fn: Function `(average, weight, num_averaged) -> average`; None is the mean.
        device: Device of the average; None is the device of the weights.

    Attributes:
        n_averaged: Number of weights in the average.

    Raises:
        ConfigError: An argument is invalid. When fit starts: several optimizers with manual optimization, more
            schedules than optimizers, a start after the last epoch, a fraction without `max_epochs`, or batch norms
            with manual optimization.

    With a sharding strategy, each rank averages its own shards, and `avg_fn` receives shards: it must compute
    elementwise.
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: AvgFn | None = None,
        device: str | torch.device | None = "cpu",
    ) -> None:
        rates = list(swa_lrs) if isinstance(swa_lrs, list | tuple) else [swa_lrs]
        problems = []
        if not rates or not all(_is_number(rate) and rate > 0 for rate in rates):
            problems.append(f"swa_lrs={swa_lrs!r} (expected a positive number, or a list of them)")
        is_part = isinstance(swa_epoch_start, float) and 0.0 <= swa_epoch_start <= 1.0
        is_epoch = isinstance(swa_epoch_start, int) and not isinstance(swa_epoch_start, bool) and swa_epoch_start >= 1
        if not is_part and not is_epoch:
            problems.append(
                f"swa_epoch_start={swa_epoch_start!r} (expected an integer >= 1, or a float from 0.0 to 1.0)"
            )
        if not isinstance(annealing_epochs, int) or annealing_epochs < 0:
            problems.append(f"annealing_epochs={annealing_epochs!r} (expected an integer >= 0)")
        if annealing_strategy not in ("cos", "linear"):
            problems.append(f"annealing_strategy={annealing_strategy!r} (expected 'cos' or 'linear')")
        if avg_fn is not None and not callable(avg_fn):
            problems.append(f"avg_fn={avg_fn!r} (expected a function)")
        if problems:
            raise ConfigError(f"StochasticWeightAveraging: {', '.join(problems)}.", fix="correct these arguments.")
        super().__init__(device)
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.n_averaged = 0
        self._avg_fn: AvgFn = avg_fn or self.avg_fn
        self._max_epochs: int | None = None
        self._lw_began_at = -1
        self._lw_latest_epoch = -1
        self._lw_start_lrs: list[float] = []

    @property
    def state_key(self) -> str:
        """The class name and the arguments that distinguish instances."""
        return self._generate_state_key(swa_epoch_start=self.swa_epoch_start)

    @property
    def swa_start(self) -> int:
        """The first epoch of averaging, counted from 0; a fraction of `max_epochs` is resolved when fit starts."""
        start = self.swa_epoch_start
        if isinstance(start, float):
            start = int((self._max_epochs or 0) * start)
        return max(start - 1, 0)

    @property
    def swa_end(self) -> int:
        """The last epoch, counted from 0; without a limit on epochs, a number that is never reached."""
        return sys.maxsize if self._max_epochs is None else self._max_epochs - 1

    @staticmethod
    def avg_fn(averaged_model_parameter: Tensor, model_parameter: Tensor, num_averaged: Tensor) -> Tensor:
        """Return the mean of `num_averaged` weights and one more."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    @staticmethod
    def pl_module_contains_batch_norm(pl_module: AnyModule) -> bool:
        """Whether the module has a batch norm that keeps running statistics."""
        return bool(_running_norms(pl_module))

    # --- hooks -----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Check the run; compare a loaded average with the module and move it to its device."""
        limit = trainer.fit_loop.epoch_limit
        self._max_epochs = None if limit == -1 else limit
        self._lw_check(trainer, pl_module)
        if self._lw_source is not None and self._lw_source is not pl_module:
            self._lw_average, self.n_averaged, self._lw_began_at, self._lw_latest_epoch = {}, 0, -1, -1
        self._lw_place(pl_module, _parameters(pl_module))
        if self._lw_began_at >= 0:
            self._lw_rest_schedules(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Begin when it is time, and set the epoch's learning rates."""
        epoch = trainer.current_epoch
        # Averaging that has begun continues, although a later fit with more epochs would begin later.
        if epoch > self.swa_end or (self._lw_began_at < 0 and epoch < self.swa_start):
            return
        groups = _groups(trainer)
        if self._lw_began_at < 0:
            if epoch > self.swa_start:
                _log.warning(
                    "StochasticWeightAveraging starts in epoch %d instead of epoch %d: the checkpoint does not have "
                    "its state.",
                    epoch,
                    self.swa_start,
                )
            self._lw_began_at, self._lw_latest_epoch = epoch, epoch - 1
            self._lw_start_lrs = [float(group["lr"]) for group in groups]
            self._lw_rest_schedules(trainer)
            self._lw_update(pl_module)
        self._lw_set_rates(groups, epoch - self._lw_began_at)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Average the weights at the end of an epoch, but not if a limit interrupted it."""
        epoch = trainer.current_epoch
        if self._lw_began_at < 0 or trainer.progress.epoch_paused or not self._lw_latest_epoch < epoch <= self.swa_end:
            return
        self._lw_latest_epoch = epoch
        self._lw_update(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: AnyModule) -> None:
        """Write the average into the module. Checkpoints that are still due in this run hold the trained weights."""
        if not self.n_averaged:
            return
        self._lw_raw = clones_of(tensors_of(pl_module))
        write(self._lw_average, _parameters(pl_module), owner="StochasticWeightAveraging")
        norms = _running_norms(pl_module)
        if norms:
            renew_running_statistics(trainer, pl_module, norms)

    def teardown(self, trainer: Trainer, pl_module: AnyModule, stage: str) -> None:
        """Release the trained weights: the module now holds the average."""
        self._lw_raw = None

    def forget_run(self) -> None:
        """Reset the average."""
        self._lw_average, self.n_averaged, self._lw_began_at, self._lw_latest_epoch, self._lw_source = (
            {},
            0,
            -1,
            -1,
            None,
        )

    def state_dict(self) -> StateDict:
        """Return the average, its counts, and the learning rates at the start of annealing."""
        return {
            "average": in_memory(self._lw_average),
            "n_averaged": self.n_averaged,
            "began_at": self._lw_began_at,
            "latest_update_epoch": self._lw_latest_epoch,
            "start_lrs": list(self._lw_start_lrs),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the average; it is moved to its device when fit starts."""
        self._lw_average, self._lw_is_borrowed = dict(state_dict["average"]), True
        self.n_averaged = int(state_dict["n_averaged"])
        self._lw_began_at = int(state_dict["began_at"])
        self._lw_latest_epoch = int(state_dict["latest_update_epoch"])
        self._lw_start_lrs = [float(rate) for rate in state_dict["start_lrs"]]
        self._lw_source = None

    # --- checks ----------------------------------------------------------------------------------------------------

    def _lw_check(self, trainer: Trainer, module: nn.Module) -> None:
        refuse_engines(trainer, owner="StochasticWeightAveraging")
        problems = []
        is_automatic = getattr(module, "automatic_optimization", True)
        num_optimizers, num_schedules = len(trainer.optimizers), len(trainer.lr_scheduler_configs)
        if num_optimizers != 1 and not (is_automatic and num_optimizers):
            problems.append(f"it needs one optimizer, and configure_optimizers returned {num_optimizers}")
        elif num_schedules > num_optimizers:
            problems.append(f"it takes the place of one schedule, and configure_optimizers returned {num_schedules}")
        if isinstance(self.swa_lrs, list | tuple) and num_optimizers:
            count = len(_groups(trainer))
            if count != len(self.swa_lrs):
                problems.append(f"swa_lrs has {len(self.swa_lrs)} rates, and the number of parameter groups is {count}")
        if self._max_epochs is None and isinstance(self.swa_epoch_start, float):
            problems.append(f"swa_epoch_start={self.swa_epoch_start} is a part of the epochs, which have no limit")
        elif self._max_epochs is not None and self.swa_start > self.swa_end and not trainer.fast_dev_run:
            problems.append(f"swa_epoch_start={self.swa_epoch_start} is after the last of {self._max_epochs} epochs")
        if not is_automatic and _running_norms(module):
            problems.append("batch norms need a pass without optimization, which a manual training_step would not be")
        if problems:
            raise ConfigError(
                f"StochasticWeightAveraging: {'; '.join(problems)}.", fix="change these, or leave the callback out."
            )

    # --- the rates -------------------------------------------------------------------------------------------------

    def _lw_rest_schedules(self, trainer: Trainer) -> None:
        """Pause the module's own schedules; they keep their state for checkpoints."""
        for config in trainer.lr_scheduler_configs:
            config.frequency = sys.maxsize

    def _lw_set_rates(self, groups: list[ParamGroup], epochs: int) -> None:
        """Set the rates of an epoch, given how many lie between it and the first one."""
        part = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        if self.annealing_strategy == "cos":
            part = (1 - math.cos(math.pi * part)) / 2
        targets = self.swa_lrs if isinstance(self.swa_lrs, list | tuple) else [self.swa_lrs] * len(self._lw_start_lrs)
        # Groups that were added since then (by a fine-tuning callback) have no beginning, and keep their rates.
        for group, start, target in zip(groups, self._lw_start_lrs, targets, strict=False):
            rate = target * part + start * (1 - part)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # --- the average -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _lw_update(self, module: nn.Module) -> None:
        parameters = _parameters(module)
        if not self.n_averaged:
            self._lw_copy_weights(parameters)
        else:
            check_fit(self._lw_average, parameters, owner="StochasticWeightAveraging")
            count = torch.tensor(self.n_averaged)
            for name, tensor in parameters.items():
                average = part_of(self._lw_average[name])
                average.copy_(self._avg_fn(average, part_of(tensor.detach()).to(average), count))
        self.n_averaged += 1


def _is_number(value: float | list[float] | None) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _groups(trainer: Trainer) -> list[ParamGroup]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {clean_name(name): parameter for name, parameter in module.named_parameters()}


def _running_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms whose running statistics training changes."""
    found = [child for child in module.modules() if isinstance(child, _BatchNorm)]
    return [norm for norm in found if norm.training and norm.track_running_stats and norm.running_mean is not None]
