"""`Strategy`: the interface through which Trainer and Fabric distribute a model over devices and processes.

A strategy receives no events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, ChecksKeywords, ConfigError, NonFiniteError
from ..precision.base import Precision, clip_dense_norm, compute_gradients, take_step
from .traits import Given, Launcher, TrainerConfig, Traits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.modules.module import _IncompatibleKeys as LoadedKeys
    from torch.optim import Optimizer

    from ..accelerators import Accelerator
    from ..protocols import CheckpointPlugin, ReduceOp, StateDict, StepFunction, Tree

__all__ = [
    "Given",
    "Launcher",
    "NoLoss",
    "RunWindow",
    "Strategy",
    "Topology",
    "TrainerConfig",
    "plain_name",
    "plain_names",
]

T = TypeVar("T")
_TRAITS = {one.name for one in fields(Traits)}

# torch.compile puts this into the names of a module that it wraps, at any depth. Files have plain names; those of other
# programs may have either.
_COMPILED = "_orig_mod."
_TWO_NAMES = (
    ("reduce", "all_reduce"), ("root_device", "device"), ("precision_plugin", "precision"),
    ("get_module_state_dict", "module_state_dict"), ("get_optimizer_state", "optimizer_state"),
)  # fmt: skip
_LARGE = 1 << 18  # bytes of a tensor whose copy may be worth a delay


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that torch.compile adds."""
    return name.replace(_COMPILED, "")


def plain_names(state: Mapping[str, T]) -> dict[str, T]:
    """Return a module's state under the names that it has without torch.compile.

    Raises:
        CheckpointError: It is something else.
    """
    if not isinstance(state, Mapping) or [name for name in state if not isinstance(name, str)]:
        got = f"a {type(state).__name__}" if not isinstance(state, Mapping) else "other keys than names"
        raise CheckpointError(
            f"Expected the state of a module as a dict of tensors by name, got {got}.",
            fix="pass a checkpoint that a Trainer or Fabric has saved.",
        )
    if isinstance(state, dict) and not [name for name in state if _COMPILED in name]:
        return state  # with the versions of layers that torch attaches to it
    return {plain_name(name): value for name, value in state.items()}


@dataclass(frozen=True)
class Topology:
    """The ranks and sizes of this process and its groups.

    Attributes:
        global_rank: Rank among all processes.
        local_rank: Rank among the processes of this node.
        node_rank: Rank of this node.
        world_size: Number of processes.
        data_rank: Rank among the ranks that read different data.
        data_size: Number of ranks that read different data.
        stage: Index of this process's pipeline stage; 0 without a pipeline.
        reporting_ranks: Global ranks whose losses and samples count, one for each data rank, in order of data ranks.
            None is all ranks.
        logging_ranks: Global ranks whose logged values count, if ranks that read the same data compute on parts of it.
            None is the reporting ranks.
        logging_place: Index of the logging rank that logs for this process.
    """

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    stage: int = 0
    reporting_ranks: tuple[int, ...] | None = None
    logging_ranks: tuple[int, ...] | None = None
    logging_place: int = 0

    @property
    def report_place(self) -> tuple[int, int]:
        """Index of the reporting rank that reports for this process, and the number of reporting ranks."""
        return (self.global_rank, self.world_size) if self.reporting_ranks is None else (self.data_rank, self.data_size)

    @property
    def log_place(self) -> tuple[int, int]:
        """Index of the logging rank that logs for this process, and the number of logging ranks."""
        return self.report_place if self.logging_ranks is None else (self.logging_place, len(self.logging_ranks))

    def reports(self, everywhere: list[T]) -> list[T]:
        """Return the objects of the reporting ranks out of all ranks' objects, so that counts are not duplicated."""
        return everywhere if self.reporting_ranks is None else [everywhere[rank] for rank in self.reporting_ranks]

    def logs(self, everywhere: list[T]) -> list[T]:
        """Return the objects of the logging ranks out of all ranks' objects."""
        ranks = self.logging_ranks
        return self.reports(everywhere) if ranks is None else [everywhere[rank] for rank in ranks]


@dataclass(frozen=True, slots=True)
class NoLoss:
    """The result of a bound `training_step` instead of None, if gradients are reduced over ranks.

    A rank that skips a batch must still take part in the reduction, or the others wait for it forever.

    Attributes:
        zero: A zero of shape () whose graph contains every parameter. Its backward pass takes part in the reduction
            and adds nothing.
    """

    zero: Tensor


# Any in this interface: a batch, and lw.Loss beside a tensor, whose package lies above this one.
RunWindow = Callable[[Sequence[Any], Callable[..., Any], Callable[[Any], Tensor]], Sequence[Any]]
"""The type of `RunsWindows.run_window`."""


class Strategy(ChecksKeywords):
    """The base class of strategies: one process on one device, with a working default for every method.

    A subclass that defines `reduce` also has `all_reduce`, and the reverse. The same holds for `root_device` and
    `device`, `precision_plugin` and `precision`, `get_module_state_dict` and `module_state_dict`, and
    `get_optimizer_state` and `optimizer_state`.

    Args:
        accelerator: The kind of device; None lets Fabric choose.
        checkpoint_io: Reads and writes checkpoints; None lets Fabric choose.
        precision_plugin: The precision; None lets Fabric choose.
        precision: Another name for `precision_plugin`.
    """

    traits: Traits = Traits()
    """Facts about the strategy, with which its callers do as it needs."""
    start_method: str | None = None
    """How processes start: "popen", "spawn", "fork" or "forkserver"; None: there is one process."""
    launcher: Launcher | None = None
    """Starts the processes; None: Fabric chooses a launcher that fits `start_method` and the environment."""
    uneven: str = "stop_all"
    """Policy for ranks with unequal numbers of training batches: "stop_all", "cycle" or "zero_weight"."""
    accumulate_dtype: torch.dtype | None = None
    """Dtype of gradient sums over a window and over ranks; None: the parameters'. Set before `setup_module`."""

    # On the class, so that a subclass whose __init__ does not call ours works.
    _accelerator: Accelerator | None = None
    _checkpoint_io: CheckpointPlugin | None = None
    _lw_precision: Precision | None = None
    _lw_device: torch.device | None = None
    # Choices of Fabric where the user made none; replaced entirely when another Fabric takes the strategy.
    _lw_filled: Mapping[str, Any] = {}

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointPlugin | None = None,
        precision_plugin: Precision | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        if precision is not None and precision_plugin is not None and precision is not precision_plugin:
            raise ConfigError(
                f"Expected either precision or precision_plugin for {type(self).__name__}, got precision={precision!r} "
                f"and precision_plugin={precision_plugin!r}.",
                fix="remove one of the two; they set the same option.",
            )
        self._accelerator = accelerator
        self._checkpoint_io = checkpoint_io
        self._lw_precision = precision if precision is not None else precision_plugin

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for one, other in _TWO_NAMES:
            if one in cls.__dict__ and other not in cls.__dict__:
                setattr(cls, other, cls.__dict__[one])
            elif other in cls.__dict__ and one not in cls.__dict__:
                setattr(cls, one, cls.__dict__[other])
        declared = {name: vars(cls)[name] for name in _TRAITS & vars(cls).keys()}
        if declared:
            _check_traits(cls, [name for name, one in declared.items() if isinstance(one, property)])
            cls.traits = replace(cls.traits, **declared)

    # -- read by anyone ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process; the CPU until another one is set."""
        if self._lw_device is not None:
            return self._lw_device
        device: torch.device = self._lw_filled.get("device", CPU)
        return device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._lw_device = device

    root_device = device

    @property
    def topology(self) -> Topology:
        """The ranks and sizes; the same object until they change."""
        return ALONE

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.topology.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return self.topology.global_rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self.topology.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this node."""
        return self.topology.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.topology.world_size

    @property
    def accelerator(self) -> Accelerator | None:
        """The kind of device; None until Fabric sets it."""
        return self._accelerator if self._accelerator is not None else self._lw_filled.get("accelerator")

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def precision(self) -> Precision:
        """The precision; full precision until another one is set."""
        if self._lw_precision is not None:
            return self._lw_precision
        precision: Precision = self._lw_filled.get("precision", _FULL_PRECISION)
        return precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self._lw_precision = precision

    precision_plugin = precision

    @property
    def checkpoint_io(self) -> CheckpointPlugin | None:
        """The plugin that reads and writes checkpoints; None until Fabric sets it."""
        if self._checkpoint_io is not None:
            return self._checkpoint_io
        if self._lw_filled.get("checkpoint_io") is None and "make_checkpoint_io" in self._lw_filled:
            self._lw_filled = {**self._lw_filled, "checkpoint_io": self._lw_filled["make_checkpoint_io"]()}
        return self._lw_filled.get("checkpoint_io")

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointPlugin | None) -> None:
        self._checkpoint_io = checkpoint_io

    @property
    def given(self) -> Given:
        """The objects that the user passed to the constructor or set on the strategy."""
        return Given(
            accelerator=self._accelerator,
            device=self._lw_device,
            precision=self._lw_precision,
            checkpoint_io=self._checkpoint_io,
        )

    def fill(self, **choices: object) -> None:
        """Set the objects that Fabric chose. Objects that the user passed to the constructor or set take precedence.

        Args:
            choices: accelerator, device, precision, parallel_devices, cluster_environment, and checkpoint_io or
                make_checkpoint_io, a function that creates one when it is needed.
        """
        _check_traits(type(self), _TRAITS & vars(self).keys())
        self._lw_filled = choices

    # -- before the launch; called by Fabric and Trainer ---------------------------------------------------------

    # -- processes; called by Fabric -----------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Make the device current and, with several processes, connect them. Called once in every process."""
        if self.accelerator is not None:
            self.accelerator.setup_device(self.device)

    def teardown(self) -> None:
        """Finish pending saves of the checkpoint IO, and release devices and connections, after a run."""
        checkpoint_io = self._checkpoint_io or self._lw_filled.get("checkpoint_io")  # one that was not used is not made
        if checkpoint_io is not None and hasattr(checkpoint_io, "teardown"):
            checkpoint_io.teardown()
        self.precision.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

    # -- the model; called by Fabric, once -----------------------------------------------------------------------

    @contextmanager
    def init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context that builds a module on its final device.

        Args:
            empty_init: True leaves parameters uninitialized, for a checkpoint that is loaded next; None and False
                initialize them. No random numbers are drawn for uninitialized parameters.
        """
        if not empty_init:
            with self.device:
                yield
            return
        from .skip_init import SkipInit  # not imported where parameters are initialized

        with self.device, SkipInit():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module's parameters and buffers, in place."""
        module.to(self.device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module as the strategy runs it, wrapped or sharded. The module must be on its device."""
        return module

    def place_module(self, module: nn.Module) -> nn.Module:
        """Return the module for runs in which backward passes do not reduce gradients.

        These are evaluation, and manual optimization, where `average_gradients` is called before each step. The module
        must be on its device. A strategy with copies on several ranks makes them equal.
        """
        return self.setup_module(module)

    def sync_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers (such as running statistics) to all ranks, if ranks have copies of the module.

        Args:
            module: The result of `setup_module` or `place_module`.
        """

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of these parameters over ranks, in place, for modules of `place_module`.

        Args:
            parameters: The same parameters in the same order on all ranks. A parameter without a gradient on all ranks
                gets none.
        """

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer as the strategy runs it."""
        return optimizer

    def bind_step(self, module: nn.Module, name: str) -> StepFunction:
        """Return a function that runs `module.<name>` under the strategy's forward hooks.

        Args:
            module: The result of `setup_module`.
            name: Name of a method of the user's module, such as "training_step"; "forward" calls the module itself, so
                that its forward hooks run.
        """
        step: StepFunction = module if name == "forward" else getattr(module, name)
        return step

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module inside the result of `setup_module`."""
        return module

    def without_data(self, module: nn.Module) -> NoLoss | None:
        """Take part in a training step for which this rank has no batch.

        Called instead of the bound `training_step` on ranks without data, if other ranks have data.

        Args:
            module: The result of `setup_module`.

        Returns:
            A zero loss to call backward on; None if nothing is reduced.
        """
        return None

    # -- a run; called by the Trainer, once ------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Prepare a run of a Trainer; does nothing unless it is overridden. Called on every rank.

        The module and its optimizers are set up, and no hook from `on_fit_start` on was called.

        Args:
            trainer: The Trainer, which lies above this package.
        """

    # -- hot path; called by Fabric ------------------------------------------------------------------------------

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[object]:
        """Return a context in which backward passes do not reduce gradients over ranks, if enabled."""
        return nullcontext()

    def backward(self, tensor: Tensor, *args: object, **kwargs: object) -> None:
        """Compute gradients of a loss (shape (), already scaled by the precision)."""
        compute_gradients(tensor, *args, **kwargs)

    def discard_gradients(self, module: nn.Module | None, optimizer: Optimizer | None = None) -> None:
        """Discard gradients of an interrupted window that were not reduced yet.

        Args:
            module: The result of `setup_module`; None for all modules.
            optimizer: Optimizer whose parameters' gradients are discarded, because its `zero_grad` does not reach them;
                None for all parameters.
        """

    def scale_gradients(self, optimizer: Optimizer, factor: Tensor | float) -> None:
        """Multiply the reduced gradients of the optimizer's parameters, in place, before they are clipped."""
        gradients = [one.grad for one in _parameters(optimizer) if one.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scale the gradients of the optimizer's parameters in place so that their total norm is at most `max_norm`.

        Args:
            module: The result of `setup_module`.
            optimizer: The optimizer; its gradients are unscaled.
            max_norm: Maximum total norm, in units of unscaled gradients.
            norm_type: Order of the norm; may be infinity.
            error_if_nonfinite: Whether to read the norm on the host and raise an error if it is infinite or NaN.

        Returns:
            The norm before clipping: shape (), on the gradients' device, equal on all ranks.

        Raises:
            NonFiniteError: The norm is infinite or NaN, with `error_if_nonfinite`.

        Source: Pascanu et al. 2013, eq. 7.
        """
        if not error_if_nonfinite:
            norm = clip_dense_norm(optimizer, float(max_norm), float(norm_type))
            if norm is not None:
                return norm
        if any(one.grad is not None and one.grad.is_sparse for one in _parameters(optimizer)):
            parts = _gradient_values(optimizer)
            norm = nn.utils.get_total_norm(parts, norm_type, error_if_nonfinite)
            torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
            return norm
        try:
            return nn.utils.clip_grad_norm_(
                _parameters(optimizer), max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
            )
        except RuntimeError as error:
            if "non-finite" not in str(error):
                raise
            raise non_finite_norm() from error

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each gradient element of the optimizer's parameters to [-clip_val, clip_val], in place."""
        parts = _gradient_values(optimizer)
        refuse_complex(parts, type(self).__name__)
        if parts:
            torch._foreach_clamp_min_(parts, -clip_val)
            torch._foreach_clamp_max_(parts, clip_val)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step the optimizer; Fabric calls it unless the precision steps, as with loss scaling.

        Returns:
            Whether the step was made.
        """
        if closure is None:
            take_step(optimizer)
        else:
            optimizer.step(closure)
        return True

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tree, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return a tensor (or collection) reduced over ranks, with "mean", "sum", "min" or "max"."""
        return tensor

    reduce = all_reduce

    def reduce_scatter(self, tensor: Any, group: ProcessGroup | str | None = None, reduce_op: ReduceOp = "mean") -> Any:
        """Return this rank's chunk of a reduction over ranks: rank `i` gets chunk `i` of dimension 0.

        Nothing is changed in place, and no gradient flows back. With one rank, the tensor itself is returned.

        Args:
            tensor: A tensor or collection, with the same shapes on all ranks; dimension 0 is a multiple of the number
                of ranks.
            group: Ranks that take part; None for all.
            reduce_op: As in `all_reduce`, also for dtypes.

        Raises:
            ConfigError: The operation is unknown, or dimension 0 does not divide.
        """
        from .distributed.collectives import check_divides, op_name  # not imported where ranks do not communicate
        from .tree import map_leaves

        if isinstance(group, str):  # reduce_scatter(tensor, "sum")
            reduce_op, group = group, None
        op_name(reduce_op)
        size, rank = self.world_size, self.global_rank
        check_divides(tensor, size)
        if size == 1:
            return tensor
        if group is not None:
            raise ConfigError(
                f"{type(self).__name__}.reduce_scatter supports only the group of all ranks.", fix="remove group=."
            )
        reduced = self.all_reduce(tensor, reduce_op=reduce_op)
        return map_leaves(reduced, lambda leaf: leaf.chunk(size)[rank].clone() if isinstance(leaf, Tensor) else leaf)

    def all_gather(self, tensor: Tree, group: ProcessGroup | bool | None = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks stacked along a new first dimension; with one rank, the tensor itself.

        Args:
            tensor: A tensor or collection, with the same shapes on all ranks.
            group: Ranks that take part; None for all.
            sync_grads: Whether gradients flow back through the gather.
        """
        return tensor

    def broadcast(self, obj: T = None, src: int = 0, *, tensor: T = None) -> T:  # type: ignore[assignment]
        """Return rank `src`'s object.

        Args:
            obj: The object.
            src: The rank whose object is returned.
            tensor: Another name for `obj`.
        """
        return obj if tensor is None else tensor

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this method.

        Args:
            name: What is waited for, for readers of the program and of stack traces; it is not compared over ranks.
        """

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor over ranks, in place, while other work continues.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks. Do not use it before the returned function was
                called.

        Returns:
            A function that waits for the sum and returns it, without a host read of the device.
        """
        return lambda: tensor

    def gather_objects(self, obj: T) -> list[T]:
        """Return the objects of all ranks in rank order, on every rank; they may differ in kind and size."""
        return [obj]

    def gather_to_first(self, obj: T) -> list[T] | None:
        """Return the objects of all ranks in rank order, on rank 0; None on the others. On every rank."""
        everywhere = self.gather_objects(obj)
        return everywhere if self.is_global_zero else None

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (or with all=False, any rank) decided True."""
        return bool(decision)

    # -- state; called by checkpoint/ ----------------------------------------------------------------------------

    def gather_state(self, state: T) -> T:
        """Return a state with full tensors on rank 0. On every rank. Without sharded tensors, it does nothing."""
        return state

    def module_state_dict(self, module: nn.Module) -> StateDict:
        """Return the full state of a module, under the names in the user's module.

        Prefixes that torch.compile adds are removed, so that a compiled and a plain module have the same state.
        """
        state: StateDict = module.state_dict()
        return plain_names(state)

    get_module_state_dict = module_state_dict

    def load_module_state_dict(self, module: nn.Module, state: StateDict, strict: bool = True) -> LoadedKeys:
        """Load a state returned by `module_state_dict` into a module, compiled or not.

        Returns:
            The missing and unexpected keys, as torch's `load_state_dict` returns them.

        Raises:
            CheckpointError: Lists all missing and unexpected keys and wrong shapes.
        """
        from .load_weights import load_weights  # not imported where nothing is loaded

        return load_weights(module, state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer, module: nn.Module | None = None) -> StateDict:
        """Return the full state of an optimizer, converted to tensors and plain values by `pack_subclasses`."""
        from .tensor_subclasses import pack_subclasses  # here and below: not imported where no state is taken

        return pack_subclasses(optimizer.state_dict(), optimizer)

    get_optimizer_state = optimizer_state

    def load_optimizer_state(self, optimizer: Optimizer, state: StateDict, module: nn.Module | None = None) -> None:
        """Load a state returned by `optimizer_state`; tensors are moved to their parameters' devices.

        Raises:
            CheckpointError: The parameter groups differ in number or size, or the state belongs to another class.
        """
        from .tensor_subclasses import unpack_subclasses

        own = {key for group in optimizer.param_groups for key in group} & set(getattr(optimizer, "defaults", ()))
        own = {key for key in own if not key.startswith("__")}  # `defaults` made of locals() hold __class__
        state = unpack_subclasses(state, optimizer)
        try:
            optimizer.load_state_dict(state)
        except (KeyError, ValueError) as error:  # KeyError: of another class
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"The checkpoint's state does not match {type(optimizer).__name__}: {what}.",
                fix="configure the optimizer with the class and parameter groups that were saved.",
            ) from error
        # torch replaces entire groups: those of another class lack what this one reads in its step.
        lacking = set().union(*[own - group.keys() for group in optimizer.param_groups])
        if lacking:
            raise CheckpointError(
                f"Expected a state of {type(optimizer).__name__} in the checkpoint, got one without "
                f"{', '.join(sorted(lacking))}.",
                fix="resume with the optimizer class that was saved, or load only the weights.",
            )
        _own_memory(optimizer)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={str(self.device)!r})"


def _own_memory(optimizer: Optimizer) -> None:
    """Copy large tensors of an optimizer's state that torch.load has made, into memory of torch's allocator.

    A save in the background can copy only such memory beside the training (checkpoint/saving/deferred_copy.py).
    """
    copies: dict[int, Tensor] = {}
    for values in optimizer.state.values():
        if not isinstance(values, dict):
            continue
        for key, value in values.items():
            if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
                continue
            storage = value.untyped_storage()
            is_alone = storage.nbytes() == value.numel() * value.element_size()  # no view: others may share it
            if is_alone and storage.nbytes() >= _LARGE and not storage.resizable():
                values[key] = copies.setdefault(id(value), value.clone())


def non_finite_norm() -> NonFiniteError:
    """Return the error for gradients that cannot be clipped."""
    return NonFiniteError(
        "Expected a finite norm of the gradients for clipping, got infinity or NaN.",
        fix="lower the learning rate, check the loss for a division by zero, or pass error_if_nonfinite=False to "
        "continue.",
    )


def _check_traits(cls: type[Strategy], names: Iterable[str]) -> None:
    """Refuse traits that follow from arguments and are not in `traits`, where they would have no effect."""
    if listed := ", ".join(sorted(names)):
        raise ConfigError(
            f"Expected the traits of {cls.__name__} in its attribute traits, got {listed} as separate attributes.",
            fix="set them in the constructor: self.traits = dataclasses.replace(self.traits, ...).",
        )


ALONE = Topology()
CPU = torch.device("cpu")
_FULL_PRECISION = Precision()


def refuse_complex(gradients: Sequence[Tensor], strategy: str) -> None:
    """Refuse complex gradients, which have no order.

    Raises:
        ConfigError: There are some; lists their shapes.
    """
    shapes = [f"{one.dtype} {tuple(one.shape)}" for one in gradients if one.is_complex()]
    if shapes:
        raise ConfigError(
            f"Expected real gradients for clipping by value with {strategy}, got {', '.join(shapes[:5])}.",
            fix="clip by norm: gradient_clip_algorithm='norm' in the Trainer, or max_norm= in Fabric.",
        )


def _gradient_values(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients; of sparse ones, which are coalesced, the values. They share memory with them."""
    parts = []
    for one in _parameters(optimizer):
        if one.grad is not None and one.grad.is_sparse:
            one.grad = one.grad.coalesce()
            parts.append(one.grad.values())
        elif one.grad is not None:
            parts.append(one.grad)
    return parts


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
