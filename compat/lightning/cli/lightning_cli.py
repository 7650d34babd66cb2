"""`LightningCLI` over `lw.cli.CLI`: its constructor, hooks and declarations that mean the same there."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ....callbacks import Callback
from ....errors import ConfigError
from ..imports.absent import refuse
from ..trainer import Trainer
from .argument_parser import LightningArgumentParser
from .argument_parser import LRSchedulerTypeTuple as LRSchedulerTypeTuple
from .argument_parser import ReduceLROnPlateau as ReduceLROnPlateau
from .namespace import Namespace, to_namespace
from .tokens import tokens_of

if TYPE_CHECKING:
    from ....cli.groups import Groups
    from ....trainer.module import Module
    from ....trainer.trainer import Trainer as BaseTrainer

__all__ = [
    "LightningCLI",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]

# Any in this file: classes of users, their arguments, and what is made of them.

OptimizerCallable = Callable[[Any], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
ArgsType = Sequence[str] | Mapping[str, Any] | None


class SaveConfigCallback(Callback):
    """The class for `save_config_callback=`. Loopwright writes the file; a subclass can process it further.

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
        config: object,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ConfigError(
                f"{type(self).__name__}(save_to_log_dir=False) does nothing: save_config is not overridden.",
                fix="override save_config, or pass save_config_callback=None to LightningCLI.",
            )

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        """Call `save_config` once, on rank zero."""
        if self.already_saved:
            return
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Do something with the configuration. Override it."""


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


def _laid_over(below: object, above: object) -> Any:
    """Return settings in which those above win, and what only those below have is there, too."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _laid_over(below[key], one) if key in below else one for key, one in above.items()}}


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
        parser_kwargs: `default_config_files`, `default_env` and `env_prefix`, for all subcommands or below their names;
            others go to `init_parser`.
        parser_class: LightningArgumentParser, or a subclass.
        subclass_mode_model: Accepted: a subclass can always be named.
        subclass_mode_data: Accepted: a subclass can always be named.
        args: What was typed, or settings as nested dicts; None: `sys.argv`.
        run: False makes the objects only.
        auto_configure_optimizers: Accepted: an optimizer is taken from settings only where they name one.
        load_from_checkpoint_support: Accepted.
    """

    def __init__(
        self,
        model_class: object = None,
        datamodule_class: object = None,
        save_config_callback: Callable[..., SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, object] | None = None,
        trainer_class: object = Trainer,
        trainer_defaults: dict[str, object] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: Callable[..., LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self._cli: Any = None
        self._parser_class = parser_class
        self._parser_kwargs = dict(parser_kwargs or {})
        self._args = args
        self._save_config = (save_config_callback, dict(save_config_kwargs or {}))
        self._flat = {
            key
            for key, fixed, names_subclass in (
                ("model", model_class, subclass_mode_model),
                ("data", datamodule_class, subclass_mode_data),
            )
            if fixed is not None and not names_subclass
        }
        _make_cli(self.subcommands())(
            self,
            model_class,
            datamodule_class,
            trainer_class=trainer_class,
            trainer_defaults=trainer_defaults,
            seed_everything_default=seed_everything_default,
            save_config=save_config_callback is not None,
            run=run,
            args=(),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._cli, name)

    @property
    def config(self) -> Namespace:
        """The configuration, with defaults; below the subcommand's name, where there is one. A copy."""
        own = to_namespace(_laid_over(self._cli.before_links, self._cli.config))
        return (
            own
            if self._cli.subcommand is None
            else Namespace({"subcommand": self._cli.subcommand, self._cli.subcommand: own})
        )

    @config.setter
    def config(self, config: object) -> None:
        refuse("LightningCLI.config = ...", "change what is typed: hand other args to parse_arguments")

    @property
    def config_init(self) -> Namespace:
        """The objects that were made of the configuration."""
        cli = self._cli
        made = {**cli.groups, "trainer": cli.trainer, "model": cli.model, "data": cli.datamodule}
        found = Namespace({key: one for key, one in made.items() if one is not None})
        return found if cli.subcommand is None else Namespace({"subcommand": cli.subcommand, cli.subcommand: found})

    def _get(self, config: Namespace, key: str, default: object = None) -> Any:
        """Return a setting of the subcommand."""
        own: Namespace = config.get(str(self._cli.subcommand), config)
        return own.get(key, default)

    @staticmethod
    def configure_optimizers(
        lightning_module: Any, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> object:
        """Return what `configure_optimizers` of the model gives where settings name an optimizer. May be overridden."""
        if lr_scheduler is None:
            return optimizer
        monitor = getattr(lr_scheduler, "monitor", None)
        entry = {"scheduler": lr_scheduler, **({} if monitor is None else {"monitor": monitor})}
        return {"optimizer": optimizer, "lr_scheduler": entry}

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, and the arguments of each that are not settings. May be overridden.

        Each is a method of the trainer, or of the LightningCLI, which then gets the arguments of the trainer's.
        """
        loaders = {"dataloaders"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            **{name: {"model", "datamodule", *loaders} for name in ("validate", "test", "predict")},
        }

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, object], subparser_kwargs: dict[str, object]
    ) -> None:
        """Make the parser and declare all settings. May be overridden.

        Args:
            add_subcommands: Whether there are subcommands.
            main_kwargs: Arguments of `init_parser`.
            subparser_kwargs: The same for subcommands, by their names.
        """
        self.parser = self.init_parser(**main_kwargs)
        self.parser.options.update(subparser_kwargs)
        self.add_default_arguments_to_parser(self.parser)
        self.add_core_arguments_to_parser(self.parser)
        self.add_arguments_to_parser(self.parser)
        self.link_optimizers_and_lr_schedulers(self.parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the command line; `config` is there afterwards. May be overridden, to read something else.

        Args:
            parser: The parser.
            args: What was typed, or settings as nested dicts; None: `sys.argv`.
        """
        self._cli.read(args)

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Declare further links. May be overridden: those of `link_to` are there already."""

    def init_parser(self, **kwargs: object) -> LightningArgumentParser:
        """Return what settings are declared with. May be overridden."""
        parser: LightningArgumentParser = self._parser_class(**kwargs)
        self._cli.hand_groups(parser)
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare further settings, before those of `add_arguments_to_parser`. May be overridden."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare further settings, before those of `add_arguments_to_parser`. May be overridden."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare further settings. Override it."""

    def before_instantiate_classes(self) -> None:
        """Do something when nothing has been made. Override it."""

    def after_instantiate_classes(self) -> None:
        """Do something when all objects are there. Override it."""

    def instantiate_classes(self) -> None:
        """Make trainer, model and data. May be overridden."""
        self._cli.make_objects()

    def instantiate_trainer(self, **kwargs: object) -> BaseTrainer:
        """Return the trainer. May be overridden."""
        made: BaseTrainer = self._cli.make_trainer(**kwargs)
        return made


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


def _make_cli(subcommands: dict[str, set[str]]) -> Any:
    """Return `CLI` with hooks that ask the LightningCLI it belongs to.

    Args:
        subcommands: Name to the arguments of its method that are not settings.
    """
    from ....cli.app import CLI
    from ....cli.names import import_object

    class Forwarding(CLI):
        """Asks its owner."""

        def __init__(self, owner: LightningCLI, *args: Any, **kwargs: Any) -> None:
            self._owner = owner
            self._runs: bool = kwargs["run"]
            owner._cli = self
            super().__init__(*args, **kwargs)

        def add_arguments(self, groups: Groups) -> None:
            self._groups = groups
            given = self._owner._parser_kwargs
            main = {key: value for key, value in given.items() if key not in subcommands}
            self._owner.setup_parser(self._runs, main, {key: given[key] for key in given if key in subcommands})
            self.parser: LightningArgumentParser = self._owner.parser

        def subcommands(self) -> dict[str, str]:
            known = super().subcommands()
            texts = {name: inspect.getdoc(getattr(self._trainer_class, name, None)) or "" for name in subcommands}
            return {name: known.get(name, text.partition("\n")[0]) for name, text in texts.items()}

        def _skipped(self, command: str) -> frozenset[str]:
            return frozenset(subcommands[command])

        def _verb(self, command: str) -> Callable[..., object]:
            own = getattr(type(self._owner), command, None)
            if own is None:
                return super()._verb(command)
            known = self._program.arguments.values()  # Lightning hands on defaults, too
            return functools.partial(
                own, self._owner, **{one.name: one.default for one in known if not one.is_required}
            )

        def _read(self, tokens: list[str], *, runs: bool) -> None:
            self._owner.parse_arguments(self.parser, self._owner._args)

        def read(self, args: ArgsType) -> None:
            commands = tuple(subcommands) if self._runs else ()
            super()._read(tokens_of(args, self.parser.options, commands), runs=self._runs)
            super()._plan()

        def _plan(self) -> None:
            """Nothing is left to do: it was planned when it was read."""

        def hand_groups(self, parser: LightningArgumentParser) -> None:
            parser._use(self._groups)

        def configure_optimizers(  # type: ignore[override]  # a method, which knows the owner
            self, module: Module, optimizer: Optimizer, lr_scheduler: Any = None
        ) -> object:
            own = self._owner.configure_optimizers
            if own is LightningCLI.configure_optimizers:
                return CLI.configure_optimizers(module, optimizer, lr_scheduler)
            return own(module, optimizer, None if lr_scheduler is None else lr_scheduler["scheduler"])

        def _completed(self) -> dict[str, Any]:
            found = super()._completed()
            for key in (*self._owner._flat, *self.parser.flat):
                node = found.get(key)
                if isinstance(node, dict) and "class_path" in node and self._is_given(key, node["class_path"]):
                    found[key] = node.get("init_args", {})
            self.before_links = copy.deepcopy(found)
            for target in self.parser.linked:  # they follow again when it is read
                _remove(found, target)
            # Lightning's Trainer does not take these: they are left out of what it may read, but where they were set.
            trainer = found.get("trainer", {})
            set_ones = self._tree.get("trainer") or {}
            found["trainer"] = {name: one for name, one in trainer.items() if name in set_ones or name not in _OWN}
            return found

        def _is_given(self, key: str, name: str) -> bool:
            if key in self.parser.flat:
                return import_object(name) is self.parser.flat[key]
            return self._is_fixed(name, self._bases[key][0])

        def _config_callback(self) -> list[Callback]:
            kind, arguments = self._owner._save_config
            own = super()._config_callback() if arguments.get("save_to_log_dir", True) else []
            for one in own:
                one.filename = arguments.get("config_filename", one.filename)
            if kind is None or kind is SaveConfigCallback:
                return own
            return [*own, kind(self.parser, to_namespace(self.config), **arguments)]

        def before_instantiate_classes(self) -> None:
            self._owner.before_instantiate_classes()

        def after_instantiate_classes(self) -> None:
            self._owner.after_instantiate_classes()

        def instantiate_trainer(self, **arguments: Any) -> BaseTrainer:
            return self._owner.instantiate_trainer(**arguments)

        def _build(self) -> None:
            self._owner.instantiate_classes()

        def make_objects(self) -> None:
            super()._build()

        def make_trainer(self, **arguments: object) -> BaseTrainer:
            return super().instantiate_trainer(**arguments)

    for verb in subcommands:
        for when in ("before", "after"):
            setattr(Forwarding, f"{when}_{verb}", _asks_owner(f"{when}_{verb}"))
    return Forwarding


def _asks_owner(name: str) -> Callable[[object], None]:
    def call(cli: Any) -> None:
        own = getattr(type(cli._owner), name, None)
        if own is not None:
            own(cli._owner)

    return call


def instantiate_class(args: object, init: Mapping[str, Any]) -> object:
    """Return an object of the class that `class_path` names, made of `init_args`.

    Args:
        args: Positional arguments: one, or a tuple of them.
        init: {"class_path": ..., "init_args": {...}}.
    """
    module, _, name = init["class_path"].rpartition(".")
    given = args if isinstance(args, tuple) else (args,)
    return getattr(import_module(module), name)(*given, **init.get("init_args", {}))


def instantiate_module(class_type: type[object], config: Mapping[str, Any]) -> object:
    """Return an object of a class, made of the arguments in a configuration."""
    return class_type(**config.get("init_args", config))
