"""Float32 parameters with 16-bit products: autocast, and for float16 a loss scale."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..errors import CheckpointError, ConfigError, nearest
from ..protocols import AnyBatch, Batch, StateDict, StepOutput
from .base import Precision, PrecisionPolicy, cast_floats, evaluates_again

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class MixedPrecision(Precision):
    """Run steps under autocast; parameters, gradients and optimizer stay in float32.

    "16-mixed" is float16 on every device, also on the CPU. Its range is small, so the loss is scaled up before the
    backward pass; a step whose gradients overflow is skipped and the scale is halved.

    The scale changes only when the next loss is scaled, not right after a step: two optimizers that step after both
    backward passes divide by the same scale.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: Device type for autocast and scaler: "cpu", "cuda" or "mps".
        scaler: A `torch.amp.GradScaler` with other settings, for "16-mixed"; None makes one with torch's own.

    Attributes:
        caches_weights: Whether a weight is cast once per step (torch's `cache_enabled`), else at each use: then the
            gradients of several uses add up in float32.

    Raises:
        ConfigError: Another precision, or a scaler for bfloat16, which does not need one.
    """

    has_forward_context = True

    def __init__(
        self, precision: str = "bf16-mixed", device: str = "cpu", scaler: torch.amp.GradScaler | None = None
    ) -> None:
        dtype = _DTYPES.get(precision)
        if dtype is None:
            raise ConfigError(
                f"MixedPrecision was given precision={precision!r}{nearest(str(precision), _DTYPES)}.",
                fix='pass "16-mixed" or "bf16-mixed".',
            )
        if scaler is not None and precision == "bf16-mixed":
            raise ConfigError(
                "MixedPrecision was given precision='bf16-mixed' and a scaler, but bfloat16 has float32's range.",
                fix="leave the scaler out, or pass precision='16-mixed'.",
            )
        self.precision = precision
        self.device = device
        self.policy = PrecisionPolicy(compute_dtype=dtype)
        self.scaler = torch.amp.GradScaler(device) if precision == "16-mixed" and scaler is None else scaler
        self.has_scaler = self.scaler is not None
        self._dtype = dtype
        self.caches_weights = True
        # Ids of the optimizers that were unscaled since the scale last changed. While there is one, a change of the
        # scale is due.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self._has_stepped = False
        self._found_inf: Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        # Optimizers stay in their process, and weak references cannot be pickled.
        return {**self.__dict__, "_hooked": None, "_unscaled": set(), "_stepped": set(), "reduce_overflow": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _hooked=WeakSet())

    def forward_context(self) -> AbstractContextManager[object]:
        """Return a new autocast context."""
        return torch.autocast(self.device, dtype=self._dtype, cache_enabled=self.caches_weights)

    def convert_input(self, data: AnyBatch) -> AnyBatch:
        """Return the data unchanged; if `converts_input` is True, with floating point tensors in 16 bits."""
        return cast_floats(data, self._dtype) if self.converts_input else data

    def convert_output(self, data: Batch) -> Batch:
        """Cast floating point tensors to float32."""
        return cast_floats(data, torch.float32)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; shape, device and graph are kept."""
        if self.scaler is None:
            return loss
        if self._unscaled or self._stepped:
            self._update_scale()
        return self.scaler.scale(loss)

    @contextmanager
    def holding_scale(self) -> Iterator[None]:
        """Return a context for backward passes that are run again between unscaling and the step: the scale stays."""
        kept = self._unscaled, self._stepped
        self._unscaled, self._stepped = set(), set()
        try:
            yield
        finally:
            self._unscaled, self._stepped = kept

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, in place, and note on the device whether one is infinite or NaN.

        The second call for one step does nothing.

        Raises:
            ConfigError: The optimizer divides gradients itself, inside its step, so they cannot be clipped.
        """
        if self.scaler is None or id(optimizer) in self._unscaled or id(optimizer) in self._stepped:
            return
        if _takes_scaler(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} divides gradients by the loss scale inside its step (it takes a "
                f"grad_scaler argument), so they cannot be clipped or read before it.",
                fix="use another optimizer, precision='bf16-mixed', or no gradient clipping.",
            )
        if not _has_gradient(optimizer):
            return
        self.scaler.unscale_(optimizer)
        if self.reduce_overflow is not None:
            for found in self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                self.reduce_overflow(found)
        self._unscaled.add(id(optimizer))
        for part in getattr(optimizer, "parts", ()):  # of several: an overflow in one of them skips each
            self._unscaled.add(id(part))
            if self.scaler.is_enabled():
                self.scaler._per_optimizer_states[id(part)] = {**self.scaler._per_optimizer_states[id(optimizer)]}

    @torch.no_grad()
    def skip_together(self, optimizers: Sequence[Optimizer]) -> None:
        """Share the notes of overflows, on the device: clipping by one norm spreads them to all gradients."""
        if self.scaler is None:
            return
        states = [self.scaler._per_optimizer_states[id(one)] for one in optimizers if id(one) in self._unscaled]
        notes = [found for state in states for found in state["found_inf_per_device"].values()]
        if len(notes) > 1:
            worst = torch.stack([one.to(notes[0].device) for one in notes]).amax(dim=0)
            for one in notes:
                one.copy_(worst)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], StepOutput] | None = None) -> bool:
        """Step the optimizer unless a gradient is infinite or NaN.

        Args:
            optimizer: The optimizer; its gradients may already be unscaled.
            closure: With a loss scale, called once before the step, whose gradients are then unscaled.

        Returns:
            False if the step was skipped: parameters and optimizer state are as before, and the scale will be halved.

        Raises:
            ConfigError: The optimizer evaluates its closure itself, and there is a loss scale.
        """
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, closure)
        if optimizer not in self._hooked:
            self.check_optimizer(optimizer)
            # The scaler does not say whether it skipped; a hook on the optimizer does, without our own read.
            optimizer.register_step_post_hook(self._note_step)
            self._hooked.add(optimizer)
        if closure is not None:
            if evaluates_again(optimizer):
                raise self._cannot_evaluate(optimizer)
            closure()
        if id(optimizer) not in self._unscaled and not _has_gradient(optimizer):
            # The scaler refuses this; without a scale it is a step that does nothing.
            optimizer.step()
            return True
        if self.reduce_overflow is not None:
            self.unscale_gradients(optimizer)
        self._has_stepped = False
        self._found_inf = None
        scaler.step(optimizer)
        self._unscaled.discard(id(optimizer))
        self._stepped.add(id(optimizer))
        if self._found_inf is not None:
            # A fused optimizer looks at the flag on the device. Others made the scaler read it on the host in step();
            # here the same read is ours, because schedulers and counters must know.
            return not self._found_inf.item()
        return self._has_stepped

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise a ConfigError for LBFGS with a loss scale: it evaluates its closure several times in a step."""
        if self.scaler is not None and isinstance(optimizer, LBFGS):
            raise self._cannot_evaluate(optimizer)

    def _cannot_evaluate(self, optimizer: Optimizer) -> ConfigError:
        return ConfigError(
            f"{type(optimizer).__name__} cannot be used with precision={self.precision!r}: it evaluates the model "
            "within its step, and the loss scale holds for one backward pass before it.",
            fix="pass precision='bf16-mixed' or '32-true', use another optimizer, or set evaluates_closure = False on "
            "it if it only calls its closure once at the beginning.",
        )

    @property
    def scale(self) -> float | None:
        """The factor for the next loss; None without a scaler. Reads the device."""
        if self.scaler is None:
            return None
        self._update_scale()
        return float(self.scaler.get_scale())

    def state_dict(self) -> StateDict:
        """Return the scaler's scale, factors and counter as plain numbers; {} without a scaler. Reads the device."""
        if self.scaler is None:
            return {}
        self._update_scale()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore the scaler's state.

        Raises:
            CheckpointError: The checkpoint holds a loss scale and this precision has none, or the reverse.
        """
        mine = self.scaler is not None and self.scaler.is_enabled()
        if mine != bool(state_dict):
            raise CheckpointError(
                f"the checkpoint holds {'a' if state_dict else 'no'} loss scale, "
                f"but precision={self.precision!r} {'needs one' if mine else 'has none'}.",
                fix="resume with the precision of the run that wrote the checkpoint, or load its weights only.",
            )
        if self.scaler is not None and state_dict:
            self._update_scale()  # torch's scaler would refuse the next step of an optimizer whose last one is open
            self.scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Apply the pending change of the scale."""
        self._update_scale()

    def _update_scale(self) -> None:
        if self.scaler is not None and (self._unscaled or self._stepped):
            self.scaler.update()
            self._unscaled.clear()
            self._stepped.clear()

    def _note_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._has_stepped = True
        self._found_inf = getattr(optimizer, "found_inf", None)


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _takes_scaler(optimizer: Optimizer) -> bool:
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and "grad_scaler" in inspect.signature(optimizer.step).parameters
    )
