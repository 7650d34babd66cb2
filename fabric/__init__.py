"""Fabric, the base of Trainer: devices, strategy, precision, processes, random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import join_errors
from ..lazy import attach
from .fabric import Fabric
from .launch import InProcessLauncher, Launcher
from .resolve import Environment, Parts, resolve
from .seed import isolate_rng, pl_worker_init_function, reset_seed, rng_state, seed_everything, set_rng_state

if TYPE_CHECKING:
    from .cluster import (
        ClusterEnvironment,
        KubeflowEnvironment,
        LightningEnvironment,
        LocalEnvironment,
        LSFEnvironment,
        MPIEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
        detect_cluster,
    )
    from .wrappers import is_wrapped

__all__ = [
    "ClusterEnvironment",
    "Environment",
    "Fabric",
    "InProcessLauncher",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "Launcher",
    "LightningEnvironment",
    "LocalEnvironment",
    "MPIEnvironment",
    "Parts",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "detect_cluster",
    "is_wrapped",
    "isolate_rng",
    "join_errors",
    "pl_worker_init_function",
    "reset_seed",
    "resolve",
    "rng_state",
    "seed_everything",
    "set_rng_state",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "ClusterEnvironment": "cluster",
        "KubeflowEnvironment": "cluster",
        "LSFEnvironment": "cluster",
        "LightningEnvironment": "cluster",
        "LocalEnvironment": "cluster",
        "MPIEnvironment": "cluster",
        "SLURMEnvironment": "cluster",
        "TorchElasticEnvironment": "cluster",
        "detect_cluster": "cluster",
        "is_wrapped": "wrappers",
    },
)
