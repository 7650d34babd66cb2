"""File systems for fsspec: `ObjectStore` has no folders, no append and whole puts; `SharedDisk` is a disk at a URL."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

__all__ = ["ObjectStore", "SharedDisk"]


class ObjectStore(AbstractFileSystem):
    """Objects by name, at `objects://`, shared by all instances; counts what is sent and read, and can fail."""

    protocol = "objects"
    cachable = False
    objects: ClassVar[dict[str, tuple[bytes, datetime]]] = {}
    put_bytes: ClassVar[int] = 0
    read_bytes: ClassVar[int] = 0
    is_down: ClassVar[bool] = False

    @classmethod
    def start(cls) -> None:
        """Begin empty, and let URLs find it."""
        fsspec.register_implementation("objects", cls, clobber=True)
        cls.objects.clear()
        cls.put_bytes = cls.read_bytes = 0
        cls.is_down = False

    def _check(self) -> None:
        if ObjectStore.is_down:
            raise RuntimeError("the store is down")  # stores raise errors of their own libraries

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._check()
        start = f"{self._strip_protocol(path)}/".lstrip("/")
        found: dict[str, dict[str, Any]] = {}
        for name, (content, modified) in self.objects.items():
            if name.startswith(start):
                below = name[len(start) :]
                if "/" in below:
                    folder = start + below.partition("/")[0]
                    found[folder] = {"name": folder, "size": 0, "type": "directory"}
                else:
                    found[name] = {"name": name, "size": len(content), "type": "file", "LastModified": modified}
        if not found and start.rstrip("/") in self.objects:
            name = start.rstrip("/")
            content, modified = self.objects[name]
            found[name] = {"name": name, "size": len(content), "type": "file", "LastModified": modified}
        if not found and start:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self._check()
        if mode == "rb":
            if path not in self.objects:
                raise FileNotFoundError(path)
            return io.BytesIO(self.objects[path][0])
        if mode != "wb":
            raise NotImplementedError(f"mode {mode!r}: objects are put, and not changed")
        return _Upload(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._check()
        content = self.objects[self._strip_protocol(path)][0][start:end]
        ObjectStore.read_bytes += len(content)
        return content

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._check()
        ObjectStore.put_bytes += len(value)
        self.objects[self._strip_protocol(path)] = (bytes(value), datetime.now(UTC))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._check()
        content = self.objects[self._strip_protocol(path1)][0]
        self.objects[self._strip_protocol(path2)] = (content, datetime.now(UTC))

    def rm_file(self, path: str) -> None:
        self._check()
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._check()

    def created(self, path: str) -> datetime:
        return self.objects[self._strip_protocol(path)][1]

    modified = created


class _Upload(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        if not self.closed:
            ObjectStore.put_bytes += len(self.getvalue())
            ObjectStore.objects[self.path] = (self.getvalue(), datetime.now(UTC))
        super().close()


class SharedDisk(LocalFileSystem):
    """A disk with folders at `shared://`, where a file is seen while it is written."""

    protocol = ("shared",)

    @classmethod
    def start(cls) -> None:
        """Let URLs find it, in this process."""
        fsspec.register_implementation("shared", cls, clobber=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("shared://"))

    def unstrip_protocol(self, name: str) -> str:
        return f"shared://{name}"
