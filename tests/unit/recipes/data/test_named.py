"""Data sets by name are downloaded from a server that answers as the hub does, and read as files."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import make_inputs

from loopwright.recipes.data.named import NAMED, named_data

pytest.importorskip("pyarrow")

SHA = "0123456789" * 4


class Hub(http.server.BaseHTTPRequestHandler):
    """One revision of each data set: a list of its files, and the files."""

    files: dict[str, dict[str, bytes]]
    asked: list[str]

    def do_GET(self) -> None:
        kind, _, rest = self.path.partition("?")[0].lstrip("/").partition("/")
        if kind == "api":
            owner, name, verb = [*rest.removeprefix("datasets/").split("/"), "", ""][:3]
            files = self.files.get(f"{owner}/{name}", {})
            tree = [{"type": "file", "path": name, "size": len(body), "oid": SHA} for name, body in files.items()]
            found: Any = {"id": f"{owner}/{name}", "sha": SHA, "siblings": []} if verb == "revision" else tree
            self._send(json.dumps(found).encode(), 200 if files else 404)
        else:
            repository, _, name = rest.partition(f"/resolve/{SHA}/")
            self._send(self.files[repository][name], 200)

    do_HEAD = do_GET

    def _send(self, body: bytes, status: int) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    import pyarrow
    from pyarrow import parquet

    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"It is {number}."} for number in range(40)]
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    files = {"data/train-00000-of-00001.parquet": file.getvalue(), "README.md": b"# Alpaca"}
    handler = type("OneHub", (Hub,), {"files": {"tatsu-lab/alpaca": files}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


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


def test_a_file_of_the_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_data(["alpaca", {"path": "redpajama"}, "own.jsonl"]) == {
        "alpaca": NAMED["alpaca"],
        "redpajama": NAMED["redpajama"],
    }
    Path("alpaca").touch()
    assert named_data(["alpaca"]) == {}
