"""`LightningCLI`: its constructor, hooks and steps, over `LightningArgumentParser`."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ....checkpoint.hparams import calls_resolver
from ....checkpoint.tools.formats import Reading, open_checkpoint
from ....data.hparams import given_to
from ....errors import ConfigError
from ....fabric.seed import seed_everything
from ....lazy import origin
from ....settings.make import check
from ....settings.names import imported_object
from ....trainer.module import Module
from ....trainer.trainer import Trainer as BaseTrainer
from ....yaml_file import parse
from ..module import LightningDataModule, LightningModule
from ..trainer import Trainer
from .argument_parser import ActionConfigFile, LightningArgumentParser, Namespace, class_from_function
from .instantiation import LRSchedulerTypeTuple, LRSchedulerTypeUnion, ReduceLROnPlateau, instantiate_class
from .save_config import SaveConfigCallback

__all__ = ["LightningCLI"]

# Any in this file: classes of users, their arguments, and what is made of them.

ArgsType = list[str] | dict[str, Any] | Namespace | None

_OBJECTS = ("model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")  # never settings
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


class LightningCLI:
    """A command line derived from the signatures of a program's classes; docs/cli.md describes its syntax.

    Args:
        model_class: The model's class, or a function that returns a model; None: the user names one.
        datamodule_class: The same for the data module; None: the user may name one.
        save_config_callback: None saves no configuration.
        save_config_kwargs: Further arguments of the callback.
        trainer_class: The trainer's class, or a function that returns a trainer.
        trainer_defaults: Arguments of the trainer that the user may change. Callbacks are always added.
        seed_everything_default: The seed where none is given; True is that of `seed_everything()`, False sets none.
        parser_kwargs: Arguments of `init_parser`, for all subcommands or below their names.
        parser_class: LightningArgumentParser, or a subclass.
        subclass_mode_model: Whether the user names a subclass of the model's class.
        subclass_mode_data: Whether the user names a subclass of the data module's class.
        args: The command line arguments, or settings as nested dicts; None: `sys.argv`.
        run: False makes the objects only.
        auto_configure_optimizers: Whether settings may name an optimizer and a schedule of the model.
        load_from_checkpoint_support: Whether `save_hyperparameters` keeps the settings that the model is made of, so
            that `load_from_checkpoint` can make its arguments again.

    Attributes:
        parser: The parser.
        config: The configuration, below the subcommand's name where there is one. It can be changed before objects
            are made.
        config_init: The same with objects in place of their settings.
        subcommand: Name of the subcommand; None with run=False.
        trainer: The trainer.
        model: The model.
        datamodule: The data module; None without one.
    """

    # Assigned by the methods that make them only: a subclass that overrides these may have properties of these names.
    parser: LightningArgumentParser
    config: Any
    config_init: Any
    subcommand: str | None
    trainer: Any
    model: Any
    datamodule: Any

    def __init__(
        self,
        model_class: Any = None,
        datamodule_class: Any = None,
        save_config_callback: Callable[..., SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: Any = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
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
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.model_class = model_class
        self._model_class = model_class or LightningModule
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.datamodule_class = datamodule_class
        self._datamodule_class = datamodule_class or LightningDataModule
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}

        main, own = self._setup_parser_kwargs(self.parser_kwargs)
        self.setup_parser(run, main, own)
        self.parse_arguments(self.parser, args)
        self._parse_ckpt_path()
        self.subcommand = self.config["subcommand"] if run else None
        self._set_seed()
        if load_from_checkpoint_support:
            self._add_instantiators()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # -- the parser ----------------------------------------------------------------------------------------------

    def _setup_parser_kwargs(self, parser_kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        names = self.subcommands()
        main = {key: value for key, value in parser_kwargs.items() if key not in names}
        return main, {key: value for key, value in parser_kwargs.items() if key in names}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Return the parser. May be overridden."""
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A configuration file, or its text.")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make the parser and declare all settings. May be overridden.

        Args:
            add_subcommands: Whether there are subcommands.
            main_kwargs: Arguments of `init_parser`.
            subparser_kwargs: The same for subcommands, by their names.
        """
        self.parser = self.init_parser(**main_kwargs)
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        commands = self.parser.add_subcommands()
        trainer = self.trainer_class if inspect.isclass(self.trainer_class) else class_from_function(self.trainer_class)
        for name in self.subcommands():
            text = (inspect.getdoc(getattr(trainer, name)) or "").partition("\n")[0]
            options = {"description": text, **subparser_kwargs.get(name, {})}
            self._subcommand_parsers[name] = self._prepare_subcommand_parser(trainer, name, **options)
            commands.add_subcommand(name, self._subcommand_parsers[name], help=text)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        known = inspect.signature(getattr(klass, subcommand)).parameters
        skipped = {*self.subcommands()[subcommand], *_OBJECTS} & set(known)
        added = parser.add_method_arguments(klass, subcommand, skip=skipped)
        self._subcommand_method_arguments[subcommand] = added
        return parser

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare `seed_everything`. May be overridden."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int | None,
            default=self.seed_everything_default,
            help="Seed of all random generators; true takes that of seed_everything(), false sets none.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare trainer, model and data. May be overridden."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": one for name, one in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self._datamodule_class,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Declare further settings. Override it."""

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Declare the links of `link_to`. May be overridden."""
        for key, (given, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if link_to == "AUTOMATIC":
                continue
            compute = _plain if isinstance(given, tuple) else functools.partial(_described, given)
            parser.link_arguments(key, link_to, compute_fn=compute)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands, and the arguments of each that are not settings. May be overridden.

        Each is a method of the trainer, or of the LightningCLI, which then gets the arguments of the trainer's.
        """
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            **{name: {"model", "dataloaders", "datamodule"} for name in ("validate", "test", "predict")},
        }

    # -- settings ------------------------------------------------------------------------------------------------

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read the command line; `config` is there afterwards. May be overridden, to read something else.

        Args:
            parser: The parser.
            args: The command line arguments, or settings as nested dicts or namespaces; None: `sys.argv`.
        """
        self.config = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Take the model's settings from the checkpoint that is named, if it has some."""
        command = self.config.get("subcommand")
        path = self.config.get(f"{command}.ckpt_path") if command else None
        if not isinstance(path, str | Path) or not Path(path).is_file():
            return
        hparams = _hparams_of(str(path))
        if not hparams:
            return
        resolvers = [key for key, value in hparams.items() if calls_resolver(str(value))]
        if resolvers and self.parser.parser_mode == "omegaconf":
            raise ConfigError(
                f"Expected values in {path}, got interpolations that call functions, in {', '.join(resolvers)}.",
                fix="pass ckpt_path to the Trainer in the program instead, and these arguments on the command line.",
            )
        name = hparams.pop("_class_path", None)
        typed = _plain(self.config.get(f"{command}.model")) or {}
        typed = typed.get("init_args", typed)
        # The file may come from someone else; settings that the user typed do not come from it.
        hparams = {key: value for key, value in hparams.items() if key not in typed or typed[key] != value}
        model = hparams if name is None else {"class_path": name, "dict_kwargs": hparams}
        try:
            check(self._model_class, hparams if name is None else {"_class_path": name, **hparams})
            with _without_imports(model):
                self.config = self.parser.parse_object({command: {"model": model}}, self.config)
        except (ConfigError, SystemExit) as error:
            sys.stderr.write(f"The hyperparameters in {path} do not fit the model.\n")
            self.parser.error(str(error)) if isinstance(error, ConfigError) else None
            raise

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """Return a setting of the subcommand."""
        own = config.get(str(self.subcommand), config)
        return own.get(key, default)

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False or seed is None:
            return
        chosen = seed_everything(None if seed is True else seed, workers=True, verbose=seed is not True)
        (self.config if self.subcommand is None else self.config[self.subcommand])["seed_everything"] = chosen

    # -- objects -------------------------------------------------------------------------------------------------

    def _add_instantiators(self) -> None:
        parser = self._parser(self.subcommand)
        for key, base in (("model", self._model_class), ("data", self._datamodule_class)):
            if inspect.isclass(base):  # a function's arguments are not those of the object
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # newer versions have it as an argument as well
                    parser.add_instantiator(functools.partial(self._lw_make, key), base)

    def _lw_make(
        self, key: str, made: type[Any], *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Return the model or data module, whose hyperparameters are its settings."""
        parser = self._parser(self.subcommand)
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        tree = parse(parser.dump(config, skip_link_targets=False, skip_none=False), "the configuration")
        for path, value in applied_instantiation_links.items():
            if path.startswith(f"{key}."):
                _put(tree, path.replace(".init_args", ""), value)
        kept = dict(tree.get(key) or {})
        if "class_path" in kept:
            kept = {"_class_path": kept["class_path"], **kept.get("init_args", {}), **kept.get("dict_kwargs", {})}
        with given_to(made, {**kept, "_instantiator": _INSTANTIATOR}):
            return made(*args, **kwargs)

    def before_instantiate_classes(self) -> None:
        """Hook before objects are created. Override it."""

    def instantiate_classes(self) -> None:
        """Make model, data and trainer. May be overridden."""
        self.config_init = self.parser.instantiate_classes(self.config)
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Hook after all objects are created. Override it."""

    def instantiate_trainer(self, **kwargs: Any) -> BaseTrainer:
        """Return a trainer of the settings. May be overridden.

        Args:
            kwargs: Arguments of the trainer that replace settings.
        """
        keys = self._parser(self.subcommand).callback_keys
        more = [one for key in keys if (one := self._get(self.config_init, key)) is not None]
        settings = self._get(self.config_init, "trainer", {})
        return self._instantiate_trainer({**_entries(settings), **kwargs}, more)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> BaseTrainer:
        if "callbacks" in config:
            found = [*_as_list(config["callbacks"]), *callbacks, *_as_list(self.trainer_defaults.get("callbacks"))]
            if self.save_config_callback is not None and not config.get("fast_dev_run", False):
                own = self.config.get(str(self.subcommand), self.config)
                parser = self._parser(self.subcommand)
                found.append(self.save_config_callback(parser, own, **self.save_config_kwargs))
            config["callbacks"] = found
        else:
            warnings.warn(
                f"{self.trainer_class.__qualname__} does not take callbacks: those of the command line are left out",
                stacklevel=2,
            )
        made: BaseTrainer = self.trainer_class(**config)
        return made

    @staticmethod
    def configure_optimizers(
        lightning_module: Any, optimizer: Optimizer, lr_scheduler: LRSchedulerTypeUnion | None = None
    ) -> Any:
        """Return the result of the model's `configure_optimizers` if settings name an optimizer. May be overridden.

        Args:
            lightning_module: The model.
            optimizer: The optimizer.
            lr_scheduler: The schedule; None without one.
        """
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            entry = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
            return {"optimizer": optimizer, "lr_scheduler": entry}
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Let the model's `configure_optimizers` return what settings name, if they name an optimizer."""
        parser = self._parser(subcommand)
        optimizers = _automatic(parser._optimizers)
        schedules = _automatic(parser._lr_schedulers)
        if not self.auto_configure_optimizers or not optimizers:
            return
        if len(optimizers) > 1 or len(schedules) > 1:
            raise ConfigError(
                "Expected at most one optimizer and one lr_scheduler with link_to='AUTOMATIC', got "
                f"{', '.join([*optimizers, *schedules])}.",
                fix="link them to arguments of the model, and make them in its configure_optimizers.",
            )
        optimizer = self._lw_init_of(optimizers[0], parser._optimizers)
        if not optimizer:
            return
        schedule = self._lw_init_of(schedules[0], parser._lr_schedulers) if schedules else None
        model = self.model
        if type(model).configure_optimizers is not Module.configure_optimizers:
            warnings.warn(
                f"configure_optimizers of {type(model).__name__} is replaced by that of {type(self).__name__}, since "
                "settings name an optimizer",
                stacklevel=2,
            )

        def configure_optimizers(module: Any) -> Any:
            # Made when it is called: a strategy may have replaced the parameters by then.
            made = instantiate_class(module.parameters(), optimizer)
            scheduler = None if not schedule else instantiate_class(made, schedule)
            return self.configure_optimizers(module, optimizer=made, lr_scheduler=scheduler)  # type: ignore[arg-type]

        functools.update_wrapper(configure_optimizers, Module.configure_optimizers)
        model.configure_optimizers = types.MethodType(configure_optimizers, model)

    def _lw_init_of(self, key: str, register: Mapping[str, tuple[Any, str]]) -> dict[str, Any] | None:
        """Return class_path and init_args of the optimizer or schedule at a key; None without one."""
        given = register[key][0]
        found = _plain(self._get(self.config_init, key))
        if isinstance(given, tuple):
            return found if found else None
        return _described(given, found)

    # -- the subcommand ------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        before, after = (getattr(self, f"{when}_{subcommand}", None) for when in ("before", "after"))
        if callable(before):
            before()
        verb = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        verb(**self._prepare_subcommand_kwargs(subcommand))
        if callable(after):
            after()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        known = self._subcommand_method_arguments[subcommand]
        made = {key: one for key, one in vars(self.config_init[subcommand]).items() if key in known}
        made["model"] = self.model
        if self.datamodule is not None:
            made["datamodule"] = self.datamodule
        return made


def _entries(settings: Any) -> dict[str, Any]:
    return dict(settings if isinstance(settings, Mapping) else vars(settings))


def _plain(config: Any) -> Any:
    return config.as_dict() if isinstance(config, Namespace) else config


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _automatic(register: Mapping[str, tuple[Any, str]]) -> list[str]:
    return [key for key, (_, link_to) in register.items() if link_to == "AUTOMATIC"]


def _described(target: type, arguments: Any = None) -> dict[str, Any]:
    return {"class_path": ".".join(origin(target)), "init_args": _plain(arguments) or {}}


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *above, last = path.split(".")
    node: Any = tree
    for part in above:
        node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and "class_path" in node:
            node = node["init_args"]
    if isinstance(node, dict):
        node[last] = value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


@contextmanager
def _without_imports(settings: dict[str, Any]) -> Iterator[None]:
    """Prevent imports of what settings from an unknown source name, while a parser reads them.

    Raises:
        ConfigError: They name a function that is imported already.
    """
    names = set(_texts(settings))
    functions = [name for name in names if "." in name and inspect.isroutine(imported_object(name))]
    if functions:
        raise ConfigError(
            f"Expected hyperparameters that name classes only, got {', '.join(functions)}.",
            fix="set them on the command line.",
        )
    sys.meta_path.insert(0, finder := _Refusing(frozenset(names)))
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Refusing(MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if any(f"{name}.".startswith(f"{fullname}.") for name in self._names):
            raise ModuleNotFoundError(f"{fullname} is not imported, and a checkpoint cannot import it", name=fullname)


def _hparams_of(path: str) -> dict[str, Any]:
    """Return the hyperparameters in a checkpoint; its tensors are not read."""
    found = open_checkpoint(path, Reading()).tree.get("hyper_parameters")
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key != "_instantiator"}
