"""Who knows ranks and addresses: one file for each place that processes can come from.

Names are looked up when they are first used: training on one device needs none of the schedulers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

# Public name -> the file that defines it.
_HOME = {
    "ClusterEnvironment": "base",
    "KubeflowEnvironment": "kubeflow",
    "LSFEnvironment": "lsf",
    "LightningEnvironment": "lightning",
    "LocalEnvironment": "lightning",
    "MPIEnvironment": "mpi",
    "SLURMEnvironment": "slurm",
    "TorchElasticEnvironment": "torchelastic",
    "detect_cluster": "detect",
}

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


def __getattr__(name: str) -> Any:  # Any: the type is that of the name asked for
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
