"""`ExpertWeights`: the weights of a layer's experts, and the products with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...distributed.shards import is_sharded
from .exchange import exchange, shared

EXPERT_AXIS = "ep"
"""Name of the mesh axis over whose ranks the experts are sharded."""

_ALIGNMENT_BYTES = 16
"""What grouped_mm (torch 2.13) wants of the size of a row."""


class ExpertWeights(nn.Module):
    """Weights of all experts of a layer; the rows that come to `forward` are sorted by expert.

    Args:
        dim: Width of a token.
        hidden: Width within an expert.
        num_experts: Number of experts.
        activation: Element-wise function between the products.
        gated: Whether there is `gate`.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        up: Shape (num_experts, dim, hidden).
        gate: Shape (num_experts, dim, hidden), or None.
        down: Shape (num_experts, hidden, dim).
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        activation: Callable[[Tensor], Tensor],
        gated: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Parameter(torch.empty(num_experts, dim, hidden, device=device, dtype=dtype))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if gated else None
        self.down = nn.Parameter(torch.empty(num_experts, hidden, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights as `nn.Linear` does: uniform in +-1 / sqrt(width of the input)."""
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the output of each row's expert: (n, dim), in the dtype of the products.

        Where the weights are sharded, on all ranks that share them: it communicates.

        Args:
            rows: Shape (n, dim), sorted by expert.
            counts: Shape (num_experts,), int64: number of rows for each expert.
        """
        rows = rows.to(self._compute_dtype(rows.device.type))
        if not is_sharded(self.up):
            return self._compute(rows, counts, lambda weight: weight)
        if EXPERT_AXIS not in (self.up.device_mesh.mesh_dim_names or ()):  # equal on the ranks of another axis
            return self._compute(rows, counts, _local)
        group = self.up.device_mesh[EXPERT_AXIS].get_group()

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            return self._compute(rows, counts, lambda weight: shared(_local(weight), group))

        return exchange(rows, counts, group, compute)

    def compute_without_rows(self) -> None:
        """Compute what other ranks send in a forward pass of theirs, where this rank has no tokens."""
        counts = torch.zeros(self.up.shape[0], dtype=torch.int64, device=self.up.device)
        self.forward(torch.empty(0, self.up.shape[1], device=self.up.device), counts)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        num_experts, dim, hidden = self.up.shape
        return f"num_experts={num_experts}, dim={dim}, hidden={hidden}, gated={self.gate is not None}"

    def _compute(self, rows: Tensor, counts: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs for rows of the experts whose weights `own` returns."""
        up, down = (own(weight).to(rows.dtype) for weight in (self.up, self.down))
        product = _grouped if _is_groupable(up) and _is_groupable(down) else _one_by_one
        hidden = product(rows, up, counts)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(product(rows, own(self.gate).to(rows.dtype), counts)) * hidden
        return product(hidden, down, counts)

    def _compute_dtype(self, device: str) -> torch.dtype:
        # The same on all ranks, whatever tokens they have: rows travel between them.
        is_cast = torch.is_autocast_enabled(device) and self.up.dtype != torch.float64
        return torch.get_autocast_dtype(device) if is_cast else self.up.dtype


def _local(weight: Tensor) -> Tensor:
    assert is_sharded(weight)
    result: Tensor = weight.to_local()
    return result


def _is_groupable(weight: Tensor) -> bool:
    """Return whether grouped_mm takes this weight: not where it has other dtypes, or rows that are not aligned."""
    dtypes = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}.get(weight.device.type, ())
    if weight.dtype not in dtypes or not hasattr(nn.functional, "grouped_mm"):  # torch 2.9 has none
        return False
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    return weight.shape[-1] * weight.element_size() % _ALIGNMENT_BYTES == 0


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return nn.functional.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))


def _one_by_one(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    # On a GPU .tolist() waits for the counts.
    parts = zip(rows.split(counts.tolist()), weights.unbind(), strict=True)
    return torch.cat([part @ weight for part, weight in parts])
