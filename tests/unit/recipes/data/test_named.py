"""Data sets by name are downloaded from a server that answers as the hub does, and read as files."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serve_hub
from recipe_runs import make_inputs

from loopwright.errors import ConfigError
from loopwright.recipes.data.named import NAMED, download, named_data
from loopwright.recipes.data.settings import DataSettings

pytest.importorskip("pyarrow")


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    import pyarrow
    from pyarrow import parquet

    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"It is {number}."} for number in range(40)]
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    files = {"data/train-00000-of-00001.parquet": file.getvalue(), "README.md": b"# Alpaca"}
    with serve_hub({"tatsu-lab/alpaca": files}) as served:
        yield served


def recipe(endpoint: str, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "loopwright", "recipe", "plan", "finetune", "out=run", "prompt_style=alpaca"]
    return subprocess.run(
        [*command, f"model={folder / 'base'}", "max_length=64", "devices=1", "trainer.accelerator=cpu", *settings],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_name_is_read_from_the_hub_once(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    endpoint, server = hub
    make_inputs(tmp_path)
    first = recipe(endpoint, tmp_path, "data=alpaca", "allow_download=true")
    assert "data: 40 samples" in first.stdout, first.stderr
    assert any("train-00000" in one and one.startswith("GET") for one in server.asked)
    assert not any("README" in one for one in server.asked)
    server.asked.clear()
    again = recipe(endpoint, tmp_path, "data=[{path: alpaca, weight: 2}]", "allow_download=true")
    assert "data: 40 samples" in again.stdout, again.stderr
    assert not any("train-00000" in one and one.startswith("GET") for one in server.asked)


@pytest.mark.slow
def test_what_cannot_be_downloaded_is_named_before_anything_else_is_done(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    endpoint, server = hub
    make_inputs(tmp_path)
    refused = recipe(endpoint, tmp_path, "data=alpaca")
    assert "got the name alpaca of tatsu-lab/alpaca; allow_download is false" in refused.stderr
    wrong = recipe(endpoint, tmp_path, "data=alpaca", "allow_download=true", "warmup=-1")
    assert wrong.stderr.count("\n  - ") == 1
    assert server.asked == []
    missing = recipe(endpoint, tmp_path, "data=tinystories", "allow_download=true")
    assert "Expected to download roneneldan/TinyStories for the name tinystories" in missing.stderr
    assert "HF_ENDPOINT" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_a_cut_connection_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def cut(*args: object, **options: object) -> None:
        raise hub.errors.HfHubHTTPError.__bases__[0]("peer closed connection")  # the HTTP library's error

    monkeypatch.setattr(hub, "snapshot_download", cut)
    with pytest.raises(ConfigError, match=r"for the name alpaca, got: peer closed connection"):
        download(DataSettings("alpaca"))


def test_a_file_of_the_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_data(["alpaca", {"path": "redpajama"}, "own.jsonl"]) == {
        "alpaca": NAMED["alpaca"],
        "redpajama": NAMED["redpajama"],
    }
    Path("alpaca").touch()
    assert named_data(["alpaca"]) == {}
