from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
import torch

from loopwright.callbacks.model_checkpoint import files, names
from loopwright.checkpoint import storage
from loopwright.errors import ConfigError


def render(template: str, insert: bool = True, **metrics: float) -> str:
    return names.render_name(template, metrics, insert_names=insert, equals="=")


def test_names_and_values_are_written() -> None:
    assert render("{epoch}-{step}", epoch=1, step=4) == "epoch=1-step=4"


def test_names_may_have_slashes_and_dots() -> None:
    metrics = {"val/loss": torch.tensor(0.0512), "a.b": 2.0}
    assert (
        names.render_name("e-{val/loss:.2f}-{a.b}", metrics, insert_names=True, equals="=") == "e-val/loss=0.05-a.b=2"
    )


def test_values_alone_without_names() -> None:
    assert render("e={epoch:02d}-l={x:.3f}", insert=False, epoch=3, x=0.12345) == "e=03-l=0.123"


def test_a_float_without_format_is_short() -> None:
    assert names.render_name("{x}", {"x": torch.tensor(0.2)}, insert_names=True, equals="=") == "x=0.2"


def test_a_missing_metric_is_zero() -> None:
    assert render("{epoch}-{val_los}-{x:.2f}", epoch=1, val_loss=0.5) == "epoch=1-val_los=0-x=0.00"


@pytest.mark.parametrize("template", ["{epoch", "{}", "{x:d}", ".hidden", "{x:%Q}", "folder/"])
def test_a_template_that_cannot_work_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="filename="):
        names.check_template(template, "filename")


def test_template_names_are_metrics_only() -> None:
    assert names.template_names("{epoch}-{val/loss:.2f}-{step}-{val/loss}") == ["val/loss"]


def write(path: Path, modified_s: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (modified_s, modified_s))
    return str(path)


def test_newest_first_then_by_step(tmp_path: Path) -> None:
    old = write(tmp_path / "step=30.ckpt", 100)
    low = write(tmp_path / "epoch=0-step=9.ckpt", 200)
    high = write(tmp_path / "epoch=0-step=10.ckpt", 200)
    nested = write(tmp_path / "val" / "loss=0.1.ckpt", 300)
    write(tmp_path / ".step=40.ckpt", 400)
    write(tmp_path / "notes.txt", 400)
    assert files.find_checkpoints([str(tmp_path)], ".ckpt") == [nested, high, low, old]


def test_a_link_counts_as_its_file_and_a_dangling_one_not_at_all(tmp_path: Path) -> None:
    real = write(tmp_path / "step=1.ckpt", 100)
    files.link(real, str(tmp_path / "last.ckpt"))
    os.symlink("gone.ckpt", tmp_path / "other.ckpt")
    assert files.find_checkpoints([str(tmp_path)], ".ckpt") == [real]


def test_a_sharded_checkpoint_is_one_folder(tmp_path: Path) -> None:
    write(tmp_path / "step=1.ckpt" / "part.ckpt", 100)
    assert files.find_checkpoints([str(tmp_path)], ".ckpt") == [str(tmp_path / "step=1.ckpt")]


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert files.find_checkpoints([str(tmp_path / "none")], ".ckpt") == []


def test_link_replaces_in_one_step_and_is_relative(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.ckpt", 1), write(tmp_path / "b.ckpt", 2)
    link = str(tmp_path / "last.ckpt")
    files.link(first, link)
    files.link(second, link)
    assert os.readlink(link) == "b.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "last.ckpt"]


def test_remote_folders_are_searched_and_cleaned() -> None:
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/run/step=1.ckpt": b"x", "/run/.step=2.ckpt": b"x"})
    assert files.find_checkpoints(["memory://run"], ".ckpt") == ["memory:///run/step=1.ckpt"]
    assert files.exists("memory:///run/step=1.ckpt")
    files.remove("memory:///run/step=1.ckpt")
    assert not files.exists("memory:///run/step=1.ckpt")


def test_a_remote_folder_counts_as_one_checkpoint_once_it_has_a_manifest() -> None:
    import fsspec

    filesystem = fsspec.filesystem("memory")
    names = (
        "whole.ckpt/manifest.json",
        "whole.ckpt/state-1-ab.ckpt",
        "torn.ckpt/state-2-cd.ckpt",
        ".x.ckpt/manifest.json",
    )
    filesystem.pipe({f"/folders/{name}": b"x" for name in names})
    assert files.find_checkpoints(["memory://folders/"], ".ckpt") == ["memory:///folders/whole.ckpt"]
    files.remove("memory:///folders/whole.ckpt")
    assert files.find_checkpoints(["memory://folders"], ".ckpt") == []
    assert not files.exists("memory:///folders/whole.ckpt")


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_checkpoint_of_the_other_form_makes_way_under_a_free_name(tmp_path: Path, place: str) -> None:
    import fsspec

    filesystem = fsspec.filesystem("memory" if place == "memory" else "file")
    root = f"/{tmp_path.name}-way" if place == "memory" else str(tmp_path)
    last = f"memory://{root}/last.ckpt" if place == "memory" else f"{root}/last.ckpt"
    assert files.make_way(last, for_folder=True) is None
    filesystem.pipe({f"{root}/last.ckpt": b"file", f"{root}/last-v1.ckpt": b"another"})
    assert files.make_way(last, for_folder=False) is None
    moved = files.make_way(last, for_folder=True)
    assert moved is not None
    assert moved.endswith("/last-v2.ckpt")
    assert filesystem.cat(f"{root}/last-v2.ckpt") == b"file"
    filesystem.makedirs(f"{root}/last.ckpt", exist_ok=True)
    filesystem.pipe({f"{root}/last.ckpt/manifest.json": b"{}"})
    assert files.make_way(last, for_folder=True) is None
    again = files.make_way(last, for_folder=False)
    assert again is not None
    assert again.endswith("/last-v3.ckpt")
    assert filesystem.cat(f"{root}/last-v3.ckpt/manifest.json") == b"{}"
    assert not files.exists(last)


def test_the_time_of_a_folder_is_that_of_its_manifest(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    os.utime(path / "manifest.json", ns=(10**18, 10**18))
    (path / "shard-of-a-killed-save").touch()
    assert files.modified_ns(str(path)) == 10**18


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", 1)
    with pytest.raises(ConfigError, match="is a file"):
        files.check_dirpath(str(tmp_path / "file" / "checkpoints"))


def test_a_relative_folder_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.check_dirpath("logs/checkpoints")
    assert files.is_inside("logs/checkpoints/a.ckpt", "logs/checkpoints")
    assert not files.is_inside("logs/a.ckpt", "logs/checkpoints")


def test_all_digits_are_written_where_that_is_asked_for() -> None:
    metrics = {"x": 0.123456789, "y": 3.0}
    named = names.render_name("{x}-{y}-{z}", metrics, insert_names=True, equals="=", number_format="")
    assert named == "x=0.123456789-y=3.0-z=0"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="no permission"):
        files.check_dirpath(str(tmp_path / "checkpoints"))


def test_a_trial_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    files.write_trial(str(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_trial_of_a_store_leaves_nothing() -> None:
    files.write_trial("memory://trial/checkpoints")
    assert fsspec.filesystem("memory").find("/trial") == []


def test_a_folder_that_takes_nothing_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"nothing can be written to .*Error: "):
        files.write_trial(str(tmp_path / "file" / "inside"))


def test_a_relative_folder_that_is_not_there_yet_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.check_dirpath("logs/checkpoints")
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        files.check_dirpath("logs/checkpoints")


def test_the_last_checkpoint_is_that_of_the_highest_step_whatever_the_times_say(tmp_path: Path) -> None:
    paths = []
    for name, step, modified_s in (("last", 30, 100), ("a", 10, 300), ("b", 20, 200), ("same", 20, 250)):
        path = tmp_path / f"{name}.ckpt"
        storage.save({"state_dict": {}, "global_step": step}, path)
        os.utime(path, (modified_s, modified_s))
        paths.append(str(path))
    assert [Path(one).stem for one in files.newest_first(paths)] == ["last", "same", "b", "a"]


def test_a_later_version_of_the_logger_comes_first(tmp_path: Path) -> None:
    paths = []
    for version, step, modified_s in ((2, 30, 300), (10, 5, 100)):
        path = tmp_path / f"version_{version}" / "checkpoints" / "x.ckpt"
        storage.save({"state_dict": {}, "global_step": step}, path)
        os.utime(path, (modified_s, modified_s))
        paths.append(str(path))
    assert files.newest_first(paths) == paths[::-1]
