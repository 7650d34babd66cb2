"""`LightningArgumentParser`: declares the settings of a program, reads them, and makes the objects they describe."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ....callbacks import Callback
from ....cli.names import Trust
from ....cli.parameters import parameters_of
from ....cli.settings import Settings
from ....cli.sources import gather, parse_command_line, read_source
from ....cli.typed import lazy_node
from ....data import DataModule
from ....errors import ConfigError, LoopwrightError, nearest
from ....trainer.module import Module
from ....yaml_file import parse, write
from ..imports.absent import refuse
from ..imports.finder import VERSION
from ..trainer import Trainer
from .class_paths import written
from .declared import ClassGroup, Link, Value, make_value, without_options
from .help import help_of
from .namespace import Namespace, to_plain
from .reading import Reading
from .tokens import find_subcommand, tokens_before

if TYPE_CHECKING:
    from ....cli.settings import Settings
    from .reading import Reading

__all__ = ["LRSchedulerTypeTuple", "LightningArgumentParser", "ReduceLROnPlateau"]

# Any in this file: classes of users, their arguments, and what is made of them.

Classes: TypeAlias = type | tuple[type, ...]


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's schedule, which knows the metric that it reads."""

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)


class LightningArgumentParser:
    """Declares settings, reads them, and makes objects of them.

    Args:
        args: Accepted.
        description: For --help.
        env_prefix: Prefix of environment variables that are settings.
        default_env: Whether variables are read.
        kwargs: `default_config_files` and `exit_on_error`; other settings of jsonargparse's parser are accepted.

    Attributes:
        callback_keys: Keys of callbacks, which the trainer gets.
        subparsers: The parsers of subcommands, by name.
    """

    def __init__(
        self,
        *args: object,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        self.description = description
        self.options: dict[str, Any] = {"env_prefix": env_prefix, "default_env": default_env, **kwargs}
        self.callback_keys: list[str] = []
        self.subparsers: dict[str, LightningArgumentParser] = {}
        self._optimizers: dict[str, tuple[Classes, str]] = {}
        self._lr_schedulers: dict[str, tuple[Classes, str]] = {}
        self.declared: dict[str, ClassGroup | Value] = {}
        self.links: list[Link] = []
        self.defaults: dict[str, Any] = {}
        self.files: dict[str, str] = {}  # option -> key, of options that name a configuration file
        self.linked_values: dict[str, Any] = {}  # set by links, of objects
        self._lw_read: tuple[Namespace, Reading] | None = None
        self.around: Callable[[str, Any], AbstractContextManager[None]] = lambda key, made: nullcontext()

    # -- declarations --------------------------------------------------------------------------------------------

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
            made = inspect.signature(made).return_annotation
            made = made if inspect.isclass(made) else {"trainer": Trainer, "data": DataModule}.get(nested_key, Module)
        if not inspect.isclass(made) or not issubclass(made, _LIGHTNINGS):
            raise ConfigError(
                f"Expected a Trainer, LightningModule, LightningDataModule or Callback for {nested_key!r}, or a "
                f"function that returns one, got {lightning_class!r}.",
                fix="declare other classes with add_class_arguments.",
            )
        if issubclass(made, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(lightning_class, nested_key, required=required)
        return self.add_class_arguments(lightning_class, nested_key, instantiate=not issubclass(made, _TRAINER))

    def add_class_arguments(
        self,
        theclass: Any,
        nested_key: str | None = None,
        *others: object,
        instantiate: bool = True,
        skip: Any = None,
        default: object = None,
        **more: object,
    ) -> list[str]:
        """Declare an object whose arguments stand below a key; without a key, its parameters are values.

        Args:
            theclass: Its class, or a function that makes it.
            nested_key: The key.
            others: Accepted.
            instantiate: Whether it is made; otherwise its arguments are.
            skip: Names of parameters that are not settings.
            default: A mapping of defaults.
            more: Accepted.
        """
        skipped = frozenset(one for one in skip or () if isinstance(one, str))
        if nested_key is None:
            return self._lw_add_parameters(theclass, skipped)
        self._lw_add(nested_key, ClassGroup(nested_key, theclass, instantiate=instantiate, skip=skipped))
        if isinstance(default, Mapping | Namespace):
            self.set_defaults({nested_key: default})
        return [f"{nested_key}.{name}" for name in parameters_of(theclass).named if name not in skipped]

    def add_subclass_arguments(
        self,
        baseclass: Any,
        nested_key: str,
        *others: object,
        required: bool = False,
        instantiate: bool = True,
        skip: Any = None,
        default: object = None,
        **more: object,
    ) -> list[str]:
        """Declare an object whose class the user names.

        Args:
            baseclass: What it is one of; a tuple for several.
            nested_key: The key.
            others: Accepted.
            required: Whether one must be named.
            instantiate: Whether it is made.
            skip: Names of parameters that are not settings.
            default: Its class and arguments where none is named.
            more: Accepted.
        """
        skipped = frozenset(one for one in skip or () if isinstance(one, str))
        group = ClassGroup(nested_key, baseclass, True, required, instantiate, skipped)
        self._lw_add(nested_key, group)
        if default is not None:
            self.set_defaults({nested_key: default})
        return [nested_key]

    def add_function_arguments(
        self, function: Callable[..., object], nested_key: str | None = None, *others: object, **more: Any
    ) -> list[str]:
        """Declare the parameters of a function below a key: values, with which nothing is called."""
        return self.add_class_arguments(function, nested_key, instantiate=False, skip=more.get("skip"))

    def add_method_arguments(
        self, theclass: type, themethod: str, nested_key: str | None = None, *others: object, **more: Any
    ) -> list[str]:
        """Declare the parameters of a method, which are values; return their keys."""
        method = getattr(theclass, themethod)
        skipped = frozenset(one for one in more.get("skip") or () if isinstance(one, str)) | {"self"}
        return self._lw_add_parameters(method, skipped, f"{nested_key}." if nested_key else "")

    def _lw_add_parameters(self, target: Any, skipped: frozenset[str], prefix: str = "") -> list[str]:
        named = [one for name, one in parameters_of(target).named.items() if name not in skipped]
        for one in named:
            key = f"{prefix}{one.name}"
            self._lw_add(key, Value(replace(one, name=key), (f"--{key}",)))
        return [f"{prefix}{one.name}" for one in named]

    def add_argument(self, *names: Any, **options: Any) -> None:
        """Declare a value; arguments as for argparse, and `type` may be any annotation."""
        if getattr(options.get("action"), "__name__", "") == "ActionConfigFile":
            self.files.update(dict.fromkeys(names, "config"))
            return
        unknown = set(options) - {"type", "default", "nargs", "action", "choices", "required", "const", "dest", "help"}
        one = make_value(names, **{name: value for name, value in options.items() if name not in unknown})
        self._lw_add(one.parameter.name, one)

    def add_argument_group(self, *args: object, **kwargs: object) -> LightningArgumentParser:
        """Return this parser: groups are for --help of argparse."""
        return self

    def set_defaults(self, *dictionaries: Mapping[str, object], **values: object) -> None:
        """Set values that files and the command line may change; keys are dotted."""
        for dictionary in dictionaries:
            self.defaults.update(dictionary)
        self.defaults.update(values)

    def link_arguments(
        self,
        source: str | Sequence[str],
        target: str,
        compute_fn: Callable[..., object] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Let one setting follow from others.

        Args:
            source: Dotted keys; with apply_on="instantiate", of objects and their attributes.
            target: A dotted key.
            compute_fn: Makes its value of theirs.
            apply_on: "parse" or "instantiate".
        """
        sources = (source,) if isinstance(source, str) else tuple(source)
        self.links.append(Link(sources, _without_init_args(target), compute_fn, apply_on == "instantiate"))

    def add_optimizer_args(
        self,
        optimizer_class: Classes = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
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
            self.add_subclass_arguments(given, key, instantiate=False, skip={first})
        else:
            self.add_class_arguments(given, key, instantiate=False, skip={first})

    def _lw_add(self, key: str, one: ClassGroup | Value) -> None:
        if key in self.declared:
            raise ValueError(f"Expected an unused key for a setting, got {key!r}, which is declared already.")
        self.declared[key] = one
        self._lw_read = None

    # -- reading -------------------------------------------------------------------------------------------------

    def parse_args(self, args: Sequence[str] | None = None, *others: object, **options: object) -> Namespace:
        """Return the configuration: what files, variables and a command line say, with defaults.

        Args:
            args: What was typed; None: `sys.argv`.
            others: Accepted.
            options: Accepted: jsonargparse's own.
        """
        tokens = list(sys.argv[1:] if args is None else args)
        with self._lw_told():
            if not self.subparsers:
                return self._lw_parse([*tokens_before(self.options, {}, ""), *tokens])
            return self._lw_with_subcommand(tokens)

    def parse_object(
        self, cfg_obj: Any, cfg_base: Any = None, *others: object, trust: Trust | None = None, **options: object
    ) -> Namespace:
        """Return the configuration of nested dicts or namespaces.

        Args:
            cfg_obj: The settings.
            cfg_base: A configuration below them.
            others: Accepted.
            trust: What the settings may name, if they are a file's that may be somebody else's.
            options: Accepted: jsonargparse's own.
        """
        given, base = to_plain(cfg_obj), to_plain(cfg_base) or {}
        with self._lw_told():
            if not self.subparsers:
                tokens = tokens_before(self.options, {}, "") if not base else []
                return self._lw_parse(tokens, base, given, trust=trust)
            command = given.get("subcommand") or next((name for name in self.subparsers if name in given), None)
            command = command or base.get("subcommand")
            if command is None:
                raise self._lw_no_subcommand([])
            own = self.subparsers[command]
            tokens = tokens_before(self.options, own.options, command) if not base else []
            below = own._lw_parse(
                tokens, base.get(command) or {}, given.get(command) or {}, command=command, trust=trust
            )
            return Namespace({"config": None, "subcommand": command, command: below})

    def parse_string(self, cfg_str: str, *others: object, **options: object) -> Namespace:
        """Return the configuration in a YAML document."""
        return self.parse_object(parse(cfg_str, "the configuration") or {})

    def parse_path(self, cfg_path: Any, *others: object, **options: object) -> Namespace:
        """Return the configuration in a file."""
        return self.parse_args(["--config", os.fspath(cfg_path)])

    def get_defaults(self, *others: object, **options: object) -> Namespace:
        """Return the configuration where nothing is said; what must be given is None in it."""
        return Reading(self, self._lw_settings([]), checks=False).config

    def get_default(self, dest: str) -> Any:
        """Return the default of a dotted key."""
        return self.get_defaults().get(dest)

    @contextmanager
    def _lw_told(self) -> Iterator[None]:
        try:
            yield
        except LoopwrightError as error:
            if not self.options.get("exit_on_error", True):
                raise
            self.error(str(error), error)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Show what is wrong, and exit."""
        sys.stderr.write(f"{self.shown}: {message}\n")
        self.exit(2)
        raise SystemExit(2) from ex

    def exit(self, status: int = 0, message: str | None = None) -> None:
        """End the program; a test may replace it."""
        sys.stderr.write(message or "")
        raise SystemExit(status)

    @property
    def shown(self) -> str:
        """Name of the program, in messages."""
        return os.path.basename(sys.argv[0])

    def _lw_with_subcommand(self, tokens: list[str]) -> Namespace:
        names = tuple(self.subparsers)
        is_named = f"{self.options['env_prefix']}_SUBCOMMAND" in os.environ
        if (not tokens and not is_named) or (tokens and tokens[0] in ("-h", "--help") and not set(tokens) & set(names)):
            self._lw_show_subcommands(is_asked=bool(tokens))
        command = find_subcommand([*tokens_before(self.options, {}, ""), *tokens], names, self.options)
        if command is None:
            raise self._lw_no_subcommand(tokens)
        own = self.subparsers[command]
        rest = list(tokens)
        if command in rest:
            rest.remove(command)
        before = tokens_before(self.options, own.options, command)
        below = own._lw_parse([*before, *rest], command=command, commands=names)
        typed = tokens.index(command) if command in tokens else len(tokens)
        config = None
        if any(one in ("-c", "--config") or one.startswith("--config=") for one in tokens[:typed]):
            config = below.pop("config")
            below["config"] = None
        return Namespace({"config": config, "subcommand": command, command: below})

    def _lw_no_subcommand(self, tokens: Sequence[str]) -> ConfigError:
        got = f"{tokens[0]!r}{nearest(tokens[0], self.subparsers)}" if tokens else "none"
        return ConfigError(f"Expected a subcommand, got {got}.", fix=f"start with one of {', '.join(self.subparsers)}.")

    def _lw_show_subcommands(self, *, is_asked: bool) -> NoReturn:
        lines = [f"usage: {self.shown} COMMAND [--config FILE]... [--KEY VALUE]...", ""]
        lines += [f"  {name:10} {one.description}" for name, one in self.subparsers.items()]
        text = "\n".join([*lines, "", f"{self.shown} COMMAND --help shows the settings.", ""])
        (sys.stdout if is_asked else sys.stderr).write(text)
        raise SystemExit(0 if is_asked else 2)

    def _lw_settings(self, tokens: Sequence[str], *, command: str = "", commands: Sequence[str] = ()) -> Settings:
        values = [one for one in self.declared.values() if isinstance(one, Value)]
        groups = [key for key, one in self.declared.items() if isinstance(one, ClassGroup)]
        settings: Settings | None = None
        for part in _from_file_to_file(without_options(tokens, values)):  # what stands later wins, files as well
            settings = gather(
                parse_command_line(part),
                command=command,
                commands=commands,
                defaults={} if settings is not None else self._lw_plain_defaults(),
                variables=None if settings is None else {},
                groups=groups,
                onto=settings,
            )
        assert settings is not None
        return settings

    def _lw_plain_defaults(self) -> dict[str, Any]:
        return {key: lazy_node(value) or to_plain(value) for key, value in self.defaults.items()}

    def _lw_parse(
        self,
        tokens: Sequence[str],
        *given: dict[str, Any],
        command: str = "",
        commands: Sequence[str] = (),
        trust: Trust | None = None,
    ) -> Namespace:
        for option in self.files:
            tokens = [f"--config{one[len(option) :]}" if one.partition("=")[0] == option else one for one in tokens]
        prints = [one.partition("=")[2] for one in tokens if one.replace("-", "_").startswith("__print_config")]
        tokens = [one for one in tokens if not one.replace("-", "_").startswith("__print_config")]
        line = parse_command_line(tokens)
        if line.help is not None:
            sys.stdout.write(help_of(self, line.help, f"{self.shown} {command}".strip()))
            raise SystemExit(0)
        settings = self._lw_settings(tokens, command=command, commands=commands)
        for one in given:
            config = one.get("config") if isinstance(one.get("config"), str | os.PathLike) else None
            if config is not None:
                settings.lay(read_source(os.fspath(config)), str(config))
            entries = {key: value for key, value in one.items() if key != "config"}
            if trust is not None and one is given[-1]:
                settings.lay(entries, "the checkpoint", trust)
            else:
                settings.lay(entries, "args")
        reading = Reading(self, settings)
        reading.config["config"] = None
        if line.files:
            reading.config["config"] = [None if "\n" in one or one.startswith("{") else one for one in line.files]
        self._lw_read = (reading.config.clone(), reading)
        if prints:
            shown = reading.given if "skip_default" in prints[0] else reading.config
            sys.stdout.write(self.dump(shown, skip_none="skip_null" in prints[0]))
            raise SystemExit(0)
        return reading.config

    # -- objects -------------------------------------------------------------------------------------------------

    def instantiate_classes(self, cfg: Namespace, **options: object) -> Namespace:
        """Return the configuration with objects in place of their settings.

        Args:
            cfg: A configuration.
            options: Accepted: jsonargparse's own.
        """
        command = cfg.get("subcommand") if self.subparsers else None
        if command is not None:
            made = self.subparsers[command].instantiate_classes(cfg[command])
            return Namespace({**vars(cfg), command: made})
        return self._lw_reading_of(cfg).instantiated(cfg)

    def _lw_reading_of(self, cfg: Namespace) -> Reading:
        """Return what was read, or, if the configuration was changed since, what it says now."""
        if self._lw_read is not None:
            before, reading = self._lw_read
            changed = [key for key in self.declared if before.get(key) != cfg.get(key)]
            if all(isinstance(self.declared[key], Value) for key in changed):
                reading.set_values({key: cfg.get(key) for key in changed})
                return reading
        settings = Settings()
        settings.lay({key: one for key, one in to_plain(cfg).items() if key != "config"}, "the configuration")
        with self._lw_told():
            return Reading(self, settings, applies_links=False)

    # -- files ---------------------------------------------------------------------------------------------------

    def dump(self, cfg: Any, skip_none: bool = True, skip_link_targets: bool = True, **options: object) -> str:
        """Return a configuration as YAML.

        Args:
            cfg: The configuration.
            skip_none: Whether entries without a value are left out.
            skip_link_targets: Whether settings that follow from others are left out.
            options: Accepted: jsonargparse's own.
        """
        header = self.options.get("dump_header") or [f"lightning.pytorch=={VERSION}"]
        lines = "".join(f"# {line}\n" for line in header)
        return lines + write(self.plain(cfg, skip_none=skip_none, skip_link_targets=skip_link_targets))

    def plain(self, cfg: Any, *, skip_none: bool = False, skip_link_targets: bool = True) -> dict[str, Any]:
        """Return a configuration as dicts, lists and values of YAML; arguments as for `dump`."""
        tree = copy.deepcopy(written(to_plain(cfg)))
        tree.pop("config", None)
        for name, parser in self.subparsers.items():
            if isinstance(tree.get(name), dict):
                tree[name] = parser.plain(tree[name], skip_link_targets=skip_link_targets)
        if skip_link_targets:
            for link in self.links:
                _remove(tree, link.target)
        empty = [
            key for key, one in self.declared.items()
            if isinstance(one, ClassGroup) and not one.names_class and tree.get(key) == {}
        ]  # fmt: skip
        found = {key: one for key, one in tree.items() if key not in empty}
        return _without_none(found) if skip_none else found

    def save(self, cfg: Any, path: Any, skip_none: bool = True, overwrite: bool = False, **options: object) -> None:
        """Write a configuration to a YAML file.

        Args:
            cfg: The configuration.
            path: The file.
            skip_none: As for `dump`.
            overwrite: Whether it may be there already.
            options: Accepted: jsonargparse's own.

        Raises:
            ValueError: It is there already.
        """
        if not overwrite and os.path.exists(path):
            raise ConfigError(f"{os.fspath(path)} is there already.", fix="pass overwrite=True.")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.dump(cfg, skip_none=skip_none))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(
            f"LightningArgumentParser.{name}", "declare it with add_lightning_class_args, add_argument or set_defaults"
        )


_TRAINER: tuple[type, ...] = (Trainer, *Trainer.__mro__[1:-1])
_LIGHTNINGS: tuple[type, ...] = (Trainer, Module, DataModule, Callback)


def _from_file_to_file(tokens: Sequence[str]) -> list[list[str]]:
    """Return a command line in parts: each begins with a file."""
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token in ("-c", "--config") or token.startswith("--config="):
            parts.append([])
        parts[-1].append(token)
    return parts


def _without_init_args(path: str) -> str:
    return path.replace(".init_args", "")


def _remove(tree: dict[str, Any], path: str) -> None:
    """Take out what stands at a dotted path, also where it leads through the arguments of a class."""
    *above, last = path.split(".")
    node: Any = tree
    for part in above:
        node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and "class_path" in node:
            node = node.get("init_args")
    if isinstance(node, dict):
        node.pop(last, None)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value
