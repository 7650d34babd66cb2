"""Data sets of the Hugging Face hub by a short name, as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ...errors import ConfigError, MissingDependency
from .settings import DataSettings, SourceLike, listed


@dataclass(frozen=True)
class HubData:
    """Files of a data set on the hub.

    Attributes:
        repository: "owner/name".
        patterns: Which of its files are the training data, in forms that `RecipeData` reads.
        text: What is in them.
    """

    repository: str
    patterns: tuple[str, ...]
    text: str


NAMED = {
    "alpaca": HubData("tatsu-lab/alpaca", ("data/train-*.parquet",), "52,002 instructions"),
    "alpaca2k": HubData("mhenrichsen/alpaca_2k_test", ("*.parquet", "*.jsonl", "*.json"), "2,000 of them"),
    "tinystories": HubData("roneneldan/TinyStories", ("data/train-*.parquet",), "2.1 million short stories"),
    "slimpajama": HubData("DKYoon/SlimPajama-6B", ("data/train-*.parquet",), "6 billion tokens of it, a sample"),
    "redpajama": HubData("togethercomputer/RedPajama-Data-1T-Sample", ("*.jsonl",), "1 billion tokens of it, a sample"),
}


def named_data(data: SourceLike | Sequence[SourceLike] | None) -> dict[str, HubData]:
    """Return the sources that are names, and not files or folders."""
    names = [str(one.get("path") if isinstance(one, Mapping) else one) for one in listed(data or ())]
    return {name: NAMED[name] for name in names if name in NAMED and not Path(name).exists()}


def download(settings: DataSettings) -> DataSettings:
    """Download the sources that are names into the hub's cache; return the settings with their folders.

    Raises:
        ConfigError: The hub cannot be reached, or has no such files.
        MissingDependency: huggingface_hub is not installed.
    """
    names = {**named_data(settings.data), **named_data(settings.val_data)}
    folders = {name: _folder(name, hub) for name, hub in names.items()}
    val_data = None if settings.val_data is None else _located(settings.val_data, folders)
    return replace(settings, data=_located(settings.data, folders), val_data=val_data)


def _located(data: SourceLike | Sequence[SourceLike], folders: dict[str, Path]) -> list[SourceLike]:
    return [
        {**one, "path": folders.get(str(one["path"]), one["path"])}
        if isinstance(one, Mapping)
        else folders.get(str(one), one)
        for one in listed(data)
    ]


def _folder(name: str, hub: HubData) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise MissingDependency("huggingface_hub", needed_for=f"data={name}", extra="recipes") from error
    # The bases are the HTTP library's errors: a cut connection, no answer, a circle of redirects. ValueError: neither a
    # connection nor a copy in the cache.
    failures: tuple[type[Exception], ...] = (
        *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__),
        OSError,
        ValueError,
    )
    try:
        folder = Path(snapshot_download(hub.repository, repo_type="dataset", allow_patterns=list(hub.patterns)))
    except failures as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"data: Expected to download {hub.repository} for the name {name}, got: {first}",
            fix="check the connection (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE), or pass files.",
        ) from error
    if not any(file.is_file() for pattern in hub.patterns for file in folder.glob(pattern)):
        raise ConfigError(
            f"data: Expected files like {', '.join(hub.patterns)} in {hub.repository}, got none.",
            fix="download what you need yourself, and pass the files.",
        )
    return folder
