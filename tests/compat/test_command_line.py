"""Compares LightningCLI with Lightning's own, which stands on jsonargparse: `make test-lightning`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROGRAM = str(Path(__file__).with_name("programs") / "command_line.py")
PYTHON = os.environ.get("LIGHTNING_PYTHON", "")
SIDES = {"theirs": [PYTHON], "ours": [PYTHON, "-m", "loopwright", "run-lightning"]}

pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGHTNING_PYTHON names no interpreter with Lightning")

FLAT = """
model:
  activation: {class_path: torch.nn.LeakyReLU, init_args: {negative_slope: 0.5}}
data: {batch_size: 8}
"""
NAMED = """
model: {class_path: __main__.Line, init_args: {lr: 0.2, batch_size: 8}}
data: {class_path: __main__.Data, init_args: {batch_size: 8}}
"""


def run(
    side: str, folder: Path, *arguments: str, program: str = PROGRAM, **variables: str
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    found = subprocess.run(
        [*SIDES[side], program, *arguments],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found


def numbers(found: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads([line for line in found.stdout.splitlines() if line.startswith("{")][-1])  # type: ignore[no-any-return]


def test_the_same_line_gives_the_same_run_and_each_reads_the_others_files(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(FLAT)
    line = ("fit", "--config", str(tmp_path / "base.yaml"), "--optimizer.momentum", "0.5", "--tag=x")
    fitted, printed, tested = {}, {}, {}
    for side in SIDES:
        found = run(side, tmp_path / side, *line)
        fitted[side] = numbers(found)
        assert "saved in fit: True, 2" in found.stderr
        printed[side] = run(side, tmp_path / side, *line, "--print_config").stdout
        test = ("test", "--config", str(tmp_path / "base.yaml"), "--ckpt_path", "last.ckpt", "--trainer.logger=false")
        tested[side] = numbers(run(side, tmp_path / side, *test))
    assert fitted["ours"] == pytest.approx(fitted["theirs"])
    assert (fitted["ours"]["momentum"], fitted["ours"]["batch_size"], fitted["ours"]["config"]) == (0.5, 8, True)
    assert tested["ours"] == pytest.approx(tested["theirs"])

    for side, other in (("ours", "theirs"), ("theirs", "ours")):
        (tmp_path / f"{other}.yaml").write_text(printed[other])
        again = run(side, tmp_path / f"{side}_again", "fit", "--config", str(tmp_path / f"{other}.yaml"))
        assert numbers(again) == pytest.approx(fitted[side])
        saved = next((tmp_path / other / "lightning_logs").glob("version_*/mine.yaml"))
        again = run(side, tmp_path / f"{side}_saved", "fit", "--config", str(saved))
        assert numbers(again) == pytest.approx(fitted[side])


def test_model_and_data_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "named.yaml").write_text(NAMED)
    line = ("fit", "--config", str(tmp_path / "named.yaml"), "--model.init_args.batch_size", "5")
    theirs, ours = (numbers(run(side, tmp_path / side, *line, SUBCLASS="1")) for side in SIDES)
    assert ours == pytest.approx(theirs)
    assert ours["batch_size"] == 5


def test_small_programs_give_the_same(tmp_path: Path) -> None:
    program = str(Path(PROGRAM).with_name("command_line_rows.py"))
    theirs, ours = (numbers(run(side, tmp_path / side, program=program)) for side in SIDES)
    assert list(theirs) == list(ours)
    for name, expected in theirs.items():
        assert ours[name] == expected, name
