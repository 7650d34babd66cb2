"""A small trainer that really trains, really saves and really resumes, for tests of callbacks by themselves."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from loopwright.callbacks import Callback, Checkpoint
from loopwright.checkpoint import TorchCheckpointIO
from loopwright.errors import CheckpointError
from loopwright.strategies.traits import Traits

Metrics = Callable[[int], dict[str, float]]


class FakeStrategy:
    """One process: collectives hand back what they get."""

    world_size = 1
    traits = Traits()
    checkpoint_io = None

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


class FakeLogger:
    """Keeps what it is told."""

    def __init__(self, save_dir: str, name: str = "logs", version: int | str = 0) -> None:
        self.save_dir, self.name, self.version = save_dir, name, version
        self.saved: list[str] = []

    def after_save_checkpoint(self, callback: Any) -> None:
        self.saved.append(callback.best_model_path)


class FakeTrainer:
    """Fits `module` by SGD on ones: per window `accumulate` micro-batches, one optimizer step.

    Args:
        root: Folder for files.
        callbacks: In order; the late ones are moved back as the real trainer does.
        train_metrics: global_step -> what training logs at that step.
        val_metrics: global_step -> what a validation at that step logs.
        val_every: Windows between validations; None: at the end of each epoch.
        skipped: Numbers of windows (from 1, over all epochs) whose step is skipped.
    """

    def __init__(
        self,
        root: Path,
        callbacks: Sequence[Callback] = (),
        *,
        max_epochs: int = 1,
        windows: int = 4,
        accumulate: int = 1,
        val_batches: int = 1,
        val_every: int | None = None,
        check_val_every_n_epoch: int = 1,
        train_metrics: Metrics = lambda step: {},
        val_metrics: Metrics = lambda step: {},
        epoch_metrics: Metrics = lambda step: {},
        loggers: Sequence[Any] = (),
        skipped: Sequence[int] = (),
        fast_dev_run: bool = False,
        log_every: int = 1,
        sanity: bool = False,
    ) -> None:
        late = [c for c in callbacks if c.runs_last]
        self.callbacks = [c for c in callbacks if not c.runs_last]
        self.callbacks += [c for c in late if not isinstance(c, Checkpoint)]
        self.callbacks += [c for c in late if isinstance(c, Checkpoint)]
        self.default_root_dir = str(root)
        self.max_epochs, self.max_steps, self.windows = max_epochs, -1, windows
        self.accumulate_grad_batches = accumulate
        self.global_batch_size = None
        self.fit_loop = SimpleNamespace(validates_in_this_epoch=True, epoch_limit=max_epochs)
        self._lw_batches_until_max_samples = math.inf
        self.num_training_batches: float = windows * accumulate
        self.num_val_batches = self.num_sanity_val_batches = [val_batches] if val_batches else []
        self.enable_validation = bool(val_batches)
        self.num_test_batches = self.num_predict_batches = [val_batches]
        self.val_every = val_every
        self.val_check_interval = 1.0 if val_every is None else val_every
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.train_metrics, self.val_metrics, self.epoch_metrics = train_metrics, val_metrics, epoch_metrics
        self.loggers = list(loggers)
        self.skipped = set(skipped)
        self.fast_dev_run = fast_dev_run
        self.log_every, self.sanity = log_every, sanity

        self.strategy = FakeStrategy()
        self.ranks_answer = False
        self.fabric = SimpleNamespace(autocast=contextlib.nullcontext, checkpoint_io=TorchCheckpointIO())
        self.state = SimpleNamespace(fn="fit")
        self.progress = SimpleNamespace(total_batches=0, batches_in_epoch=0, epoch_open=True)
        self.is_global_zero = True
        self.sanity_checking = False
        self.should_stop = False
        self.at_step_boundary = True
        self.is_last_batch = False
        self.global_step = 0
        self.current_epoch = 0
        self.window = 0
        self.validated_window = 0
        self.ckpt_path: str | None = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.metric_steps: dict[str, int] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.save_failure: BaseException | None = None
        self._lw_saving = SimpleNamespace(
            is_elsewhere=False,
            keep_validated=lambda: None,
            has_score=False,
            is_in_background=False,
            then=lambda done, failed=None: done(),
        )
        self.batch_hook: Callable[[int], None] = lambda step: None
        self._in_exception = False
        self._start_window = 0

    # --- what callbacks use ------------------------------------------------------------------------------------------

    @property
    def should_log(self) -> bool:
        return (self.window + (1 if not self.at_step_boundary else 0)) % self.log_every == 0

    @property
    def validation_is_due(self) -> bool:
        is_new = self.at_step_boundary and self.validated_window != self.window
        return is_new and self._validation_due(self.is_last_batch)

    @property
    def estimated_stepping_batches(self) -> float:
        return self.windows * self.max_epochs

    def metric_step(self, name: str) -> int | None:
        return self.metric_steps.get(name)

    def _lw_may_log_at_epoch_end(self, name: str) -> bool:
        return name in self.epoch_metrics(self.global_step)

    def synchronize_metrics(self, *names: str) -> None:
        """Do nothing: there is one process."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def put(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.callback_metrics[name] = torch.tensor(value)
            self.metric_steps[name] = self.global_step
            self.progress_bar_metrics[name] = float(value)

    def save_checkpoint(self, filepath: str, weights_only: bool = False, storage_options: Any = None) -> None:
        if not self.at_step_boundary and not self._in_exception:
            raise CheckpointError("between two micro-batches", fix="wait")
        if self.save_failure is not None:
            raise self.save_failure
        content: dict[str, Any] = {
            "state_dict": dict(self.module.state_dict()),
            "global_step": self.global_step,
            "epoch": self.current_epoch,
            "window": self.window,
            "metric_steps": dict(self.metric_steps),
            "callback_metrics": dict(self.callback_metrics),
        }
        if not weights_only:
            states = {c.state_key: c.state_dict() for c in self.callbacks}
            content["callbacks"] = {key: state for key, state in states.items() if state}
            self.call("on_save_checkpoint", content)
        os.makedirs(os.path.dirname(filepath), exist_ok=True)
        temporary = os.path.join(os.path.dirname(filepath), f".{os.path.basename(filepath)}.tmp")
        torch.save(content, temporary)
        os.replace(temporary, filepath)

    def wait_for_save(self) -> None:
        pass

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, self.module, *args)

    # --- loops -------------------------------------------------------------------------------------------------------

    def fit(self, module: nn.Module | None = None, ckpt_path: str | None = None) -> None:
        self.module = module if module is not None else nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.optimizers = self.optimizers or [self.optimizer]
        self.state.fn = "fit"
        self.ckpt_path = ckpt_path
        try:
            self.call("setup", "fit")
            if ckpt_path:
                self._load(ckpt_path)
            self.call("on_fit_start")
            if self.sanity:
                self._sanity_check()
            self.call("on_train_start")
            while self.current_epoch < self.max_epochs and not self.should_stop:
                self._epoch()
            self.call("on_train_end")
            self.call("on_fit_end")
            self.call("teardown", "fit")
        except BaseException as error:
            self._in_exception = True
            self.call("on_exception", error)
            raise
        finally:
            self.ckpt_path = None
            self._in_exception = False

    def validate(self, module: nn.Module, ckpt_path: str | None = None, fn: str = "validate") -> None:
        self.module, self.state.fn = module, fn
        self.call("setup", fn)
        if ckpt_path:
            self._load(ckpt_path)
        hook = {"validate": "validation"}.get(fn, fn)
        try:
            self._evaluate(hook)
        except BaseException as error:
            self.call("on_exception", error)
            raise
        self.call("teardown", fn)

    def _load(self, path: str) -> None:
        content = torch.load(path, weights_only=True)
        self.module.load_state_dict(content["state_dict"])
        self.call("on_load_checkpoint", content)
        for callback in self.callbacks:
            if callback.state_key in content.get("callbacks", {}):
                callback.load_state_dict(content["callbacks"][callback.state_key])
        if self.state.fn == "fit":
            self.global_step, self.window = content["global_step"], content["window"]
            self.current_epoch = self.window // self.windows
            self.progress.total_batches = self.window * self.accumulate_grad_batches
            self.metric_steps = content["metric_steps"]
            self.callback_metrics = content["callback_metrics"]

    def _sanity_check(self) -> None:
        self.sanity_checking = True
        self.call("on_sanity_check_start")
        self._evaluate("validation")
        self.call("on_sanity_check_end")
        self.sanity_checking = False
        self.callback_metrics, self.metric_steps = {}, {}

    def _epoch(self) -> None:
        first = self.window - self.current_epoch * self.windows
        if first == 0:
            self.call("on_train_epoch_start")
        for index in range(first, self.windows):
            if self.should_stop:
                break
            self._window(index)
        if not self.should_stop or self.window % self.windows == 0:
            self.put(self.epoch_metrics(self.global_step))
        self.call("on_train_epoch_end")
        self.current_epoch += 1
        self.progress.batches_in_epoch = 0

    def _window(self, index: int) -> None:
        for micro in range(self.accumulate_grad_batches):
            batch_idx = index * self.accumulate_grad_batches + micro
            self.at_step_boundary = False
            self.is_last_batch = batch_idx + 1 == self.num_training_batches
            batch = torch.full((1, 2), float(self.window % 3 + 1))
            self.call("on_train_batch_start", batch, batch_idx)
            self.batch_hook(self.global_step)
            self.module(batch).sum().backward()
            if micro + 1 == self.accumulate_grad_batches:
                self._step()
            self.call("on_train_batch_end", None, batch, batch_idx)
        last_of_epoch = index + 1 == self.windows
        if self._validation_due(last_of_epoch):
            self._evaluate("validation")

    def _step(self) -> None:
        self.window += 1
        self.progress.total_batches = self.window * self.accumulate_grad_batches
        self.progress.batches_in_epoch += self.accumulate_grad_batches
        if self.window not in self.skipped:
            self.optimizer.step()
            self.global_step += 1
            for config in self.lr_scheduler_configs:
                config.scheduler.step()
            self.put(self.train_metrics(self.global_step))
        self.optimizer.zero_grad()
        self.at_step_boundary = True

    def _validation_due(self, last_of_epoch: bool) -> bool:
        if not self.num_val_batches or (self.current_epoch + 1) % self.check_val_every_n_epoch:
            return False
        return last_of_epoch if self.val_every is None else self.window % self.val_every == 0

    def _evaluate(self, stage: str) -> None:
        self.validated_window = self.window
        self.call(f"on_{stage}_start")
        for index in range(self.num_val_batches[0] if self.num_val_batches else 0):
            self.call(f"on_{stage}_batch_end", None, None, index, 0)
        if stage == "validation":
            self.put(self.val_metrics(self.global_step))
        self.call(f"on_{stage}_end")


@contextlib.contextmanager
def interrupted_at(trainer: FakeTrainer, step: int, error: BaseException) -> Iterator[None]:
    """Raise `error` in the batch after `step` steps; swallow it outside of fit."""

    def raise_there(now: int) -> None:
        if now == step:
            raise error

    trainer.batch_hook = raise_there
    with contextlib.suppress(type(error)):
        yield


class LoneManager:
    """A Manager of one group: each step has the answer that comes next."""

    def __init__(self, answers: Iterator[bool]) -> None:
        self.answers, self.steps, self.refused = answers, 0, 0

    def start_quorum(self) -> None: ...
    def errored(self) -> None: ...
    def participating_rank(self) -> int:
        return 0

    def num_participants(self) -> int:
        return 1

    def should_commit(self) -> bool:
        answer = next(self.answers)
        self.steps, self.refused = self.steps + answer, self.refused + (not answer)
        return answer

    def state_dict(self) -> dict[str, int]:
        return {"step": self.steps, "batches_committed": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["step"]

    def shutdown(self, wait: bool = True) -> None: ...


def answers(*refused: int) -> Iterator[bool]:
    """Return what a `LoneManager` says at each vote: False at those that are named."""
    return (number not in refused for number in range(1000))
