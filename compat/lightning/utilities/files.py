"""Lightning's helpers for files: file systems, hyperparameters as YAML or CSV, and checkpoints that stay on disk."""

from __future__ import annotations

import csv
import io
import socket
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import fsspec
import torch
from fsspec.core import url_to_fs

from ....checkpoint import storage
from ....checkpoint.file.reading import require_small
from ....checkpoint.hparams import read_yaml
from ....checkpoint.tensors import AnyTensor, map_tensors, read_tensor
from ....protocols import MapLocation
from ....strategies import Strategy

__all__ = [
    "get_filesystem",
    "is_shared_filesystem",
    "load_hparams_from_tags_csv",
    "load_hparams_from_yaml",
    "save_hparams_to_tags_csv",
    "save_hparams_to_yaml",
]


def get_filesystem(path: str | Path, **kwargs: object) -> object:  # fsspec is not annotated
    """Return the fsspec file system of a path or URL."""
    return url_to_fs(str(path), **kwargs)[0]


def _is_dir(fs: Any, path: str | Path, strict: bool = False) -> bool:  # Any: fsspec is not annotated
    """Return whether a path is a folder.

    Args:
        fs: The file system.
        path: The path or URL.
        strict: False takes a path in an object store, where folders are made on the fly, for a folder.
    """
    is_store = type(fs).__name__ in ("GCSFileSystem", "S3FileSystem", "AzureBlobFileSystem")
    return (is_store and not strict) or bool(fs.isdir(str(path)))


def _load(
    path_or_url: str | Path | IO[bytes], map_location: MapLocation = None, weights_only: bool | None = None
) -> object:  # a nested checkpoint
    """Return the content of a checkpoint, as `torch.load` does; a path may be an fsspec URL.

    Raises:
        CheckpointError: Without weights_only=False: it asks for more memory than it has bytes.
    """
    if isinstance(path_or_url, str | Path):
        with fsspec.open(str(path_or_url), "rb") as file:
            return _load(file, map_location, weights_only)
    if weights_only is not False:
        require_small(path_or_url, str(getattr(path_or_url, "name", path_or_url)))
    return torch.load(path_or_url, map_location=map_location, weights_only=weights_only)


def _atomic_save(checkpoint: object, filepath: str | Path) -> None:
    """Write an object as `torch.save` does: completely, or not at all. The path may be an fsspec URL."""
    content = io.BytesIO()
    torch.save(checkpoint, content)
    fs, path = url_to_fs(str(filepath))
    with fs.transaction, fs.open(path, "wb") as file:
        file.write(content.getvalue())


def is_shared_filesystem(strategy: Strategy, path: str | Path | None = None, timeout: int = 3) -> bool:
    """Return whether all ranks see one file system at a path: with one process, or behind a URL. On every rank.

    Args:
        strategy: Provides the ranks.
        path: The folder; the working directory by default.
        timeout: Accepted; nothing waits.
    """
    if path is not None and "://" in str(path):
        return True
    if strategy.world_size == 1:
        return True
    # Ranks on one machine see one file system; for several machines it is not tried out.
    return len(set(strategy.gather_objects(socket.gethostname()))) == 1


def save_hparams_to_yaml(config_yaml: str | Path, hparams: object, use_omegaconf: bool = True) -> None:
    """Write hyperparameters as YAML."""
    from omegaconf import OmegaConf

    entries = dict(hparams) if isinstance(hparams, Mapping) else dict(vars(hparams))
    Path(config_yaml).write_text(OmegaConf.to_yaml(OmegaConf.create(entries, flags={"allow_objects": True})))


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> dict[str, object]:
    """Return hyperparameters of a YAML file; an empty dict if there is no file."""
    return read_yaml(config_yaml) if Path(config_yaml).is_file() else {}


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: object) -> None:
    """Write hyperparameters as a table of keys and values."""
    entries = dict(hparams) if isinstance(hparams, Mapping) else dict(vars(hparams))
    with open(tags_csv, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("key", "value"))
        writer.writerows(entries.items())


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, object]:
    """Return hyperparameters of a table of keys and values; an empty dict if there is no file."""
    if not Path(tags_csv).is_file():
        return {}
    with open(tags_csv, newline="") as file:
        return {row["key"]: _literal(row["value"]) for row in csv.DictReader(file)}


def _literal(text: str) -> object:  # what was written
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class _NotYetLoadedTensor:
    """A tensor of a file that was opened by `_lazy_load`.

    `_load_tensor` reads it, and so does every function of torch that gets it, such as `module.load_state_dict`.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> object:  # Any: arguments of a function of torch, and what it returns
        """Call a function of torch with tensors in place of these."""
        return func(*(_loaded(arg) for arg in args), **{name: _loaded(arg) for name, arg in (kwargs or {}).items()})

    def __init__(self, stored: AnyTensor) -> None:
        self._stored = stored

    def _load_tensor(self) -> object:  # a tensor
        return read_tensor(self._stored)

    def __getattr__(self, name: str) -> Any:  # Any: the tensor's
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stored if hasattr(self._stored, name) else self._load_tensor(), name)


def _loaded(value: Any) -> Any:  # Any: an argument, which may be a collection of tensors
    if isinstance(value, _NotYetLoadedTensor):
        return value._load_tensor()
    if type(value) in (list, tuple):
        return type(value)(_loaded(item) for item in value)
    return value


def _lazy_load(filename: str | Path) -> object:  # a nested checkpoint
    """Return the content of a file of torch.save; its tensors are read on first use."""
    return map_tensors(storage.load(filename, lazy=True, verify=False), lambda stored, _: _NotYetLoadedTensor(stored))
