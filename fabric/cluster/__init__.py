"""Cluster environments: ranks and addresses, one file per scheduler or launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import attach

if TYPE_CHECKING:
    from .base import ClusterEnvironment as ClusterEnvironment
    from .detect import detect_cluster as detect_cluster
    from .kubeflow import KubeflowEnvironment as KubeflowEnvironment
    from .lightning import LightningEnvironment as LightningEnvironment
    from .lightning import LocalEnvironment as LocalEnvironment
    from .lsf import LSFEnvironment as LSFEnvironment
    from .mpi import MPIEnvironment as MPIEnvironment
    from .slurm import SLURMEnvironment as SLURMEnvironment
    from .torchelastic import TorchElasticEnvironment as TorchElasticEnvironment

__getattr__, __dir__ = attach(
    __name__,
    {
        "ClusterEnvironment": "base",
        "KubeflowEnvironment": "kubeflow",
        "LSFEnvironment": "lsf",
        "LightningEnvironment": "lightning",
        "LocalEnvironment": "lightning",
        "MPIEnvironment": "mpi",
        "SLURMEnvironment": "slurm",
        "TorchElasticEnvironment": "torchelastic",
        "detect_cluster": "detect",
    },
)

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "LocalEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "detect_cluster",
]
