"""Activation checkpointing: activations are recomputed in the backward pass instead of being kept.

A module's class is replaced by a subclass whose forward runs under torch's checkpoint. Parameters, names in state dicts
and hooks do not change. Tried and rejected: torch's composable `checkpoint`, which runs the user's hooks twice (a hook
that changes arguments then computes wrong gradients), and whose modules cannot be pickled.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as AnyNorm
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError, ModuleError
from .wrap_policy import check_policy, repeated_blocks, select_modules

# Any in this file: arguments and results of the user's forward.

_MARK = "_loopwright_checkpointed"
_REPLAYS = "_loopwright_replays"

Replay = Callable[[nn.Module], Callable[[], AbstractContextManager[object]] | None]
"""Called with a module in its first forward pass; returns what makes the context of the second, or None."""


def apply_activation_checkpointing(module: nn.Module, policy: object, *, units: Iterable[nn.Module] = ()) -> list[str]:
    """Enable activation checkpointing for submodules, in place, and return their names.

    Gradients are bitwise equal, including dropout; running statistics of norms are updated once. Without gradients,
    checkpointing has no effect. Submodules that are already checkpointed are not changed. Call it before or after
    fully_shard; it does not communicate.

    Args:
        module: The user's module; only its submodules are checkpointed.
        policy: True for `units` or, without units, for repeated blocks of any size, without single layers of torch. A
            fraction from 0.0 to 1.0 is the share of these that keep their activations, evenly spaced. Otherwise a
            class, classes or their names, a function module -> bool, or one of torch's policies.
        units: The modules that are sharded as separate units.

    Raises:
        ConfigError: No submodule is chosen; lists the classes of the submodules.
        ModuleError: A chosen module is compiled to TorchScript, or its forward was replaced on the object.
    """
    done = []
    for name, one in choose_checkpointed(module, policy, units=units):
        if not is_checkpointed(one):
            one.__class__ = _checkpointed_class(type(one))
            done.append(name)
    return done


def remove_activation_checkpointing(module: nn.Module) -> None:
    """Undo `apply_activation_checkpointing`, in place; modules that torch has sharded since stay as they are."""
    for one in module.modules():
        if _MARK in vars(type(one)):
            one.__class__ = type(one).__bases__[0]


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `apply_activation_checkpointing` was applied to this module."""
    return hasattr(type(module), _MARK)


def check_checkpointing(argument: str, policy: object) -> list[tuple[str, str]]:
    """Return the problems of such a policy that can be found without a module, as pairs (problem, fix)."""
    if policy is None or isinstance(policy, bool):
        return []
    if isinstance(policy, int | float):
        what = f"Expected {argument}= to be True, a fraction from 0.0 to 1.0, or a policy, got {policy!r}"
        return [] if isinstance(policy, float) and 0 <= policy <= 1 else [(what, f"pass {argument}=0.5, or True")]
    return check_policy(argument, policy)


def replay_in(module: nn.Module, replay: Replay) -> None:
    """Let a module's second forward pass run in a context, which does what hooks of the module do around the first.

    Hooks of a checkpointed module run around its first pass only; hooks of its submodules run around both.

    Args:
        module: Checkpointed, or not; now or later.
        replay: It must hold nothing of the module, so that a copy of the module has it too.
    """
    module.__dict__.setdefault(_REPLAYS, []).append(replay)


def choose_checkpointed(
    module: nn.Module, policy: object, *, units: Iterable[nn.Module] = ()
) -> list[tuple[str, nn.Module]]:
    """Return name and module of each submodule that `apply_activation_checkpointing` changes, and raise as it does."""
    chosen = _chosen(module, policy, units)
    wrong = [name for name, one in chosen if isinstance(one, torch.jit.ScriptModule) or "forward" in vars(one)]
    if wrong:
        raise ModuleError(
            f"Expected modules with a forward defined in their class for activation_checkpointing=, got "
            f"{', '.join(wrong)}: TorchScript, or forward was replaced on the object.",
            fix="define forward in the class, or remove these modules from activation_checkpointing=.",
        )
    return chosen


def _chosen(module: nn.Module, policy: object, units: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    if isinstance(policy, float):
        blocks = _chosen(module, True, units)
        kept = int(policy * len(blocks))
        # Evenly spaced: peak memory lies where most of the blocks before hold activations.
        is_kept = [(index + 1) * kept // len(blocks) > index * kept // len(blocks) for index in range(len(blocks))]
        return [block for block, keeps in zip(blocks, is_kept, strict=True) if not keeps]
    if policy is not True:
        return select_modules(module, policy, argument="activation_checkpointing")[0]
    wanted = {id(one) for one in units}
    chosen = [(name, one) for name, one in module.named_modules() if id(one) in wanted and one is not module]
    chosen = [(name, one) for name, one in chosen if not _is_simple(one)] or _repeated(module)
    if not chosen:
        names = sorted({type(one).__name__ for one in module.modules() if one is not module})
        raise ConfigError(
            f"Expected repeated blocks in {type(module).__name__} for activation_checkpointing=True, found none.",
            fix=f"pass the classes of modules to checkpoint; submodules: {', '.join(names) or 'none'}.",
        )
    return chosen


def _repeated(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return repeated blocks; these are instances of `nn.Sequential` if most weights are in them and in no other."""
    inner = [(name, one) for name, one in repeated_blocks(module) if not _is_simple(one)]
    outer = [(name, one) for name, one in repeated_blocks(module, opens_sequential=False) if not _is_simple(one)]
    return outer if _numel(outer) > 2 * _numel(inner) else inner


def _numel(blocks: Iterable[tuple[str, nn.Module]]) -> int:
    return sum(parameter.numel() for _, one in blocks for parameter in one.parameters())


def _is_simple(module: nn.Module) -> bool:
    """Return whether the module is a layer of torch that keeps only its input for the backward pass."""
    has_parts = any(True for _ in module.children())
    return not has_parts and type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.RNNBase)


# -- the class ---------------------------------------------------------------------------------------------------------


_made: dict[type[nn.Module], type[nn.Module]] = {}


def _checkpointed_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the checkpointed subclass of a module's class; the same one in every call."""
    if original not in _made:
        _made[original] = _make_class(original)
    return _made[original]


def _make_class(original: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return original.forward(self, *args, **kwargs)
        args = tuple(map(_without_cache, args))
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        return _run_twice(self, original.forward, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> object:
        # pickle and deepcopy look up classes by name, and would find the user's class.
        reduced: object = original.__reduce_ex__(self, protocol)
        if isinstance(reduced, tuple) and reduced[:1] == (copyreg.__newobj__,):  # type: ignore[attr-defined]
            return (_new, (original,), *reduced[2:])
        return reduced

    # A new instance, such as a slice of a Sequential, is not checkpointed.
    def new(cls: type[nn.Module], *args: object, **kwargs: object) -> nn.Module:
        return original(*args, **kwargs)

    functools.update_wrapper(forward, original.forward)
    namespace = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__new__": new,
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        _MARK: True,
    }
    return type(original.__name__, (original,), namespace)


def _without_cache(value: object) -> object:
    """Return None for a cache of keys and values, which models of transformers fill in training, too.

    The second forward pass would append to what the first one has written.

    Raises:
        ModuleError: It has keys and values of earlier tokens, such as a learned prefix.
    """
    if type(value).__module__ != "transformers.cache_utils":
        return value
    cache: Any = value  # Any: transformers may not be installed
    if cache.get_seq_length():
        raise ModuleError(
            "Expected a forward pass without keys and values of earlier tokens for activation checkpointing, got a "
            f"{type(value).__name__} that has {cache.get_seq_length()}.",
            fix="train without activation_checkpointing=, or pass the earlier tokens as inputs.",
        )
    return None


def _new(original: type[nn.Module]) -> nn.Module:
    module = original.__new__(original)
    module.__class__ = _checkpointed_class(original)
    return module


def _run_twice(
    module: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    # Passed by position: torch reads devices, whose random state it restores, only from positional arguments, and
    # interprets keywords such as `debug`.
    names = tuple(kwargs)
    num_args = len(args)
    again: _Again | None = None

    def run(*values: object) -> object:
        nonlocal again
        named = dict(zip(names, values[num_args:], strict=True))
        if torch.compiler.is_compiling():
            return forward(module, *values[:num_args], **named)
        if again is None:
            again = _Again(module)
            output = forward(module, *values[:num_args], **named)
            again.find_changed()
            return output
        with again:
            return forward(module, *values[:num_args], **named)

    if any(isinstance(one, Tensor) and one.device.type == "xla" for one in (*args, *kwargs.values())):
        from ..xla.activation_checkpointing import checkpoint_on_xla

        return checkpoint_on_xla(run, *args, *kwargs.values())
    return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True)


class _Again:
    """A context for a module's second forward pass: in the modes of the first, and in the contexts of `replay_in`.

    It discards changes to the module's buffers.

    Args:
        module: A module whose forward may change buffers, such as running statistics and counters. Its first pass is
            about to begin.
    """

    __slots__ = ("_before", "_changed", "_entered", "_kept", "_modes", "_replays", "_switched")

    def __init__(self, module: nn.Module) -> None:
        self._modes = [(one, one.training) for one in module.modules()]
        self._before = [
            (one, [(name, buffer, _version(buffer)) for name, buffer in one.named_buffers(recurse=False)])
            for one, _ in self._modes
            if one._buffers
        ]
        self._switched: list[nn.Module] = []
        self._changed: list[nn.Module] = []
        self._kept: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        replays: Iterable[Replay] = module.__dict__.get(_REPLAYS, ())
        self._replays = [make for replay in replays if (make := replay(module)) is not None]
        self._entered = ExitStack()

    def find_changed(self) -> None:
        """Record which modules changed their buffers since this object was created."""
        for one, buffers in self._before:
            # A batch norm changes its statistics without incrementing their version.
            is_norm = isinstance(one, AnyNorm) and one.training and one.track_running_stats
            if is_norm or any(one._buffers.get(name) is not old or _version(old) != was for name, old, was in buffers):
                self._changed.append(one)
        self._before = []

    def __enter__(self) -> None:
        for make in self._replays:
            self._entered.enter_context(make())
        self._switched = [one for one, was_training in self._modes if one.training is not was_training]
        for one in self._switched:
            one.training = not one.training
        self._kept = [(one, dict(one._buffers)) for one in self._changed]
        for one, buffers in self._kept:
            one._buffers.update({name: old if old is None else old.clone() for name, old in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for one, buffers in self._kept:
            one._buffers.clear()
            one._buffers.update(buffers)
        self._kept = []
        for one in self._switched:
            one.training = not one.training
        self._entered.close()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
