"""A module inside a DeepSpeed engine, and the gradients that the engine holds. Made by DeepSpeedStrategy.

The engine does the backward pass, the reduction and the step. Accumulation is ours: at every backward pass the engine
is told whether it ends a window. Gradients are scaled and clipped in the engine's own buffers, between the last
backward pass of a window and the step; the engine's own clipping is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .base import non_finite_norm
from .deepspeed_ops import quietly
from .replica import NOTHING, Call, loss_tensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["EngineOptimizer", "EngineRoot", "start"]

# Any in this file: deepspeed has no types, and what the user's steps take and return.


class EngineRoot(nn.Module):
    """What runs a module; the engine around it comes with the optimizer.

    Its forward runs the `Call` that was left for it, so that any step of the module runs under the engine's hooks, and
    batches of any structure pass them by.

    Attributes:
        module: The user's module.
        engine: The DeepSpeedEngine; None before there is an optimizer.
        stage: The ZeRO stage.
        output: What a step returned beside its loss tensor; None where that was all.
        ends_window: Whether the next backward pass is the last before a step.
        has_gradients: Whether a backward pass was made since the last step.
        grad_norm: Norm of the gradients of the last step, before clipping; None where nobody computed it.
        loaded: A state that was loaded before there was an engine, for its masters.
    """

    module: nn.Module
    engine: Any
    stage: int
    output: Any
    ends_window: bool
    has_gradients: bool
    grad_norm: Any
    loaded: dict[str, Any] | None

    def __init__(self, module: nn.Module, stage: int) -> None:
        super().__init__()
        self.module = module
        # Beside nn.Module's own registration: the engine has this module as its submodule.
        self.__dict__.update(
            engine=None, stage=stage, output=None, ends_window=True, has_gradients=False, grad_norm=None, loaded=None
        )
        self.__dict__.update(_work=None, _clipped_norm=None)

    def forward(self) -> Any:
        """Run the call that was left, and return what a backward pass may begin at."""
        call, args, kwargs = self.__dict__["_work"]
        output = call.step(*args, **kwargs)
        if not call.is_training or output.__class__ is Tensor:
            return output
        self.__dict__["output"] = NOTHING if output is None else output
        return loss_tensor(output)

    def run(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a step under the engine's hooks and return what it returned."""
        own = self.__dict__
        own["_work"] = (call, args, kwargs)
        try:
            engine = own["engine"]
            if engine is None:
                output = self()
            else:
                output = engine()
            extra, own["output"] = own["output"], None
        finally:
            own["_work"] = None
        if extra is None:
            return output
        return None if extra is NOTHING else extra

    # -- gradients -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients and let the engine reduce them, at the end of a window."""
        engine = self.engine
        engine.set_gradient_accumulation_boundary(self.ends_window)
        self.__dict__["has_gradients"] = True
        engine.backward(loss, scale_wrt_gas=False, **kwargs)

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
        if self.swaps_gradients:
            # The engine divides by the loss scale when it reads them.
            _override_scale(self.zero, 1.0 / float(factor))
            return
        parts = self.parts()
        if parts:
            torch._foreach_mul_(parts, factor if isinstance(factor, float) else factor.to(parts[0].device))

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the reduced gradients so that their total norm is at most `max_norm`; return the norm before."""
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
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        own["has_gradients"] = False
        if self.stage == 3 and engine.optimizer.swap_optimizer:
            _override_scale(engine.optimizer, None)
            engine.optimizer.clip_grad = 0.0
        clipped, own["_clipped_norm"] = own["_clipped_norm"], None
        own["grad_norm"] = engine.get_global_grad_norm() if clipped is None else clipped
        return bool(engine.was_step_applied())

    def drop_gradients(self) -> None:
        """Forget gradients that wait for a step that will not come."""
        own = self.__dict__
        if not own["has_gradients"]:
            return
        own["has_gradients"], own["_clipped_norm"] = False, None
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
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = None
            zero.all_grad_tensors[number] = None


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
        self.root.drop_gradients()

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


def start(
    deepspeed: Any, root: EngineRoot, optimizer: Optimizer | None, config: dict[str, Any]
) -> EngineOptimizer | None:
    """Put an engine around a module and its optimizer. On every rank: it communicates."""
    groups = [] if optimizer is None else [list(group["params"]) for group in optimizer.param_groups]
    with quietly():
        engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=config, dist_init_required=False)
    root.__dict__["engine"] = engine
    zero = root.zero
    if zero is not None and getattr(zero, "cpu_offload", False):
        # With 1 it would not add up micro-batches; windows are ours, and may be longer.
        zero.gradient_accumulation_steps = max(2, zero.gradient_accumulation_steps)
    if zero is None and optimizer is not None and hasattr(engine.optimizer, "fp32_groups"):
        # Its 16-bit optimizer of stage 0 makes a step without gradients, to have state: Adam's count is 1 then.
        optimizer.state.clear()
    return None if optimizer is None else EngineOptimizer(optimizer, root, groups)


def _override_scale(zero: Any, scale: float | None) -> None:
    zero.custom_loss_scaler = scale is not None
    zero.external_loss_scale = scale


def _over_ranks(norm: Tensor, norm_type: float) -> Tensor:
    """Return the norm of the parts of all ranks."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return norm
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm
    total = norm**norm_type
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)
