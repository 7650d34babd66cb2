"""What builds operators in the tests of builds: as torch does, with a file `lock`; all but one without a compiler."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


class Operator:
    """Takes the lock, runs a command, and writes the library."""

    name = "operator"
    command = "true"

    def load(self, verbose: bool = True) -> None:
        """Build it."""
        place = Path(os.environ["TORCH_EXTENSIONS_DIR"], self.name)
        with (place / "tries").open("a") as tries:
            tries.write(f"{os.getpid()}\n")
        taken = os.open(place / "lock", os.O_CREAT | os.O_EXCL)
        done = subprocess.run(["sh", "-c", self.command], check=False)
        os.close(taken)
        (place / "lock").unlink()
        if done.returncode:
            raise RuntimeError(f"Error building extension {self.name!r}")
        (place / f"{self.name}.so").write_text("")


class Quick(Operator):
    """Takes long enough for others to come meanwhile."""

    name = "quick"
    command = "sleep 0.5"


class Waiting(Operator):
    """Waits for another build, as torch does."""

    def load(self, verbose: bool = True) -> None:
        """Wait for the lock."""
        while Path(os.environ["TORCH_EXTENSIONS_DIR"], "waiting", "lock").exists():
            time.sleep(0.1)


class Endless(Operator):
    """Never ends by itself, and neither does the compiler that it has started."""

    name = "endless"
    command = "sleep 1000 & echo $! > $TORCH_EXTENSIONS_DIR/compiler; wait"


class Wrong(Operator):
    """Does not compile."""

    name = "wrong"
    command = "echo 'wrong.cpp:3: fatal error: no_such_header.h: No such file or directory' >&2; exit 1"


SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled", nullptr, -1, nullptr};
extern "C" PyObject* PyInit_compiled() { return PyModule_Create(&module); }
"""


class Compiled:
    """Is built by torch, with ninja and a compiler."""

    def load(self, verbose: bool = True) -> None:
        """Build it."""
        from torch.utils import cpp_extension

        source = Path(os.environ["TORCH_EXTENSIONS_DIR"], "compiled.cpp")
        source.write_text(SOURCE)
        cpp_extension.load(name="compiled", sources=[str(source)], verbose=verbose)
