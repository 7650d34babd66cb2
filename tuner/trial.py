"""A trial: a short, separate run with a copy of the module, which leaves no trace.

What a trial could change is copied (module, data module), left out (loggers, callbacks, files), or restored (random
number generators, positions of loaders, the state of precision and strategy).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from ..accelerators.out_of_memory import free_memory
from ..callbacks import Callback
from ..data.combined import CombinedLoader
from ..data.rng import capture_generators, capture_rng, find_generators, restore_generators, restore_rng
from ..data.sources.stateful import is_stateful
from ..data.tree import flatten_loaders, is_collection
from ..errors import DataError, ModuleError
from ..fabric import Fabric
from ..loggers import DummyLogger
from ..protocols import Options, Tree
from ..strategies.distributed.shards import is_sharded
from ..strategies.optional import load_strategy_state, strategy_state
from ..trainer.trainer import Trainer

if TYPE_CHECKING:
    from ..data.module import DataModule
    from ..protocols import Loaders
    from ..trainer.run import Run
    from ..trainer.session.arguments import Arguments
    from .setting import Owners

_SETUP_HOOKS = ("prepare_data", "setup", "teardown", "configure_model", "configure_sharded_model")


@dataclass(slots=True)
class Subject:
    """Subject of a search: what its trials copy and follow.

    Attributes:
        trainer: The plan that the trials follow.
        module: The user's module; trials train copies.
        datamodule: The user's data module, None for none.
        given: Stage -> loaders that were passed directly.
        run: The run within which the search happens; None outside of one.
        is_set_up: Whether module and data module have been set up, so that copies of them are.
        trial: The trainer of the latest trial; None before it.
    """

    trainer: Trainer
    module: nn.Module
    datamodule: DataModule | None = None
    given: dict[str, Loaders] = field(default_factory=dict)
    run: Run | None = None
    is_set_up: bool = False
    trial: Trainer | None = None

    @classmethod
    def of_run(cls, trainer: Trainer, *, is_set_up: bool) -> Subject:
        """Return what the trainer's present run is about."""
        run = trainer.latest_run()
        assert run is not None
        return cls(trainer, run.module, run.datamodule, trainer._lw_loaders.given, run, is_set_up)

    def check_signals(self) -> None:
        """End the search if a signal stops the surrounding run; with several ranks, after the search.

        Raises:
            KeyboardInterrupt, StopBySignal: As between two steps of training.
        """
        if self.run is not None and not self.run.has_ranks:
            self.run.run_signals.check()

    @property
    def owners(self) -> Owners:
        """Objects that may hold a value that a search sets."""
        return (self.module, self.datamodule)

    def twins(self, *, shares_weights: bool = False) -> tuple[nn.Module, DataModule | None]:
        """Return a copy of the module and of the data module, which may be changed freely.

        Data sets and loaders in their attributes are the originals: they may be large.

        Args:
            shares_weights: The copy has the original's parameters and buffers, so that a trial takes as much memory as
                training will; see `kept_weights`.

        Raises:
            ModuleError: The module cannot be copied.
        """
        if _is_spread(self.module):
            raise ModuleError(
                f"the parameters of {type(self.module).__name__} are sharded over processes, and such a module cannot "
                "be copied for a trial.",
                fix="search before the first fit, with a module that no run has sharded yet.",
            )
        memo: dict[int, Tree] = {id(one): one for one in (self.trainer, self.trainer.fabric, self.datamodule)}
        for child in self.module.modules():
            memo.update({id(v): v for v in vars(child).values() if isinstance(v, Dataset | DataLoader)})
        if shares_weights:
            memo.update({id(tensor): tensor for tensor in _tensors(self.module)})
        try:
            module = copy.deepcopy(self.module, memo)
        except Exception as error:
            raise ModuleError(
                f"{type(self.module).__name__} cannot be copied, and a search must not change the original: "
                f"{type(error).__name__}: {error}",
                fix="keep what cannot be copied (open files, locks, results with a graph) out of the module's "
                "attributes, or define __deepcopy__.",
            ) from error
        datamodule = copy.copy(self.datamodule)
        if datamodule is not None and datamodule._lw_hparams is not None:
            datamodule._lw_hparams = copy.deepcopy(datamodule._lw_hparams)
        for child in module.modules():
            if getattr(child, "_compiled_call_impl", None) is not None:
                child.__dict__["_compiled_call_impl"] = None  # it would call the original
        self._silence(module, datamodule)
        return module, datamodule

    @contextmanager
    def lent(self) -> Iterator[tuple[nn.Module, DataModule | None]]:
        """Return what a trial on all devices may change: copies; or the module itself, if its parameters are sharded.

        That one cannot be copied, and is as before afterwards: values, gradients, modes, and attributes that can be
        copied. On every rank.
        """
        if not _is_spread(self.module):
            yield self.twins()
            return
        datamodule = copy.copy(self.datamodule)
        if datamodule is not None and datamodule._lw_hparams is not None:
            datamodule._lw_hparams = copy.deepcopy(datamodule._lw_hparams)
        shared = (self.trainer, self.trainer.fabric, self.datamodule)
        with _kept_attributes(self.module, shared), kept_weights(self.module):
            self._silence(self.module, datamodule)
            try:
                yield self.module, datamodule
            finally:
                _end_passes(self.module)

    def _silence(self, module: nn.Module, datamodule: DataModule | None) -> None:
        # Callbacks that the module brings would write files.
        module.__dict__["configure_callbacks"] = _no_callbacks
        if self.is_set_up:
            for owner in (module, datamodule):
                if owner is not None:
                    owner.__dict__.update(dict.fromkeys(_SETUP_HOOKS, _do_nothing))


def _is_spread(module: nn.Module) -> bool:
    return any(is_sharded(parameter) for parameter in module.parameters())


def _end_passes(module: nn.Module) -> None:
    """Let a sharded module forget what a trial has left that ended in the middle of a step."""
    from ..strategies.fsdp.root import root_of

    root = root_of(module)
    if root is not None:
        root.discard_gradients()


@contextmanager
def _kept_attributes(module: nn.Module, shared: tuple[Tree, ...]) -> Iterator[None]:
    """Restore the attributes of a module and of its submodules afterwards.

    Args:
        module: Its parameters and buffers stay the same objects.
        shared: What attributes may refer to and is not copied.

    Raises:
        ModuleError: An attribute cannot be copied.
    """
    children = list(module.modules())
    internal = set(vars(nn.Module()))
    memo: dict[int, Tree] = {id(one): one for one in (*shared, *children, *_tensors(module))}
    kept: list[Options] = []
    for child in children:
        own = vars(child)
        memo.update({id(v): v for v in own.values() if isinstance(v, Dataset | DataLoader)})
        users = [key for key in own if key not in internal and not key.startswith(("_loopwright", "__composable"))]
        users = [key for key in users if key not in ("_lw_trainer", "_lw_fabric", "_lw_log") and not callable(own[key])]
        try:
            kept.append({**own, **{key: copy.deepcopy(own[key], memo) for key in users}})
        except Exception as error:
            raise ModuleError(
                f"{type(child).__name__} has attributes that cannot be copied, and a search must restore them: "
                f"{type(error).__name__}: {error}",
                fix="keep what cannot be copied (open files, locks, results with a graph) out of the module's "
                "attributes, or define __deepcopy__.",
            ) from error
    try:
        yield
    finally:
        for child, own in zip(children, kept, strict=True):
            vars(child).clear()
            vars(child).update(own)


def _no_callbacks() -> list[Callback]:
    return []


def _do_nothing(*_: object, **__: object) -> None:
    """Stand for a hook that has run for the original."""


def _tensors(module: nn.Module) -> list[Tensor]:
    tensors = chain(module.parameters(), module.buffers())
    return [tensor for tensor in tensors if not is_lazy(tensor)]


def make_trainer(subject: Subject, fabric: Fabric, callbacks: Sequence[Callback], **limits: Any) -> Trainer:
    """Return a trainer for trials: trains as the original does, and shows, logs, saves and validates nothing.

    Args:
        subject: Whose plan it follows.
        fabric: What it runs on.
        callbacks: All callbacks of the trial.
        limits: Arguments of the Trainer that differ.
    """
    trainer = subject.trainer
    same = {name: getattr(trainer._lw_arguments, name) for name in _SAME}
    if trainer.overfit_batches:
        same["limit_train_batches"] = same["limit_val_batches"] = None  # as many as are overfitted
    plan: Options = {
        **same,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "use_distributed_sampler": trainer.use_distributed_sampler,
        "sync_batchnorm": trainer.sync_batchnorm,
        "default_root_dir": trainer.default_root_dir,
        # Steps that write to self.logger find one.
        "logger": [DummyLogger() for _ in trainer.loggers] or False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 0,
        "nonfinite_loss": "ignore",
        "limit_val_batches": 0,
        "callbacks": list(callbacks),
        **limits,
    }
    trial = _TrialTrainer(fabric, **plan)
    original = trainer.behavior  # what it takes for hooks: the module is the same
    trial.behavior = replace(
        trial.behavior, check_hook_names=original.check_hook_names, find_override=original.find_override
    )
    trial._lw_is_in_child = trainer._lw_is_in_child
    if original.prepare_trial is not None:
        original.prepare_trial(trainer, trial)
    subject.trial = trial
    return trial


def accumulation_of(trainer: Trainer) -> dict[str, int]:
    """Return the argument that lets a trial accumulate as the trainer does, where no callback schedules it."""
    if trainer.global_batch_size is not None:
        return {"global_batch_size": trainer.global_batch_size}
    return {"accumulate_grad_batches": trainer.accumulate_grad_batches}


class _TrialTrainer(Trainer):
    """A trainer on a Fabric that is there already; it takes nothing from the environment.

    What `PL_TRAINER_...`, `LT_...` and launchers say in the environment is meant for the original, which has read it.
    """

    _lw_is_trial = True

    def __init__(self, fabric: Fabric, **plan: Any) -> None:
        self._lw_present_fabric = fabric
        super().__init__(**plan)

    @property
    def _lw_reports_runs(self) -> bool:
        """False: the search tells its result."""
        return False

    def _lw_read_environment(self, given: Arguments) -> Arguments:
        return given

    def _lw_make_fabric(self, arguments: Arguments) -> Fabric:
        return self._lw_present_fabric


_SAME = (
    "limit_train_batches", "overfit_batches", "deterministic", "benchmark", "matmul_precision", "inference_mode",
    "detect_anomaly", "activation_checkpointing", "offload_activations",
)  # fmt: skip


def single_device_fabric(trainer: Trainer) -> Fabric:
    """Return a fabric for this process alone, on its device, with the trainer's precision."""
    fabric = Fabric.of_this_process(trainer.fabric.device, copy.deepcopy(trainer.fabric.precision))
    fabric.strategy.accumulate_dtype = trainer.strategy.accumulate_dtype
    return fabric


@dataclass(slots=True)
class Isolation:
    """State that is not restored after trials.

    Attributes:
        keeps_draws: Whether random number generators stay where the trials left them.
    """

    keeps_draws: bool = False


@contextmanager
def isolated(subject: Subject) -> Iterator[Isolation]:
    """Restore after trials: random number generators, positions of loaders, states of precision and strategy.

    Within a run of several ranks it communicates: entered and left on every rank.

    Raises:
        DataError: A loader can be read once only.
    """
    fabric = subject.trainer.fabric
    _refuse_iterators(subject.given)
    if fabric.device.type == "cuda":
        torch.cuda.init()  # else there is no state to restore yet, and the training would draw other numbers
    rng = capture_rng()
    roots = {"given": subject.given, "datamodule": subject.datamodule, "module": dict(vars(subject.module))}
    generators = find_generators(**{name: root for name, root in roots.items() if root is not None})
    drawn = capture_generators(generators)
    stateful = [(one, copy.deepcopy(one.state_dict())) for one in _leaves(subject.given) if is_stateful(one)]
    precision = copy.deepcopy(fabric.precision.state_dict())
    own_state = copy.deepcopy(strategy_state(fabric.strategy)) if subject.run is not None else {}
    isolation = Isolation()
    try:
        yield isolation
        session = subject.trainer._lw_session
        if session is not None:
            session.rejoin_ranks()
    finally:
        free_memory(fabric.device)  # copies of the module go before the strategy's state comes back
        if own_state:
            load_strategy_state(fabric.strategy, own_state)
        if precision:
            fabric.precision.load_state_dict(precision)
        for loader, state in stateful:
            loader.load_state_dict(state)
        if not isolation.keeps_draws:
            restore_generators(generators, drawn)
            restore_rng(rng)


def _leaves(given: dict[str, Loaders]) -> list[Loaders]:
    found: list[Loaders] = []
    for loaders in given.values():
        if isinstance(loaders, CombinedLoader):
            found += loaders.flattened
        elif loaders is not None:
            found += flatten_loaders(loaders) if is_collection(loaders) else [loaders]
    return found


def _refuse_iterators(given: dict[str, Loaders]) -> None:
    for loader in _leaves(given):
        if hasattr(loader, "__next__"):
            raise DataError(
                f"a {type(loader).__name__} was passed as a loader, which can be read once only: a trial would use it "
                "up.",
                fix="pass something that can be iterated again and again, such as a DataLoader or a list.",
            )


@contextmanager
def kept_weights(module: nn.Module) -> Iterator[None]:
    """Put parameters and buffers back afterwards, bit by bit; meanwhile their values are kept on the host.

    For trials with `twins(shares_weights=True)`, whose training changes them.
    """
    tensors = _tensors(module)
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    storages = [tensor.data for tensor in tensors] if all(t.device.type == "cpu" for t in tensors) else None
    wheres = [(tensor.device, tensor.dtype) for tensor in tensors]
    flags = [parameter.requires_grad for parameter in parameters]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for index, (tensor, value, (device, dtype)) in enumerate(zip(tensors, kept, wheres, strict=True)):
                if (tensor.device, tensor.dtype) != (device, dtype):  # a trial moved or converted it
                    tensor.data = storages[index] if storages is not None else value.to(device)
                tensor.data.copy_(value)
        for parameter, flag, gradient in zip(parameters, flags, gradients, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = gradient
