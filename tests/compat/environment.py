"""Fills the environment of `make test-compat`: `python environment.py`, with the environment's own python.

Lightning itself and libraries that are built on it, beside the torch that the tests run with: about a gigabyte. What
cannot be installed ends it with pip's reason.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_MENDED = """

# Added by tests/compat/environment.py: the operators of this build are for torch with CUDA.
if not _has_ops():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit("the environment for comparisons with Lightning could not be built: " + " ".join(command))


def mend_torchvision() -> None:
    """Let torchvision import beside a torch without CUDA: two operators are missing, which no program calls."""
    if not subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        return
    path = Path(sysconfig.get_paths()["purelib"]) / "torchvision" / "extension.py"
    path.write_text(path.read_text() + _MENDED)
    subprocess.run([sys.executable, "-c", "import torchvision"], check=True)


if __name__ == "__main__":
    install(
        "-c", str(ROOT / "constraints.txt"), "-r", str(Path(__file__).with_name("requirements.txt")), "-e", str(ROOT)
    )
    mend_torchvision()
