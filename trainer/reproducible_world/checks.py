"""What cannot be the same on every number of ranks, and is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ...callbacks import GradientAccumulationScheduler
from ...data.distributed.shard import is_rank_aware
from ...data.sources.indexed import is_indexed
from ...data.sources.stateful import is_stateful
from ...data.tree import is_collection
from ...errors import ConfigError, DataError, ModuleError, Problems

if TYPE_CHECKING:
    from ...precision import Precision
    from ...protocols import Loaders
    from ...strategies import Strategy
    from ..run import FitRun


def wrong_arguments(given: Mapping[str, Any]) -> Problems:
    """Return what is wrong in the Trainer's arguments, where `reproducible` and `micro_shards` are given."""
    problems, shards, callbacks = Problems(), given["micro_shards"], given["callbacks"]
    if type(shards) is not int or shards < 1 or shards & (shards - 1):
        problems.add(f"micro_shards={shards!r}.", fix="pass the batches of a step over all ranks, a power of two.")
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    whole = f"each step has micro_shards={shards} whole batches of the loader"
    of_rank = "it counts the batches of a rank"
    wrong = {
        "accumulate_grad_batches": (given["accumulate_grad_batches"] != 1, whole),
        "global_batch_size": (given["global_batch_size"] is not None, whole),
        "GradientAccumulationScheduler": (any(isinstance(c, GradientAccumulationScheduler) for c in callbacks), whole),
        "accumulate_across_epochs": (given["accumulate_across_epochs"] is True, whole),
        "on_oom='shrink'": (given["on_oom"] == "shrink", whole),
        "grad_accumulation_dtype": (given["grad_accumulation_dtype"] is not None, "gradients are summed by a tree"),
        "use_distributed_sampler=False": (given["use_distributed_sampler"] is False, "data are distributed by a rule"),
        "fault_tolerance": (given["fault_tolerance"] is not None, "the groups that take part may change"),
        "overfit_batches": (bool(given["overfit_batches"]), of_rank),
        "check_val_every_n_epoch=None": (given["check_val_every_n_epoch"] is None, of_rank),
        "limit_train_batches": (given["limit_train_batches"] not in (None, 1.0, 0), of_rank),
        "limit_val_batches": (given["limit_val_batches"] not in (None, 1.0, 0), of_rank),
    }
    for name, (is_wrong, reason) in wrong.items():
        if is_wrong:
            problems.add(f"{name} and reproducible='world': {reason}.", fix=f"leave out {name}.")
    return problems


def wrong_setup(
    strategy: Strategy, precision: Precision, module: nn.Module, *, num_shards: int, ranks: int
) -> Problems:
    """Return what depends on the number of ranks, before processes start.

    Args:
        strategy: Must sum in a tree.
        precision: Must not scale the loss.
        module: The user's.
        num_shards: Micro-shards of a step.
        ranks: Number of processes.
    """
    problems = Problems()
    if num_shards % ranks:
        counts = ", ".join(str(2**bit) for bit in range(num_shards.bit_length()))
        problems.add(
            f"Expected a number of ranks that divides micro_shards={num_shards}, got {ranks}.",
            fix=f"train on {counts} ranks, or pass a larger power of two as micro_shards.",
        )
    if not strategy.traits.sums_in_tree or strategy.uneven == "cycle":
        problems.add(
            f"Expected one device, strategy='ddp' or 'fsdp' with reproducible='world', got {strategy!r}.",
            fix="pass one of these, without ddp_comm_hook, copies of shards and uneven='cycle'.",
        )
    if precision.has_scaler:
        problems.add(
            f"Expected a precision without a loss scale with reproducible='world', got {precision.precision!r}.",
            fix="pass 'bf16-mixed' or '32-true'.",
        )
    if not getattr(module, "automatic_optimization", True):
        problems.add(
            "Expected automatic optimization with reproducible='world', got automatic_optimization=False.",
            fix="return the loss from training_step.",
        )
    return problems


def check_norms(module: nn.Module) -> None:
    """Refuse layers whose running statistics are of the micro-shards that a rank has seen.

    Raises:
        ModuleError: Names them.
    """
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    found = {
        name: type(one).__name__
        for name, one in module.named_modules()
        if isinstance(one, kinds) and one.track_running_stats and one.training
    }
    if found:
        listed = ", ".join(f"{name} ({kind})" for name, kind in [*found.items()][:5])
        raise ModuleError(
            f"Expected layers without running statistics with reproducible='world', got {listed}"
            f"{f' and {len(found) - 5} more' if len(found) > 5 else ''}: a rank's statistics are those of its batches.",
            fix="use GroupNorm or LayerNorm, or freeze the statistics: call eval() on these layers before fit.",
        )


def check_data(loader: Loaders) -> None:
    """Refuse data whose batches are not the same on every number of ranks.

    Raises:
        DataError: Says what is expected.
    """
    is_list = isinstance(loader, list | tuple) and not is_collection(loader)
    if is_list or (is_indexed(loader) and not is_stateful(loader) and not is_rank_aware(loader)):
        return
    raise DataError(
        "Expected a DataLoader with a map-style data set, or a list of batches, with reproducible='world', got "
        f"{type(loader).__name__}: its order depends on the number of ranks.",
        fix="pass one map-style data set, without a DistributedSampler.",
    )


def check_optimizers(run: FitRun) -> None:
    """Refuse a run that does not step an optimizer after each window.

    Raises:
        ConfigError: Says what it does.
    """
    if not run.optimizers:
        raise ConfigError(
            "Expected an optimizer with reproducible='world', got none.", fix="return one from configure_optimizers."
        )
    if run.plan.hold is not None:
        raise ConfigError(
            "Expected an optimizer that steps once per window with reproducible='world', got "
            f"{type(run.optimizers[0]).__name__}, which evaluates the window again.",
            fix="use an optimizer such as SGD or AdamW.",
        )
