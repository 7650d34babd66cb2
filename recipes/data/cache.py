"""Tokenized data in a cache: each source becomes a folder with a `TokenShard`, made once and found by its key."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ...messages import counted
from .encoding import Draft, Encoder
from .formats import BadRecord, LeftOut, NoTemplate, find_kind, to_example, unread_keys
from .settings import DataSettings, DataSource
from .shard import MANIFEST, ShardWriter, TokenShard, publish, temporary_folder
from .sources import Record, find_files, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 2
_SHOWN = 20
_SKIPPED = "skipped.txt"  # beside the tokens
_TRIED = 200  # records that are read where other settings are wrong
_CHARACTERS = 1 << 20  # tokenized at a time
_DRAFTS = 1024
_EDGE = 1 << 16  # bytes at both ends of a file that identify it

logger = logging.getLogger(__name__)


@dataclass
class ProblemList:
    """Problems of data; keeps the first ones and counts all."""

    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, problem: str) -> None:
        """Note a problem."""
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(problem)

    def lines(self) -> list[str]:
        """Return the first problems, and how many there are if these are not all."""
        rest = self.count - len(self.shown)
        return [*self.shown, f"... and {rest} more ({self.count} in all)"] if rest else list(self.shown)


class Cache:
    """Tokenizes sources into folders.

    Args:
        folder: Where these folders are.
        settings: Kind, prompts and trained parts.
        tokenizer: A fast tokenizer.
    """

    def __init__(self, folder: Path, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder, self._settings, self._tokenizer = folder, settings, tokenizer
        self._tokenizer_key = describe_tokenizer(tokenizer)

    def find(self, source: DataSource) -> Path:
        """Return the folder of a source's tokens, which may not exist yet."""
        if (source.path / MANIFEST).is_file():
            return source.path
        files, _ = find_files(source.path)
        settings = self._settings
        described = {
            "version": VERSION,
            "files": [_identity(file, source.path) for file in files],
            "tokenizer": self._tokenizer_key,
            "kind": settings.kind,
            "train_on": settings.train_on,
            "prompt_style": settings.prompt_style,
        }
        if settings.on_bad_record == "skip":
            described["max_bad_records"] = settings.max_bad_records
        return self._folder / f"tokens-{_digest(json.dumps(described))}"

    def fill(self, source: DataSource, problems: ProblemList) -> None:
        """Tokenize a source unless it is there already. With problems, nothing is kept."""
        folder = self.find(source)
        if folder == source.path:
            self._check_tokenized(source, problems)
            return
        files, problem = find_files(source.path)
        if problem:
            problems.add(problem)
            return
        with _one_at_a_time(folder):
            if not folder.is_dir():
                self._tokenize(source, files, folder, problems)

    def try_out(self, source: DataSource, problems: ProblemList) -> None:
        """Check the first records of a source that is not tokenized yet; nothing is tokenized or kept."""
        folder = self.find(source)
        if folder.is_dir():
            return
        files, problem = find_files(source.path)
        if problem:
            problems.add(problem)
            return
        work = _Tokenizing(self._settings, self._tokenizer, folder, problems, is_trial=True)
        for record in islice((record for file in files for record in read_records(file)), _TRIED):
            work.add(record)

    def _check_tokenized(self, source: DataSource, problems: ProblemList) -> None:
        manifest = TokenShard(source.path).manifest
        if manifest.get("tokenizer") != self._tokenizer_key:
            problems.add(f"{source.path}: Expected tokens of this tokenizer, got those of another one.")

    def _tokenize(self, source: DataSource, files: Sequence[Path], folder: Path, problems: ProblemList) -> None:
        began, before = time.monotonic(), problems.count
        temporary = temporary_folder(folder)
        try:
            work = self._read_all(source, files, temporary, problems, folder)
            if problems.count == before:
                publish(temporary, folder)
                seconds = time.monotonic() - began
                logger.info("Tokenized %s: %d tokens in %.1f s.", source.path, work.writer.tokens, seconds)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # with problems, or after Ctrl-C

    def _read_all(
        self, source: DataSource, files: Sequence[Path], folder: Path, problems: ProblemList, final: Path
    ) -> _Tokenizing:
        work = _Tokenizing(self._settings, self._tokenizer, folder, problems)
        total = sum(file.stat().st_size for file in files)
        bar = tqdm(total=total, desc=f"Tokenizing {source.path.name}", unit="B", unit_scale=True, disable=None)
        with bar, contextlib.closing(work):
            for file in files:
                for record in read_records(file):
                    work.add(record)
                    bar.update(record.size)
            work.finish(source.path, self._tokenizer_key, final)
        return work


class _Tokenizing:
    """The pass over one source: records in, tokens out, in batches."""

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        problems: ProblemList,
        *,
        is_trial: bool = False,
    ) -> None:
        self._is_trial = is_trial
        self._settings, self._problems = settings, problems
        self._before = problems.count
        self._tokenizer = tokenizer
        self._has_template = bool(tokenizer.chat_template)
        self._encoder = Encoder(tokenizer, settings.train_on)
        self._folder = folder
        self._kind = None if settings.kind == "auto" else settings.kind
        self._waiting: list[tuple[Draft, int]] = []
        self._characters = self._records = 0
        self._writer: ShardWriter | None = None
        self._has_end = self._has_said_template = False
        self._unread: dict[str, None] = {}  # keys of records, in order
        self._left_out = Counter[str]()
        self._skipped: list[str] = []

    @property
    def writer(self) -> ShardWriter:
        """The writer of the shard; its kind must be known."""
        if self._writer is None:
            has_mask = self._kind != "text"
            self._writer = ShardWriter(self._folder, self._encoder.size, has_mask=has_mask)
        return self._writer

    def add(self, record: Record) -> None:
        """Take a record; tokenize those that wait if there are enough."""
        self._records += 1
        try:
            if record.problem:
                raise BadRecord(record.problem)
            samples = self._drafts(record)
        except NoTemplate as error:  # true of all records: named once
            if not self._has_said_template:
                self._problems.add(f"{record.place}: {error}")
            self._has_said_template = True
            return
        except LeftOut as reason:
            self._left_out[str(reason)] += 1
            return
        except BadRecord as error:
            self._refuse(f"{record.place}: {error}")
            return
        if self._is_trial:
            return
        for draft in (draft for sample in samples for draft in sample):
            self._waiting.append((draft, self._records - 1))
            self._characters += len(draft.text)
        if self._characters >= _CHARACTERS or len(self._waiting) >= _DRAFTS:
            self._flush()

    def _refuse(self, problem: str) -> None:
        """Note a record that cannot be used: as one that is skipped, or as a problem."""
        limit = self._settings.max_bad_records
        if self._settings.on_bad_record == "error":
            self._problems.add(problem)
            return
        self._skipped.append(problem)
        if len(self._skipped) == limit + 1:
            place = problem.partition(": ")[0]
            self._problems.add(
                f"max_bad_records: Expected at most {limit} bad records in a source, got more at {place}."
            )
            for one in self._skipped:
                self._problems.add(one)
        elif len(self._skipped) > limit:
            self._problems.add(problem)

    def _drafts(self, record: Record) -> list[list[Draft]]:
        if self._kind is None:
            self._kind = find_kind(record.value)
        if self._kind is None:
            keys = ", ".join(map(str, record.value)) if isinstance(record.value, dict) else None
            got = "no object" if keys is None else f"the keys {keys}" if keys else "no keys"
            raise BadRecord(
                "Expected messages, conversations, instruction and output, prompt and completion, text or input_ids, "
                f"got {got}."
            )
        if self._kind == "chat" and not self._has_template:
            raise NoTemplate("Expected a tokenizer with a chat_template for chat data, got one without.")
        style = self._settings.prompt_style
        example = to_example(record.value, self._kind, style, has_template=self._has_template)
        unread = unread_keys(record.value, self._kind, style, has_template=self._has_template)
        self._unread.update(dict.fromkeys(unread))
        return self._encoder.drafts(example)

    def _flush(self) -> None:
        if self._problems.count > self._before:  # nothing will be kept; the rest of the records is only checked
            self._waiting.clear()
        parts = self._encoder.encode([draft for draft, _ in self._waiting])
        for (draft, record), part in zip(self._waiting, parts, strict=True):
            self.writer.append(part.ids, part.is_trained)
            self._has_end = self._has_end or draft.has_end
            if draft.is_last:
                self.writer.close_sample(record)
        self._waiting.clear()
        self._characters = 0

    def finish(self, path: Path, tokenizer_key: str, folder: Path) -> None:
        """Tokenize the rest, look at all samples together, and write the manifest.

        Args:
            path: The source.
            tokenizer_key: Digest of the tokenizer.
            folder: Where the tokens are going to be.
        """
        self._flush()
        if self._problems.count > self._before:
            return
        if not self.writer.tokens:
            left_out = "".join(f": {counted(count, 'record')} with {one}" for one, count in self._left_out.items())
            self._problems.add(f"{path}: Expected at least one sample, got none{left_out}.")
        elif not self.writer.trained:
            self._problems.add(f"{path}: Expected trained tokens, got none: all labels are masked.")
        elif self._kind in ("chat", "instruct", "completion") and not self._has_end:
            self._problems.add(
                f"{path}: Expected a trained end token, got none in any answer: the model would not learn to stop. "
                "Generation marks of the chat template have to cover its end-of-turn token."
            )
        manifest = {"version": VERSION, "kind": self._kind, "records": self._records, "tokenizer": tokenizer_key}
        if self._skipped:
            (self._folder / _SKIPPED).write_text("".join(f"{one}\n" for one in self._skipped))
        self.writer.finish({**manifest, "notes": [f"{path}: {note}" for note in self._notes(folder)]})

    def _notes(self, folder: Path) -> Iterator[str]:
        """Yield what was not read of the records."""
        if self._skipped:
            yield (
                f"{counted(len(self._skipped), 'bad record')} skipped, listed in {folder / _SKIPPED}; "
                f"the first: {self._skipped[0]}"
            )
        if self._unread:
            names = [str(name) for name in self._unread]
            rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"Keys of records that are not read: {', '.join(names[:_SHOWN])}{rest}."
        for reason, count in self._left_out.items():
            yield f"{counted(count, 'record')} with {reason} left out."
        yield from self._encoder.notes

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of what determines the tokens: vocabulary, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return _digest("\n".join([type(tokenizer).__name__, rules, str(tokenizer.special_tokens_map), template]))


def _identity(file: Path, root: Path) -> list[str | int]:
    """Return what distinguishes a file from other and earlier ones: name, size, time, and the bytes at both ends."""
    stat = file.stat()
    with file.open("rb") as opened:
        edges = opened.read(_EDGE)
        opened.seek(max(0, stat.st_size - _EDGE))
        edges += opened.read(_EDGE)
    name = str(file.relative_to(root)) if root.is_dir() else file.name
    return [name, stat.st_size, stat.st_mtime_ns, hashlib.sha256(edges).hexdigest()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of a machine write a folder; the others wait, and then find it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        import fcntl
    except ImportError:  # Windows: each writes its own, and the first one is kept
        yield
        return
    with lock.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
