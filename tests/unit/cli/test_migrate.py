"""`loopwright migrate check`: programs are read, not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.cli import run
from loopwright.cli.commands import migrate
from loopwright.compat.lightning.check.program import ProgramCheck

_PROGRAM = """
import lightning as L
import lightning.pytorch.nowhere
from lightning.pytorch.callbacks import EarlyStopping, Nothing
from lightning.pytorch.plugins import BitsandbytesPrecision
from lightning.pytorch.loggers import CSVLogger

raise SystemExit("this program must not run")

class Net(L.LightningModule):
    def training_step(self, batch, batch_idx):
        self.trainer.global_step
        self.trainer.warp_drive
        self.trainer.estimated_stepping_batches

trainer = L.Trainer(max_epochs=3, hyperspace=True, callbacks=[EarlyStopping(monitor="x", impatience=3)])
trainer.fit(Net())
trainer.warp()
L.Warp
"""


def check(tmp_path: Path, text: str) -> int:
    (tmp_path / "train.py").write_text(text)
    return run(["migrate", "check", str(tmp_path)])


def test_what_is_not_supported_is_listed_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, _PROGRAM) == 1
    lines = [line.removeprefix(f"{tmp_path}/") for line in capsys.readouterr().out.splitlines()]
    assert [line.split(": ")[:2] for line in lines] == [
        ["train.py:3", "lightning.pytorch.nowhere"],
        ["train.py:4", "lightning.pytorch.callbacks.Nothing"],
        ["train.py:5", "lightning.pytorch.plugins.BitsandbytesPrecision"],
        ["train.py:13", "self.trainer.warp_drive"],
        ["train.py:16", "EarlyStopping(impatience=...)"],
        ["train.py:16", "L.Trainer(hyperspace=...)"],
        ["train.py:18", "trainer.warp"],
        ["train.py:19", "L.Warp"],
    ]


def test_programs_are_read_without_jsonargparse(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import lightning as L\n\nclass Net(L.LightningModule):\n    pass\n")
    code = "import sys; sys.modules['jsonargparse'] = None; from loopwright.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "migrate", "check", "--static", "."]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    module = "lightning.pytorch.cli"
    (tmp_path / "net.py").write_text(f"import {module}\nfrom {module} import LightningCLI\n{module}.LightningCLI()\n")
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    why = "lightning.pytorch.cli.LightningCLI: the package 'jsonargparse' is not installed here: pip install "
    assert [line.partition("'loop")[0] for line in found.stdout.splitlines()] == [
        f"net.py:2: {why}",
        f"net.py:3: {why}",
    ]
    assert (found.returncode, found.stderr) == (1, "")


def test_a_supported_program_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = Path(__file__).parents[2] / "fixtures" / "lightning_programs"
    assert run(["migrate", "check", str(programs)]) == 0
    assert "are supported" in capsys.readouterr().out


def test_a_file_that_is_not_python_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "def (") == 2
    assert "train.py" in capsys.readouterr().err


def test_without_a_path_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate"]) == 2
    assert "migrate check" in capsys.readouterr().err


_OVERRIDES = """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

class Mine(DDPStrategy):
    def connect(self, model):
        pass
    def barrier(self, name=None):
        pass

class Deeper(Mine):
    def post_backward(self, *args):
        pass

class Half(MixedPrecision):
    def main_params(self, *args):
        pass

class Saving(ModelCheckpoint):
    def _save_topk_checkpoint(self, trainer, metrics):
        pass
    def on_fit_start(self, trainer, module):
        pass

class Loop(_FitLoop):
    def __init__(self):
        pass
    def anything(self):
        pass

class Own(L.Trainer):
    def _run_stage(self):
        pass
    def fit(self, *args):
        pass
"""


def test_overridden_methods_that_are_never_called_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, _OVERRIDES) == 1
    lines = [line.removeprefix(f"{tmp_path}/") for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "train.py:9: Mine.connect: overrides Strategy's, never called here",
        "train.py:15: Deeper.post_backward: overrides Strategy's, never called here",
        "train.py:19: Half.main_params: overrides Precision's, never called here",
        "train.py:23: Saving._save_topk_checkpoint: overrides ModelCheckpoint's, never called here",
        "train.py:31: Loop.anything: overrides _FitLoop's, never called here",
        "train.py:35: Own._run_stage: overrides Trainer's, never called here",
    ]


# --- the program itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "has_lightning", lambda python: False)


@pytest.mark.usefixtures("no_lightning")
def test_without_lightning_a_program_and_its_imports_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "net.py").write_text("from lightning.pytorch.callbacks import Nothing\n")
    (tmp_path / "train.py").write_text("from parts import net\nimport os\n")
    (tmp_path / "other.py").write_text("from lightning.pytorch.callbacks import Unread\n")
    assert run(["migrate", "check", str(tmp_path / "train.py"), "--epochs", "3"]) == 1
    out = capsys.readouterr().out
    assert "net.py:1" in out
    assert "Unread" not in out
    assert "only read, not run: Lightning is not installed here" in out


@pytest.mark.usefixtures("no_lightning")
def test_an_interpreter_without_lightning_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import lightning\n")
    assert run(["migrate", "check", "--lightning-python", "/some/python", str(tmp_path / "train.py")]) == 2
    assert "/some/python has no Lightning" in capsys.readouterr().err


def test_arguments_of_the_program_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import lightning\n")
    checks: list[ProgramCheck] = []
    monkeypatch.setattr(migrate, "has_lightning", lambda python: True)
    monkeypatch.setattr(ProgramCheck, "run", lambda self: checks.append(self) or 0)
    program = str(tmp_path / "train.py")
    options = ["--steps", "2", "--lightning-python", "theirs", "--without-parity"]
    assert run(["migrate", "check", *options, program, "--steps", "100"]) == 0
    assert checks[0].command == [program, "--steps", "100"]
    assert (checks[0].steps, checks[0].lightning_python, checks[0].without_parity) == (2, "theirs", True)


@pytest.mark.parametrize(
    "arguments", [["--steps", "0", "x.py"], ["--step", "x.py"], ["absent.py"], ["--static"], ["--timeout"]]
)
def test_wrong_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", "check", *arguments]) == 2
    assert "migrate check:" in capsys.readouterr().err
