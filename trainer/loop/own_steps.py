"""Steps that a module makes itself, with any optimizer of its parameters: they count like the trainer's.

Watched in manual optimization, and where `configure_optimizers` returned None: by torch's hooks around each optimizer's
step, from the beginning of fit until its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...messages import warn
from . import manual
from .schedule import parameters_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ..run import FitRun

_Kind = Literal["configured", "foreign", "elsewhere"]


class OwnSteps:
    """Adds each optimizer that has stepped parameters of the run's module to `run.stepped`.

    With several ranks, gradients that no backward pass has averaged are averaged before the step, which all ranks have
    to make together.

    Args:
        run: The run, whose optimizers are built.
    """

    def __init__(self, run: FitRun) -> None:
        self._run = run
        # The optimizer itself is kept, so that its id stays its own.
        self._known: dict[int, tuple[Optimizer, _Kind]] = {}
        self._has_warned = False
        self._handles: list[RemovableHandle] = []
        if run.has_ranks:
            run.unreduced = list(run.optimizers)
        self.watch()

    def watch(self) -> None:
        """Watch from now on."""
        self._handles = [register_optimizer_step_post_hook(self._after)]
        if self._run.has_ranks:
            self._handles.append(register_optimizer_step_pre_hook(self._before))

    def remove(self) -> bool:
        """Stop watching; return whether it was watching."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        return bool(handles)

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        run, kind = self._run, self._kind_of(optimizer)
        if kind == "foreign":
            run.unreduced.append(optimizer)
            manual.reduce_gradients(run, optimizer)
        elif kind == "configured":
            for one in list(run.unreduced):
                manual.reduce_gradients(run, one)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        run = self._run
        if self._kind_of(optimizer) != "elsewhere":
            run.stepped.append(optimizer)
            if run.has_ranks:  # the module may run another backward pass that is not seen here
                run.unreduced = list(run.optimizers)

    def _kind_of(self, optimizer: Optimizer) -> _Kind:
        """Return whether the optimizer steps the module, and parameters of configured ones only; looked up once.

        An optimizer within a configured one, as the base of a wrapper, counts as configured.
        """
        known = self._known.get(id(optimizer))
        if known is None:
            known = self._known[id(optimizer)] = (optimizer, self._find_kind(optimizer))
            if known[1] == "foreign" and self._run.optimizers:
                self._warn(optimizer)
        return known[1]

    def _find_kind(self, optimizer: Optimizer) -> _Kind:
        mine = {id(one) for one in parameters_of(optimizer)}
        if not any(id(one) in mine for one in self._run.module.parameters()):
            return "elsewhere"
        configured = {id(one) for other in self._run.optimizers for one in parameters_of(other)}
        return "configured" if mine <= configured else "foreign"

    def _warn(self, optimizer: Optimizer) -> None:
        if self._has_warned or not self._run.trainer.is_global_zero:
            return
        self._has_warned = True
        warn(
            f"{type(optimizer).__name__} steps parameters of the module, and configure_optimizers did not return it: "
            "its steps count, but its state is in no checkpoint",
        )
