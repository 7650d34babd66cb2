"""Learning rates over optimizer steps: a warm-up, then constant, linear, cosine, polynomial, or stable and a decay.

    optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
    schedule = lw.schedules.cosine(optimizer, self.trainer.estimated_stepping_batches, warmup=0.03)
    return [optimizer], [schedule]

In step t, counted from 1, the warm-up over T steps has the rate target x min(1, t / T): no step has the rate 0, step T
has the target. The targets are the rates of the optimizer's groups. The decrease begins after the warm-up, and the last
step of the run is the last one above the minimum.

Lengths are steps, as whole numbers, or shares of the run, as floats: `warmup=100` or `warmup=0.03`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .errors import ConfigError, nearest
from .planning.formulas import scaled_lr

# Any in this file: states of torch's schedules.

__all__ = ["SCHEDULES", "StepSchedule", "constant", "cosine", "linear", "polynomial", "wsd"]


class StepSchedule(LambdaLR):
    """A `torch.optim.lr_scheduler.LambdaLR` that the Trainer steps after each optimizer step, also without `interval`.

    Its state is the number of steps and the rates of the groups, and not the curve: a run that is resumed with another
    length or warm-up continues at its step of the new curve.

    Groups that are added to the optimizer during training follow the curve from the rate with which they are added:
    each step multiplies their rate as it multiplies the others'.
    """

    _lw_interval = "step"

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of all groups in the step that `last_epoch` counts."""
        share = self.lr_lambdas[0]
        now = share(self.last_epoch)
        rates = [base * now for base in self.base_lrs]
        if added := self.optimizer.param_groups[len(rates) :]:
            before = share(max(0, self.last_epoch - 1))
            rates += [group["lr"] * (now / before if before else 1.0) for group in added]
        return rates

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the number of steps; the optimizer, loaded before, gets its rates of this curve where it is another."""
        super().load_state_dict(state_dict)
        now = self.lr_lambdas[0](self.last_epoch)
        found = [base * now for base in self.base_lrs]
        before = self._last_lr[: len(found)]
        if found != before:
            base, old = float(self.base_lrs[0]), float(before[0])
            factor = base * now / old if old else 1.0
            groups = self.optimizer.param_groups
            found += [group["lr"] * factor for group in groups[len(found) :]]
            self._last_lr = found
            for group, rate in zip(groups, found, strict=False):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


def constant(
    optimizer: Optimizer, num_steps: float = math.inf, *, warmup: int | float = 0, devices: int = 1
) -> StepSchedule:
    """Return a schedule that keeps the rate after the warm-up.

    Args:
        optimizer: The optimizer. Each group keeps its rate as its target.
        num_steps: Optimizer steps of the entire run: `trainer.estimated_stepping_batches`. Only shares need it.
        warmup: Optimizer steps until the target is reached (int), or their share of the run (float in [0, 1]).
        devices: Factor of the target, for rates that were chosen for one device while each device adds a batch: the
            number of data ranks, `trainer.strategy.topology.data_size`. See `planning.scaled_lr`.

    Raises:
        ConfigError: An argument is out of range, or a share is given for a run of unknown length.
    """
    return _make("constant", optimizer, num_steps, _stay, warmup=warmup, devices=devices, ends=False)


def linear(
    optimizer: Optimizer, num_steps: float, *, warmup: int | float = 0, min_lr_ratio: float = 0.0, devices: int = 1
) -> StepSchedule:
    """Return a schedule that falls in a straight line from the target to its minimum.

    Args:
        optimizer: See `constant`.
        num_steps: See `constant`. Later steps keep the minimum.
        warmup: See `constant`.
        min_lr_ratio: Minimum as a share of the target, in [0, 1]: it applies to groups with different rates.
        devices: See `constant`.

    Raises:
        ConfigError: An argument is out of range, or the run has no known length.
    """
    return _make("linear", optimizer, num_steps, _line, warmup=warmup, floor=min_lr_ratio, devices=devices)


def cosine(
    optimizer: Optimizer, num_steps: float, *, warmup: int | float = 0, min_lr_ratio: float = 0.0, devices: int = 1
) -> StepSchedule:
    """Return a schedule that falls along half a cosine from the target to its minimum.

    Args:
        optimizer: See `constant`.
        num_steps: See `linear`.
        warmup: See `constant`.
        min_lr_ratio: See `linear`.
        devices: See `constant`.

    Raises:
        ConfigError: See `linear`.

    Source: Loshchilov and Hutter 2017, eq. 5, without restarts.
    """
    return _make("cosine", optimizer, num_steps, _half_cosine, warmup=warmup, floor=min_lr_ratio, devices=devices)


def polynomial(
    optimizer: Optimizer,
    num_steps: float,
    *,
    power: float = 1.0,
    warmup: int | float = 0,
    min_lr_ratio: float = 0.0,
    devices: int = 1,
) -> StepSchedule:
    """Return a schedule that falls with a power of the share of the run that is left.

    Args:
        optimizer: See `constant`.
        num_steps: See `linear`.
        power: The power, above 0; 1 is `linear`.
        warmup: See `constant`.
        min_lr_ratio: See `linear`.
        devices: See `constant`.

    Raises:
        ConfigError: See `linear`.
    """
    if not (_is_number(power) and 0 < power < math.inf):
        raise _refused("polynomial", [f"power={power!r}, expected a number above 0"])
    left = partial(_power, power=float(power))
    return _make("polynomial", optimizer, num_steps, left, warmup=warmup, floor=min_lr_ratio, devices=devices)


def wsd(
    optimizer: Optimizer,
    num_steps: float,
    *,
    warmup: int | float = 0,
    decay: int | float = 0.1,
    shape: str = "linear",
    min_lr_ratio: float = 0.0,
    devices: int = 1,
) -> StepSchedule:
    """Return a schedule of warm-up, stable rate and decay: the rate is constant until the decay at the end of the run.

    A checkpoint from before the decay may be resumed with another length, as the rate until there does not depend on
    it.

    Args:
        optimizer: See `constant`.
        num_steps: See `linear`.
        warmup: See `constant`.
        decay: Optimizer steps of the decay (int), or their share of the run (float in [0, 1]).
        shape: "linear", "cosine", or "sqrt" for 1 minus the root of the share of the decay that is done.
        min_lr_ratio: See `linear`.
        devices: See `constant`.

    Raises:
        ConfigError: See `linear`.

    Source: Hu et al. 2024, eq. 1 (MiniCPM); the shapes are from Hägele et al. 2024.
    """
    if not isinstance(shape, str) or shape not in _SHAPES:
        got = f"shape={shape!r}, expected one of {', '.join(_SHAPES)}{nearest(str(shape), _SHAPES)}"
        raise _refused("wsd", [got])
    return _make(
        "wsd", optimizer, num_steps, _SHAPES[shape], warmup=warmup, decay=decay, floor=min_lr_ratio, devices=devices
    )


SCHEDULES: dict[str, Callable[..., StepSchedule]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "polynomial": polynomial,
    "wsd": wsd,
}
"""Name, as settings of recipes and the command line have it -> the function."""


def _make(
    name: str,
    optimizer: Optimizer,
    num_steps: float,
    left: Callable[[float], float],
    *,
    warmup: int | float,
    devices: int,
    decay: int | float | None = None,
    floor: float = 0.0,
    ends: bool = True,
) -> StepSchedule:
    """Return a schedule whose share of the target falls as `left` says, from the end of the warm-up or by `decay`."""
    lengths = {"warmup": warmup, **({} if decay is None else {"decay": decay})}
    problems = [
        f"{key}={value!r}, expected a whole number of steps, or a share of the run as a float in [0, 1]"
        for key, value in lengths.items()
        if not _is_length(value)
    ]
    if not isinstance(optimizer, Optimizer):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        problems.append(f"optimizer={got}, expected an optimizer of torch that holds its parameters")
    if not (_is_number(floor) and 0 <= floor <= 1):
        problems.append(f"min_lr_ratio={floor!r}, expected a share of the target in [0, 1]")
    if not _is_whole(devices) or devices < 1:
        problems.append(f"devices={devices!r}, expected a whole number of at least 1")
    if not (_is_number(num_steps) and num_steps >= 0):
        problems.append(f"num_steps={num_steps!r}, expected a number of steps")
    if problems:
        raise _refused(name, problems)
    if num_steps == math.inf and (ends or _is_share(warmup)):
        raise ConfigError(
            f"Expected a run of known length for schedules.{name}, got num_steps=inf: the training data have no "
            "length, and the run has no limit.",
            fix="pass max_steps= to the Trainer, or the number of steps as num_steps=.",
        )
    num_steps, floor = _plain(num_steps), float(floor)
    first = begin = _steps(warmup, num_steps)
    if decay is not None:
        last = _steps(decay, num_steps)
        begin = max(first, num_steps - last)
        left = left if last else _stay  # also after the end
    # A partial of functions of this file can be pickled, and LambdaLR saves nothing of it.
    target = scaled_lr(1.0, int(devices))
    share = partial(_share, warmup=first, begin=begin, end=num_steps, left=left, floor=floor, target=target)
    return StepSchedule(optimizer, share)


def _share(
    step: int, *, warmup: float, begin: float, end: float, left: Callable[[float], float], floor: float, target: float
) -> float:
    """Return the share of the group's rate in the step after `step` steps."""
    if step < warmup:
        return target * ((step + 1) / warmup)
    if step <= begin:
        return target
    done = min(1.0, (step - begin) / max(1, end - begin))
    return target * (floor + (1 - floor) * left(done))


def _stay(done: float) -> float:
    return 1.0


def _line(done: float) -> float:
    return 1 - done


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _one_minus_root(done: float) -> float:
    return 1 - math.sqrt(done)


def _power(done: float, *, power: float) -> float:
    return float((1 - done) ** power)


_SHAPES = {"linear": _line, "cosine": _half_cosine, "sqrt": _one_minus_root}


def _steps(length: int | float, num_steps: float) -> float:
    return round(float(length) * num_steps) if _is_share(length) else int(length)


def _plain(number: float) -> float:
    """Return a number of Python: rates are saved."""
    return int(number) if _is_whole(number) else float(number)


def _is_share(length: int | float) -> bool:
    return not isinstance(length, Integral)


def _is_length(value: object) -> bool:
    return _is_number(value) and (value >= 0 if _is_whole(value) else 0 <= value <= 1)


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or of a library such as numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _refused(name: str, problems: list[str]) -> ConfigError:
    return ConfigError(
        f"schedules.{name} got {'; '.join(problems)}.",
        fix="correct the arguments; whole numbers are steps, floats are shares.",
    )
