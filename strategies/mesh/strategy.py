"""`MeshStrategy`: a model distributed over the axes of a mesh of processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...protocols import Options
from ..sharded import ShardedStrategy
from ..traits import MemoryShares
from .axes import REST, MeshAxes, read_axes
from .context.options import Context
from .layers import TensorSplit
from .pipeline.options import Pipeline
from .pipeline.stages import Stages

# Any in this file: a plan of the user, and arguments of FSDPStrategy.


class MeshStrategy(ShardedStrategy):
    """Processes as a mesh: pipeline stages, copies, shards, context and tensors, each along a separate axis.

    From the outermost to the innermost, the axes are `pp`, `dp`, `fsdp`, `cp` and `tp`: consecutive ranks are neighbors
    on the innermost one. Ranks that differ only on `pp`, `cp` or `tp` read the same batches, draw the same random
    numbers, and count once in metrics, sums and numbers of samples. `topology.data_rank` is the position on `dp` and
    `fsdp`.

    Collectives on tensors (`all_reduce`, `reduce_scatter`, `all_gather`, `start_sum`) involve the ranks that read
    different data and have the same coordinates on `pp`, `cp` and `tp`. Objects, decisions, `broadcast` and `barrier`
    involve all ranks.

    Args:
        dp: Number of copies of the model, each with its own data.
        fsdp: Number of processes that share a copy as shards, each with its own data; -1 for all that the other axes
            leave. None is -1, or 1 if another axis is -1.
        tp: Number of processes that share the matrices of a layer.
        pp: Number of pipeline stages.
        cp: Number of processes that share a sequence.
        ep: Number of processes, among the `fsdp` processes, that share the experts of a layer.
        tensor_plan: How matrices are split over `tp`.
        sequence_parallel: Whether norms and dropouts between split layers run on parts of the sequence.
        loss_parallel: Whether the cross entropy is computed on parts of the vocabulary.
        pipeline: A `Pipeline`; None is its defaults.
        context: A `Context`; None is its defaults.
        verify: Whether the first batch of a run is compared with the unsplit model.
        fsdp_arguments: Arguments of FSDPStrategy, except `device_mesh`, which the axes define.

    Raises:
        ConfigError: A size or another argument is unsupported; the message names it.
    """

    strategy_name = "mesh"
    traits = replace(ShardedStrategy.traits, copies_draw_alike=True)

    def __init__(
        self,
        *,
        dp: int = 1,
        fsdp: int | None = None,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        tensor_plan: Any = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        pipeline: Pipeline | None = None,
        context: Context | None = None,
        verify: bool = True,
        **fsdp_arguments: Any,
    ) -> None:
        left = 1 if REST in (dp, tp, pp, cp) else REST
        axes = MeshAxes(pp=pp, dp=dp, fsdp=left if fsdp is None else fsdp, cp=cp, tp=tp, ep=ep)
        _check_options(pipeline, context)
        _check_arguments(fsdp_arguments)
        super().__init__(
            axes,
            fsdp_arguments,
            tensor=TensorSplit(tensor_plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel),
            stages=None if pp == 1 else Stages(pipeline),
            context=context,
            verify=verify,
        )

    @classmethod
    def read_options(cls, text: str) -> Options:
        """Return the arguments in the options of a name, such as "fsdp=2,tp=2" in "mesh:fsdp=2,tp=2"."""
        return {**read_axes(text)}

    def memory_shares(self, num_processes: int, num_nodes: int) -> MemoryShares:
        """Return the numbers of processes that share parameters and activations; see `SharesMemory.memory_shares`."""
        axes = self.axes.resolve(num_processes)
        shards = axes.fsdp * axes.tp * axes.pp * axes.cp
        formula = f"16 P / {shards}" if shards > 1 else "16 P"
        return MemoryShares(
            shards, shards, shards, activations=axes.cp * axes.tp, casts_parameters=axes.fsdp > 1, formula=formula
        )


def _check_options(pipeline: object, context: object) -> None:
    """Refuse options of stages and of sequences of another class."""
    if context is not None and not isinstance(context, Context):
        raise ConfigError(
            f"Expected context= to be a Context, got {context!r}.",
            fix='pass context=Context(inputs={"input_ids": 1}), or leave it out.',
        )
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise ConfigError(f"Expected pipeline= to be a Pipeline, got {pipeline!r}.", fix="pass Pipeline(...), or None.")


def _check_arguments(arguments: Options) -> None:
    """Refuse arguments of FSDPStrategy that say what the axes say."""
    for name in ("device_mesh", "mesh"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"Expected {name}= to be left out of MeshStrategy, got {arguments[name]!r}: it follows from the axes.",
                fix="pass the number of copies as dp= and the number of shards as fsdp=.",
            )
    chosen = arguments.get("sharding_strategy")
    name = str(getattr(chosen, "name", chosen))
    if chosen is not None and name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise ConfigError(
            f"Expected sharding_strategy='FULL_SHARD' or 'SHARD_GRAD_OP' for MeshStrategy, got {chosen!r}.",
            fix="leave it out, and pass the number of copies as dp= and the number of shards as fsdp=.",
        )
