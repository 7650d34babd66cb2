"""`LightningArgumentParser`: jsonargparse's parser, with trainers, models, optimizers and schedules.

Configurations are written for Lightning: parameters that only Loopwright's classes have are in them where they are set.
"""

from __future__ import annotations

import inspect
import types
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, Union

from torch.optim import Optimizer

from ....callbacks import Callback
from ....cli.trainer_types import TRAINER_TYPES
from ....data import DataModule
from ....errors import ConfigError, MissingDependency
from ....lazy import is_core
from ....settings.names import ClassProblem, import_object, known_classes
from ....settings.parameters import evaluate_annotations, parameters_of
from ....trainer.module import Module
from ....trainer.trainer import Trainer as BaseTrainer
from ..imports.finder import VERSION, resolve
from ..imports.paths import PATHS
from ..trainer import Trainer
from .instantiation import LRSchedulerTypeTuple

try:
    from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, class_from_function
except ModuleNotFoundError as error:
    raise MissingDependency("jsonargparse", needed_for="LightningCLI", extra="lightning") from error

__all__ = ["ActionConfigFile", "LightningArgumentParser", "Namespace", "class_from_function"]

# Any in this file: classes of users, their arguments, and what is made of them.

Classes: TypeAlias = type | tuple[type, ...]

# Since version 4.49, jsonargparse has new names for two of its parameters, and warns about the old ones.
_HAS_INSTANTIATE = hasattr(ArgumentParser, "instantiate")
_OF_TRAINER = frozenset(
    (
        "accumulate_across_epochs", "activation_checkpointing", "compile", "fault_tolerance", "global_batch_size",
        "grad_accumulation_dtype", "matmul_precision", "max_samples", "max_tokens", "micro_shards", "nonfinite_loss",
        "offload_activations", "on_oom", "reproducible", "when_short",
    )
)  # fmt: skip
_OF_PARTS = frozenset(
    (
        "check_every_n_steps", "export_to_flame_graph", "keep_global_batch", "memory_timeline", "metric",
        "micro_batches", "on_trace_ready", "plain_interval_s", "precision", "ranks", "root_dir", "schedule",
        "stall_timeout", "start_method", "steps", "uneven", "variables", "x_axis",
    )
)  # fmt: skip


class LightningArgumentParser(ArgumentParser):
    """Declares settings, reads them, and makes objects of them.

    Args:
        args: Arguments of jsonargparse's parser.
        description: For --help.
        env_prefix: Prefix of environment variables that are settings.
        default_env: Whether variables are read.
        kwargs: Arguments of jsonargparse's parser.

    Attributes:
        callback_keys: Keys of callbacks, which the trainer gets.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={VERSION}"])
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self._optimizers: dict[str, tuple[Classes, str]] = {}
        self._lr_schedulers: dict[str, tuple[Classes, str]] = {}

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Declare a trainer, model, data module or callback, whose arguments stand below a key.

        Args:
            lightning_class: Its class, or a function that returns one.
            nested_key: The key.
            subclass_mode: Whether the user names the class.
            required: Whether one must be named then.
        """
        made = lightning_class
        if not inspect.isclass(made) and callable(made):
            made = class_from_function(made)
        if not inspect.isclass(made) or not issubclass(made, BaseTrainer | Module | DataModule | Callback):
            raise ConfigError(
                f"Expected a Trainer, LightningModule, LightningDataModule or Callback for {nested_key!r}, or a "
                f"function that is annotated to return one, got {lightning_class!r}.",
                fix="declare other classes with add_class_arguments.",
            )
        if issubclass(made, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(made, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        is_made = not issubclass(made, BaseTrainer)
        added: list[str] = self.add_class_arguments(
            made, nested_key, fail_untyped=False, instantiate=is_made, sub_configs=True
        )
        return added

    def add_optimizer_args(
        self, optimizer_class: Classes = (Optimizer,), nested_key: str = "optimizer", link_to: str = "AUTOMATIC"
    ) -> None:
        """Declare an optimizer; one class need not be named.

        Args:
            optimizer_class: The class, or a tuple of those that may be named.
            nested_key: The key.
            link_to: A parameter of the model, as "model.optimizer_init", that gets class_path and init_args of the
                optimizer; "AUTOMATIC" makes it the model's.
        """
        self._lw_add_partial(optimizer_class, nested_key, "params")
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Classes = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Declare a schedule; one class need not be named. Arguments as for `add_optimizer_args`."""
        self._lw_add_partial(lr_scheduler_class, nested_key, "optimizer")
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _lw_add_partial(self, given: Classes, key: str, first: str) -> None:
        if isinstance(given, tuple):
            self.add_subclass_arguments(given, key, instantiate=False, fail_untyped=False, skip={first})
        else:
            self.add_class_arguments(given, key, instantiate=False, fail_untyped=False, skip={first}, sub_configs=True)

    def instantiate_classes(self, cfg: Namespace, **options: Any) -> Namespace:
        """Return a configuration with objects in place of their settings."""
        made: Namespace = (super().instantiate if _HAS_INSTANTIATE else super().instantiate_classes)(cfg, **options)
        return made

    def dump(self, cfg: Namespace, *args: Any, **options: Any) -> str:
        """Return a configuration as YAML; arguments as for jsonargparse's parser."""
        if _HAS_INSTANTIATE and "skip_none" in options:
            options["skip_unset"] = options.pop("skip_none")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"[\s\S]*does not round-trip")  # YAML has no tuples
            text: str = super().dump(_for_lightning(cfg.clone()), *args, **options)
        return text


def _for_lightning(config: Namespace) -> Namespace:
    """Remove, in place, settings at their defaults that Lightning's classes do not have."""
    for value in [config, *(one for _, one in config.items(branches=True))]:
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, Namespace):
                _strip(node)
    return config


def _strip(node: Namespace) -> None:
    is_trainer = vars(node).keys() >= _OF_TRAINER
    names, arguments = (_OF_TRAINER, node) if is_trainer else (_OF_PARTS, node.get("init_args"))
    target = BaseTrainer if is_trainer else _core_class(node.get("class_path", ""))
    if target is not None and isinstance(arguments, Namespace):
        known = parameters_of(target).named
        for name in [name for name in vars(arguments) if name in names and name in known]:
            if arguments[name] == known[name].default:
                del arguments[name]


def _core_class(path: str) -> Callable[..., object] | None:
    try:
        found: Any = import_object(path)
    except ClassProblem:
        return None
    return found if is_core(found) else None


def _declare_types() -> None:
    """Let the signature of Trainer have types that can be read from text."""
    evaluate_annotations(Trainer.__init__)  # older versions of jsonargparse do not find the names
    signature = inspect.signature(Trainer.__init__)
    parameters = [
        one.replace(annotation=_nameable(TRAINER_TYPES[name]())) if name in TRAINER_TYPES else one
        for name, one in signature.parameters.items()
    ]
    vars(Trainer.__init__)["__signature__"] = signature.replace(parameters=parameters)


def _nameable(annotation: Any) -> Any:
    """Return an annotation in which the classes under Lightning's names replace Loopwright's."""
    inner = tuple(map(_nameable, typing.get_args(annotation)))
    if inner:
        kind = typing.get_origin(annotation)
        return Union[inner] if kind in (Union, types.UnionType) else kind[inner]  # noqa: UP007
    return _stand_in(annotation) if inspect.isclass(annotation) and is_core(annotation) else annotation


def _stand_in(base: type[Any]) -> type[Any]:
    """Return a class whose subclasses are those of another one that can be named without a path.

    jsonargparse knows imported classes only, and refuses a name of two classes, such as the CSVLogger of the core and
    the one of Lightning, which is derived from it.
    """

    class StandIn(ABC):
        @abstractmethod
        def is_made(self) -> None:
            """Not."""

        @classmethod
        def __subclasshook__(cls, other: type[Any]) -> bool:
            return base in other.__mro__

        @classmethod
        def __subclasses__(cls) -> list[type[Any]]:
            _import_parts()
            found = list(known_classes((base,)))
            hidden = {above for one in found for above in one.__mro__[1:] if above.__name__ == one.__name__}
            return [one for one in found if not any(one in below.__mro__ for below in hidden)]

    StandIn.__module__, StandIn.__name__, StandIn.__qualname__ = base.__module__, base.__name__, base.__name__
    return StandIn


@cache
def _import_parts() -> None:
    for place in ("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies"):
        for name in PATHS[f"pytorch.{place}"].split():
            resolve(f"pytorch.{place}", name)


_declare_types()
