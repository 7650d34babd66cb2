"""`RecipeData`: the `DataModule` of the recipes. Batches of token rows from chat, instruct, completion or text data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from ...data import DataModule
from ...errors import ConfigError
from .cache import Cache, ProblemList
from .layout import RowLayout, build_layout, find_layout, pad_token, read_layout
from .report import DataReport
from .rows import Collate, LengthBatches, Rows, ShuffledRows
from .settings import DataSettings, DataSource
from .shard import MANIFEST, TokenShard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataSettings", "RecipeData"]

# Any in this file: a data set of arrays whose batches are tensors, and options of DataLoader.

logger = logging.getLogger(__name__)

_SHOWN_RECORDS = 8


class RecipeData(DataModule):
    """Tokenizes data once into a cache, plans rows, and returns loaders of row batches.

    A batch is a dict of int64 tensors of shape (rows, length): `input_ids`; `labels`, at each position the token that
    follows it if it is trained, else -100; and `position_ids`, which restart at 0 for each sample in a row. Of
    shape (rows) are `lengths`, the tokens of each row, and `rows`, its number for `describe_rows`. There is no
    attention mask: attention is causal, and padding is on the right.

    Example:
        data = RecipeData(DataSettings("chat.jsonl", max_length=1024), tokenizer, Path("runs/a/cache"))
        if problems := data.problems():
            print("\\n".join(problems))

    Args:
        settings: What data, and how.
        tokenizer: A fast tokenizer.
        cache: Folder of the tokenized data.
    """

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, cache: Path) -> None:
        super().__init__()
        self._settings, self._tokenizer = settings, tokenizer
        self._folder = Path(settings.cache or cache)
        self._layout: RowLayout | None = None

    @property
    def report(self) -> DataReport:
        """Counts of the data; after `setup`."""
        return self._rows().report

    @property
    def num_train_rows(self) -> int:
        """Number of rows of an epoch; after `setup`."""
        return len(self._rows().train)

    @property
    def has_val(self) -> bool:
        """Whether there are held-out data."""
        return self._settings.val_data is not None or self._settings.val_fraction > 0

    def describe_rows(self, rows: Iterable[int]) -> str:
        """Return which records training rows hold: `chats.jsonl, records 3, 7`, counted from 1; after `setup`."""
        sources = self._settings.train_sources()
        found: dict[int, list[str]] = {}
        for row in rows:
            for source, record in self._rows().train.records(row):
                found.setdefault(source, []).append(str(record + 1))
        return "; ".join(f"{sources[source].path}, {_listed(records)}" for source, records in found.items())

    def first_problems(self) -> list[str]:
        """Return what is wrong with settings, tokenizer and the first records, without tokenizing anything."""
        return self._problems_of(Cache.try_out)

    def problems(self, vocab_size: int | None = None) -> list[str]:
        """Return everything that is wrong with the data: `file:line: Expected ..., got ...`, the first 20 and a count.

        It reads and tokenizes what is not in the cache yet; `prepare_data` finds it there.

        Args:
            vocab_size: Rows of the model's embedding; None skips the comparison.
        """
        problems = self._problems_of(Cache.fill)
        if problems:
            return problems
        folders = [self._cache.find(source) for source in self._sources()]
        if vocab_size is not None:
            problems += self._too_large(folders, vocab_size)
        rows = find_layout(self._folder, self._settings, folders)
        if not problems and not rows.is_dir():
            problems += build_layout(rows, self._settings, folders, self._tokenizer)
        return problems

    def _problems_of(self, check: Callable[[Cache, DataSource, ProblemList], None]) -> list[str]:
        """Return what is wrong with settings and tokenizer; if nothing is, what the check finds in the sources."""
        problems = [*self._settings.problems(), *self._tokenizer_problems()]
        if problems:
            return problems
        found = ProblemList()
        for source in self._sources():
            check(self._cache, source, found)
        return found.lines()

    @cached_property
    def _cache(self) -> Cache:
        return Cache(self._folder, self._settings, self._tokenizer)

    @override
    def prepare_data(self) -> None:
        """Tokenize and plan what is not in the cache yet.

        Raises:
            ConfigError: There are problems.
        """
        if problems := self.problems():
            raise ConfigError(
                "Expected data to train on, got problems:\n" + "\n".join(problems),
                fix="correct the data or the settings that are named.",
            )

    @override
    def setup(self, stage: str) -> None:
        """Map the rows that `prepare_data` left in the cache.

        Raises:
            ConfigError: They do not exist.
        """
        if self._layout is not None:
            return
        folders = [self._cache.find(source) for source in self._sources()]
        rows = find_layout(self._folder, self._settings, folders)
        if not rows.is_dir():
            raise ConfigError(
                f"Expected tokenized data in {self._folder}, got none for these data and settings.",
                fix="call prepare_data() first; with several machines, on each of them or in a shared folder.",
            )
        self._layout = read_layout(rows, self._settings, folders)
        for note in self._layout.report.notes:
            logger.info(note)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        settings, rows = self._settings, self._rows().train
        if settings.group_by_length:
            batches = LengthBatches(rows.lengths(), settings.micro_batch, settings.seed)
            return self._loader(rows, batch_sampler=batches)
        return self._loader(rows, batch_size=settings.micro_batch, sampler=ShuffledRows(len(rows), settings.seed))

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Return the loader of the held-out data; an empty list without any."""
        rows = self._rows().val
        return self._loader(rows, batch_size=self._settings.micro_batch) if self.has_val else []

    def _loader(self, rows: Rows, **options: Any) -> DataLoader[Any]:
        workers = self._settings.num_workers
        return DataLoader(
            rows,
            collate_fn=Collate(pad_token(self._tokenizer), self._rows().width),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            **options,
        )

    def _rows(self) -> RowLayout:
        if self._layout is None:
            raise ConfigError(
                "Expected the data to be set up, got a data module before setup.",
                fix="call prepare_data() and setup('fit') first; the Trainer calls both.",
            )
        return self._layout

    def _sources(self) -> list[DataSource]:
        return [*self._settings.train_sources(), *self._settings.val_sources()]

    def _tokenizer_problems(self) -> Iterator[str]:
        if not self._tokenizer.is_fast:
            yield (
                f"tokenizer: Expected a fast tokenizer (tokenizer.json), got {type(self._tokenizer).__name__}, which "
                "does not show which characters a token is from."
            )
        if self._tokenizer.eos_token_id is None:
            yield "tokenizer: Expected an eos_token, got none: the model would not learn where a text ends."

    def _too_large(self, folders: list[Path], vocab_size: int) -> Iterator[str]:
        for source, folder in zip(self._sources(), folders, strict=True):
            if (folder / MANIFEST).is_file() and TokenShard(folder).manifest["max_id"] >= vocab_size:
                largest = TokenShard(folder).manifest["max_id"]
                yield (
                    f"{source.path}: Expected token ids below {vocab_size}, the rows of the model's embedding, got "
                    f"{largest}: the tokenizer is of another model, or tokens were added to it."
                )


def _listed(records: list[str]) -> str:
    shown = list(dict.fromkeys(records))
    more = len(shown) - _SHOWN_RECORDS
    text = ", ".join(shown[:_SHOWN_RECORDS]) + (f" and {more} more" if more > 0 else "")
    return f"record{'s' if len(shown) > 1 else ''} {text}"
