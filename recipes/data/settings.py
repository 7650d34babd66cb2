"""`DataSettings`: what data a recipe reads, and how it becomes rows of tokens."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ...errors import nearest

KINDS = ("chat", "instruct", "completion", "text", "ids")
TRAIN_ON = ("assistant", "last", "all")
ON_BAD_RECORD = ("error", "skip")
TOO_LONG = ("cut", "drop", "split")
# Prompts of instruct and completion data, by name. An empty input leaves its section out.
PROMPT_STYLES = {
    "alpaca": "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "plain": "{prompt}",
}
PROMPT_FIELDS = ("instruction", "input", "prompt", "system")

SourceLike: TypeAlias = "str | Path | Mapping[str, Any]"  # Any: of a mapping from a YAML file


@dataclass(frozen=True)
class DataSource:
    """One file or folder, and how many times an epoch reads it: 2 is twice, 0.5 a fixed random half."""

    path: Path
    weight: float = 1.0


@dataclass(frozen=True)
class DataSettings:
    """Settings of `RecipeData`.

    Args:
        data: Files or folders: one, or a list of paths and of mappings with `path` and `weight`.
        val_data: Held-out data; None takes `val_fraction` of `data`.
        val_fraction: Share of the samples that is held out, 0 for none.
        kind: Kind of the records, "auto" by the keys of each source's first record.
        train_on: Trained messages of a chat: those of the assistant, the last of these, or everything.
        prompt_style: Prompt of instruct and completion data: "alpaca", "plain", or a format string. None uses the
            tokenizer's chat template.
        on_bad_record: "error" names all records that cannot be used; "skip" leaves them out, and lists them in a file.
        max_bad_records: Largest number of skipped records in a source.
        max_length: Tokens in a row. In a training, a model with fewer positions shortens the default.
        too_long: What happens with longer samples; text is always split, unless it is dropped.
        packing: Whether a row holds several samples, kept apart by `position_ids`.
        group_by_length: Whether a batch holds samples of similar lengths, where packing is off.
        micro_batch: Rows per process and micro-batch.
        num_workers: Worker processes of the loaders.
        seed: Seed of the split, the plan of rows, and their order.
        cache: Folder of the tokenized data; None for the one that the recipe passes.
    """

    data: SourceLike | Sequence[SourceLike]
    val_data: SourceLike | Sequence[SourceLike] | None = None
    val_fraction: float = 0.0
    kind: str = "auto"
    train_on: str = "assistant"
    prompt_style: str | None = None
    on_bad_record: str = "error"
    max_bad_records: int = 100
    max_length: int = 2048
    too_long: str = "cut"
    packing: bool = True
    group_by_length: bool = False
    micro_batch: int = 1
    num_workers: int = 0
    seed: int = 0
    cache: Path | None = field(default=None, metadata={"is_folder": True})

    def train_sources(self) -> list[DataSource]:
        """Return the sources of the training data."""
        return _sources(self.data)

    def val_sources(self) -> list[DataSource]:
        """Return the sources of `val_data`."""
        return [] if self.val_data is None else _sources(self.val_data)

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        choices = {"kind": ("auto", *KINDS), "train_on": TRAIN_ON, "too_long": TOO_LONG, "on_bad_record": ON_BAD_RECORD}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                yield f"{name}: Expected one of {', '.join(known)}, got {value!r}{nearest(str(value), known)}."
        for name, least in {"max_length": 2, "micro_batch": 1, "num_workers": 0, "max_bad_records": 1}.items():
            if getattr(self, name) < least:
                yield f"{name}: Expected at least {least}, got {getattr(self, name)}."
        if not 0 <= self.val_fraction < 1:
            yield f"val_fraction: Expected a share in [0, 1), got {self.val_fraction}."
        if self.val_data is not None and self.val_fraction:
            yield f"val_fraction: Expected 0 beside val_data, got {self.val_fraction}."
        if self.group_by_length and self.packing:
            yield "group_by_length: Expected packing=false beside it, got packing=true."
        if self.cache is not None and Path(self.cache).exists() and not Path(self.cache).is_dir():
            yield f"cache: Expected a folder, got the file {self.cache}."
        yield from _style_problems(self.prompt_style)
        for name in ("data", "val_data"):
            yield from _source_problems(name, getattr(self, name))


def listed(data: SourceLike | Sequence[SourceLike]) -> list[SourceLike]:
    """Return the sources as a list."""
    return [data] if isinstance(data, str | Path | Mapping) else list(data)


def _sources(data: SourceLike | Sequence[SourceLike]) -> list[DataSource]:
    return [
        DataSource(Path(one["path"]).expanduser(), float(one.get("weight", 1.0)))
        if isinstance(one, Mapping)
        else DataSource(Path(one).expanduser())
        for one in listed(data)
    ]


def _source_problems(name: str, data: SourceLike | Sequence[SourceLike] | None) -> Iterator[str]:
    if data is None:
        return
    if not listed(data):
        yield f"{name}: Expected at least one path, got an empty list."
    for one in listed(data):
        if not isinstance(one, Mapping):
            continue
        unknown = set(one) - {"path", "weight"}
        weight = one.get("weight", 1.0)
        if "path" not in one or unknown:
            yield f"{name}: Expected a mapping with path and weight, got {dict(one)!r}."
        elif not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            yield f"{name}: Expected a weight above 0, got {weight!r} for {one['path']}."


def _style_problems(style: str | None) -> Iterator[str]:
    if style is None or style in PROMPT_STYLES:
        return
    try:
        # A width in a field, as {prompt:>9999999999}, would be memory that a file asks for.
        parts = string.Formatter().parse(style)
        fields = {f"{name}{spec}{conversion or ''}" for _, name, spec, conversion in parts if name is not None}
    except ValueError as error:
        yield f"prompt_style: Expected a format string, got {style!r} ({error})."
        return
    if not fields or not fields <= set(PROMPT_FIELDS):
        known = ", ".join(f"{{{name}}}" for name in PROMPT_FIELDS)
        names = ", ".join(PROMPT_STYLES)
        yield f"prompt_style: Expected {names}, or a format string with {known}, got {style!r}."
