from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from loopwright.errors import ConfigError, LaunchError
from loopwright.fabric import InProcessLauncher, Launcher, LightningEnvironment, TorchElasticEnvironment
from loopwright.fabric import launch as package
from loopwright.fabric.launch import ExternalLauncher, ProcessLauncher, ScriptLauncher
from loopwright.fabric.launch.command import own_command
from loopwright.fabric.launch.parent_watchdog import VARIABLE, ParentWatchdog, watch_parent
from loopwright.fabric.launch.processes import _CONSEQUENCE, _first_failure, _Plan
from loopwright.fabric.launch.script import num_threads_per_process


def test_the_function_runs_here() -> None:
    launcher: Launcher = InProcessLauncher()
    assert launcher.is_interactive_compatible
    assert launcher.launch(lambda a, b: a + b, 1, b=2) == 3


@pytest.mark.parametrize("name", ["ExternalLauncher", "InProcessLauncher", "ProcessLauncher", "ScriptLauncher"])
def test_every_launcher_has_the_same_face(name: str) -> None:
    cluster = LightningEnvironment(variables={})
    arguments: dict[str, Any] = {
        "ExternalLauncher": (cluster, 2),
        "InProcessLauncher": (),
        "ProcessLauncher": ("fork", cluster, 2),
        "ScriptLauncher": (cluster, 2),
    }
    launcher = getattr(package, name)(*arguments[name])
    assert launcher.starts_processes is (name == "ProcessLauncher")
    assert launcher.is_interactive_compatible is (name != "ScriptLauncher")
    assert launcher.local_exits() == {}
    launcher.kill(15)


def test_an_unknown_launcher_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PopenLauncher'"):
        _ = package.PopenLauncher


def test_processes_that_exist_are_compared_with_what_is_asked_for() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    cluster = TorchElasticEnvironment(variables=variables)
    assert ExternalLauncher(cluster, 2).launch(lambda value: value, 7) == 7
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        ExternalLauncher(cluster, 4).launch(print)


@pytest.mark.parametrize(("told", "count"), [("3", 3), ("", None), ("x", None), ("0", None)])
def test_threads_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch, told: str, count: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert num_threads_per_process(3) == (count or 2)
    assert num_threads_per_process(100) == (count or 1)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Pretend that a command was typed: `typed("-m", "package.train", "--lr", "1", module="package.train")`."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("folder").mkdir()
    monkeypatch.delitem(sys.modules, "hydra.core.hydra_config", raising=False)
    monkeypatch.setattr("subprocess._args_from_interpreter_flags", lambda: ["-O"])

    def pretend(*command: str, argv: list[str], file: str | None = None, module: str | None = None) -> None:
        main = ModuleType("__main__")
        main.__spec__ = None if module is None else SimpleNamespace(name=module)  # type: ignore[assignment]
        if file is not None:
            main.__file__ = str(Path(file).absolute()) if not file.startswith("<") else file
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "orig_argv", ["python", *command])

    return pretend


def command() -> list[str]:
    found, folder = own_command(1)
    assert found[:2] == [sys.executable, "-O"]
    assert folder is None
    return found[2:]


def test_a_script(typed: Any, tmp_path: Path) -> None:
    typed("-O", "train.py", "--lr", "a b", argv=["train.py", "--lr", "a b"], file="train.py")
    assert command() == [str(tmp_path / "train.py"), "--lr", "a b"]


def test_arguments_that_the_program_took_out_are_there_again(typed: Any, tmp_path: Path) -> None:
    typed("train.py", "fit", "--lr", "1", argv=["train.py", "1"], file="train.py")
    assert command() == [str(tmp_path / "train.py"), "fit", "--lr", "1"]


def test_a_script_under_a_debugger_runs_without_it(typed: Any, tmp_path: Path) -> None:
    typed("-m", "pdb", "-c", "continue", "train.py", "--lr", "1", argv=["train.py", "--lr", "1"], file="train.py")
    assert command() == [str(tmp_path / "train.py"), "--lr", "1"]


def test_a_wrapper_that_rewrites_the_arguments(typed: Any, tmp_path: Path) -> None:
    typed("-m", "wrapper", "job7", argv=[str(tmp_path / "train.py"), "--lr", "1"], file="train.py")
    assert command() == [str(tmp_path / "train.py"), "--lr", "1"]


def test_a_module(typed: Any) -> None:
    typed("-m", "package.train", "x=1", argv=["/any/package/train.py", "x=1"], module="package.train")
    assert command() == ["-m", "package.train", "x=1"]


def test_a_package(typed: Any) -> None:
    typed("-m", "package", "fit", argv=["/any/package/__main__.py", "fit"], module="package.__main__")
    assert command() == ["-m", "package", "fit"]


def test_a_folder(typed: Any, tmp_path: Path) -> None:
    typed("folder", "fit", argv=["folder", "fit"], module="__main__")
    assert command() == [str(tmp_path / "folder"), "fit"]


@pytest.mark.parametrize("file", [None, "<stdin>", "gone.py"])
def test_what_cannot_run_again_is_an_error(typed: Any, file: str | None) -> None:
    typed("-c", "...", argv=["-c"], file=file)
    with pytest.raises(LaunchError, match="Expected a script or module"):
        own_command(1)


def hydra(monkeypatch: pytest.MonkeyPatch, mode: str, task: list[str]) -> None:
    config = SimpleNamespace(
        mode=f"RunMode.{mode}",
        runtime=SimpleNamespace(cwd="/start", output_dir="/out/it's here"),
        overrides=SimpleNamespace(task=task),
        job=SimpleNamespace(name="train"),
    )
    module = ModuleType("hydra.core.hydra_config")
    module.HydraConfig = SimpleNamespace(initialized=lambda: True, get=lambda: config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", module)


OURS = ["hydra.run.dir='/out/it\\'s here'", "hydra.job.name=train_rank2", "hydra.output_subdir=null"]


def test_below_hydra_the_output_folder_is_the_first_ranks(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(
        "train.py", "lr=1", "--config-name", "big", argv=["train.py", "lr=1", "--config-name", "big"], file="train.py"
    )
    hydra(monkeypatch, "RUN", ["lr=1"])
    found, folder = own_command(2)
    assert found[3:] == ["lr=1", "--config-name", "big", *OURS]
    assert folder == "/start"


def test_below_a_sweep_of_hydra_each_job_keeps_its_values(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["-m", "lr=1,2", "hydra.sweep.dir=x", "~data", "--config-name=big"]
    typed("train.py", *arguments, argv=["train.py", *arguments], file="train.py")
    hydra(monkeypatch, "MULTIRUN", ["lr=2", "~data"])
    assert own_command(2)[0][3:] == ["--config-name=big", "lr=2", "~data", *OURS, "hydra.mode=RUN"]


# -- the parent watchdog ---------------------------------------------------------------------------------------------


def test_a_parent_watchdog_is_held_once_and_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ParentWatchdog()
    monkeypatch.setenv(VARIABLE, f"{os.getppid()}:{line._read}:0")
    watch_parent()
    assert VARIABLE not in os.environ
    assert not os.get_inheritable(line._read)
    watch_parent()  # nothing is left to do
    # The thread reads from it until this process ends: both ends stay open.


# -- whose failure it was --------------------------------------------------------------------------------------------


def said(rank: int, how: str, when: float = 0.0) -> str:
    from loopwright.fabric.failure import Failure

    return Failure(rank, "host", 1, how, when=when).to_json()


def test_the_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    from loopwright.fabric.failure import Failure

    plan = _Plan(str(tmp_path), "127.0.0.1", 0, node_rank=0, num_processes=3, num_nodes=1, num_threads=1, settings=None)
    reset = "RuntimeError: [/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1234"
    assert _CONSEQUENCE.search(reset)
    plan.file(0, "failure").write_text(said(0, reset, when=1.0))
    death = Failure(2, "host", 1, "the process was killed by SIGKILL", when=2.0)
    assert _first_failure(plan, None, []).rank == 0
    assert _first_failure(plan, None, [death]).rank == 2
    plan.file(1, "failure").write_text(said(1, "ValueError: mine", when=3.0))
    assert _first_failure(plan, None, [death]).rank == 1


def test_a_script_launcher_of_a_fork_is_none_of_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ScriptLauncher(LightningEnvironment(variables={}), 2)
    launcher._pid = -1
    launcher._finish()  # does nothing: the parent waits for its children, not this process
    assert not launcher._is_closing.is_set()


def test_a_process_launcher_travels_without_its_processes() -> None:
    import pickle

    launcher = ProcessLauncher("spawn", LightningEnvironment(), 2)
    launcher._processes = {0: object()}  # type: ignore[dict-item]
    assert pickle.loads(pickle.dumps(launcher))._processes == {}
