"""`SkipInit`: builds a module without initializing its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.overrides import TorchFunctionMode

from ..protocols import Kwargs


class SkipInit(TorchFunctionMode):
    """A context in which the functions of `torch.nn.init` leave their tensor as it is.

    Those that torch does not let a mode override (`trunc_normal_`, `orthogonal_`), and values that a module sets in
    other ways (buffers, `tensor.normal_()`), are set as always.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Return the tensor that an init function was given, or call any other function."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
