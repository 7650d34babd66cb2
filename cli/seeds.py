"""Random seed of a run without a given one: drawn once, the same on all ranks."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping

_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "NNODES")
_SHARED = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "LSB_JOBID", "PMIX_NAMESPACE", "PMI_JOBID",
           "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


def draw_seed(num_nodes: int = 1, variables: Mapping[str, str] | None = None) -> int:
    """Return a 32-bit seed.

    A process that another rank has started finds its seed in the environment, where LOOPWRIGHT_SEED may give one, too.
    Where a launcher (torchrun, SLURM, MPI) has started several, each derives the seed from variables that the job has
    in common: a drawn seed could not reach them.

    Args:
        num_nodes: Machines of the run: each of them starts its own process.
        variables: Environment variables; None is this process's variables.
    """
    variables = os.environ if variables is None else variables
    from ..fabric.seed import known_seed, wanted_seed  # it imports torch

    inherited = known_seed(variables) or ""
    if inherited.isdigit():
        return int(inherited)
    wanted = wanted_seed(variables)
    if wanted is not None:
        return wanted
    counts = [int(size) for name in _SIZES if (size := variables.get(name, "")).isdigit()]
    if max([num_nodes, *counts]) == 1:
        return random.SystemRandom().randrange(2**32)
    job = "|".join(variables.get(name, "") for name in _SHARED)
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
