"""Fingerprints of a model folder, by which an adapter or a checkpoint recognizes its base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import ConfigError
from .litgpt import WEIGHTS, config_file

_CONFIG = "config.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_LARGEST_HEADER = 100 << 20  # bytes; the limit of the safetensors library
_SAMPLES, _SAMPLE_BYTES = 32, 256
_SMALL = 64 << 20  # bytes of a file that is read entirely, in some hundredths of a second
_TENSOR_SAMPLES, _DIGITS = 3, 16
_SHOWN = 3


def fingerprint_of_folder(path: str | Path) -> dict[str, object]:
    """Return what identifies a model's folder: plain values that fit into a checkpoint and into JSON.

    Of large files only headers and a few bytes of each tensor are read, so that they take milliseconds.

    Returns:
        `config`: sha256 of config.json or model_config.yaml. `files`: size of each file with weights. `shapes`: of each
        tensor, empty for files that are not safetensors. `samples`: sha256 of the sampled bytes, by which two trainings
        of one architecture differ. `tensors`: of each tensor the first digits of a sha256: of all of its bytes in small
        files, else of sampled ones; a training may have changed few tensors.

    Raises:
        ConfigError: The folder has no config.json or no weights, or a header is damaged.
    """
    folder = Path(path).expanduser()
    files = weight_files(folder)
    shapes: dict[str, list[int]] = {}
    tensors: dict[str, str] = {}
    samples = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            if file.suffix == ".safetensors":
                header = _read_header(file, stream)
                shapes.update({name: one.shape for name, one in header.items()})
                tensors.update(_digests(stream, header, file.stat().st_size))
            for piece in _sampled(stream, file.stat().st_size):
                samples.update(piece)
    return {
        "config": hashlib.sha256((config_file(folder) or folder / _CONFIG).read_bytes()).hexdigest(),
        "files": {file.name: file.stat().st_size for file in files},
        "shapes": dict(sorted(shapes.items())),
        "samples": samples.hexdigest(),
        "tensors": dict(sorted(tensors.items())),
    }


def fingerprint_problems(stored: Mapping[str, object], path: str | Path) -> list[str]:
    """Return what differs between a stored fingerprint and a folder, as `Expected ..., got ...`; empty if nothing.

    Args:
        stored: Result of `fingerprint_of_folder` of the folder that is expected.
        path: Folder to compare.
    """
    try:
        found = fingerprint_of_folder(path)
    except ConfigError as error:
        return [error.what]
    problems = [
        *_different("tensor", stored.get("shapes"), found["shapes"], path),
        *_different("file", stored.get("files"), found["files"], path),
    ]
    if not problems:
        problems += _other_values(stored, found, path)
    if stored.get("config") != found["config"]:
        problems.append(f"Expected the config.json of the base model, got another one in {path}.")
    return problems


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a folder, of Hugging Face in the order in which transformers looks for them.

    Raises:
        ConfigError: It is not a folder, or has no config.json, no weights, or not all files of its index.
    """
    if config_file(folder) is not None:
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        is_adapter = (folder / f"{WEIGHTS}.lora").is_file()
        found = f"{WEIGHTS}.lora; `litgpt merge_lora` merges it with its base" if is_adapter else "none"
        raise _unusable(f"{WEIGHTS} in the LitGPT folder {folder}, got {found}")
    if not (folder / _CONFIG).is_file():
        raise _unusable(f"a folder of a model with config.json, got {folder}")
    for single, index in zip(_SINGLE, _INDEXES, strict=True):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed(folder, index)
    raise _unusable(f"weights ({' or '.join(_SINGLE)}, or their index), got none in {folder}")


def check_weight_files(folder: Path) -> None:
    """Check that all weights of a folder are there, as far as headers and sizes show.

    Raises:
        ConfigError: As `weight_files`; or a file has a damaged header, or is shorter than its header says.
    """
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            with open(file, "rb") as stream:
                _read_header(file, stream)


def _indexed(folder: Path, index: str) -> list[Path]:
    try:
        names = sorted({str(name) for name in json.loads((folder / index).read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unusable(f"a readable {index}, got {error!r} in {folder}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise _unusable(f"all files of {index} in {folder}, got none named {', '.join(missing) or '(it is empty)'}")
    return [folder / name for name in names]


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a safetensors file: its shape, and the first byte and the end of its values in the file."""

    shape: list[int]
    start: int
    end: int


def _read_header(file: Path, stream: BinaryIO) -> dict[str, _Tensor]:
    """Return the tensors in a safetensors file, all of whose bytes are there."""
    size = int.from_bytes(stream.read(8), "little")
    found: dict[str, _Tensor] = {}
    try:
        if not 0 < size <= _LARGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        for name, entry in json.loads(stream.read(size)).items():
            if name != "__metadata__":
                start, end = (8 + size + int(one) for one in entry["data_offsets"])
                found[name] = _Tensor([int(one) for one in entry["shape"]], start, end)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unusable(f"a safetensors file with a readable header, got {file} ({error})") from error
    expected, got = max((one.end for one in found.values()), default=8 + size), file.stat().st_size
    if got < expected:
        raise _unusable(f"{expected:,} bytes in {file}, got {got:,}: a part of it is missing")
    return found


def _digests(stream: BinaryIO, header: Mapping[str, _Tensor], file_size: int) -> Iterator[tuple[str, str]]:
    for name, one in header.items():
        size = one.end - one.start
        digest = hashlib.sha256()
        if file_size <= _SMALL:
            stream.seek(one.start)
            digest.update(stream.read(size))
        else:
            for number in range(_TENSOR_SAMPLES):
                stream.seek(one.start + max(0, size - _SAMPLE_BYTES) * number // (_TENSOR_SAMPLES - 1))
                digest.update(stream.read(min(size, _SAMPLE_BYTES)))
        yield name, digest.hexdigest()[:_DIGITS]


def _other_values(stored: Mapping[str, object], found: Mapping[str, object], path: str | Path) -> list[str]:
    """Return where values differ; fingerprints of earlier versions know samples of entire files only."""
    expected, got = stored.get("tensors"), found["tensors"]
    if not isinstance(expected, Mapping) or not expected or not isinstance(got, Mapping):
        is_other = stored.get("samples") != found["samples"]
        names = []
    else:
        names = [str(name) for name in expected if expected[name] != got.get(name)]
        is_other = bool(names)
    if not is_other:
        return []
    where = f" ({', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''})"
    return [
        "Expected the weights of the base model, got other values of the same shapes"
        f"{where if names else ''} in {path}."
    ]


def _sampled(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield short pieces at even distances, the last one at the end of the file."""
    last = max(0, size - _SAMPLE_BYTES)
    for number in range(1, _SAMPLES + 1):
        stream.seek(last * number // _SAMPLES)
        yield stream.read(_SAMPLE_BYTES)


def _different(kind: str, stored: object, found: object, path: str | Path) -> list[str]:
    """Return the names that only one of two mappings has, and those with different values, the first few of each."""
    expected = stored if isinstance(stored, Mapping) else {}
    got = found if isinstance(found, Mapping) else {}
    problems = [f"Expected the {kind} {name}, got none in {path}." for name in expected if name not in got][:_SHOWN]
    problems += [f"Expected no {kind} {name}, got one in {path}." for name in got if name not in expected][:_SHOWN]
    unit = "the shape" if kind == "tensor" else "the size"
    return (
        problems
        + [
            f"Expected {unit} {expected[name]} of the {kind} {name}, got {got[name]} in {path}."
            for name in expected
            if name in got and _plain(expected[name]) != _plain(got[name])
        ][:_SHOWN]
    )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _unusable(expected_and_got: str) -> ConfigError:
    return ConfigError(
        f"Expected {expected_and_got}.",
        fix="pass a folder as save_pretrained writes it, with config.json and its weights.",
    )
