"""`ChatText`: messages as text by the tokenizer's chat template, and which characters of it are trained.

Three ways, the first that the template allows:

1. `{% generation %}` marks in the template say what the assistant writes.
2. The text up to each assistant message, with the generation prompt, is rendered; what the message adds to it is
   trained, up to the end-of-turn token. This needs a template that renders earlier messages alike whatever follows.
3. A template that renders them differently, such as one that drops earlier thinking, gives one sample for each
   assistant message: the conversation up to it, in which only it is trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .formats import BadRecord, Chat, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatText", "MarkedIds", "Span", "Spanned"]

Span: TypeAlias = "tuple[int, int]"

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Spanned:
    """A text and the ranges of its characters that are trained; None for all."""

    text: str
    spans: tuple[Span, ...] | None


@dataclass(frozen=True, slots=True)
class MarkedIds:
    """Tokens, and which of them are trained."""

    ids: list[int]
    is_trained: list[bool]


class ChatText:
    """Renders chats by the tokenizer's template.

    Args:
        tokenizer: Has a chat template.
        train_on: "assistant", "last" or "all".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        added = tokenizer.added_tokens_decoder.values()
        names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        # Longest first: a token may be the beginning of another.
        self._special = sorted((name for name in names if name), key=len, reverse=True)

    def render(self, chat: Chat) -> list[Spanned] | list[MarkedIds]:
        """Return the samples of a chat: one, or one for each trained message if the template demands it.

        Raises:
            BadRecord: The template refuses the messages, or there is no message to train.
        """
        messages = chat.messages
        if self._train_on == "all":
            return [Spanned(self._text(chat, len(messages)), None)]
        turns = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
        turns = [index for index in turns if index >= chat.first_trained]
        if not turns:
            raise BadRecord("Expected at least one message of the assistant, got none.")
        if self._train_on == "last":
            turns = turns[-1:]
        if self._has_marks(chat):
            return [self._from_marks(chat, turns)]
        return self._from_prefixes(chat, turns)

    def _has_marks(self, chat: Chat) -> bool:
        return bool(_MARKS.search(self._tokenizer.get_chat_template(None, chat.tools)))

    def _from_marks(self, chat: Chat, turns: Sequence[int]) -> MarkedIds:
        """Return the tokens of a chat, of which those in the last `len(turns)` marked ranges are trained."""
        out = self._apply(chat.messages, chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = list(out["input_ids"]), [bool(one) for one in out["assistant_masks"]]
        starts = [at for at, one in enumerate(marks) if one and (at == 0 or not marks[at - 1])]
        if not starts:
            raise BadRecord("Expected the template's generation marks to cover an answer, got none that does.")
        first = starts[max(0, len(starts) - len(turns))]
        return MarkedIds(ids, [one and at >= first for at, one in enumerate(marks)])

    def _from_prefixes(self, chat: Chat, turns: Sequence[int]) -> list[Spanned]:
        full = self._text(chat, len(chat.messages))
        parts = [self._turn(chat, index, full) for index in turns]
        if all(full.startswith(part.text) for part in parts):
            return [Spanned(full, tuple(span for part in parts for span in part.spans or ()))]
        return parts

    def _turn(self, chat: Chat, index: int, full: str) -> Spanned:
        """Return the text up to an assistant message with it, and the range that it adds."""
        is_last = index + 1 == len(chat.messages)
        through = full if is_last else self._text(chat, index + 1)
        before = self._text(chat, index, add_generation_prompt=True)
        start = len(before) if through.startswith(before) else self._diverging(chat, index, before, through)
        return Spanned(through, ((start, self._end_of_turn(through, start)),))

    def _diverging(self, chat: Chat, index: int, before: str, through: str) -> int:
        """Return where an answer begins in a template whose generation prompt writes more than the message has.

        Some prompts open a block for thinking that is not there in a finished message.
        """
        same = (a == b for a, b in zip(before, through, strict=False))
        start = next((at for at, is_same in enumerate(same) if not is_same), min(len(before), len(through)))
        if start < len(self._text(chat, index)):
            raise BadRecord(
                f"Expected a template that renders the messages before message {index + 1} alike with and without it, "
                f"got texts that differ at character {start} ({through[start : start + 20]!r})."
            )
        return start

    def _end_of_turn(self, text: str, start: int) -> int:
        """Return the end of the answer that starts there: behind its end-of-turn token, else the end of the text."""
        end = len(text)
        rest = text[start:].rstrip()
        while token := next((one for one in self._special if rest.endswith(one)), ""):
            end = start + len(rest)
            rest = rest[: -len(token)].rstrip()
        return end

    def _text(self, chat: Chat, count: int, *, add_generation_prompt: bool = False) -> str:
        if count == 0:
            return self._empty(chat) if add_generation_prompt else ""
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        text = self._apply(chat.messages[:count], chat.tools, **options)
        assert isinstance(text, str)
        return text

    def _empty(self, chat: Chat) -> str:
        """Return the generation prompt without messages, for a conversation that begins with an answer."""
        try:
            return str(self._apply([], chat.tools, tokenize=False, add_generation_prompt=True))
        except BadRecord as error:
            raise BadRecord("Expected a message before the first answer, got none.") from error

    def _apply(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> Any:
        # Any: options of the tokenizer, and text or tokens by these.
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = ", ".join(message["role"] for message in messages) or "no messages"
            raise BadRecord(f"Expected messages that the chat template accepts, got {roles}: {error}") from error
