"""`UnsplitRun`: one step of a split module as if it were not split. Other stages run their modules on request.

The rank with the last stage runs the step from its beginning to its end. Where it calls a module of another stage, the
arguments travel to the rank that has it, and what it returns travels back; so every value is that of the unsplit model,
also those that pass beside the blocks, and no parameter moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....protocols import AnyOutput, Args, Kwargs, Tree
from ...tree import map_leaves
from .block_calls import BlockCall, Cut
from .outer_modules import OuterCall

if TYPE_CHECKING:
    from ..random_numbers import StepNumbers
    from .exchange import Exchange
    from .split import StageSplit

# Any in this file: arguments and results of the user's modules.


class CannotRunError(Exception):
    """The step could not be run as a whole; says why."""


class _Slot:
    """Stands for a tensor in a structure that is sent."""


class UnsplitRun:
    """Runs one step; all ranks of a pipeline do so at once: it communicates.

    Args:
        split: This rank's stages.
        rank_of: The rank of each stage.
        exchange: Of the pipeline.
        numbers: Of the runner.
        observe: Gets the name and the arguments of each block of this rank.

    Attributes:
        attributes: Names of attributes that blocks of other stages set to tensors or numbers, on the last stage.
    """

    def __init__(
        self,
        split: StageSplit,
        rank_of: dict[int, int],
        exchange: Exchange,
        numbers: StepNumbers,
        observe: Callable[[str, Args, Kwargs], None],
    ) -> None:
        self.attributes: list[str] = []
        self._split, self._rank_of = split, rank_of
        self._exchange, self._numbers, self._observe = exchange, numbers, observe
        self._last = rank_of[split.plan.num_stages - 1]
        self._has_served = self._is_serving = False

    def run(self, step: Callable[[], AnyOutput]) -> AnyOutput:
        """Run a step and return its output, on the rank with the last stage; None elsewhere.

        Raises:
            CannotRunError: It failed, here or on another rank.
        """
        split = self._split
        split.at.unsplit = self
        try:
            return step() if split.has_last else self._serve_in(step)
        except CannotRunError:
            raise
        except Exception as error:
            raise CannotRunError(f"{type(error).__name__}: {error}") from error
        finally:
            if split.has_last:
                for rank in range(split.num_ranks):
                    if rank != self._last:
                        self._send_object(None, rank)
            self._exchange.settle()
            split.at.unsplit = None

    # -- calls of the step's modules -------------------------------------------------------------------------------

    def child(self, module: nn.Module, args: Args, kwargs: Kwargs) -> AnyOutput:
        """Run the module that is split."""
        self._serve_first()
        return nn.Module._call_impl(module, *args, **kwargs)

    def block(self, call: BlockCall, args: Args, kwargs: Kwargs) -> AnyOutput:
        """Run a block where its parameters are."""
        self._serve_first()
        numbers = self._numbers
        numbers.leave_step()
        if call.is_own:
            self._observe(call.name, args, kwargs)
            numbers.seed(2 * call.index)
            output = nn.Module._call_impl(call.module, *args, **kwargs)
        else:
            output = self._request(self._rank_of[self._split.plan.stage_of(call.index)], call, args, kwargs)
        numbers.seed(2 * call.index + 1)
        return output

    def outer(self, call: OuterCall, args: Args, kwargs: Kwargs) -> AnyOutput:
        """Run a module beside the blocks where its parameters are."""
        self._serve_first()
        if call.is_own:
            with self._numbers.beside(call.name):
                return nn.Module._call_impl(call.module, *args, **kwargs)
        return self._request(
            self._rank_of[0 if call.is_before else self._split.plan.num_stages - 1], call, args, kwargs
        )

    # -- the rank with the last stage ------------------------------------------------------------------------------

    def _request(self, rank: int, call: BlockCall | OuterCall, args: Args, kwargs: Kwargs) -> AnyOutput:
        if self._is_serving:
            raise CannotRunError(f"{call.name} is called within a module of another stage")
        self._send((call.name, args, kwargs), rank)
        answer, changed = self._receive(rank)
        if isinstance(changed, str):
            raise CannotRunError(changed)
        for (path, key), value in changed.items():
            self._split.module.get_submodule(path).__dict__[key] = value
            self.attributes.append(f"{path}.{key}")
        return answer

    # -- other ranks -----------------------------------------------------------------------------------------------

    def _serve_first(self) -> None:
        """Answer requests in place of the step, from its first call of a module on: where its hooks have run."""
        if not self._split.has_last and not self._is_serving:
            self._serve(None)
            raise Cut(None)  # type: ignore[arg-type]  # nothing is passed on

    def _serve_in(self, step: Callable[[], AnyOutput]) -> None:
        problem = "it called no module of the pipeline"
        try:
            step()
        except Cut:
            return
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not self._has_served:
            self._serve(problem)

    def _serve(self, problem: str | None) -> None:
        """Answer requests until there are no more; with a problem if there is one."""
        self._has_served = self._is_serving = True
        try:
            while (request := self._receive(self._last)) is not None:
                try:
                    self._send(self._answer(*request) if problem is None else (None, problem), self._last)
                except CannotRunError as error:
                    self._send((None, str(error)), self._last)
                self._exchange.settle()
        finally:
            self._is_serving = False

    def _answer(self, name: str, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        module = self._split.module.get_submodule(name)
        before = _attributes(module, name)
        try:
            output = module(*args, **kwargs)
        # Whatever it is: it is reported, and the step itself will raise it.
        except Exception as error:
            return None, f"{name}: {type(error).__name__}: {error}"
        after = _attributes(module, name)
        return output, {key: value for key, value in after.items() if key not in before or value is not before[key]}

    # -- structures of tensors -------------------------------------------------------------------------------------

    def _send(self, data: Tree, rank: int) -> None:
        tensors: list[Tensor] = []

        def take(value: Tree) -> Tree:
            if not isinstance(value, Tensor):
                return value
            if not self._exchange.can_send(value):
                raise CannotRunError(f"a {type(value).__name__} of {value.dtype} cannot be sent to another rank")
            tensors.append(value)
            return _Slot()

        structure = map_leaves(data, take)
        try:
            self._send_object(structure, rank)
        except (TypeError, AttributeError, ValueError, OSError) as error:  # it cannot be pickled
            raise CannotRunError(f"arguments cannot be sent to another rank: {error}") from error
        for tensor in tensors:
            self._exchange.send(tensor, rank)

    def _receive(self, rank: int) -> AnyOutput:
        received = self._exchange.receive_object(rank)
        return map_leaves(received, lambda one: self._exchange.receive(rank) if isinstance(one, _Slot) else one)

    def _send_object(self, data: Tree, rank: int) -> None:
        self._exchange.send_object(data, rank)


_OF_TORCH = frozenset(nn.Module().__dict__)


def _attributes(module: nn.Module, name: str) -> dict[tuple[str, str], Any]:
    """Return the tensors and numbers in attributes of a module and those in it: what code around it may read."""
    return {
        (f"{name}.{path}" if path else name, key): value
        for path, one in module.named_modules()
        for key, value in one.__dict__.items()
        if key not in _OF_TORCH and isinstance(value, Tensor | int | float)
    }
