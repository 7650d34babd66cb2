"""Measure on an accelerator what only one can show: `make gpu`, or `python benchmarks/accelerator/run.py`.

At most ten minutes, one device, nothing is downloaded. Writes benchmarks/GPU.md after each part. Each part runs in a
process, so that one that fails leaves the others.

Exit codes: 0 all that is to hold holds; 1 a part failed, or something does not hold; 77 there is no device, and nothing
was measured or written. `--device cpu` runs all parts in small on the CPU, to test this program: its file says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FOLDER))

import torch  # noqa: E402  # after the path of the parts
from tables import table  # noqa: E402

from accelerator.parts import PARTS, Row  # noqa: E402

NO_DEVICE = 77  # "skipped" for automake and others: not a success, and not a failure of what is measured
LIMIT_S = 600


def parse_arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a test of this program, in small"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS), metavar="PART")
    parser.add_argument("--output", type=Path, help="folder of GPU.md; benchmarks/ by default, and needed with cpu")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and arguments.output is None:
        parser.error("--device cpu needs --output: benchmarks/GPU.md holds numbers of devices")
    return arguments


def run_part(name: str, device: str, left_s: float) -> tuple[list[Row], str]:
    """Return the rows of a part, and why there are none."""
    limit_s = min(PARTS[name][1], left_s)
    if limit_s < 10:
        return [], f"left out: the {LIMIT_S} s were over"
    command = [sys.executable, "-c", "from accelerator.parts import main; main()", name, device]
    command.append("quick" if device == "cpu" else "full")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return [], f"ended after {limit_s:.0f} s"
    if done.returncode:
        return [], f"failed with exit code {done.returncode}"
    return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])], ""


def describe(device: str, rows: list[Row], failures: dict[str, str], took_s: float) -> str:
    """Return GPU.md."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        name = "**no accelerator: a test of the program on the CPU; the numbers mean nothing**"
    held = {None: "", True: "yes", False: "**no**"}
    text = [
        "# Results on an accelerator",
        f"Written by `make gpu` on {date.today().isoformat()} in {took_s:.0f} s. {name}; {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}.",
        table(("", "result", "target", "holds"), ((row.what, row.value, row.target, held[row.holds]) for row in rows)),
        *(f"- {part}: {why}" for part, why in failures.items()),
    ]
    return "\n\n".join(text) + "\n"


def main() -> int:
    """Run the parts, and return the exit code."""
    arguments = parse_arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "There is no GPU that torch can use here, so that nothing was measured "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda}).",
            file=sys.stderr,
        )
        return NO_DEVICE
    began_s, rows, failures = time.monotonic(), [], {}
    for name in arguments.only:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        found, why = run_part(name, arguments.device, LIMIT_S - (time.monotonic() - began_s))
        rows += found
        if why:
            failures[name] = why
        text = describe(arguments.device, rows, failures, time.monotonic() - began_s)
        (arguments.output or FOLDER).mkdir(parents=True, exist_ok=True)
        Path(arguments.output or FOLDER, "GPU.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if failures or any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
