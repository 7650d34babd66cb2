"""A module inside a DeepSpeed engine, and the gradients that the engine holds.

The engine does the backward pass, the reduction and the step. Accumulation is ours: at every backward pass the engine
is told whether it ends a window; where nobody knows, in manual optimization, the step ends it. Gradients are scaled and
clipped in the engine's own buffers, between the last backward pass of a window and the step; the engine's own clipping
is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...precision.base import DefaultDtype
from ..base import non_finite_norm
from ..ddp.replica import NOTHING, Call, loss_tensor
from ..distributed.clipping import largest_over_ranks
from .evaluation import Event, gathering_in_steps, modules_noted, repeat
from .ops import quietly

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["EngineOptimizer", "EngineRoot", "link_in_order", "match_statistics", "start"]

# Any in this file: deepspeed has no types, and what the user's steps take and return.

# Of a user's module: the root that it was set up with last. Other objects than the strategy may set it up next.
_ENGINE = "_deepspeed_root"


_BLOCK_BYTES = 4096  # of disks; some have 512


class EngineRoot(nn.Module):
    """What runs a module; the engine around it comes with the optimizer.

    Its forward runs the `Call` that was left for it, so that any step of the module runs under the engine's hooks, and
    batches of any structure pass them by.

    Attributes:
        module: The user's module.
        engine: The DeepSpeedEngine; None before there is an optimizer.
        stage: The ZeRO stage.
        output: What a step returned beside its loss tensor; None where that was all.
        is_stepped_by_hand: Whether the user's step makes backward passes and optimizer steps itself.
        ends_window: Whether the next backward pass is the last before a step.
        is_window_open: Whether the last backward pass did not end its window, so that a step has to.
        has_gradients: Whether a backward pass was made since the last step.
        grad_norm: Norm of the gradients of the last step, before clipping; None where nobody computed it.
        loaded: A state that was loaded before there was an engine, for its masters.
        first: This rank's parts of float32 values of parameters that were cast before there was an engine, likewise.
        evaluated: What the last evaluation step has gathered; None before the first. In stage 3 with several ranks.
    """

    is_pipeline = False
    module: nn.Module
    engine: Any
    stage: int
    output: Any
    is_stepped_by_hand: bool
    ends_window: bool
    is_window_open: bool
    has_gradients: bool
    grad_norm: Tensor | None
    loaded: dict[str, Any] | None
    first: dict[str, Tensor]
    evaluated: list[Event] | None

    def __init__(self, module: nn.Module, stage: int, *, is_stepped_by_hand: bool = False) -> None:
        super().__init__()
        self.module = module
        # Beside nn.Module's own registration: the engine has this module as its submodule.
        self.__dict__.update(
            engine=None, stage=stage, output=None, ends_window=True, has_gradients=False, grad_norm=None, loaded=None
        )
        self.__dict__.update(is_stepped_by_hand=is_stepped_by_hand, is_window_open=False, evaluated=None)
        self.__dict__.update(_work=None, _clipped_norm=None, first={})

    def forward(self) -> Any:
        """Run the call that was left, and return what a backward pass may begin at."""
        call, args, kwargs = self.__dict__["_work"]
        output = call.step(*args, **kwargs)
        if self.is_stepped_by_hand or not torch.is_grad_enabled():
            # No backward pass begins at it, and the engine's hooks take no outputs of any kind.
            self.__dict__["output"] = NOTHING if output is None else output
            return None
        if not call.is_training or output.__class__ is Tensor:
            return output
        self.__dict__["output"] = NOTHING if output is None else output
        return loss_tensor(output)

    def run(
        self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], events: list[Event] | None = None
    ) -> Any:
        """Run a step under the engine's hooks and return what it returned.

        What it gathers by itself in stage 3 is added to `events`.
        """
        own = self.__dict__
        own["_work"] = (call, args, kwargs)
        try:
            engine = own["engine"]
            if engine is None:
                output = self()
            elif own["stage"] < 3:
                output = engine()
            else:
                with gathering_in_steps(engine, events):
                    output = engine()
            extra, own["output"] = own["output"], None
        finally:
            own["_work"] = None
        if extra is None:
            return output
        return None if extra is NOTHING else extra

    def take_over(self) -> None:
        """Let the engine that the module may have from an earlier run go: its hooks would run beside the next one's.

        On every rank: what is on its way arrives.
        """
        own = vars(self.module)
        before: EngineRoot | None = own.get(_ENGINE)
        if before is not None and before.engine is not None:
            if before.stage == 3:
                before.engine.optimizer.empty_partition_cache()
            before.engine.destroy()
        own[_ENGINE] = self

    # -- evaluation in stage 3 -----------------------------------------------------------------------------------

    def evaluate(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an evaluation step, and remember what it gathered."""
        with modules_noted(self) as events:
            output = self.run(call, args, kwargs, events)
        self.__dict__["evaluated"] = events
        return output

    def evaluate_without_data(self) -> None:
        """Take part in another rank's evaluation step: gather what this rank's last one has gathered."""
        with torch.no_grad():
            self.run(Call(lambda: repeat(self.evaluated or (), self.engine), is_training=False), (), {})

    # -- gradients -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients; the engine reduces them now, or in some stages at the end of the window."""
        own, engine = self.__dict__, self.engine
        by_hand = own["is_stepped_by_hand"]
        if kwargs and self.stage == 3:
            raise ConfigError(
                "backward was given retain_graph in ZeRO stage 3, where a pass gives back the parameters that a second "
                "pass over the same graph needs.",
                fix="add the losses and call backward once, run the forward pass again, or use stage 2.",
            )
        ends_window = own["ends_window"] and not by_hand
        engine.set_gradient_accumulation_boundary(ends_window)
        own["has_gradients"], own["is_window_open"] = True, not ends_window
        if not by_hand:
            # Another tensor than the step returned: on that one the engine (0.19) has a hook that divides by its own
            # number of micro-batches, which in stage 0 runs before the one that is to prevent it.
            engine.backward(loss.view_as(loss), scale_wrt_gas=False, **kwargs)
            return
        # We are inside the engine's forward pass. Otherwise that one counts backward passes, and what it returns begins
        # them.
        if self.stage:
            engine.optimizer.clear_backward_seen_flag()
        with self.outside_of_step():
            handle = loss.register_hook(lambda _: engine._backward_prologue())
            engine.backward(loss, scale_wrt_gas=False, **kwargs)
            handle.remove()

    def outside_of_step(self) -> AbstractContextManager[Any]:
        """Return a context without the precision of a step, for what a step does by hand beside its forward pass."""
        stack = ExitStack()
        if self.is_stepped_by_hand:
            stack.enter_context(torch.autocast(self.engine.device.type, enabled=False))
            stack.enter_context(DefaultDtype(torch.float32))
        return stack

    def finish_window(self) -> None:
        """Let the engine do with its gradients what the last backward pass of a window does, if none has done so."""
        own, engine = self.__dict__, self.engine
        if not own["is_window_open"]:
            return
        own["is_window_open"] = False
        engine.set_gradient_accumulation_boundary(True)
        if self.stage >= 2:
            self.zero.finalize_gradient_accumulation_boundary()
        elif self.stage == 1:
            # Its `reduce_gradients` leaves to the backward pass what overlaps with it.
            engine._flush_coalesced_reduction_zero12(self.zero)
        else:
            engine.allreduce_gradients()

    @contextmanager
    def within_window(self) -> Iterator[None]:
        """Return a context in which backward passes do not end a window."""
        own = self.__dict__
        before, own["ends_window"] = own["ends_window"], False
        try:
            yield
        finally:
            own["ends_window"] = before

    @property
    def has_optimizer(self) -> bool:
        """Whether the engine has one: for evaluation in stage 3 it is made without."""
        return self.engine is not None and self.engine.basic_optimizer is not None

    @property
    def zero(self) -> Any:
        """The ZeRO optimizer; None in stage 0."""
        return self.engine.optimizer if self.stage else None

    @property
    def loss_scale(self) -> float:
        """What the engine multiplied losses with."""
        scale = getattr(self.engine.optimizer, "loss_scale", None)
        if scale is None:
            scale = getattr(self.engine.optimizer, "cur_scale", 1.0)
        return float(cast(float, scale))

    def parts(self) -> list[Tensor]:
        """Return this rank's parts of the reduced gradients, times the loss scale, as the engine holds them.

        In stage 0 all ranks have all of them; in the others no element is on two ranks, but for padding of zeros.
        """
        zero = self.zero
        if zero is None:
            return [one.grad for one in self.module.parameters() if one.grad is not None]
        if self.stage == 3:
            if zero.offload_optimizer:
                return [one.grad for one in zero.fp32_partitioned_groups_flat if one.grad is not None]
            groups = list(zero.averaged_gradients.values())
        elif zero.cpu_offload:
            zero._wait_for_offload_copies()
            return [one.grad for one in zero.single_partition_of_fp32_groups if one.grad is not None]
        else:
            groups = list(zero.averaged_gradients.values())
        return [part for group in groups if group is not None for part in group if part is not None]

    @property
    def swaps_gradients(self) -> bool:
        """Whether gradients lie on a disk, where only the engine reaches them."""
        return bool(self.stage == 3 and self.engine.optimizer.swap_optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the reduced gradients."""
        self.finish_window()
        if self.swaps_gradients:
            # The engine divides by the loss scale when it reads them.
            _override_scale(self.zero, 1.0 / float(factor))
            return
        parts = self.parts()
        if parts:
            torch._foreach_mul_(parts, factor if isinstance(factor, float) else factor.to(parts[0].device))

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the reduced gradients so that their total norm is at most `max_norm`; return the norm before."""
        self.finish_window()
        if self.swaps_gradients:
            return self._clip_in_engine(max_norm, norm_type)
        parts = self.parts()
        device = next(iter(parts)).device if parts else torch.device("cpu")
        norms = [torch.linalg.vector_norm(part, norm_type, dtype=torch.float32) for part in parts]
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
        norm = (own if not self.stage else _over_ranks(own, norm_type)) / self.loss_scale
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise non_finite_norm()
        if parts:
            # As torch.nn.utils.clip_grad_norm_ does, without reading the norm on the host.
            torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self.__dict__["_clipped_norm"] = norm
        return norm

    def _clip_in_engine(self, max_norm: float, norm_type: float) -> Tensor:
        if norm_type != 2.0:
            raise ConfigError(
                f"gradients on a disk can be clipped by their 2-norm only, and norm_type={norm_type!r}.",
                fix="use norm_type=2.0, or offload the optimizer to the CPU.",
            )
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zero = self.zero
        zero.clip_grad = float(max_norm)
        norm = torch.as_tensor(combine_grad_norm_groups(zero._get_norm_groups())).detach().clone() / self.loss_scale
        self.__dict__["_clipped_norm"] = norm
        return norm

    def clip_value(self, limit: float) -> None:
        """Clamp each element of the reduced gradients."""
        self.finish_window()
        if self.swaps_gradients:
            raise ConfigError(
                "gradients on a disk cannot be clipped by value.",
                fix="clip by norm (gradient_clip_algorithm='norm'), or offload the optimizer to the CPU.",
            )
        limit = limit * self.loss_scale
        for part in self.parts():
            part.clamp_(-limit, limit)

    def step(self) -> bool:
        """Let the engine step and forget the gradients; return whether it did."""
        engine, own = self.engine, self.__dict__
        self.finish_window()
        engine.set_gradient_accumulation_boundary(True)
        if not own["is_stepped_by_hand"]:
            engine.step()
        else:
            if self.stage == 3:
                # What the forward pass has left whole would keep its values from before the step.
                engine.optimizer.empty_partition_cache()
            with self.outside_of_step():
                engine.step()
        own["has_gradients"] = False
        if self.stage == 3 and engine.optimizer.swap_optimizer:
            _override_scale(engine.optimizer, None)
            engine.optimizer.clip_grad = 0.0
        clipped, own["_clipped_norm"] = own["_clipped_norm"], None
        norm = engine.get_global_grad_norm() if clipped is None else clipped
        # After an overflow the engine says it with a number of the host.
        own["grad_norm"] = (
            norm if norm is None or isinstance(norm, Tensor) else torch.tensor(norm, device=engine.device)
        )
        return bool(engine.was_step_applied())

    def discard_gradients(self) -> None:
        """Forget gradients that wait for a step that will not come."""
        own = self.__dict__
        if not own["has_gradients"]:
            return
        own["has_gradients"], own["is_window_open"], own["_clipped_norm"] = False, False, None
        zero = self.zero
        if zero is None:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            if zero.offload_optimizer:
                zero.reset_cpu_buffers()
            else:
                zero.averaged_gradients = {}
            return
        # What the engine itself does after an overflow.
        zero.micro_step_id = -1
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):  # in the first window one may be empty
            for number in gradients:
                gradients[number] = None


class EngineOptimizer:
    """The optimizer of an engine: the user's own, whose parameters are the engine's flat ones now.

    `step` and `zero_grad` are the engine's; all else is the user's optimizer's, of which schedules read and set rates.

    Args:
        optimizer: The user's.
        root: Has the engine.
    """

    def __init__(self, optimizer: Optimizer, root: EngineRoot, groups: list[list[nn.Parameter]]) -> None:
        self.__dict__.update(optimizer=optimizer, root=root, groups=groups)

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() asks this one
    def __class__(self) -> Any:
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "root", "groups"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the engine step."""
        loss = closure() if closure is not None else None
        self.root.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were accumulated and not stepped with."""
        self.root.discard_gradients()

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


def start(
    deepspeed: Any, root: EngineRoot, optimizer: Optimizer | None, config: dict[str, Any]
) -> EngineOptimizer | None:
    """Put an engine around a module and its optimizer. On every rank: it communicates."""
    groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    # DeepSpeed saves the configuration, and so says to checkpoint/deepspeed/folder.py what names begin with.
    config = {**config, "loopwright": {"prefix": "module."}}
    with quietly():
        engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    root.__dict__["engine"] = engine
    match_statistics(root.module)
    zero = root.zero
    link_in_order(zero)
    offload = getattr(zero, "parameter_offload", None)
    if offload is not None:
        # DeepSpeed (0.19) may read a parameter ahead that is used twice in what comes, and fails at the second time.
        offload.get_param_coordinator()._PartitionedParameterCoordinator__prefetch_nvme = False
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is not None:
        swapper.swap_out_gradients = _aligned_only(swapper.swap_out_gradients)
    if zero is not None and getattr(zero, "cpu_offload", False):
        # With 1 it would not add up micro-batches; windows are ours, and may be longer.
        zero.gradient_accumulation_steps = max(2, zero.gradient_accumulation_steps)
    if zero is None and optimizer is not None and hasattr(engine.optimizer, "fp32_groups"):
        # Its 16-bit optimizer of stage 0 makes a step without gradients, to have state: Adam's count is 1 then.
        optimizer.state.clear()
    return None if optimizer is None else EngineOptimizer(optimizer, root, groups)


def match_statistics(module: nn.Module) -> None:
    """Give the running statistics of norms the dtype of their weights; torch computes with one dtype of both.

    DeepSpeed (0.19) casts parameters to 16 bits, and leaves buffers as they are.
    """
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        for name in ("running_mean", "running_var"):
            value = getattr(layer, name, None)
            if isinstance(weight, Tensor) and isinstance(value, Tensor):
                setattr(layer, name, value.to(weight.dtype))


def link_in_order(zero: Any) -> None:
    """Let parameters know where their masters are, if "round_robin_gradients" has dealt them out in another order.

    DeepSpeed (0.19) takes the order of the optimizer's groups, unless there is padding between parameters: then it asks
    where each one is, which is right in both cases.
    """
    if not getattr(zero, "round_robin_gradients", False):
        return
    padding, zero.round_robin_bit16_padding = zero.round_robin_bit16_padding, [[1]] * len(zero.bit16_groups)
    zero._link_all_hp_params()
    zero.round_robin_bit16_padding = padding
    zero._hp_optimizer_states_linked = False


def _aligned_only(swap_out: Callable[..., None]) -> Callable[..., None]:
    """Return what puts gradients on a disk, and keeps in memory those that could not be read back.

    DeepSpeed (0.19) reads a gradient straight to its place in a flat buffer. Where that does not begin at a block of
    the disk, direct access fails, which nobody looks at: the step is made with what was in the buffer.
    """

    def swap_out_gradients(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[Any]) -> None:
        for offset, tensor in zip(gradient_offsets, gradient_tensors, strict=True):
            tensor.swappable = offset * tensor.element_size() % _BLOCK_BYTES == 0
        swap_out(parameter=parameter, gradient_offsets=gradient_offsets, gradient_tensors=gradient_tensors)

    return swap_out_gradients


def _override_scale(zero: Any, scale: float | None) -> None:
    zero.custom_loss_scaler = scale is not None
    zero.external_loss_scale = scale


def _over_ranks(norm: Tensor, norm_type: float) -> Tensor:
    """Return the norm of the parts of all ranks."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return norm
    if norm_type == float("inf"):
        return largest_over_ranks(norm)
    total = norm**norm_type
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)
