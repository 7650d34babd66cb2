"""`loopwright run-lightning`, and whole programs for Lightning, which print the numbers that Lightning prints.

tests/compat/test_against_lightning.py says how the expected numbers were made.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopwright.compat.lightning import child_environment, install, uninstall

PROGRAMS = Path(__file__).parents[2] / "fixtures" / "lightning_programs"
EXPECTED = json.loads((PROGRAMS / "expected.json").read_text())
COMMAND = [sys.executable, "-m", "loopwright", "run-lightning"]


def same(numbers: dict[str, Any], expected: dict[str, Any]) -> bool:
    return numbers.keys() == expected.keys() and all(
        numbers[name] == (pytest.approx(value, abs=2e-5) if isinstance(value, float) else value)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("program", ["contract", "evaluate", "fabric_loop", "gan"])
def test_a_program_prints_the_numbers_of_lightning(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # the program's seed ends with the test
    install(children=False)
    try:
        runpy.run_path(str(PROGRAMS / f"{program}.py"))["main"](str(tmp_path))
    finally:
        uninstall()
    numbers = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert same(numbers, EXPECTED[program]), numbers


@pytest.mark.slow
def test_a_program_with_two_processes_prints_the_numbers_of_lightning(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    command = [*COMMAND, "-W", "error", str(PROGRAMS / "callbacks.py"), str(tmp_path)]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    numbers = json.loads(found.stdout.strip().splitlines()[-1])
    assert same(numbers, EXPECTED["callbacks"]), numbers


def test_children_install_and_run_the_users_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 'ran'\n")
    (tmp_path / "program.py").write_text(
        "import multiprocessing, subprocess, sys\n"
        "code = 'import lightning; print(lightning.__version__, mine, lightning.__spec__.origin)'\n"
        "def child():\n"
        "    exec(code)\n"
        "if __name__ == '__main__':\n"
        "    exec(code, {})\n"
        "    sys.stdout.flush()\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start(); process.join()\n"
        "    print(sys.argv[1:], process.exitcode)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [*COMMAND, str(tmp_path / "program.py"), "--lr", "1"],
        env=environment, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    line = "2.6.6 ran loopwright.compat.lightning"
    assert found.stdout.splitlines() == [line, line, line, "['--lr', '1'] 0"], found.stderr


def test_usage_and_options_that_cannot_work() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *arguments], text=True, capture_output=True, timeout=60, check=False)

    usage = run()
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "run-lightning" in usage.stderr
    refused = run("-I", "train.py")
    assert refused.returncode == 2
    assert "-I" in refused.stderr


def test_an_interpreter_without_loopwright_starts_as_ever(tmp_path: Path) -> None:
    environment = {**os.environ, **child_environment(str(tmp_path))}
    found = subprocess.run(
        [sys.executable, "-c", "import sys; assert sys.path[2] == sys.argv[1], sys.path; print('ok')", str(tmp_path)],
        env={**environment, "PYTHONNOUSERSITE": "1"}, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.stdout == "ok\n", found.stderr
