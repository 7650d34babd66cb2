"""`LightningCLI` over `lw.cli.CLI`: its constructor, hooks and declarations that mean the same there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .absent import refuse
from .trainer import Trainer
from .type_names import LRSchedulerTypeTuple as LRSchedulerTypeTuple

__all__ = [
    "LightningArgumentParser",
    "LightningCLI",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]

# Any in this file: classes of users, their arguments, and what is made of them.

OptimizerCallable = Callable[[Any], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
ArgsType = Any


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's schedule, which knows the metric that it reads."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


class LightningArgumentParser:
    """What `add_arguments_to_parser` is given: declares further settings of the command line.

    Args:
        groups: Takes them.
    """

    def __init__(self, groups: Any) -> None:
        self._groups = groups

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> None:
        """Declare an object whose arguments stand below a key."""
        self._groups.add_class(nested_key, lightning_class, required=required)

    def add_class_arguments(self, theclass: Any, nested_key: str, **others: Any) -> None:
        """Declare an object whose arguments stand below a key."""
        self._groups.add_class(nested_key, theclass)

    def add_argument(self, *names: str, type: Any = str, default: Any = None, help: str = "", **others: Any) -> None:
        """Declare a value."""
        self._groups.add_value(names[-1].lstrip("-").replace("-", "_"), type, default, help)

    def set_defaults(self, *dictionaries: dict[str, Any], **values: Any) -> None:
        """Set values that files and the command line may change."""
        for dictionary in dictionaries:
            self._groups.set_defaults(dictionary)
        self._groups.set_defaults(values)

    def link_arguments(
        self, source: Any, target: str, compute_fn: Callable[..., Any] | None = None, apply_on: str = "parse"
    ) -> None:
        """Let one setting follow from others."""
        self._groups.link(source, target, compute_fn, after_build=apply_on == "instantiate")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(
            f"LightningArgumentParser.{name}", "declare it with add_lightning_class_args, add_argument or set_defaults"
        )


class SaveConfigCallback:
    """Named in `save_config_callback=`: here the configuration is in each checkpoint and beside the logs by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("SaveConfigCallback(...)", "pass save_config_callback=None for none; else it is saved by itself")


class LightningCLI:
    """A command line made of the signatures of a program's classes; see docs/cli.md for what can be typed.

    Args:
        model_class: The model's class; None: the user names one.
        datamodule_class: The data module's class; None: the user may name one.
        save_config_callback: None saves no configuration.
        save_config_kwargs: Accepted.
        trainer_class: The trainer's class.
        trainer_defaults: Arguments of the trainer that the user may change.
        seed_everything_default: The seed where none is given.
        parser_kwargs: Accepted.
        parser_class: Accepted.
        subclass_mode_model: Accepted: a subclass can always be named.
        subclass_mode_data: Accepted: a subclass can always be named.
        args: What was typed; None: `sys.argv`.
        run: False makes the objects only.
        auto_configure_optimizers: Accepted: an optimizer is taken from settings only where they name one.
        load_from_checkpoint_support: Accepted.
    """

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: Any = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: Any = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: Sequence[str] | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self._cli: Any = None
        _make_cli()(
            self,
            model_class,
            datamodule_class,
            trainer_class=trainer_class,
            trainer_defaults=trainer_defaults,
            seed_everything_default=seed_everything_default,
            save_config=save_config_callback is not None,
            run=run,
            args=args,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cli, name)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare further settings. Override it."""

    def before_instantiate_classes(self) -> None:
        """Do something when nothing has been made. Override it."""

    def after_instantiate_classes(self) -> None:
        """Do something when all objects are there. Override it."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return the trainer. May be overridden."""
        return self._cli.make_trainer(**kwargs)


def _make_cli() -> Any:
    """Return `CLI` with hooks that ask the LightningCLI it belongs to."""
    from ...cli.app import CLI

    class Forwarding(CLI):
        """Asks its owner."""

        def __init__(self, owner: LightningCLI, *args: Any, **kwargs: Any) -> None:
            self._owner = owner
            owner._cli = self
            super().__init__(*args, **kwargs)

        def add_arguments(self, groups: Any) -> None:
            self._owner.add_arguments_to_parser(LightningArgumentParser(groups))

        def before_instantiate_classes(self) -> None:
            self._owner.before_instantiate_classes()

        def after_instantiate_classes(self) -> None:
            self._owner.after_instantiate_classes()

        def instantiate_trainer(self, **arguments: Any) -> Any:
            return self._owner.instantiate_trainer(**arguments)

        def make_trainer(self, **arguments: Any) -> Any:
            return super().instantiate_trainer(**arguments)

    for verb in ("fit", "validate", "test", "predict"):
        for when in ("before", "after"):
            setattr(Forwarding, f"{when}_{verb}", _asks_owner(f"{when}_{verb}"))
    return Forwarding


def _asks_owner(name: str) -> Callable[[Any], None]:
    def call(cli: Any) -> None:
        own = getattr(type(cli._owner), name, None)
        if own is not None:
            own(cli._owner)

    return call


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Return an object of the class that `class_path` names, made of `init_args`.

    Args:
        args: Positional arguments: one, or a tuple of them.
        init: {"class_path": ..., "init_args": {...}}.
    """
    module, _, name = init["class_path"].rpartition(".")
    given = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*given, **init.get("init_args", {}))


def instantiate_module(module_class: type[Any], config: dict[str, Any]) -> Any:
    """Return an object of a class, made of the arguments in a configuration."""
    return module_class(**config.get("init_args", config))
