"""`loopwright launch --ray`: runs a program as it is in the workers of Ray Train."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import LaunchError, MissingDependency, Problems
from .launch_options import Request

_USED = {
    "ray",
    "nproc-per-node",
    "nnodes",
    "max-restarts",
    "log-dir",
    "accelerator",
    "strategy",
    "devices",
    "precision",
}


@dataclass(frozen=True)
class RayPlan:
    """The workers to start.

    Attributes:
        address: Address of the cluster, as for `ray.init`.
        num_workers: Number of workers, or the lowest and the highest.
        max_failures: Number of times that Ray starts all workers again after a failure.
        storage: Folder or URL for what the program reports to Ray; None is Ray's default.
        is_cpu_only: Whether the workers get no GPU.
        program: The program and its arguments.
        is_module: Whether it is the name of a module.
        variables: Environment variables for the program.
    """

    address: str
    num_workers: int | tuple[int, int]
    max_failures: int
    storage: str | None
    is_cpu_only: bool
    program: tuple[str, ...]
    is_module: bool
    variables: Mapping[str, str]

    def __str__(self) -> str:
        """Return the equivalent of Ray's own objects, for --dry-run."""
        failures = f"RunConfig(storage_path={self.storage!r}, failure_config=FailureConfig({self.max_failures}))"
        settings = " ".join(f"{name}={value}" for name, value in self.variables.items())
        program = " ".join(map(shlex.quote, (*(("-m",) if self.is_module else ()), *self.program)))
        return (
            f"ray.init({self.address!r}); TorchTrainer(scaling_config=ScalingConfig(num_workers={self.num_workers}), "
            f"run_config={failures}) runs: {settings}{' ' if settings else ''}python {program}"
        )


def make_ray_plan(request: Request, local: int, variables: Mapping[str, str], problems: Problems) -> RayPlan:
    """Return the workers to start.

    Args:
        request: The user's options.
        local: Number of workers for each machine of `--nnodes`.
        variables: Environment variables for the program.
        problems: Gets an error that names the options that Ray's workers do not have.
    """
    options = request.options
    variables = {name: value for name, value in variables.items() if name != "LT_DEVICES"}  # nodes may have others
    if unused := [f"--{name}" for name in options if name not in _USED]:
        problems.add(
            f"{', '.join(unused)} cannot be used with --ray: Ray starts and places the workers.",
            fix="omit them; --nproc-per-node times --nnodes is the number of workers.",
        )
    least, _, most = options.get("nnodes", "1").partition(":")
    counts = int(least) * local, int(most or least) * local
    return RayPlan(
        address=options["ray"],
        num_workers=counts if most else counts[0],
        max_failures=int(options.get("max-restarts", "0")),
        storage=options.get("log-dir"),
        is_cpu_only=options.get("accelerator") == "cpu",
        program=request.program,
        is_module=request.is_module,
        variables=variables,
    )


def start_on_ray(plan: RayPlan) -> int:
    """Run the program in all workers, and return the exit code.

    Raises:
        LaunchError: The cluster cannot be reached.
        MissingDependency: Ray is not installed.
    """
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    except ModuleNotFoundError as error:
        raise MissingDependency("ray", needed_for="loopwright launch --ray", extra="ray") from error
    try:
        ray.init(plan.address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise LaunchError(
            f"Expected a Ray cluster at --ray={plan.address}, got: {error}",
            fix="pass its address, auto for the cluster of this machine, or local for a new one on this machine.",
        ) from error
    use_gpu = not plan.is_cpu_only and ray.cluster_resources().get("GPU", 0) > 0
    trainer = TorchTrainer(
        run_program,
        train_loop_config={"plan": plan, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=plan.num_workers, use_gpu=use_gpu),
        run_config=RunConfig(storage_path=plan.storage, failure_config=FailureConfig(max_failures=plan.max_failures)),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        sys.stderr.write(f"{error}\n")  # names the ranks that failed
        return 1
    finally:
        ray.shutdown()
    return 0


def run_program(config: dict[str, object]) -> None:
    """Run the program in a worker, in the folder of `loopwright launch`.

    Raises:
        LaunchError: The program has ended with an exit code that is not 0.
    """
    plan, folder = config["plan"], config["folder"]
    assert isinstance(plan, RayPlan)
    os.chdir(str(folder))
    os.environ.update(plan.variables)
    name, *_ = sys.argv = [*plan.program]
    sys.path.insert(0, str(folder) if plan.is_module else os.path.dirname(os.path.abspath(name)))
    try:
        if plan.is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise LaunchError(
                f"{name} has ended with exit code {end.code}.", fix="see its output, and Ray's logs of this worker."
            ) from end
