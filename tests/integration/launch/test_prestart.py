"""A script whose second rank imports torch while the first goes on to the launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
early = "torch" in sys.modules
import torch
import loopwright as lw
from loopwright.fabric.launch import prestart

fabric = lw.Fabric(accelerator="cpu", devices=2, strategy="ddp")
again = lw.Fabric(accelerator="cpu", devices=2, strategy="ddp")
waiting = [rank.process.pid for rank in prestart._waiting.values()]
os.environ.update(argument.split("=") for argument in sys.argv[1:])
fabric.launch()
facts = fabric.all_gather(torch.tensor([os.getpid(), early, torch.get_num_threads()]))
if fabric.global_rank == 0:
    print(json.dumps({"waiting": waiting, "ranks": facts.tolist(), "left": len(prestart._waiting)}))
else:
    assert not waiting
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks start early on Linux only")
@pytest.mark.parametrize("changed", [None, "OMP_NUM_THREADS=2"])
def test_the_second_rank_is_the_one_that_waited_unless_it_would_differ(tmp_path: Path, changed: str | None) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two processes need two cores")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    command = [sys.executable, str(file), *([changed] if changed else [])]
    done = subprocess.run(
        command,
        env={**environment, "LOOPWRIGHT_PRESTART": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["waiting"]) == 1
    assert found["left"] == 0
    pid, was_early, num_threads = found["ranks"][1]
    if changed is None:
        assert (pid, was_early, num_threads) == (found["waiting"][0], 1, 1)
    else:
        assert pid != found["waiting"][0]
        assert (was_early, num_threads) == (0, 2)
