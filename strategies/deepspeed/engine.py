"""A module inside a DeepSpeed engine, and the gradients that the engine holds.

The engine does the backward pass, the reduction and the step. Accumulation is ours: every backward pass tells the
engine whether it ends a window; in manual optimization the step ends it. Gradients are scaled and clipped in the
engine's buffers, between the last backward pass of a window and the step; the engine's own clipping is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ConfigError
from ...precision.base import DefaultDtype
from ...protocols import StepOutput
from ..base import non_finite_norm
from ..ddp.replica import NOTHING, ReplicaCall, loss_tensor
from ..distributed.changes import Changes
from ..distributed.clipping import largest_over_ranks
from .gathering import Event, gathering_in_steps, modules_noted, repeat

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .engine_types import Engine, State, Zero

# Attribute of a user's module: the root that it was set up with last, perhaps by another strategy object.
_ROOT = "_deepspeed_root"


class EngineRoot(nn.Module):
    """A module as its engine runs it; the engine is made with the optimizer.

    Its forward runs a `ReplicaCall`, so that any step of the module runs under the engine's hooks, and batches of any
    structure bypass them.

    Attributes:
        module: The user's module.
        changes: Notes what is added to it.
        stage: ZeRO stage.
        output: What a step returned beside its loss tensor; None if nothing.
        is_manual: Whether the user's step makes backward passes and optimizer steps itself.
        ends_window: Whether the next backward pass is the last before a step.
        is_window_open: Whether the last backward pass did not end its window, so that a step has to.
        has_gradients: Whether a backward pass was made since the last step.
        grad_norm: Norm of the last step's gradients before clipping; None if it was not computed.
        loaded: A state that was loaded before there was an engine, for its masters.
        first: Local shards of the float32 values of parameters that were cast before there was an engine.
        evaluated: What the last evaluation step has gathered; None before the first. Stage 3 on several ranks.
    """

    module: nn.Module
    changes: Changes
    engine: Engine  # None before start; see has_engine
    stage: int
    output: StepOutput
    is_manual: bool
    ends_window: bool
    is_window_open: bool
    has_gradients: bool
    grad_norm: Tensor | None
    loaded: State | None
    first: dict[str, Tensor]
    evaluated: list[Event] | None

    def __init__(self, module: nn.Module, stage: int, *, is_manual: bool = False) -> None:
        super().__init__()
        self.module = module
        # Not through nn.Module: the engine has this module as its submodule.
        self.__dict__.update(
            engine=None, changes=Changes(module), stage=stage, output=None,
            is_manual=is_manual, ends_window=True, is_window_open=False,
            has_gradients=False, grad_norm=None, loaded=None, first={}, evaluated=None, _work=None, _clipped_norm=None,
        )  # fmt: skip

    def forward(self, *batch: object, **options: object) -> StepOutput:
        """Run the current call, and return what a backward pass may begin at; with arguments, run the user's module."""
        if batch or options:
            output: StepOutput = self.module(*batch, **options)
            return output
        call, args, kwargs = self.__dict__["_work"]
        output = call.step(*args, **kwargs)
        is_manual = self.is_manual or not torch.is_grad_enabled()
        if not is_manual and (not call.is_training or output.__class__ is Tensor):
            return output
        self.__dict__["output"] = NOTHING if output is None else output
        # The engine's hooks do not take outputs of every kind.
        return None if is_manual else loss_tensor(output)

    def run(
        self,
        call: ReplicaCall,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        events: list[Event] | None = None,
    ) -> StepOutput:
        """Run a step under the engine's hooks and return its output.

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
        """Destroy the engine of an earlier run of the module, whose hooks would run beside the next one's.

        On every rank: parameters under way arrive.
        """
        before = vars(self.module).get(_ROOT)
        if isinstance(before, EngineRoot) and before.has_engine:
            before.settle()
            before.engine.destroy()
        vars(self.module)[_ROOT] = self

    def settle(self) -> None:
        """Let no parameter be on its way to a use, as the last evaluation step may have left some. On every rank."""
        if self.stage == 3 and self.has_engine:
            self.engine.optimizer.empty_partition_cache()

    # -- evaluation in stage 3 -----------------------------------------------------------------------------------

    def evaluate(self, call: ReplicaCall, args: tuple[object, ...], kwargs: Mapping[str, object]) -> StepOutput:
        """Run an evaluation step, and remember what it gathered."""
        with modules_noted(self) as events:
            output = self.run(call, args, kwargs, events)
        self.__dict__["evaluated"] = events
        return output

    def evaluate_without_data(self) -> None:
        """Take part in another rank's evaluation step: gather what this rank's last one has gathered."""
        with torch.no_grad():
            self.run(ReplicaCall(lambda: repeat(self.evaluated or (), self.engine), is_training=False), (), {})

    # -- gradients -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Compute gradients; the engine reduces them now, or in some stages at the end of the window."""
        own, engine = self.__dict__, self.engine
        is_manual = own["is_manual"]
        if retain_graph and self.stage == 3:
            raise ConfigError(
                "Expected backward without retain_graph in ZeRO stage 3, which frees gathered parameters after each "
                "backward pass.",
                fix="add the losses and call backward once, run the forward pass again, or use stage 2.",
            )
        ends_window = own["ends_window"] and not is_manual
        engine.set_gradient_accumulation_boundary(ends_window)
        own["has_gradients"], own["is_window_open"] = True, not ends_window
        if not is_manual:
            # Another tensor than the step returned: on that one the engine (0.19) has a hook that divides by its own
            # number of micro-batches, which in stage 0 runs before the one that is to prevent it.
            engine.backward(loss.view_as(loss), scale_wrt_gas=False, retain_graph=retain_graph)
            return
        # Inside the engine's forward pass, which would count backward passes and begin them at its own output.
        if self.stage:
            engine.optimizer.clear_backward_seen_flag()
        with self.outside_of_step():
            handle = loss.register_hook(lambda _: engine._backward_prologue())
            engine.backward(loss, scale_wrt_gas=False, retain_graph=retain_graph)
            handle.remove()

    def outside_of_step(self) -> AbstractContextManager[object]:
        """Return a context without the precision of a step, for backward passes and steps inside a manual step."""
        stack = ExitStack()
        if self.is_manual:
            stack.enter_context(torch.autocast(self.engine.device.type, enabled=False))
            stack.enter_context(DefaultDtype(torch.float32))
        return stack

    def finish_window(self) -> None:
        """Reduce gradients as the last backward pass of a window does, unless it has done so."""
        own, engine = self.__dict__, self.engine
        if not own["is_window_open"]:
            return
        own["is_window_open"] = False
        engine.set_gradient_accumulation_boundary(True)
        if self.stage >= 2:
            self.zero.finalize_gradient_accumulation_boundary()
        elif self.stage == 1:
            # `engine.reduce_gradients` leaves to the backward pass what overlaps with it.
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
    def has_engine(self) -> bool:
        """Whether the engine is made."""
        return self.__dict__["engine"] is not None

    @property
    def has_optimizer(self) -> bool:
        """Whether the engine has an optimizer: evaluation in stage 3 needs an engine without."""
        return self.has_engine and self.engine.basic_optimizer is not None

    @property
    def zero(self) -> Zero:
        """The ZeRO optimizer, in stages 1 to 3."""
        return self.engine.optimizer

    @property
    def loss_scale(self) -> float:
        """The factor by which the engine multiplied losses."""
        scale = getattr(self.engine.optimizer, "loss_scale", None)
        return float(getattr(self.engine.optimizer, "cur_scale", 1.0) if scale is None else scale)

    def gradient_shards(self) -> list[Tensor]:
        """Return this rank's shards of the reduced gradients, times the loss scale, as the engine holds them.

        In stage 0 all ranks have all of them; else every element is on one rank, except for padding of zeros.
        """
        if not self.stage:
            return _gradients(self.module.parameters())
        zero = self.zero
        if self.stage == 3 and zero.offload_optimizer:
            return _gradients(zero.fp32_partitioned_groups_flat)
        if self.stage < 3 and zero.cpu_offload:
            zero._wait_for_offload_copies()
            return _gradients(zero.single_partition_of_fp32_groups)
        return [one for group in zero.averaged_gradients.values() for one in group or () if one is not None]

    @property
    def swaps_gradients(self) -> bool:
        """Whether gradients are on a disk, where only the engine can reach them."""
        return bool(self.stage == 3 and self.zero.swap_optimizer)

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiply the reduced gradients."""
        self.finish_window()
        if self.swaps_gradients:  # the engine divides by the loss scale when it reads them
            self.zero.custom_loss_scaler, self.zero.external_loss_scale = True, 1.0 / float(factor)
            return
        shards = self.gradient_shards()
        if shards:
            torch._foreach_mul_(shards, factor if isinstance(factor, float) else factor.to(shards[0].device))

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the reduced gradients so that their total norm is at most `max_norm`; return the norm before."""
        self.finish_window()
        if self.swaps_gradients:
            norm = self._clip_in_engine(max_norm, norm_type)
        else:
            norm = self._norm(norm_type) / self.loss_scale
            if error_if_nonfinite and not bool(norm.isfinite()):
                raise non_finite_norm()
            shards = self.gradient_shards()
            if shards:
                # As in torch.nn.utils.clip_grad_norm_, without reading the norm on the host.
                torch._foreach_mul_(shards, torch.clamp(max_norm / (norm.to(shards[0].device) + 1e-6), max=1.0))
        self.__dict__["_clipped_norm"] = norm
        return norm

    def _norm(self, norm_type: float) -> Tensor:
        """Return the norm of all ranks' gradients, times the loss scale."""
        shards = self.gradient_shards()
        device = shards[0].device if shards else torch.device("cpu")
        norm = _norm_of(shards, norm_type, device)
        return _norm_over_ranks(norm, norm_type) if self.stage else norm

    def _clip_in_engine(self, max_norm: float, norm_type: float) -> Tensor:
        if norm_type != 2.0:
            raise ConfigError(
                f"Expected norm_type=2.0 for gradients offloaded to disk, got {norm_type!r}.",
                fix="use norm_type=2.0, or offload the optimizer to the CPU.",
            )
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self.zero.clip_grad = float(max_norm)
        norm = torch.as_tensor(combine_grad_norm_groups(self.zero._get_norm_groups()))
        return norm.detach().clone() / self.loss_scale

    def clip_value(self, limit: float) -> None:
        """Clamp each element of the reduced gradients."""
        self.finish_window()
        if self.swaps_gradients:
            raise ConfigError(
                "Expected clipping by norm for gradients offloaded to disk, got clipping by value.",
                fix="clip by norm (gradient_clip_algorithm='norm'), or offload the optimizer to the CPU.",
            )
        limit = limit * self.loss_scale
        for shard in self.gradient_shards():
            shard.clamp_(-limit, limit)

    def step(self) -> bool:
        """Let the engine step and discard the gradients; return whether it stepped."""
        own = self.__dict__
        self.finish_window()
        self.engine.set_gradient_accumulation_boundary(True)
        if self.is_manual:
            self.settle()  # full parameters of the forward pass would keep their values from before the step
        with self.outside_of_step():
            self.engine.step()
        own["has_gradients"] = False
        if self.swaps_gradients:
            self.zero.custom_loss_scaler, self.zero.external_loss_scale, self.zero.clip_grad = False, None, 0.0
        clipped, own["_clipped_norm"] = own["_clipped_norm"], None
        norm = self.engine.get_global_grad_norm() if clipped is None else clipped
        # After an overflow the engine returns a number.
        own["grad_norm"] = torch.tensor(norm, device=self.engine.device) if isinstance(norm, float | int) else norm
        return bool(self.engine.was_step_applied())

    def discard_gradients(self) -> None:
        """Discard gradients of a window that ends without a step."""
        own = self.__dict__
        if not own["has_gradients"]:
            return
        own["has_gradients"], own["is_window_open"], own["_clipped_norm"] = False, False, None
        if not self.stage:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            if zero.offload_optimizer:
                zero.reset_cpu_buffers()
            else:
                zero.averaged_gradients = {}
            return
        # As in the engine after an overflow.
        zero.micro_step_id = -1
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for number in zero.averaged_gradients:
            zero.averaged_gradients[number] = None
        for number in zero.all_grad_tensors:  # may be empty in the first window
            zero.all_grad_tensors[number] = None


class EngineOptimizer:
    """The user's optimizer inside an engine, whose parameters are the engine's flat ones.

    `step` and `zero_grad` are the engine's; every other attribute is the optimizer's, so that schedules work on it.

    Args:
        optimizer: The user's optimizer.
        root: The module with the engine.
        groups: The user's parameters of each group.
    """

    def __init__(self, optimizer: Optimizer, root: EngineRoot, groups: list[list[nn.Parameter]]) -> None:
        self.__dict__.update(optimizer=optimizer, root=root, groups=groups)

    @property  # type: ignore[misc]  # typeshed's __class__ can be assigned; isinstance() reads this one
    def __class__(self) -> Any:
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:  # Any: an attribute of the optimizer
        if name in ("optimizer", "root", "groups"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.optimizer, name, value)

    def step(self, closure: Callable[[], StepOutput] | None = None) -> StepOutput:
        """Let the engine step."""
        loss = closure() if closure is not None else None
        self.root.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that were accumulated since the last step."""
        self.root.discard_gradients()

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


def _gradients(tensors: Iterator[nn.Parameter] | list[Tensor]) -> list[Tensor]:
    return [one.grad for one in tensors if one.grad is not None]


def _norm_of(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the float32 norm of tensors as one vector: shape (), on the device if there are none."""
    norms = [torch.linalg.vector_norm(one, norm_type, dtype=torch.float32) for one in tensors]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)


def _norm_over_ranks(norm: Tensor, norm_type: float) -> Tensor:
    """Return the norm over all ranks, from the norm of each rank's shards."""
    if dist.get_world_size() == 1:
        return norm
    if norm_type == float("inf"):
        return largest_over_ranks(norm, None)
    total = norm**norm_type
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)
