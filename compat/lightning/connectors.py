"""What libraries reach through a trainer: Lightning's connectors, loops and strategy, as views on Loopwright's parts.

A view holds the trainer and nothing else. Unsupported attributes raise an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ...callbacks import Callback
from ...checkpoint import storage
from ...errors import ModuleError
from ...strategies import ParallelStrategy, Strategy
from ...trainer.checkpointing import snapshot
from ...trainer.hooks import data_bases, find_override, module_bases
from ...trainer.setup import assemble
from .imports.absent import refuse

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ...precision import Precision
    from ...protocols import Cluster, StateDict
    from ...trainer.trainer import Trainer

__all__ = ["LoopView", "ResultsView", "bind_strategy", "replace_optimizers"]


def bind_strategy(trainer: Trainer) -> None:
    """Give a trainer's strategy the attributes that Lightning's strategies have, while the trainer uses it.

    Only attributes that the strategy does not define are added, and only to this strategy.
    """
    trainer.fabric.strategy.__dict__["_lightning_trainer"] = trainer


def _of_trainer(strategy: Strategy, name: str) -> Any:  # what the trainer has
    trainer = strategy.__dict__.get("_lightning_trainer")
    if trainer is not None and name in _OF_TRAINER:
        return getattr(trainer, _OF_TRAINER[name])
    if trainer is not None and name in _OF_STRATEGY:
        return _OF_STRATEGY[name](trainer)
    raise AttributeError(f"{type(strategy).__name__!r} object has no attribute {name!r}")


def _get_optimizers(strategy: Strategy) -> list[Optimizer]:
    """The optimizers of the trainer whose strategy this is, where a program of Lightning made that trainer."""
    own: list[Optimizer] | None = strategy.__dict__.get("optimizers")
    found: list[Optimizer] = _of_trainer(strategy, "optimizers") if own is None else own
    return found


def _set_optimizers(strategy: Strategy, optimizers: list[Optimizer]) -> None:
    trainer = strategy.__dict__.get("_lightning_trainer")
    if trainer is None:
        strategy.__dict__["optimizers"] = optimizers
    else:
        replace_optimizers(trainer, optimizers)


# In place, so that `trainer.strategy` is the strategy itself, and not a wrapper.
Strategy.__getattr__ = _of_trainer  # type: ignore[attr-defined]
Strategy.optimizers = property(_get_optimizers, _set_optimizers)  # type: ignore[attr-defined]


def _connect(trainer: Trainer) -> Callable[[nn.Module], None]:
    """Return a function that attaches a module to the trainer, outside of a run."""

    def connect(model: nn.Module) -> None:
        trainer._spawned_module = model

    return connect


def _state_of_module(trainer: Trainer) -> Callable[[], StateDict]:
    """Return the module's state, gathered where it is sharded. On every rank."""

    def lightning_module_state_dict() -> StateDict:
        run = trainer.latest_run()
        if run is None:
            raise ModuleError("There is no module yet.", fix="call trainer.fit first.")
        return trainer.fabric.strategy.module_state_dict(run.model)

    return lightning_module_state_dict


# Name in Lightning's strategy -> name in the trainer.
_OF_TRAINER = {
    "lightning_module": "lightning_module",
    "model": "model",
    "optimizers": "optimizers",
    "lr_scheduler_configs": "lr_scheduler_configs",
    "num_nodes": "num_nodes",
    "num_processes": "num_devices",
    "accelerator": "accelerator",
}
_OF_STRATEGY: dict[str, Callable[[Trainer], object]] = {
    "parallel_devices": lambda trainer: [trainer.fabric.device] * trainer.num_devices,
    "is_distributed": lambda trainer: trainer.world_size > 1,
    "cluster_environment": lambda trainer: trainer.fabric.cluster_environment,
    "handles_gradient_accumulation": lambda trainer: False,
    "connect": _connect,
    "lightning_module_state_dict": _state_of_module,
}


def replace_optimizers(trainer: Trainer, optimizers: list[Optimizer]) -> None:
    """Replace the optimizers of a run, before its first step.

    Raises:
        ModuleError: No run is active.
    """
    run = trainer.latest_run()
    if run is None:
        raise ModuleError("trainer.optimizers was assigned outside of a run.", fix="assign it in on_fit_start.")
    if len(optimizers) != len(run.optimizers):
        refuse(
            f"trainer.optimizers = {len(optimizers)} optimizers in place of {len(run.optimizers)}",
            "return all of them from configure_optimizers",
        )
    if any(new is not old for new, old in zip(optimizers, run.optimizers, strict=True)):
        refuse("trainer.optimizers = other optimizers", "return them from configure_optimizers")


class _AcceleratorConnector:
    """The strategy, accelerator and precision of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def is_distributed(self) -> bool:
        """Whether the strategy supports several processes, even if there is one."""
        return isinstance(self._trainer.fabric.strategy, ParallelStrategy)

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._trainer.strategy

    @property
    def use_distributed_sampler(self) -> bool:
        """Whether loaders are distributed over ranks."""
        return bool(self._trainer.use_distributed_sampler)

    @property
    def cluster_environment(self) -> Cluster | None:
        """The strategy, which provides the other processes."""
        return self._trainer.fabric.cluster_environment

    @property
    def precision_plugin(self) -> Precision:
        """The precision object."""
        return self._trainer.precision_plugin

    @property
    def _precision_flag(self) -> str:
        return self._trainer.precision

    def __getattr__(self, name: str) -> Any:  # Any: of the trainer or of its fabric
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._trainer.fabric, name)


class _CallbackConnector:
    """The order of callbacks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @staticmethod
    def _reorder_callbacks(callbacks: list[Callback]) -> list[Callback]:
        """Return the callbacks, the tuner's first and checkpoints last."""
        return assemble.order_callbacks(list(callbacks))


class _CheckpointConnector:
    """A checkpoint that a library loads in steps, outside of a run; `trainer.fit(ckpt_path=...)` needs none of this.

    Attributes:
        _loaded_checkpoint: The checkpoint that `resume_start` read; empty before it and after `resume_end`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaded_checkpoint: StateDict = {}

    def resume_start(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Read a checkpoint."""
        if checkpoint_path:
            self._loaded_checkpoint = storage.load(checkpoint_path, weights_only=weights_only is not False)

    def restore_model(self) -> None:
        """Load its weights into the trainer's module."""
        module = self._trainer.lightning_module
        if not self._loaded_checkpoint or module is None:
            return
        hook = getattr(module, "on_load_checkpoint", None)
        if hook is not None:
            hook(self._loaded_checkpoint)
        module.load_state_dict(self._loaded_checkpoint["state_dict"], strict=getattr(module, "strict_loading", True))

    def restore_datamodule(self) -> None:
        """Load its state into the trainer's data module."""
        datamodule = self._trainer.datamodule
        state = self._loaded_checkpoint.get(type(datamodule).__qualname__)
        if datamodule is not None and state is not None:
            datamodule.load_state_dict(state)

    def restore_callbacks(self) -> None:
        """Load the states of the callbacks."""
        for callback in self._trainer.callbacks:
            state = self._loaded_checkpoint.get("callbacks", {}).get(callback.state_key)
            if state:
                callback.load_state_dict(state)

    def resume_end(self) -> None:
        """Discard the checkpoint."""
        self._loaded_checkpoint = {}

    def dump_checkpoint(self, weights_only: bool | None = None) -> StateDict:
        """Return the checkpoint of the current or last run without saving it. Call it on every rank."""
        run = self._trainer.latest_run()
        if run is None:
            raise ModuleError("There is no module yet.", fix="call trainer.fit first.")
        return snapshot.collect(run, is_weights_only=bool(weights_only))

    def restore_training_state(self) -> None:
        """Raise an error, because a run restores its state at its beginning."""
        refuse("_checkpoint_connector.restore_training_state", "pass ckpt_path to trainer.fit")


class LoopView:
    """A loop of a trainer: its progress and its data."""

    def __init__(self, trainer: Trainer, stage: str) -> None:
        self._trainer = trainer
        self._stage = stage

    @property
    def _data_source(self) -> _DataSource:
        return _DataSource(self._trainer, self._stage)

    @property
    def max_batches(self) -> int | float | list[int | float]:
        """Batches of an epoch."""
        return self._trainer.num_training_batches if self._stage == "train" else self._batches()

    def _batches(self) -> list[int | float]:
        return self._trainer.loaders.num_batches(self._stage)

    @property
    def num_dataloaders(self) -> int:
        """Number of loaders."""
        return len(self._batches())

    @property
    def batch_idx(self) -> int:
        """Index of the current batch; -1 outside a run."""
        run = self._trainer._run
        return run.batch_idx if run is not None else -1

    @property
    def global_step(self) -> int:
        """Training steps taken."""
        return self._trainer.global_step

    @property
    def val_loop(self) -> LoopView:
        """The validation within fit."""
        return LoopView(self._trainer, "validation")

    @property
    def epoch_loop(self) -> LoopView:
        """The batches of an epoch."""
        return self

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return self._trainer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"Loopwright's loop for {self._stage!r} has no {name!r}; see docs/migrating.md.")


class _DataSource(NamedTuple):
    """The source of a loop's loaders."""

    trainer: Trainer
    stage: str

    def is_defined(self) -> bool:
        """Whether loaders were given, or module or data module have the hook."""
        hook = f"{_HOOK[self.stage]}_dataloader"
        owners = ((self.trainer.datamodule, data_bases()), (self.trainer.lightning_module, module_bases()))
        given = self.trainer.train_dataloader if self.stage == "train" else self.trainer.loaders.original(self.stage)
        return given is not None or any(
            owner is not None and find_override(owner, hook, bases) is not None for owner, bases in owners
        )


_HOOK = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}


class _ResultMetric(NamedTuple):
    """A value that was logged over an epoch.

    Attributes:
        name: Its key.
        value: Its current value.
    """

    name: str
    value: object  # a tensor or a metric object


class ResultsView(Mapping[str, float]):
    """The results of an evaluation, with the logged values as `trainer._results.result_metrics`."""

    def __init__(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        self._trainer = trainer
        self._results = results

    @property
    def result_metrics(self) -> list[_ResultMetric]:
        """The values, in no particular order."""
        return [_ResultMetric(name, value) for name, value in self._trainer.callback_metrics.items()]

    def __getitem__(self, key: str) -> float:
        return self._results[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)
