"""`loopwright run-accelerate` and `install()`: names, refusals, and what the command passes on.

tests/compat_accelerate compares whole programs with Accelerate itself.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import loopwright as lw
from loopwright.cli.commands.run_accelerate import run_accelerate
from loopwright.compat.accelerate import child_environment, install, is_installed, uninstall
from loopwright.compat.accelerate.names import HOMES, REFUSED

COMMAND = [sys.executable, "-m", "loopwright", "run-accelerate"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # peft imports Accelerate itself, where it is installed: it gets its modules back.
    for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    install(children=False)
    yield
    uninstall()


def test_every_name_has_a_home_and_no_name_is_both(installed: None) -> None:
    accelerate = importlib.import_module("accelerate")
    assert is_installed()
    assert not HOMES.keys() & REFUSED.keys()
    for name in HOMES:
        assert getattr(accelerate, name) is not None, name


def test_refused_names_are_imported_and_say_what_to_use_instead(installed: None) -> None:
    accelerate = importlib.import_module("accelerate")
    for name, instead in REFUSED.items():
        with pytest.raises(lw.ConfigError, match=name) as error:
            getattr(accelerate, name)()
        assert instead in str(error.value)


@pytest.mark.parametrize(
    "argument", ["fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config", "dynamo_plugin"]
)
def test_refused_arguments_name_themselves(argument: str, installed: None) -> None:
    accelerate = importlib.import_module("accelerate")
    with pytest.raises(lw.ConfigError, match=argument):
        accelerate.Accelerator(**{argument: object()})


@pytest.mark.parametrize(
    ("variable", "value"), [("ACCELERATE_USE_FSDP", "true"), ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")]
)
def test_refused_variables_name_themselves(
    variable: str, value: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(lw.ConfigError, match=f"{variable}={value}"):
        importlib.import_module("accelerate").Accelerator()


def test_an_unknown_name_suggests_one(installed: None) -> None:
    with pytest.raises(ImportError, match="Acelerator"):
        exec("from accelerate import Acelerator")


def test_libraries_find_the_names_that_they_import(installed: None) -> None:
    # transformers and peft import these, and call the last two while they are imported.
    code = """
from accelerate import PartialState, dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.big_modeling import check_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import get_balanced_memory, is_peft_model, named_module_tensors, tqdm
from accelerate.utils.dataclasses import get_module_class_from_name
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from accelerate.utils.imports import is_bf16_available, is_xpu_available
"""
    names: dict[str, object] = {}
    exec(code, names)
    utils = importlib.import_module("accelerate.utils")
    assert list(utils.tqdm(range(2), disable=True)) == [0, 1]
    assert utils.is_bf16_available()
    assert utils.is_cuda_available() is torch.cuda.is_available()
    assert utils.is_xpu_available() is torch.xpu.is_available()
    assert not utils.is_peft_model(torch.nn.Linear(1, 1))
    with pytest.raises(lw.ConfigError, match="check_device_map"):
        names["check_device_map"]()  # type: ignore[operator]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_model_stays_the_programs_object_where_nothing_is_added(
    precision: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LT_PRECISION", precision)
    accelerate = importlib.import_module("accelerate")
    model = torch.nn.Linear(2, 1)
    try:
        prepared = accelerate.Accelerator(cpu=True).prepare(model)
    finally:
        accelerate.PartialState._reset_state()
    assert (prepared is model) == (precision == "32-true")
    assert prepared(torch.ones(1, 2)).dtype is torch.get_default_dtype()
    assert model.weight.dtype is (torch.float32 if precision == "32-true" else torch.bfloat16)


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment, text=True, capture_output=True, timeout=120, check=False
    )


PROGRAM = """
import os, subprocess, sys
import accelerate
print(accelerate.__spec__.origin, sys.argv[1:], os.environ.get("ACCELERATE_MIXED_PRECISION"), flush=True)
print(os.environ.get("ACCELERATE_USE_CPU"), os.environ.get("WORLD_SIZE"), flush=True)
subprocess.run([sys.executable, "-c", "import accelerate; print(accelerate.__spec__.origin)"], check=True)
"""
ORIGIN = "loopwright.compat.accelerate"


def test_the_command_runs_a_program_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run("--cpu", "--mixed-precision", "bf16", "train.py", "--cpu", "--lr=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{ORIGIN} ['--cpu', '--lr=1'] bf16", "true None", ORIGIN]
    module = run("-m", "train", "-x", folder=tmp_path)
    assert module.stdout.splitlines() == [f"{ORIGIN} ['-x'] None", "None None", ORIGIN], module.stderr


def test_a_failing_program_gives_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    assert run("train.py", folder=tmp_path).returncode == 7


def test_the_command_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for arguments, message in (
        ([], "Expected a program"),
        (["--cpu"], "Expected a program"),
        (["missing.py"], "'missing.py', which does not exist"),
        (["--num-processes", "0", "train.py"], "at least one process"),
    ):
        assert run_accelerate(arguments) == 2
        assert message in capsys.readouterr().err
    for arguments, message in (
        (["--mixed-precision", "fp8", "train.py"], "fp8"),
        (["--processes", "2", "train.py"], "--processes"),
    ):
        with pytest.raises(SystemExit):
            run_accelerate(arguments)
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_accelerate(["--num-processes", "2", "train.py"]) == 2
    assert "WORLD_SIZE" in capsys.readouterr().err


def test_the_command_imports_no_torch() -> None:
    code = "import sys, loopwright.cli.commands.run_accelerate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_option_has_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_accelerate(["--help"])
    shown = capsys.readouterr().out
    for option in ("--num-processes", "--cpu", "--mixed-precision", "--config", "--module"):
        assert option in shown
    assert "docs/from-accelerate.md" in shown


def test_variables_of_both_layers_share_one_folder() -> None:
    from loopwright.compat import lightning

    first = child_environment("/mine")["PYTHONPATH"]
    assert lightning.child_environment(first)["PYTHONPATH"] == first
