"""`LightningArgumentParser`: what `add_arguments_to_parser` of a LightningCLI is given; over `lw.cli.Groups`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ....errors import ConfigError
from ..imports.absent import refuse
from .namespace import Namespace, to_plain

if TYPE_CHECKING:
    from ....cli.groups import Groups

__all__ = ["LRSchedulerTypeTuple", "LightningArgumentParser", "ReduceLROnPlateau", "short_path"]

# Any in this file: classes of users, their arguments, and what is made of them.

Classes: TypeAlias = type | tuple[type, ...]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's schedule, which knows the metric that it reads."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)


class LightningArgumentParser:
    """Declares further settings of the command line.

    Args:
        args: Accepted.
        kwargs: `default_config_files`, `default_env` and `env_prefix`; other settings of jsonargparse's parser are
            accepted.

    Attributes:
        options: The same, and those of subcommands below their names.
        flat: Key to class, of an optimizer and a schedule whose class is given: arguments stand right below the key.
        linked: Settings that follow from others.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._groups: Any = None  # Groups; None until LightningCLI hands them over
        self.options: dict[str, Any] = dict(kwargs)
        self.flat: dict[str, Callable[..., object]] = {}
        self.linked: list[str] = []

    def _use(self, groups: Groups) -> None:
        """Declare to these `lw.cli.Groups` from here on."""
        self._groups = groups

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> None:
        """Declare an object whose arguments stand below a key.

        Args:
            lightning_class: Its class; with subclass_mode, the base class of those that may be named.
            nested_key: The key.
            subclass_mode: Whether the user names the class.
            required: Whether it is made where no setting names it.
        """
        if subclass_mode:
            self.add_subclass_arguments(lightning_class, nested_key, required=required)
        else:
            self._groups.add_class(nested_key, lightning_class, required=required)

    def add_class_arguments(self, theclass: type, nested_key: str, **others: object) -> None:
        """Declare an object whose arguments stand below a key."""
        self._groups.add_class(nested_key, theclass)

    def add_subclass_arguments(
        self, baseclass: Classes, nested_key: str, *others: object, required: bool = False, **more: object
    ) -> None:
        """Declare an object whose class the user names.

        Args:
            baseclass: What it is one of; a tuple for several.
            nested_key: The key.
            others: Accepted.
            required: Whether one must be named.
            more: Accepted.
        """
        kind: Any = baseclass[0] if isinstance(baseclass, tuple) else baseclass
        for other in baseclass[1:] if isinstance(baseclass, tuple) else ():
            kind = kind | other
        if required:
            self._groups.add_value(nested_key, kind)
        else:
            self._groups.add_value(nested_key, kind | None, None)

    def add_function_arguments(self, function: Callable[..., object], nested_key: str, **others: object) -> None:
        """Declare the parameters of a function below a key: values, with which nothing is called."""

        @functools.wraps(function)
        def keep(*args: object, **arguments: object) -> Namespace:
            values = inspect.signature(function).bind_partial(*args, **arguments)
            values.apply_defaults()
            return Namespace(values.arguments)

        self._groups.add_class(nested_key, keep)
        self.flat[nested_key] = keep

    def add_argument(
        self, *names: str, type: object = str, default: object = None, help: str = "", **others: object
    ) -> None:
        """Declare a value."""
        self._groups.add_value(names[-1].lstrip("-").replace("-", "_"), type, default, help)

    def set_defaults(self, *dictionaries: dict[str, object], **values: object) -> None:
        """Set values that files and the command line may change."""
        for dictionary in dictionaries:
            self._groups.set_defaults(dictionary)
        self._groups.set_defaults(values)

    def link_arguments(
        self,
        source: str | Sequence[str],
        target: str,
        compute_fn: Callable[..., object] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Let one setting follow from others."""
        sources = [short_path(one) for one in ([source] if isinstance(source, str) else source)]
        self.linked.append(short_path(target))
        self._groups.link(sources, short_path(target), compute_fn, after_build=apply_on == "instantiate")

    def add_optimizer_args(
        self, optimizer_class: Classes = (Optimizer,), nested_key: str = "optimizer", link_to: str = "AUTOMATIC"
    ) -> None:
        """Let settings name an optimizer; one class need not be named.

        Args:
            optimizer_class: The class, or a tuple of those that may be named.
            nested_key: Where it stands.
            link_to: A parameter of the model, as "model.optimizer_init", that gets class_path and init_args of the
                optimizer; "AUTOMATIC" makes it the model's.
        """
        self._add_partial("optimizer", optimizer_class, nested_key, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: Classes = LRSchedulerTypeTuple, nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:  # fmt: skip
        """Let settings name a schedule; one class need not be named. Arguments as for `add_optimizer_args`."""
        self._add_partial("lr_scheduler", lr_scheduler_class, nested_key, link_to)

    def _add_partial(self, key: str, given: Classes, nested_key: str, link_to: str) -> None:
        fixed = None if isinstance(given, tuple) else given
        if nested_key == key and link_to == "AUTOMATIC":
            if fixed is not None:
                self.flat[key] = fixed
                self._groups.set_defaults({key: f"{fixed.__module__}.{fixed.__qualname__}"})
            return
        if nested_key == key:
            refuse(
                f"add_{key}_args(nested_key={key!r}, link_to={link_to!r})",
                f"give it another nested_key: what stands below {key} is the model's own",
            )
        base: type = Optimizer if key == "optimizer" else LRScheduler
        kind: Any = Callable[[Any], base]
        self._groups.add_value(nested_key, kind | None, None)
        if fixed is not None:
            self.flat[nested_key] = fixed
            self._groups.set_defaults({nested_key: f"{fixed.__module__}.{fixed.__qualname__}"})
        target = key if link_to == "AUTOMATIC" else short_path(link_to)
        self.linked.append(target)
        self._groups.link(nested_key, target, lambda node: _described(node, base))

    def dump(self, config: object, **options: object) -> str:
        """Return a configuration as YAML."""
        from ....cli.yaml_file import write

        return write(to_plain(config))

    def save(self, config: object, path: str | os.PathLike[str], *, overwrite: bool = False, **options: object) -> None:
        """Write a configuration to a YAML file.

        Args:
            config: The configuration.
            path: The file.
            overwrite: Whether it may be there already.
            options: Accepted: jsonargparse's own.

        Raises:
            ValueError: It is there already.
        """
        if not overwrite and os.path.exists(path):
            raise ConfigError(f"{os.fspath(path)} is there already.", fix="pass overwrite=True.")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.dump(config))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(
            f"LightningArgumentParser.{name}", "declare it with add_lightning_class_args, add_argument or set_defaults"
        )


def short_path(path: str) -> str:
    """Return a dotted key without `init_args`, which links of Loopwright find by themselves."""
    return path.replace(".init_args", "")


def _described(node: object, base: type) -> dict[str, Any] | None:
    """Return class_path and init_args of the settings below a key; None if they contain no class.

    Errors in them are reported when the value itself is planned.
    """
    from ....cli.names import ClassProblem, find_class

    given = {"class_path": node, "init_args": {}} if isinstance(node, str) else node
    if not isinstance(given, dict) or "class_path" not in given:
        return None
    try:
        chosen = find_class(given["class_path"], base)
    except ClassProblem:
        return None
    return {"class_path": f"{chosen.__module__}.{chosen.__qualname__}", "init_args": dict(given.get("init_args") or {})}
