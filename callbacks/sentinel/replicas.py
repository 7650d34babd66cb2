"""Comparison of ranks that have the same weights: by one number on the devices, by tensor once that differs."""

from __future__ import annotations

import platform
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ...strategies.base import plain_name
from ...strategies.distributed.digest import digests, parts_of
from ...strategies.distributed.shards import is_sharded
from ...strategies.tree import leaves

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ...strategies import Strategy

KINDS = ("gradient", "optimizer state", "weight", "buffer")


class Item(NamedTuple):
    """A tensor that is compared.

    Attributes:
        kind: One of `KINDS`.
        owner: Name of the parameter or buffer.
        key: Key in the state of an optimizer; "" for other kinds.
    """

    kind: str
    owner: str
    key: str = ""


class ReplicaDifference(NamedTuple):
    """The first parameter or buffer that differs among ranks which have the same.

    Attributes:
        items: The tensors of it that differ.
        ranks: The ranks with other bits than most of them; all if there is no majority.
        others: The ranks that were compared with them.
        is_decided: Whether there is a majority.
        num_tensors: Number of tensors that differ.
    """

    items: list[Item]
    ranks: list[int]
    others: list[int]
    is_decided: bool
    num_tensors: int

    @property
    def kind(self) -> str:
        """The kind from which the others follow: a gradient changes states and weights, a state changes weights."""
        return min((one.kind for one in self.items), key=KINDS.index)


@dataclass(slots=True)
class ReplicaCheck:
    """One comparison.

    Attributes:
        step: `global_step` of the tensors.
        items: The tensors.
        digests: Their digests: shape (items,), on the device.
        before: Digests of the buffers, which come first, at the check before; None without one.
        finish: Waits for the exchange, without the host.
        differs: Whether ranks differ, on the host or on its way there; None before the exchange is complete.
        copied: CUDA event after that copy; None on other devices.
    """

    step: int
    items: list[Item]
    digests: Tensor
    before: Tensor | None
    finish: Callable[[], Tensor]
    differs: Tensor | None = None
    copied: torch.cuda.Event | None = None


class _Share(NamedTuple):
    """What one rank reports about a check that has found a difference."""

    group: tuple[int, int]
    digests: dict[Item, int]
    before: dict[Item, int]


@dataclass(slots=True)
class Replicas:
    """The ranks among which this one finds others with the same weights: those that read different data.

    Attributes:
        strategy: Communicates.
        first_alike: For each of them, by data rank, the first one with the same weights.
        group: Identifies this rank's weights among all ranks.
        ignored: Patterns of the names of tensors that are not compared.
        skipped: Tensors that were found to differ without a fault; the same on all ranks.
    """

    strategy: Strategy
    first_alike: list[int]
    group: tuple[int, int]
    ignored: Sequence[str]
    skipped: set[Item] = field(default_factory=set)

    @classmethod
    def of(cls, strategy: Strategy, module: nn.Module, ignored: Sequence[str]) -> Replicas:
        """Find them. On every rank: it communicates, and reads the device."""
        topology = strategy.topology
        own = torch.tensor([topology.global_rank, _place_of_shards(module)])
        rows = torch.zeros(topology.data_size, 2, dtype=torch.int64)
        rows[topology.data_rank] = own
        known = strategy.start_sum(rows.to(strategy.device))().tolist()
        places = [place for _, place in known]
        return cls(strategy, [places.index(one) for one in places], (known[0][0], int(own[1])), ignored)

    @property
    def are_several(self) -> bool:
        """Whether any of these ranks have the same weights, and must have: they reduce gradients at every step."""
        first = self.first_alike
        return len(set(first)) < len(first) and self.strategy.traits.reduces_every_step

    def begin(
        self,
        step: int,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        before: ReplicaCheck | None,
        *,
        with_gradients: bool,
    ) -> ReplicaCheck:
        """Make the digests and begin to exchange them; nothing waits. On every rank.

        Args:
            step: `global_step`.
            module: The user's module.
            optimizers: Its optimizers.
            before: The last check.
            with_gradients: Whether gradients are compared, too.
        """
        device = self.strategy.device
        found: list[tuple[Item, Tensor | float]] = [
            (item, one)
            for item, one in _tensors(module, optimizers, with_gradients=with_gradients)
            if item not in self.skipped and not any(fnmatch(item.owner, pattern) for pattern in self.ignored)
        ]
        here = [(item, parts) for item, one in found if isinstance(one, Tensor)
                for parts in [parts_of(one)] if all(part.device == device for part in parts)]  # fmt: skip
        items = [item for item, _ in here]
        known = set(items)
        on_host = [(item, one) for item, one in found if item not in known]
        numbers = digests([_on_host(one) for _, one in on_host], torch.device("cpu"))
        sums = torch.cat([digests([parts for _, parts in here], device), numbers.to(device, non_blocking=True)])
        items += [item for item, _ in on_host]
        num_buffers = sum(item.kind == "buffer" for item in items)
        last = None
        if before is not None and [one for one in before.items if one.kind == "buffer"] == items[:num_buffers]:
            last = before.digests[:num_buffers]
        topology = self.strategy.topology
        rows = torch.zeros(topology.data_size, dtype=torch.int64, device=device)
        rows[topology.data_rank] = _join(items, sums, last, num_buffers)
        return ReplicaCheck(step, items, sums, last, self.strategy.start_sum(rows))

    def compare(self, check: ReplicaCheck) -> None:
        """Compare on the device, and begin to copy the result to the host."""
        rows = check.finish()
        first = torch.tensor(self.first_alike).to(rows.device, non_blocking=True)
        differs = (rows != rows.index_select(0, first)).any()
        if rows.device.type != "cuda":
            check.differs = differs
            return
        check.differs = torch.empty((), dtype=torch.bool, pin_memory=True)
        check.differs.copy_(differs, non_blocking=True)
        check.copied = torch.cuda.Event()
        check.copied.record()

    def has_found(self, check: ReplicaCheck) -> bool:
        """Return whether any ranks differ; the same on all ranks. It waits until the result is copied."""
        if check.differs is None:
            self.compare(check)
        if check.copied is not None:
            check.copied.synchronize()
        differs = bool(check.differs)
        topology = self.strategy.topology
        if topology.data_size < topology.world_size:  # the others compare other parts of the model
            differs = self.strategy.reduce_boolean_decision(differs, all=False)
        return differs

    def explain(self, check: ReplicaCheck) -> ReplicaDifference | None:
        """Return the first difference that is a fault, the same on all ranks; None without one.

        Tensors whose difference is not a fault are not compared again. On every rank: it communicates, and reads the
        device.
        """
        values = dict(zip(check.items, check.digests.tolist(), strict=True))
        last = [] if check.before is None else check.before.tolist()
        everywhere = self.strategy.gather_objects(
            _Share(self.group, values, dict(zip(check.items, last, strict=False)))
        )
        groups: dict[tuple[int, int], dict[int, _Share]] = {}
        for rank, share in enumerate(everywhere):
            groups.setdefault(share.group, {})[rank] = share
        found = None
        for shares in groups.values():
            found = self._first_of(shares) or found
        return found

    def _first_of(self, shares: Mapping[int, _Share]) -> ReplicaDifference | None:
        """Return the first difference among ranks with the same weights; note what is not a fault."""
        wrong: list[tuple[Item, dict[int, int | None]]] = []
        for item in dict.fromkeys(item for share in shares.values() for item in share.digests):
            values = {rank: share.digests.get(item) for rank, share in shares.items()}
            if len(set(values.values())) == 1:
                continue
            if (item.kind == "buffer" and not _was_constant(item, shares)) or (
                item.kind == "optimizer state" and None in values.values()
            ):  # a buffer of each rank's data; an optimizer with its states on different ranks
                self.skipped.add(item)
            else:
                wrong.append((item, values))
        if not wrong:
            return None
        first, values = wrong[0]
        (common, number), *_ = Counter(values.values()).most_common(1)
        is_decided = 2 * number > len(values)
        ranks = [rank for rank, value in values.items() if value != common or not is_decided]
        return ReplicaDifference(
            [item for item, _ in wrong if item.owner == first.owner],
            ranks,
            [rank for rank in values if rank not in ranks],
            is_decided,
            len(wrong),
        )


def describe_place(strategy: Strategy) -> tuple[str, str]:
    """Return host and device of this process."""
    return platform.node(), str(strategy.device)


def _was_constant(item: Item, shares: Mapping[int, _Share]) -> bool:
    """Return whether the buffer had the same bits on all ranks at the check before, and has them on some rank still."""
    befores = {share.before.get(item) for share in shares.values()}
    return len(befores) == 1 and None not in befores and any(
        share.digests.get(item) in befores for share in shares.values()
    )  # fmt: skip


def _place_of_shards(module: nn.Module) -> int:
    """Return a number that ranks have in common if they hold the same shards of all parameters."""
    places = []
    for one in module.parameters():
        if is_sharded(one):
            place = one.device_mesh.get_coordinate()
            split = [axis for axis, placement in enumerate(one.placements) if not placement.is_replicate()]
            places.append([(axis, None if place is None else place[axis]) for axis in split])
    return zlib.crc32(repr(places).encode())


def _tensors(
    module: nn.Module, optimizers: Sequence[Optimizer], *, with_gradients: bool
) -> Iterator[tuple[Item, Tensor | float]]:
    """Give what ranks have in common: buffers, then for each parameter its gradient, states, and itself."""
    for name, one in module.named_buffers():
        yield Item("buffer", plain_name(name)), one
    names = {id(one): plain_name(name) for name, one in module.named_parameters()}
    parameters = list(module.parameters())
    states: dict[int, list[tuple[str, Tensor | float]]] = {}
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for index, one in enumerate(group["params"]):
                if id(one) not in names:
                    names[id(one)] = f"parameter {index} of group {group_number} of optimizer {number}"
                    parameters.append(one)
        for one, values in optimizer.state.items():
            states.setdefault(id(one), []).extend(
                (path.removeprefix("['").removesuffix("']"), value)
                for path, value in leaves(values)
                if isinstance(value, Tensor | float | int)
            )
    for one in parameters:
        name = names[id(one)]
        if with_gradients and one.grad is not None:
            yield Item("gradient", name), one.grad
        for key, value in states.get(id(one), ()):
            yield Item("optimizer state", name, key), value
        yield Item("weight", name), one


def _on_host(value: Tensor | float) -> list[Tensor]:
    """Return a number, or the parts of a tensor on another device, as tensors on the CPU."""
    if isinstance(value, Tensor):
        return [part.cpu() for part in parts_of(value)]
    return [torch.tensor(float(value), dtype=torch.float64)]


def _join(items: Sequence[Item], sums: Tensor, before: Tensor | None, num_buffers: int) -> Tensor:
    """Return one number for all digests; of buffers only those that have not changed: others may follow the data."""
    own = sums[:num_buffers]
    kept = own * (own == before) if before is not None else torch.zeros_like(own)
    together = torch.cat([kept, sums[num_buffers:]])
    weights = torch.arange(1, 2 * len(together) + 1, 2, device=sums.device)
    return (together * weights).sum() + zlib.crc32(repr(items).encode())
