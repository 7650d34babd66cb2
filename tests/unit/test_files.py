"""Files that are replaced in one step: whatever happens, there is the old one or the new one, and nothing beside it."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import loader, net

import loopwright as lw
from loopwright import files
from loopwright.cli.saved_config import SaveConfig
from loopwright.files import only_describes, replace_file, replacing


class FullDisk(io.FileIO):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(path: Path, *args: Any) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("a.json", "a.json.tmp", ".a.json.tmp"):
        (folder / name).symlink_to("../victim")
    replace_file(folder / "a.json", "new")
    assert (folder / "a.json").read_text() == "new"
    assert not (folder / "a.json").is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"


def test_temporary_names_differ_each_time(tmp_path: Path) -> None:
    seen = set()
    for _ in range(5):
        with replacing(tmp_path / "a"):
            seen |= set(os.listdir(tmp_path)) - {"a"}
    assert len(seen) == 5


def test_after_an_error_the_old_file_is_there_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path):
        _ = 1 / 0
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from loopwright.files import replacing\n"
        "with replacing(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "a.json"
    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    replace_file(path, "new")
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_that_the_system_did_not_cause_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), only_describes("The table"):
        _ = 1 / 0


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FileIO", FullDisk)


def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "open_temporary", read_only)


@pytest.mark.parametrize("fail", [full, closed])
def test_files_that_describe_a_run_do_not_fail_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[pytest.MonkeyPatch], None]
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the profiler's folder should be")
    trainer = lw.Trainer(
        max_epochs=1,
        logger=lw.JSONLinesLogger(tmp_path),
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[SaveConfig("a: 1"), lw.LearningRateMonitor()],
        profiler=lw.SimpleProfiler(dirpath=blocked, filename="profile"),
        log_every_n_steps=1,
    )
    fail(monkeypatch)
    with pytest.warns(UserWarning, match="could not be written") as caught:
        trainer.fit(net(), loader())
    assert trainer.global_step == 4
    told = [str(one.message) for one in caught if "could not be written" in str(one.message)]
    assert len(told) == 3  # the configuration, the profiler's report, what the run ran on with its timeline
    assert all("The run is not affected" in text for text in told)
    assert sorted(os.listdir(tmp_path / "loopwright_logs" / "version_0")) == ["metrics.jsonl"]
