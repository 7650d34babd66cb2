"""`TorchFT`: the arguments of torchft's Manager."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from torch.optim import Optimizer

from ...errors import ConfigError, MissingDependency


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFT:
    """Replica groups under torchft: a group that dies leaves the others training, and heals when it comes back.

    Each group is one run of the program, with the same arguments. Its `strategy` and `devices` describe one group.

    Args:
        min_replicas: Number of groups with which a step may be made; with fewer, groups wait.
        replica_id: Name of this group, different in each; None reads REPLICA_GROUP_ID.
        lighthouse_addr: Address of torchft's lighthouse, "http://host:29510"; None reads TORCHFT_LIGHTHOUSE.
        timeout: Seconds that a group waits for others in a step, and for the state with which it heals.
        quorum_timeout: Seconds that a group waits for a quorum. It must be longer than validations and saves.
        connect_timeout: Seconds to connect to the lighthouse and to other groups.
        quorum_retries: Number of times a quorum is requested again, as when the lighthouse was restarted.
        max_retries: Number of times in a row that a step may be refused before fit fails; None for no limit.
            Waiting for `min_replicas` groups counts, too, where the lighthouse has a lower minimum.
        sync_every: Number of optimizer steps that each group makes by itself before the groups take the mean of their
            weights (LocalSGD); None adds up gradients at each step, and keeps groups equal.
        outer_optimizer: DiLoCo: steps the weights with the mean change within `sync_every` steps as gradient. A
            function of the list of weights, such as `functools.partial(torch.optim.SGD, lr=0.7)`; or "nesterov", which
            is SGD with lr=0.7 and a Nesterov momentum of 0.9, as in DiLoCo's paper. None is LocalSGD.

    Raises:
        MissingDependency: torchft is not installed.
        ConfigError: An argument is invalid.
    """

    min_replicas: int = 1
    replica_id: str | None = None
    lighthouse_addr: str | None = None
    timeout: float = 60.0
    quorum_timeout: float = 600.0
    connect_timeout: float = 60.0
    quorum_retries: int = 0
    max_retries: int | None = None
    sync_every: int | None = None
    outer_optimizer: Callable[[list[torch.nn.Parameter]], Optimizer] | Literal["nesterov"] | None = None

    def __post_init__(self) -> None:
        if importlib.util.find_spec("torchft") is None:
            raise MissingDependency("torchft", needed_for="fault_tolerance=TorchFT(...)", extra="torchft")
        if self.min_replicas < 1:
            raise ConfigError(
                f"Expected min_replicas of at least 1, got {self.min_replicas!r}.", fix="pass min_replicas=1 or more."
            )
        if self.sync_every is not None and self.sync_every < 1:
            raise ConfigError(f"Expected sync_every of at least 1, got {self.sync_every!r}.", fix="pass 1 or more.")
        outer = self.outer_optimizer
        if outer is not None and self.sync_every is None:
            raise ConfigError("outer_optimizer is for rounds, and sync_every is None.", fix="pass sync_every=500, say.")
        if outer is not None and outer != "nesterov" and (isinstance(outer, Optimizer) or not callable(outer)):
            raise ConfigError(
                f"Expected outer_optimizer='nesterov' or a function of the list of weights, got {outer!r}.",
                fix="pass functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), for example.",
            )

    def outer(self) -> Callable[[list[torch.nn.Parameter]], Optimizer] | None:
        """Return the function that builds the outer optimizer; None for LocalSGD."""
        if self.outer_optimizer == "nesterov":
            return partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        return self.outer_optimizer

    def resolved_id(self) -> str:
        """Return the group's name.

        Raises:
            ConfigError: There is none.
        """
        found = self.replica_id if self.replica_id is not None else os.environ.get("REPLICA_GROUP_ID")
        if not found:
            raise ConfigError(
                "fault_tolerance=TorchFT() needs the name of this replica group, and REPLICA_GROUP_ID is not set.",
                fix="set REPLICA_GROUP_ID to 0, 1, 2, ... for the runs of the program, or pass replica_id=.",
            )
        return str(found)

    def resolved_lighthouse(self) -> str:
        """Return the lighthouse's address.

        Raises:
            ConfigError: There is none.
        """
        found = self.lighthouse_addr or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not found:
            raise ConfigError(
                "fault_tolerance=TorchFT() needs the address of a lighthouse, and TORCHFT_LIGHTHOUSE is not set.",
                fix="start one with `torchft_lighthouse --min_replicas 1`, and set TORCHFT_LIGHTHOUSE=http://HOST:29510.",
            )
        return found

    def durations(self) -> dict[str, timedelta]:
        """Return the time limits under the names of Manager's arguments."""
        names = ("timeout", "quorum_timeout", "connect_timeout")
        return {name: timedelta(seconds=getattr(self, name)) for name in names}
