"""`CLI`: a program's command line, made of the signatures of its classes. Built by users, and by train.py.

What happens, in this order: the sources are laid over each other (sources.py, settings.py), values are brought to the
types of their parameters (typed.py), all problems are said at once, objects are made (build.py), the subcommand runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, LoopwrightError, nearest
from .build import build
from .complete import complete, is_plain
from .groups import Groups, put
from .help_text import describe_class, overview
from .names import ClassProblem, find_class
from .parameters import EMPTY, Parameter, parameters_of
from .settings import CLASS_KEYS, is_class_node, resolve
from .sources import CommandLine, gather, parse_command_line
from .typed import WRONG, Plan, Typed
from .yaml_file import parse, write

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..data import DataModule
    from ..trainer.module import Module
    from ..trainer.trainer import Trainer

__all__ = ["CLI", "SUBCOMMANDS"]

# Any in this file: settings, classes of users, and what is made of them.

SUBCOMMANDS = {
    "fit": "train a model, and validate it",
    "validate": "evaluate a model on the validation data",
    "test": "evaluate a model on the test data",
    "predict": "make predictions",
}
_LEFT_OUT = ("self", "model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")
_OF_SCHEDULE = ("monitor", "interval", "frequency", "strict", "name")


class CLI:
    """Make a Trainer, a model and its data from files, environment and command line, and run a subcommand.

    Example:
        if __name__ == "__main__":
            lw.cli.CLI(Digits, DigitsData)

        python train.py fit --config base.yaml trainer.max_epochs=3 model.lr=1e-3

    Subclasses may override `add_arguments`, `before_instantiate_classes`, `after_instantiate_classes`, `before_fit`,
    `after_fit` (the same for the other subcommands), `instantiate_trainer` and `configure_optimizers`.

    Args:
        model_class: The model's class, or a function that returns a model. None: the user names a class, as in
            `model=package.module.Net`. A subclass may be named in any case.
        datamodule_class: The same for the data; None: the user may name one, or the model has the loaders itself.
        trainer_class: Trainer, or a subclass.
        trainer_defaults: Arguments of the trainer that the user may change. Callbacks are always added.
        seed_everything_default: The seed where none is given: True draws one and writes it into the saved
            configuration, False or None leaves generators as they are.
        save_config: Whether checkpoints get the configuration; see `SaveConfig`.
        run: False makes the objects only; the command line has no subcommand then.
        args: What was typed, without the program's name; None: `sys.argv`.
        program: The program's name in texts; None: as it was started.
        exits: Whether a wrong configuration ends the program with its text and code 2, rather than raising.

    Attributes:
        subcommand: The subcommand; None with run=False.
        settings: The settings of all sources.
        config: What was made of them, with defaults: nested dicts that YAML can hold.
        trainer: The trainer.
        model: The model.
        datamodule: The data module; None if there is none.
        groups: Objects of `add_arguments`, by their keys.
        result: What the subcommand returned.

    Raises:
        ConfigError: With exits=False: all that is wrong with the configuration.
    """

    trainer: Trainer
    model: Module
    datamodule: DataModule | None

    def __init__(
        self,
        model_class: Callable[..., Module] | None = None,
        datamodule_class: Callable[..., DataModule] | None = None,
        *,
        trainer_class: type[Trainer] | None = None,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int | None = True,
        save_config: bool = True,
        run: bool = True,
        args: Sequence[str] | None = None,
        program: str | None = None,
        exits: bool = True,
    ) -> None:
        from ..data import DataModule
        from ..trainer.module import Module
        from ..trainer.trainer import Trainer

        self._bases = {"model": (model_class, Module), "data": (datamodule_class, DataModule)}
        self._trainer_class: Any = Trainer if trainer_class is None else trainer_class
        self._trainer_defaults = dict(trainer_defaults or {})
        self._seed_default = seed_everything_default
        self._saves_config = save_config
        self._program = os.path.basename(sys.argv[0]) if program is None else program
        self.subcommand: str | None = None
        self.result: Any = None
        self.groups: dict[str, Any] = {}
        self.datamodule = None
        self._declared = Groups(reserved=("trainer", "seed_everything", *CLASS_KEYS))
        self.add_arguments(self._declared)
        tokens = list(sys.argv[1:] if args is None else args)
        try:
            self._read(tokens, runs=run)
            self._plan()
        except LoopwrightError as error:
            if not exits:
                raise
            sys.stderr.write(f"{self._shown_program()}: {error}\n")
            raise SystemExit(2) from None
        self._seed()
        self._build()
        if run:
            self._run()

    # -- for subclasses ------------------------------------------------------------------------------------------

    def add_arguments(self, groups: Groups) -> None:
        """Declare further settings: classes, values, defaults and links. Override it.

        Args:
            groups: Takes them.
        """

    def before_instantiate_classes(self) -> None:
        """Do something when `config` is known and nothing has been made."""

    def after_instantiate_classes(self) -> None:
        """Do something when trainer, model and data are there."""

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        """Return the trainer.

        Args:
            arguments: Its arguments, as objects.
        """
        trainer: Trainer = self._trainer_class(**arguments)
        return trainer

    @staticmethod
    def configure_optimizers(module: Module, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return what the module's `configure_optimizers` returns where settings name an optimizer.

        Args:
            module: The model.
            optimizer: Of all its parameters that need gradients.
            lr_scheduler: A dict as `configure_optimizers` returns it, with the schedule; None without one.
        """
        return optimizer if lr_scheduler is None else {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    # -- settings ------------------------------------------------------------------------------------------------

    def _shown_program(self) -> str:
        return f"{self._program} {self.subcommand}" if self.subcommand else self._program

    def _read(self, tokens: list[str], *, runs: bool) -> None:
        if runs:
            tokens = self._take_subcommand(tokens)
        line = parse_command_line(tokens)
        if line.help is not None:
            sys.stdout.write(self._help(line.help))
            raise SystemExit(0)
        defaults = {
            f"trainer.{name}": value for name, value in self._trainer_defaults.items() if self._is_setting(name, value)
        }
        defaults.update(self._declared.defaults)
        commands = tuple(SUBCOMMANDS)
        self.settings = gather(line, command=self.subcommand or "", commands=commands, defaults=defaults)
        read_back = self._checkpoint_config(line)
        if read_back is not None:
            self.settings = gather(
                line, command=self.subcommand or "", commands=commands, defaults=defaults, checkpoint=read_back
            )
        self._prints = line.prints

    def _is_setting(self, name: str, value: Any) -> bool:
        return name != "callbacks" and is_plain(value)

    def _take_subcommand(self, tokens: list[str]) -> list[str]:
        if not tokens or tokens[0] in ("-h", "--help"):
            lines = [f"usage: {self._program} COMMAND [--config FILE]... [KEY=VALUE]...", ""]
            lines += [f"  {name:10} {text}" for name, text in SUBCOMMANDS.items()]
            text = "\n".join([*lines, "", f"{self._program} COMMAND --help tells more.", ""])
            (sys.stdout if tokens else sys.stderr).write(text)
            raise SystemExit(0 if tokens else 2)
        place = next((number for number, token in enumerate(tokens) if token in SUBCOMMANDS), None)
        if place is None:
            raise ConfigError(
                f"{tokens[0]!r} is no subcommand{nearest(tokens[0], SUBCOMMANDS)}.",
                fix=f"begin with one of {', '.join(SUBCOMMANDS)}.",
            )
        self.subcommand = tokens[place]
        return tokens[:place] + tokens[place + 1 :]

    def _checkpoint_config(self, line: CommandLine) -> tuple[dict[str, Any], str] | None:
        """Return the configuration of the checkpoint that is named, where no configuration file is."""
        path = self.settings.tree.get("ckpt_path")
        if line.files or self.subcommand is None or not isinstance(path, str):
            return None
        from .saved_config import config_of

        text = config_of(path)
        if text is None:
            return None
        name = f"the configuration in {path}"
        found = parse(text, name)
        # What a run was started with does not say what is to be done with its checkpoint.
        kept = {key: value for key, value in found.items() if key not in ("ckpt_path", *SUBCOMMANDS)}
        if self.subcommand == "predict":
            kept = {key: value for key, value in kept.items() if key not in ("verbose",)}
        allowed = set(self._known_keys())
        return {key: value for key, value in kept.items() if key in allowed}, name

    def _method_parameters(self) -> dict[str, Parameter]:
        if self.subcommand is None:
            return {}
        known = parameters_of(getattr(self._trainer_class, self.subcommand))
        return {name: one for name, one in known.named.items() if name not in _LEFT_OUT}

    def _known_keys(self) -> list[str]:
        return ["seed_everything", "trainer", *CLASS_KEYS, *self._method_parameters(), *self._declared.names]

    def _help(self, topic: str) -> str:
        groups: dict[str, Any] = {"trainer": self._trainer_class}
        groups.update({key: fixed for key, (fixed, _) in self._bases.items()})
        groups.update(self._declared.classes)
        if not topic:
            seed = Parameter(
                "seed_everything",
                bool | int | None,
                self._seed_default,
                "Seed of all random generators; true draws one.",
            )
            values = [seed, *self._method_parameters().values(), *self._declared.values.values()]
            return overview(self._shown_program(), SUBCOMMANDS.get(self.subcommand or "", ""), groups, values)
        if groups.get(topic) is not None:
            return describe_class(groups[topic], topic)
        try:
            return describe_class(find_class(topic, object if "." in topic else self._nameable()), "")
        except ClassProblem as problem:
            raise ConfigError(
                f"--help {topic}: {problem}.", fix="name trainer, model or data, or a class by its path."
            ) from None

    def _nameable(self) -> tuple[type[Any], ...]:
        from torch.optim import Optimizer
        from torch.optim.lr_scheduler import LRScheduler

        from ..callbacks import Callback
        from ..loggers import Logger
        from ..profilers import Profiler
        from ..strategies import Strategy

        return (
            Callback,
            Logger,
            Strategy,
            Profiler,
            Optimizer,
            LRScheduler,
            *(base for _, base in self._bases.values()),
        )

    # -- plans ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Check all settings; nothing is made.

        Raises:
            ConfigError: All that is wrong.
        """
        tree = resolve(self.settings)
        tree, replaced = self._declared.with_links(tree, functools.partial(self._default_of, tree), self._origin)
        for source, target in self._declared.copies():
            text = self.settings.texts.get(self.settings.route(source))
            if text is not None:  # what was typed, where text is wanted
                key, _, name = target.partition(".")
                self.settings.texts.update({target: text, f"{key}.init_args.{name}": text})
        typed = Typed(self.settings)
        known = self._known_keys()
        for key in [key for key in tree if key not in known]:
            source = self.settings.origin(key)
            hint = nearest(key, known) or f"; there are {', '.join(known)}"
            typed.problems.append(f"{key} ({source}): no such setting{hint}")
        self._plans: dict[str, Any] = {"trainer": self._trainer_plan(typed, tree.get("trainer") or {})}
        for key in ("model", "data"):
            self._plans[key] = self._object_plan(typed, key, tree.get(key))
        self._plan_optimizer(typed, tree)
        for name, target in self._declared.classes.items():
            if name in tree or name in self._declared.required:
                self._plans[name] = typed.plan(target, tree.get(name) or {}, name, given=self._declared.linked(name))
        for name, one in {**self._method_parameters(), **self._declared.values}.items():
            if name in tree:
                self._plans[name] = typed.value(tree[name], one.annotation, name)
            elif one.is_required:
                typed.problems.append(f"{name}: must be given")
            elif name in self._declared.values:
                self._plans[name] = one.default
        seed = tree.get("seed_everything", self._seed_default)
        self._plans["seed_everything"] = typed.value(seed, bool | int | None, "seed_everything")
        if typed.problems:
            lines = "".join(f"\n  - {line}" for line in typed.problems)
            count = len(typed.problems)
            raise ConfigError(
                f"the configuration is wrong in {count} {'place' if count == 1 else 'places'}:{lines}",
                fix=f"change what is named; `{self._shown_program()} --help` shows what there is.",
            )
        for text in replaced:
            sys.stderr.write(f"{self._shown_program()}: {text}\n")
        for path in typed.skipped:
            sys.stderr.write(
                f"{self._shown_program()}: {path} is left out: the class that is chosen does not take it\n"
            )
        self._tree = tree
        self.config = self._completed()
        if self._prints:
            sys.stdout.write(write(self.config if self._prints == "full" else tree))
            raise SystemExit(0)

    def _origin(self, path: str) -> str:
        return self.settings.origin(self.settings.route(path))

    def _default_of(self, tree: dict[str, Any], path: str) -> Any:
        """Return the default of a parameter, EMPTY if it has none."""
        key, _, name = path.partition(".")
        if key in self._declared.values:
            return self._declared.values[key].default
        fixed, base = self._bases.get(key, (self._declared.classes.get(key), object))
        target = self._trainer_class if key == "trainer" else fixed
        value = tree.get(key)
        chosen = value["class_path"] if isinstance(value, dict) and is_class_node(value) else value
        if key in self._bases and isinstance(chosen, str) and not self._is_fixed(chosen, fixed):
            try:
                target = find_class(chosen, base)
            except ClassProblem:
                return EMPTY  # it is said when the object is planned
        found = None if target is None else parameters_of(target).named.get(name)
        return EMPTY if found is None else found.default

    def _trainer_plan(self, typed: Typed, values: dict[str, Any]) -> Plan:
        from .trainer_types import TRAINER_TYPES

        plan = Plan(self._trainer_class, {}, "trainer")
        folder = values.get("default_root_dir")
        typed.log_folder = folder if isinstance(folder, str) else None
        known = parameters_of(self._trainer_class)
        for name, value in values.items():
            annotation = TRAINER_TYPES.get(name)
            if annotation is not None and name in known.named:
                plan.arguments[name] = typed.value(value, annotation(), f"trainer.{name}")
        rest = {name: value for name, value in values.items() if name not in plan.arguments}
        plan.arguments.update(typed.plan(self._trainer_class, rest, "trainer").arguments)
        return plan

    def _object_plan(self, typed: Typed, key: str, value: Any) -> Any:
        fixed, base = self._bases[key]
        given = self._declared.linked(key)
        if value is None and fixed is None:
            if key == "model":
                typed.problems.append("model: name a class, as in model=package.module.Net")
            return None
        name, arguments, path = None, value or {}, key
        if isinstance(value, str):
            name, arguments = value, {}
        elif is_class_node(value):
            name, arguments, path = value["class_path"], value["init_args"], f"{key}.init_args"
        elif isinstance(value, dict) and set(value) == {"init_args"}:
            arguments, path = value["init_args"], f"{key}.init_args"
        elif not isinstance(arguments, dict):
            typed.problems.append(f"{key} ({self.settings.origin(key)}): expected parameters or a class, got {value!r}")
            return WRONG
        if name is None or self._is_fixed(name, fixed):
            if fixed is None:
                typed.problems.append(
                    f"{key} ({self.settings.origin(key)}): name a class, as in {key}=package.module.Class"
                )
                return WRONG
            return typed.plan(fixed, arguments, path, given=given)
        try:
            found = find_class(name, fixed if inspect.isclass(fixed) else base)
        except ClassProblem as problem:
            typed.problems.append(f"{key} ({self.settings.origin(key)}): {problem}")
            return WRONG
        return typed.plan(found, arguments, path, given=given)

    @staticmethod
    def _is_fixed(name: str, fixed: Any) -> bool:
        """Whether a class's name means the one that the program gave; a script's own classes are __main__.Net."""
        if fixed is None:
            return False
        own = getattr(fixed, "__qualname__", "")
        return name in (f"{fixed.__module__}.{own}", f"__main__.{own}", own)

    def _plan_optimizer(self, typed: Typed, tree: dict[str, Any]) -> None:
        from torch.optim import Optimizer
        from torch.optim.lr_scheduler import LRScheduler

        if tree.get("lr_scheduler") is not None and tree.get("optimizer") is None:
            typed.problems.append("lr_scheduler: it needs an optimizer; name one, as in optimizer=Adam")
        self._schedule_options: dict[str, Any] = {}
        for key, base, first in (("optimizer", Optimizer, "params"), ("lr_scheduler", LRScheduler, "optimizer")):
            value = tree.get(key)
            if value is None:
                continue
            name = value["class_path"] if is_class_node(value) else value
            if not isinstance(name, str):
                typed.problems.append(f"{key} ({self.settings.origin(key)}): name a class, as in {key}=Adam")
                continue
            try:
                found = find_class(name, base)
            except ClassProblem as problem:
                typed.problems.append(f"{key} ({self.settings.origin(key)}): {problem}")
                continue
            arguments = dict(value["init_args"]) if is_class_node(value) else {}
            if key == "lr_scheduler":
                own = parameters_of(found).named
                self._schedule_options = {
                    name: arguments.pop(name) for name in _OF_SCHEDULE if name in arguments and name not in own
                }
            path = f"{key}.init_args" if is_class_node(value) else key
            self._plans[key] = typed.plan(found, arguments, path, given=frozenset({first}))
            self._plans[key].is_partial = True

    def _completed(self) -> dict[str, Any]:
        """Return the settings with defaults, as they are saved and printed."""
        found: dict[str, Any] = {"seed_everything": self._plans["seed_everything"]}
        for key in (
            "trainer",
            "model",
            "data",
            "optimizer",
            "lr_scheduler",
            *self._declared.names,
            *self._method_parameters(),
        ):
            if self._plans.get(key) is None and key not in self._tree:
                continue
            found[key] = complete(self._plans.get(key), self._tree.get(key), names_class=key in CLASS_KEYS)
        for name, value in self._schedule_options.items():
            found["lr_scheduler"]["init_args"][name] = value
        return found

    # -- objects -------------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        seed = self._plans["seed_everything"]
        if seed is None or seed is False:
            return
        from ..fabric import seed_everything

        if seed is True:
            # A process that another rank has started finds its seed there.
            inherited = os.environ.get("PL_GLOBAL_SEED", "")
            seed = int(inherited) if inherited.isdigit() else random.SystemRandom().randrange(2**32)
        self.config["seed_everything"] = seed_everything(seed, workers=True)

    def _build(self) -> None:
        self.before_instantiate_classes()
        built: dict[str, Any] = {}
        for key in self._declared.order(["data", "model", *self._declared.classes]):
            plan = self._plans.get(key)
            if isinstance(plan, Plan):
                for name, value in self._declared.linked_values(key, built).items():
                    plan.arguments[name] = value
                    if is_plain(value):
                        put(self.config, f"{key}.{name}", value)
            built[key] = build(plan)
        self.model, self.datamodule = built.pop("model"), built.pop("data")
        self.groups = {**built, **{name: build(self._plans.get(name)) for name in self._declared.values}}
        arguments = {name: value for name, value in self._trainer_defaults.items() if not self._is_setting(name, value)}
        own = _as_list(arguments.pop("callbacks", None))
        arguments.update({name: build(value) for name, value in self._plans["trainer"].arguments.items()})
        more = [one for one in built.values() if _is_callback(one)]
        arguments["callbacks"] = [*_as_list(arguments.get("callbacks")), *own, *more, *self._config_callback()]
        self.trainer = self.instantiate_trainer(**arguments)
        if "optimizer" in self._plans:
            self._set_optimizers()
        self.after_instantiate_classes()

    def _config_callback(self) -> list[Any]:
        if not self._saves_config:
            return []
        from .saved_config import SaveConfig

        return [SaveConfig(write(self.config))]

    def _set_optimizers(self) -> None:
        from ..trainer.module import Module

        model, make = self.model, build(self._plans["optimizer"])
        schedule = build(self._plans["lr_scheduler"]) if "lr_scheduler" in self._plans else None
        options = self._schedule_options
        if type(model).configure_optimizers is not Module.configure_optimizers:
            sys.stderr.write(
                f"{self._shown_program()}: configure_optimizers of {type(model).__name__} is replaced by optimizer=\n"
            )

        def configure_optimizers() -> Any:
            optimizer = make([one for one in model.parameters() if one.requires_grad])
            made = None if schedule is None else {"scheduler": schedule(optimizer), **options}
            return self.configure_optimizers(model, optimizer, made)

        functools.update_wrapper(configure_optimizers, Module.configure_optimizers)
        model.configure_optimizers = configure_optimizers  # type: ignore[method-assign]

    def _run(self) -> None:
        assert self.subcommand is not None
        for when in ("before", "after"):
            hook = getattr(self, f"{when}_{self.subcommand}", None)
            if when == "before":
                if hook is not None:
                    hook()
                arguments = {
                    name: build(self._plans[name]) for name in self._method_parameters() if name in self._plans
                }
                method = getattr(self.trainer, self.subcommand)
                self.result = method(self.model, datamodule=self.datamodule, **arguments)
            elif hook is not None:
                hook()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_callback(value: Any) -> bool:
    from ..callbacks import Callback

    return isinstance(value, Callback)
