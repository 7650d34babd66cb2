from __future__ import annotations

import errno
import io
import re
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from object_store import ObjectStore

from loopwright.checkpoint import load, newest_valid, remove, save, sharded, storage, verify
from loopwright.checkpoint.file.remote import Remote, as_local
from loopwright.errors import CheckpointError, ConfigError, MissingDependency
from loopwright.remote.store import RemoteStore


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}/runs/a.ckpt"


def names(url: str) -> list[str]:
    store = fsspec.filesystem("memory")
    return [name.rpartition("/")[2] for name in store.ls(url.rpartition("/")[0], detail=False)]


def test_a_remote_checkpoint_comes_back(url: str, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, url)
    assert names(url) == ["a.ckpt"]
    assert verify(url).sealed
    loaded = load(url)
    assert torch.equal(loaded["state_dict"]["layer.weight"], checkpoint["state_dict"]["layer.weight"])
    save({**checkpoint, "epoch": 4}, url)
    assert load(url)["epoch"] == 4
    assert load(url, mmap=True)["epoch"] == 4


def test_a_damaged_remote_file_is_found(url: str, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, url)
    other = url.replace("a.ckpt", "b.ckpt")
    save(checkpoint, other)
    store = fsspec.filesystem("memory")
    content = bytearray(store.cat_file(url))
    content[content.index(torch.ones(2, 3).numpy().tobytes())] ^= 1
    store.pipe_file(url, bytes(content))
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        load(url)
    skipped: list[str] = []
    assert newest_valid([url, other], lambda path, error: skipped.append(path)) == other
    assert skipped == [url]


def test_a_missing_remote_file_names_its_neighbours(url: str, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, url)
    missing = url.replace("a.ckpt", "aa.ckpt")
    with pytest.raises(FileNotFoundError, match=r"a\.ckpt"):
        load(missing)
    with pytest.raises(FileNotFoundError, match=r"a\.ckpt"):
        verify(missing)


def test_remove_takes_the_file(url: str, checkpoint: dict[str, Any]) -> None:
    save(checkpoint, url)
    remove(url)
    with pytest.raises(FileNotFoundError):
        verify(url)
    remove(url)


def test_a_failing_move_leaves_the_old_file_and_nothing_else(
    url: str, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoint, url)

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the network is gone")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "mv", refuse)
    with pytest.raises(CheckpointError, match="the network is gone") as raised:
        save({**checkpoint, "epoch": 4}, url)
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert names(url) == ["a.ckpt"]
    assert load(url)["epoch"] == 3


def test_what_arrives_short_is_not_moved(url: str, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoint, url)

    def put_half(self: Any, source: str, target: str) -> None:
        self.pipe_file(target, Path(source).read_bytes()[:500])

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", put_half)
    with pytest.raises(CheckpointError, match="500 bytes arrived"):
        save({**checkpoint, "epoch": 4}, url)
    assert names(url) == ["a.ckpt"]
    assert load(url)["epoch"] == 3


def test_stages_are_reached(url: str, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(storage, "reached", seen.append)
    save(checkpoint, url)
    assert seen == ["opened", "written", "digest-written", "renamed"]


def test_a_protocol_without_its_package_is_explained(checkpoint: dict[str, Any]) -> None:
    with pytest.raises(MissingDependency, match="pip install"):
        save(checkpoint, "oss://bucket/a.ckpt")


def test_an_unknown_protocol_is_explained(checkpoint: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="nosuch"):
        save(checkpoint, "nosuch://bucket/a.ckpt")


def test_paths_and_urls_are_distinguished() -> None:
    assert as_local("a/b.ckpt") == Path("a/b.ckpt")
    assert as_local(Path("a://b")) == Path("a:/b")
    assert as_local("file:///a/b.ckpt") == Path("/a/b.ckpt")
    assert as_local("s3://a/b.ckpt") is None
    assert as_local("simplecache::s3://a") is None


def test_a_save_removes_what_a_killed_save_to_its_address_has_left(url: str, checkpoint: dict[str, Any]) -> None:
    store = fsspec.filesystem("memory")
    folder = url.rpartition("/")[0]
    others = [".a.ckpt.tmp-b.tmp-0badcafe", ".a.ckpt.tmp-notes", ".b.ckpt.tmp-0badcafe"]  # may be in use
    for left in (".a.ckpt.tmp-0badcafe", *others):
        store.pipe_file(f"{folder}/{left}", b"half")
    save(checkpoint, url)
    assert sorted(names(url)) == [*others, "a.ckpt"]


def test_a_store_that_lists_nothing_keeps_the_checkpoint(
    url: str, checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(self: Remote) -> list[str]:
        raise RuntimeError("403")  # gcsfs' and adlfs' errors are no OSError

    monkeypatch.setattr(Remote, "neighbours", forbidden)
    save(checkpoint, url)
    assert "cannot remove what an interrupted save has left" in caplog.text
    assert verify(url).sealed


class Buckets(ObjectStore):
    """Makes the bucket of a folder, as s3fs does."""

    protocol = "r2"

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError(f"the bucket of {path} is made")


def test_no_bucket_is_made_in_an_object_store(checkpoint: dict[str, Any]) -> None:
    Buckets.start()
    fsspec.register_implementation("r2", Buckets, clobber=True)
    save(checkpoint, "r2://bucket/a.ckpt")
    sharded.save(checkpoint, "r2://bucket/folder")
    store = RemoteStore("r2://bucket")
    store.mark("x/.claim")
    store.write("y/remote.py", __file__, 0, 10)
    RemoteStore("simplecache::r2://bucket").mark("z/.claim")
    assert store.names() == {"a.ckpt", "folder", "x", "y", "z"}


def test_what_a_killed_save_was_sending_into_a_folder_is_removed_by_the_next(url: str) -> None:
    content = {"weight": torch.ones(2)}
    sharded.save(content, url)
    store, key = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{key}/.state-29657-37a384af.ckpt.tmp-40703664", b"half")
    store.pipe_file(f"{key}/.notes.tmp-40703664", b"of somebody else")
    sharded.save(content, url)
    left = [name for name in store.ls(key, detail=False) if "/." in name]
    assert left == [f"{key}/.notes.tmp-40703664"]


class Closed(ObjectStore):
    """A store that refuses the login with an error of its library."""

    protocol = "closed"

    def info(self, path: str, **kwargs: Any) -> Any:
        raise RuntimeError("AuthorizationFailure")

    ls = find = info


def test_a_store_that_cannot_be_read_is_no_missing_and_no_damaged_checkpoint(tmp_path: Path) -> None:
    from toys import loader, net, quiet

    fsspec.register_implementation("closed", Closed, clobber=True)
    for read in (load, verify, storage.load):
        with pytest.raises(ConfigError, match=r"'closed://runs/a\.ckpt' cannot be read: RuntimeError: Authorization"):
            read("closed://runs/a.ckpt")
    with pytest.raises(ConfigError, match="'closed://runs/a.ckpt' cannot be read"):
        newest_valid(["closed://runs/a.ckpt"], lambda path, error: pytest.fail("skipped as damaged"))
    trainer = quiet(max_epochs=1, default_root_dir="closed://runs", enable_checkpointing=True)
    with pytest.raises(ConfigError, match="'closed://runs/checkpoints' cannot be read"):
        trainer.fit(net(), loader(), ckpt_path="last")


class Expires(ObjectStore):
    """A store whose credentials expire after some requests, with errors of its library."""

    protocol = "expires"
    left = 0

    def _spend(self, path: str) -> None:
        if path.endswith((".ckpt", ".safetensors", "manifest.json")):
            Expires.left -= 1
            if Expires.left < 0:
                raise RuntimeError("ExpiredToken")

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._spend(path)
        return super().cat_file(path, *args, **kwargs)

    def get_file(self, rpath: str, *args: Any, **kwargs: Any) -> Any:
        self._spend(rpath)
        return super().get_file(rpath, *args, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        if mode != "rb":
            return file
        spend = self._spend

        class Reads(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                spend(path)
                return super().read(size)

            def readinto(self, buffer: Any) -> int:
                spend(path)
                return super().readinto(buffer)

        return Reads(file.read())


def test_every_later_read_of_a_store_names_the_url(checkpoint: dict[str, Any]) -> None:
    fsspec.register_implementation("expires", Expires, clobber=True)
    Expires.left = 10**6
    save(checkpoint, "expires://runs/a.ckpt")
    sharded.save(checkpoint, "expires://runs/b.ckpt")
    ends: dict[str, int] = {}
    texts: list[str] = []
    for name, read in (("a", load), ("a", verify), ("b", sharded.load), ("b", sharded.verify), ("b", load)):
        for allowed in range(100):
            Expires.left = allowed
            try:
                read(f"expires://runs/{name}.ckpt")
            except ConfigError as error:
                texts.append(error.what)
            else:
                ends[f"{read.__module__}.{read.__name__} {name}"] = allowed
                break
    pattern = r"'expires://runs/[ab]\.ckpt.*' cannot be read: RuntimeError: ExpiredToken"
    assert [one for one in texts if not re.fullmatch(pattern, one)] == []
    assert len(ends) == 5
    assert min(ends.values()) >= 1


def test_a_full_disk_is_not_the_fault_of_the_store(checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://space/a.ckpt"
    save(checkpoint, url)

    def get_file(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "get_file", get_file)
    with pytest.raises(ConfigError, match=r"cannot be copied to '.*': No space left on device") as caught:
        load(url)
    assert "TMPDIR" in caught.value.fix


def test_settings_that_a_store_refuses_are_not_taken_for_an_unknown_protocol() -> None:
    class Strict(ObjectStore):
        protocol = "strict"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("Must provide either a connection_string or account_name")

    fsspec.register_implementation("strict", Strict, clobber=True)
    with pytest.raises(ConfigError, match="'strict://runs/a.ckpt' cannot be read: ValueError: Must provide either"):
        load("strict://runs/a.ckpt")
