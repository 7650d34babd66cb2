"""The machine under Trainer: devices, strategy, precision, processes, random numbers."""

from __future__ import annotations

from .choose import join_errors
from .cluster import ClusterEnvironment, LocalEnvironment
from .fabric import Fabric
from .launch import InProcessLauncher, Launcher
from .resolve import Environment, Parts, resolve
from .seed import (
    isolate_rng,
    pl_worker_init_function,
    reset_seed,
    rng_state,
    seed_everything,
    set_rng_state,
)

__all__ = [
    "ClusterEnvironment",
    "Environment",
    "Fabric",
    "InProcessLauncher",
    "Launcher",
    "LocalEnvironment",
    "Parts",
    "isolate_rng",
    "join_errors",
    "pl_worker_init_function",
    "reset_seed",
    "resolve",
    "rng_state",
    "seed_everything",
    "set_rng_state",
]
