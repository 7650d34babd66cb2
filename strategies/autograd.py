"""`AutogradContext`: what an autograd function keeps for its backward pass, as type checkers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd.function import FunctionCtx


class AutogradContext(FunctionCtx):
    """The first argument of an autograd function's `forward` and `backward`, which carries attributes between them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # Any: whatever `forward` has set
        def __setattr__(self, name: str, value: object) -> None: ...
