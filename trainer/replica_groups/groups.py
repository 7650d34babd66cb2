"""`ReplicaGroups`: this replica group among the others, which torchft's Manager connects.

A step has a fixed number of micro-batches, `accumulate_grad_batches`. Each group reads all of them and trains on its
share: number i belongs to the group with rank `i % size` in the quorum of the step. Gradients are added up over groups.
Every group then makes the same step, so that groups stay equal without further communication.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...data.rng import seed_global_generators
from ...errors import ConfigError, LaunchError, RankFailure
from ...precision.base import evaluates_again
from ...strategies.distributed.shards import local
from ..loop.fit_loop import Rewind
from ..loop.window import train_window
from . import healing
from .rounds import Rounds, RoundWindow
from .window import GroupsWindow

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torchft import Manager

    from ...checkpoint.content import Content
    from ...fabric import Fabric
    from ...protocols import StateDict
    from ...strategies import Strategy
    from ..checkpointing.saving import Saving
    from ..loop.fit_loop import FitLoop
    from ..metrics.log_output import LogOutput
    from ..metrics.metrics import Metrics
    from ..run import FitRun
    from ..session.arguments import Arguments
    from .options import TorchFT

log = logging.getLogger(__name__)

_BUCKET_BYTES = 64 * 2**20
_PAUSE_S = 0.1  # between two requests for a quorum, where too few groups are there

# Any in this file: what modules log, and what groups tell each other as JSON.


class _Session(Protocol):
    """The part of a `FitSession` that is used here."""

    arguments: Arguments
    fabric: Fabric
    strategy: Strategy
    loop: FitLoop
    metrics: Metrics
    output: LogOutput
    ending: ExitStack

    def write_hyperparameters(self) -> None: ...


class ReplicaGroups:
    """This group's part in a fit.

    Args:
        options: The user's.
        session: The fit.
        saving: Writes its checkpoints.

    Attributes:
        rank: Place of this group among those of the quorum.
        size: Number of groups in the quorum.
        is_writer: Whether this group writes checkpoints and logs.
        name: Of this group.
        loop: The fit's.
        manager: torchft's; there from the first step on.
        recorded: Calls of `log` in the running micro-batch: hook, name, value, further arguments; None elsewhere.
    """

    manager: Manager
    run: FitRun

    def __init__(self, options: TorchFT, session: _Session, saving: Saving) -> None:
        self._options, self._session, self._metrics, self._saving = options, session, session.metrics, saving
        self.name, self._lighthouse = options.resolved_id(), options.resolved_lighthouse()
        self.loop = session.loop
        self._rounds: Rounds | None = None  # where groups make separate steps
        self.rank, self.size, self.is_writer = 0, 1, False
        self.recorded: list[tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]] | None = None
        self._received: StateDict | None = None
        self._has_quorum = False  # whether the quorum of the coming step stands
        self._seed = torch.initial_seed()
        self._scale: float | None = None
        self._heard: StateDict = {}
        self._logger_states: StateDict = {}
        self._store: TCPStore | None = None
        _refuse(session)

    # --- set-up ------------------------------------------------------------------------------------------------------

    def attach(self, run: FitRun) -> None:
        """Belong to this run, and write nothing until a quorum says who does."""
        self.run = run
        run.groups = self
        self._be_silent()
        self._session.ending.callback(self._be_silent, is_silent=False)

    def _be_silent(self, *, is_silent: bool = True) -> None:
        self._session.output.set_rank(1 if is_silent else self._session.fabric.global_rank)
        self._saving.is_elsewhere = is_silent

    def bind(self, content: Content | None) -> None:
        """Let the windows of the run be those of all groups. The plan of a step is set up.

        Args:
            content: The checkpoint that the run has resumed from.
        """
        run, loop = self.run, self._session.loop
        self._refuse_steps()
        rounds: Rounds | None = None
        if self._options.sync_every is not None:
            logs = self._session.arguments.log_every_n_steps if self._session.output.loggers else 0
            rounds = self._rounds = Rounds(self, self._options, logs or 0)
        run.plan.looks_ahead = False
        run.plan.hold = lambda run: GroupsWindow(run, self) if rounds is None else RoundWindow(run, self, rounds)
        seams = loop.seams
        loop.seams = replace(seams, train_window=self.train_window)
        self._session.ending.callback(lambda: setattr(loop, "seams", seams))
        self._connect()
        self._session.ending.callback(self._shut_down)
        if content is not None:
            self._logger_states = content.states.get("loggers", {})
            state = content.extra.get("torchft")
            if state is not None:
                self.manager.load_state_dict(state["manager"])
                self._seed = state["seed"]
                if rounds is not None:
                    rounds.load_state_dict(state.get("rounds", {}), self.name)

    def _connect(self) -> None:
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        strategy, durations = self.run.fabric.strategy, self._options.durations()
        rank, size = strategy.global_rank, strategy.world_size
        place = ("", 0)
        if rank == 0:
            host = socket.gethostname()
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            place = (host, self._store.port)
        host, port = strategy.broadcast(place)
        kind = ProcessGroupNCCL if self.run.device.type == "cuda" else ProcessGroupGloo
        try:
            self.manager = Manager(
                pg=kind(timeout=durations["timeout"]),
                load_state_dict=self._receive,
                state_dict=self._send,
                min_replica_size=self._options.min_replicas,
                use_async_quorum=False,
                rank=rank,
                world_size=size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=self._lighthouse,
                replica_id=self.name,
                quorum_retries=self._options.quorum_retries,
                max_retries=self._options.max_retries,
                **durations,
            )
        except Exception as error:  # of torchft's own kinds
            raise LaunchError(
                f"replica group {self.name} cannot connect to torchft's lighthouse at {self._lighthouse}: {error}",
                fix="start `torchft_lighthouse`, and set TORCHFT_LIGHTHOUSE to the address that it shows.",
            ) from error

    def _refuse_steps(self) -> None:
        run, plan = self.run, self.run.plan
        reason = None
        if not run.is_automatic:
            reason = "manual optimization, where the module decides what a step is"
        elif plan.optimizer is None:
            reason = "a module without an optimizer"
        elif evaluates_again(plan.optimizer):
            reason = f"{type(plan.optimizer).__name__}, which evaluates a window within its step"
        elif any(getattr(one, "sparse", False) for one in run.module.modules()):
            reason = "sparse gradients, which groups have of different elements"
        if reason is not None:
            raise ConfigError(f"fault_tolerance=TorchFT() with {reason}.", fix="leave out one of the two.")

    def _shut_down(self) -> None:
        if self._heard and not self.is_writer:  # trainer.test(ckpt_path="best") reads what the other group has written
            healing.load_kept(self.run, self._heard)
        with suppress(Exception):  # the groups that are gone do not matter any more
            self.manager.shutdown(wait=False)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the Manager's counts, and what random numbers of micro-batches depend on."""
        rounds = {} if self._rounds is None else {"rounds": self._rounds.state_dict()}
        return {"manager": self.manager.state_dict(), "seed": self._seed, **rounds}

    def shared_state(self) -> StateDict:
        """Return what all groups know, for one that heals."""
        progress = self.run.progress
        return {
            "seed": self._seed,
            "before": [progress.samples_before, progress.tokens_before],  # each rank adds its own
            "heard": healing.written(self.run) if self.is_writer else self._heard,
        }

    def _send(self) -> StateDict:
        """Return the state of the run, between two windows, for a group that heals; in torchft's thread."""
        return healing.take(self.run, lasts=self._rounds is not None)

    def _receive(self, state: StateDict) -> None:
        self._received = state

    def _heal(self, state: StateDict) -> None:
        self._put(state, "the state of another replica group")
        self._has_quorum = True
        log.info("replica group %s continues at step %d", self.name, self.run.progress.steps)

    def go_back(self, state: StateDict) -> None:
        """Return to the beginning of a round, whose own copy is given, and ask for a quorum again."""
        self._put(state, "the state at the beginning of the round")
        log.info("replica group %s trains again from step %d", self.name, self.run.progress.steps)

    def _put(self, state: StateDict, source: str) -> None:
        shared = healing.put(self.run, state, source)
        self._seed, self._heard = shared["seed"], shared["heard"]
        self.run.progress.samples_before, self.run.progress.tokens_before = shared["before"]
        if self._rounds is not None:
            self._rounds.load_state_dict(state["checkpoint"]["torchft"]["rounds"])

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def is_within_round(self) -> bool:
        """Whether groups have different weights now."""
        return self._rounds is not None and self._rounds.is_open

    def train_window(self, run: FitRun, size: int) -> bool:
        """Train on the next window, together with the groups that are there; see `window.train_window`."""
        rounds = self._rounds
        if rounds is not None:
            rounds.hold_stop()  # ranks may have agreed to stop before this window
        if rounds is None or not rounds.is_open:
            if rounds is not None:
                rounds.inner = {}  # a group that heals does not need them
            if not self._has_quorum:
                self.join()
            self._has_quorum = False
        if rounds is None:
            return train_window(run, size)
        if not rounds.is_open:
            rounds.begin()
        is_trained = train_window(run, size)
        if rounds.is_open and not is_trained:  # the epoch ends here
            rounds.end(may_save=True)
        rounds.hold_stop()
        return is_trained

    def join(self) -> None:
        """Find out which groups take part in the next step.

        Raises:
            Rewind: This group has missed steps, and has got the state of one that made them.
            RankFailure: There are too few groups.
        """
        manager, wanted = self.manager, self._options.min_replicas
        until = time.monotonic() + self._options.quorum_timeout
        self._received = None
        while True:
            try:
                manager.start_quorum()
            except Exception as error:
                raise self._no_quorum(str(error)) from error
            found = manager.num_participants()
            if manager.errored() is None and found >= wanted:
                break
            manager.should_commit()  # False: on all ranks of the group, which then try again
            if found < wanted:  # the lighthouse has a lower minimum
                if time.monotonic() > until:
                    raise self._no_quorum(f"the last one had {found}.")
                time.sleep(_PAUSE_S)
        self.rank, self.size = manager.participating_rank() or 0, manager.num_participants()
        if self._received is not None:
            state, self._received = self._received, None
            raise Rewind(lambda: self._heal(state))

    def _no_quorum(self, reason: str) -> RankFailure:
        return RankFailure(
            f"replica group {self.name} found no quorum of at least {self._options.min_replicas} groups within "
            f"{self._options.quorum_timeout:g} s at {self._lighthouse}: {reason}",
            fix="check that the lighthouse and enough groups run, or pass a longer quorum_timeout; the run "
            "continues from its last checkpoint with ckpt_path='last'.",
        )

    def settle(self, everyone: list[dict[str, Any]]) -> None:
        """Let one group write: the one that does, as long as it is there; else the first of the quorum takes over."""
        writing = [rank for rank, one in enumerate(everyone) if one["is_writer"]]
        was, self.is_writer = self.is_writer, self.rank == min(writing, default=0)
        self._heard = next((one["written"] for one in everyone if one["written"] is not None), self._heard)
        if was == self.is_writer:
            return
        run = self.run
        self._be_silent(is_silent=not self.is_writer)
        if self.is_writer:
            log.info("replica group %s writes checkpoints and logs after step %d", self.name, run.progress.steps)
            healing.take_over(run, self._heard, self._logger_states)
            self._session.write_hyperparameters()

    def claim(self) -> dict[str, Any]:
        """Return whether this group writes, and what another one needs to know to do so."""
        has_peers = self.is_writer and self.size > 1
        return {"is_writer": self.is_writer, "written": healing.written(self.run) if has_peers else None}

    def conclude(self) -> None:
        """Learn which files the writing group keeps after its last save, which no step follows.

        With a limit in time, groups may end at different steps: then what they knew in the last common step counts.
        """
        loop = self._session.loop
        is_common = loop.is_at_limit or not loop.has_time_limit
        everyone = self.exchange(self.claim()) if is_common and self.size > 1 else None
        self._heard = next((one["written"] for one in everyone or () if one["written"] is not None), self._heard)

    def commits(self) -> bool:
        """Return whether the step is to be made; the same on all ranks of the group."""
        return bool(self.manager.should_commit())

    def seed(self, number: int) -> None:
        """Let the global generators draw the numbers of a micro-batch, whichever group trains on it.

        Args:
            number: Of all micro-batches of the training.
        """
        run = self.run
        key = f"{self._seed} {number} {run.fabric.strategy.topology.data_rank}".encode()
        seed_global_generators(key)
        if run.device.type != "cpu":
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
            torch.get_device_module(run.device).manual_seed(seed)

    def scale_of(self, weight: Tensor | float) -> float:
        """Return what sums of losses are divided by before backward: a power of two, which changes no digit."""
        if self._scale is None:
            found = float(weight)
            self._scale = 2.0 ** round(torch.log2(torch.tensor(found)).item()) if found > 0 else 1.0
        return self._scale

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Keep a value that a module logs until the step is made; see `Metrics.log`."""
        if self.recorded is None:
            self._metrics.log(name, value, *args, **kwargs)
            return
        value = value.detach().clone() if isinstance(value, Tensor) else value
        self.recorded.append((self._metrics.table.hook, name, value, args, kwargs))

    # --- communication -----------------------------------------------------------------------------------------------

    def exchange(self, own: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return what each group tells the others, in order of ranks; None where one of them does not answer.

        Args:
            own: Of this group, as JSON.
        """
        if self.size == 1:
            return [own]
        texts = self.exchange_bytes(json.dumps(own).encode())
        return None if texts is None else [json.loads(text) for text in texts]

    def exchange_bytes(self, own: bytes) -> list[bytes] | None:
        """Return the bytes of each group, in order of ranks; None where one of them does not answer."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        if not self._sum(sizes):
            return None
        ends = sizes.cumsum(0).tolist()
        everything = torch.zeros(ends[-1], dtype=torch.uint8)
        begins = [0, *ends[:-1]]
        everything[begins[self.rank] : ends[self.rank]] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        if not all(self._sum(part) for part in everything.split(_BUCKET_BYTES)):
            return None
        data = everything.numpy()
        return [data[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]

    def reduce(self, tensors: list[Tensor]) -> bool:
        """Add tensors up over groups, in place; return whether all groups were there."""
        if self.size == 1:
            return True
        bucket: list[Tensor] = []
        num_bytes = 0
        for one in local(tensors):
            if bucket and (num_bytes > _BUCKET_BYTES or one.dtype != bucket[0].dtype):
                if not self._sum_bucket(bucket):
                    return False
                bucket, num_bytes = [], 0
            bucket.append(one)
            num_bytes += one.numel() * one.element_size()
        return not bucket or self._sum_bucket(bucket)

    def _sum_bucket(self, bucket: list[Tensor]) -> bool:
        flat = torch.cat([one.reshape(-1) for one in bucket])
        if not self._sum(flat):
            return False
        parts = flat.split([one.numel() for one in bucket])
        torch._foreach_copy_(bucket, [part.view_as(one) for part, one in zip(parts, bucket, strict=True)])
        return True

    def _sum(self, tensor: Tensor) -> bool:
        manager = self.manager
        on_device = tensor if tensor.device.type == self.run.device.type else tensor.to(self.run.device)
        manager.allreduce(on_device, reduce_op=dist.ReduceOp.SUM).wait()
        if manager.errored() is not None or manager._pg.errored() is not None:
            manager._pg.abort()  # groups that wait for this one in the step need not wait any longer
            return False
        if on_device is not tensor:
            tensor.copy_(on_device)
        return True


def _refuse(session: _Session) -> None:
    """Refuse arguments of the Trainer that a step over replica groups cannot follow."""
    arguments, traits = session.arguments, session.strategy.traits
    reason = None
    if arguments.accumulate_across_epochs:
        reason = "accumulate_across_epochs=True, whose windows cannot be repeated from their beginning"
    elif arguments.on_oom == "shrink":
        reason = "on_oom='shrink', with which a window is repeated by the ranks of one group"
    elif session.strategy.accumulate_dtype is not None:
        reason = "grad_accumulation_dtype, with which gradients are summed outside of the parameters"
    elif traits.has_stages or traits.model_axes or traits.owns_optimizers or traits.traces_lazily:
        reason = f"{type(session.strategy).__name__}; a group can have the strategies ddp and fsdp"
    if reason is not None:
        raise ConfigError(f"fault_tolerance=TorchFT() with {reason}.", fix="leave out one of the two.")
