"""`loopwright doctor`: what it judges, what it prints, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli import run
from loopwright.doctor import Finding, Level, disk, examine, machine, network, packages
from loopwright.doctor.imports import find_broken


def test_shared_memory_of_a_container_is_too_small() -> None:
    found = machine.judge_shared_memory(64 << 20, 60 << 20)
    assert found.level is Level.WARNING
    assert found.value.startswith("60.0 MiB free of 64.0 MiB")
    assert "--shm-size" in found.advice
    assert "dead processes" in machine.judge_shared_memory(8 << 30, 1 << 20).advice
    assert machine.judge_shared_memory(8 << 30, 7 << 30).level is Level.OK


def test_a_low_limit_of_open_files_says_who_may_raise_it() -> None:
    assert machine.judge_open_files(-1, -1).level is Level.OK
    assert machine.judge_open_files(1024, 524288).advice.startswith("ulimit -n 65536")
    assert machine.judge_open_files(1024, -1).advice.startswith("ulimit -n 65536")
    assert "administrator" in machine.judge_open_files(1024, 2048).advice


def test_more_threads_than_cores_are_named() -> None:
    assert machine.judge_threads("8", 2).level is Level.WARNING
    assert machine.judge_threads("none", 2).level is Level.WARNING
    assert machine.judge_threads("2", 2).level is Level.OK
    assert "2 threads" in machine.judge_threads(None, 2).value


def test_versions_of_torch() -> None:
    assert packages.judge_torch("2.8.1+cu128").level is Level.PROBLEM
    assert packages.judge_torch("2.9.0").level is Level.OK
    assert packages.judge_torch("2.13.0+cpu").level is Level.OK
    assert packages.judge_torch("2.14.0.dev1").level is Level.NOTE


def test_needed_packages_are_there_in_a_version_that_fits() -> None:
    assert packages.judge_needed("rich>=13").level is Level.OK
    assert packages.judge_needed("rich>=999").advice == "pip install 'rich>=999'"
    assert packages.judge_needed("no-such-package>=1").value == "missing"


@pytest.mark.parametrize(
    ("source", "level", "value"),
    [
        ("value = 1", Level.OK, "1.5, imports"),
        ("raise OSError('no symbol')", Level.PROBLEM, "cannot be imported: OSError: no symbol"),
        ("import os; os._exit(3)", Level.PROBLEM, "its process ended with code 3"),
        ("import time; time.sleep(60)", Level.PROBLEM, "it takes longer than 0.5 s"),
    ],
)
def test_engines_are_imported_in_a_process_of_their_own(
    source: str, level: Level, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_engine.py").write_text(source)
    (tmp_path / "some_engine-1.5.dist-info").mkdir()
    (tmp_path / "some_engine-1.5.dist-info" / "METADATA").write_text("Name: some_engine\nVersion: 1.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = packages.Optional("some_engine", "a strategy", "pip install some_engine", has_engine=True)
    found = packages.judge_optional(engine, timeout_s=0.5 if "sleep" in source else 300)
    assert found.level is level
    assert value in found.value


def test_packages_that_fail_at_import_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in {
        "some_fine": "print('hello')",
        "some_raises": r"raise ImportError('no libx.so\nand advice')",
        "some_ends": "import os; os._exit(3)",
        "some_exits": "raise SystemExit(0)",
        "some_last": "value = 1",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["some_fine", "some_raises", "some_ends", "some_exits", "some_last"]
    assert find_broken(names, timeout_s=30) == {
        "some_raises": "ImportError: no libx.so",
        "some_ends": "its process ended with code 3",
        "some_exits": "SystemExit: 0",
    }
    assert packages.judge_needed("rich>=13", {"rich": "ImportError: no x"}).level is Level.PROBLEM
    wandb = packages.Optional("rich", "much", "pip install rich")
    assert "cannot be imported: OSError" in packages.judge_optional(wandb, 1, {"rich": "OSError: no y"}).value


def test_without_torch_the_rest_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: cannot open')")
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", "doctor", "--json", "--disk-size", "0", "--timeout", "0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    found = json.loads(done.stdout)
    torch_lines = [one for one in found if one["section"] == "devices"]
    assert [one["level"] for one in torch_lines] == ["problem"]
    assert torch_lines[0]["value"] == "cannot be imported: OSError: libtorch.so: cannot open"
    assert "could not be examined" not in done.stdout
    assert {one["section"] for one in found} == {"machine", "devices", "packages", "disk"}


def test_variables_of_a_launcher_that_is_gone() -> None:
    found = list(network.judge_variables({"RANK": "0", "WORLD_SIZE": "2", "LW_API_KEY": "s3", "NCCL_DEBUG": "INFO"}))
    assert found[0].level is Level.WARNING
    assert "RANK=0, WORLD_SIZE=2" in found[0].value
    assert [one.name for one in found[1:]] == ["NCCL_DEBUG"]  # and no secret


def test_the_disk_is_left_as_it_was(tmp_path: Path) -> None:
    found = {one.name: one for one in disk.examine(tmp_path / "a" / "b", 1 << 20)}
    assert found["replacing"].level is Level.OK
    assert "MB/s" in found["writing"].value
    assert "MB/s" in found["reading"].value
    assert not list(tmp_path.iterdir())
    slow = disk.judge_speed("writing", 100 << 20, 10.0)
    assert slow.level is Level.WARNING
    assert slow.value == "10 MB/s (100 MiB)"
    assert disk.judge_room(1 << 30, 100 << 30).level is Level.WARNING


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = list(disk.examine(tmp_path / "file" / "below", 1 << 20))
    assert found[-1].level is Level.PROBLEM


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
    ],
)
def test_the_advice_fits_what_the_disk_says(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *rest: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)
    (found,) = disk.examine(tmp_path / "a" / "b" / "c", 0)
    assert os.strerror(number) in found.value
    assert str(tmp_path / "a" / "b") in found.value
    assert advice in found.advice


def test_a_host_that_cannot_reach_itself_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*rest: Any, **more: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    found = {one.name: one for one in network.examine()}
    assert found["connections"].level is Level.PROBLEM
    assert "Network is unreachable" in found["connections"].value


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(machine, "usable_cores", fails)
    monkeypatch.setattr(packages, "_OPTIONAL", ())
    found = list(examine(tmp_path, disk_bytes=0))
    assert (
        Finding(
            "machine",
            "this part",
            "could not be examined: RuntimeError: no such file",
            Level.WARNING,
            "please report this in Loopwright's issue tracker",
        )
        in found
    )
    assert {one.section for one in found} == {"machine", "devices", "packages", "compilers", "processes", "disk"}


def test_the_command_prints_findings_and_tells_problems_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_OPTIONAL", (packages.Optional("no_such_package", "much", "pip install it"),))
    assert run(["doctor", "--folder", str(tmp_path), "--disk-size", "1"]) == 0
    said = capsys.readouterr().out
    assert "- no_such_package          missing (much)\n" in said
    assert "-> pip install it\n" in said
    assert said.endswith("no problems, no warnings\n") or "warning" in said.splitlines()[-1]
    (tmp_path / "file").write_text("")
    assert run(["doctor", "--folder", str(tmp_path / "file" / "x"), "--disk-size", "0", "--json"]) == 1
    entries = json.loads(capsys.readouterr().out)
    assert entries[-1]["level"] == "problem"
    assert 'accelerator="cpu"' in [entry["name"] for entry in entries]
    with pytest.raises(SystemExit):
        run(["doctor", "--disk-size", "nan"])
    assert "expected a number of at least 0" in capsys.readouterr().err


def test_each_extra_of_the_readme_is_named() -> None:
    root = Path(packages.__file__).resolve().parent.parent
    extras = set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    paragraph = (root / "README.md").read_text().partition("Extras, as in")[2].partition("\n\n")[0]
    assert extras <= set(re.findall(r"`(\w+)`", paragraph))
    named = {name for one in packages._OPTIONAL for name in re.findall(r"loopwright\[(\w+)\]", one.install)}
    assert named == extras - {"all", "dev", "examples"}  # these are for this repository


def test_a_module_that_another_package_brings_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: object() if name == "mlflow" else None)
    monkeypatch.setattr(packages.metadata, "packages_distributions", lambda: {"mlflow": ["pytest"]})

    def version(name: str) -> str:
        if name in ("mlflow", "wandb"):
            raise packages.metadata.PackageNotFoundError
        return "2.0"

    monkeypatch.setattr(packages.metadata, "version", version)
    assert packages._version("mlflow") == "2.0 (pytest)"
    assert packages._version("wandb") is None
