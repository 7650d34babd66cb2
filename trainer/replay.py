"""The engine of a replay: a fit that goes from a checkpoint to one step, shows that step, and writes nothing else.

`loopwright replay` runs the user's program with a request in the environment. `replay_in` then turns its fit into a
replay: the checkpoint is the request's, loggers and checkpoints are switched off, and a callback records the step.
Each rank writes what it has recorded into the request's folder; no rank communicates for it, except where a norm is
over shards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pdb
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..callbacks import Callback, Checkpoint, Timer
from ..checkpoint.to_plain import to_plain
from ..data.distributed.fingerprint import strided_parts
from ..data.move import move_to_device
from ..errors import ConfigError, ReplayEnd
from ..fabric.seed import known_seed
from ..files import replace_file
from ..loggers import DummyLogger
from .checkpointing.locate import read_rollbacks, rollbacks_file, rollbacks_of

if TYPE_CHECKING:
    from ..protocols import AnyBatch, AnyOutput, Indices, Owner, StateDict
    from .hooks import Hook
    from .session.fit import FitSession
    from .trainer import Trainer

# Any in this file: batches, what a step returns, and what a data set names its samples.

REQUEST = "LOOPWRIGHT_REPLAY"
_ID_KEYS = ("id", "ids", "sample_id", "__key__")
_SAY_EVERY_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What is to be replayed.

    Attributes:
        step: Index of the step, as loggers show it: the number of steps made before.
        folder: Where each rank writes its record, and the program what it writes into its `default_root_dir`.
        checkpoint: Where the replay begins; None for the beginning of the run.
        world_size: Number of ranks of the run; None if unknown.
        keeps_batch: Whether the batch of the step is written, too.
        digests: Whether digests of each step's tensors are written.
        debug: Rank whose debugger stops in `training_step` of the step; None for none.
        terminal: Process whose standard input the debugger reads; None: the rank's.
        anomaly: Whether autograd's anomaly detection is on in the step.
        newest: The run's last checkpoint, by which its rollbacks are known; None without one.
        rolled_back_ns: Time of the run's first rollback; 0 if no checkpoint was written after it.
    """

    step: int
    folder: str
    checkpoint: str | None = None
    world_size: int | None = None
    keeps_batch: bool = False
    digests: bool = False
    debug: int | None = None
    terminal: int | None = None
    anomaly: bool = False
    newest: str | None = None
    rolled_back_ns: int = 0

    def to_variable(self) -> dict[str, str]:
        """Return the environment variable that asks for the replay."""
        return {REQUEST: json.dumps(asdict(self))}

    def record_of(self, rank: int) -> Path:
        """Return the file of a rank's record."""
        return Path(self.folder, f"rank-{rank}.json")

    def digests_of(self, rank: int) -> Path:
        """Return the file of a rank's digests: a line of JSON for each step, after one for the beginning."""
        return Path(self.folder, f"digests-{rank}.jsonl")

    def batch_of(self, rank: int) -> Path:
        """Return the file of a rank's micro-batches."""
        return Path(self.folder, f"batch-{rank}.pt")

    @property
    def begun(self) -> Path:
        """The file that exists once a fit of the program has become the replay."""
        return Path(self.folder, "begun")


def replay_in(session: FitSession) -> None:
    """Turn a fit into the replay that the environment asks for. Called before the fit begins, on every rank."""
    request = ReplayRequest(**json.loads(os.environ[REQUEST]))
    trainer = session.trainer
    if request.begun.exists() and trainer.global_rank == 0 and not trainer._lw_is_in_child:
        raise ConfigError("The program calls trainer.fit within the replay of another fit.", fix="replay it alone.")
    if request.checkpoint is not None:
        session.ckpt_path = request.checkpoint
    elif session.ckpt_path in ("last", "best", "hpc"):
        session.ckpt_path = None  # there was none yet
    if request.checkpoint is None and session.ckpt_path is None and not _is_seeded():
        raise ConfigError(
            f"Expected a checkpoint before step {request.step}, or a program that calls seed_everything: without "
            "either, the run cannot be made again.",
            fix="replay a step after the run's first checkpoint.",
        )
    rollbacks = _rollbacks_before(trainer, request)
    trainer.default_root_dir = request.folder
    if rollbacks:
        replace_file(rollbacks_file(trainer), json.dumps(rollbacks))
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]
    trainer._lw_saving.is_elsewhere = True
    base = session.lifecycle_type

    class ReplayedLifecycle(base):  # type: ignore[valid-type, misc]
        """The events of the fit, without those who write checkpoints or look at the clock."""

        @staticmethod
        def override_of(owner: Owner, name: str, bases: tuple[type, ...]) -> Hook | None:
            return None if isinstance(owner, Checkpoint | Timer) else base.override_of(owner, name, bases)

    session.lifecycle_type = ReplayedLifecycle
    trainer.callbacks.insert(0, Replay(request))
    if request.debug is not None:
        _debug_step(session.model, trainer, request)


def _rollbacks_before(trainer: Trainer, request: ReplayRequest) -> list[StateDict]:
    """Return the rollbacks of the run behind which the step lies."""
    found = rollbacks_of(read_rollbacks(rollbacks_file(trainer)), request.rolled_back_ns, request.newest)
    return [one for one in found if one["to_step"] <= request.step]


def _is_seeded() -> bool:
    # Without a seed, torch draws one of 53 bits.
    return known_seed() is not None or torch.initial_seed() < 2**32


def _debug_step(module: nn.Module, trainer: Trainer, request: ReplayRequest) -> None:
    """Let a debugger stop at the first line of `training_step` in the step."""
    step: Callable[..., Any] = module.training_step  # type: ignore[assignment]

    @wraps(step)
    def debugged(*args: Any, **kwargs: Any) -> Any:
        if trainer.progress.steps != request.step or trainer.global_rank != request.debug:
            return step(*args, **kwargs)
        debugger = _Debugger(nosigint=True)
        with ExitStack() as stack:
            if not sys.stdin.isatty():  # else it edits lines
                debugger.stdin = stack.enter_context(_terminal(request))
                debugger.use_rawinput = False
            result = debugger.runcall(step, *args, **kwargs)
        if debugger.is_left:  # the step was not completed
            raise ConfigError("The debugger was left before the end of the step.", fix="continue with c.")
        return result

    vars(module)["training_step"] = debugged


@contextmanager
def _terminal(request: ReplayRequest) -> Iterator[IO[str]]:
    """Open what the user of `loopwright replay` types: ranks that are forked have another standard input."""
    path = f"/proc/{request.terminal}/fd/0"  # only Linux has it
    with open(path if os.path.exists(path) else "/dev/stdin") as terminal, ExitStack() as stack:
        if terminal.isatty():
            # Forked ranks are in the background of the terminal, where the system would stop a process that reads it.
            before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            stack.callback(signal.signal, signal.SIGTTOU, before)
            foreground = os.tcgetpgrp(terminal.fileno())
            os.tcsetpgrp(terminal.fileno(), os.getpgrp())
            stack.callback(os.tcsetpgrp, terminal.fileno(), foreground)
        yield terminal


class _Debugger(pdb.Pdb):
    """Notes that its user, or the end of its input, has ended it."""

    is_left = False

    def set_quit(self) -> None:
        """End the step here."""
        self.is_left = True
        super().set_quit()


@dataclass(slots=True)
class _Recorded:
    """What is recorded of a step, in the order in which it happens."""

    batches: list[Any] = field(default_factory=list)
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    backward_losses: list[float] = field(default_factory=list)
    digests: list[list[str]] = field(default_factory=list)
    weights_before: float = 0.0


class Replay(Callback):
    """Records one step of a fit, which ends after it.

    Args:
        request: What is to be replayed.
    """

    runs_first = True
    hears_every_step = True

    def __init__(self, request: ReplayRequest) -> None:
        self._request = request
        self._began = 0
        self._num_skipped = 0
        self._names: dict[int, str] = {}
        self._now = _Recorded()
        self._is_in_window = False
        self._anomaly = ExitStack()
        self._said_s = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Compare the fit with the request, and note where it begins."""
        request, steps = self._request, trainer.progress.steps
        if request.world_size not in (None, trainer.world_size):
            raise ConfigError(
                f"Expected the {request.world_size} ranks of the run, got {trainer.world_size}.",
                fix=f"start the replay in {request.world_size} processes, as the run was.",
            )
        if steps > request.step:
            raise ConfigError(
                f"Expected a beginning at or before step {request.step}, got step {steps}.",
                fix="omit ckpt_path in the program, or replay a later step.",
            )
        if trainer.is_global_zero:
            request.begun.touch()
            log.info("Replaying steps %d to %d.", steps, request.step)
        self._began = steps
        self._names = {id(one): name for name, one in pl_module.named_parameters()}
        if request.digests:
            self._add_state(trainer, pl_module, with_optimizers=True)
            self._write_digests(trainer, "beginning")

    def on_train_batch_start(self, trainer: Trainer, pl_module: nn.Module, batch: AnyBatch, batch_idx: int) -> None:
        """Record which samples a micro-batch consists of."""
        if not self._is_due(trainer):
            return
        self._begin_window(pl_module, trainer)
        run = trainer._lw_run
        indices = plain_indices(run.stream.latest_indices())  # type: ignore[union-attr]
        found = {"batch_idx": batch_idx, "samples": indices}
        ids = find_ids(batch, run.stream.loader, indices)  # type: ignore[union-attr]
        if ids is not None:
            found["ids"] = ids
        self._now.micro_batches.append(found)
        if self._request.keeps_batch:
            self._now.batches.append(batch)
        if self._request.digests:
            self._now.digests.append(["batch", str(len(self._now.micro_batches) - 1), digest(batch), str(indices)])

    def on_before_backward(self, trainer: Trainer, pl_module: nn.Module, loss: Tensor) -> None:
        """Record what a module that calls backward itself calls it on."""
        if self._is_in_window and not pl_module.automatic_optimization:
            self._now.backward_losses.append(_number(loss))
            self._add_loss(f"backward pass {len(self._now.backward_losses) - 1}", self._now.backward_losses[-1])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: nn.Module, optimizer: Optimizer) -> None:
        """Record gradients, before they are clipped, and the settings of the optimizer."""
        if not self._is_in_window:
            return
        now, number = self._now, len(self._now.gradients)
        settings = [{key: value for key, value in group.items() if isinstance(value, bool | int | float | tuple)}
                    for group in optimizer.param_groups]  # fmt: skip
        named = [(self._names.get(id(one), "?"), one.grad) for group in optimizer.param_groups
                 for one in group["params"] if one.grad is not None]  # fmt: skip
        norms = {name: norm_of(gradient) for name, gradient in named}
        now.gradients.append(
            {"optimizer": type(optimizer).__name__, "norm": total_norm(norms.values()),
             "of_parameters": {name: float(norm) for name, norm in norms.items()},
             "settings": settings}
        )  # fmt: skip
        if self._request.digests:
            now.digests += [["gradient", name, digest(gradient), ""] for name, gradient in named]
            now.digests += [["setting", f"{key} of group {group} of optimizer {number}", str(value), str(value)]
                            for group, values in enumerate(settings) for key, value in values.items()]  # fmt: skip

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: AnyOutput, batch: AnyBatch, batch_idx: int
    ) -> None:
        """Record the loss of a micro-batch; after the last one of the step, write the record and end the program."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        place = next((one for one in self._now.micro_batches if one["batch_idx"] == batch_idx), None)
        if place is not None and isinstance(loss, Tensor):
            place["loss"] = _number(loss)
            self._add_loss(f"micro-batch {self._now.micro_batches.index(place)}", place["loss"])
        if not trainer.at_step_boundary:
            return
        self._say(trainer)
        steps = trainer.progress.steps
        if not self._is_in_window:  # also on a rank whose data had ended
            if steps > self._request.step:
                self._begin_window(pl_module, trainer)
            else:
                return
        self._anomaly.close()
        self._is_in_window = False
        if trainer._lw_run is not None and not trainer._lw_run.has_stepped:
            self._num_skipped += 1
            self._now = _Recorded()
            return
        if self._request.digests:
            self._add_state(trainer, pl_module)
            self._write_digests(trainer, str(steps - 1))
        if steps <= self._request.step:
            self._now = _Recorded()
            return
        self._write(trainer, pl_module)
        end, bar = ReplayEnd(), trainer.progress_bar_callback
        if bar is not None:  # this end calls no hooks, and the report would begin in the bar's line
            bar.on_exception(trainer, pl_module, end)
        raise end

    # --- a window ----------------------------------------------------------------------------------------------------

    def _is_due(self, trainer: Trainer) -> bool:
        return self._request.digests or trainer.progress.steps == self._request.step

    def _begin_window(self, module: nn.Module, trainer: Trainer) -> None:
        if self._is_in_window:
            return
        self._is_in_window, self._now = True, _Recorded()
        if trainer.progress.steps == self._request.step:
            self._now.weights_before = total_norm(norm_of(one) for one in module.parameters())
            if self._request.anomaly:
                self._anomaly.enter_context(torch.autograd.set_detect_anomaly(True))

    def _say(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if trainer.is_global_zero and now > self._said_s + _SAY_EVERY_S:
            self._said_s = now
            log.info("Replay: step %d of %d.", trainer.progress.steps, self._request.step)

    def _add_loss(self, where: str, loss: float) -> None:
        if self._request.digests:
            self._now.digests.append(["loss", where, loss.hex(), repr(loss)])

    def _add_state(self, trainer: Trainer, module: nn.Module, *, with_optimizers: bool = False) -> None:
        add = self._now.digests.append
        for name, parameter in module.named_parameters():
            add(["parameter", name, digest(parameter), ""])
        for name, buffer in module.named_buffers():
            add(["buffer", name, digest(buffer), ""])
        for number, optimizer in enumerate(trainer.optimizers if with_optimizers else ()):
            state = getattr(optimizer, "state", {})
            for one, values in state.items():
                for key, value in values.items():
                    name = f"{key} of {self._names.get(id(one), '?')} in optimizer {number}"
                    add(["optimizer state", name, digest(value), ""])

    def _write_digests(self, trainer: Trainer, step: str) -> None:
        with open(self._request.digests_of(trainer.global_rank), "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "digests": self._now.digests}) + "\n")
        self._now.digests = []

    def _write(self, trainer: Trainer, module: nn.Module) -> None:
        request, now, rank = self._request, self._now, trainer.global_rank
        norms = {name: norm_of(one) for name, one in module.named_parameters()}
        metrics = trainer.callback_metrics
        record = {
            "step": request.step,
            "epoch": trainer.current_epoch,
            "began_at": self._began,
            "rank": rank,
            "world_size": trainer.world_size,
            "skipped_windows": self._num_skipped,
            "micro_batches": now.micro_batches,
            "backward_losses": now.backward_losses,
            "gradients": now.gradients,
            "weights": {
                "norm_before": now.weights_before,
                "norm": total_norm(norms.values()),
                "of_parameters": {name: float(norm) for name, norm in norms.items()},
            },
            "logged": {
                name: float(value)
                for name, value in metrics.items()
                if value.numel() == 1 and trainer.metric_step(name) == trainer.global_step
            },
        }
        if request.keeps_batch:
            plain, left_out = to_plain(_on_host(now.batches))
            record["left_out_of_batch"] = left_out
            torch.save(plain, request.batch_of(rank))
        replace_file(request.record_of(rank), json.dumps(record))


# --- values --------------------------------------------------------------------------------------------------------


def norm_of(tensor: Tensor) -> Tensor:
    """Return the 2-norm of a tensor, over all of its shards: shape (), on its device; communicates for shards."""
    if tensor.is_meta:
        return torch.zeros(())
    if tensor.layout is not torch.strided:  # gradients of nn.Embedding(sparse=True)
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex()):  # quantized weights
        tensor = tensor.double()
    norm = torch.linalg.vector_norm(tensor.detach())
    return cast(Tensor, norm.full_tensor()) if hasattr(norm, "full_tensor") else norm


def total_norm(norms: Any) -> float:
    """Return the 2-norm of all tensors with these norms, as torch.nn.utils.get_total_norm does."""
    found = list(norms)
    return float(torch.linalg.vector_norm(torch.stack([one.to(found[0]) for one in found]))) if found else 0.0


def _number(loss: Tensor) -> float:
    return float(loss.detach().mean())


def digest(value: Any) -> str:
    """Return a digest of every bit of the tensors in a batch or of one tensor, of its shard on this rank.

    It is the same in each process: sets have no order.
    """
    found = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor):
            leaf, _ = to_plain(leaf)
        for one in tree_leaves(leaf):
            if isinstance(one, Tensor):
                for part in strided_parts(one.detach()):
                    found.update(f"{part.dtype} {tuple(part.shape)}".encode())
                    if not part.is_meta:
                        found.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(one, set):
                found.update(repr(sorted(map(digest, one))).encode())
            else:
                found.update(repr(one).encode())
    return found.hexdigest()


def plain_indices(indices: Indices) -> Any:
    """Return the indices of a batch as JSON has them; text for those that are neither numbers nor text."""
    if isinstance(indices, Mapping):
        return {str(key): plain_indices(one) for key, one in indices.items()}
    if isinstance(indices, list | tuple):
        return [plain_indices(one) for one in indices]
    if isinstance(indices, Tensor):
        return indices.tolist()
    if indices is None or isinstance(indices, bool | int | float | str):
        return indices
    return int(indices) if hasattr(indices, "__index__") else str(indices)


def find_ids(batch: AnyBatch, loader: Any, indices: Any) -> Any:
    """Return what the data set calls the samples; None without names.

    They are in the batch, under a key such as "id" or "__key__", or in the attribute `ids` of the data set.
    """
    if isinstance(batch, Mapping):
        key = next((key for key in _ID_KEYS if key in batch), None)
        if key is not None:
            return plain_indices(batch[key])
    dataset: Any = getattr(loader, "dataset", None)
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset") and isinstance(indices, list):  # a Subset
        indices, dataset = [dataset.indices[one] for one in indices], dataset.dataset
    ids = getattr(dataset, "ids", None)
    if ids is None or not isinstance(indices, list):
        return None
    return [plain_indices(ids[one]) for one in indices]


def _on_host(batches: list[Any]) -> Any:
    return move_to_device(batches, torch.device("cpu"))
