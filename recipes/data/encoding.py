"""`Encoder`: examples as tokens, many at a time, with the mask of trained tokens by the offsets of characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .chat_text import ChatText, MarkedIds, Span, Spanned
from .formats import BadRecord, Chat, Example, Ids, Prompted
from .shard import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Draft", "Encoder", "Part", "first_tokens"]

_BLOCK = 1 << 18  # characters of a long document that are tokenized at a time


@dataclass(frozen=True, slots=True)
class Draft:
    """A text, or tokens, on the way to a sample.

    Attributes:
        text: To be tokenized, unless there are `ids`.
        spans: Characters that are trained; None for all.
        ids: Tokens.
        is_trained: Of `ids`; None for all.
        begins: Whether the tokenizer's first token is put before it.
        ends: Whether the end-of-text token is put behind it.
        is_last: Whether the sample ends with it.
    """

    text: str = ""
    spans: tuple[Span, ...] | None = None
    ids: Sequence[int] | None = None
    is_trained: Sequence[bool] | None = None
    begins: bool = False
    ends: bool = False
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a draft, int64, and which of them are trained; None for all."""

    ids: Array
    is_trained: Array | None


class Encoder:
    """Makes drafts of examples, and tokens of drafts.

    Args:
        tokenizer: A fast tokenizer.
        train_on: "assistant", "last" or "all".

    Attributes:
        size: All ids are below it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatText(tokenizer, train_on)
        self._trains_prompt = train_on == "all"
        self.size = max(tokenizer.get_vocab().values()) + 1
        self._first = first_tokens(tokenizer)
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    def drafts(self, example: Example) -> list[list[Draft]]:
        """Return the drafts of each sample of an example.

        Raises:
            BadRecord: The chat template refuses the messages, or an id is not in the vocabulary.
        """
        if isinstance(example, Chat):
            return [[_chat_draft(one)] for one in self._chat.render(example)]
        if isinstance(example, Ids):
            return [[self._ids_draft(example)]]
        if isinstance(example, Prompted):
            text = example.prompt + example.answer
            spans = None if self._trains_prompt else ((len(example.prompt), len(text)),)
            return [[Draft(text, spans, begins=True, ends=True)]]
        blocks = list(_blocks(example.text))
        last = len(blocks) - 1
        return [[Draft(block, begins=at == 0, ends=at == last, is_last=at == last) for at, block in enumerate(blocks)]]

    def encode(self, drafts: Sequence[Draft]) -> list[Part]:
        """Return the tokens of each draft."""
        parts: list[Part | None] = [None if draft.ids is None else _given(draft) for draft in drafts]
        for needs_offsets in (False, True):
            chosen = [
                at for at, one in enumerate(drafts) if one.ids is None and (one.spans is not None) == needs_offsets
            ]
            for at, part in zip(chosen, self._tokenize([drafts[at] for at in chosen], needs_offsets), strict=True):
                parts[at] = part
        return [part for part in parts if part is not None]

    def _tokenize(self, drafts: Sequence[Draft], needs_offsets: bool) -> Iterator[Part]:
        if not drafts:
            return
        out = self._tokenizer(
            [draft.text for draft in drafts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=needs_offsets,
            verbose=False,
        )
        for at, draft in enumerate(drafts):
            ids = np.asarray(out["input_ids"][at], np.int64)
            mask = _mask(out["offset_mapping"][at], draft.spans) if draft.spans is not None else None
            yield self._wrap(draft, ids, mask)

    def _wrap(self, draft: Draft, ids: Array, mask: Array | None) -> Part:
        """Put the first and last tokens around those of the text; the last one is trained, as it ends the answer."""
        first = self._first if draft.begins and ids[: len(self._first)].tolist() != self._first else []
        end = self._end if draft.ends and ids[-1:].tolist() != self._end else []
        if not first and not end:
            return Part(ids, mask)
        if mask is not None:
            mask = np.concatenate([np.zeros(len(first), np.bool_), mask, np.ones(len(end), np.bool_)])
        return Part(np.concatenate([first, ids, end]).astype(np.int64), mask)

    def _ids_draft(self, example: Ids) -> Draft:
        if max(example.ids) >= self.size:
            raise BadRecord(f"Expected ids below {self.size}, the size of the tokenizer, got {max(example.ids)}.")
        return Draft(ids=example.ids, is_trained=None if self._trains_prompt else example.is_trained)


def _chat_draft(rendered: Spanned | MarkedIds) -> Draft:
    if isinstance(rendered, MarkedIds):
        return Draft(ids=rendered.ids, is_trained=rendered.is_trained)
    return Draft(rendered.text, rendered.spans)


def _given(draft: Draft) -> Part:
    mask = None if draft.is_trained is None else np.asarray(draft.is_trained, np.bool_)
    return Part(np.asarray(draft.ids, np.int64), mask)


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> Array:
    """Return which tokens end within a span.

    Ends decide, not beginnings: byte-level tokenizers report tokens without the space that they begin with.
    """
    ends = np.asarray(offsets, np.int64).reshape(-1, 2)[:, 1]
    mask = np.zeros(len(ends), np.bool_)
    for first, end in spans:
        mask |= (ends > first) & (ends <= end)
    return mask


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text by itself."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return [int(one) for one in whole[:at]]
    return []


def _blocks(text: str) -> Iterator[str]:
    """Yield a long text in pieces that end with a line, so that they are tokenized in parallel."""
    start = 0
    while len(text) - start > _BLOCK:
        end = text.rfind("\n", start, start + _BLOCK) + 1
        end = end if end > start else start + _BLOCK
        yield text[start:end]
        start = end
    yield text[start:]
