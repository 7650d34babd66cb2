"""Resolution of each Fabric argument: the user's value becomes an object, or a ConfigError is raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..accelerators import ACCELERATOR_REGISTRY, Accelerator
from ..errors import ConfigError, Problems, nearest
from ..precision import MixedPrecision, Precision
from ..strategies import STRATEGY_REGISTRY, Given, Strategy
from ..strategies.optional import MakesPrecision

if TYPE_CHECKING:
    from ..protocols import CheckpointPlugin, Cluster

PRECISIONS = ("32-true", "64-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "float8", "mxfp8")
OF_FLOAT8_LAYERS = ("float8", "mxfp8")
_PRECISION_ALIASES: dict[object, str] = {
    64: "64-true",
    32: "32-true",
    16: "16-mixed",
    "64": "64-true",
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "fp64": "64-true",
    "float64": "64-true",
    "fp32": "32-true",
    "float32": "32-true",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "bfloat16": "bf16-mixed",
}
_AMBIGUOUS = (16, "16", "bf16", "fp16", "float16", "bfloat16")
_PLANNED_PRECISIONS = ("transformer-engine", "transformer-engine-float16")


# -- plugins ---------------------------------------------------------------------------------------------------------


@dataclass
class Plugins:
    """The plugins by kind; None where no plugin of a kind was passed."""

    precision: Precision | None = None
    checkpoint_io: CheckpointPlugin | None = None
    cluster_environment: Cluster | None = None
    layer_sync: Any = None  # Any: see Parts


def sort_plugins(plugins: object) -> Plugins:
    """Return the plugins by kind. A ConfigError lists all objects that are not plugins, and all duplicates."""
    if plugins is None:
        return Plugins()
    given = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    result = Plugins()
    problems = Problems()
    for plugin in given:
        kind = _plugin_kind(plugin)
        if kind is None:
            problems.add(
                f"Expected plugins= to contain only plugins, got {plugin!r}.",
                fix="pass instances of Precision, CheckpointIO, ClusterEnvironment or LayerSync.",
            )
        elif getattr(result, kind) is not None:
            problems.add(
                f"Expected at most one plugin of each kind, got two for {kind}: {getattr(result, kind)!r} and "
                f"{plugin!r}.",
                fix="remove one of the two.",
            )
        else:
            setattr(result, kind, plugin)
    problems.refuse()
    return result


def _plugin_kind(plugin: object) -> str | None:
    if isinstance(plugin, type):
        return None
    from .cluster import ClusterEnvironment

    if isinstance(plugin, Precision):
        return "precision"
    if isinstance(plugin, ClusterEnvironment):
        return "cluster_environment"
    # Recognized by their methods: these classes are user-defined, or belong to packages that import this one.
    if all(callable(getattr(plugin, name, None)) for name in ("save_checkpoint", "load_checkpoint")):
        return "checkpoint_io"
    if all(callable(getattr(plugin, name, None)) for name in ("apply", "revert")):
        return "layer_sync"
    return None


NOTHING_GIVEN = Given()


# -- strategy --------------------------------------------------------------------------------------------------------


def choose_strategy(strategy: object) -> Strategy:
    """Return the given strategy, or a new one by its name. resolve.py handles "auto"."""
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise ConfigError(
            f"Expected strategy to be a name or a Strategy, got strategy={strategy!r}.",
            fix='pass "auto", a registered name, or an instance such as SingleDeviceStrategy("cpu").',
        )
    name = strategy.lower()
    if name.partition(":")[0] not in STRATEGY_REGISTRY:
        known = ["auto", *STRATEGY_REGISTRY.names()]
        near = nearest(name, known)
        others = "" if near else f"; registered names are {', '.join(known[1:])}"
        raise ConfigError(
            f"Expected the name of a registered strategy, got strategy={strategy!r}{near}.",
            fix=f"use one of auto, ddp, fsdp, deepspeed or mesh:fsdp=2,tp=2, or pass a Strategy{others}.",
        )
    try:
        return STRATEGY_REGISTRY.create(name)
    except TypeError as error:
        raise ConfigError(
            f"strategy={strategy!r} cannot be created by name: {error}.",
            fix=f"pass an instance: strategy={STRATEGY_REGISTRY.get(name.partition(':')[0]).__name__}(...).",
        ) from error


def check_conflicts(strategy: object, given: Given, accelerator: object, precision: object, plugged: Plugins) -> None:
    """Raise a ConfigError that lists everything passed twice, such as a precision in the strategy and in `precision=`.

    Args:
        strategy: The user's argument.
        given: The arguments of that strategy.
        accelerator: The user's argument.
        precision: The user's argument.
        plugged: The plugins.
    """
    accelerator = None if isinstance(accelerator, str) and accelerator.lower() == "auto" else accelerator
    problems = Problems()
    if precision is not None and plugged.precision is not None:
        problems.append(_choose_one(f"precision={precision!r}", f"plugins=[{plugged.precision!r}]"))
    if isinstance(strategy, Strategy):
        outside = (
            ("accelerator", "accelerator=", given.accelerator, accelerator),
            ("precision", "precision=", given.precision, precision),
            ("precision", "plugins=", given.precision, plugged.precision),
            ("checkpoint_io", "plugins=", given.checkpoint_io, plugged.checkpoint_io),
            ("cluster_environment", "plugins=", given.cluster_environment, plugged.cluster_environment),
        )
        problems += [
            _choose_one(f"the {name} of strategy={strategy!r}", f"{argument}{other!r}")
            for name, argument, own, other in outside
            if own is not None and other is not None and own is not other
        ]
    problems.refuse()


def _choose_one(one: str, other: str) -> ConfigError:
    return ConfigError(f"{one} and {other} set the same option.", fix="remove one of the two.")


def has_several_processes(strategy: Strategy | None) -> bool:
    """Return whether a strategy supports several processes, even if only one is requested.

    A user-defined strategy without a start method has one process. "dp" uses several devices in one process.
    """
    return strategy is not None and strategy.start_method is not None


# -- accelerator and devices -----------------------------------------------------------------------------------------


def choose_accelerator(accelerator: object, strategy: Strategy | None, given: Given) -> Accelerator:
    """Return the given accelerator, the one of the strategy's device, or the best one available."""
    if given.accelerator is not None:
        accelerator = given.accelerator
    device = given.device
    if isinstance(accelerator, Accelerator):
        chosen = accelerator
        _check_available(chosen.name(), chosen)
    elif not isinstance(accelerator, str):
        raise ConfigError(
            f"Expected accelerator to be a name or an Accelerator, got accelerator={accelerator!r}.",
            fix=f"use one of auto, gpu, {', '.join(ACCELERATOR_REGISTRY)}, or pass an Accelerator.",
        )
    elif accelerator.lower() == "auto":
        kind = None if strategy is None else strategy.traits.accelerator_kind
        if kind is not None:
            chosen = ACCELERATOR_REGISTRY.create(kind)
            _check_available(kind, chosen, asked=type(strategy).__name__)
        elif device is not None and device.type in ACCELERATOR_REGISTRY:
            chosen = ACCELERATOR_REGISTRY.create(device.type)
            _check_available(device.type, chosen)
        else:
            chosen = _best(lambda cls: cls.auto_priority >= 0) or ACCELERATOR_REGISTRY.create("cpu")
    elif accelerator.lower() == "gpu":
        gpu = _best(lambda cls: cls.is_gpu)
        if gpu is None:
            raise _not_available(accelerator)
        chosen = gpu
    else:
        chosen = _accelerator_by_name(accelerator)
    if device is not None and device.type != chosen.name():
        raise ConfigError(
            f"Expected the accelerator of the strategy's device {str(device)!r}, got accelerator={accelerator!r} "
            f"({chosen.name()}).",
            fix='pass accelerator="auto", or remove the device from the strategy.',
        )
    return chosen


def _accelerator_by_name(accelerator: str) -> Accelerator:
    name = accelerator.lower()
    if name in ACCELERATOR_REGISTRY:
        chosen = ACCELERATOR_REGISTRY.create(name)
        _check_available(accelerator, chosen)
        return chosen
    known = ["auto", "gpu", *ACCELERATOR_REGISTRY]
    raise ConfigError(
        f"Expected the name of a registered accelerator, got accelerator={accelerator!r}{nearest(name, known)}.",
        fix=f"use one of {', '.join(known)}, or pass an Accelerator.",
    )


def _best(accept: Callable[[type[Accelerator]], bool]) -> Accelerator | None:
    classes = [(ACCELERATOR_REGISTRY.get(name).auto_priority, name) for name in ACCELERATOR_REGISTRY]
    for _, name in sorted(classes, reverse=True):
        cls = ACCELERATOR_REGISTRY.get(name)
        if accept(cls) and cls.is_auto_choice():
            return ACCELERATOR_REGISTRY.create(name)
    return None


def _check_available(name: str, accelerator: Accelerator, *, asked: str | None = None) -> None:
    missing = accelerator.explain_missing(asked or f"accelerator={name!r}")
    if missing is not None:
        raise ConfigError(missing[0], fix=missing[1])
    if not accelerator.is_available():
        raise _not_available(name)


def _not_available(name: str) -> ConfigError:
    available = [name for name in ACCELERATOR_REGISTRY if ACCELERATOR_REGISTRY.get(name).is_available()]
    return ConfigError(
        f"Expected an available accelerator, got accelerator={name!r}, which this machine or this build of torch does "
        "not have.",
        fix=f"pass an available accelerator ({', '.join(available)}) or accelerator='auto'.",
    )


def check_num_nodes(num_nodes: object) -> int:
    """Return the number of nodes, 1 or more."""
    if isinstance(num_nodes, int) and not isinstance(num_nodes, bool) and num_nodes >= 1:
        return num_nodes
    raise ConfigError(
        f"Expected num_nodes to be an integer >= 1, got num_nodes={num_nodes!r}.",
        fix="pass num_nodes=1 for a single machine.",
    )


def is_auto(argument: object) -> bool:
    """Return whether an argument means automatic choice."""
    return isinstance(argument, str) and argument.strip().lower() == "auto"


def find_devices(
    devices: object,
    accelerator: Accelerator,
    strategy: Strategy | None,
    given: Given,
    interactive: bool,
    notes: list[str],
) -> list[torch.device]:
    """Return one device per process of this node.

    Args:
        devices: The user's argument.
        accelerator: Parses the argument and lists the available devices.
        strategy: Provides whether it supports several devices. None accepts any number.
        given: The arguments of the strategy, which may include devices.
        interactive: Whether this is a prompt or a notebook, where "auto" means one device.
        notes: Receives a line if "auto" leaves devices unused.
    """
    device = given.device
    if is_auto(devices) and device is not None:
        return [device]
    if is_auto(devices):
        if given.parallel_devices:
            return list(given.parallel_devices)
        count = accelerator.auto_device_count()
        uses_one = strategy is not None and not strategy.traits.has_several_devices
        if count > 1 and (interactive or uses_one):
            # A default must work everywhere: several devices must not make strategy="single_device" an error.
            notes.append(
                f"{count} {accelerator.name()} devices are visible, but only one is used. To silence this "
                "message, pass devices=1."
            )
            count = 1
        return accelerator.get_parallel_devices(accelerator.parse_devices(count))
    found = accelerator.get_parallel_devices(accelerator.parse_devices(devices))
    if given.parallel_devices:
        own = list(given.parallel_devices)
        is_number = isinstance(devices, int) or (isinstance(devices, str) and devices.strip().isdecimal())
        if len(own) != len(found) or (not is_number and own != found):
            raise ConfigError(
                f"Expected devices to be the strategy's parallel_devices, {', '.join(map(str, own))}, got "
                f"devices={devices!r}.",
                fix='pass devices="auto", or remove parallel_devices from the strategy.',
            )
        return own
    if device is not None and not isinstance(devices, int) and devices not in ("1", "-1") and device not in found:
        raise ConfigError(
            f"Expected devices to contain the strategy's device {str(device)!r}, got devices={devices!r}.",
            fix='pass devices="auto", or remove the device from the strategy.',
        )
    return [device] if device is not None and len(found) == 1 else found


# -- precision -------------------------------------------------------------------------------------------------------


def precision_name(precision: object, changed: list[str]) -> str:
    """Return the full name of a precision; a line is added to `changed` for an ambiguous name."""
    if precision is None:
        return "32-true"
    if isinstance(precision, str) and precision in PRECISIONS:
        return precision
    if isinstance(precision, (str, int)) and not isinstance(precision, bool) and precision in _PRECISION_ALIASES:
        name = _PRECISION_ALIASES[precision]
        if precision in _AMBIGUOUS:
            changed.append(
                f"precision={precision!r} is interpreted as {name!r}. To silence this warning, pass that name."
            )
        return name
    if isinstance(precision, str) and precision in _PLANNED_PRECISIONS:
        raise ConfigError(
            f"precision={precision!r} is not supported in this version.",
            fix=f"use one of {', '.join(PRECISIONS)}, or pass a Precision in plugins=.",
        )
    hint = "; pass instances in plugins=" if isinstance(precision, Precision) else ""
    raise ConfigError(
        f"Expected a supported precision, got precision={precision!r}{nearest(str(precision), PRECISIONS)}{hint}.",
        fix=f"use one of {', '.join(PRECISIONS)}.",
    )


def choose_precision(
    name: str, precision: object, device_type: str, strategy: Strategy | None, given: Precision | None
) -> Precision:
    """Return the precision given as a plugin or to the strategy, or a new one by its name for this type of device."""
    if precision is None and given is not None:
        if isinstance(given, MixedPrecision) and given.device != device_type:
            raise ConfigError(
                f"Expected a precision for device={device_type!r}, got {given!r}, whose autocast has no effect on that "
                "device.",
                fix=f"create it with device={device_type!r}, or pass precision={given.precision!r} instead.",
            )
        if isinstance(strategy, MakesPrecision) and given.precision in OF_FLOAT8_LAYERS:
            return strategy.make_precision(given.precision, device_type)  # which refuses it
        return given
    if isinstance(strategy, MakesPrecision):
        return strategy.make_precision(name, device_type)
    if name == "64-true":
        from ..precision import DoublePrecision

        return DoublePrecision()
    if name in ("16-true", "bf16-true"):
        from ..precision import HalfPrecision

        return HalfPrecision(name)
    if name in ("16-mixed", "bf16-mixed"):
        return MixedPrecision(name, device_type)
    if name in OF_FLOAT8_LAYERS:
        from ..precision import Float8Precision

        return Float8Precision(device_type, recipe="mxfp8" if name == "mxfp8" else "tensorwise")
    return Precision()
