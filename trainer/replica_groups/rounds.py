"""`Rounds`: groups make separate optimizer steps, and synchronize weights at the end of each round.

LocalSGD takes the mean of the weights (Stich 2018, arXiv:1805.09767). DiLoCo takes the mean of the changes within the
round as the gradient of an outer optimizer (Douillard et al. 2023, arXiv:2311.08105). A round that the groups do not
commit is trained again, from a copy of the run that was taken at its beginning.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...callbacks import ModelCheckpoint, Snapshot
from ...callbacks.averaging.base import Averaging
from ...data.rng import capture_rng, restore_rng
from ...data.sources.base import NO_BATCH
from ...errors import ConfigError
from ...messages import counted
from ..loop.fit_loop import Rewind
from . import healing
from .window import GroupsWindow, log_again, portable_calls, share_buffers, trained

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...protocols import StateDict
    from ..run import FitRun
    from .groups import ReplicaGroups
    from .options import TorchFT

# Any in this file: what modules log, and what groups tell each other as JSON.

_BATCH = object()  # stands for a batch whose size is known


@dataclass(frozen=True, slots=True)
class _Logged:
    """What this group has logged in a window, until the round ends.

    Attributes:
        window, step: Numbers of the window and of its step.
        sizes: Samples in each micro-batch, of all groups; None where unknown.
        calls: Offset of a micro-batch of this group -> its calls of `log`.
    """

    window: int
    step: int
    sizes: list[int | None]
    calls: dict[int, list[Any]]


class RoundWindow(GroupsWindow):
    """The micro-batches of one window: this group makes an optimizer step with its share.

    Args:
        run: The run.
        groups: This group among the others.
        rounds: Their rounds.
    """

    def __init__(self, run: FitRun, groups: ReplicaGroups, rounds: Rounds) -> None:
        super().__init__(run, groups)
        self._rounds = rounds

    def step(self) -> bool:
        """Train on this group's share, and step; a window that only other groups train on counts as a step, too.

        Raises:
            Rewind: It ends a round, which the groups do not commit.
        """
        run, plan, rng = self._run, self._plan, capture_rng()
        share, step = self._share(), run.progress.steps + 1
        plan.begin_window(max(len(share), 1))
        if plan.zeroes_early or not share:
            plan.zero_grad()
        self._train_on_all(share)
        if not share or not plan.finish_window(run, self._outcomes[share[-1]][1]):
            run.progress.steps = step  # groups count alike
        restore_rng(rng)
        self._rounds.add(_Logged(run.metrics.window, step, self._sizes, self._logged))
        self._rounds.end_if_due(run.progress.batches_in_epoch + len(self._batches))
        if self._batches[-1] is not NO_BATCH:
            run.metrics.select_batch(self._batches[-1], self._sizes[-1])
        return True


class Rounds:
    """The rounds of a fit. One ends at each multiple of `sync_every` steps, and before validations and ends of epochs.

    Args:
        groups: This group among the others; its run is there.
        options: The user's, with `sync_every`.
        log_every_n_steps: Of the Trainer; 0 where nothing is logged.

    Attributes:
        is_open: Whether a round has begun and not ended.
        inner: Name of each group -> its optimizers' states after the last round, serialized; where a save may follow.
    """

    def __init__(self, groups: ReplicaGroups, options: TorchFT, log_every_n_steps: int) -> None:
        assert options.sync_every is not None
        self._groups, self._run, self._every = groups, groups.run, options.sync_every
        _refuse(groups, self._every, log_every_n_steps)
        self.is_open = False
        self.inner: dict[str, Tensor] = {}
        self._before: StateDict = {}  # the run at the beginning of the round
        self._logged: list[_Logged] = []
        self._is_asked_to_stop = False
        self._anchors: list[nn.Parameter] = []  # weights at the beginning of the round, which the outer optimizer steps
        self._outer: Optimizer | None = None
        make = options.outer()
        if make is not None:
            self._anchors = [nn.Parameter(one.detach().clone()) for one in trained(self._run)]
            self._outer = make(self._anchors)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the outer optimizer's state, and inner states of all groups where they are known."""
        state: StateDict = {} if self._outer is None else {"outer": self._outer.state_dict()}
        return {**state, "inner": dict(self.inner)}

    def load_state_dict(self, state: StateDict, name: str | None = None) -> None:
        """Restore a state.

        Args:
            state: What `state_dict` returned.
            name: Of this group, whose inner optimizers are to be restored; None where they are already.
        """
        if self._outer is not None and "outer" in state:
            self._outer.load_state_dict(state["outer"])
        own = state.get("inner", {}).get(name)
        if own is None:
            return
        states = torch.load(io.BytesIO(own.numpy().tobytes()), map_location="cpu", weights_only=True)
        for optimizer, one in zip(self._run.optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": one})

    # --- a round -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a round, after the quorum.

        Raises:
            ConfigError: Other parameters are trained than at the beginning of fit.
        """
        parameters = trained(self._run)
        if self._outer is not None:
            if [one.shape for one in parameters] != [one.shape for one in self._anchors]:
                raise ConfigError(
                    f"TorchFT(outer_optimizer=...) was built for {counted(len(self._anchors), 'parameter')}, and now "
                    f"{len(parameters)} are trained.",
                    fix="freeze parameters before fit, or use LocalSGD: leave outer_optimizer out.",
                )
            _copy(parameters, to=self._anchors)
        self._logged = []
        self._before = healing.take(self._run, lasts=True)
        self.is_open = True

    def add(self, logged: _Logged) -> None:
        """Keep what a window has logged until the round ends."""
        self._logged.append(logged)

    def end_if_due(self, num_batches: int) -> None:
        """End the round after a step, if that is due.

        Args:
            num_batches: Micro-batches of the epoch so far.

        Raises:
            Rewind: The groups do not commit the round.
        """
        run, loop = self._run, self._groups.loop
        step = run.progress.steps
        is_epoch_over = not run.stream.has_next()
        is_last = is_epoch_over or step == loop.max_steps or num_batches >= loop.look_at
        if is_last or step % self._every == 0:
            self.end(may_save=is_last or any(_saves_at(one, step) for one in run.callbacks))

    def end(self, *, may_save: bool) -> None:
        """Synchronize weights, and hear what the other groups have logged.

        Args:
            may_save: Whether a checkpoint may be written before the next step.

        Raises:
            Rewind: The groups do not commit the round.
        """
        run, groups = self._run, self._groups
        if run.watch.policy == "raise":
            run.watch.look(run.progress)  # others do not get weights of a bad loss
        has_trained = any(one.calls for one in self._logged)
        told = {"name": groups.name, "has_trained": has_trained, **groups.claim()}
        told["logged"] = [portable_calls(one.calls) for one in self._logged]
        everyone = groups.exchange(told)
        num_trained = sum(one["has_trained"] for one in everyone or ())
        is_whole = everyone is not None and (not num_trained or self._average(num_trained, has_trained=has_trained))
        is_whole = is_whole and share_buffers(run, groups) and (not may_save or self._share_inner(everyone or []))
        if not groups.commits() or not is_whole or everyone is None:
            raise Rewind(self._go_back)
        if self._outer is not None and num_trained:
            self._outer.step()
            self._outer.zero_grad()
            _copy(self._anchors, to=trained(run))
        groups.settle(everyone)
        self._hear(everyone)
        self.is_open, self._before = False, {}

    def _go_back(self) -> None:
        self.is_open = False
        self._groups.go_back(self._before)

    def _average(self, num_groups: int, *, has_trained: bool) -> bool:
        """Set weights, or gradients of the outer optimizer, to the mean over groups; return whether all were there."""
        parameters = trained(self._run)
        if self._outer is None:
            # 16-bit weights in float32: a sum of many would lose the digits in which groups differ.
            values: list[Tensor] = [
                one.detach().to(torch.promote_types(one.dtype, torch.float32)) for one in parameters
            ]
        else:
            values = [anchor.detach() - one.detach() for anchor, one in zip(self._anchors, parameters, strict=True)]
        if not has_trained:
            torch._foreach_zero_(values)
        if not self._groups.reduce(values):
            return False
        torch._foreach_div_(values, num_groups)
        if self._outer is None:
            _copy(values, to=parameters)
        else:
            for anchor, value in zip(self._anchors, values, strict=True):
                anchor.grad = value
        return True

    def _share_inner(self, everyone: list[dict[str, Any]]) -> bool:
        """Let the group that writes know the inner states of all, for a checkpoint; return whether all were there."""
        if self._groups.size == 1:
            return True
        buffer = io.BytesIO()
        torch.save([one.state_dict()["state"] for one in self._run.optimizers], buffer)  # schedules step after this
        states = self._groups.exchange_bytes(buffer.getvalue())
        if states is None:
            return False
        self.inner = {
            one["name"]: torch.frombuffer(bytearray(state), dtype=torch.uint8)
            for one, state in zip(everyone, states, strict=True)
        }
        return True

    def _hear(self, everyone: list[dict[str, Any]]) -> None:
        """Log what each micro-batch of the round has logged, in whichever group, in order."""
        metrics = self._run.metrics
        present = metrics.window, metrics.step
        for number, window in enumerate(self._logged):
            metrics.window, metrics.step = window.window, window.step
            for offset, size in enumerate(window.sizes):
                metrics.select_batch(None if size is None else _BATCH, size)
                entries = everyone[offset % len(everyone)]["logged"][number].get(str(offset), ())
                log_again(metrics, entries, window.calls.get(offset))
        metrics.window, metrics.step = present
        self._logged = []

    # --- between steps -----------------------------------------------------------------------------------------------

    def hold_stop(self) -> None:
        """Let a request to stop wait for the end of the round: until then, groups have different weights."""
        trainer = self._run.trainer
        self._is_asked_to_stop |= trainer.should_stop
        trainer.should_stop = self._is_asked_to_stop and not self.is_open


@torch.no_grad()
def _copy(values: Sequence[Tensor], *, to: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(to), list(values))


def _saves_at(callback: object, step: int) -> bool:
    every = 0
    if isinstance(callback, ModelCheckpoint):
        every = callback._every_n_train_steps
    elif isinstance(callback, Snapshot):  # groups on one node may continue from each other's copies
        every = callback.every
    return bool(every) and step % every == 0


def _refuse(groups: ReplicaGroups, every: int, log_every_n_steps: int) -> None:
    """Refuse what rounds cannot follow exactly."""
    run, loop = groups.run, groups.loop
    traits = run.fabric.strategy.traits
    reason = _refused_callback(run, every)
    if traits.shards_parameters:
        reason = f"{type(run.fabric.strategy).__name__}; a group can have strategy='ddp'"
    elif run.fabric.precision.has_scaler:
        reason = f"precision={run.fabric.precision.precision!r}, whose loss scale differs between groups"
    elif run.skips_bad_steps:
        reason = "nonfinite_loss='skip', with which groups would count different steps"
    elif any(hasattr(one, "train") and hasattr(one, "eval") for one in run.optimizers):
        reason = "a schedule-free optimizer, which has other weights in evaluation"
    elif loop.data_limits or loop.has_time_limit:
        reason = "max_samples, max_tokens or max_time; limit max_steps or max_epochs"
    elif run.loaders.interval_s is not None:
        reason = "a validation interval in time, at which groups are at different steps"
    elif log_every_n_steps % every:
        reason = f"log_every_n_steps={log_every_n_steps}; groups know each other's values every {every} steps"
    if reason is not None:
        raise ConfigError(
            f"fault_tolerance=TorchFT(sync_every={every}) with {reason}.",
            fix=f"leave out one of the two, or choose intervals that are multiples of {every}.",
        )


def _refused_callback(run: FitRun, every: int) -> str | None:
    for one in run.callbacks:
        name = type(one).__name__
        if isinstance(one, Averaging):
            return f"{name}, whose average would follow the weights of one group"
        if isinstance(one, ModelCheckpoint):
            if one._train_time_interval is not None:
                return f"{name}(train_time_interval=...), at which groups are at different steps"
            if one._every_n_train_steps % every:
                return f"{name}(every_n_train_steps={one._every_n_train_steps}), within a round"
        if isinstance(one, Snapshot) and one.every % every:
            return f"{name}(every={one.every}), within a round"
    return None
