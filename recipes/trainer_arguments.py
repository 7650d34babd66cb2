"""The Trainer of a recipe, from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..callbacks import Callback, ModelCheckpoint
from ..cli.trainer_types import TRAINER_TYPES
from ..errors import ConfigError, nearest
from ..fabric import Fabric
from ..loggers import CSVLogger
from ..settings.build import Building
from ..settings.parameters import parameters_of
from ..settings.tree import Settings
from ..settings.typed import Typed
from ..strategies import Strategy
from ..strategies.registry import STRATEGY_REGISTRY
from ..trainer.trainer import Trainer
from .module import block_classes
from .run_folder import TrainingFolder
from .settings import OWNED, TrainSettings

# Any in this file: arguments of the Trainer.

SAVE_INTERVAL = timedelta(minutes=15)
INTERRUPTED = "interrupted"  # checkpoint of a run that Ctrl-C, a signal or an error ended
_DEFAULTS: dict[str, Any] = {
    "gradient_clip_val": 1.0, "log_every_n_steps": 10, "num_sanity_val_steps": 0, "nonfinite_loss": "raise",
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Where a training runs, known before the Trainer is made.

    Attributes:
        ranks: Ranks that read different data.
        takes_all: Whether ranks without a micro-batch at the end of an epoch take part in its last step.
        strategy: The strategy; the Trainer gets another one, made from the same settings.
    """

    ranks: int
    takes_all: bool
    strategy: Strategy


def find_machine(settings: TrainSettings, run: TrainingFolder) -> tuple[Machine | None, list[str]]:
    """Return where a training would run; None, and what is wrong, if it cannot.

    Args:
        settings: The settings.
        run: Gets logs.
    """
    given, problems = _typed(settings, run)
    if problems:
        return None, problems
    names = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins")
    try:
        strategy = Fabric(**{name: given[name] for name in names if name in given}).strategy
    except ConfigError as error:
        return None, [error.what]
    _take_all_rows(strategy, settings)
    return Machine(strategy.topology.data_size, strategy.uneven != "stop_all", strategy), []


def make_trainer(
    settings: TrainSettings, run: TrainingFolder, callbacks: list[Callback], *, accumulate: int
) -> tuple[Trainer | None, list[str]]:
    """Return the Trainer, without the limit of `tokens`, and what is wrong; None if it cannot be.

    Args:
        settings: The settings.
        run: Gets logs and checkpoints.
        callbacks: Further callbacks.
        accumulate: Micro-batches per step.
    """
    given, problems = _typed(settings, run)
    if problems:
        return None, problems
    own = _listed(given.pop("callbacks", None))
    arguments = {**_DEFAULTS, "default_root_dir": run.path, **_limits(settings, accumulate), **given}
    if "logger" not in given:
        arguments["logger"] = CSVLogger(run.path, name="logs", version="")
    if arguments.get("enable_checkpointing") is not False and not arguments.get("fast_dev_run"):
        callbacks = [*callbacks, *_checkpoints(settings, run)]
    try:
        trainer = Trainer(callbacks=[*own, *callbacks], accumulate_grad_batches=accumulate, **arguments)
    except ConfigError as error:
        return None, [error.what]
    _take_all_rows(trainer.strategy, settings)
    trainer.parts.saving.how_to_continue = "the same command"
    return trainer, []


def _typed(settings: TrainSettings, run: TrainingFolder) -> tuple[dict[str, Any], list[str]]:
    """Return the Trainer's arguments that settings name, as objects, and what is wrong with them."""
    typed = Typed(Settings(), log_folder=str(run.path))
    known = parameters_of(Trainer).named
    given: dict[str, Any] = {name: getattr(settings, name) for name in ("strategy", "devices")}
    if settings.precision is not None:
        given["precision"] = settings.precision
    given.update(settings.trainer)
    found = {}
    for name, value in given.items():
        path = name if name in OWNED else f"trainer.{name}"
        if name not in known:
            typed.problems.append(f"{path}: Expected an argument of the Trainer, got {name}{nearest(name, known)}")
            continue
        if name == "strategy" and isinstance(value, str):
            value = _strategy(settings, value)
        annotation = TRAINER_TYPES[name]() if name in TRAINER_TYPES else known[name].annotation
        found[name] = typed.value(value, annotation, path)
    if typed.problems:
        return {}, [f"{one}." if not one.endswith(".") else one for one in typed.problems]
    building = Building(Settings(), collects=True)
    made = {name: building.made(value) for name, value in found.items()}
    return made, building.problems


def _strategy(settings: TrainSettings, name: str) -> Any:
    """Return the strategy with the model's blocks as units, where it shards by units; else the name."""
    head = name.partition(":")[0].lower()
    if head not in STRATEGY_REGISTRY.names():
        return name  # the Trainer names the known ones, or "auto" chooses
    if "auto_wrap_policy" not in parameters_of(STRATEGY_REGISTRY.get(head)).named:
        return name
    try:
        blocks = block_classes(settings.model_settings())
        return STRATEGY_REGISTRY.create(name, auto_wrap_policy=blocks) if blocks else name
    except ConfigError:
        return name  # reported for the model, or by the Trainer


def _take_all_rows(strategy: Strategy, settings: TrainSettings) -> None:
    """Let ranks without a micro-batch take part in the last step of an epoch, unless the user made the strategy."""
    if isinstance(settings.strategy, str) and "zero_weight" in strategy.traits.uneven_choices:
        strategy.uneven = "zero_weight"


def _limits(settings: TrainSettings, accumulate: int) -> dict[str, Any]:
    found: dict[str, Any] = {"max_epochs": -1}
    if settings.steps is not None:
        found["max_steps"] = settings.steps
    elif settings.tokens is None:
        found["max_epochs"] = settings.epochs or 1
    if not settings.has_val:
        found["limit_val_batches"] = 0
    if settings.val_every is not None:
        # The Trainer counts micro-batches, here across epochs.
        found.update(val_check_interval=settings.val_every * accumulate, check_val_every_n_epoch=None)
    return found


def _checkpoints(settings: TrainSettings, run: TrainingFolder) -> list[Callback]:
    """Return what writes `last` at intervals and at the end, and `best` after validations.

    Ctrl-C, SIGTERM and errors lose no step: the next run continues from `interrupted`, if it is the newest.
    """
    often: dict[str, Any] = (
        {"train_time_interval": SAVE_INTERVAL}
        if settings.save_every is None
        else {"every_n_train_steps": settings.save_every}
    )
    shared: dict[str, Any] = {"dirpath": run.checkpoints, "enable_version_counter": False}
    last = ModelCheckpoint(
        filename=INTERRUPTED, save_top_k=0, save_last=True, save_on_exception=True, **shared, **often
    )
    found: list[Callback] = [last]
    if settings.has_val:
        best = ModelCheckpoint(filename="best", monitor="val_loss", save_on_train_epoch_end=False, **shared)
        found.append(best)
    return found


def _listed(value: Any) -> list[Callback]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
