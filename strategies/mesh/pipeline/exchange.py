"""Tensors that go from one stage to another with their shape and dtype, for passes without a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import ModuleError
from ....protocols import AnyOutput, Tree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Any in this file: objects that are sent.

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_MOST_DIMS = 8


class Exchange:
    """Sends and receives tensors along a pipeline.

    Args:
        group: The ranks of the pipeline.
        device: Where this process computes.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._pending: list[tuple[dist.Work | None, Tensor]] = []

    def can_send(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be sent."""
        is_plain = tensor.layout is torch.strided and not hasattr(tensor, "to_local")
        return is_plain and tensor.dtype in _DTYPES and tensor.ndim <= _MOST_DIMS

    def send(self, tensor: Tensor, rank: int, note: int = 0) -> None:
        """Send a tensor without waiting for its receiver; see `settle`.

        Args:
            tensor: Of at most 8 dimensions.
            rank: The receiver's place in the pipeline.
            note: A number that `receive_with_note` returns.
        """
        if not self.can_send(tensor):
            raise ModuleError(
                f"Expected a dense tensor of at most {_MOST_DIMS} dimensions to send to another stage, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}.",
                fix="split the model between blocks that pass on their hidden state.",
            )
        padding = [0] * (_MOST_DIMS - tensor.ndim)
        header = torch.tensor(
            [note, _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *padding], device=self.device
        )
        content = tensor.detach().contiguous()
        if tensor.dtype is torch.bool:
            content = content.view(torch.uint8)
        for one in (header, content):
            self._pending.append((dist.isend(one, group=self.group, group_dst=rank), one))

    def receive(self, rank: int) -> Tensor:
        """Return what a rank of the pipeline sends; reads the device for its shape."""
        return self.receive_with_note(rank)[0]

    def receive_with_note(self, rank: int) -> tuple[Tensor, int]:
        """Return what a rank of the pipeline sends, and the number that it sends with it."""
        header = torch.empty(_MOST_DIMS + 3, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=rank)
        note, code, ndim, *shape = header.tolist()
        tensor = torch.empty(shape[:ndim], dtype=_DTYPES[code], device=self.device)
        content = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
        dist.recv(content, group=self.group, group_src=rank)
        return tensor, note

    def send_object(self, data: Tree, rank: int) -> None:
        """Send an object that can be pickled."""
        dist.send_object_list([data], group=self.group, group_dst=rank, device=self.device)

    def receive_object(self, rank: int) -> AnyOutput:
        """Return an object that a rank of the pipeline sends."""
        received: list[Any] = [None]
        dist.recv_object_list(received, group=self.group, group_src=rank, device=self.device)
        return received[0]

    def settle(self) -> None:
        """Wait until what was sent has left."""
        for work, _ in self._pending:
            if work is not None:
                work.wait()
        self._pending.clear()
