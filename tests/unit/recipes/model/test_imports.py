"""Optional packages: imported without the kernel that bitsandbytes would download."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import importlib.util, sys
from loopwright.precision.quantized import import_bitsandbytes
FIRST
import bitsandbytes
print(bitsandbytes.found, importlib.util.find_spec("kernels") is not None)
import kernels
import_bitsandbytes()
assert sys.modules["kernels"] is kernels
"""
FIRST = ["import_bitsandbytes()", "import loopwright as lw; lw.optim.optimizer_class('adamw8bit')"]
BITSANDBYTES = """
import logging, sys, types, torch
optim = sys.modules["bitsandbytes.optim"] = types.ModuleType("bitsandbytes.optim")
optim.AdamW8bit = type("AdamW8bit", (torch.optim.Optimizer,), {})
try:
    from kernels import get_kernel
    found = get_kernel("some/kernel")
except ImportError:
    found = "nothing"
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load")
"""


@pytest.mark.parametrize("first", FIRST)
def test_bitsandbytes_does_not_fetch_its_kernel(tmp_path: Path, first: str) -> None:
    (tmp_path / "bitsandbytes.py").write_text(BITSANDBYTES)
    (tmp_path / "kernels.py").write_text("def get_kernel(name):\n    return 'a download'\n")
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM.replace('FIRST', first)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "nothing True"), done.stderr
    assert "Failed" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="its warnings are shown where there is a GPU")
@pytest.mark.parametrize("name", ["float8", "mx_linear"])
def test_torchao_is_imported_without_warnings_on_a_cpu(name: str) -> None:
    program = f"""
import logging, sys
import loopwright.precision.float8
logging.getLogger("torchao").setLevel(logging.INFO)
import loopwright.precision.{name}
loopwright.precision.float8.quiet_torchao()
assert "torchao" in sys.modules
assert logging.getLogger("torchao").level == logging.INFO
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
