"""`Encoder`: examples as tokens, many at a time, with the mask of trained tokens by the offsets of characters.

An answer's tokens are those that generation has to produce: the tokens before it are those of its prompt alone. A
tokenizer that joins the end of the prompt with the beginning of the answer, such as a space with a word, is called for
both parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .chat_text import ChatText, Span
from .formats import BadRecord, Chat, Example, Ids, Prompted
from .shard import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        ends: Whether the end-of-text token is put after it.
        is_last: Whether the sample ends with it.
        has_end: Whether the token that ends an answer is trained.
    """

    text: str = ""
    spans: tuple[Span, ...] | None = None
    ids: Sequence[int] | None = None
    is_trained: Sequence[bool] | None = None
    begins: bool = False
    ends: bool = False
    is_last: bool = True
    has_end: bool = True


@dataclass(frozen=True, slots=True)
class EncodedPart:
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
        notes: What the user should know about the chats so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatText(tokenizer, train_on)
        self.notes = self._chat.notes
        self._trains_prompt = train_on == "all"
        self.size = max(tokenizer.get_vocab().values()) + 1
        self._first = first_tokens(tokenizer)
        self._end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._added = np.asarray(sorted(tokenizer.added_tokens_decoder), np.int64)
        self._ids_of = lru_cache(1024)(lambda text: tuple(self._tokens(text)[0]))  # most are headers of turns

    def drafts(self, example: Example) -> list[list[Draft]]:
        """Return the drafts of each sample of an example.

        Raises:
            BadRecord: The chat template refuses the messages, or an id is not in the vocabulary.
        """
        if isinstance(example, Chat):
            return [[Draft(one.text, one.spans, has_end=one.has_end)] for one in self._chat.render(example)]
        if isinstance(example, Ids):
            return [[self._ids_draft(example)]]
        if isinstance(example, Prompted):
            text = example.prompt + example.answer
            spans = None if self._trains_prompt else ((len(example.prompt), len(text)),)
            return [[Draft(text, spans, begins=True, ends=True)]]
        blocks = list(_blocks(example.text))
        last = len(blocks) - 1
        return [[Draft(block, begins=at == 0, ends=at == last, is_last=at == last) for at, block in enumerate(blocks)]]

    def encode(self, drafts: Sequence[Draft]) -> list[EncodedPart]:
        """Return the tokens of each draft."""
        parts: list[EncodedPart | None] = [None if draft.ids is None else _given(draft) for draft in drafts]
        for needs_offsets in (False, True):
            chosen = [
                at for at, one in enumerate(drafts) if one.ids is None and (one.spans is not None) == needs_offsets
            ]
            for at, part in zip(chosen, self._tokenize([drafts[at] for at in chosen], needs_offsets), strict=True):
                parts[at] = part
        return [part for part in parts if part is not None]

    def _tokenize(self, drafts: Sequence[Draft], needs_offsets: bool) -> Iterator[EncodedPart]:
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
            mask = None
            if draft.spans is not None:
                ids, mask = self._mask(draft.text, draft.spans, ids, _starts(out["offset_mapping"][at]))
            yield self._wrap(draft, ids, mask)

    def _mask(self, text: str, spans: Sequence[Span], ids: Array, starts: Array) -> tuple[Array, Array]:
        """Return tokens of a text, and which of them are trained."""
        mask = np.zeros(len(ids), np.bool_)
        for first, end in spans:
            begin = self._count_before(text, ids, starts, first)
            if begin is None:
                return self._apart(text, spans)
            mask[begin : np.searchsorted(starts, end)] = True
        return ids, mask

    def _count_before(self, text: str, ids: Array, starts: Array, first: int) -> int | None:
        """Return the number of tokens before a character; None if they are others than without the rest of the text.

        Tokens after an added token do not depend on what precedes it.
        """
        added = np.flatnonzero(np.isin(ids[: np.searchsorted(starts, first)], self._added))
        for at in [*map(int, added[:-3:-1]), 0][:2]:  # the last one may reach over white space into the answer
            before = self._ids_of(text[starts[at] if at else 0 : first])
            if tuple(ids[at : at + len(before)].tolist()) == before:
                return at + len(before)
        return None

    def _apart(self, text: str, spans: Sequence[Span]) -> tuple[Array, Array]:
        """Return tokens of a text whose ranges are tokenized apart from what is before them."""
        ends = dict(spans)
        edges = sorted({0, *ends, len(text)})
        ids, masks = list[int](), list[Array]()
        for first, end in pairwise(edges):
            found, starts = self._tokens(text[first:end])
            if first and (head := self._tokens("\n")[0]):
                # Some tokenizers put a space before a text; a line's end before it keeps them from it.
                joined, places = self._tokens("\n" + text[first:end])
                if joined[: len(head)] == head:
                    found, starts = joined[len(head) :], places[len(head) :] - 1
            ids += found
            masks.append(starts < ends.get(first, first) - first)
        return np.asarray(ids, np.int64), np.concatenate(masks)

    def _tokens(self, text: str) -> tuple[list[int], Array]:
        """Return the tokens of a text, and where each begins."""
        # Without the tokenizer's checks of arguments, which take longer than a prompt.
        encoded = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(encoded.ids), _starts(encoded.offsets)

    def _wrap(self, draft: Draft, ids: Array, mask: Array | None) -> EncodedPart:
        """Put the first and last tokens around those of the text; the last one is trained, as it ends the answer."""
        first = self._first if draft.begins and ids[: len(self._first)].tolist() != self._first else []
        end = self._end if draft.ends and ids[-1:].tolist() != self._end else []
        if not first and not end:
            return EncodedPart(ids, mask)
        if mask is not None:
            mask = np.concatenate([np.zeros(len(first), np.bool_), mask, np.ones(len(end), np.bool_)])
        return EncodedPart(np.concatenate([first, ids, end]).astype(np.int64), mask)

    def _ids_draft(self, example: Ids) -> Draft:
        if max(example.ids) >= self.size:
            raise BadRecord(f"Expected ids below {self.size}, the size of the tokenizer, got {max(example.ids)}.")
        return Draft(ids=example.ids, is_trained=None if self._trains_prompt else example.is_trained)


def _given(draft: Draft) -> EncodedPart:
    mask = None if draft.is_trained is None else np.asarray(draft.is_trained, np.bool_)
    return EncodedPart(np.asarray(draft.ids, np.int64), mask)


def _starts(offsets: Sequence[Span]) -> Array:
    return np.asarray(offsets, np.int64).reshape(-1, 2)[:, 0]


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
