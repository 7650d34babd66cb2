"""The file into which a rank's Python stack goes when a fatal signal ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loopwright.fabric.watch.crash_file import describe_crash, read_crash

TEXT = """Fatal Python error: Aborted

Thread 0x00000000000000ff (most recent call first):
  File "threading.py", line 320 in wait

Current thread 0x00000000000000bb (most recent call first):
  <no Python frame>

Thread 0x00000000000000aa (most recent call first):
  File "inner.py", line 2 in exchange
  File "outer.py", line 1 in <module>
"""


def test_the_stack_of_the_thread_that_trains_is_shown_outermost_first() -> None:
    how, stack = describe_crash(TEXT, 0xAA)
    assert how == "Fatal Python error: Aborted"
    outer, inner = stack.index("outer.py"), stack.index("inner.py")
    assert outer < inner
    assert "threading.py" not in stack


def test_without_a_stack_that_matters_everything_is_shown() -> None:
    assert describe_crash(TEXT, 0)[1].count("Thread") == 2


def test_a_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "crash"
    file.write_text(TEXT)
    assert read_crash(str(file), 0xAA)[0] == "Fatal Python error: Aborted"
    assert not file.exists()
    assert read_crash(str(file), 0xAA) == ("", "")
    assert read_crash("", 0) == ("", "")


def say(code: str, folder: Path) -> str:
    program = f"import faulthandler, os\nfrom loopwright.fabric.watch.crash_file import open_crash_file\n{code}"
    variables = {"TMPDIR": str(folder), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60, env=variables)
    return done.stdout.decode().strip()


def test_a_faulthandler_of_the_program_is_left_alone(tmp_path: Path) -> None:
    code = "faulthandler.enable()\nprint(repr(open_crash_file()), os.listdir(os.environ['TMPDIR']))"
    assert say(code, tmp_path) == "'' []"


def test_a_file_ends_with_its_process_and_files_of_killed_ones_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / "loopwright-crash-999999999-x"
    stale.touch()
    kept = tmp_path / "loopwright-crash-999999998-x"
    kept.write_text("Fatal Python error")
    code = "path = open_crash_file()\nprint(os.path.exists(path), path == open_crash_file(), faulthandler.is_enabled())"
    assert say(code, tmp_path) == "True True True"
    assert list(tmp_path.iterdir()) == [kept]
