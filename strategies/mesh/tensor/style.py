"""`Style`: how one module computes when its weight is split over ranks, and the hooks that run it so.

Each is a `ParallelStyle` of torch, so that it can also be given to `parallelize_module`. Between modules there are
plain tensors: this rank's part of them, or the full ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel.style import ParallelStyle

from ....errors import ConfigError
from ....protocols import AnyOutput, Args, Call, Kwargs
from ...construction.activation_checkpointing import replay_in
from .layouts import unviewed
from .parameters import Swapped, distribute, put_back, swap_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

# Any in this file: arguments and results of the user's modules.

_FRAMES = "_loopwright_frames"


@dataclass
class Frame:
    """State that a call of a module keeps from its beginning to its end."""

    swapped: Swapped = field(default_factory=list)
    mask: Tensor | None = None
    attributes: list[tuple[str, Any]] = field(default_factory=list)

    def restore(self, module: nn.Module) -> None:
        """Undo what the call replaced."""
        put_back(self.swapped)
        for name, value in self.attributes:
            setattr(module, name, value)
        self.attributes.clear()


class Style(ParallelStyle):
    """A way to compute one module on several ranks."""

    has_sharded_output = False
    """Whether the module's output is this rank's part, which another style has to take."""
    takes_sharded_input = False
    """Whether the module's input is this rank's part, as another style returns it."""

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placement of each of the module's own parameters."""
        return {name: Replicate() for name in module._parameters}

    def problem(self, module: nn.Module, tp: int) -> str | None:
        """Return why the module cannot have this style on `tp` ranks, as the end of a sentence; None if it can."""
        return None

    def enter(self, frame: Frame, module: nn.Module, args: Args, kwargs: Kwargs, mesh: DeviceMesh) -> Call:
        """Replace parameters for a call, and return its arguments as (args, kwargs)."""
        frame.swapped += swap_in([(module, name) for name in module._parameters], mesh)
        return args, kwargs

    def leave(self, frame: Frame, module: nn.Module, output: AnyOutput, mesh: DeviceMesh) -> AnyOutput:
        """Return the output of a call."""
        return output

    def install(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register the hooks that run the module in this style."""
        around = Around(self, mesh)
        module.register_forward_pre_hook(around.before, with_kwargs=True)
        module.register_forward_hook(around.after)
        module.register_forward_hook(around.finally_, always_call=True)
        replay_in(module, around.replay)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        problem = self.problem(module, device_mesh.size())
        if problem is not None:
            raise ConfigError(f"{type(module).__name__} {problem}.", fix="choose another style for it.")
        for name, placement in self.placements(module).items():
            parameter = module._parameters[name]
            if parameter is not None:
                module.register_parameter(name, distribute(parameter, device_mesh, placement))
        self.install(module, device_mesh)
        return module


class Around:
    """The hooks of a styled module. They hold nothing of it, so that a copy of the module has separate hooks."""

    def __init__(self, style: Style, mesh: DeviceMesh) -> None:
        self.style = style
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, object]) -> Around:
        return self  # process groups cannot be copied

    def before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Call:
        """Begin a call."""
        frame = Frame()
        module.__dict__.setdefault(_FRAMES, []).append(frame)
        return self.style.enter(frame, module, args, kwargs, self.mesh)

    def after(self, module: nn.Module, args: Args, output: AnyOutput) -> AnyOutput:
        """End a call with an output."""
        frame = module.__dict__[_FRAMES][-1]
        frame.restore(module)
        return map_output(self.style.leave(frame, module, output, self.mesh), lambda x: unviewed(x, module))

    def finally_(self, module: nn.Module, args: Args, output: AnyOutput) -> None:
        """End a call, also one that failed."""
        frames = module.__dict__.get(_FRAMES)
        if frames:
            frames.pop().restore(module)

    def replay(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
        """Return what lets the module's code run once more on this rank's part, within a call of the module."""
        return (lambda: self._entered(module)) if module.__dict__.get(_FRAMES) else None

    @contextmanager
    def _entered(self, module: nn.Module) -> Iterator[None]:
        frame = Frame()
        try:
            self.style.enter(frame, module, (), {}, self.mesh)  # the first pass has converted its arguments
            yield
        finally:
            frame.restore(module)


def map_first(args: Args, kwargs: Kwargs, function: Any) -> Call:
    """Return arguments of a module with a function applied to the first tensor among them."""
    for position, one in enumerate(args):
        if isinstance(one, Tensor):
            return (*args[:position], function(one), *args[position + 1 :]), kwargs
    for name, one in kwargs.items():
        if isinstance(one, Tensor):
            return args, {**kwargs, name: function(one)}
    return args, kwargs


def map_output(output: AnyOutput, function: Any) -> AnyOutput:
    """Return a module's output with a function applied to it, or to the first tensor in a tuple or mapping."""
    if isinstance(output, Tensor):
        return function(output)
    if isinstance(output, tuple):
        for position, one in enumerate(output):
            if isinstance(one, Tensor):
                items = (*output[:position], function(one), *output[position + 1 :])
                return type(output)(*items) if hasattr(output, "_fields") else items
    if isinstance(output, Mapping):
        for name, one in output.items():
            if isinstance(one, Tensor):
                output[name] = function(one)  # type: ignore[index]
                return output
    return output
