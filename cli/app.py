"""`CLI`: a program's command line, derived from the signatures of its classes.

The steps: merge the sources (sources.py, settings.py), convert values to the types of their parameters (plans.py,
typed.py), report all problems at once, create the objects (build.py), and run the subcommand. ending.py reports errors.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..callbacks import Callback
from ..errors import ConfigError, LoopwrightError, nearest
from ..messages import fitted
from ..settings.build import Building
from ..settings.complete import is_plain
from ..settings.tree import CLASS_KEYS, SettingsTree, escaped
from ..settings.typed import ObjectPlan
from ..yaml_file import write
from .ending import reporting_errors
from .groups import Groups, put
from .plans import plan_all
from .program import SUBCOMMANDS, Program
from .saved_config import SaveConfig, config_of, written_settings
from .seeds import draw_seed
from .sources import gather, parse_command_line
from .topics import help_on

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..data import DataModule
    from ..trainer.module import Module
    from ..trainer.trainer import Trainer

# Any in this file: settings, the user's classes, and objects created from them.


class CLI:
    """Creates a Trainer, a model and its data from files, environment and command line, and runs a subcommand.

    Example:
        if __name__ == "__main__":
            lw.cli.CLI(Digits, DigitsData)

        python train.py fit --config base.yaml trainer.max_epochs=3 model.lr=1e-3

    Subclasses may override `add_arguments`, `before_instantiate_classes`, `after_instantiate_classes`, `before_fit`,
    `after_fit` (the same for the other subcommands), `subcommands`, `instantiate_trainer` and `configure_optimizers`.

    Args:
        model_class: The model's class, or a function that returns a model. None lets the user name a class, as in
            `model=package.module.Net`. A subclass may always be named.
        datamodule_class: Class of the data module, or a function that returns one. None lets the user name one, or the
            model provides the loaders.
        trainer_class: Trainer or a subclass.
        trainer_defaults: Default arguments of the trainer, which the user may change. Callbacks are always added.
        seed_everything_default: Default seed: True draws one and writes it into the saved configuration, False or
            None leaves the generators unchanged.
        save_config: Whether to save the configuration with checkpoints; see `SaveConfig`.
        run: Whether to run a subcommand. False creates the objects only, without a subcommand.
        args: Command line arguments without the program's name; None for `sys.argv`.
        program: The program's name in messages; None for the name it was started with.
        exits: Whether an invalid configuration ends the program with exit code 2 rather than raising.

    Attributes:
        subcommand: Name of the subcommand; None with run=False.
        settings: The merged settings of all sources.
        config: The complete configuration with defaults: nested dicts that YAML can hold.
        trainer: The trainer.
        model: The model.
        datamodule: The data module; None without one.
        groups: Objects declared in `add_arguments`, by key.
        result: The subcommand's return value.

    Raises:
        ConfigError: With exits=False, if the configuration is invalid; all problems are named.
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
        trainer_defaults: Mapping[str, object] | None = None,
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

        self._lw_bases = {"model": (model_class, Module), "data": (datamodule_class, DataModule)}
        self._lw_trainer_class: Any = Trainer if trainer_class is None else trainer_class
        self._lw_trainer_defaults = dict(trainer_defaults or {})
        self._lw_saves_config = save_config
        self._lw_exits = exits
        self.subcommand: str | None = None
        self.result: Any = None
        self.groups: dict[str, Any] = {}
        self.datamodule = None
        self._lw_declared = Groups(reserved=("trainer", "seed_everything", *CLASS_KEYS))
        self.add_arguments(self._lw_declared)
        name = os.path.basename(sys.argv[0]) if program is None else program
        self._lw_program = Program(
            name, self._lw_trainer_class, self._lw_bases, self._lw_declared, seed_everything_default
        )
        self._lw_program.subcommands = self.subcommands()
        tokens = list(sys.argv[1:] if args is None else args)
        try:
            self._lw_read(tokens, runs=run)
            self._lw_plan()
        except LoopwrightError as error:
            if not exits:
                raise
            sys.stderr.write(f"{self._lw_shown_program()}: {error}\n")
            raise SystemExit(2) from None
        with reporting_errors(self._lw_shown_program()) if exits else nullcontext():
            self._lw_seed()
            self._lw_build()
            if run:
                self._lw_run()

    # -- for subclasses ------------------------------------------------------------------------------------------

    def add_arguments(self, groups: Groups) -> None:
        """Declare further settings: classes, values, defaults and links. Meant to be overridden.

        Args:
            groups: Receives the declarations.
        """

    def subcommands(self) -> dict[str, str]:
        """Return the subcommands with a description each; they are methods of the trainer. Override to add some.

        Such a method receives `model`, `datamodule` if there is one, and its other parameters as settings.
        """
        return dict(SUBCOMMANDS)

    def before_instantiate_classes(self) -> None:
        """Hook after `config` is complete and before objects are created."""

    def after_instantiate_classes(self) -> None:
        """Hook after trainer, model and data are created."""

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        """Return the trainer.

        Args:
            arguments: The trainer's arguments, as objects.
        """
        trainer: Trainer = self._lw_trainer_class(**arguments)
        return trainer

    @staticmethod
    def configure_optimizers(module: Module, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Return the result of the module's `configure_optimizers` if the settings name an optimizer.

        Args:
            module: The model.
            optimizer: An optimizer of all its parameters that require gradients.
            lr_scheduler: The schedule as a dict, as `configure_optimizers` returns it; None without one.
        """
        return optimizer if lr_scheduler is None else {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    # -- settings ------------------------------------------------------------------------------------------------

    def _lw_shown_program(self) -> str:
        return self._lw_program.shown

    def _lw_read(self, tokens: list[str], *, runs: bool) -> None:
        if runs:
            tokens = self._lw_take_subcommand(tokens)
        line = parse_command_line(tokens)
        defaults = {
            f"trainer.{name}": value
            for name, value in self._lw_trainer_defaults.items()
            if self._lw_is_setting(name, value)
        }
        defaults.update(self._lw_declared.defaults)
        gathered = functools.partial(
            gather, line, command=self.subcommand or "", commands=tuple(self._lw_program.subcommands), defaults=defaults
        )
        if line.help is not None:
            try:
                tree = gathered().tree
            except ConfigError:
                tree = {}  # help works also if a file is missing
            sys.stdout.write(fitted(help_on(self._lw_program, line.help, tree)))
            raise SystemExit(0)
        self.settings = gathered()
        read_back = None if line.files else self._lw_checkpoint_config()
        if read_back is not None:
            self.settings = gathered(checkpoint=read_back)
        self._lw_prints = line.prints

    def _lw_is_setting(self, name: str, value: object) -> bool:
        return name != "callbacks" and is_plain(value)

    def _lw_take_subcommand(self, tokens: list[str]) -> list[str]:
        name, known = self._lw_program.name, self._lw_program.subcommands
        place = next((number for number, token in enumerate(tokens) if token in known), None)
        if not tokens or (place is None and tokens[0] in ("-h", "--help")):
            lines = [f"usage: {name} COMMAND [--config FILE]... [KEY=VALUE]...", ""]
            lines += [f"  {command:10} {text}" for command, text in known.items()]
            text = "\n".join([*lines, "", f"{name} COMMAND --help shows the settings.", ""])
            (sys.stdout if tokens else sys.stderr).write(text)
            raise SystemExit(0 if tokens else 2)
        if place is None:
            raise ConfigError(
                f"Expected a subcommand, got {tokens[0]!r}{nearest(tokens[0], known)}.",
                fix=f"start with one of {', '.join(known)}.",
            )
        self.subcommand = self._lw_program.subcommand = tokens[place]
        self._lw_program.skipped = self._lw_skipped(tokens[place])
        return tokens[:place] + tokens[place + 1 :]

    def _lw_checkpoint_config(self) -> tuple[SettingsTree, str] | None:
        """Return the configuration of the named checkpoint, if there is no configuration file."""
        path = self.settings.tree.get("ckpt_path")
        if self.subcommand is None or not isinstance(path, str):
            return None
        text = config_of(path)
        if text is None:
            return None
        name = f"the configuration in {path}"
        # The arguments of the run that saved do not apply to the use of its checkpoint.
        dropped = {"ckpt_path", *self._lw_program.subcommands, *(("verbose",) if self.subcommand == "predict" else ())}
        allowed = set(self._lw_program.keys) - dropped
        return {key: value for key, value in written_settings(text, name).items() if key in allowed}, name

    def _lw_plan(self) -> None:
        """Check all settings without creating objects.

        Raises:
            ConfigError: The settings are invalid; all problems are named.
        """
        self._lw_of = plan_all(self._lw_program, self.settings)
        self._lw_plans, self._lw_tree = self._lw_of.made, self._lw_of.tree
        for text in self._lw_of.notes:
            sys.stderr.write(f"{self._lw_shown_program()}: {text}\n")
        self.config = self._lw_completed()
        if self._lw_prints:
            shown = (
                self.config
                if self._lw_prints == "full"
                else self._lw_of.completed(self._lw_program, with_defaults=False)
            )
            sys.stdout.write(write(escaped(shown)))
            raise SystemExit(0)

    def _lw_is_fixed(self, name: str, fixed: object) -> bool:
        return any(one is fixed and self._lw_program.is_fixed(name, key) for key, (one, _) in self._lw_bases.items())

    def _lw_completed(self) -> SettingsTree:
        """Return the settings with defaults, as they are saved and printed."""
        return self._lw_of.completed(self._lw_program)

    # -- objects -------------------------------------------------------------------------------------------------

    def _lw_seed(self) -> None:
        seed = self._lw_plans["seed_everything"]
        if seed is None or seed is False:
            return
        from ..fabric import seed_everything

        if seed is True:
            nodes = self._lw_plans["trainer"].arguments.get("num_nodes", 1)
            seed = draw_seed(nodes if isinstance(nodes, int) else 1)
        self.config["seed_everything"] = seed_everything(seed, workers=True)

    def _lw_build(self) -> None:
        self.before_instantiate_classes()
        built: dict[str, Any] = {}
        building = Building(self.settings, collects=self._lw_exits)
        for key in self._lw_declared.order(["data", "model", *self._lw_declared.classes]):
            plan = self._lw_plans.get(key)
            if isinstance(plan, ObjectPlan):
                linked = {} if building.problems else self._lw_declared.linked_values(key, built)
                for name, value in linked.items():
                    plan.arguments[name] = value
                    if is_plain(value):
                        put(self.config, f"{key}.{name}", value)
                if building.problems and self._lw_declared.linked(key):
                    continue  # the source of its link is missing
            built[key] = building.made(plan)
        of_trainer = {name: building.made(value) for name, value in self._lw_plans["trainer"].arguments.items()}
        building.finish()
        self.model, self.datamodule = built.pop("model"), built.pop("data")
        self.groups = {**built, **self._lw_made(*self._lw_declared.values)}
        arguments = {
            name: value for name, value in self._lw_trainer_defaults.items() if not self._lw_is_setting(name, value)
        }
        own = _as_list(arguments.pop("callbacks", None))
        arguments.update(of_trainer)
        more = [one for one in built.values() if _is_callback(one)]
        arguments["callbacks"] = [*_as_list(arguments.get("callbacks")), *own, *more, *self._lw_config_callback()]
        self.trainer = self.instantiate_trainer(**arguments)
        if "optimizer" in self._lw_plans:
            self._lw_set_optimizers()
        self.after_instantiate_classes()

    def _lw_made(self, *keys: str) -> dict[str, Any]:
        """Return the objects of those keys that are set."""
        building = Building(self.settings, collects=self._lw_exits)
        found = {key: building.made(self._lw_plans[key]) for key in keys if key in self._lw_plans}
        building.finish()
        return found

    def _lw_config_callback(self) -> list[Any]:
        if not self._lw_saves_config:
            return []
        return [SaveConfig(write(escaped(self.config)))]

    def _lw_set_optimizers(self) -> None:
        from ..trainer.module import Module

        model, made = self.model, self._lw_made("optimizer", "lr_scheduler")
        make, schedule = made["optimizer"], made.get("lr_scheduler")
        options = self._lw_of.schedule_options
        if type(model).configure_optimizers is not Module.configure_optimizers:
            sys.stderr.write(
                f"{self._lw_shown_program()}: configure_optimizers of {type(model).__name__} is replaced by "
                "optimizer=\n"
            )

        def configure_optimizers() -> Any:
            try:
                optimizer = make([one for one in model.parameters() if one.requires_grad])
            except ValueError as error:  # a value, or parameters that it cannot train
                raise ConfigError(
                    f"optimizer= cannot be created: {error}.",
                    fix="correct its settings, or define configure_optimizers in the module for several optimizers.",
                ) from error
            length = {"num_steps": self.trainer.estimated_stepping_batches} if self._lw_of.needs_length else {}
            made = None if schedule is None else {"scheduler": schedule(optimizer, **length), **options}
            return self.configure_optimizers(model, optimizer, made)

        functools.update_wrapper(configure_optimizers, Module.configure_optimizers)
        model.configure_optimizers = configure_optimizers  # type: ignore[method-assign]

    def _lw_skipped(self, command: str) -> frozenset[str]:
        """Return further parameters of a subcommand's method that are not settings."""
        return frozenset()

    def _lw_tell_unwritten(self) -> None:
        """Warn before predictions are computed if neither the module nor a callback handles them."""
        from ..callbacks import BasePredictionWriter

        hooks = ("on_predict_batch_end", "on_predict_epoch_end", "on_predict_end")
        is_written = hasattr(self, "after_predict") or any(
            isinstance(one, BasePredictionWriter) or any(not _is_own(getattr(type(one), hook, None)) for hook in hooks)
            for one in (self.model, *self.trainer.callbacks)
        )
        if not is_written:
            sys.stderr.write(
                f"{self._lw_shown_program()}: no callback writes the predictions: what predict_step returns is lost "
                "when the program ends. Add a subclass of BasePredictionWriter to trainer.callbacks\n"
            )

    def _lw_verb(self, command: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.trainer, command)
        return method

    def _lw_run(self) -> None:
        assert self.subcommand is not None
        for when in ("before", "after"):
            hook = getattr(self, f"{when}_{self.subcommand}", None)
            if when == "before":
                if hook is not None:
                    hook()
                arguments = self._lw_made(*self._lw_program.arguments)
                if self.datamodule is not None:
                    arguments["datamodule"] = self.datamodule
                if self.subcommand == "predict":
                    self._lw_tell_unwritten()
                self.result = self._lw_verb(self.subcommand)(model=self.model, **arguments)
            elif hook is not None:
                hook()


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_own(function: object) -> bool:
    """Whether a hook is Loopwright's, or missing."""
    return function is None or getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def _is_callback(value: object) -> bool:
    return isinstance(value, Callback)
