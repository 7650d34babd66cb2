"""DeepSpeed's PipelineModule: its layers cut into stages, one on each rank of a replica.

The engine runs the forward and backward passes of a whole batch, micro-batch by micro-batch, through all stages. The
rest is as with any other module: what a pass has computed counts once `backward` is called with the loss that it
returned; then come clipping and the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....errors import ConfigError, DataError, ModuleError
from ...base import non_finite_norm
from ..engine import EngineRoot
from .micro_batches import cut, pair_of, shapes_of

if TYPE_CHECKING:
    from ....precision import Precision

__all__ = ["PipelineRoot"]

# Any in this file: deepspeed has no types, and the batches of users.


class PipelineRoot(EngineRoot):
    """What runs a module with a PipelineModule in it; gives that `train_batch`, `eval_batch` and `predict_batch`.

    Args:
        module: The user's, or the PipelineModule itself.
        path: Where in it the PipelineModule is; "" for itself.
        pipe: The PipelineModule.
        stage: The ZeRO stage.
        micro_batches: Into how many parts a batch is cut, if its size allows.
        precision: Casts batches.

    Attributes:
        pipe: The PipelineModule.
        grid: Knows which rank has which stage of which replica.
        prefix: Of the names of its parameters in the module.
        layout: Names and shapes of all stages, once they are known; see `deepspeed_stages`.
    """

    is_pipeline = True
    pipe: Any
    grid: Any
    prefix: str
    layout: Any

    def __init__(
        self, module: nn.Module, path: str, pipe: Any, *, stage: int, micro_batches: int, precision: Precision
    ) -> None:
        super().__init__(module, stage)
        self.__dict__.update(
            pipe=pipe, grid=pipe.mpu(), prefix=f"{path}." if path else "", layout=None,
            _micro_batches=micro_batches, _precision=precision, _fresh=None, _leaf=None, _shapes=None,
            _evaluations=0, _evaluations_of_step=1, evaluated=[],
        )  # fmt: skip
        self.__dict__["_trained"] = [one for one in pipe.parameters() if one.requires_grad]
        # Not through nn.Module: they are no submodules.
        pipe.__dict__.update(train_batch=self.train_batch, eval_batch=self.eval_batch, predict_batch=self.predict_batch)

    @property
    def has_pass(self) -> bool:
        """Whether gradients of a pass wait for `backward`."""
        return self.__dict__["_fresh"] is not None

    @property
    def pipe_device(self) -> torch.device:
        """Where the parameters of this stage are."""
        device: torch.device = self.__dict__["_trained"][0].device
        return device

    def sync_buffers(self) -> None:
        """Let all replicas of this stage have the first one's buffers. On every rank: it communicates."""
        import torch.distributed as dist

        ranks = self.grid.get_data_parallel_group_ranks()
        for one in self.module.buffers() if len(ranks) > 1 else ():
            dist.broadcast(one.detach(), src=ranks[0], group=self.grid.get_data_parallel_group())

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to add a tensor over replicas; return what waits for the sum. Stages of one have the same."""
        import torch.distributed as dist

        work = dist.all_reduce(tensor, group=self.grid.get_data_parallel_group(), async_op=True)

        def finish() -> Tensor:
            work.wait()
            return tensor

        return finish

    # -- passes --------------------------------------------------------------------------------------------------

    def train_batch(self, data: Any) -> Tensor:
        """Run the forward and backward passes of a batch through all stages. On every rank: it communicates.

        The gradients count once `backward` is called with what is returned, as with any loss; a term that is added to
        it is trained, too, as far as it depends on the parameters of this rank's stage.

        Args:
            data: (inputs, labels), the same on all ranks of a replica, which is cut into equal micro-batches: as many
                as the strategy's `micro_batches` says, or fewer, if only these divide it. Or an iterator, of which
                `micro_batches` items are such micro-batches.

        Returns:
            The mean of the micro-batches' losses in this replica: shape (), float32, on every rank.

        Raises:
            ConfigError: There is no optimizer.
            ModuleError: The loss before was not given to `backward`, or data are no pair.
            DataError: The iterator has ended.
        """
        own = self.__dict__
        engine = own["engine"]
        if engine is None or engine.optimizer is None:
            raise ConfigError(
                "train_batch was called before DeepSpeed had an optimizer.",
                fix="pass both to fabric.setup(module, optimizer); or call eval_batch.",
            )
        if own["_fresh"] is not None:
            raise _unused("train_batch")
        parts = self._parts_of(data)
        count = len(parts)
        if count != engine.micro_batches:
            engine.set_train_batch_size(count * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
        trained = own["_trained"]
        before = [one.grad for one in trained]
        for one in trained:
            one.grad = None
        try:
            with self._as_it_is(), self._within():
                engine.train_batch(iter(parts))
        finally:
            fresh = [one.grad for one in trained]
            for one, grad in zip(trained, before, strict=True):
                one.grad = grad
        # Not what train_batch returned, which is the mean over replicas: weights and logs add those up themselves.
        leaf: Tensor = engine.dp_group_loss.detach().float().reshape(()).clone().requires_grad_()
        own["_fresh"], own["_leaf"] = fresh, leaf
        return leaf

    def eval_batch(self, data: Any) -> Tensor:
        """Return the mean loss of a batch without gradients. On every rank, also of other replicas: it communicates.

        Args:
            data: As in `train_batch`.

        Returns:
            Of this replica: shape (), float32, on every rank.
        """
        with self._evaluating("eval_batch") as engine:
            parts = self._parts_of(data)
            loss: Tensor = engine.eval_batch(iter(parts), num_micro_batches=len(parts))
        return loss.detach().float().reshape(())

    def predict_batch(self, inputs: Any) -> Any:
        """Return the outputs of the last layer for a batch, without gradients. On every rank, also of other replicas.

        Args:
            inputs: A tensor or a tuple of them, the same on all ranks of a replica; cut as in `train_batch`.

        Returns:
            A tensor, or a tuple of them if the last layer returns one; on every rank of the replica.
        """
        with self._evaluating("predict_batch") as engine:
            parts = self._parts_of((inputs, ()))
            engine.total_loss = None  # outputs would be added to the losses of the last pass
            outputs = engine.eval_batch(
                iter(parts), compute_loss=False, reduce_output=None, num_micro_batches=len(parts)
            )
        joined = None
        if engine.is_last_stage():
            is_one = isinstance(outputs[0], Tensor)
            joined = torch.cat(outputs) if is_one else tuple(map(torch.cat, zip(*outputs, strict=True)))
        return self._from_last_stage(joined)

    def predict(self, inputs: Any) -> Any:
        """Return what `predict_batch` does, for a call of the PipelineModule itself.

        Raises:
            ModuleError: Gradients are wanted.
        """
        if torch.is_grad_enabled():
            raise ModuleError(
                "a PipelineModule was called with gradients, and its engine runs forward and backward passes together.",
                fix="call train_batch((inputs, labels)); or call it under torch.no_grad() for its outputs.",
            )
        return self.predict_batch(inputs)

    def _from_last_stage(self, outputs: Any) -> Any:
        """Return the outputs that the last stage of this replica has."""
        import torch.distributed as dist

        source, group = self.engine._loss_stage_global_rank(), self.grid.get_pipe_parallel_group()
        if dist.get_world_size(group) == 1:
            return outputs
        tensors = list(outputs) if isinstance(outputs, tuple) else [outputs]
        told: list[Any] = [isinstance(outputs, tuple), [(one.shape, one.dtype) for one in tensors if one is not None]]
        dist.broadcast_object_list(told, src=source, group=group, device=self._host_device(group))
        if outputs is None:
            tensors = [torch.empty(shape, dtype=dtype, device=self.engine.device) for shape, dtype in told[1]]
        for one in tensors:
            dist.broadcast(one, src=source, group=group)
        return tuple(tensors) if told[0] else tensors[0]

    def _host_device(self, group: Any) -> torch.device:
        import torch.distributed as dist

        return torch.device("cpu") if "gloo" in dist.get_backend(group) else self.pipe_device

    @contextmanager
    def _evaluating(self, name: str) -> Iterator[Any]:
        """Return a context with the engine, for one pass without gradients of which all replicas take part."""
        engine = self.engine
        if engine is None:
            raise ConfigError(
                f"{name} was called before DeepSpeed had an engine.",
                fix="pass module and optimizer to fabric.setup(module, optimizer).",
            )
        self.__dict__["_evaluations"] += 1
        modes = [(one, one.training) for one in self.pipe.modules()]
        is_data_parallel, engine.is_data_parallel = engine.is_data_parallel, False  # no mean over replicas
        try:
            with self._within():
                yield engine
        finally:
            engine.is_data_parallel = is_data_parallel
            for one, was_training in modes:
                one.training = was_training

    def _parts_of(self, data: Any) -> list[Any]:
        own = self.__dict__
        count = own["_micro_batches"]
        if isinstance(data, Iterator):
            parts = [part for _, part in zip(range(count), data)]  # noqa: B905  # whichever ends first
            if len(parts) < count:
                raise DataError(
                    f"the iterator had {len(parts)} micro-batches left, and a batch of the pipeline is {count}.",
                    fix="stop before it ends, or pass batches, which are cut into micro-batches.",
                )
        else:
            parts = cut(pair_of(data), count)
        parts = [own["_precision"].convert_input(pair_of(part)) for part in parts]
        shapes = [shapes_of(part[0]) for part in parts]
        if any(one != shapes[0] for one in shapes) and not self.pipe.dynamic_shape:
            raise DataError(
                "the micro-batches of one batch have different shapes, and the stages receive into buffers of one.",
                fix="give micro-batches of one shape, or build PipelineModule(..., dynamic_shape=True).",
            )
        if shapes[0] != own["_shapes"]:
            self.engine.reset_activation_shape()
            own["_shapes"] = shapes[0]
        return parts

    def count_evaluations(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an evaluation step of which it is remembered how often it calls `eval_batch`."""
        own = self.__dict__

        def run(*args: Any, **kwargs: Any) -> Any:
            before = own["_evaluations"]
            output = step(*args, **kwargs)
            own["_evaluations_of_step"] = own["_evaluations"] - before
            return output

        return run

    def evaluate_without_data(self) -> None:
        """Take part in what the evaluation step of another replica does over all ranks: the engine's barriers."""
        import deepspeed

        for _ in range(self.__dict__["_evaluations_of_step"]):
            deepspeed.comm.barrier()

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Return a context in which the engine does not set training mode: a layer may be frozen in evaluation mode."""
        self.pipe.__dict__["train"] = lambda mode=True: self.pipe
        try:
            yield
        finally:
            del self.pipe.__dict__["train"]

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Return a context with the precision of a step, also within the engine, which turns off what is around it."""
        precision = self.__dict__["_precision"]
        if precision.policy.compute_dtype is torch.float32:
            yield
            return
        pipe, forward = self.pipe, type(self.pipe).forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with precision.step_context():
                return forward(pipe, *args, **kwargs)

        # The loss is made outside of the layers' forward; so is what stages exchange, which has a dtype of its own.
        around = precision.step_context() if getattr(precision, "is_mixed", False) else nullcontext()
        pipe.__dict__["forward"] = run
        try:
            with around:
                yield
        finally:
            del pipe.__dict__["forward"]

    # -- gradients -----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Let the gradients of the last pass count, times what the loss was multiplied with; reduce them at the end."""
        own = self.__dict__
        fresh, leaf = own["_fresh"], own["_leaf"]
        if fresh is None:
            raise ModuleError(
                "backward was called with a loss that does not come from the PipelineModule.",
                fix="call it once with what train_batch returned.",
            )
        loss.backward(**kwargs)
        own["_fresh"] = own["_leaf"] = None
        factor = leaf.grad
        if factor is None:
            raise ModuleError(
                "backward was called with a loss that does not depend on what train_batch returned.",
                fix="call it with that, or with something that is computed from it.",
            )
        grads = [one for one in fresh if one is not None]
        if loss is not leaf and grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        for one, grad in zip(own["_trained"], fresh, strict=True):
            if grad is not None:
                one.grad = grad if one.grad is None else one.grad + grad
        own["has_gradients"] = True
        if own["ends_window"]:
            engine = own["engine"]
            engine._exec_reduce_tied_grads()
            engine._exec_reduce_grads()

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients of all stages so that their total norm is at most `max_norm`; return the norm before."""
        parts = self.parts()
        norms = [torch.linalg.vector_norm(one, norm_type, dtype=torch.float32) for one in self._parts_once()]
        device = self.engine.device
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
        # In stage 0 replicas have equal gradients, so that one of them is asked; else each rank has a part of its own.
        group = None if self.stage else self.grid.get_model_parallel_group()
        norm = _over_group(own.to(device), norm_type, group) / self.loss_scale
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise non_finite_norm()
        if parts:
            torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self.__dict__["_clipped_norm"] = norm
        return norm

    def _parts_once(self) -> list[Tensor]:
        """Return `parts` without those of tied parameters that an earlier stage counts."""
        if not self.stage:
            trained = self.__dict__["_trained"]
            return [one.grad for one in trained if one.grad is not None and not _is_counted_elsewhere(one)]
        zero = self.zero
        found = []
        for number, group in zero.averaged_gradients.items():
            # One more than parameters where padding of zeros follows.
            found += [
                part
                for one, part in zip(zero.params_in_partition[number], group or (), strict=False)
                if not _is_counted_elsewhere(one)
            ]
        return found

    def step(self) -> bool:
        """Let the engine step and forget the gradients; return whether it did."""
        engine, own = self.engine, self.__dict__
        if own["_fresh"] is not None:
            raise _unused("step")
        engine._exec_optimizer_step()
        own["has_gradients"] = False
        clipped, own["_clipped_norm"] = own["_clipped_norm"], None
        own["grad_norm"] = engine.get_global_grad_norm() if clipped is None else clipped
        return bool(engine.was_step_applied())


def _is_counted_elsewhere(parameter: Any) -> bool:
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def _over_group(norm: Tensor, norm_type: float, group: Any) -> Tensor:
    import torch.distributed as dist

    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    total = norm**norm_type
    dist.all_reduce(total, group=group)
    return total ** (1.0 / norm_type)


def _unused(name: str) -> ModuleError:
    return ModuleError(
        f"{name} was called, and the loss that train_batch returned before was not given to backward: its gradients do "
        "not count without.",
        fix="call fabric.backward(loss) after train_batch; or return the loss from training_step.",
    )
