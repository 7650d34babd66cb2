"""Evaluation data as Lightning reads them: the first loader is iterated before the hooks of the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from typing_extensions import override

from ....protocols import Batch
from ....trainer.behavior import Behavior
from ....trainer.loop.eval_loader import EvalLoader, ReadOnce
from ....trainer.loop.eval_loop import EvalLoop
from ....trainer.run import Run
from ....trainer.session.session import Session
from ....trainer.trainer import Trainer
from .reading import try_to_iterate

__all__ = ["begin_before_hooks"]


@dataclass(slots=True)
class BegunLoader(EvalLoader):
    """An `EvalLoader` whose first loader is being iterated.

    Attributes:
        begun: The number and the batches of each loader, where reading has begun.
    """

    begun: Iterator[tuple[int, Iterator[Batch]]] = field(default_factory=lambda: iter(()))

    @override
    def __iter__(self) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Continue."""
        return self.begun


def begin_before_hooks(trainer: Trainer) -> None:
    """Let each evaluation begin to iterate before its hooks, so that the first loader draws before them."""
    trainer.parts.loaders.opened = _try


def begin_in_loops(behavior: Behavior) -> Behavior:
    """Let the loops of a verb continue where `begin_before_hooks` has begun."""
    return replace(behavior, evaluation_loop=partial(_loop_that_begins, behavior.evaluation_loop))


def _try(data: EvalLoader) -> None:
    for loader in data.loaders:
        if not isinstance(loader, ReadOnce):  # the try would be its only pass
            try_to_iterate(loader)


def _loop_that_begins(
    make: Callable[[Session, str, EvalLoader], EvalLoop], session: Session, stage: str, data: EvalLoader
) -> EvalLoop:
    loop = make(session, stage, data)
    loop.begin = _begin
    return loop


def _begin(run: Run, data: EvalLoader) -> EvalLoader:
    data.announce_epoch(run.progress.epochs)
    members = iter(data)
    first = [one for one in [next(members, None)] if one is not None]
    fields = {name: getattr(data, name) for name in EvalLoader.__dataclass_fields__}
    return BegunLoader(**fields, begun=chain(first, members))
