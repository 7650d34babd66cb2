"""Communication hooks: gradients compressed, approximated, or averaged within a subgroup."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Clauses, ConfigError, MissingDependency, nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    from ...protocols import Kwargs, StateDict
    from ..parallel import ParallelStrategy
    from .replica import Replica

# Any in this file: hooks and their states are the user's or torch's own.
Bucket = Any  # torch's GradBucket, which its types lack
Futured = torch.futures.Future[Tensor]
Hook = Callable[[Any, Bucket], Futured]

_HOOKS = {
    "allreduce": "allreduce",
    "noop": "noop",
    "fp16": "fp16",
    "fp16_compress": "fp16",
    "bf16": "bf16",
    "bf16_compress": "bf16",
    "powersgd": "powersgd",
    "power_sgd": "powersgd",
    "post_local_sgd": "post_local_sgd",
    "post_localsgd": "post_local_sgd",
}
_OF_TORCH = {
    "allreduce_hook": "allreduce",
    "noop_hook": "noop",
    "fp16_compress_hook": "fp16",
    "bf16_compress_hook": "bf16",
    "powerSGD_hook": "powersgd",
    "post_localSGD_hook": "post_local_sgd",
}
_WRAPPERS = {"fp16": "fp16", "fp16_compress": "fp16", "bf16": "bf16", "bf16_compress": "bf16"}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_KNOWN = ("fp16", "bf16", "powersgd", "post_local_sgd", "allreduce", "noop")


def hook_name(hook: object) -> str | None:
    """Return which of our names a hook goes by: a name, a member of torch's enumeration, or torch's function."""
    if isinstance(hook, enum.Enum):
        hook = hook.name.lower().removesuffix("_rank2")
    if isinstance(hook, str):
        return _HOOKS.get(hook.lower())
    is_of_torch = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.")
    return _OF_TORCH.get(getattr(hook, "__name__", "")) if is_of_torch else None


def check_comm_hook(hook: object, state: object, wrapper: object, period: int | None) -> Clauses:
    """Return (what, fix) for every invalid argument of DDPStrategy.

    Raises:
        MissingDependency: The hook needs numpy.
    """
    problems = Clauses()
    name = hook_name(hook)
    if name == "powersgd" and find_spec("numpy") is None:
        raise MissingDependency("numpy", needed_for=f"ddp_comm_hook={getattr(hook, 'name', hook)!r}")
    if hook is not None and name is None and (isinstance(hook, enum.Enum) or not callable(hook)):
        near = nearest(hook.lower(), _HOOKS) if isinstance(hook, str) else ""
        problems.add(
            f"expected a known communication hook, got ddp_comm_hook={hook!r}{near}",
            f"use one of {', '.join(_KNOWN)}, or a function (state, bucket)",
        )
    if wrapper is not None and not callable(wrapper) and str(wrapper).lower() not in _WRAPPERS:
        problems.add(
            f"expected a known wrapper, got ddp_comm_wrapper={wrapper!r}",
            "use 'fp16', 'bf16', or a function that takes the hook",
        )
    if hook is None and (state is not None or wrapper is not None):
        problems.add(
            "ddp_comm_state and ddp_comm_wrapper require ddp_comm_hook, got none", "pass ddp_comm_hook, or remove them"
        )
    if name == "post_local_sgd" and period is None:
        problems.add(
            "ddp_comm_hook='post_local_sgd' requires model_averaging_period, because the weights of the ranks "
            "differ between averagings",
            "pass model_averaging_period as the number of steps between two averagings",
        )
    if name != "post_local_sgd" and period is not None:
        problems.add(
            f"model_averaging_period={period!r} has no effect without ddp_comm_hook='post_local_sgd': with "
            "averaged gradients the weights are equal",
            "remove model_averaging_period, or pass ddp_comm_hook='post_local_sgd'",
        )
    if period is not None and (not isinstance(period, int) or isinstance(period, bool) or period < 1):
        problems.add(
            f"expected model_averaging_period to be an integer >= 1, got model_averaging_period={period!r}",
            "pass a number of steps",
        )
    return problems


class CommHook:
    """A hook with its state, on one module.

    Args:
        hook: The user's `ddp_comm_hook`.
        state: The user's `ddp_comm_state`.
        wrapper: The user's `ddp_comm_wrapper`.
        strategy: Provides the ranks of this node.

    Raises:
        ConfigError: The state does not fit the hook.
    """

    def __init__(self, hook: object, state: object, wrapper: Any, strategy: ParallelStrategy) -> None:
        self.name = hook_name(hook)
        self.state = _make_state(self.name, hook, state, strategy)
        run = _make_hook(self.name, hook)
        self.feedback: _Feedback | None = None
        if self.name == "powersgd":
            self.feedback = _Feedback(self.state, run)
            run = self.feedback
        if wrapper is not None:
            run = wrapper(run) if callable(wrapper) else _compressed(run, _DTYPES[_WRAPPERS[wrapper.lower()]])
        self._run = run

    @property
    def first_local_step(self) -> int:
        """Steps during which post-local SGD still averages gradients over all ranks."""
        return int(getattr(self.state, "start_localSGD_iter", 0))

    def register(self, replica: Replica) -> None:
        """Let a module's gradients be communicated by this hook."""
        run = self._run
        if self.feedback is not None:
            self.feedback.start({id(one): name for name, one in replica.original.named_parameters()})

        # torch checks annotations and the name of what it is given: it refuses annotations as text, and its own bf16
        # hook where there is no CUDA, though that one runs on gloo.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            return run(state, bucket)

        replica.register_comm_hook(self.state, hook)
        replica.__dict__["comm_hook"] = self

    def state_dict(self) -> StateDict:
        """Return what must survive a resume. On every rank: it communicates."""
        if self.feedback is not None:
            return self.feedback.state_dict()
        return {"iter": self.state.iter} if self.name == "post_local_sgd" else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state returned by `state_dict`."""
        if self.feedback is not None:
            self.feedback.load_state_dict(state)
        elif self.name == "post_local_sgd":
            self.state.iter = state["iter"]


# -- hooks -------------------------------------------------------------------------------------------------------------


def _make_hook(name: str | None, hook: Any) -> Hook:
    if name in _DTYPES:
        return lambda state, bucket: _all_reduce_as(bucket, _DTYPES[name], state)
    if name == "noop":
        return _leave
    if name == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        return powerSGD_hook
    if name == "post_local_sgd":
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

        return post_localSGD_hook
    if name == "allreduce":
        return lambda state, bucket: _average(bucket.buffer(), state)
    chosen: Hook = hook
    return chosen


def _average(buffer: Tensor, group: ProcessGroup | None) -> Futured:
    buffer.div_(dist.get_world_size(group))
    future: Futured = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _all_reduce_as(bucket: Bucket, dtype: torch.dtype, group: ProcessGroup | None) -> Futured:
    """Average a bucket in a shorter dtype; divided before it is rounded, so that float16 does not overflow."""
    buffer = bucket.buffer()
    short = (buffer / dist.get_world_size(group)).to(dtype)
    future: Futured = dist.all_reduce(short, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def _compressed(hook: Hook, dtype: torch.dtype) -> Hook:
    """Return a hook that casts a bucket to a shorter dtype for `hook`, and casts the result back."""

    def run(state: object, bucket: Bucket) -> Futured:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(dtype))

        def widen(done: Any) -> Tensor:
            value = done.value()
            result: Tensor = buffer.copy_(value[0] if isinstance(value, list | tuple) else value)
            return result

        return hook(state, bucket).then(widen)

    return run


def _leave(state: object, bucket: Bucket) -> Futured:
    future = Futured()
    future.set_result(bucket.buffer())
    return future


# -- states ------------------------------------------------------------------------------------------------------------


def _make_state(name: str | None, hook: object, state: object, strategy: ParallelStrategy) -> Any:
    """Return the state object from what the user passed; subgroups are made here, on every rank alike."""
    if callable(state) and not isinstance(state, type) and not hasattr(state, "iter"):
        state = state()
    if name == "powersgd":
        return _power_sgd_state(hook, state)
    if name == "post_local_sgd":
        return _post_local_state(state, strategy)
    return state


def _power_sgd_state(hook: object, state: object) -> PowerSGDState:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    if isinstance(state, PowerSGDState):
        return state
    rank = 2 if isinstance(hook, enum.Enum) and hook.name.endswith("RANK2") else 1
    options: Kwargs = {"process_group": None, "matrix_approximation_rank": rank}
    if isinstance(state, int) and not isinstance(state, bool):
        options["matrix_approximation_rank"] = state
    elif isinstance(state, Mapping):
        options.update(state)
    elif state is not None:
        raise _wrong_state("powersgd", state, "a PowerSGDState, its keyword arguments as a dict, or a rank")
    try:
        return PowerSGDState(**options)
    except (TypeError, ValueError) as error:
        raise _wrong_state("powersgd", state, f"arguments that torch accepts: {error}") from error


def _post_local_state(state: object, strategy: ParallelStrategy) -> PostLocalSGDState:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    options: Kwargs = {"process_group": None, "subgroup": None, "start_localSGD_iter": 0}
    subgroup_size = None
    if isinstance(state, PostLocalSGDState):
        made = state
    else:
        if isinstance(state, int) and not isinstance(state, bool):
            options["start_localSGD_iter"] = state
        elif isinstance(state, Mapping):
            options.update(state)
            subgroup_size = options.pop("subgroup_size", None)
        elif state is not None:
            raise _wrong_state("post_local_sgd", state, "a PostLocalSGDState, a dict, or the first local step")
        try:
            made = PostLocalSGDState(**options)
        except TypeError as error:
            raise _wrong_state("post_local_sgd", state, f"arguments that torch accepts: {error}") from error
    if made.subgroup is None:  # torch's own default works with CUDA only
        made.subgroup = _subgroup(subgroup_size, strategy)
    return made


def _subgroup(size: int | None, strategy: ParallelStrategy) -> ProcessGroup | None:
    """Return the group of this rank: the processes of its node, or `size` neighbors. Every rank makes every group."""
    count = strategy.world_size
    if size is not None and (size < 1 or count % size):
        raise _wrong_state("post_local_sgd", {"subgroup_size": size}, f"a subgroup_size that divides {count} processes")
    nodes = strategy.gather_objects(strategy.node_rank if size is None else strategy.global_rank // size)
    mine = None
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        group = dist.new_group(ranks)
        if strategy.global_rank in ranks:
            mine = group
    return mine


def _wrong_state(name: str, state: object, expected: str) -> ConfigError:
    return ConfigError(
        f"DDPStrategy: Expected ddp_comm_state for ddp_comm_hook={name!r} to be {expected}, got {state!r}.",
        fix="see the docstring of DDPStrategy for the forms of ddp_comm_state.",
    )


# -- PowerSGD's memory -------------------------------------------------------------------------------------------------


class _Feedback:
    """PowerSGD with an error feedback that survives a resume.

    torch keeps what compression left out ("error feedback") by bucket, and each run forms its own buckets, after the
    first step. Here it is saved by parameter, as the mean over ranks: compression is linear in the gradients, so only
    the mean matters, and it fits any number of ranks. The first step after a resume communicates gradients and what is
    owed in full. The warm start of the approximation is drawn again.

    Args:
        state: torch's PowerSGDState.
        hook: torch's hook.
    """

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state = state
        self._hook = hook
        self._names: dict[int, str] = {}
        self._layout: dict[int, list[Tensor]] = {}
        self._owed: dict[str, Tensor] = {}
        self._is_first_step = True

    def start(self, names: dict[int, str]) -> None:
        """Begin with new buckets; names of parameters by id."""
        self._owed |= self._by_parameter(self._state.error_dict)
        self._names = names
        for memory in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
            memory.clear()
        self._is_first_step = True

    def __call__(self, state: Any, bucket: Bucket) -> Futured:
        parameters = self._layout[bucket.index()] = bucket.parameters()
        if not self._is_first_step:
            return self._hook(state, bucket)
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            owed = self._owed.get(self._names[id(parameter)])
            if owed is not None:
                gradient.add_(owed.view_as(gradient).to(gradient.device, gradient.dtype))
        if bucket.is_last():
            self._owed = {}
            self._is_first_step = False
        state.maybe_increase_iter(bucket)
        return _average(bucket.buffer(), state.process_group)

    def state_dict(self) -> StateDict:
        """Return steps and, by parameter, what is owed. On every rank: it communicates."""
        group = self._state.process_group
        means = {index: error.detach().clone() for index, error in sorted(self._state.error_dict.items())}
        for mean in means.values():
            dist.all_reduce(mean, group=group)
            mean /= dist.get_world_size(group)
        owed = self._owed | {name: part.float().cpu() for name, part in self._by_parameter(means).items()}
        return {"iter": self._state.iter, "owed": owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another run stopped."""
        self._state.iter = state["iter"]
        self._state.error_dict.clear()
        self._owed = {}
        self.start(self._names)
        self._owed = dict(state["owed"])

    def _by_parameter(self, errors: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Split state of buckets into state of parameters."""
        parts = {}
        for index, error in errors.items():
            offset = 0
            for parameter in self._layout[index]:
                part = error[offset : offset + parameter.numel()].view(parameter.shape)
                parts[self._names[id(parameter)]] = part.clone()
                offset += parameter.numel()
        return parts
