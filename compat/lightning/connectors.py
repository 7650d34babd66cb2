"""Lightning's connectors and strategy, which libraries access through a trainer, as views on Loopwright's parts.

A view holds the trainer and nothing else. Unsupported attributes raise an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from ...callbacks import Callback
from ...checkpoint import storage
from ...checkpoint.content import OWN_KEY, require_shape
from ...errors import ModuleError
from ...strategies import ParallelStrategy, Strategy
from ...strategies.base import plain_names
from ...trainer import trainer as core
from ...trainer.checkpointing import snapshot
from ...trainer.session import assemble
from ...trainer.session.optimizers import build_optimizers
from ..absent import refuse
from .attached import collect_attached, show_callbacks
from .utilities.part_state import state_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...accelerators import Accelerator
    from ...precision import Precision
    from ...protocols import Cluster, StateDict
    from ...strategies.fsdp.plan import ShardingPlan
    from ...trainer.trainer import Trainer
    from .trainer import Trainer as LightningTrainer

_OUT_DICT = dict[str, Tensor]  # what a logger gets, where Lightning annotates

__all__ = ["ResultsView", "of_trainer"]


def of_trainer(strategy: Strategy, name: str) -> Any:  # what the trainer has
    """Return an attribute that Lightning's strategies have, of the trainer of a strategy, or its own.

    Args:
        strategy: The strategy.
        name: Lightning's name, which Loopwright's strategy does not have.

    Raises:
        AttributeError: Lightning does not have it, or the strategy has no trainer.
    """
    trainer = state_of(strategy).trainer
    if trainer is not None and name in _OF_TRAINER:
        return getattr(trainer, _OF_TRAINER[name])
    if trainer is not None and name in _OF_STRATEGY:
        return _OF_STRATEGY[name](trainer)
    own, make = _OF_ONE.get(name, ("", None))
    if make is not None and own in strategy.__dict__:
        return make(strategy.__dict__[own])
    raise AttributeError(f"{type(strategy).__name__!r} object has no attribute {name!r}")


def _sharding_strategy(plan: ShardingPlan) -> object:
    """Return the member of torch's ShardingStrategy that says how parameters are sharded."""
    from torch.distributed.fsdp import ShardingStrategy  # not imported where nothing is sharded

    if plan.is_replicated:
        return ShardingStrategy.NO_SHARD
    if plan.is_hybrid:
        return ShardingStrategy.HYBRID_SHARD if plan.reshard_after_forward else ShardingStrategy._HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if plan.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


# Name in a strategy of Lightning -> name in that of Loopwright, and what is made of its value.
_OF_ONE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "_ddp_kwargs": ("ddp_kwargs", lambda kwargs: kwargs),
    "sharding_strategy": ("plan", _sharding_strategy),
    "cpu_offload": ("plan", lambda plan: SimpleNamespace(offload_params=plan.offload)),
}


def _connect(trainer: Trainer) -> Callable[[nn.Module], None]:
    """Return a function that attaches a module to the trainer, outside of a run."""

    def connect(model: nn.Module) -> None:
        cast("LightningTrainer", trainer).attach_module(model)

    return connect


def _state_of_module(trainer: Trainer) -> Callable[[], StateDict]:
    """Return the module's state; on rank 0 where it is sharded. On every rank."""

    def lightning_module_state_dict() -> StateDict:
        run = trainer.latest_run()
        if run is None:
            if trainer.lightning_module is None:
                raise ModuleError("There is no module yet.", fix="call trainer.fit first.")
            return trainer.lightning_module.state_dict()
        strategy = trainer.fabric.strategy
        if strategy.traits.shards_parameters or strategy.traits.has_stages:
            return trainer.full_state_dict()
        return strategy.module_state_dict(run.model)

    return lightning_module_state_dict


def _move_batch(trainer: Trainer) -> Callable[..., object]:
    def batch_to_device(batch: object, device: torch.device | None = None, dataloader_idx: int = 0) -> object:
        return trainer.fabric.move_batch(batch, trainer.fabric.device if device is None else device)

    return batch_to_device


def _save(trainer: Trainer) -> Callable[..., None]:
    """Return a function that writes a checkpoint on rank zero."""

    def save_checkpoint(checkpoint: StateDict, filepath: str | Path, storage_options: object = None) -> None:
        if trainer.is_global_zero:
            trainer.fabric.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    return save_checkpoint


def _load(trainer: Trainer) -> Callable[..., StateDict]:
    def load_checkpoint(checkpoint_path: str | Path, weights_only: bool | None = None) -> StateDict:
        return storage.load(checkpoint_path, weights_only=weights_only is not False)

    return load_checkpoint


def _remove(trainer: Trainer) -> Callable[[str | Path], None]:
    """Return a function that removes a checkpoint on rank zero."""

    def remove_checkpoint(filepath: str | Path) -> None:
        if trainer.is_global_zero:
            trainer.fabric.checkpoint_io.remove_checkpoint(filepath)

    return remove_checkpoint


def _load_weights(trainer: Trainer) -> Callable[..., None]:
    def load_model_state_dict(checkpoint: StateDict, strict: bool = True) -> None:
        module = trainer.lightning_module
        if module is None:
            raise ModuleError("There is no module yet.", fix="call trainer.fit first.")
        module.load_state_dict(plain_names(checkpoint["state_dict"]), strict=strict)

    return load_model_state_dict


def _make_optimizers(trainer: Trainer) -> Callable[..., None]:
    def setup_optimizers(*_: object) -> None:
        run = trainer.latest_run()
        if run is None:
            raise ModuleError("There is no module yet.", fix="call trainer.fit first.")
        build_optimizers(run)

    return setup_optimizers


def _place_module(trainer: Trainer) -> Callable[[], None]:
    def model_to_device() -> None:
        if trainer.lightning_module is not None:
            trainer.fabric.strategy.module_to_device(trainer.lightning_module)

    return model_to_device


# Name in Lightning's strategies -> attribute of the strategy.
# Name in Lightning's strategy -> name in the trainer.
_OF_TRAINER = {
    "lightning_module": "lightning_module",
    "model": "model",
    "optimizers": "optimizers",
    "num_nodes": "num_nodes",
    "num_processes": "num_devices",
    "accelerator": "accelerator",
}
_OF_STRATEGY: dict[str, Callable[[Trainer], object]] = {
    "parallel_devices": lambda trainer: [trainer.fabric.device] * trainer.num_devices,
    "is_distributed": lambda trainer: trainer.world_size > 1,
    "cluster_environment": lambda trainer: trainer.fabric.cluster_environment,
    "handles_gradient_accumulation": lambda trainer: False,
    "restore_checkpoint_after_setup": lambda trainer: False,
    "connect": _connect,
    "batch_to_device": _move_batch,
    "model_to_device": _place_module,
    "setup_optimizers": _make_optimizers,
    "load_model_state_dict": _load_weights,
    "save_checkpoint": _save,
    "load_checkpoint": _load,
    "remove_checkpoint": _remove,
    "lightning_module_state_dict": _state_of_module,
}


class _AcceleratorConnector:
    """The strategy, accelerator and precision of a trainer, or of arguments with which a Trainer would be made.

    Args:
        trainer: The trainer; None to resolve the other arguments.
        **arguments: Of the Trainer: `accelerator`, `devices`, `strategy`, `precision`, `num_nodes`, ...
    """

    def __init__(self, trainer: Trainer | None = None, **arguments: Any) -> None:  # Any: see the Trainer
        if trainer is None:
            quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = core.Trainer(**quiet, **arguments)
        self._trainer = trainer

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return self._trainer.accelerator

    @property
    def _accelerator_flag(self) -> str:
        return self._trainer.fabric.device.type

    @property
    def _devices_flag(self) -> int:
        return self._trainer.num_devices

    @property
    def _num_nodes_flag(self) -> int:
        return self._trainer.num_nodes

    @property
    def _strategy_flag(self) -> object:  # a name, or the strategy
        return self._trainer.strategy

    @property
    def _parallel_devices(self) -> list[torch.device]:
        return [self._trainer.fabric.device] * self._trainer.num_devices

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
        """Read a checkpoint.

        Raises:
            CheckpointError: It is damaged or altered, or has objects and weights_only=False is not given.
        """
        if checkpoint_path:
            checkpoint = storage.load(checkpoint_path, weights_only=weights_only is not False)
            require_shape(checkpoint, str(checkpoint_path))
            self._loaded_checkpoint = checkpoint
            self._trainer.ckpt_path = str(checkpoint_path)  # a ModelCheckpoint does not remove it

    def restore_model(self) -> None:
        """Load its weights into the trainer's module."""
        module = self._trainer.lightning_module
        if not self._loaded_checkpoint or module is None:
            return
        hook = getattr(module, "on_load_checkpoint", None)
        if hook is not None:
            hook(self._loaded_checkpoint)
        module.load_state_dict(
            plain_names(self._loaded_checkpoint["state_dict"]),
            strict=getattr(module, "strict_loading", True) is not False,
        )

    def restore_datamodule(self) -> None:
        """Load its state into the trainer's data module."""
        datamodule = self._trainer.datamodule
        state = self._loaded_checkpoint.get(type(datamodule).__qualname__)
        if datamodule is not None and state is not None:
            datamodule.load_state_dict(state)

    def restore_callbacks(self) -> None:
        """Call the callbacks' `on_load_checkpoint`, and load their states."""
        states = self._loaded_checkpoint.get("callbacks")
        if states is None:
            return
        show_callbacks(self._trainer, self._loaded_checkpoint)
        snapshot.restore_callbacks(self._trainer.callbacks, states)

    def restore_precision_plugin_state(self) -> None:
        """Load its loss scale, in fit."""
        state = self._loaded_checkpoint.get(OWN_KEY, {}).get("precision")
        if state is not None:
            self._trainer.precision_plugin.load_state_dict(state)

    def restore_optimizers_and_schedulers(self) -> None:
        """Load the states of optimizers and schedules, whose groups have to be those of the checkpoint.

        Raises:
            KeyError: It has weights only.
        """
        if not self._loaded_checkpoint:
            return
        for kind in ("optimizer_states", "lr_schedulers"):
            if kind not in self._loaded_checkpoint:
                raise KeyError(
                    f"The checkpoint has no {kind!r}, because it was saved with weights only. Save a full checkpoint: "
                    "ModelCheckpoint(save_weights_only=False)."
                )
        self.restore_optimizers()
        self.restore_lr_schedulers()

    def restore_optimizers(self) -> None:
        """Load the states of the optimizers."""
        run = self._trainer.latest_run()
        states = self._loaded_checkpoint.get("optimizer_states", [])
        if run is not None:
            for optimizer, state in zip(run.optimizers, states, strict=True):
                run.fabric.strategy.load_optimizer_state(optimizer, state, run.model)

    def restore_lr_schedulers(self) -> None:
        """Load the states of the schedules."""
        states = self._loaded_checkpoint.get("lr_schedulers", [])
        for config, state in zip(self._trainer.lr_scheduler_configs, states, strict=True):
            config.scheduler.load_state_dict(state)

    def resume_end(self) -> None:
        """Discard the checkpoint."""
        self._loaded_checkpoint = {}

    def dump_checkpoint(self, weights_only: bool | None = None) -> StateDict:
        """Return the checkpoint of the current or last run without saving it. Call it on every rank."""
        run, module = self._trainer.latest_run(), self._trainer.lightning_module
        if run is not None:
            return snapshot.collect(run, is_weights_only=bool(weights_only))
        if module is None:
            raise ModuleError("There is no module yet.", fix="call trainer.fit first.")
        return collect_attached(self._trainer, module, is_weights_only=bool(weights_only))

    def restore_training_state(self) -> None:
        """Raise an error, because a run restores its state at its beginning."""
        refuse("_checkpoint_connector.restore_training_state", "pass ckpt_path to trainer.fit")


class _ResultMetric(NamedTuple):
    """A value that was logged over an epoch.

    Attributes:
        name: Its key.
        value: Its current value.
        meta: Its name and how it was logged: `on_step`, `on_epoch`, `prog_bar`, `logger`, as far as that is known.
        is_tensor: Whether it is a tensor, not a metric object.
    """

    name: str
    value: object  # a tensor or a metric object
    meta: SimpleNamespace
    is_tensor: bool = True


class ResultsView(Mapping[str, float]):
    """The results of an evaluation, with the logged values as `trainer._results.result_metrics`."""

    def __init__(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        self._trainer = trainer
        self._results = results

    @property
    def result_metrics(self) -> list[_ResultMetric]:
        """The values, in no particular order."""
        found, bar = self._trainer.callback_metrics, self._trainer.progress_bar_metrics
        keys = [name for name in found if _without_suffix(name) not in found or _without_suffix(name) == name]
        return [_result_metric(key, found, in_bar=key in bar) for key in keys]

    def __getitem__(self, key: str) -> float:
        return self._results[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)


def _without_suffix(name: str) -> str:
    """Return the key of a value that was logged by step and by epoch."""
    return name.removesuffix("_step").removesuffix("_epoch")


def _result_metric(key: str, found: Mapping[str, object], *, in_bar: bool) -> _ResultMetric:
    is_by_both = f"{key}_step" in found
    meta = SimpleNamespace(
        name=key,
        fx="",
        on_step=is_by_both or f"{key}_epoch" not in found,
        on_epoch=f"{key}_epoch" in found,
        prog_bar=in_bar,
        logger=True,
        sync=SimpleNamespace(should=False),
    )
    return _ResultMetric(key, found[key], meta)
