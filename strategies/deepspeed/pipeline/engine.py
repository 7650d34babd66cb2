"""The root of a module with a PipelineModule: layers partitioned into stages, one on each rank of a replica.

The engine runs the forward and backward passes of a batch through all stages, one micro-batch after the other. The rest
is as with any other module: a pass counts once `backward` is called with the loss that it returned; clipping and the
optimizer's step follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....errors import ConfigError, DataError, ModuleError
from ....protocols import Batch, StepOutput
from ..engine import EngineRoot, norm_of, norm_over_ranks
from .micro_batches import micro_batches_of, shapes_of

if TYPE_CHECKING:
    from ....precision import Precision
    from ..engine_types import Grid, Pipeline, PipelineEngine
    from .state import Layout

__all__ = ["PipelineRoot"]


class PipelineRoot(EngineRoot):
    """A module with a PipelineModule, which gets the methods `train_batch`, `eval_batch` and `predict_batch`.

    Args:
        module: The user's module, or the PipelineModule itself.
        path: Path of the PipelineModule in it; "" for itself.
        pipe: The PipelineModule.
        stage: ZeRO stage.
        micro_batches: Number of micro-batches in a batch, if its size allows.
        precision: Casts batches.

    Attributes:
        pipe: The PipelineModule.
        grid: Ranks of the pipeline stages and replicas.
        prefix: Prefix of its parameters' names in the module.
        layout: Names and shapes of all pipeline stages, once they are known; see `pipeline/state.py`.
    """

    is_pipeline = True
    pipe: Pipeline
    grid: Grid
    prefix: str
    layout: Layout

    def __init__(
        self, module: nn.Module, path: str, pipe: Pipeline, *, stage: int, micro_batches: int, precision: Precision
    ) -> None:
        super().__init__(module, stage)
        self.__dict__.update(
            pipe=pipe, grid=pipe.mpu(), prefix=f"{path}." if path else "", layout=None,
            _micro_batches=micro_batches, _precision=precision, _fresh=None, _leaf=None, _shapes=None,
            _evaluations=0, _evaluations_of_step=1, evaluated=[],
        )  # fmt: skip
        self.__dict__["_trained"] = [one for one in pipe.parameters() if one.requires_grad]
        # Not through nn.Module: they are not submodules.
        pipe.__dict__.update(train_batch=self.train_batch, eval_batch=self.eval_batch, predict_batch=self.predict_batch)

    @property
    def pipeline_engine(self) -> PipelineEngine:
        """The engine."""
        return cast("PipelineEngine", self.engine)

    @property
    def has_pass(self) -> bool:
        """Whether gradients of a pass wait for `backward`."""
        return self.__dict__["_fresh"] is not None

    @property
    def trained(self) -> list[nn.Parameter]:
        """The trained parameters of this pipeline stage."""
        trained: list[nn.Parameter] = self.__dict__["_trained"]
        return trained

    @property
    def pipe_device(self) -> torch.device:
        """The device of this pipeline stage's parameters."""
        return self.trained[0].device

    def sync_buffers(self) -> None:
        """Copy the first replica's buffers of this pipeline stage to the others. On every rank: it communicates."""
        ranks = self.grid.get_data_parallel_group_ranks()
        for one in self.module.buffers() if len(ranks) > 1 else ():
            dist.broadcast(one.detach(), src=ranks[0], group=self.grid.get_data_parallel_group())

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over replicas; return what waits for the sum. A replica's stages have equal values."""
        work = dist.all_reduce(tensor, group=self.grid.get_data_parallel_group(), async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tensor

        return finish

    # -- passes --------------------------------------------------------------------------------------------------

    def train_batch(self, data: Batch) -> Tensor:
        """Run the forward and backward passes of a batch through all stages. On every rank: it communicates.

        The gradients count once `backward` is called with the returned loss. A term that is added to the loss is
        trained, too, as far as it depends on the parameters of this rank's stage.

        Args:
            data: (inputs, labels), the same on all ranks of a replica, split into equal micro-batches: as many as the
                strategy's `micro_batches`, or the next smaller number that divides the batch. Or an iterator, from
                which `micro_batches` items are taken.

        Returns:
            The mean of the micro-batches' losses in this replica: shape (), float32, on every rank.

        Raises:
            ConfigError: There is no optimizer.
            ModuleError: The previous loss was not passed to `backward`, or data are not a pair.
            DataError: The iterator has ended.
        """
        own, engine = self.__dict__, self.pipeline_engine
        if not self.has_optimizer:
            raise ConfigError(
                "train_batch was called before DeepSpeed had an optimizer.",
                fix="pass both to fabric.setup(module, optimizer), or call eval_batch.",
            )
        if self.has_pass:
            raise _unused("train_batch")
        pairs = self._pairs_of(data)
        if len(pairs) != engine.micro_batches:
            engine.set_train_batch_size(len(pairs) * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
        before = [one.grad for one in self.trained]
        for one in self.trained:
            one.grad = None
        # The engine would set training mode; a layer may be frozen in evaluation mode.
        self.pipe.__dict__["train"] = lambda mode=True: self.pipe
        try:
            with self._in_precision():
                engine.train_batch(iter(pairs))
        finally:
            del self.pipe.__dict__["train"]
            fresh = [one.grad for one in self.trained]
            for one, grad in zip(self.trained, before, strict=True):
                one.grad = grad
        # Not the result of engine.train_batch, the mean over replicas: weights and logs sum over those themselves.
        leaf = engine.dp_group_loss.detach().float().reshape(()).clone().requires_grad_()
        own["_fresh"], own["_leaf"] = fresh, leaf
        return leaf

    def eval_batch(self, data: Batch) -> Tensor:
        """Return the mean loss of a batch without gradients. On every rank, also of other replicas: it communicates.

        Args:
            data: As in `train_batch`.

        Returns:
            Of this replica: shape (), float32, on every rank.
        """
        with self._evaluating("eval_batch") as engine:
            pairs = self._pairs_of(data)
            loss: Tensor = engine.eval_batch(iter(pairs), num_micro_batches=len(pairs))
        return loss.detach().float().reshape(())

    def predict_batch(self, inputs: Batch) -> StepOutput:
        """Return the outputs of the last layer for a batch, without gradients. On every rank, also of other replicas.

        Args:
            inputs: A tensor or a tuple of them, the same on all ranks of a replica; split as in `train_batch`.

        Returns:
            A tensor, or a tuple of them if the last layer returns one; on every rank of the replica.
        """
        with self._evaluating("predict_batch") as engine:
            pairs = self._pairs_of((inputs, ()))
            engine.total_loss = None  # outputs would be added to the losses of the last pass
            outputs = engine.eval_batch(
                iter(pairs), compute_loss=False, reduce_output=None, num_micro_batches=len(pairs)
            )
        joined = None
        if engine.is_last_stage():
            is_one = isinstance(outputs[0], Tensor)
            joined = torch.cat(outputs) if is_one else tuple(map(torch.cat, zip(*outputs, strict=True)))
        return self._from_last_stage(joined)

    def predict(self, inputs: Batch) -> StepOutput:
        """Return the result of `predict_batch` for a call of the PipelineModule itself.

        Raises:
            ModuleError: Gradients are enabled.
        """
        if torch.is_grad_enabled():
            raise ModuleError(
                "A PipelineModule cannot be called with gradients enabled, because its engine runs forward and "
                "backward passes together.",
                fix="call train_batch((inputs, labels)), or call it under torch.no_grad() for its outputs.",
            )
        return self.predict_batch(inputs)

    def _from_last_stage(self, outputs: StepOutput) -> StepOutput:
        """Return the outputs of this replica's last stage."""
        source, group = self.pipeline_engine._loss_stage_global_rank(), self.grid.get_pipe_parallel_group()
        if dist.get_world_size(group) == 1:
            return outputs
        tensors: list[Any] = list(outputs) if isinstance(outputs, tuple) else [outputs]
        shapes = [(one.shape, one.dtype) for one in tensors if one is not None]
        kinds: list[Any] = [isinstance(outputs, tuple), shapes]
        device = torch.device("cpu") if "gloo" in dist.get_backend(group) else self.pipe_device
        dist.broadcast_object_list(kinds, src=source, group=group, device=device)
        if outputs is None:
            tensors = [torch.empty(shape, dtype=dtype, device=self.engine.device) for shape, dtype in kinds[1]]
        for one in tensors:
            dist.broadcast(one, src=source, group=group)
        return tuple(tensors) if kinds[0] else tensors[0]

    @contextmanager
    def _evaluating(self, name: str) -> Iterator[PipelineEngine]:
        """Return a context with the engine, for a pass without gradients in which all replicas take part."""
        engine = self.pipeline_engine
        if not self.has_engine:
            raise ConfigError(
                f"{name} was called before DeepSpeed had an engine.",
                fix="pass module and optimizer to fabric.setup(module, optimizer).",
            )
        self.__dict__["_evaluations"] += 1
        modes = [(one, one.training) for one in self.pipe.modules()]
        is_data_parallel, engine.is_data_parallel = engine.is_data_parallel, False  # no mean over replicas
        try:
            with self._in_precision():
                yield engine
        finally:
            engine.is_data_parallel = is_data_parallel
            for one, was_training in modes:
                one.training = was_training

    def _pairs_of(self, data: Batch) -> list[Batch]:
        own = self.__dict__
        pairs = [own["_precision"].convert_input(pair) for pair in micro_batches_of(data, own["_micro_batches"])]
        shapes = [shapes_of(pair[0]) for pair in pairs]
        if any(one != shapes[0] for one in shapes) and not self.pipe.dynamic_shape:
            raise DataError(
                "Expected micro-batches of one shape within a batch, because stages receive into fixed buffers, got "
                f"{shapes}.",
                fix="provide micro-batches of one shape, or build PipelineModule(..., dynamic_shape=True).",
            )
        if shapes[0] != own["_shapes"]:
            self.pipeline_engine.reset_activation_shape()
            own["_shapes"] = shapes[0]
        return pairs

    def count_evaluations(self, step: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
        """Return an evaluation step that counts how often it calls the engine."""
        own = self.__dict__

        def run(*args: object, **kwargs: object) -> StepOutput:
            before = own["_evaluations"]
            output = step(*args, **kwargs)
            own["_evaluations_of_step"] = own["_evaluations"] - before
            return output

        return run

    def evaluate_without_data(self) -> None:
        """Take part in the barriers of another replica's evaluation step."""
        import deepspeed

        for _ in range(self.__dict__["_evaluations_of_step"]):
            deepspeed.comm.barrier()

    @contextmanager
    def _in_precision(self) -> Iterator[None]:
        """Return a context with the precision of a step, also within the engine, which turns off what is around it."""
        precision = self.__dict__["_precision"]
        if precision.policy.compute_dtype is torch.float32:
            yield
            return
        pipe, forward = self.pipe, type(self.pipe).forward

        def run(*args: object, **kwargs: object) -> StepOutput:
            with precision.step_context():
                return forward(pipe, *args, **kwargs)

        # The loss is computed outside the layers' forward; so is what stages exchange, which has its own dtype.
        around = precision.step_context() if getattr(precision, "is_mixed", False) else nullcontext()
        pipe.__dict__["forward"] = run
        try:
            with around:
                yield
        finally:
            del pipe.__dict__["forward"]

    # -- gradients -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Let the gradients of the last pass count, times the factor on its loss; reduce them at the window's end."""
        own = self.__dict__
        fresh, leaf = own["_fresh"], own["_leaf"]
        if fresh is None:
            raise ModuleError(
                "Expected the loss that train_batch returned for backward, got another tensor.",
                fix="call backward once, with the loss that train_batch returned.",
            )
        loss.backward(retain_graph=retain_graph)
        own["_fresh"] = own["_leaf"] = None
        factor = leaf.grad
        if factor is None:
            raise ModuleError(
                "Expected a loss for backward that depends on the result of train_batch, got one that does not.",
                fix="pass the loss that train_batch returned, or a tensor computed from it.",
            )
        grads = [one for one in fresh if one is not None]
        if loss is not leaf and grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        for one, grad in zip(self.trained, fresh, strict=True):
            if grad is not None:
                one.grad = grad if one.grad is None else one.grad + grad
        own["has_gradients"] = True
        if own["ends_window"]:
            self.pipeline_engine._exec_reduce_tied_grads()
            self.pipeline_engine._exec_reduce_grads()

    def _norm(self, norm_type: float) -> Tensor:
        """Return the norm of all stages' gradients, a tied parameter counted once, times the loss scale."""
        pairs: list[tuple[nn.Parameter, Tensor | None]]
        if self.stage:
            zero = self.zero
            # One shard more than parameters where padding of zeros follows.
            pairs = [
                pair
                for number, group in zero.averaged_gradients.items()
                for pair in zip(zero.params_in_partition[number], group or (), strict=False)
            ]
        else:
            pairs = [(one, one.grad) for one in self.trained]
        shards = [
            grad for one, grad in pairs if grad is not None and not getattr(one, "ds_pipe_replicated", False)
        ]  # parameters that an earlier stage counts are replicated
        norm = norm_of(shards, norm_type, self.engine.device).to(self.engine.device)
        # In stage 0 replicas have equal gradients, so that one of them is reduced.
        return norm_over_ranks(norm, norm_type, None if self.stage else self.grid.get_model_parallel_group())

    def _step_engine(self) -> None:
        if self.has_pass:
            raise _unused("step")
        self.pipeline_engine._exec_optimizer_step()


def _unused(name: str) -> ModuleError:
    return ModuleError(
        f"Expected backward with the last loss of train_batch before {name}, otherwise its gradients would be lost.",
        fix="call fabric.backward(loss) after train_batch, or return the loss from training_step.",
    )
