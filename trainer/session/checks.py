"""Checks of what was passed to a verb: the module and the data. All of them run before processes start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ...data.module import DataModule
from ...data.tree import are_same_loaders
from ...errors import ConfigError, ModuleError
from ...protocols import Loaders
from ...remote import is_url
from ...strategies.adaptive_clipping import refuse_engine
from ...strategies.optional import ChecksLayers, ConfiguresOptimizers
from ..hooks import MODULE_BASES, Hook, find_override
from ..lifecycle import hook_names
from ..module import Module
from . import assemble

if TYPE_CHECKING:
    from ...strategies import Strategy
    from ..trainer import Trainer
    from .fit import FitSession
    from .session import Session

STAGE_OF = {"validate": "validation", "test": "test", "predict": "predict"}


def unwrapped(model: object) -> nn.Module:
    """Return the user's module, also from what torch.compile returned.

    Raises:
        ModuleError: It is not an nn.Module.
    """
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        original: nn.Module = model._orig_mod
        return original
    if not isinstance(model, nn.Module):
        raise ModuleError(
            "Expected lw.Module or another nn.Module, got "
            f"{f'the class {model.__name__}' if isinstance(model, type) else type(model).__name__}.",
            fix=f"pass an instance: {model.__name__}(...)."
            if isinstance(model, type)
            else "pass the module first, then its data: trainer.fit(module, loader).",
        )
    if "_modules" not in vars(model):
        raise ModuleError(
            f"{type(model).__name__}.__init__ did not call super().__init__().",
            fix="call it first in __init__.",
        )
    return model


def split_datamodule(loaders: Loaders, datamodule: object, name: str) -> tuple[Loaders, DataModule | None]:
    """Accept a DataModule passed instead of the loaders.

    Raises:
        ConfigError: Both are given.
        ModuleError: `datamodule` is not a data module.
    """
    for given in (loaders, datamodule):
        if isinstance(given, type):
            raise ModuleError(
                f"Expected loaders or a data module, got the class {given.__name__}.",
                fix=f"pass an instance: {given.__name__}(...).",
            )
    if isinstance(loaders, DataModule):
        if datamodule is not None:
            raise both_given(name)
        return None, loaders
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise ModuleError(
            f"datamodule is {type(datamodule).__name__}, expected lw.DataModule.", fix="pass loaders by position."
        )
    return loaders, datamodule


def compare_data(trainer: Trainer, owner: nn.Module | DataModule, loaders: Loaders) -> None:
    """Forget where the last fit's training data were if this fit has other loaders.

    Loaders of a module or data module count as the last fit's loaders if the same object creates them.
    """
    before, trainer._lw_train_source = trainer._lw_train_source, owner if loaders is None else loaders
    if before is not None and not are_same_loaders(before, trainer._lw_train_source):
        trainer._lw_stream_state = None


def both_given(name: str) -> ConfigError:
    """Return the error about loaders and a data module at once."""
    return ConfigError(f"both {name} and datamodule are given.", fix="pass one of them.")


def check(session: Session, module: nn.Module, datamodule: DataModule | None) -> None:
    """Refuse a module and data that are mistaken for something else."""
    if not isinstance(module, Module):
        from .forward_loss import equip

        equip(module, session.verb)
    session.behavior.check_hook_names(module, "module", hook_names("module"))
    if datamodule is not None:
        session.behavior.check_hook_names(datamodule, "datamodule", hook_names("datamodule"))


def check_evaluation(session: Session, module: nn.Module) -> None:
    """Refuse a module without the step, and an evaluation without data."""
    stage = STAGE_OF[session.verb]
    if session.verb != "predict":
        assemble.require_step(module, f"{stage}_step", session.verb)
    elif not callable(getattr(module, "predict_step", None)):
        raise ModuleError(
            f"trainer.predict needs {type(module).__name__}.predict_step(self, batch, batch_idx).", fix="define it."
        )
    session.loaders.require(stage, session.verb)


def check_fit(session: FitSession, module: nn.Module) -> None:
    """Refuse a module that cannot be trained, a fit without data, and arguments that manual optimization forbids."""
    assemble.require_step(module, "training_step", "fit")
    if not isinstance(session.strategy, ConfiguresOptimizers):  # an engine's configuration may say
        assemble.require_step(module, "configure_optimizers", "fit")
    session.loaders.require("train", "fit")
    if session.trainer.gradient_clip_algorithm == "agc":
        strategy = session.strategy
        refuse_engine(type(strategy).__name__, owns_optimizers=strategy.traits.owns_optimizers)
    if getattr(module, "automatic_optimization", True):
        return
    trainer, wrong = session.trainer, []
    if trainer.accumulate_grad_batches != 1:
        wrong.append(f"accumulate_grad_batches={trainer.accumulate_grad_batches}")
    if trainer.global_batch_size is not None:
        wrong.append(f"global_batch_size={trainer.global_batch_size}")
    if trainer.gradient_clip_val:
        wrong.append(f"gradient_clip_val={trainer.gradient_clip_val}")
    if trainer.accumulation_scheduler is not None:
        wrong.append("GradientAccumulationScheduler")
    if wrong:
        raise ConfigError(
            f"{' and '.join(wrong)}: the trainer does neither in manual optimization.",
            fix="accumulate manually, and call self.clip_gradients(optimizer, ...) in training_step.",
        )


def check_packages(trainer: Trainer, verb: str, ckpt_path: str | Path | None) -> None:
    """Refuse URLs and callbacks that need a package which is not installed.

    Raises:
        MissingDependency: Names it.
    """
    for name, place in (("default_root_dir", trainer.default_root_dir), ("ckpt_path", ckpt_path)):
        if place is not None and "://" in str(place) and is_url(place):
            from ...remote.store import check_protocol

            with suppress(ConfigError):  # of an unknown protocol, which a plugin for checkpoints may read
                check_protocol(str(place), name)
    for callback in trainer.callbacks:
        if hasattr(callback, "_lw_check_packages"):
            callback._lw_check_packages(trainer, verb)


def check_layers(strategy: Strategy, module: nn.Module) -> None:
    """Refuse layers that the strategy cannot split, unless the module builds them later."""
    if isinstance(strategy, ChecksLayers) and not builders(module):
        strategy.check_layers(module)


def builders(
    module: nn.Module, override_of: Callable[[object, str, tuple[type, ...]], Hook | None] = find_override
) -> list[str]:
    """Return the names of the hooks in which the module builds layers.

    Args:
        module: The user's module.
        override_of: Returns the module's own hook, None where it has none.
    """
    names = ("configure_sharded_model", "configure_model")
    return [name for name in names if override_of(module, name, MODULE_BASES) is not None]


def module_of_evaluation(verb: str, model: nn.Module | None, last: nn.Module | None) -> nn.Module:
    """Return the module to evaluate: the one that was passed, or that of the last run.

    Raises:
        ModuleError: There is none.
    """
    module = model if model is not None else last
    if module is None:
        raise ModuleError(
            f"trainer.{verb}() was called without a module, and none was used before.",
            fix=f"pass one: trainer.{verb}(module, ...).",
        )
    return module
