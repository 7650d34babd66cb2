"""`Interception`: sends a model's calls of `F.scaled_dot_product_attention` to attention over all parts.

It is a mode of torch (`TorchFunctionMode`) that lasts for a step: the model's own code is not changed, and a function
that was imported by name is seen as well. Attention that a model computes by matrix products, in its own kernels or by
`flex_attention` cannot be seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....errors import ModuleError
from ....protocols import AnyFunction, AnyOutput, Args, Kwargs

# Any in this file: arguments and results of torch's functions.

_LOSSES = (F.cross_entropy, F.nll_loss)
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class Interception(TorchFunctionMode):
    """Active during a step; changes attention only while the model runs (`is_inside`).

    Args:
        attention: Computes attention of this rank's part; takes what `F.scaled_dot_product_attention` does.
        size: Number of parts.

    Attributes:
        is_inside: Whether the model runs on a part of the sequence.
        count: Calls of attention since `begin_call`.
        observe: Called with queries, keys and values of each call of attention, also outside; None: nothing.
        local_tokens: With a split batch, (rows, length of the part): losses are compared with it. None: not.
    """

    def __init__(self, attention: Callable[..., Tensor], size: int) -> None:
        super().__init__()
        self._attention = attention
        self._size = size
        self.is_inside = False
        self.count = 0
        self.observe: Callable[[Sequence[Tensor]], None] | None = None
        self.local_tokens: tuple[int, int] | None = None
        self._depth = 0
        self._is_in_engine = False

    def __enter__(self) -> Interception:
        # Steps of a pipeline run within a window, whose backward passes it is active in: twice on torch's stack, it
        # would replace what replaces attention.
        self._depth += 1
        if self._depth == 1:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: AnyFunction, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run a function of torch, or what replaces it. torch calls this with the mode switched off."""
        kwargs = {} if kwargs is None else kwargs
        if func in _BACKWARD:
            with self._in_engine():
                return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            if self.observe is not None:
                self.observe([*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3])
            if self.is_inside:
                self.count += 1
                return self._attention(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            if self.is_inside:
                raise _multi_head(self._size)
        elif self.local_tokens is not None and func in _LOSSES:
            self._check_loss(args, kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        """Return a context in which torch's engine runs with the mode on, for activations that are computed again.

        torch (2.9 to 2.13) takes a backward pass for a function that a mode may replace, and so switches it off.
        """
        if self._is_in_engine:  # a backward pass within one, as of torch's reentrant checkpoint
            yield
            return
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # it is private

        def run_with_mode(*args: Any, **kwargs: Any) -> AnyOutput:
            super(Interception, self).__enter__()  # type: ignore[no-untyped-call]
            try:
                return run(*args, **kwargs)
            finally:
                super(Interception, self).__exit__(None, None, None)  # type: ignore[no-untyped-call]

        torch.autograd._engine_run_backward = run_with_mode  # type: ignore[attr-defined]
        self._is_in_engine = True
        try:
            yield
        finally:
            self._is_in_engine = False
            torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]

    @contextmanager
    def inside(self, is_inside: bool = True) -> Iterator[None]:
        """Return a context in which attention is over all parts, or in which it is not."""
        before, self.is_inside = self.is_inside, is_inside
        try:
            yield
        finally:
            self.is_inside = before

    def _check_loss(self, args: Args, kwargs: Kwargs) -> None:
        """Refuse targets that were shifted by slicing a part: the token at each cut would be lost."""
        assert self.local_tokens is not None
        rows, length = self.local_tokens
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if isinstance(target, Tensor) and target.shape.numel() == rows * (length - 1):
            raise ModuleError(
                f"Expected a loss over the {length} positions of each part with Context(batch=...), got one over "
                f"{length - 1}: labels that are shifted in the step lose a token at each of the {self._size - 1} cuts.",
                fix="shift the labels in the data set, before the batch is split; or pass Context(inputs=...), with "
                "which the step sees full sequences.",
            )


def _multi_head(size: int) -> ModuleError:
    return ModuleError(
        f"Expected a model that calls F.scaled_dot_product_attention itself with cp={size}, got nn.MultiheadAttention "
        "(F.multi_head_attention_forward), whose keys cannot be gathered.",
        fix="compute queries, keys and values by nn.Linear and call F.scaled_dot_product_attention, or train with "
        "cp=1.",
    )
