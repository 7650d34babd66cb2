"""`loopwright launch --ask FILE`: asks for the options of a launch, and writes them to a file for `--config`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from ...files import replace_file
from .launch_options import OPTIONS

# Question, option, default; asked in this order.
_HERE = (
    ("Processes on each machine (a number, or auto: one per GPU)", "nproc-per-node", "auto"),
    ("Strategy of Trainer and Fabric (ddp, fsdp, deepspeed, ...; empty: what the program says)", "strategy", ""),
    ("Precision (32-true, bf16-mixed, ...; empty: what the program says)", "precision", ""),
    ("Restarts of all processes after a failure", "max-restarts", "0"),
)
_MACHINES = (
    ("Address of the first machine, for the others", "main-address", ""),
    ("Its port", "main-port", "29400"),
)
_ELASTIC = (
    ("Address at which machines meet (HOST:PORT)", "rdzv-endpoint", ""),
    ("Name of the job", "rdzv-id", "job"),
)


def ask(path: str, answer: Callable[[str], str] = input) -> None:
    """Ask on the terminal, and write the file.

    Args:
        path: The YAML file; an existing one is replaced after a question.
        answer: Returns the user's answer to a question.

    Raises:
        EOFError: There is no terminal, or the input has ended.
    """
    accepts = {option.name: option.accept for option in OPTIONS}

    def one(question: str, name: str, default: str) -> str:
        while True:
            text = answer(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
            if not text and name in ("strategy", "precision"):
                return ""
            if text and (name == "script" or accepts[name](text)):
                return text
            sys.stdout.write(f"Expected a valid value, got {text!r}.\n")

    if Path(path).exists() and answer(f"{path} exists. Replace it? [no]: ").strip().lower() not in ("y", "yes"):
        sys.stdout.write(f"{path} is unchanged.\n")
        return
    found = {"nnodes": one("Number of machines (or MIN:MAX, if they join and leave)", "nnodes", "1")}
    is_elastic = ":" in found["nnodes"]
    for question, name, default in (*(_ELASTIC if is_elastic else _MACHINES if found["nnodes"] != "1" else ()), *_HERE):
        found[name] = one(question, name, default)
    if is_elastic:
        found["rdzv-backend"] = "c10d"
    found["script"] = one("Program", "script", "train.py")
    # A JSON string is one of YAML, too; numbers are written as they are.
    lines = [f"{name}: {value if value.isdecimal() else json.dumps(value)}\n" for name, value in found.items() if value]
    replace_file(Path(path), "".join(lines))
    rank = " --node-rank N" if not is_elastic and found["nnodes"] != "1" else ""
    sys.stdout.write(f"Wrote {path}. Start with: loopwright launch --config {path}{rank}\n")
