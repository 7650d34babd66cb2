"""`loopwright doctor --nnodes`: checks several ranks together."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from ...doctor import Finding, Level
from ...doctor.ranks import examine_ranks
from ...errors import LaunchError, LoopwrightError
from .launch import DEFAULT_PORT

_OPTIONS = ("nnodes", "nproc_per_node", "node_rank", "main_address", "main_port", "rdzv_endpoint")


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of several ranks; their names are those of `loopwright launch`."""
    group = parser.add_argument_group(
        "several ranks",
        "Connect ranks as a training does, compare versions, packages and variables, name the links of the machines, "
        "and measure all_reduce. Start the same command on each machine; or start it with torchrun, or with srun and "
        "--nnodes. Without --nnodes and --nproc-per-node, this machine is checked.",
    )
    group.add_argument("--nnodes", type=int, metavar="N", help="number of machines")
    group.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="number of ranks on each machine (default: one per GPU, else 1)"
    )
    group.add_argument("--node-rank", type=int, metavar="N", help="number of this machine, from 0")
    group.add_argument("--main-address", metavar="HOST", help="name or address of machine 0")
    group.add_argument("--main-port", metavar="PORT", help=f"free port of machine 0 (default {DEFAULT_PORT})")
    group.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="--main-address and --main-port together")
    group.add_argument(
        "--accelerator", default="auto", metavar="NAME", help="cpu measures the network without GPUs (default auto)"
    )


def wants_ranks(given: argparse.Namespace) -> bool:
    """Return whether several ranks are to be checked: the user asks for it, or torchrun has started them."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    return is_launched or any(getattr(given, name) is not None for name in _OPTIONS)


def examine_all_ranks(
    given: argparse.Namespace,
    parser: argparse.ArgumentParser,
    show: Callable[[Iterable[Finding]], list[str]],
) -> int:
    """Connect the ranks and examine them; return the exit code.

    Args:
        given: Parsed arguments.
        parser: Reports mistakes in them.
        show: Prints findings, and returns their levels. Machine 0 shows all of them, other machines the problems.
    """
    from ...fabric import detect_cluster

    _check(given, parser)
    _export(given)
    cluster = detect_cluster()
    findings = _examine(given)
    if cluster.local_rank() > 0:
        levels = [one.level.value for one in findings]
    elif cluster.node_rank() > 0:
        problems = [one for one in findings if one.level is Level.PROBLEM]
        levels = show(problems) if problems or given.json else []
        if not levels and not given.json:
            sys.stdout.write("no problems; machine 0 shows the findings\n")
    else:
        levels = show(findings)
    return 1 if "problem" in levels else 0


def _check(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End with the parser's error if the arguments are contradictory."""
    if given.nnodes is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        alone = [f"--{name.replace('_', '-')}" for name in _OPTIONS[2:] if getattr(given, name) is not None]
        if alone:
            parser.error(f"{', '.join(alone)} without --nnodes: expected the number of machines, as in --nnodes 2")
    for name in ("nnodes", "nproc_per_node"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: expected a number of at least 1")
    if given.rdzv_endpoint is not None:
        if given.main_address is not None or given.main_port is not None:
            parser.error("--rdzv-endpoint and --main-address or --main-port are alternatives: pass one of them")
        given.main_address, _, port = given.rdzv_endpoint.rpartition(":")
        if not given.main_address or not port.isdecimal():
            parser.error(f"--rdzv-endpoint {given.rdzv_endpoint}: expected HOST:PORT")
        given.main_port = port
    if given.main_port is not None:
        if not given.main_port.isdecimal() or not 1 <= int(given.main_port) <= 65535:
            parser.error(f"--main-port {given.main_port}: expected a port from 1 to 65535")
        if given.main_address is None and (given.nnodes or 1) > 1:
            parser.error("--main-port without --main-address: expected the name or address of machine 0, too")
    if given.node_rank is not None and not 0 <= given.node_rank < (given.nnodes or 1):
        parser.error(f"--node-rank {given.node_rank}: expected 0 to {(given.nnodes or 1) - 1}, one number per machine")


def _export(given: argparse.Namespace) -> None:
    """Set the variables by which ranks find each other, as a user would for a training."""
    if given.main_address is not None:
        os.environ["MASTER_ADDR"] = given.main_address
        os.environ["MASTER_PORT"] = given.main_port or DEFAULT_PORT
    if given.node_rank is not None:
        os.environ["NODE_RANK"] = str(given.node_rank)


def _examine(given: argparse.Namespace) -> Iterator[Finding]:
    """Connect the ranks and yield the findings; an error is a finding, too."""
    from ...fabric import Fabric
    from ...strategies import DDPStrategy

    began = time.monotonic()
    fabric: Fabric | None = None
    devices = "auto" if given.nproc_per_node is None else given.nproc_per_node
    try:
        # gloo first: then the ranks can compare what they are, also if the devices cannot communicate.
        strategy = DDPStrategy(process_group_backend="gloo", timeout=max(1.0, given.timeout))
        fabric = Fabric(accelerator=given.accelerator, devices=devices, num_nodes=given.nnodes or 1, strategy=strategy)
        fabric.launch()
        yield from examine_ranks(fabric, began)
    except LoopwrightError as error:
        limit = f" The limit is --timeout {given.timeout:g}." if isinstance(error, LaunchError) else ""
        yield Finding("ranks", "connection", error.what, Level.PROBLEM, f"{error.fix}{limit}")
    except RuntimeError as error:  # of torch, if a rank has ended: the watch knows which
        failure = fabric.watch.explain(error) if fabric is not None and fabric.watch is not None else None
        if failure is not None:
            yield Finding("ranks", "connection", failure.what, Level.PROBLEM, failure.fix)
            return
        # Rank 0, which has the store, is gone.
        what = f"The ranks lost their connection: {str(error).strip().partition(chr(10))[0]}"
        yield Finding("ranks", "connection", what, Level.PROBLEM, "see the output of machine 0.")
