"""`train_tokenizer`: a byte-level BPE tokenizer from texts, as a Hugging Face folder with a chat template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingDependency
from .data.cache import ProblemList
from .data.settings import DataSettings, SourceLike
from .data.shard import publish, temporary_folder
from .data.sources import find_files, read_records

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = (END, START, PAD)
_BYTES = 256

# Marks cover the answer and its end token, so that masks need no second rendering, and the end is learned.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of `train_tokenizer`.

    Args:
        data: Files or folders with text, jsonl, json or parquet; all texts in a record count.
        out: Folder to write; it must not exist.
        vocab_size: Largest number of tokens, special ones included.
    """

    data: SourceLike | list[SourceLike]
    out: Path
    vocab_size: int = 32_000


@dataclass(frozen=True)
class TokenizerReport:
    """What was trained.

    Attributes:
        out: The folder.
        vocab_size: Number of tokens; fewer than asked for if the texts have no more pairs to merge.
        texts: Number of texts.
        characters: Their length.
    """

    out: Path
    vocab_size: int
    texts: int
    characters: int

    def as_dict(self) -> dict[str, Any]:  # Any: plain values for JSON
        """Return the report as plain values."""
        return {**asdict(self), "out": str(self.out)}

    def describe(self) -> str:
        """Return the report as text."""
        read = f"{self.texts:,} texts ({self.characters:,} characters)"
        return f"tokenizer: {self.out}, {self.vocab_size:,} tokens, from {read}"


def train_tokenizer(settings: TokenizerSettings) -> TokenizerReport:
    """Train a tokenizer and save it; equal texts give equal files.

    Documents and messages end with one token, `<|im_end|>`, which is the tokenizer's end token.

    Raises:
        ConfigError: `out` exists, there is no text, a record cannot be read, or `vocab_size` is too small.
        MissingDependency: transformers is not installed.
    """
    out = Path(settings.out).expanduser()
    files = _check(settings, out)
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingDependency("transformers", needed_for="training a tokenizer", extra="recipes") from error
    texts = _Texts(files)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    texts.check()
    temporary = temporary_folder(out)
    try:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END,
            pad_token=PAD,
            additional_special_tokens=[START],
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(str(temporary))
        publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return TokenizerReport(out, tokenizer.get_vocab_size(), texts.count, texts.characters)


def _check(settings: TokenizerSettings, out: Path) -> list[Path]:
    """Return the files to read, or name all problems."""
    problems = ProblemList()
    if out.exists():
        problems.add(f"out: Expected a folder that does not exist, got {out}.")
    least = _BYTES + len(SPECIAL)
    if settings.vocab_size < least:
        problems.add(f"vocab_size: Expected at least {least}, all bytes and special tokens, got {settings.vocab_size}.")
    files: list[Path] = []
    for source in DataSettings(settings.data).train_sources():
        found, problem = find_files(source.path)
        files += found
        if problem:
            problems.add(problem)
    _refuse(problems)
    return files


class _Texts:
    """The texts of files, counted while they are read; problems are noted, for `check`."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._problems = ProblemList()
        self.count = self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            for record in read_records(file):
                if record.problem:
                    self._problems.add(f"{record.place}: {record.problem}")
                for text in _texts_of(record.value):
                    self.count += 1
                    self.characters += len(text)
                    yield text

    def check(self) -> None:
        """Raise an error if a record could not be read, or there was no text."""
        if not self.characters:
            self._problems.add(f"{', '.join(map(str, self._files))}: Expected text, got none.")
        _refuse(self._problems)


def _texts_of(value: Any) -> Iterator[str]:  # Any: JSON
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("role", "from"):
                yield from _texts_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts_of(part)


def _refuse(problems: ProblemList) -> None:
    if problems.count:
        raise ConfigError(
            "Expected texts to train a tokenizer on, got problems:\n" + "\n".join(problems.lines()),
            fix="correct the data or the settings that are named.",
        )
