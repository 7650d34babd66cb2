"""Runs programs as their own processes would, under Accelerate itself or Loopwright: run_programs.py SIDE FOLDER RUNS.

Each process is a fork of this one, which has imported torch: a program takes tenths of a second. RUNS are words
`NAME=SIZE:PROGRAM,ARGUMENT,...`; a run's processes work in FOLDER/NAME, and their output goes to files there.
"""

import faulthandler
import os
import runpy
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 60.0


def main():
    side, folder, *runs = sys.argv[1:]
    sys.path.insert(0, str(PROGRAMS))
    if side == "ours":
        from loopwright.compat.accelerate import install

        install()
    else:
        # What it imports later, where these are installed: for seconds, once here and not in each fork.
        for name in ("torch._dynamo", "deepspeed", "mlflow"):
            with suppress(ImportError):
                import_module(name)
    import accelerate

    is_real = hasattr(accelerate.Accelerator, "prepare_megatron_lm") or "_prepare_fsdp2" in dir(accelerate.Accelerator)
    if is_real != (side == "theirs") or accelerate.__version__ != "1.15.0":
        raise SystemExit(f"Expected {side}, got {accelerate!r} {accelerate.__version__}.")
    failed = []
    for run in runs:
        name, _, words = run.partition("=")
        size, _, program = words.partition(":")
        place = Path(folder, name)
        place.mkdir(parents=True)
        if any(start(place, int(size), *program.split(","))):
            failed.append(name)
    sys.stdout.write(f"failed: {failed}\n")


def start(place, size, program, *arguments):
    """Return the exit codes of the program's processes; those that take too long are killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            become(place, size, rank, port, program, arguments)
        children.append(child)
    return wait(children)


def wait(children):
    codes = {}
    limit = time.monotonic() + LIMIT_S
    while len(codes) < len(children):
        for child in children:
            done, status = (0, 0) if child in codes else os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):  # the others wait for it in vain
            limit = min(limit, time.monotonic() + 3)
        if time.monotonic() > limit:
            for child in set(children) - set(codes):
                os.kill(child, 9)
        time.sleep(0.01)
    return list(codes.values())


def become(place, size, rank, port, program, arguments):
    """Run the program in this process, and end it."""
    code = 1
    try:
        faulthandler.dump_traceback_later(LIMIT_S - 5)
        os.chdir(place)
        output = os.open(f"output_{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if size > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        sys.argv = [program, *arguments]
        runpy.run_path(str(PROGRAMS / program), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(bool(end.code))
    except BaseException:  # this fork must not go on as the parent
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
