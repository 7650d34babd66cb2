"""`LightningCLI` over `lw.cli.CLI`: its constructor, hooks and declarations that mean the same there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks import Callback
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

    Attributes:
        flat: Key to class, of an optimizer and a schedule whose class is given: arguments stand right below the key.
        linked: Settings that follow from others.
    """

    def __init__(self, groups: Any) -> None:
        self._groups = groups
        self.flat: dict[str, Any] = {}
        self.linked: list[str] = []

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
        sources = [_short(one) for one in ([source] if isinstance(source, str) else source)]
        self.linked.append(_short(target))
        self._groups.link(sources, _short(target), compute_fn, after_build=apply_on == "instantiate")

    def add_optimizer_args(
        self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = "AUTOMATIC"
    ) -> None:
        """Let settings name the optimizer; one class need not be named.

        Args:
            optimizer_class: The class, or a tuple of those that may be named.
            nested_key: "optimizer".
            link_to: "AUTOMATIC".
        """
        self._add_automatic("optimizer", optimizer_class, nested_key, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: Any = (LRScheduler,), nested_key: str = "lr_scheduler", link_to: str = "AUTOMATIC"
    ) -> None:
        """Let settings name the schedule; one class need not be named. Arguments as for `add_optimizer_args`."""
        self._add_automatic("lr_scheduler", lr_scheduler_class, nested_key, link_to)

    def _add_automatic(self, key: str, given: Any, nested_key: str, link_to: str) -> None:
        if nested_key != key or link_to != "AUTOMATIC":
            refuse(
                f"add_{key}_args(nested_key={nested_key!r}, link_to={link_to!r})",
                "let the module take an OptimizerCallable or LRSchedulerCallable, and call it in configure_optimizers",
            )
        if not isinstance(given, tuple):
            self.flat[key] = given
            self._groups.set_defaults({key: f"{given.__module__}.{given.__qualname__}"})

    def dump(self, config: Any, **options: Any) -> str:
        """Return a configuration as YAML."""
        from ...cli.yaml_file import write

        return write(_plain(config))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(
            f"LightningArgumentParser.{name}", "declare it with add_lightning_class_args, add_argument or set_defaults"
        )


class SaveConfigCallback(Callback):
    """Named in `save_config_callback=`. The file is written by Loopwright; a subclass says what else is done with it.

    Args:
        parser: `parser.dump(config)` is the YAML.
        config: The configuration of the subcommand.
        config_filename: Name of the file.
        overwrite: Accepted: the file in a folder is that of the run which began last.
        multifile: Accepted: one file is written.
        save_to_log_dir: False writes no file.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Call `save_config` once, on rank zero."""
        if self.already_saved:
            return
        self.already_saved = True
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Do something with the configuration. Override it."""


class Namespace(dict[str, Any]):
    """A configuration whose entries are attributes, too; `config.get("model.width")` looks deeper."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}; it has {', '.join(self)}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def get(self, key: str, default: Any = None) -> Any:
        """Return what stands at a dotted path."""
        node: Any = self
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain dicts."""
        found: dict[str, Any] = _plain(self)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _short(path: str) -> str:
    return path.replace(".init_args", "")


def _remove(tree: dict[str, Any], path: str) -> None:
    """Take out what stands at a dotted path, also where the path leads through a class's arguments."""
    *above, last = path.split(".")
    node: Any = tree
    for part in above:
        node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and "class_path" in node and part != "init_args":
            node = node.get("init_args") if "init_args" not in above else node
    if isinstance(node, dict):
        node.pop(last, None)


def _namespace(value: Any) -> Any:
    if isinstance(value, dict):
        return Namespace({key: _namespace(below) for key, below in value.items()})
    return [_namespace(one) for one in value] if isinstance(value, list) else value


class LightningCLI:
    """A command line made of the signatures of a program's classes; see docs/cli.md for what can be typed.

    Args:
        model_class: The model's class; None: the user names one.
        datamodule_class: The data module's class; None: the user may name one.
        save_config_callback: None saves no configuration.
        save_config_kwargs: Further arguments of the callback.
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
        self._save_config = (save_config_callback, dict(save_config_kwargs or {}))
        self._flat = {
            key
            for key, fixed, names_subclass in (
                ("model", model_class, subclass_mode_model),
                ("data", datamodule_class, subclass_mode_data),
            )
            if fixed is not None and not names_subclass
        }
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

    @property
    def config(self) -> Namespace:
        """The configuration, with defaults; below the subcommand's name, where there is one. A copy."""
        own = _namespace(self._cli.config)
        return (
            own
            if self._cli.subcommand is None
            else Namespace({"subcommand": self._cli.subcommand, self._cli.subcommand: own})
        )

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        """Return a setting of the subcommand."""
        own: Namespace = config.get(str(self._cli.subcommand), config)
        return own.get(key, default)

    @staticmethod
    def configure_optimizers(
        lightning_module: Any, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> Any:
        """Return what `configure_optimizers` of the model gives where settings name an optimizer. May be overridden."""
        if lr_scheduler is None:
            return optimizer
        monitor = getattr(lr_scheduler, "monitor", None)
        entry = {"scheduler": lr_scheduler, **({} if monitor is None else {"monitor": monitor})}
        return {"optimizer": optimizer, "lr_scheduler": entry}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare further settings. Override it."""

    def before_instantiate_classes(self) -> None:
        """Do something when nothing has been made. Override it."""

    def after_instantiate_classes(self) -> None:
        """Do something when all objects are there. Override it."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return the trainer. May be overridden."""
        return self._cli.make_trainer(**kwargs)


_LIGHTNINGS = """
accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps
max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm deterministic
benchmark inference_mode use_distributed_sampler profiler detect_anomaly barebones plugins sync_batchnorm
reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams model_registry
"""
# Parameters of Loopwright's Trainer that Lightning's has not.
_OWN = frozenset(inspect.signature(Trainer).parameters) - frozenset(_LIGHTNINGS.split())


def _make_cli() -> Any:
    """Return `CLI` with hooks that ask the LightningCLI it belongs to."""
    from ...cli.app import CLI
    from ...cli.names import import_object

    class Forwarding(CLI):
        """Asks its owner."""

        def __init__(self, owner: LightningCLI, *args: Any, **kwargs: Any) -> None:
            self._owner = owner
            owner._cli = self
            super().__init__(*args, **kwargs)

        def add_arguments(self, groups: Any) -> None:
            self._owner_parser = LightningArgumentParser(groups)
            self._owner.add_arguments_to_parser(self._owner_parser)

        def configure_optimizers(  # type: ignore[override]  # a method, which knows the owner
            self, module: Any, optimizer: Optimizer, lr_scheduler: Any = None
        ) -> Any:
            own = self._owner.configure_optimizers
            if own is LightningCLI.configure_optimizers:
                return CLI.configure_optimizers(module, optimizer, lr_scheduler)
            return own(module, optimizer, None if lr_scheduler is None else lr_scheduler["scheduler"])

        def _completed(self) -> dict[str, Any]:
            found = super()._completed()
            for key in (*self._owner._flat, *self._owner_parser.flat):
                node = found.get(key)
                if isinstance(node, dict) and "class_path" in node and self._is_given(key, node["class_path"]):
                    found[key] = node.get("init_args", {})
            for target in self._owner_parser.linked:  # they follow again when it is read
                _remove(found, target)
            # Lightning's Trainer does not take these: they are left out of what it may read, but where they were set.
            trainer = found.get("trainer", {})
            set_ones = self._tree.get("trainer") or {}
            found["trainer"] = {name: one for name, one in trainer.items() if name in set_ones or name not in _OWN}
            return found

        def _is_given(self, key: str, name: str) -> bool:
            if key in self._owner_parser.flat:
                return import_object(name) is self._owner_parser.flat[key]
            return self._is_fixed(name, self._bases[key][0])

        def _config_callback(self) -> list[Any]:
            kind, arguments = self._owner._save_config
            own = super()._config_callback() if arguments.get("save_to_log_dir", True) else []
            for one in own:
                one.filename = arguments.get("config_filename", one.filename)
            if kind is None or kind is SaveConfigCallback:
                return own
            return [*own, kind(self._owner_parser, _namespace(self.config), **arguments)]

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
