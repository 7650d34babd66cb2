"""Data parallel training: every process holds the full model, and gradients are averaged while backward runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import Clauses, ConfigError, ModuleError, nearest
from ...precision.base import compute_gradients
from ..base import NoLoss
from ..distributed import gradients
from ..distributed.changes import Changes, agree_on_changes, params_of_group
from ..distributed.collectives import broadcast_tensors
from ..distributed.live_objects import LiveObjects
from ..parallel import DEFAULT_TIMEOUT, ParallelStrategy
from ..traits import MemoryShares
from . import absence
from .comm_hooks import CommHook, check_comm_hook
from .local_sgd import ModelAveraging
from .replica import (
    NOTHING,
    Replica,
    ReplicaCall,
    inside_a_replica,
    is_odd,
    loss_tensor,
    replace_loss,
    sparse_parameters,
)

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import CheckpointPlugin, Cluster, StateDict, StepFunction, StepOutput

_OURS = {
    "module": "is passed to the Trainer or `setup_module` instead",
    "device_ids": "follows from devices=",
    "output_device": "follows from devices=",
    "dim": "has no effect with one device per process",
}
_IS_TRAINED = attrgetter("requires_grad")
_EVALUATION = ("validation_step", "test_step", "predict_step")


class DDPStrategy(ParallelStrategy):
    """Data parallel training: several processes, each with a copy of the model, on any kind of device.

    Every process computes gradients of its batches. torch's DistributedDataParallel averages them over the processes
    during the backward pass, so that all copies make the same step.

    Args:
        ddp_comm_state: State for `ddp_comm_hook`: one of torch's state objects, its keyword arguments as a dict, a
            number (rank of "powersgd", first local step of "post_local_sgd"), or a function without arguments that is
            called once the processes are connected. None is the hook's default.
        ddp_comm_hook: How gradients are communicated: "fp16", "bf16", "powersgd", "post_local_sgd", "allreduce",
            "noop", a member of torch's DDPCommHookType, or a function (state, bucket) -> Future. None averages them in
            their dtype.
        ddp_comm_wrapper: Compression around the hook: "fp16", "bf16", or a function hook -> hook.
        model_averaging_period: Steps between two averagings of the weights, for "post_local_sgd".
        uneven: Behavior if ranks have different numbers of training batches: "stop_all" ends the epoch on all ranks,
            "cycle" restarts the shorter loaders, "zero_weight" lets ranks without data take part with weight 0.
        kwargs: Arguments of DistributedDataParallel: find_unused_parameters, static_graph, gradient_as_bucket_view,
            bucket_cap_mb, broadcast_buffers, ...

    Raises:
        ConfigError: An argument is unknown or invalid; every problem is listed.
    """

    strategy_name = "ddp"
    traits = replace(ParallelStrategy.traits, averages_after_backward=True, sums_in_tree=True)

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Cluster | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: Any = None,  # Any, here and below: see the docstring
        ddp_comm_hook: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        *,
        precision: Precision | None = None,
        uneven: str = "stop_all",
        stall_timeout: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        problems = _wrong_kwargs(kwargs)
        problems += check_comm_hook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, model_averaging_period)
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, precision=precision, uneven=uneven,
            stall_timeout=stall_timeout, problems=problems,
        )  # fmt: skip
        self.ddp_comm_state = ddp_comm_state
        self.ddp_comm_hook = ddp_comm_hook
        if ddp_comm_hook is not None:
            self.traits = replace(
                self.traits,
                sums_in_tree=False,
                reduces_every_step=ddp_comm_hook not in ("noop", "post_local_sgd"),
                accumulation_refusal=("its ddp_comm_hook communicates the gradients", "leave out one of the two"),
            )
        self.ddp_comm_wrapper = ddp_comm_wrapper
        self.model_averaging_period = model_averaging_period
        self.ddp_kwargs = kwargs
        self._lw_averaging: ModelAveraging | None = None
        self._lw_replicas: LiveObjects[Replica] = LiveObjects()
        # Of modules whose gradients are averaged before each optimizer step; None before the first, to be pickled.
        self._lw_placed: WeakKeyDictionary[nn.Module, Changes] | None = None
        # The state that a checkpoint held, until the module whose gradients it is about has been set up.
        self._lw_pending_state: Mapping[str, Any] | None = None
        # The replica whose training step has run, and whose backward pass comes next.
        self._lw_forwarded: Replica | None = None

    def teardown(self) -> None:
        """Release devices and connections after a run."""
        super().teardown()
        self._lw_placed = None

    # -- the model -----------------------------------------------------------------------------------------------

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return shares of 1, because each process holds everything, and buckets of gradients; see `SharesMemory`."""
        return MemoryShares(buckets=1, formula="20 P") if num_processes > 1 else MemoryShares()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module in a wrapper that averages gradients; parameters and buffers become rank 0's.

        With a single process, or without trainable parameters, the module itself is returned. Called on every rank: it
        communicates.

        Raises:
            ModuleError: The ranks built different modules, or parameters have no shape yet; names them.
        """
        if not self.is_connected or self.world_size == 1:
            return module
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return self.place_module(module)
        self.check_module(module)
        # A module that is set up again (by the next verb) has one wrapper only: two would hold the gradients twice.
        for replica in self._lw_replicas:
            if replica.original is module:
                replica.release()
                self._lw_replicas.discard(replica)
        sparse = sparse_parameters(module)
        odd = [one for one in module.buffers() if is_odd(one)]
        broadcast_tensors([*odd, *(one for one in module.parameters() if id(one) in sparse)])
        replica = self._lw_with_stream(lambda: Replica(module, self.ddp_kwargs))
        self._lw_replicas.add(replica)
        self.configure_ddp()
        return replica

    def configure_ddp(self) -> None:
        """Register the communication hook on modules that do not have one yet; may be overridden."""
        if self.ddp_comm_hook is None:
            return
        for replica in self._lw_replicas:
            if replica.comm_hook is not None:
                continue
            hook = CommHook(self.ddp_comm_hook, self.ddp_comm_state, self.ddp_comm_wrapper, self)
            hook.register(replica)
            if self.model_averaging_period is not None and self._lw_averaging is None:
                self._lw_averaging = ModelAveraging(self.model_averaging_period, hook.first_local_step)
        if self._lw_pending_state is not None:
            self.load_state_dict(self._lw_pending_state)

    def place_module(self, module: nn.Module) -> nn.Module:
        """Return the module itself, with the parameters and buffers of rank 0. On every rank: it communicates."""
        if self.is_connected and self.world_size > 1:
            self.check_module(module)
            broadcast_tensors([*module.parameters(), *module.buffers()])
            if self._lw_placed is None:
                self._lw_placed = WeakKeyDictionary()
            self._lw_placed[module] = Changes(module)
        return module

    def sync_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks, unless `forward_sync_buffers=False`, or `broadcast_buffers=False`."""
        earlier = self.ddp_kwargs.get("broadcast_buffers")  # the name before torch 2.13
        is_off = self.ddp_kwargs.get("forward_sync_buffers", earlier) is False
        if self.is_connected and self.world_size > 1 and not is_off:
            broadcast_tensors(list(self.unwrap(module).buffers()))

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that no backward pass averaged; see `Strategy.average_gradients`."""
        if self.is_connected and self.world_size > 1:
            gradients.average_gradients(parameters)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module."""
        return module.original if isinstance(module, Replica) else module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer.

        Raises:
            ConfigError: Weights are averaged, and the optimizer holds shards, or the precision skips steps by rank.
        """
        self._lw_stepped.pop(id(optimizer), None)
        if self.model_averaging_period is not None:
            if type(optimizer).__name__ in ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"):
                raise ConfigError(
                    f"model_averaging_period={self.model_averaging_period} cannot be used with "
                    f"{type(optimizer).__name__}.",
                    fix="use an optimizer such as SGD or AdamW; the strategy averages the weights.",
                )
            if self.precision.has_scaler:
                raise ConfigError(
                    f"model_averaging_period={self.model_averaging_period} cannot be used with {self.precision!r}: "
                    "ranks could skip different steps and wait for each other.",
                    fix="pass precision='bf16-mixed' or '32-true'.",
                )
        return optimizer

    # -- steps ---------------------------------------------------------------------------------------------------

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return a function that runs `module.<name>` so that the backward pass after it averages gradients.

        Evaluation steps run on the user's module and never communicate, so that ranks may have different numbers of
        batches. The same holds for every other method while gradients are disabled. If the user's "training_step"
        returns None, the function returns `NoLoss`.
        """
        original = self.unwrap(module)
        step = original if name == "forward" else getattr(original, name)
        if name in _EVALUATION:
            return step
        if not isinstance(module, Replica):
            changes = None if self._lw_placed is None else self._lw_placed.get(module)
            return step if changes is None else self._lw_bound_placed(module, changes, step)
        return self._lw_bound_training(module, step) if name == "training_step" else self._lw_bound(module, step)

    def _lw_bound_training(self, replica: Replica, step: StepFunction) -> StepFunction:
        call = ReplicaCall(step, is_training=True)
        replica.__dict__["is_trained_by_step"] = True

        def run(*args: object, **kwargs: object) -> object:
            # One pass in C: nothing is called when requires_grad changes.
            if replica.changes.is_set or [*map(_IS_TRAINED, replica.all_parameters)] != replica.trained:
                self._lw_adopt_changes(replica)
            try:
                loss = replica(call, *args, **kwargs)
            except RuntimeError as error:
                _raise_explained(error, replica)
                raise
            self._lw_forwarded = replica if replica.require_backward_grad_sync else None
            output = replica.steps.output
            if output is None:  # a plain tensor came
                return loss
            replica.steps.output = None
            return NoLoss(loss) if output is NOTHING else _with_loss(output, loss)

        return run

    def _lw_bound_placed(self, module: nn.Module, changes: Changes, step: StepFunction) -> StepFunction:
        def run(*args: object, **kwargs: object) -> object:
            if changes.is_set and torch.is_grad_enabled():
                self._lw_adopt_new(module, changes, [*changes.new_parameters(module)])
            return step(*args, **kwargs)

        return run

    def _lw_bound(self, replica: Replica, step: StepFunction) -> StepFunction:
        call = ReplicaCall(step, is_training=False)

        def run(*args: object, **kwargs: object) -> object:
            if (
                not torch.is_grad_enabled()
            ):  # torch would broadcast buffers even so: a rank with more batches would hang
                return step(*args, **kwargs)
            if replica.changes.is_set or [*map(_IS_TRAINED, replica.all_parameters)] != replica.trained:
                self._lw_adopt_changes(replica)
            if replica.sparse_parameters and replica.require_backward_grad_sync:
                self._lw_forwarded = replica
            try:
                return replica(call, *args, **kwargs)
            except RuntimeError as error:
                _raise_explained(error, replica)
                raise

        return run

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Return a zero loss whose graph contains every parameter, instead of running a training step."""
        if not isinstance(module, Replica):
            return None
        empty: NoLoss = self._lw_bound_training(module, _no_step)()
        return empty

    def note_absence(self, window: str) -> Callable[[], int] | None:
        """Note in the store that this rank had no loss; see `NotesAbsence.note_absence`."""
        return absence.note_absence(window, self.device)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context in which backward passes add to the gradients of this rank only, if enabled.

        Run the forward pass in it as well. The first pass outside averages the accumulated gradients. With a static
        graph, the very first pass also averages, which affects only its cost.
        """
        if enabled and isinstance(module, Replica) and not module.is_recording:
            context: AbstractContextManager[object] = module.no_sync()
            return context
        return nullcontext()

    def backward(self, tensor: Tensor, *args: object, **kwargs: object) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision), and average them.

        Raises:
            ModuleError: A trainable parameter did not get a gradient; the message names it. Or backward runs within a
                step whose gradients are averaged after it.
        """
        replica = self._lw_forwarded
        if replica is None:
            if inside_a_replica():
                raise _backward_inside()
            compute_gradients(tensor, *args, **kwargs)
            return
        self._lw_forwarded = None
        try:
            compute_gradients(tensor, *args, **kwargs)
            # Otherwise torch finds it at the next forward pass, after a step with gradients that are not averaged.
            replica.check_is_reduced()
            if replica.sparse_parameters:
                gradients.average_gradients(replica.sparse_parameters)
        except RuntimeError as error:
            _raise_explained(error, replica)
            raise

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> bool:
        """Step the optimizer; with local SGD, average weights when it is due.

        Raises:
            ModuleError: The optimizer has parameters whose gradients are not averaged.
        """
        if self._lw_stepped.get(id(optimizer)) != [*map(len, map(params_of_group, optimizer.param_groups))]:
            # A loop that calls the module itself, and not its training_step, may average other gradients itself.
            self._lw_check_stepped(optimizer, [one.changes for one in self._lw_replicas if one.is_trained_by_step])
        has_stepped = super().optimizer_step(optimizer, closure)
        if self._lw_averaging is not None:
            self._lw_averaging.after_step(optimizer)
        return has_stepped

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the state of the communication hook for a resume; {} without one.

        Call it on every rank: it communicates. The content is equal on all ranks and fits any number of ranks.
        """
        state: StateDict = {}
        replicas = [] if self.ddp_comm_hook is None else self._lw_replicas.in_use()
        hooks = [one.comm_hook.state_dict() for one in replicas if one.comm_hook is not None]
        if any(hooks):
            state["comm_hooks"] = hooks
        if self._lw_averaging is not None:
            state["averaging"] = self._lw_averaging.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict`, now or when the module is set up."""
        hooks = [one.comm_hook for one in self._lw_replicas if one.comm_hook is not None]
        if not hooks:
            self._lw_pending_state = state_dict
            return
        self._lw_pending_state = None
        for hook, state in zip(hooks, state_dict.get("comm_hooks", ()), strict=False):
            hook.load_state_dict(state)
        if "averaging" in state_dict and self._lw_averaging is not None:
            self._lw_averaging.load_state_dict(state_dict["averaging"])

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the full state of a module, under the names in the user's module."""
        return super().module_state_dict(self.unwrap(module))

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state returned by `module_state_dict`; see `Strategy.load_module_state_dict`."""
        return super().load_module_state_dict(self.unwrap(module), state, strict)

    # -- inside --------------------------------------------------------------------------------------------------

    def _lw_with_stream(self, make: Callable[[], Replica]) -> Replica:
        if self.device.type != "cuda":
            return make()
        # Its own stream keeps the hooks usable when steps are captured as CUDA graphs.
        with torch.cuda.stream(torch.cuda.Stream()):
            return make()

    def _lw_adopt_new(self, module: nn.Module, changes: Changes, names: Sequence[str]) -> bool:
        """Let new parameters and buffers become rank 0's; return whether anything has changed.

        Args:
            module: The user's.
            changes: Of it.
            names: Of the parameters that have changed.
        """
        new = changes.new_tensors(module)
        if names or new:
            what = f"parameters {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "buffers"
            agree_on_changes(what, self.global_rank, self.world_size, self.stall_timeout)
            self.check_module(module)
            broadcast_tensors(new)
        changes.settle(module)
        return bool(names or new)

    def _lw_adopt_changes(self, replica: Replica) -> None:
        """Wrap a changed module again: torch averages the gradients of those parameters only that it was wrapped with.

        On every rank: it communicates. New parameters and buffers become rank 0's.

        Raises:
            ModuleError: The module was not changed on all ranks, or not alike; names what differs.
        """
        module, changes = replica.original, replica.changes
        outdated, present = replica.outdated(), {id(one) for one in module.parameters()}
        names = [*outdated, *(f"one of {tuple(one.shape)}" for one in replica.all_parameters if id(one) not in present)]
        if not self._lw_adopt_new(module, changes, names):
            return
        hook = replica.comm_hook
        replica.rebuild(self.ddp_kwargs)
        if hook is not None:
            hook.register(replica)
        self.configure_ddp()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r}, world_size={self.world_size})"


# -- steps -------------------------------------------------------------------------------------------------------------


def _no_step() -> None:
    return None


def _with_loss(output: StepOutput, loss: Tensor) -> object:
    """Return the user's output with the loss tensor that came through torch's wrapper."""
    return output if loss_tensor(output) is loss else replace_loss(output, loss)


def _backward_inside() -> ModuleError:
    return ModuleError(
        "backward was called within a step that runs under strategy='ddp', whose gradients are averaged by a backward "
        "pass after it.",
        fix="return the loss and call backward on it outside; or set up the module with place_module, and call "
        "average_gradients before each optimizer step.",
    )


_NO_GRADIENT = re.compile(r"which did not receive grad for rank \d+: ([^\n]*)")


def _raise_explained(error: RuntimeError, replica: Replica) -> None:
    """Raise an error with advice and names in place of torch's own; return where there is none."""
    text = str(error)
    if isinstance(error, ModuleError) or not any(
        sign in text for sign in ("finished reduction in the prior iteration", "mark a variable ready only once")
    ):
        return
    if "ready only once" in text:
        raise ModuleError(
            f"A parameter received its gradient twice in one backward pass with strategy='ddp': {text.splitlines()[0]}",
            fix="pass DDPStrategy(static_graph=True) if every step uses the same parameters, and use activation "
            "checkpointing with use_reentrant=False.",
        ) from error
    found = _NO_GRADIENT.search(text)
    names = replica.names_of(found.group(1)) if found else []
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise ModuleError(
        f"The loss does not depend on some parameters of {type(replica.original).__name__}, so other ranks would wait "
        f"for their gradients: {listed or 'torch does not report which'}.",
        fix="use them in every step, freeze them before training (requires_grad=False), or pass "
        "strategy='ddp_find_unused_parameters_true'.",
    ) from error


# -- arguments ---------------------------------------------------------------------------------------------------------


def _wrong_kwargs(kwargs: Mapping[str, object]) -> Clauses:
    known = [name for name in inspect.signature(DistributedDataParallel.__init__).parameters if name != "self"]
    problems = Clauses()
    for name in kwargs:
        if name in _OURS:
            problems.add(f"{name}= {_OURS[name]}", f"remove {name}=")
        elif name not in known:
            own = [one for one in inspect.signature(DDPStrategy).parameters if one not in known]
            allowed = [one for one in known if one not in _OURS]
            problems.add(
                f"{name}= is not an argument of this strategy or of "
                f"DistributedDataParallel{nearest(name, [*own, *allowed])}",
                f"use one of {', '.join(allowed)}",
            )
    return problems


def _with_arguments_of_torch(function: Callable[..., None]) -> inspect.Signature:
    """Return a constructor's signature with the arguments of DistributedDataParallel in place of `**kwargs`."""
    own = inspect.signature(function)
    passed = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in inspect.signature(DistributedDataParallel.__init__).parameters.items()
        if name not in _OURS and name not in own.parameters
    ]
    named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    return own.replace(parameters=[*named, *passed])


# Command lines and notebooks show and check what can be passed on.
DDPStrategy.__init__.__signature__ = _with_arguments_of_torch(DDPStrategy.__init__)  # type: ignore[attr-defined]
