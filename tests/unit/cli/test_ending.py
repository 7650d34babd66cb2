"""Refusals of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopwright import cli


@pytest.mark.parametrize(("command", "missing"), [("predict", "predict_dataloader"), ("fit", "train_dataloader")])
def test_a_command_without_data_is_refused_without_a_traceback(
    command: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.run([command, "--model=toys.Net", "--trainer.logger=false", "--trainer.enable_checkpointing=false"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"trainer.{command} has no data" in said
    assert missing in said
    assert "Traceback" not in said
