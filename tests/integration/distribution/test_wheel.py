"""What `python -m build` makes: nothing lost, nothing too much, and types that a checker finds in the wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME = f"loopwright-{PROJECT['project']['version']}"

pytestmark = pytest.mark.slow

PROGRAM = """
from typing import Any

import torch
from torch import Tensor
from typing_extensions import reveal_type

import loopwright as lw
from loopwright.callbacks import EarlyStopping
from loopwright.schedules import cosine


class Regression(lw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


trainer = lw.Trainer(max_epochs=5, strategy="fsdp", callbacks=[EarlyStopping("loss")])
reveal_type(trainer)
reveal_type(trainer.global_step)
reveal_type(trainer.callback_metrics)
reveal_type(trainer.validate(Regression()))
reveal_type(Regression.load_from_checkpoint("last.ckpt"))
reveal_type(cosine)
lw.Trainer(max_epoch=3)
"""
REVEALED = {
    "trainer": "Trainer",
    "trainer.global_step": "int",
    "trainer.callback_metrics": "dict[str, Tensor]",
    "trainer.validate(Regression())": "list[Mapping[str, float]]",
    'Regression.load_from_checkpoint("last.ckpt")': "Regression",
}


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command whose interpreter knows nothing of this clone."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder with the wheel and the sdist that it was made from, and what the build printed."""
    source, folder = tmp_path_factory.mktemp("source") / "loopwright", tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(built: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel and with the libraries of this one, but not its editable install."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    python = environment / "bin" / "python"
    wheel = built[0] / f"{NAME}-py3-none-any.whl"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "-q", "--python", python]
    done = run([*pip, "install", "--no-deps", "--no-index", wheel], environment)
    assert done.returncode == 0, done.stderr
    packages = next(environment.glob("lib/*/site-packages"))
    (packages / "libraries.pth").write_text(str(Path(pytest.__file__).parents[1]))
    (environment / "program.py").write_text(PROGRAM)
    return environment


def test_the_build_says_nothing_that_a_maintainer_has_to_mend(built: tuple[Path, str]) -> None:
    printed = built[1]
    assert "Successfully built" in printed
    for word in ("absent from the `packages`", "Deprecat", "no files found", "warning: manifest"):
        assert word not in printed


def test_a_wheel_made_from_the_sdist_has_every_file_of_the_package(built: tuple[Path, str]) -> None:
    wheel = set(zipfile.ZipFile(built[0] / f"{NAME}-py3-none-any.whl").namelist())
    expected = set()
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        folder = Path(*package.split(".")[1:])
        expected |= {f"loopwright/{file.relative_to(ROOT)}" for file in (ROOT / folder).glob("*.py")}
    expected |= {f"loopwright/{file.relative_to(ROOT)}" for file in ROOT.glob("recipes/model/configs/*.json")}
    others = ("py.typed", "report/page.css", "report/page.js", "compat/accelerate/names.toml")
    expected |= {f"loopwright/{name}" for name in others}
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    assert f"{NAME}.dist-info/licenses/LICENSE" in wheel


def test_the_sdist_has_what_a_packager_reads_and_no_tests(built: tuple[Path, str]) -> None:
    with tarfile.open(built[0] / f"{NAME}.tar.gz") as archive:
        names = set(archive.getnames())
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml"):
        assert f"{NAME}/{name}" in names
    assert not any(name.split("/")[1:2] in (["tests"], ["docs"], ["benchmarks"]) for name in names)


def test_the_installed_wheel_runs(installed: Path) -> None:
    done = run([installed / "bin" / "python", "-m", "loopwright", "--version"], installed)
    assert (done.returncode, done.stdout.split()) == (0, ["loopwright", PROJECT["project"]["version"]]), done.stderr
    where = run([installed / "bin" / "python", "-c", "import loopwright; print(loopwright.__file__)"], installed)
    assert Path(where.stdout.strip()).is_relative_to(installed)


@pytest.mark.timeout(1200)  # a minute of work without a cache: it reads all of torch
def test_mypy_finds_the_types_in_the_wheel(installed: Path) -> None:
    python = installed / "bin" / "python"
    mypy: list[str | Path] = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "program.py"]
    lines = run(mypy, installed).stdout.splitlines()
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in lines if "Revealed type" in line]
    assert revealed[:5] == [
        "loopwright.trainer.trainer.Trainer", "int", "dict[str, torch._tensor.Tensor]",
        "list[typing.Mapping[str, float]]", "program.Regression",
    ]  # fmt: skip
    assert "Any" not in revealed[5]
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == 1, errors
    assert 'Unexpected keyword argument "max_epoch"' in errors[0]


def test_pyright_finds_the_types_in_the_wheel(installed: Path) -> None:
    python = installed / "bin" / "python"
    printed = run([sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, "program.py"], installed)
    found = json.loads(printed.stdout)["generalDiagnostics"]
    revealed = [row["message"] for row in found if row["severity"] == "information"]
    assert revealed[:5] == [f'Type of "{name}" is "{kind}"' for name, kind in REVEALED.items()]
    errors = [row["message"] for row in found if row["severity"] == "error"]
    assert errors == ['No parameter named "max_epoch"']


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "type", "authors"} <= citation.keys()
