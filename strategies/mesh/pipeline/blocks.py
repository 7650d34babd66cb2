"""The split points of a module: its list of repeated blocks, and the first blocks of stages.

Nothing here communicates or changes the module, so that errors come before processes start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from ....errors import ConfigError, ModuleError, nearest
from .options import Pipeline


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The stages of a module.

    Attributes:
        child: Name of the submodule that is split; "" is the module itself.
        list: Name of the container of the blocks.
        bounds: Number of the first block of each stage, and the number of blocks at the end.
    """

    child: str
    list: str
    bounds: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def called(self) -> str:
        """What `training_step` calls, as a user writes it."""
        return f"self.{self.child}" if self.child else "the module"

    def stage_of(self, block: int) -> int:
        """Return the stage of a block."""
        return next(stage for stage, end in enumerate(self.bounds[1:]) if block < end)


def plan_stages(module: nn.Module, options: Pipeline, num_ranks: int) -> StagePlan:
    """Return where a module is split.

    Args:
        module: The user's module, built or on the meta device.
        options: The arguments that the user chose.
        num_ranks: Ranks of a pipeline.

    Raises:
        ConfigError: A name in the options does not exist, or split points are not in order.
        ModuleError: There are no repeated blocks, or fewer than stages; or the module cannot be split: it trains by
            manual optimization, or torch.compile wraps the place where it is split.
    """
    if not getattr(module, "automatic_optimization", True):
        raise ModuleError(
            f"Expected automatic optimization with pipeline stages, got {type(module).__name__} with "
            "automatic_optimization=False: a step that calls backward by itself needs all stages in one process.",
            fix="use automatic optimization, or train without pp.",
        )
    num_stages = options.num_stages(num_ranks)
    child, name = _find_blocks(module, options, num_stages)
    _check_compiled(module, name)
    blocks: list[nn.Module] = list(module.get_submodule(name).children())
    prefix = f"{name}." if name else ""
    names = [f"{prefix}{key}" for key, _ in module.get_submodule(name).named_children()]
    if len(blocks) < num_stages:
        raise ModuleError(
            f"Expected at least {num_stages} blocks for {num_stages} stages (pp={num_ranks}, "
            f"schedule={options.schedule!r}), got {len(blocks)} in {name or 'the module'}: {_range(names)}.",
            fix="use fewer stages, or name another submodule in Pipeline(module=...).",
        )
    if isinstance(options.split, str):
        sizes = [sum(one.numel() for one in block.parameters()) for block in blocks]
        return StagePlan(child, name, _even_bounds(sizes, num_stages))
    return StagePlan(child, name, _named_bounds(options.split, names))


def _find_blocks(module: nn.Module, options: Pipeline, num_stages: int) -> tuple[str, str]:
    """Return the names of the submodule that is split and of its list of blocks."""
    known = [name for name, _ in module.named_modules() if name]
    wanted = options.module
    if wanted is not None and wanted not in known:
        raise ConfigError(
            f"Expected Pipeline(module=...) to name a submodule of {type(module).__name__}, got {wanted!r}"
            f"{nearest(wanted, known)}.",
            fix=f"pass one of: {', '.join(name for name in known if '.' not in name)}, or a submodule of these.",
        )
    start = module if wanted is None else module.get_submodule(wanted)
    lists = [
        (f"{wanted}.{name}" if wanted and name else wanted or name, one)
        for name, one in start.named_modules()
        if isinstance(one, nn.ModuleList | nn.Sequential) and len(one) > 1
    ]
    repeated = [(name, one) for name, one in lists if len({type(block) for block in one}) == 1]
    chosen = _largest(repeated, num_stages) or _largest(
        [(name, one) for name, one in lists if isinstance(one, nn.Sequential)], num_stages
    )
    if chosen is None:
        raise ModuleError(
            f"Expected a ModuleList or Sequential of repeated blocks in {wanted or type(module).__name__}, got none: a "
            "pipeline splits a model between blocks.",
            fix="put the repeated layers into an nn.ModuleList or nn.Sequential, or train without pp.",
        )
    return wanted if wanted is not None else chosen.partition(".")[0] if "." in chosen else "", chosen


def _check_compiled(module: nn.Module, blocks: str) -> None:
    """Refuse torch.compile but within blocks: what it makes runs to the end, past the calls that a stage replaces."""
    for name, one in module.named_modules():
        is_compiled = one._compiled_call_impl is not None or type(one).__name__ == "OptimizedModule"
        is_within = name.startswith(f"{blocks}." if blocks else "") and "." in name[len(blocks) + bool(blocks) :]
        if is_compiled and not is_within:
            raise ModuleError(
                f"Expected torch.compile within blocks only with pipeline stages, got it on {name or 'the module'}: a "
                "step of a stage leaves the module in the middle.",
                fix="compile submodules of blocks, such as their MLPs; or leave torch.compile out, or pp.",
            )


def _largest(lists: Sequence[tuple[str, nn.ModuleList | nn.Sequential]], num_stages: int) -> str | None:
    """Return the name of the list with the most parameters, among those with enough blocks if there are any."""
    enough = [(name, one) for name, one in lists if len(one) >= num_stages] or list(lists)
    sized = [(sum(p.numel() for p in one.parameters()), len(one), -number) for number, (_, one) in enumerate(enough)]
    return enough[sized.index(max(sized))][0] if enough else None


def _even_bounds(sizes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the bounds for which the largest stage is smallest; of equal ones, those with small last stages."""
    count = len(sizes)
    total = [0]
    for size in sizes:
        total.append(total[-1] + max(size, 1))  # blocks without parameters count, too
    # best[k][end]: the smallest largest stage, and the start of the last one, for blocks up to `end` in k + 1 stages.
    best = [[(total[end], 0) for end in range(count + 1)]]
    for stage in range(1, num_stages):
        row = [(total[-1] + 1, 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min((max(best[-1][start][0], total[end] - total[start]), -start) for start in range(stage, end))
            row[end] = (row[end][0], -row[end][1])
        best.append(row)
    bounds = [count]
    for stage in reversed(range(num_stages)):
        bounds.append(best[stage][bounds[-1]][1])
    return tuple(reversed(bounds))


def _named_bounds(split: Sequence[str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the bounds for split points; a name may leave out what precedes it."""
    bounds = [0]
    for point in split:
        found = [at for at, name in enumerate(names) if name == point or name.endswith(f".{point}")]
        if not found:
            raise ConfigError(
                f"Expected the name of a block as split point, got {point!r}: there are {_range(names)}.",
                fix="name the first block of each stage but the first.",
            )
        bounds.append(found[0])
    bounds.append(len(names))
    if any(left >= right for left, right in pairwise(bounds)):
        raise ConfigError(
            f"Expected split points in ascending order after {names[0]!r}, got {', '.join(split)}.",
            fix=f"name blocks after {names[0]!r}, each once and in order; the first stage always begins with that one.",
        )
    return tuple(bounds)


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
