"""`SLURMEnvironment`: processes started by srun, and requeuing of the job."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Generic, TypeVar

from ...errors import ConfigError, LaunchError
from .base import StartedProcesses, check_numbers

log = logging.getLogger(__name__)

# SLURM's names for interactive jobs: they have tasks, but this process is not one of them.
_INTERACTIVE = ("bash", "interactive")
_DEFAULT_PORT = 12910
_SCONTROL_TIMEOUT_S = 60
T = TypeVar("T")  # what a method returns


class _AlsoOfTheClass(Generic[T]):
    """A method that can also be called on the class, for this process: `SLURMEnvironment.job_id()`."""

    def __init__(self, method: Callable[[Any], T]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]  # it copies the names of any object

    def __get__(self, instance: SLURMEnvironment | None, owner: type[SLURMEnvironment]) -> Callable[[], T]:
        # Without __init__, which rejects incomplete variables: this only reads variables.
        return MethodType(self._method, owner.__new__(owner) if instance is None else instance)


class SLURMEnvironment(StartedProcesses):
    """The variables of srun: SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID and the list of nodes.

    Args:
        auto_requeue: Whether the Trainer saves a checkpoint and requeues the job when the signal arrives.
        requeue_signal: The signal that SLURM sends before the time limit (`#SBATCH --signal=SIGUSR1@90`); None:
            SIGUSR1, if the system has it.
        variables: Environment variables; None reads this process's variables on each access.

    Raises:
        LaunchError: There are several tasks, and the number per node is unknown.
    """

    size_variable = "SLURM_NTASKS"
    rank_variable = "SLURM_PROCID"
    local_rank_variable = "SLURM_LOCALID"

    def __init__(
        self,
        auto_requeue: bool = True,
        requeue_signal: signal.Signals | None = None,
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(variables=variables)
        self.auto_requeue = auto_requeue
        self.requeue_signal = getattr(signal, "SIGUSR1", None) if requeue_signal is None else requeue_signal
        if self._number("SLURM_NTASKS", 1) > 1 and self.num_local_processes() is None:
            raise LaunchError(
                f"Expected the number of SLURM tasks per node, but it is not set; SLURM started {self.world_size()} "
                "tasks.",
                fix="replace --ntasks with `#SBATCH --ntasks-per-node=N`, where N is devices=.",
            )

    # -- rank of this process -------------------------------------------------------------------------------

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else the first node of the list, else the loopback address; exported."""
        address = self.variables.get("MASTER_ADDR")
        if not address:
            # A step may run on some of the job's nodes only; its rank 0 is on the first of those.
            names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
            nodes = next((self.variables[name] for name in names if self.variables.get(name)), "127.0.0.1")
            address = self.resolve_root_node_address(nodes)
            self._export("MASTER_ADDR", address)
        return address

    @property
    def main_port(self) -> int:
        """MASTER_PORT, else a port derived from the numbers of job and step, else 12910; exported."""
        if "MASTER_PORT" in self.variables:
            return self._port(_DEFAULT_PORT)
        job = self.variables.get("SLURM_JOB_ID", "")
        port = 15000 + int(job[-4:]) if job.isdecimal() else _DEFAULT_PORT
        # Several steps of one job may run on one node at the same time.
        step = self.variables.get("SLURM_STEP_ID", "")
        if step.isdecimal() and int(step) < 10_000:  # larger numbers are special steps of SLURM
            port += int(step)
        self._export("MASTER_PORT", str(port))
        return port

    @staticmethod
    def resolve_root_node_address(nodes: str) -> str:
        """Return the first host of a list in SLURM's form: "node[03-05,7],other" is node03 and further hosts."""
        first = re.match(r"(?:[^\[\],\s]|\[[^\]]*\])*", nodes.strip())
        assert first is not None, "the pattern matches an empty string as well"
        return re.sub(r"\[\s*([^\],\s-]*)[^\]]*\]", r"\1", first.group())

    @staticmethod
    def detect(variables: Mapping[str, str] | None = None) -> bool:
        """Return whether this process is a task of a SLURM job; a warning says if srun was forgotten."""
        variables = os.environ if variables is None else variables
        if variables.get("SLURM_JOB_NAME") in _INTERACTIVE:
            return False
        if "SLURM_NTASKS" in variables:
            return True
        if "SLURM_JOB_ID" in variables and shutil.which("srun", path=variables.get("PATH")):
            command = " ".join([os.path.basename(sys.executable), *sys.argv])[:80]
            log.warning(
                "This is a SLURM job, but srun is not used, so only one process runs. To start all: srun %s", command
            )
        return False

    def node_rank(self) -> int:
        """Return SLURM_NODEID."""
        return self._number("SLURM_NODEID")

    def num_local_processes(self) -> int | None:
        """Return SLURM_NTASKS_PER_NODE, else this node's entry of SLURM_TASKS_PER_NODE; None if neither is set."""
        if "SLURM_NTASKS_PER_NODE" in self.variables:
            return self._number("SLURM_NTASKS_PER_NODE")
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        counts = [_counts(self.variables[name]) for name in names if self.variables.get(name)]
        node = self._number("SLURM_NODEID", 0)
        return counts[0][node] if counts and node < len(counts[0]) else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare devices with tasks per node, and num_nodes with SLURM's number of nodes.

        Raises:
            ConfigError: They differ, or the nodes have different numbers of tasks.
        """
        local, world = self.num_local_processes(), self.world_size()
        nodes = self._number("SLURM_STEP_NUM_NODES", self._number("SLURM_NNODES", 0)) or None
        tasks = world if local is None else None
        check_numbers(
            ("devices", num_devices, "the number of tasks per node (SLURM_NTASKS_PER_NODE)", local),
            ("num_nodes", num_nodes, "the number of nodes (SLURM_NNODES)", nodes),
            ("devices * num_nodes", num_devices * num_nodes, "the number of tasks (SLURM_NTASKS)", tasks),
            fix=f"pass devices={local if local is not None else max(1, world // (nodes or 1))} and "
            f"num_nodes={nodes or num_nodes}, or request other numbers from SLURM: #SBATCH --nodes={num_nodes} "
            f"--ntasks-per-node={num_devices}; or, with one task per node, replace python with `loopwright launch "
            f"--nproc-per-node {num_devices}`.",
        )
        if num_devices * num_nodes != world:
            raise ConfigError(
                f"Expected the same number of SLURM tasks on every node, got {world} tasks on {num_nodes} nodes, "
                f"{num_devices} of them on this node.",
                fix=f"replace --ntasks with `#SBATCH --nodes={num_nodes} --ntasks-per-node={num_devices}`.",
            )
        if world > 1 and "SLURM_JOB_ID" in self.variables and "SLURM_STEP_ID" not in self.variables:
            # sbatch also sets the number of tasks for its script, where no other process exists.
            log.warning("SLURM has %d tasks, but this process was not started by srun; it may wait forever", world)

    # -- the job -------------------------------------------------------------------------------------------------

    @_AlsoOfTheClass
    def job_name(self) -> str | None:
        """Return the job's name; None outside a job."""
        return self.variables.get("SLURM_JOB_NAME")

    @_AlsoOfTheClass
    def job_id(self) -> int | None:
        """Return the job's number; None outside a job and in an interactive job."""
        text = self.variables.get("SLURM_JOB_ID", "")
        return int(text) if text.isdecimal() and self.job_name() not in _INTERACTIVE else None

    def requeue_id(self) -> str | None:
        """Return the job's ID for scontrol: its number, or `<array job>_<task>` in an array; None without a job."""
        array, task = self.variables.get("SLURM_ARRAY_JOB_ID"), self.variables.get("SLURM_ARRAY_TASK_ID")
        job = self.job_id()
        if job is None:
            return None
        return f"{array}_{task}" if array and task else str(job)

    def restart_count(self) -> int:
        """Return how many times SLURM has requeued the job."""
        return self._number("SLURM_RESTART_COUNT", 0)

    def requeue(self) -> bool:
        """Requeue the job with `scontrol requeue`.

        Called on rank zero only, after the checkpoint is written. SLURM then ends this job's processes with SIGTERM.

        Returns:
            Whether SLURM accepted it. If not, the reason is logged.
        """
        job = self.requeue_id()
        scontrol = shutil.which("scontrol", path=self.variables.get("PATH"))
        if job is None or scontrol is None:
            log.warning("The job is not requeued: %s not found", "SLURM job" if job is None else "command scontrol")
            return False
        try:
            done = subprocess.run(
                [scontrol, "requeue", job], capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("Job %s is not requeued: %s", job, error)
            return False
        if done.returncode != 0:
            log.warning("Job %s is not requeued: %s", job, (done.stderr or done.stdout).strip())
            return False
        log.info("SLURM requeues job %s", job)
        return True


def _counts(text: str) -> list[int]:
    """Return the number of tasks per node from SLURM's format: "2(x3),1" is [2, 2, 2, 1]; empty for other formats."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
