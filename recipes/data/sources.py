"""Records of data files: jsonl, json, parquet, and text. Each record has its place, and whether it can be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...errors import MissingDependency

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | float | bool | None"
JsonObject: TypeAlias = Mapping[str, Json]

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
TEXT_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("txt", "text", "md", "rst", "tex", "html", "css", "sql", "sh", "py", "pyi", "c", "h", "cc", "cpp", "hpp"),
        *("cu", "java", "js", "ts", "go", "rs", "rb", "r", "jl", "kt", "scala", "swift", "lua"),
    )
)
# Files of data in other forms, which would be read as one document of their characters.
_OTHER_SUFFIXES = (
    *(".csv", ".tsv", ".xlsx", ".xls", ".ods", ".arrow", ".feather", ".orc", ".avro", ".npy", ".npz", ".pt", ".pkl"),
    *(".bin", ".safetensors", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".pdf", ".docx"),
)
_ROWS = 1024  # of a parquet file at a time


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a file.

    Attributes:
        place: `file:line`, or `file:row N` and `file:item N` where there are no lines.
        value: What was read; of a text file a dict with `text`.
        size: Bytes of the file that this record accounts for; for progress.
        problem: Why it could not be read; empty if it could.
    """

    place: str
    value: Json = None
    size: int = 0
    problem: str = ""


def find_files(path: Path) -> tuple[list[Path], str]:
    """Return the data files of a file or folder in order, and a problem, which is empty if there is none.

    A folder is searched with its subfolders, without hidden ones. If it has files of records (jsonl, json, parquet),
    these are its data; otherwise its text files are.
    """
    if path.is_file():
        if path.suffix.lower() in _OTHER_SUFFIXES:
            return [], f"{path}: Expected jsonl, json, parquet or text, got {path.suffix}; convert it to one of these."
        return [path], ""
    if not path.is_dir():
        return [], f"{path}: Expected a file or folder, got a path that does not exist."
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    records = [file for file in found if file.suffix.lower() in RECORD_SUFFIXES]
    files = records or [file for file in found if file.suffix.lower() in TEXT_SUFFIXES]
    if not files:
        return [], f"{path}: Expected jsonl, json, parquet or text files, got a folder without any."
    return files, ""


def read_records(file: Path) -> Iterator[Record]:
    """Yield the records of a file; those that cannot be read have a problem.

    Raises:
        MissingDependency: pyarrow is not installed, and the file is a parquet file.
    """
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _read_lines(file)
    if suffix == ".json":
        return _read_json(file)
    if suffix == ".parquet":
        return _read_parquet(file)
    return _read_text(file)


def _read_lines(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                parsed = _Json(text)
                yield Record(place, parsed.value, len(line), parsed.problem(parsed.value))
            except UnicodeDecodeError as error:
                yield Record(place, size=len(line), problem=_not_utf8(error))
            except json.JSONDecodeError as error:
                got = f"{error.msg} at column {error.colno}"
                yield Record(place, size=len(line), problem=f"Expected a JSON object in one line, got {got}.")
            except (ValueError, RecursionError) as error:
                yield Record(place, size=len(line), problem=_not_readable(error))


class _Json:
    """The value of a JSON text, and what is wrong with its parts.

    Raises:
        ValueError: It is not JSON, or a number is too long.
        RecursionError: It is nested too deeply.
    """

    def __init__(self, text: str) -> None:
        # Of an object with a key that is there twice: its id -> the object, which keeps the id, and the key.
        self._twice: dict[int, tuple[JsonObject, str]] = {}
        self._has_escapes = "\\u" in text  # the one way to write half of a character
        self.value: Json = json.loads(text, object_pairs_hook=self._object)

    def problem(self, part: Json) -> str:
        """Return why a part of the value cannot be used; empty if it can."""
        if self._twice and (key := self._find_twice(part)) is not None:
            return f"Expected each key once, got {key!r} twice: one of the values would be lost."
        if self._has_escapes:
            try:
                json.dumps(part, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = ord(error.object[error.start])
                return f"Expected full characters, got \\u{half:04x}, half of a surrogate pair."
        return ""

    def _object(self, pairs: list[tuple[str, Json]]) -> JsonObject:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            self._twice[id(found)] = found, next(name for at, name in enumerate(names) if name in names[:at])
        return found

    def _find_twice(self, part: Json) -> str | None:
        if isinstance(part, dict) and id(part) in self._twice:
            return self._twice[id(part)][1]
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return next((key for one in inner if (key := self._find_twice(one)) is not None), None)


def _not_readable(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "Expected JSON of some levels, got one that is nested too deeply."
    return f"Expected numbers that can be read, got one of too many digits ({error})."


def _read_json(file: Path) -> Iterator[Record]:
    """Read a list of objects, or one object per line, which some write into files of this name."""
    size = file.stat().st_size
    try:
        text = file.read_text("utf-8-sig")
        if not text.strip():
            return  # as a jsonl file without lines
        parsed = _Json(text)
    except UnicodeDecodeError as error:
        yield Record(f"{file}:1", size=size, problem=_not_utf8(error))
        return
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:
            yield from _read_lines(file)
            return
        got = f"{error.msg} at column {error.colno}"
        yield Record(f"{file}:{error.lineno}", size=size, problem=f"Expected a JSON list of objects, got {got}.")
        return
    except (ValueError, RecursionError) as error:
        yield Record(str(file), size=size, problem=_not_readable(error))
        return
    items = parsed.value if isinstance(parsed.value, list) else [parsed.value]
    for number, item in enumerate(items, 1):
        yield Record(f"{file}:item {number}", item, size // len(items), parsed.problem(item))


def _read_parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingDependency("pyarrow", needed_for=f"reading {file.name}", extra="recipes") from error
    size = file.stat().st_size
    try:
        with ParquetFile(file) as table:
            yield from _read_rows(file, table, size)
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a damaged page, too
        yield Record(f"{file}:row 1", size=size, problem=f"Expected a parquet file, got one that is damaged ({error}).")


def _read_rows(file: Path, table: ParquetFile, size: int) -> Iterator[Record]:
    share = size // max(1, table.metadata.num_rows)
    number = 0
    for batch in table.iter_batches(batch_size=_ROWS):  # row group by row group: the file need not fit into memory
        for value in batch.to_pylist():
            number += 1
            yield Record(f"{file}:row {number}", _present(value), share)


def _present(value: Json) -> Json:
    """Return a value without the keys that are null: in a parquet file every object has the keys of all."""
    if isinstance(value, dict):
        return {key: _present(part) for key, part in value.items() if part is not None}
    return [_present(part) for part in value] if isinstance(value, list) else value


def _read_text(file: Path) -> Iterator[Record]:
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        yield Record(f"{file}:{line}", size=len(content), problem=_not_utf8(error))
        return
    yield Record(f"{file}:1", {"text": text.replace("\r\n", "\n")}, len(content))


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"Expected UTF-8 text, got byte 0x{error.object[error.start]:02x} at offset {error.start}."
