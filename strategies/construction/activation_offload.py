"""`HostActivations`: what autograd keeps for the backward pass waits in host memory instead of the device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 2**20  # below it a copy takes longer than it saves
_AHEAD = 2  # copies back that are under way before the backward pass needs them

P = ParamSpec("P")
R = TypeVar("R")


class _Left(NamedTuple):
    """A tensor that stays on the device, with the version at which autograd kept it: as torch does without hooks."""

    tensor: Tensor
    version: int


class _Moved:
    """A tensor whose values are in host memory.

    Attributes:
        host: The copy; pinned where the device copies beside its computation.
        device: Where it is to come back.
        copied: Recorded when the copy to the host is done; None where copies are synchronous.
        before: What was moved before it, which the backward pass needs next.
        back: The tensor on the device, and the event of its copy, once it is under way.
    """

    __slots__ = ("back", "before", "copied", "device", "host")

    def __init__(
        self, host: Tensor, device: torch.device, copied: torch.cuda.Event | None, before: _Moved | None
    ) -> None:
        self.host, self.device, self.copied, self.before = host, device, copied, before
        self.back: tuple[Tensor, torch.cuda.Event | None] | None = None


class HostActivations:
    """Moves activations of some size to the host in the forward pass, and back in the backward pass.

    Values are copied, so that results are the same, bit for bit. On CUDA, copies run on a second stream beside
    the computation, from and to pinned memory, and the backward pass asks for the next ones ahead of their use.

    Args:
        module: Its parameters and buffers stay where they are.
        device: Whose tensors are moved.
        least_bytes: Size from which a tensor is moved.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, least_bytes: int = _LEAST_BYTES) -> None:
        self._module = module
        self._device = device
        self._least_bytes = least_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: set[int] = set()
        self._latest: _Moved | None = None

    def around(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, whose graph keeps its activations on the host."""

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            tensors = [*self._module.parameters(), *self._module.buffers()]
            self._kept = {one.untyped_storage().data_ptr() for one in tensors if one.device.type == self._device.type}
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return function(*args, **kwargs)
            finally:
                self._latest = None

        return run

    def _pack(self, tensor: Tensor) -> _Left | _Moved:
        is_here = tensor.device.type == self._device.type and type(tensor) is Tensor and tensor.layout is torch.strided
        if (
            not is_here
            or tensor.numel() * tensor.element_size() < self._least_bytes
            or tensor.untyped_storage().data_ptr() in self._kept
        ):
            return _Left(tensor, -1 if tensor.is_inference() else tensor._version)
        copied = None
        if self._stream is None:
            host = tensor.detach().to("cpu", copy=True)
        else:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                host.copy_(tensor.detach(), non_blocking=True)
                copied = self._stream.record_event()
            tensor.record_stream(self._stream)  # else its memory could be used again before it is copied
        self._latest = _Moved(host, tensor.device, copied, self._latest)
        return self._latest

    def _unpack(self, packed: _Left | _Moved) -> Tensor:
        if isinstance(packed, _Left):
            tensor, version = packed
            if version not in (-1, tensor._version):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                    f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )
            return tensor
        following: _Moved | None = packed
        for _ in range(1 + _AHEAD):
            if following is not None:
                self._fetch(following)
                following = following.before
        assert packed.back is not None
        tensor, event = packed.back
        packed.back = None  # a graph that is kept fetches it again
        if event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(event)
            tensor.record_stream(stream)
        return tensor

    def _fetch(self, moved: _Moved) -> None:
        """Begin the copy back, unless it is under way."""
        if moved.back is not None:
            return
        if self._stream is None:
            moved.back = (moved.host.to(moved.device, copy=True), None)
            return
        with torch.cuda.stream(self._stream):
            assert moved.copied is not None
            self._stream.wait_event(moved.copied)
            moved.back = (moved.host.to(moved.device, non_blocking=True), self._stream.record_event())
