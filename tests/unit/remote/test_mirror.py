"""A folder at a URL, written by way of a copy on this machine."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from object_store import ObjectStore

from loopwright.errors import ConfigError, MissingDependency
from loopwright.loggers.run_folder import RunFolder
from loopwright.remote.mirror import RemoteFolder
from loopwright.remote.reader import RemoteReader
from loopwright.remote.store import PART_BYTES, RemoteStore


def grow(folder: RemoteFolder, url: str, data: bytes, name: str = "metrics.jsonl") -> None:
    path = Path(folder.local_path(url), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(data)


def read(url: str, name: str = "metrics.jsonl") -> bytes:
    reader = RemoteReader(url, ["metrics.*"])
    reader.refresh()
    return (reader.folder / name).read_bytes()


def test_what_is_new_arrives(url: str) -> None:
    folder = RemoteFolder(url)
    run = f"{url}/version_0"
    grow(folder, run, b"one\n")
    folder.send()
    assert RemoteStore(run).read("metrics.jsonl") == b"one\n"
    grow(folder, run, b"two\n")
    grow(folder, run, b"a: 1\n", "hparams.yaml")
    folder.send()
    assert read(run) == b"one\ntwo\n"
    assert RemoteStore(run).names() == {"metrics.jsonl", "hparams.yaml"}


def test_what_is_removed_here_is_removed_there(url: str) -> None:
    folder = RemoteFolder(url)
    grow(folder, f"{url}/a", b"1\n")
    folder.send()
    os.rename(Path(folder.local_path(f"{url}/a"), "metrics.jsonl"), Path(folder.local_path(f"{url}/a"), "kept.jsonl"))
    folder.send()
    assert RemoteStore(url).names("a") == {"kept.jsonl"}


def test_a_file_that_grows_is_sent_in_linear_size_and_readable_at_any_moment(objects: str) -> None:
    folder, run = RemoteFolder(objects), f"{objects}/version_0"
    reader = RemoteReader(run, ["metrics.*"])
    expected, sends = b"", 200
    for number in range(sends):
        data = b"%07d\n" % number * 8192  # 64 KiB
        expected += data
        grow(folder, run, data)
        folder.send()
        if number % 17 == 0:
            reader.refresh()
            assert (reader.folder / "metrics.jsonl").read_bytes() == expected
    total = len(expected)
    assert len(RemoteStore(run).names()) > 1  # parts
    base = ObjectStore.objects["bucket/logs/version_0/metrics.jsonl"][0]
    assert expected.startswith(base)
    assert 2 * len(base) >= total
    assert ObjectStore.put_bytes < 3 * total + sends * PART_BYTES  # 13 + 200 MB at most; rewritten it would be 1,300
    assert ObjectStore.read_bytes < 2 * total  # what was read is not read again
    folder.send(is_end=True)
    assert RemoteStore(run).names() == {"metrics.jsonl"}
    assert read(run) == expected


def test_parts_that_a_new_base_made_stale_are_ignored(objects: str) -> None:
    folder, run = RemoteFolder(objects), f"{objects}/version_0"
    grow(folder, run, b"a" * (PART_BYTES + 1))
    folder.send()
    grow(folder, run, b"b" * 100)
    folder.send()
    stale = {name: kept for name, kept in ObjectStore.objects.items() if ".part-" in name}
    assert stale
    grow(folder, run, b"c" * 100)
    folder.send(is_end=True)
    ObjectStore.objects.update(stale)  # killed between the new base and the removal of the parts
    assert read(run) == b"a" * (PART_BYTES + 1) + b"b" * 100 + b"c" * 100
    again = RemoteFolder(objects)
    again.fetch(run)
    grow(again, run, b"d")
    again.send()
    assert RemoteStore(run).names() == {"metrics.jsonl"}


def test_a_file_that_was_rewritten_is_sent_from_its_start(objects: str) -> None:
    folder, run = RemoteFolder(objects), f"{objects}/version_0"
    grow(folder, run, b"a\n" * PART_BYTES)
    folder.send()
    path = Path(folder.local_path(run), "metrics.jsonl")
    path.write_bytes(b"a,b\n" + b"a\n" * PART_BYTES)
    folder.send()
    assert read(run) == path.read_bytes()


def test_a_reader_follows_a_file_that_became_shorter(objects: str) -> None:
    folder, run = RemoteFolder(objects), f"{objects}/version_0"
    reader = RemoteReader(run, ["metrics.*"])
    for content in (b"one\ntwo\n", b"one\n", b"one\n2\n3\n"):
        grow(folder, run, b"")
        Path(folder.local_path(run), "metrics.jsonl").write_bytes(content)
        folder.send()
        reader.refresh()
        assert (reader.folder / "metrics.jsonl").read_bytes() == content


def test_an_interval_lies_between_two_sendings(objects: str) -> None:
    folder, run = RemoteFolder(objects), f"{objects}/version_0"
    grow(folder, run, b"one\n")
    folder.send_if_due()
    grow(folder, run, b"two\n")
    folder.send_if_due()
    assert read(run) == b"one\n"
    folder.send()
    assert read(run) == b"one\ntwo\n"


def test_what_did_not_arrive_is_sent_later(objects: str) -> None:
    folder, run = RemoteFolder(objects), f"{objects}/version_0"
    grow(folder, run, b"one\n")
    ObjectStore.is_down = True
    with pytest.raises(OSError, match=r"objects://bucket/logs/version_0/metrics\.jsonl could not be sent.*is down"):
        folder.send()
    ObjectStore.is_down = False
    folder.send()
    assert read(run) == b"one\n"


def test_runs_that_begin_at_once_never_get_one_folder(url: str) -> None:
    folders = [RunFolder(url, None, None) for _ in range(12)]
    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(lambda folder: folder.version, folders))
    assert len(set(versions)) == 12
    assert RunFolder(url, None, None).version == max(map(int, versions)) + 1


def test_a_folder_that_was_claimed_and_not_used_is_given_back(url: str) -> None:
    folder = RunFolder(url, None, None)
    assert folder.version == 0
    folder.continue_in("other")
    assert not RemoteStore(url).names()


def test_files_of_an_earlier_run_are_copied_before_they_are_continued(url: str) -> None:
    first = RemoteFolder(url)
    grow(first, f"{url}/a", b"one\n")
    grow(first, f"{url}/a", b"x" * 10, "model.ckpt")
    first.send(is_end=True)
    second = RemoteFolder(url)
    second.fetch(f"{url}/a")
    assert os.listdir(second.local_path(f"{url}/a")) == ["metrics.jsonl"]
    grow(second, f"{url}/a", b"two\n")
    second.send()
    assert read(f"{url}/a") == b"one\ntwo\n"


@pytest.mark.parametrize("way", [copy.deepcopy, lambda folder: pickle.loads(pickle.dumps(folder))])
def test_a_copy_continues_the_same_files(url: str, way: object) -> None:
    folder = RemoteFolder(url)
    grow(folder, f"{url}/a", b"one\n")
    folder.send()
    other = way(folder)  # type: ignore[operator]
    grow(other, f"{url}/a", b"two\n")
    other.send()
    assert read(f"{url}/a") == b"one\ntwo\n"


def test_a_protocol_that_nothing_knows_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"save_dir='nosuch://bucket'.*Protocol not known"):
        RemoteFolder("nosuch://bucket")


def test_a_protocol_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(MissingDependency, match="s3fs"):
        RemoteFolder("s3://bucket/logs")
