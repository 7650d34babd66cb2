"""However a program was started: two ranks train, or a LaunchError names the remedy; and no process is left."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
import loopwright as lw

class Net(lw.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()
    def on_train_end(self):
        os.write(1, b"trained as rank %d\\n" % self.trainer.global_rank)  # in one piece
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def work(strategy="ddp"):
    trainer = lw.Trainer(
        max_steps=2, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
"""
MAIN = 'if __name__ == "__main__":\n    work()\n'
CHILD = """
import multiprocessing, sys
from job import work
if __name__ == "__main__":
    child = multiprocessing.get_context({method!r}).Process(target=work, args=({strategy!r},))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from job import work
if __name__ == "__main__":
    with {pool} as pool:
        pool.{call}(work, {args}).{get}()
"""
EXECUTOR = 'ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))'
SPAWNS = "multiprocessing.get_context('spawn').Pool(1)"
JOBLIB = """
import joblib
from job import work
if __name__ == "__main__":
    joblib.Parallel(2)([joblib.delayed(work)()])
"""
GROUP = """
import os, sys
import torch.distributed as dist, torch.multiprocessing as mp
from job import work

def rank(rank, port, sets_rank):
    if sets_rank:
        os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    work()
    dist.destroy_process_group()

if __name__ == "__main__":
    import socket
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.spawn(rank, (port, {sets_rank}), nprocs=2)
"""
XDIST = """
from job import work
def test_it():
    work()
"""


def _zip(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", JOB + MAIN)
    return ["app.pyz"]


def _wrote(folder: Path, text: str) -> list[str]:
    (folder / "main.py").write_text(text)
    return ["main.py"]


def _package(folder: Path) -> list[str]:
    (folder / "app").mkdir()
    (folder / "app" / "__init__.py").touch()
    (folder / "app" / "__main__.py").write_text("from job import work\n" + MAIN)
    return ["-m", "app"]


def _frozen(folder: Path) -> list[str]:
    """An executable that runs the program, and says so as PyInstaller's do."""
    program = folder / "program"
    (folder / "boot.py").write_text(
        f"import sys\nsys.frozen, sys.executable = True, {str(program)!r}\nsys.argv[0] = sys.executable\n"
        f"import types\nmain = sys.modules['__main__'] = types.ModuleType('__main__')\nmain.__file__ = 'main.py'\n"
        "from job import work\nassert sys.argv[1:] == ['--lr', '1']\nwork()\n"
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} boot.py "$@"\n')
    program.chmod(0o755)
    return [str(program), "--lr", "1"]


def _child(method: str, strategy: str = "ddp") -> Callable[[Path], list[str]]:
    return lambda folder: _wrote(folder, CHILD.format(method=method, strategy=strategy))


def _pool(pool: str, call: str, get: str, args: str = "") -> Callable[[Path], list[str]]:
    return lambda folder: _wrote(folder, POOL.format(pool=pool, call=call, get=get, args=args))


IS_CHILD = "multiprocessing has started"
# name -> how the command is made, and what is expected: the number of ranks that train, or words of the error
WAYS: dict[str, tuple[Callable[[Path], list[str]], int | str]] = {
    "script": (lambda folder: _wrote(folder, JOB + MAIN), 2),
    "flags": (lambda folder: ["-O", "-X", "dev", "-W", "ignore", *_wrote(folder, JOB + MAIN + "assert False")], 2),
    "package": (_package, 2),
    "zip": (_zip, 2),
    "frozen": (_frozen, 2),
    "runpy": (
        lambda folder: _wrote(folder, "import runpy\nrunpy.run_module('app', run_name='__main__', alter_sys=True)"), 2,
    ),
    "-c": (lambda folder: ["-c", "from job import work; work()"], "python -c"),
    "stdin": (lambda folder: ["-"], "standard input"),
    "/dev/stdin": (lambda folder: ["/dev/stdin"], "standard input"),
    "spawn": (_child("spawn"), IS_CHILD),
    "fork": (_child("fork"), IS_CHILD),
    "forkserver": (_child("forkserver"), IS_CHILD),
    "spawn, and ddp_spawn": (_child("spawn", "ddp_spawn"), 2),
    "pool": (_pool(SPAWNS, "apply_async", "get"), IS_CHILD),
    "pool, and ddp_spawn": (_pool(SPAWNS, "apply_async", "get", "('ddp_spawn',)"), "got a daemonic one"),
    "executor": (_pool(EXECUTOR, "submit", "result"), IS_CHILD),
    "executor, and ddp_spawn": (_pool(EXECUTOR, "submit", "result", "'ddp_spawn'"), 2),
    "joblib": (lambda folder: _wrote(folder, JOBLIB), IS_CHILD),
    "a group without LOCAL_RANK": (lambda folder: _wrote(folder, GROUP.format(sets_rank=False)), "no LOCAL_RANK"),
    "a group with LOCAL_RANK": (lambda folder: _wrote(folder, GROUP.format(sets_rank=True)), 2),
    "pytest-xdist": (
        lambda folder: ["-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "1", *_wrote(folder, XDIST)], "python -c",
    ),
}  # fmt: skip


def _processes_with(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return [command for command in found if command]  # a zombie has none


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_or_an_error_names_the_remedy(tmp_path: Path, way: str) -> None:
    make, expected = WAYS[way]
    (tmp_path / "job.py").write_text(JOB)
    if way == "runpy":
        _package(tmp_path)
    command = make(tmp_path)
    if way != "frozen":
        command = [sys.executable, *command]
    mark = f"LOOPWRIGHT_TEST_MARK={tmp_path}"
    ranks = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOOPWRIGHT_STORE")
    variables = {name: value for name, value in os.environ.items() if name not in (*ranks, "PYTEST_CURRENT_TEST")}
    variables |= {"LOOPWRIGHT_TEST_MARK": str(tmp_path), "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, input=JOB + MAIN, capture_output=True, text=True, timeout=100, check=False
    )
    said = done.stdout + done.stderr
    if isinstance(expected, int):
        assert done.returncode == 0, said
        assert sorted(line for line in done.stdout.splitlines() if line.startswith("trained")) == [
            f"trained as rank {rank}" for rank in range(expected)
        ]
    else:
        assert done.returncode != 0, said
        assert "LaunchError" in said
        assert expected in said, said
        assert "To fix it" in said
    assert _processes_with(mark) == []
