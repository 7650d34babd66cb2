"""Detection of the cluster environment of this process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from .base import ClusterEnvironment
from .kubeflow import KubeflowEnvironment
from .lightning import LightningEnvironment
from .lsf import LSFEnvironment
from .mpi import MPIEnvironment
from .slurm import SLURMEnvironment
from .torchelastic import TorchElasticEnvironment

log = logging.getLogger(__name__)


def detect_cluster(variables: Mapping[str, str] | None = None) -> ClusterEnvironment:
    """Return the environment that this process runs in: TorchElastic, SLURM, LSF, MPI, Kubeflow, else Lightning's.

    torchrun comes first: even if one of the others started it, torchrun started the processes. A file is imported only
    if the variables of its scheduler are set. MPI is not initialized for detection.

    Args:
        variables: Environment variables, for tests and plans. None reads this process's variables on each access.

    Raises:
        LaunchError: A scheduler's variables are set, but incomplete.
    """
    found = os.environ if variables is None else variables
    if "TORCHELASTIC_RUN_ID" in found:
        return TorchElasticEnvironment(variables=variables)
    if ("SLURM_JOB_ID" in found or "SLURM_NTASKS" in found) and SLURMEnvironment.detect(found):
        return SLURMEnvironment(variables=variables)
    if "LSB_JOBID" in found and LSFEnvironment.detect(found):
        return LSFEnvironment(variables=variables)
    if "mpi4py.MPI" in sys.modules or _is_started_by_mpi(found):
        if MPIEnvironment.detect():
            return MPIEnvironment(variables=variables)
        if _is_started_by_mpi(found) and "LOCAL_RANK" not in found:
            log.warning(
                "mpirun started several processes, but mpi4py is not installed or does not find an MPI library. Each "
                "process runs independently. To connect them: pip install 'loopwright[mpi]'"
            )
    if "KUBERNETES_SERVICE_HOST" in found and KubeflowEnvironment.detect(found):
        return KubeflowEnvironment(variables=variables)
    if "LOCAL_RANK" not in found and variables is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            size = distributed.get_world_size()
            if size > 1:
                log.warning(
                    "The program has connected %d processes with torch.distributed, but LOCAL_RANK is not set: with "
                    "one device, each of them trains independently. To train together, set LOCAL_RANK in each, and "
                    "pass the number of processes of this machine as devices=.",
                    size,
                )
    return LightningEnvironment(variables=variables)


# Set by Open MPI, by MPICH and Intel MPI, and by MVAPICH.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def _is_started_by_mpi(variables: Mapping[str, str]) -> bool:
    """Return whether mpirun, mpiexec or a similar launcher started several processes."""
    sizes = [variables.get(name, "") for name in _MPI_SIZES]
    return any(size.isdecimal() and int(size) > 1 for size in sizes)
