"""The precisions of XLA under the name that users of Lightning know. Built by users: `plugins=XLAPrecision(...)`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from ..errors import ConfigError, nearest
from ..protocols import Batch
from .base import Precision
from .half import HalfPrecision
from .mixed import MixedPrecision

_NAMES = ("32-true", "16-true", "bf16-true", "bf16-mixed")


class XLAPrecision(Precision):
    """The precision of the same name on an XLA device; nothing is read from or written to the environment.

    Args:
        precision: "32-true", "bf16-true", "bf16-mixed" (autocast), or "16-true", which TPUs do not have.

    Raises:
        ConfigError: Another name; "16-mixed" has a loss scale, which would be read at every step.
    """

    converts_output = False

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _NAMES:
            raise ConfigError(
                f"XLAPrecision was given precision={precision!r}{nearest(str(precision), _NAMES)}.",
                fix=f"pass one of {', '.join(_NAMES)}.",
            )
        inner: Precision
        if precision == "bf16-mixed":
            inner = MixedPrecision(precision, "xla")
        elif precision == "32-true":
            inner = Precision()
        else:
            inner = HalfPrecision(precision)
        self._inner = inner
        self.precision = precision
        self.policy = inner.policy
        self.has_forward_context = inner.has_forward_context
        self.converts_input = inner.converts_input

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its parameters and buffers in this precision's dtypes, changed in place."""
        return self._inner.convert_module(module)

    def tensor_init_context(self) -> AbstractContextManager[object]:
        """Return a context in which tensors made without a dtype get this precision's."""
        return self._inner.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[object]:
        """Return a context in which parameters are made in this precision's dtype."""
        return self._inner.module_init_context()

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context in which the user's steps run."""
        return self._inner.forward_context()

    def convert_input(self, data: Batch) -> Batch:
        """Return the data with floating point tensors in the dtype that the forward pass takes."""
        return self._inner.convert_input(data)

    def convert_output(self, data: Batch) -> Batch:
        """Return the data with floating point tensors in float32."""
        return self._inner.convert_output(data)
