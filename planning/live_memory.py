"""`LiveMemory`: which storages are live at each moment of a run, of what kind they are, and what is sent."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .fake_world import belongs_to, group_size, really, watch_storages
from .formulas import ring_bytes
from .table import KINDS

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


# Any in this file: arguments and results of torch's operations.

# Part of an operation's name -> how its data travel in a ring, and whether the result is counted, or else the input.
_COLLECTIVES = {
    "allreduce": ("all_reduce", False),
    "all_reduce": ("all_reduce", False),
    "allgather": ("all_gather", True),
    "all_gather": ("all_gather", True),
    "reduce_scatter": ("reduce_scatter", False),
    "alltoall": ("reduce_scatter", False),
    "all_to_all": ("reduce_scatter", False),
    "send": ("send", False),
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_ATEN: Any = torch.ops.aten
_INDEXED = (
    _ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default,
)  # fmt: skip
_SHORT = 64
# They keep what the library of the device needs for the backward pass; without a device, it is empty.
_RECURRENT = {_ATEN.mkldnn_rnn_layer.default, _ATEN._cudnn_rnn.default, _ATEN.miopen_rnn.default}
_SMALL = 4096  # elements of a constant that is read at once: flags and counts of ranks


class LiveMemory(TorchDispatchMode):
    """Follows storages, of tensors with memory or without, while it is entered.

    A storage is live from the operation that made it until nothing refers to it. What kernels allocate for themselves
    is not seen.

    Args:
        fake: The mode of tensors without memory; None: tensors have memory.

    Attributes:
        phase: Kind of the storages that operations make now, until `hold` says otherwise.
        sent: Bytes that this rank sends in rings, by operation.
        has_assumed: Whether values of tensors without memory were read: numbers are then 1, conditions are false, and
            masks select all.
        lacks_workspace: Whether an operation keeps a workspace whose size only the device knows.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "activations"
        self.sent: dict[str, float] = defaultdict(float)
        self.has_assumed = self.lacks_workspace = False
        self._fake = fake
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}  # by address: number and bytes
        self._kinds: list[str] = []  # by number of a storage
        self._changes: list[tuple[int, int]] = []  # number of a storage, and by how many bytes it grew
        self._around = ExitStack()

    def __enter__(self) -> LiveMemory:
        self._around.enter_context(watch_storages(self._resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._around.close()

    # -- results -------------------------------------------------------------------------------------------------

    @property
    def moment(self) -> int:
        """The present moment, to compare with others."""
        return len(self._changes)

    def now(self) -> dict[str, int]:
        """Return the live bytes by kind."""
        return self.sums(self.moment)

    def peaks(self, moments: Sequence[int]) -> list[dict[str, int]]:
        """Return the live bytes by kind at the moment with the most of them, for each time between two moments."""
        totals = [0, *itertools.accumulate(change for _, change in self._changes)]
        return [
            self.sums(max(range(begin, end + 1), key=totals.__getitem__)) for begin, end in itertools.pairwise(moments)
        ]

    def sums(self, moment: int) -> dict[str, int]:
        """Return the live bytes by kind at a moment."""
        found = dict.fromkeys(KINDS, 0)
        for number, change in self._changes[:moment]:
            found[self._kinds[number]] += change
        return found

    def changes(self, begin: int, end: int) -> list[tuple[str, int]]:
        """Return the kinds of the storages that grew between two moments, and by how many bytes; fewer: released."""
        return [(self._kinds[number], change) for number, change in self._changes[begin:end]]

    # -- storages ------------------------------------------------------------------------------------------------

    def hold(self, tensors: Iterable[object], kind: str) -> None:
        """Let the storages of tensors be of a kind, from when they were made."""
        for tensor in tensors:
            for part in _parts(tensor):
                number = self._see(part)
                if number is not None:
                    self._kinds[number] = kind

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Let the storages that operations make within the context be of a kind."""
        before, self.phase = self.phase, kind
        try:
            yield
        finally:
            self.phase = before

    def _see(self, tensor: Tensor) -> int | None:
        """Take note of a tensor's storage and its size; return its number. None: it is not one of ours."""
        if not belongs_to(tensor, self._fake) or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            reference, number, old = self._known[key]
            if reference() is not None:
                if size != old:
                    self._known[key] = (reference, number, size)
                    self._changes.append((number, size - old))
                return number
        number = len(self._kinds)
        self._kinds.append(self.phase)

        def end(reference: weakref.ref[torch.UntypedStorage]) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is reference:
                del self._known[key]
                self._changes.append((known[1], -known[2]))

        self._known[key] = (weakref.ref(storage, end), number, size)
        self._changes.append((number, size))
        return number

    def _resized(self, tensor: Tensor) -> None:
        number = self._see(tensor)
        if number is not None:
            self._kinds[number] = "gathered"

    # -- operations ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and take note of what it made or sent."""
        if any(_is_wrapper(one) for one in types):
            return NotImplemented  # first it becomes operations on the parts
        kwargs = kwargs or {}
        if self._fake is not None and self._is_of_host(func, args, kwargs):
            return really(func, *args, **kwargs)
        assumed = None if self._fake is None else _assumed(func, args)
        if assumed is None:
            out = func(*args, **kwargs)
        else:
            out, self.has_assumed = assumed(), True
        self.lacks_workspace |= func in _RECURRENT
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        for one in made:
            self._see(one)
        if func.namespace in _NAMESPACES:
            self._note_collective(func.__name__, args, made)
        return out

    def _is_of_host(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operation is on constants that the program made of numbers, which it may read."""
        if func is torch.ops.aten.arange.default:  # numbers of micro-batches
            return kwargs.get("dtype") is None and isinstance(args[0], int) and args[0] <= _SHORT
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not tensors or any(one.is_meta or belongs_to(one, self._fake) for one in tensors):
            return False
        return func.namespace in _NAMESPACES or sum(one.numel() for one in tensors) <= _SMALL

    def _note_collective(self, name: str, args: tuple[Any, ...], made: list[Tensor]) -> None:
        for part, (operation, counts_result) in _COLLECTIVES.items():
            if part not in name:
                continue
            given = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            size = group_size(args)
            # In-place forms return or take the results among their arguments: the largest is that of all ranks.
            sizes = [one.numel() * one.element_size() for one in [*given, *made]]
            if size > 1 and sizes:
                data = max(sizes) if counts_result or operation == "reduce_scatter" else sizes[0]
                self.sent[operation] += data if operation == "send" else ring_bytes(data, size, operation)
            if operation in ("all_gather", "reduce_scatter"):
                self.hold(made if counts_result else given, "gathered")
            return


def _assumed(func: Any, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Return what runs an operation that reads values of tensors that have none; None: it reads none, or a size."""
    if func is _ATEN._local_scalar_dense.default:
        dtype = args[0].dtype
        return (lambda: dtype is not torch.bool and 1.0) if dtype is torch.bool or dtype.is_floating_point else None
    if func is _ATEN.nonzero.default:
        return lambda: args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
    if func is _ATEN.masked_select.default:
        return lambda: args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
    if func in _INDEXED and any(map(_is_mask, args[1])):
        places = [[one] if not _is_mask(one) else [_all_of(one)] * one.ndim for one in args[1]]
        return lambda: func(args[0], [*itertools.chain(*places)], *args[2:])
    return None


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _all_of(mask: Tensor) -> Tensor:
    return mask.new_empty(mask.numel(), dtype=torch.int64)


def _is_wrapper(kind: type) -> bool:
    """Return whether a class of tensors wraps others, as sharded ones do, and runs operations on these."""
    return kind.__name__ in ("DTensor", "AsyncCollectiveTensor") or (
        kind is not Tensor and hasattr(kind, "__tensor_flatten__") and kind.__name__ != "FakeTensor"
    )


def _parts(tensor: object) -> Iterator[Tensor]:
    """Yield the plain tensors in a tensor that may wrap others."""
    if not isinstance(tensor, Tensor):
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    inner: tuple[list[str], object] = tensor.__tensor_flatten__()
    for name in inner[0]:
        yield from _parts(getattr(tensor, name))
