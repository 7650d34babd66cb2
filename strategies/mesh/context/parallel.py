"""`ContextParallel`: runs the steps of a module whose sequences are shared by several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ....errors import ModuleError
from ..experts.sharding import experts_in
from ..random_numbers import own_numbers
from ..verify import check_buffers
from .attention import Attention
from .batch import split_batch, whole_loss
from .inputs import CallArguments, check_outputs, gather_outputs
from .interception import Interception
from .model import check_kernels, check_window, find_model
from .options import Context
from .parts import SequenceParts
from .verify import check_same_inputs, verify

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ....protocols import AnyOutput, Args, Call, Kwargs, StepFunction
    from ..pipeline.split import StageSplit

# Any in this file: arguments and outputs of the user's model and steps.

_HOOKS = "_loopwright_context_hooks"


class ContextParallel:
    """Splits what the model of a module is called with, in the steps that are run through `bind`.

    Hooks on the model do it; outside of such steps, and of the model, they do nothing.

    Args:
        module: The user's module, sharded already: units are gathered before the hooks run.
        options: What is split.
        parts: The ranks that share a sequence.
        device: Of this process.
        verifies: Whether the first batch is compared with the one on full sequences.
        stages: The pipeline stages of the module on this rank; None: it is not split into stages.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Context,
        parts: SequenceParts,
        device: torch.device,
        *,
        verifies: bool,
        stages: StageSplit | None = None,
    ) -> None:
        self._module, self._options, self._parts, self._device = module, options, parts, device
        self._name, self._model = find_model(module, options)
        self._interception = Interception(Attention(parts, options.method), parts.size)
        self._is_running = False
        self._is_training = False
        self._is_cut = False  # whether a step ended at the first block of the next stage
        self._calls = 0
        self._stages = stages
        # Stages, or None where there is one; each is compared in its first call.
        self._left_to_verify: set[int | None] = set(stages.stages if stages else [None]) if verifies else set()
        # The first micro-batch runs once through each stage.
        self._steps_to_check = len(self._left_to_verify)
        self._call = ExitStack()  # what lasts for one call of the model
        self._of_call: tuple[int, int] = (0, 0)  # the dimension of the sequence, and the length of the part
        handles: list[RemovableHandle] = self._model.__dict__.setdefault(_HOOKS, [])
        for handle in handles:  # of an earlier run, with other processes
            handle.remove()
        handles[:] = [
            self._model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._model.register_forward_hook(self._leave),
        ]
        for layer in experts_in(self._model).values():
            layer.add_parts = self._add_parts
        if stages is not None:
            stages.on_cut = self._leave_stage

    def bind(self, step: StepFunction, name: str) -> StepFunction:
        """Return what runs a step, bound already, on this rank's parts of sequences.

        Raises:
            ModuleError: It is a `predict_step`, and batches are split: its results would be those of a part.
        """
        if name == "predict_step" and self._options.batch is not None:
            raise ModuleError(
                f"Expected full sequences in predict_step, got Context(batch=...) with cp={self._parts.size}: it would "
                "return predictions of parts of sequences, which cannot be joined.",
                fix="pass Context(inputs=...), with which the step sees full sequences, or predict without cp.",
            )
        is_training = name == "training_step"

        def run(*args: Any, **kwargs: Any) -> AnyOutput:
            if self._is_running:  # a step that runs another one
                return step(*args, **kwargs)
            self._begin(is_training=is_training)
            try:
                with self._interception, self._interception.inside(False):
                    output = self._run(step, args, kwargs)
            except RuntimeError as error:
                if self._interception.is_inside:
                    error.add_note(self._note())
                raise
            finally:
                self._is_running = False
                self._interception.local_tokens = None
                self._end_call()
            if is_training and not self._calls:
                raise self._never_called()
            if is_training and self._steps_to_check:
                self._steps_to_check -= 1
                check_buffers(self._module, self._parts.group, "cp")
            has_parts = is_training and self._options.batch is not None and not self._is_cut
            return whole_loss(output, self._parts) if has_parts else output

        return run

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Return a context for backward passes, in which checkpointed activations are computed again."""
        with self._interception, self._interception.inside():
            yield

    def _begin(self, *, is_training: bool) -> None:
        if not self._calls:
            check_kernels(self._module, self._parts.size)
        self._is_running, self._is_training, self._calls, self._is_cut = True, is_training, 0, False

    def _run(self, step: StepFunction, args: Args, kwargs: Kwargs) -> AnyOutput:
        dimensions = self._options.batch
        if dimensions is None or not args:
            return step(*args, **kwargs)
        batch, tensor, length = split_batch(args[0], dimensions, self._parts)
        dim = next(iter(dimensions.values()))
        self._of_call = (dim, length)
        if self._is_training:
            self._interception.local_tokens = (tensor.numel() // tensor.shape[dim], length)
        with own_numbers(self._parts.rank, self._device):
            return step(batch, *args[1:], **kwargs)

    # -- hooks on the model --------------------------------------------------------------------------------------

    def _enter(self, model: nn.Module, args: Args, kwargs: Kwargs) -> Call | None:
        """Return the arguments of this rank's part. Called before the model's forward."""
        if not self._is_running or self._interception.is_inside:
            return None
        self._calls += 1
        whole = CallArguments.of(model, args, kwargs)
        part = CallArguments.of(model, args, kwargs)
        if self._options.batch is None:
            dimensions = part.dimensions(self._options.inputs, self._name)
            length = part.split(dimensions, self._parts, self._name)
            self._of_call = (next(iter(dimensions.values())), length)
        else:
            dim, length = self._of_call
            part.add_positions(length, self._parts, self._device)
            if self._stage in self._left_to_verify:
                whole.values.update(_gathered(whole.tensors(), dim, length, self._parts))
        check_window(model, length * self._parts.size, self._parts.size)
        if self._stage in self._left_to_verify:
            self._left_to_verify.remove(self._stage)
            self._verify(whole, part)
        self._interception.count = 0
        self._call.enter_context(self._interception.inside())
        if self._options.batch is None:
            self._call.enter_context(own_numbers(self._parts.rank, self._device))
        return part.call()

    def _leave(self, model: nn.Module, args: Args, output: AnyOutput) -> AnyOutput:
        """Return the output of full sequences. Called after the model's forward, where that did not fail."""
        if not self._is_running or not self._interception.is_inside:
            return None
        self._end_call()
        if not self._interception.count:
            raise self._unseen()
        if self._options.batch is not None:
            return None
        check_outputs(output, *self._of_call, self._parts, self._name)
        return gather_outputs(output, self._of_call[0], self._parts)

    def _leave_stage(self) -> None:
        """End a call of the model at the first block of the next stage, where no hook of the model is called."""
        self._is_cut = True
        self._end_call()
        if not self._interception.count:
            raise self._unseen()

    @property
    def _stage(self) -> int | None:
        """The stage that runs; None where there are none."""
        return None if self._stages is None else self._stages.at.stage

    def _add_parts(self, tensor: Tensor) -> Tensor:
        """Return a tensor added over the parts while the model runs on one, and as it is elsewhere."""
        return self._parts.add(tensor) if self._interception.is_inside else tensor

    def _end_call(self) -> None:
        call, self._call = self._call, ExitStack()
        call.close()

    def _verify(self, whole: CallArguments, part: CallArguments) -> None:
        """Compare the model's forward on full sequences and on this rank's part."""
        check_same_inputs(whole.tensors(), self._parts)
        received = None if self._stages is None else self._stages.at.received
        if received is not None:
            check_outputs(received[0], *self._of_call, self._parts, "the stage before")

        def run_whole() -> AnyOutput:
            return self._forward(whole, None if received is None else tuple(map(self._whole, received)))

        def run_part() -> AnyOutput:
            output = self._forward(part, received)
            if self._options.batch is None:
                check_outputs(output, *self._of_call, self._parts, self._name)
            return output

        verify(self._model, run_whole, run_part, self._interception, self._parts, self._of_call[0], self._device)

    def _whole(self, received: Tensor) -> Tensor:
        """Return what the stage before has sent, of full sequences where it is of parts."""
        dim, length = self._of_call
        is_part = received.ndim > dim and received.shape[dim] == length
        return self._parts.gather(received, dim) if is_part else received

    def _forward(self, arguments: CallArguments, received: tuple[Tensor, ...] | None) -> AnyOutput:
        """Run the model's forward, without its hooks: of a model in stages the present one, on what it received."""
        args, kwargs = arguments.call()
        if self._stages is None:
            return self._model.forward(*args, **kwargs)
        return self._stages.rehearse(received, self._model.forward, *args, **kwargs)

    # -- errors --------------------------------------------------------------------------------------------------

    def _never_called(self) -> ModuleError:
        return ModuleError(
            f"Expected training_step to call {self._name}, whose sequences cp={self._parts.size} splits, got a step "
            "without a call of it: every rank would compute the same.",
            fix="call it as a module (self.model(x) or self(x), not .forward or a submodule of it), or name the "
            "submodule that is called in Context(module=...).",
        )

    def _note(self) -> str:
        dim, length = self._of_call
        return (
            f"{self._name} runs on this rank's part of each sequence: {length} positions along dimension {dim} "
            f"(cp={self._parts.size}). Context(inputs=...) names what is split."
        )

    def _unseen(self) -> ModuleError:
        return ModuleError(
            f"Expected {self._name} to call F.scaled_dot_product_attention with cp={self._parts.size}, got a forward "
            "without any: attention by matrix products, flex_attention or other kernels would see one part only.",
            fix="compute attention by torch.nn.functional.scaled_dot_product_attention, or train with cp=1.",
        )


def share_sequences(
    module: nn.Module,
    options: Context | None,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    verifies: bool,
    same_batch: ProcessGroup | None = None,
    tp: int = 1,
    stages: StageSplit | None = None,
) -> ContextParallel:
    """Return what runs a module's steps on parts of sequences.

    Args:
        module: The user's module, sharded already.
        options: None: the defaults.
        mesh: The ranks that share a sequence, as one axis.
        device: Of this process.
        verifies: Whether the first batch is compared with the one on full sequences.
        same_batch: The ranks that share a sequence or split layers; None is the ranks of `mesh`.
        tp: Number of ranks that split layers.
        stages: See `ContextParallel`.
    """
    parts = SequenceParts(mesh.get_group(), mesh.get_local_rank(), mesh.size(), same_batch, tp)
    options = Context() if options is None else options
    return ContextParallel(module, options, parts, device, verifies=verifies, stages=stages)


def _gathered(tensors: dict[str, Tensor], dim: int, length: int, parts: SequenceParts) -> dict[str, Tensor]:
    """Return those tensors that have the length of a part, of full sequences."""
    are_parts = {name: one for name, one in tensors.items() if one.ndim > dim and one.shape[dim] == length}
    return {name: parts.gather(one.detach(), dim) for name, one in are_parts.items()}
