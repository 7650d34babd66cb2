"""`StageSplit`: a module with the stages of one rank.

Parameters and buffers of other stages become attributes that have shape and dtype; what is left keeps its name. Beside
the stages' own ones there are shared ones: those that modules of several stages have in common (tied embeddings), and
those outside of the submodule that is split, which each rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....errors import ModuleError
from ....protocols import AnyOutput, StepFunction
from ...distributed.shards import FULL_STATE
from .attributes import StageStates
from .block_calls import BlockCall, ChildCall, Cut, Position
from .blocks import StagePlan, plan_stages
from .outer_modules import make_twins, outer_modules_of, place
from .parameter_lists import list_all_parameters
from .remote_tensors import RemoteTensor

if TYPE_CHECKING:
    import torch

    from .options import Pipeline

# Any in this file: arguments and results of the user's steps.

EVERYWHERE = -1
"""In place of a stage: every rank has it."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter that several ranks of a pipeline have: its gradient is the sum of theirs.

    Attributes:
        names: Its names in the user's module, in order; a rank has it under some of them.
        ranks: The ranks of the pipeline that have it, ascending.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(eq=False)
class StageSplit:
    """A module that was split.

    Attributes:
        module: The user's module.
        plan: The stages.
        rank: This rank's place in its pipeline.
        num_ranks: Ranks of the pipeline.
        stages: This rank's stages, ascending.
        owners: Name of each parameter and buffer of the unsplit module -> the ranks of the pipeline that have it. The
            value of the first one counts: of a buffer that all have, that of the rank with the last stage.
        shared: Parameters of several ranks, in the order of the module; the same on all ranks.
        state_names: Names in the state of the unsplit module, in its order.
        module_ranks: Path of each module -> the rank whose copy of it counts, as with buffers.
        parameter_names: Names of the parameters of the unsplit module, in its order.
        at: Where the present step is.
        states: What steps of several stages change.
        on_cut: Called where a step ends at the first block of the next stage.
    """

    module: nn.Module
    plan: StagePlan
    rank: int
    num_ranks: int
    stages: tuple[int, ...]
    owners: dict[str, tuple[int, ...]]
    shared: tuple[Shared, ...]
    state_names: tuple[str, ...]
    module_ranks: dict[str, int]
    parameter_names: dict[str, None]
    at: Position
    states: StageStates
    on_cut: Callable[[], None] = field(default=lambda: None, repr=False)
    _members: dict[int, list[nn.Module]] = field(default_factory=dict, repr=False)

    @property
    def has_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.stages[0] == 0

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage: the only one whose steps run to their end."""
        return self.stages[-1] == self.plan.num_stages - 1

    def run(
        self, stage: int, received: tuple[Tensor, ...] | None, step: StepFunction, *args: Any, **kwargs: Any
    ) -> AnyOutput:
        """Run one stage of a step.

        Args:
            stage: One of `stages`.
            received: What `run` returned on the stage before; None for the first stage.
            step: The user's step.
            args: Its arguments.
            kwargs: Its arguments.

        Returns:
            What the next stage needs; on the last stage, what the step returned.

        Raises:
            ModuleError: The step did not call the blocks as a pipeline needs it.
        """
        at, plan = self.at, self.plan
        at.first, at.end = plan.bounds[stage], plan.bounds[stage + 1]
        at.stage, at.received, at.is_called, at.is_past = stage, received, False, False
        try:
            with self.states.of(stage):
                output = step(*args, **kwargs)
        except Cut as cut:
            self.on_cut()
            return cut.value
        finally:
            is_past = at.is_past
            at.stage = at.received = None
        if stage == plan.num_stages - 1 and is_past:
            return output
        raise ModuleError(
            f"Expected {getattr(step, '__name__', 'the step')} to call the blocks of {plan.list or 'the module'} in "
            f"order, got no call of block {at.end if is_past else at.first} (stage {stage} of {plan.num_stages}).",
            fix=f"call {plan.called} once in each step; or name what is called in Pipeline(module=...).",
        )

    def rehearse(
        self, received: tuple[Tensor, ...] | None, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a forward of the present stage ahead of its turn, in a step that then continues as if it had not.

        Args:
            received: In place of what the stage before has sent; None for the first stage.
            forward: That of a module with the blocks.
            args: Its arguments.
            kwargs: Its arguments.

        Returns:
            The hidden state for the next stage; on the last stage, what `forward` returned.
        """
        at = self.at
        before = at.received, at.is_called, at.is_past
        at.received, at.rehearses = received, True
        try:
            return forward(*args, **kwargs)
        except Cut as cut:
            return cut.value[0]
        finally:
            at.received, at.is_called, at.is_past = before
            at.rehearses = False

    def owner_of(self, name: str) -> int:
        """Return the rank that knows best about a module, or what belongs to it, by its name."""
        if name in self.owners:
            return self.owners[name][0]
        while name not in self.module_ranks:
            name = name.rpartition(".")[0]
        return self.module_ranks[name]

    def leave_to_last(self, name: str) -> None:
        """Leave a buffer that every rank has to the rank with the last stage. On every rank of the pipeline."""
        path, _, key = name.rpartition(".")
        self.owners[name] = self.owners[name][:1]
        if self.owners[name] != (self.rank,):
            _leave(self.module.get_submodule(path), (key,), path, self.plan.num_stages - 1, self.at, _LATE)

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Return a context in which the module's `state_dict()` returns what this rank has, without an error."""
        self.at.is_in_parts = True
        try:
            yield
        finally:
            self.at.is_in_parts = False

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """Yield the parameters that a stage of this rank may use, each once, as they are now."""
        seen: set[int] = set()
        for member in (*self._members[stage], *self._members.get(EVERYWHERE, ())):
            for one in member._parameters.values():
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    yield one


def split_stages(
    module: nn.Module, options: Pipeline, *, rank: int, num_ranks: int, device: torch.device | None = None
) -> StageSplit:
    """Split a module in place and return what runs its stages. Does not communicate.

    Args:
        module: The user's module, the same on all ranks; with values or on the meta device.
        options: The arguments that the user chose.
        rank: This rank's place in its pipeline.
        num_ranks: Ranks of the pipeline.
        device: Where it will run; None: where the parameters are.

    Raises:
        ConfigError: A name in the options does not exist.
        ModuleError: The module cannot be split; the message has the reason.
    """
    plan = plan_stages(module, options, num_ranks)
    stages = options.stages_of(rank, num_ranks)
    rank_of = {stage: one for one in range(num_ranks) for stage in options.stages_of(one, num_ranks)}
    blocks = list(module.get_submodule(plan.list).named_children())
    prefix = f"{plan.list}." if plan.list else ""
    outer_modules = dict(outer_modules_of(module, plan))
    stage_of: dict[int, int] = {}  # by the id of a module
    for index, (_, block) in enumerate(blocks):
        for one in block.modules():
            stage_of[id(one)] = plan.stage_of(index)
    for _, (outer, is_before) in outer_modules.items():
        for one in outer.modules():
            stage_of.setdefault(id(one), 0 if is_before else plan.num_stages - 1)
    at = Position(plan.called, len(blocks))
    at.states = states = StageStates(module, (block for _, block in blocks))
    twins = make_twins(outer_modules, device) if stages != (0,) else {}
    state_names = tuple(module.state_dict(keep_vars=True))
    owners, shared = _owners(module, stage_of, rank_of)
    names = dict.fromkeys(name for name, _ in module.named_parameters(remove_duplicate=False))
    last = rank_of[plan.num_stages - 1]
    module_ranks = {
        path: rank_of.get(stage_of.get(id(one), EVERYWHERE), last)
        for path, one in module.named_modules(remove_duplicate=False)
    }
    members: dict[int, list[nn.Module]] = {}
    for one in module.modules():
        members.setdefault(stage_of.get(id(one), EVERYWHERE), []).append(one)
    child = module.get_submodule(plan.child)
    child.__dict__["_call_impl"] = ChildCall(child, at)
    for index, (key, block) in enumerate(blocks):
        is_own = plan.stage_of(index) in stages
        block.__dict__["_call_impl"] = BlockCall(block, f"{prefix}{key}", index, is_own, at)
    for name, (outer, is_before) in outer_modules.items():
        is_own = (0 if is_before else plan.num_stages - 1) in stages
        place(outer, name, is_before=is_before, is_own=is_own, at=at, twin=twins.get(name))
    _leave_others(module, stage_of, rank_of, rank, at)
    list_all_parameters(module, at)
    split = StageSplit(
        module, plan, rank, num_ranks, stages, owners, shared, state_names, module_ranks, names, at, states
    )
    split._members = {stage: ones for stage, ones in members.items() if stage in (*stages, EVERYWHERE)}
    if not any(True for stage in stages for _ in split.parameters_of(stage)):
        raise ModuleError(
            f"Expected parameters on every rank, got none for stages {list(stages)} (pp={num_ranks}).",
            fix="use fewer stages, or name other split points in Pipeline(split=...).",
        )
    return split


def _owners(
    module: nn.Module, stage_of: dict[int, int], rank_of: dict[int, int]
) -> tuple[dict[str, tuple[int, ...]], tuple[Shared, ...]]:
    """Return which ranks have each tensor by its name, and the parameters that several of them have."""
    everyone = sorted(set(rank_of.values()))
    last = rank_of[max(rank_of)]
    owners: dict[str, tuple[int, ...]] = {}
    names: dict[int, list[str]] = {}
    ranks: dict[int, set[int]] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        stage = stage_of.get(id(one), EVERYWHERE)
        having = tuple(everyone) if stage == EVERYWHERE else (rank_of[stage],)
        for key, tensor in (*one._parameters.items(), *one._buffers.items()):
            if tensor is None:
                continue
            name = f"{path}.{key}" if path else key
            owners[name] = having
            if len(having) > 1 and not isinstance(tensor, nn.Parameter):
                # Code after the blocks, which may change it, runs with the last stage only.
                owners[name] = (last, *(rank for rank in having if rank != last))
            if isinstance(tensor, nn.Parameter):
                names.setdefault(id(tensor), []).append(name)
                ranks.setdefault(id(tensor), set()).update(having)
    shared = [Shared(tuple(names[one]), tuple(sorted(having))) for one, having in ranks.items() if len(having) > 1]
    return owners, tuple(shared)


@dataclass(eq=False)
class _StateCall:
    """Refuses `state_dict()` of a module whose tensors another stage has: a hook on it.

    Attributes:
        path: Its name in the user's module.
        stage: The stage that has it.
        at: Says whether parts are wanted.
    """

    path: str
    stage: int
    at: Position

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self.at.is_in_parts:
            raise ModuleError(
                f"Expected state_dict() of a module that this rank has in full, got one with {self.path}, which stage "
                f"{self.stage} of the pipeline has: the rest would be saved as if it were everything.",
                fix=f"call {FULL_STATE}.",
            )


def _leave_others(
    module: nn.Module, stage_of: dict[int, int], rank_of: dict[int, int], rank: int, at: Position
) -> None:
    """Turn parameters and buffers of other ranks' stages into attributes."""
    for path, one in list(module.named_modules()):
        stage = stage_of.get(id(one), EVERYWHERE)
        if stage == EVERYWHERE or rank_of[stage] == rank:
            continue
        one.__dict__["_load_from_state_dict"] = _load_nothing  # a norm adds entries of older versions by itself
        _leave(one, (*one._parameters, *one._buffers), path, stage, at)


_LATE = (
    "it is changed after the blocks, which only the last stage does, and read elsewhere: change it before the model "
    "is called, from what all stages have, such as the batch; or read it after the blocks only."
)


def _leave(
    one: nn.Module, keys: tuple[str, ...], path: str, stage: int, at: Position, remedy: str | None = None
) -> None:
    """Turn parameters and buffers of a module that another rank's stage has into attributes."""
    gone = {
        key: tensor for key, tensor in {**one._parameters, **one._buffers}.items() if key in keys and tensor is not None
    }
    for key, tensor in gone.items():
        one._parameters.pop(key, None)
        one._buffers.pop(key, None)
        made = RemoteTensor.of(tensor, f"{path}.{key}" if path else key, stage)
        one.__dict__[key] = made if remedy is None else made.with_remedy(remedy)
    if gone:
        one.register_state_dict_pre_hook(_StateCall(path or "the module", stage, at))


def _load_nothing(*args: object, **kwargs: object) -> None:
    """In place of what loads a module of another stage."""
