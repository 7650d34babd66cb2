"""`finetune` and `pretrain`: from settings to a trained model in the folder of the run."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, MissingDependency
from ..fabric import seed_everything
from ..messages import counted
from ..strategies import DeepSpeedStrategy
from ..strategies.optional import memory_shares
from .data import DataReport, DataSettings, RecipeData
from .data.named import download, named_data
from .exporting.export import export_run
from .memory import count_sizes, plan_memory
from .meter import Meter
from .model.loading import base_dtype, meta_model, model_problems, open_tokenizer, read_config
from .module import RecipeModule, strategy_problems
from .optimizer import make_optimizers, make_schedule
from .report import RunReport, describe_data, make_report, show_bytes
from .run_folder import TrainingFolder
from .settings import FinetuneSettings, PretrainSettings, TrainSettings, default_settings, plain_settings
from .step_plan import StepBudget, accumulation, plan_steps
from .trainer_arguments import INTERRUPTED, Machine, find_machine, make_trainer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ..trainer.trainer import Trainer

logger = logging.getLogger(__name__)

LAST = "last.ckpt"


@dataclass(frozen=True)
class Prepared:
    """Everything that a training needs, checked.

    Attributes:
        command: "finetune" or "pretrain".
        settings: The settings.
        run: The folder of the run.
        config: The model's configuration.
        tokenizer: The tokenizer.
        data: The data.
        machine: Where the training runs.
        accumulate: Micro-batches per step.
        trainer: The Trainer.
        meter: The callback that measures.
    """

    command: str
    settings: TrainSettings
    run: TrainingFolder
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: RecipeData
    machine: Machine
    accumulate: int
    trainer: Trainer
    meter: Meter

    def plan(self) -> StepBudget:
        """Return the steps of the training; the data must be set up."""
        return _plan(self.settings, self.data, self.machine, self.accumulate)


def finetune(settings: FinetuneSettings) -> RunReport | None:
    """Train adapters or all parameters of a model; the same settings again continue the run.

    Args:
        settings: The settings.

    Returns:
        What was done; None on ranks other than 0.

    Raises:
        ConfigError: Names everything that is wrong with settings, model and data.
        MissingDependency: A package is not installed.
    """
    return _train("finetune", settings)


def pretrain(settings: PretrainSettings) -> RunReport | None:
    """Train a model from random initial values; the same settings again continue the run.

    Args:
        settings: The settings.

    Returns:
        What was done; None on ranks other than 0.

    Raises:
        ConfigError: Names everything that is wrong with settings, model and data.
        MissingDependency: A package is not installed.
    """
    return _train("pretrain", settings)


def _train(command: str, settings: TrainSettings) -> RunReport | None:
    prepared = prepare(command, settings)
    trainer, run, settings = prepared.trainer, prepared.run, prepared.settings
    is_first = trainer.is_global_zero
    done = None if settings.resume == "force" or trainer.fast_dev_run else RunReport.of_complete(run)
    if done is not None:  # on all ranks
        return done if is_first else None
    if is_first:
        _begin(prepared)
    seed_everything(settings.seed, workers=True)
    module = RecipeModule(
        settings.model_settings(),
        settings.optimizer_settings(),
        0,  # the meter sets it when the data are set up
        chunk_tokens=settings.chunk_tokens,
        verify_packing=settings.packing and settings.verify_packing,
    )
    trainer.fit(module, datamodule=prepared.data, ckpt_path=None if trainer.fast_dev_run else "last")
    val_loss = _validate(prepared, module)
    return _end(prepared, module.notes, val_loss) if is_first else None


def _begin(prepared: Prepared) -> None:
    """Write the initial files of the run's folder, and show the data."""
    run, data = prepared.run, prepared.data
    plan = prepared.plan()
    if not prepared.trainer.fast_dev_run:
        run.report.unlink(missing_ok=True)
        run.write(
            prepared.command,
            plain_settings(prepared.settings),
            global_batch=plan.global_batch,
            num_steps=plan.num_steps,
            data=_counts(data.report),
            used=_used(prepared),
        )
        run.save_tokenizer(prepared.tokenizer)
    sizes = count_sizes(prepared.settings.model_settings())
    prepared.trainer.print(describe_data(data.report, plan, sizes, in_color=sys.stdout.isatty()))


def _used(prepared: Prepared) -> dict[str, str | float]:
    """Return what was chosen where a setting leaves the choice."""
    settings = prepared.settings
    factor = prepared.machine.ranks if settings.scale_lr else 1
    return {
        "learning_rate": factor * settings.optimizer_settings().learning_rate,
        "dtype": str(base_dtype(prepared.config, settings.model_settings())).removeprefix("torch."),
        "strategy": type(prepared.machine.strategy).__name__,
        "devices": prepared.trainer.world_size,
        "precision": str(prepared.trainer.precision),
    }


def _validate(prepared: Prepared, module: RecipeModule) -> float | None:
    """Return the validation loss of the last step, None without one; on all ranks.

    A training of steps or tokens may end within an epoch, after whose end there would have been a validation.
    """
    trainer, last = prepared.trainer, prepared.run.checkpoints / LAST
    found = trainer.callback_metrics.get("val_loss")
    if not prepared.settings.has_val or trainer.fast_dev_run or not last.exists():
        return None if found is None else float(found)
    if found is None or trainer.metric_step("val_loss") != trainer.global_step:
        # From the file: strategies that fork or spawn leave the trained weights in their processes.
        trainer.validate(module, datamodule=prepared.data, ckpt_path=last, verbose=False)
        found = trainer.callback_metrics["val_loss"]
    return float(found)


def _end(prepared: Prepared, notes: list[str], val_loss: float | None) -> RunReport:
    """Write the model and the report."""
    run, trainer, data = prepared.run, prepared.trainer, prepared.data
    report = make_report(
        prepared.command, trainer, prepared.meter, prepared.plan(), data.report, out=run.path, notes=notes
    )
    report = replace(report, val_loss=val_loss)
    if trainer.fast_dev_run or not (run.checkpoints.is_dir() and any(run.checkpoints.iterdir())):
        return report
    report = replace(report, model=_export(run))
    report.write(run)
    _remove_interrupted(run)
    return report


def _remove_interrupted(run: TrainingFolder) -> None:
    """Remove the checkpoint of an interruption, after which the run came to its end."""
    path = run.checkpoints / f"{INTERRUPTED}.ckpt"
    if (run.checkpoints / LAST).exists() and path.exists():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _export(run: TrainingFolder) -> str:
    """Write the model from the last checkpoint, in place of one of an earlier training; return its folder."""
    folder = run.model.with_name("model.new")
    shutil.rmtree(folder, ignore_errors=True)
    new = folder / run.path.absolute().name / run.model.name  # the model card has the name of the run
    export_run(run.path, new)
    shutil.rmtree(run.model, ignore_errors=True)
    new.rename(run.model)
    shutil.rmtree(folder)
    return str(run.model)


def _counts(report: DataReport) -> dict[str, int]:
    return {name: getattr(report, name) for name in ("samples", "rows", "tokens", "trained_tokens")}


def prepare(command: str, settings: TrainSettings) -> Prepared:
    """Check everything, and return what a training needs. On rank 0 the data are tokenized.

    Args:
        command: "finetune" or "pretrain".
        settings: The settings.

    Raises:
        ConfigError: Names everything that is wrong.
        MissingDependency: A package is not installed.
    """
    prepared, problems = _prepare(command, settings)
    if prepared is None:
        raise refused(command, problems)
    return prepared


def check(settings: TrainSettings) -> list[str]:
    """Return what is wrong with settings, model and first records of a training, as `name: Expected ..., got ...`.

    Raises:
        MissingDependency: A package is not installed.
    """
    command = "pretrain" if isinstance(settings, PretrainSettings) else "finetune"
    return _prepare(command, settings, is_trial=True)[1]


def _prepare(command: str, settings: TrainSettings, *, is_trial: bool = False) -> tuple[Prepared | None, list[str]]:
    """Return what a training needs, None with problems, and the problems; on trial, no data are tokenized."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependency("transformers", needed_for=f"recipe {command}", extra="recipes")
    run = TrainingFolder(settings.out.expanduser())
    settings = _with_length_of_model(settings)
    problems = [*settings.problems(), *model_problems(settings.model_settings()), *run.problems()]
    if settings.resume != "force":
        problems += run.changes(command, plain_settings(settings), default_settings(settings))
    config, tokenizer = _open_tokenizer(settings, problems)
    machine, found = find_machine(settings, run)
    if machine is not None and not problems and _is_too_large(settings, machine):
        settings = replace(settings, strategy="fsdp")
        machine, found = find_machine(settings, run)
    problems += found
    accumulate = 0
    if machine is not None:
        problems += strategy_problems(settings.model_settings(), machine.strategy, packing=settings.packing)
        accumulate, problem = accumulation(_global_batch(settings, run, machine), settings.micro_batch, machine.ranks)
        problems += [problem] if problem else []
    if not problems:
        problems += _optimizer_problems(settings, machine)
    data, needs_download = None, False
    if tokenizer is not None:
        chosen = settings.data_settings()
        needs_download = bool(named_data(chosen.data) or named_data(chosen.val_data))
        if needs_download and not problems:
            chosen, needs_download = download(chosen), False
        data = RecipeData(chosen, tokenizer, run.cache)
    meter, trainer = None, None
    if machine is not None and data is not None:
        make_plan = functools.partial(_plan, settings, data, machine, accumulate)
        meter = Meter(make_plan, data.describe_rows, limits_steps=settings.tokens is not None)
        trainer, found = make_trainer(settings, run, [meter], accumulate=max(1, accumulate))
        problems += found
    is_first = trainer is None or trainer.is_global_zero
    if data is not None and is_first and not list(run.problems()) and not needs_download:
        if problems or is_trial:  # a mistake in a setting is named before an hour of tokenizing
            problems += data.first_problems()
        else:
            problems += data.problems(None if config is None else _vocab_size(config))
            problems += [] if problems else _rows_problems(settings, run, data, machine, accumulate)
    # Rank 0 wrote the settings into the folder meanwhile, or will name what is wrong: it alone decides.
    is_refused = problems and is_first
    if is_refused or None in (config, tokenizer, data, machine, meter, trainer):
        return None, problems
    assert config is not None
    assert tokenizer is not None
    assert data is not None
    assert machine is not None
    assert meter is not None
    assert trainer is not None
    return Prepared(command, settings, run, config, tokenizer, data, machine, accumulate, trainer, meter), []


def _optimizer_problems(settings: TrainSettings, machine: Machine | None) -> list[str]:
    """Return why optimizer and schedule cannot be made, for parameters without values."""
    chosen = settings.optimizer_settings()
    name = str((chosen.optimizer or {}).get("class_path", "")).rpartition(".")[2]
    if machine is not None and isinstance(machine.strategy, DeepSpeedStrategy) and (chosen.groups or name == "Muon"):
        what = "groups" if chosen.groups else "optimizer"
        got = name or f"groups of {', '.join(chosen.groups)}"
        return [f"{what}: Expected AdamW or the like with DeepSpeed, which flattens parameters, got {got}."]
    try:
        for one in make_optimizers(chosen, meta_model(settings.model_settings())):
            make_schedule(chosen, one, 100)
    except ConfigError as error:
        return [error.what]
    return []


def refused(command: str, problems: list[str]) -> ConfigError:
    """Return the error that lists problems.

    Args:
        command: Name of the recipe.
        problems: Each as `name: Expected ..., got ...`.
    """
    lines = list(dict.fromkeys(problems))
    count = counted(len(lines), "problem")
    return ConfigError(
        f"Expected valid settings, model and data for {command}, got {count}:"
        + "".join(f"\n  - {one}" for one in lines),
        fix=f"correct them; `loopwright recipe {command} --help` lists the settings.",
    )


def _is_too_large(settings: TrainSettings, machine: Machine) -> bool:
    """Return whether a model needs more memory than a device has, with the strategy that "auto" chose for several."""
    size = device_memory(machine.strategy.device)
    if settings.strategy != "auto" or machine.ranks < 2 or size is None:
        return False
    shares = memory_shares(machine.strategy, machine.ranks, int(settings.trainer.get("num_nodes", 1)))
    needed = plan_memory(settings, count_sizes(settings.model_settings()), shares).total
    if needed > size:
        name, sizes = type(machine.strategy).__name__, f"{show_bytes(needed)} of {show_bytes(size)}"
        logger.info("strategy is fsdp: with %s, a device would need about %s.", name, sizes)
    return needed > size


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device; None for a CPU, whose memory processes share."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def _with_length_of_model(settings: TrainSettings) -> TrainSettings:
    """Return the settings with rows of the model's length, where the default is longer than it."""
    if settings.max_length != DataSettings.max_length:
        return settings
    try:
        longest = _longest(read_config(settings.model_settings()))
    except ConfigError:  # reported as a problem of `model`
        return settings
    if longest is None or longest >= settings.max_length:
        return settings
    logger.info("max_length is %d, the model's, in place of the default %d.", longest, settings.max_length)
    return replace(settings, max_length=longest)


def _longest(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a model has; None for any."""
    longest = getattr(_text_config(config), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def _open_tokenizer(
    settings: TrainSettings, problems: list[str]
) -> tuple[PretrainedConfig | None, PreTrainedTokenizerBase | None]:
    """Return the model's configuration and the tokenizer, None where they cannot be read; add to the problems."""
    config, tokenizer = None, None
    try:
        config = read_config(settings.model_settings())
    except ConfigError as error:
        problems += error.what.splitlines()
        if settings.tokenizer is None:
            return None, None
    try:
        tokenizer = open_tokenizer(
            settings.tokenizer or settings.model,
            trust_remote_code=settings.trust_remote_code,
            allow_download=settings.allow_download,
        )
    except ConfigError as error:
        problems += error.what.splitlines()
    if config is None:
        return config, tokenizer
    longest = _longest(config)
    if longest is not None and settings.max_length > longest:
        problems.append(f"max_length: Expected at most {longest}, the model's, got {settings.max_length}.")
    if tokenizer is not None and len(tokenizer) > _vocab_size(config):
        problems.append(
            f"tokenizer: Expected at most {_vocab_size(config)} tokens, the rows of the model's embedding, got "
            f"{len(tokenizer)}."
        )
    return config, tokenizer


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    found: PretrainedConfig = config.get_text_config()
    return found


def _vocab_size(config: PretrainedConfig) -> int:
    return int(_text_config(config).vocab_size)


def _global_batch(settings: TrainSettings, run: TrainingFolder, machine: Machine) -> int:
    """Return the rows per step; "auto" is what the run began with."""
    if isinstance(settings.global_batch, int):
        return settings.global_batch
    try:
        stored = (run.read() or {}).get("global_batch")
    except ConfigError:  # reported as a problem of `out`
        stored = None
    return stored if isinstance(stored, int) else machine.ranks * settings.micro_batch


def _plan(settings: TrainSettings, data: RecipeData, machine: Machine, accumulate: int) -> StepBudget:
    report: DataReport = data.report
    limit = next(
        ((name, number) for name in ("steps", "tokens") if (number := getattr(settings, name)) is not None),
        ("epochs", settings.epochs or 1),
    )
    return plan_steps(
        ranks=machine.ranks,
        micro_batch=settings.micro_batch,
        accumulate=accumulate,
        rows=report.rows,
        tokens=report.tokens,
        trained=report.trained_tokens,
        takes_all=machine.takes_all,
        limit=limit,
    )


def _rows_problems(
    settings: TrainSettings, run: TrainingFolder, data: RecipeData, machine: Machine | None, accumulate: int
) -> list[str]:
    """Return what is wrong with the rows: too few for the ranks, or others than the run began with."""
    data.setup("fit")
    problems = []
    counts, before = _counts(data.report), (run.read() or {}).get("data")
    if settings.resume != "force" and before not in (None, counts):
        problems.append(f"data: Expected {_listed(before)}, as in the run in {run.path}, got {_listed(counts)}.")
    if machine is not None and not _plan(settings, data, machine, accumulate).steps_per_epoch:
        problems.append(
            f"data: Expected at least {machine.ranks * settings.micro_batch} rows, so that each of {machine.ranks} "
            f"ranks has micro_batch={settings.micro_batch}, got {counts['rows']}."
        )
    return problems


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items())
