"""Attention over a sequence that is split over ranks: gathered keys, or heads in exchange for parts.

Both compute the result of `F.scaled_dot_product_attention` on the full sequence for this rank's queries, without a mask
or causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ....errors import ModuleError

if TYPE_CHECKING:
    from .parts import SequenceParts

_SEQUENCE, _HEADS = -2, -3


class Attention:
    """Replacement of `F.scaled_dot_product_attention` while a model runs on parts of a sequence.

    Args:
        parts: The ranks that share the sequence.
        method: "gather" or "ulysses".
    """

    def __init__(self, parts: SequenceParts, method: str) -> None:
        self._parts = parts
        self._compute = self._gathered if method == "gather" else self._exchanged

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention of this rank's queries over the full sequence; the arguments are torch's.

        Args:
            query: Shape (..., heads, length of the part, width).
            key: Likewise; as many heads, or fewer with `enable_gqa`.
            value: Likewise.
            attn_mask: None.
            dropout_p: Dropout of the weights. Ranks draw different masks.
            is_causal: Whether queries see no later keys of the full sequence.
            scale: Factor of the products; None: one over the root of the width.
            enable_gqa: Whether groups of queries' heads share a head of keys and values.

        Raises:
            ModuleError: There is a mask, lengths differ, or heads do not divide; names it.
        """
        if attn_mask is not None:
            raise _masked(self._parts.size, attn_mask)
        if query.shape[_SEQUENCE] != key.shape[_SEQUENCE]:
            raise ModuleError(
                f"Expected attention within one sequence with cp={self._parts.size}, got "
                f"{query.shape[_SEQUENCE]} queries and {key.shape[_SEQUENCE]} keys on each rank.",
                fix="train models with cross attention or cached keys with cp=1.",
            )
        return self._compute(query, key, value, is_causal, {"dropout_p": dropout_p, "scale": scale}, enable_gqa)

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, options: dict[str, float | None], gqa: bool
    ) -> Tensor:
        keys, values = self._parts.gather(key, _SEQUENCE), self._parts.gather(value, _SEQUENCE)
        mask: Tensor | None = None
        if is_causal:
            length = query.shape[_SEQUENCE]
            seen = (self._parts.rank + 1) * length  # no query of this rank sees later ones
            keys, values = keys.narrow(_SEQUENCE, 0, seen), values.narrow(_SEQUENCE, 0, seen)
            mask = _causal_mask(query, length, seen)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=gqa, **options)  # type: ignore[arg-type]

    def _exchanged(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, options: dict[str, float | None], gqa: bool
    ) -> Tensor:
        self._check_heads(query, key)
        query, key, value = (self._parts.exchange(one, _HEADS, _SEQUENCE) for one in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=gqa, **options)  # type: ignore[arg-type]
        return self._parts.exchange(output, _SEQUENCE, _HEADS)

    def _check_heads(self, query: Tensor, key: Tensor) -> None:
        size = self._parts.size
        counts = {"heads": query.shape[_HEADS], "heads of keys and values": key.shape[_HEADS]}
        wrong = [f"{count} {name}" for name, count in counts.items() if count % size]
        if wrong:
            both = min(counts.values())
            fitting = ", ".join(str(n) for n in range(1, both + 1) if not any(count % n for count in counts.values()))
            splits = self._parts.num_splits
            where = f" on each rank of tp={splits}" if splits > 1 else ""
            raise ModuleError(
                f"Expected numbers of heads that cp={size} divides with Context(method='ulysses'), got "
                f"{' and '.join(wrong)}{where} in the shape {tuple(query.shape)}.",
                fix=f"pass method='gather', or one of these as cp: {fitting}.",
            )


def _causal_mask(query: Tensor, length: int, seen: int) -> Tensor:
    """Return the mask for the last `length` of `seen` positions; on a GPU in a form that takes no memory."""
    if query.device.type == "cuda":
        return causal_lower_right(length, seen)
    positions = torch.arange(seen, device=query.device)
    return positions[seen - length :, None] >= positions


def _masked(size: int, mask: Tensor) -> ModuleError:
    return ModuleError(
        f"Expected attention without a mask, or with is_causal=True, with cp={size}, got cp={size} with an attention "
        f"mask of shape {tuple(mask.shape)}.",
        fix="leave the mask out (is_causal=True is right for full sequences without padding), or train with cp=1.",
    )
