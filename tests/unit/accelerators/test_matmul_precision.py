from __future__ import annotations

import subprocess
import sys


def test_it_is_read_and_set_without_a_warning_of_any_torch() -> None:
    # In a fresh process: torch 2.9 warns once.
    program = (
        "from loopwright.accelerators.matmul_precision import get_matmul_precision, set_matmul_precision\n"
        "set_matmul_precision('high')\n"
        "assert get_matmul_precision() == 'high'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
