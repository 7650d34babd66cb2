"""The `loopwright` command line and `CLI`, a command line for the user's own classes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import nearest
from ..lazy import attach

if TYPE_CHECKING:
    from .app import CLI as CLI
    from .groups import Groups as Groups
    from .saved_config import SaveConfig as SaveConfig

__all__ = ["CLI", "Groups", "SaveConfig", "run"]

_TRAINING = {
    "fit": "train and validate a model, given by its class",
    "validate": "evaluate a model on the validation data",
    "test": "evaluate a model on the test data",
    "predict": "compute predictions of a model",
}
_COMMANDS = {
    **_TRAINING,
    "launch": "start a program in several processes, on one or more machines",
    "completion": "print a script that completes commands in bash, zsh or fish",
    "checkpoint": "inspect, verify, compare and convert checkpoints",
    "doctor": "check this machine: devices, packages, compilers, limits, network, disk",
    "lifecycle": "print the hooks and their order as Markdown",
    "migrate": "run a program under Lightning and Loopwright, and list what is not supported",
    "plan": "show which strategies fit a program's training, and what they need, without training",
    "recipe": "language models: tokenizer, pretrain, finetune, plan, chat, generate, evaluate, export",
    "replay": "make one step of a run again, and show its losses, norms and samples; or compare two runs",
    "report": "write an HTML report of runs: curves, metrics, checkpoints, configuration",
    "run-accelerate": "run a program written for Hugging Face Accelerate on Loopwright",
    "run-lightning": "run a program written for Lightning on Loopwright",
    "watch": "show the curves of running jobs in the terminal",
}
__getattr__, __dir__ = attach(__name__, {"CLI": "app", "Groups": "groups", "SaveConfig": "saved_config"})


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: Arguments after the command's name.
    """
    if arguments and arguments[0] in _TRAINING:
        from .commands.train import train

        return train(arguments)
    if arguments and arguments[0] == "launch":
        # Its options end where the program begins, whose options are not ours: it parses them itself.
        from .commands.launch import launch

        return launch(arguments[1:])
    if arguments and arguments[0] == "run-accelerate":
        from .commands.run_accelerate import run_accelerate

        return run_accelerate(arguments[1:])
    if arguments and arguments[0] == "run-lightning":
        from .commands.run_lightning import run_lightning

        return run_lightning(arguments[1:])
    if arguments and arguments[0] == "migrate":
        from .commands.migrate import migrate

        return migrate(arguments[1:])
    if arguments and arguments[0] == "recipe":
        from .commands.recipe import recipe

        return recipe(arguments[1:])
    if arguments and arguments[0] in ("report", "watch"):
        from .commands import report

        return (report.report if arguments[0] == "report" else report.watch)(arguments[1:])
    if arguments and arguments[0] == "plan":
        from .commands.plan import plan

        return plan(arguments[1:])
    if arguments and arguments[0] == "replay":
        from .commands.replay import replay

        return replay(arguments[1:])
    if arguments and arguments[0] == "completion":
        from .commands.completion import completion

        return completion(arguments[1:], _COMMANDS)
    if arguments and arguments[0] == "doctor":
        from .commands.doctor import doctor

        return doctor(arguments[1:])
    if arguments and arguments[0] == "checkpoint":
        from .commands.checkpoint import checkpoint

        return checkpoint(arguments[1:])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        hint = nearest(arguments[0], _COMMANDS)
        sys.stderr.write(
            f"loopwright: expected a command, got {arguments[0]!r}{hint}. Commands: {', '.join(_COMMANDS)}\n"
        )
        return 2
    parser = argparse.ArgumentParser(prog="loopwright", description="A trainer framework for PyTorch.")
    parser.add_argument("--version", action="version", version=f"loopwright {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text)
    chosen = parser.parse_args(arguments)
    if chosen.command == "lifecycle":
        from ..trainer.lifecycle import markdown

        sys.stdout.write(markdown())
        return 0
    parser.print_help()
    return 2
