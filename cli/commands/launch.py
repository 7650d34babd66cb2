"""`loopwright launch`: starts a program in several processes, through torch's elastic launch (torchrun) or Ray."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ConfigError, LaunchError, LoopwrightError, Problems
from ...messages import counted
from .launch_ask import ask
from .launch_options import Request, read_request

DEFAULT_PORT = "29400"
# Strategies that start processes themselves: under a launcher each process would start more.
_OWN_PROCESSES = ("spawn", "fork", "notebook")
# Our name -> torchrun's, for values that are passed on unchanged.
_PASSED_ON = {
    name: name
    for name in (
        "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts", "monitor-interval",
        "shutdown-timeout", "log-dir", "redirects", "tee", "node-rank",
    )
} | {"local-address": "local-addr", "main-address": "master-addr", "main-port": "master-port"}  # fmt: skip
_NETWORK = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_VARIABLES = {
    "accelerator": "LT_ACCELERATOR",
    "strategy": "LT_STRATEGY",
    "devices": "LT_DEVICES",
    "precision": "LT_PRECISION",
}


@dataclass(frozen=True)
class LaunchPlan:
    """The processes to start.

    Attributes:
        torchrun: Arguments of torchrun before the program.
        program: The program and its arguments.
        variables: Environment variables for the processes.
    """

    torchrun: tuple[str, ...]
    program: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> str:
        """Return the equivalent shell command."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        words += ["python", "-m", "torch.distributed.run", *map(shlex.quote, (*self.torchrun, *self.program))]
        return " ".join(words)


def launch(arguments: Sequence[str]) -> int:
    """Start the program and wait for it.

    Returns:
        0 if all processes succeeded; otherwise the exit code of the first failed process (128 + the signal's number if
        a signal killed it); 2 if no process was started.
    """
    try:
        request = read_request(arguments, os.environ)
        if request.ask is not None:
            return _ask(request.ask)
        if request.left_out:
            sys.stderr.write(f"loopwright launch: without effect here: {'; '.join(request.left_out)}\n")
        if "ray" in request.options:
            return _launch_on_ray(request)
        plan = make_plan(request, num_gpus=_num_gpus(), num_cpus=_num_cpus(), variables=os.environ)
        if request.is_dry_run:
            sys.stdout.write(f"{plan.command()}\n")
            return 0
        _check_program(request)
        return _start(plan)
    except LoopwrightError as error:
        sys.stderr.write(f"loopwright launch: {error}\n")
        return 2


def _ask(path: str) -> int:
    if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):  # before the questions
        raise ConfigError(f"Expected a file that can be written, got --ask {path!r}.", fix="pass another path.")
    try:
        ask(path)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nloopwright launch: {path} was not written.\n")
        return 130
    except EOFError as error:
        raise ConfigError(
            "Expected answers on the terminal, got the end of the input.",
            fix="run it in a terminal, or write the file yourself: see docs/several-machines.md.",
        ) from error
    return 0


def _launch_on_ray(request: Request) -> int:
    from .launch_ray import make_ray_plan, start_on_ray

    problems = Problems()
    _, local = _num_processes(request.options, _num_gpus(), _num_cpus(), problems)
    _check_strategy(request.options, problems)
    # Workers of Ray do not inherit this process's variables.
    network = {name: value for name, value in os.environ.items() if name.startswith(_NETWORK)}
    plan = make_ray_plan(request, local, {**network, **_trainer_variables(request)}, problems)
    problems.refuse()
    if request.is_dry_run:
        sys.stdout.write(f"{plan}\n")
        return 0
    _check_program(request)
    return start_on_ray(plan)


def make_plan(request: Request, *, num_gpus: int, num_cpus: int, variables: Mapping[str, str]) -> LaunchPlan:
    """Return the processes to start.

    Args:
        request: The user's options.
        num_gpus: Number of GPUs of this machine.
        num_cpus: Number of CPU cores available to this process.
        variables: Current environment variables.

    Raises:
        ConfigError: Options are contradictory or missing; all problems are named.
    """
    problems = Problems()
    nproc, local = _num_processes(request.options, num_gpus, num_cpus, problems)
    nnodes = _num_nodes(request.options, problems)
    rendezvous = _rendezvous(request.options, nnodes, problems)
    _check_strategy(request.options, problems)
    problems.refuse()
    ours = _trainer_variables(request)
    if nnodes is not None and ":" in nnodes:
        # An agent that joins a later round of the rendezvous finds the store of that round only if each has one of its
        # own (torch 2.13): with a shared one it waits for a minute, and then all agents end with a DistStoreError.
        ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = variables.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    elif nnodes is not None and nnodes.isdecimal() and int(nnodes) > 1:
        ours["LT_NUM_NODES"] = nnodes
    if local > 1 and "OMP_NUM_THREADS" not in variables:
        ours["OMP_NUM_THREADS"] = str(max(1, num_cpus // local))
    kind = ("--module",) if request.is_module else ()
    return LaunchPlan((*rendezvous, f"--nproc-per-node={nproc}", *kind), request.program, ours)


def _trainer_variables(request: Request) -> dict[str, str]:
    return {_VARIABLES[name]: value for name, value in request.options.items() if name in _VARIABLES}


def _num_processes(options: Mapping[str, str], num_gpus: int, num_cpus: int, problems: Problems) -> tuple[str, int]:
    """Return torchrun's `--nproc-per-node` and the number of processes on this machine."""
    devices = options.get("devices", "auto")
    listed = [index for index in devices.split(",") if index.strip()]
    requested = len(listed) if "," in devices else int(devices) if devices.isdecimal() else None
    nproc = options.get("nproc-per-node")
    if nproc is None:
        is_cpu = options.get("accelerator", "auto") == "cpu"
        count = requested if requested is not None else 1 if is_cpu else max(1, num_gpus)
        if count < 1:
            problems.add("Expected at least one device, got --devices=0.", fix="pass --devices=1 or more.")
        return str(count), count
    if nproc == "gpu" and not num_gpus:
        problems.add("Expected a GPU for --nproc-per-node=gpu, got a machine without one.", fix="pass a number.")
    local = int(nproc) if nproc.isdecimal() else num_gpus or num_cpus if nproc != "cpu" else num_cpus
    if requested is not None and requested != local:
        problems.add(
            f"--nproc-per-node={nproc} is {local} on this machine, but --devices={devices} is {requested}: each "
            "process has one device.",
            fix="omit one of the two.",
        )
    return nproc, local


def _num_nodes(options: Mapping[str, str], problems: Problems) -> str | None:
    """Return the number of machines, or MIN:MAX; None if the user passed none."""
    nnodes, num_nodes = options.get("nnodes"), options.get("num-nodes")
    if nnodes is not None and num_nodes is not None and nnodes != num_nodes:
        problems.add(f"--nnodes={nnodes} and --num-nodes={num_nodes} differ.", fix="omit one of the two.")
    return nnodes if nnodes is not None else num_nodes


def _rendezvous(options: Mapping[str, str], nnodes: str | None, problems: Problems) -> list[str]:
    """Return torchrun's rendezvous arguments."""
    static = [name for name in ("node-rank", "main-address", "main-port") if name in options]
    by_rdzv = [name for name in ("rdzv-backend", "rdzv-endpoint") if name in options]
    passed = dict(options)
    if static and by_rdzv and options.get("rdzv-backend") != "static":
        problems.add(
            f"{_flags(static)} and {_flags(by_rdzv)} are alternatives for the rendezvous of machines.",
            fix="pass --node-rank, --main-address and --main-port, or the --rdzv-... options.",
        )
    elif by_rdzv:
        missing = [name for name in ("rdzv-endpoint", "rdzv-id") if name not in options]
        if options.get("rdzv-backend", "c10d") != "static" and missing:
            problems.append(_missing(missing, "--rdzv-backend"))
        passed.setdefault("rdzv-backend", "c10d")
    elif nnodes is None and static:
        problems.add(
            f"Expected --nnodes with {_flags(static)}, which is for several machines.",
            fix=f"pass --nnodes, the number of machines, or omit {_flags(static)} to use this machine only.",
        )
    elif nnodes is None or (nnodes == "1" and not static):
        # The host name may not resolve; local processes reach each other by the loopback address.
        passed.setdefault("local-address", "127.0.0.1")
        return ["--standalone", *_passed_on(passed)]
    elif ":" in nnodes:
        problems.append(_missing(["rdzv-backend", "rdzv-endpoint", "rdzv-id"], f"--nnodes={nnodes}"))
    else:
        missing = [name for name in ("node-rank", "main-address") if name not in options]
        if int(nnodes) > 1 and missing:
            problems.append(_missing(missing, f"--nnodes={nnodes}"))
        if int(options.get("node-rank", "0")) >= int(nnodes):
            problems.add(
                f"Expected --node-rank of 0 to {int(nnodes) - 1} with --nnodes={nnodes}, got {options['node-rank']}.",
                fix="pass the number of this machine.",
            )
        passed.setdefault("main-port", DEFAULT_PORT)
        passed.setdefault("node-rank", "0")
    return [f"--nnodes={nnodes or 1}", *_passed_on(passed)]


def _passed_on(options: Mapping[str, str]) -> list[str]:
    return [f"--{theirs}={options[ours]}" for ours, theirs in _PASSED_ON.items() if ours in options]


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _missing(names: Sequence[str], needed_by: str) -> ConfigError:
    return ConfigError(
        f"{needed_by} needs {_flags(names)} as well.", fix="pass the same options on every machine, except --node-rank."
    )


def _check_strategy(options: Mapping[str, str], problems: Problems) -> None:
    strategy = options.get("strategy", "").lower()
    if any(word in strategy for word in _OWN_PROCESSES):
        problems.add(
            f"Expected a strategy that uses the processes of `loopwright launch`, got --strategy={strategy}, which "
            "starts its own.",
            fix="pass --strategy=ddp, or run the program without `loopwright launch`.",
        )


def _check_program(request: Request) -> None:
    if not request.is_module and not Path(request.program[0]).is_file():
        raise ConfigError(
            f"Expected a script, got {request.program[0]!r}, which does not exist in {os.getcwd()!r}.",
            fix="pass the path of a script, or -m and the name of a module, after the options.",
        )


def _num_gpus() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(plan: LaunchPlan) -> int:
    """Run torchrun in this process and return the exit code."""
    # Private to torch's launcher, but required to distinguish causes: torchrun itself ends with 1 for all of them.
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    os.environ.update(plan.variables)
    try:
        torchrun.run(torchrun.parse_args([*plan.torchrun, *plan.program]))
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        sys.stderr.write(f"loopwright launch: ended by {error.sigval.name}\n")
        return 128 + int(error.sigval)
    except RendezvousTimeoutError as error:
        nnodes = next((word.partition("=")[2] for word in plan.torchrun if word.startswith("--nnodes=")), "1")
        raise LaunchError(
            f"Expected at least {counted(int(nnodes.partition(':')[0]), 'machine')} (--nnodes={nnodes}), got fewer "
            "until the rendezvous timed out.",
            fix="start the same command on more machines, pass a smaller MIN in --nnodes MIN:MAX, or a longer time: "
            "--rdzv-conf join_timeout=1800 (seconds).",
        ) from error
    except (DistError, RendezvousError) as error:
        raise LaunchError(
            f"Expected a rendezvous of all machines, got: {error}.",
            fix="check that all machines use the same options and can reach --main-address (or --rdzv-endpoint), and "
            "that no other program uses its port.",
        ) from error
    return 0
