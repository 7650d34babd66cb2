"""`ChatText`: messages as text by the tokenizer's chat template, and which characters of it are trained.

An answer is what the template writes for the conversation up to it, after what it writes for the conversation before it
with the generation prompt, up to the tokens that end a turn; with `{% generation %}` marks, what these cover of it. The
answers of a chat are one sample if the text of the whole chat begins with the text up to each of them; otherwise, as
where a template drops earlier thinking, each answer is a sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from .formats import BadRecord, Chat, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span: TypeAlias = "tuple[int, int]"

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = re.compile(r"</?think>")
_QUESTION, _ANSWER = "loopwright question", "loopwright answer"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "loopwright_call", "arguments": {"key": "value"}}}
# Keys of messages that name something for programs, not for the model.
_NAMES = ("tool_call_id", "id")


@dataclass(frozen=True, slots=True)
class Spanned:
    """A text and the ranges of its characters that are trained; None for all.

    Attributes:
        text: Written by the template.
        spans: In order.
        has_end: Whether the tokens that end a turn are trained.
    """

    text: str
    spans: tuple[Span, ...] | None
    has_end: bool = True


@dataclass(frozen=True, slots=True)
class _Closing:
    """What a template writes after an answer that is the last message, and how much of it are end tokens."""

    text: str
    end: int


class ChatText:
    """Renders chats by the tokenizer's template.

    Args:
        tokenizer: Has a chat template.
        train_on: "assistant", "last" or "all".

    Attributes:
        notes: What the template left out of the chats so far, and where generation begins differently from training.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str) -> None:
        self._tokenizer, self._train_on = tokenizer, train_on
        self.notes: dict[str, None] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = re.compile(_any_of(special))
        self._last_special = re.compile(rf"(?:{_any_of(special)})(?=\s*$)")
        # After an answer, only the template writes: any added token may end it there.
        self._end = _any_of({str(token) for token in added} | special)
        self._closing: _Closing | None = None
        self._following: dict[bool, str] = {}  # whether an answer has calls -> what begins the next turn
        self._has_parts: bool | None = None  # whether the template takes the content as a list of parts
        self._forms: dict[tuple[bool, bool], tuple[bool, bool]] = {}  # of calls, by what they have

    def render(self, chat: Chat) -> list[Spanned]:
        """Return the samples of a chat: one, or one for each trained answer if the template demands it.

        Raises:
            BadRecord: The template refuses the messages or does not write an answer, or there is none to train.
        """
        chat = self._fit(chat)
        turns = [index for index, one in enumerate(chat.messages) if one["role"] == "assistant"]
        full, _ = self._write(chat, len(chat.messages))
        for message in chat.messages:
            if message["role"] != "assistant":
                self._note_unwritten(chat, message, full)
        if self._train_on == "all":
            return [self._whole(chat, turns[-1], full) if turns else Spanned(full, None)]
        chosen = [index for index in turns if index >= chat.first_trained and index not in chat.untrained]
        if not chosen:
            got = "none that is trained" if turns else "none"
            raise BadRecord(f"Expected at least one message of the assistant, got {got}.")
        parts = [self._turn(chat, index) for index in (chosen[-1:] if self._train_on == "last" else chosen)]
        if parts[-1].text.startswith(full):
            full = parts[-1].text  # with the token that begins the next turn
        if not all(full.startswith(part.text[: _end_of(part)]) for part in parts):
            return parts
        spans = tuple(span for part in parts for span in part.spans or ())
        return [Spanned(full, spans, any(part.has_end for part in parts))]

    def prompt(self, messages: list[Message]) -> str:
        """Return the text before the next answer, as training has it.

        Raises:
            BadRecord: The template refuses the messages.
        """
        return self._write(self._fit(Chat(messages)), len(messages), prompt=True)[0]

    def end_tokens(self) -> list[str]:
        """Return the tokens that end an answer and a call; none if the template refuses both."""
        found: dict[str, None] = {}
        # Two calls: the end of one call does not end the turn.
        for answer in ({"content": _ANSWER}, {"content": None, "tool_calls": [_CALL, _CALL]}):
            question = {"role": "user", "content": _QUESTION}
            try:
                chat = self._fit(Chat([question, {"role": "assistant", **answer}]))
                turn = self._ended(chat, 1, self._write(chat, 2)[0], 0)
            except BadRecord:
                continue
            if turn.has_end and not _missing(_pieces(chat.messages[1]), turn.text):
                found[re.findall(self._end, turn.text[: _end_of(turn)])[-1]] = None
        return list(found)

    def _whole(self, chat: Chat, index: int, full: str) -> Spanned:
        """Return a fully trained chat, with the end of its last answer."""
        last = self._ended(chat, index, self._write(chat, index + 1)[0], 0)
        if missing := _missing(_pieces(chat.messages[index]), last.text):
            raise _unwritten(index, missing)
        return Spanned(last.text if last.text.startswith(full) else full, None, last.has_end)

    def _turn(self, chat: Chat, index: int) -> Spanned:
        """Return the text up to an answer with it, and the ranges of the answer."""
        has_marks, message = self._has_marks(chat), chat.messages[index]
        text, marks = self._write(chat, index + 1)
        self._note_unwritten(chat, message, text)
        before, earlier = "", list[Span]()
        try:
            before, earlier = self._write(chat, index, prompt=True) if index else (self._first_prompt(chat, text), [])
            start, is_seen = (
                (len(before), True) if text.startswith(before) else self._diverging(chat, index, before, text)
            )
        except BadRecord:
            if not has_marks:
                raise
            before, start, is_seen = "", 0, False
        if is_seen:
            moved = len(before) - start
            marks = [(first + moved, end + moved) for first, end in marks]
            text, start = before + text[start:], len(before)
        turn = self._ended(chat, index, text, start)
        if missing := _missing(_pieces(message), turn.text[start:]):
            if continued := self._continued(chat, index, before):
                return continued
            raise _unwritten(index, missing)
        if start < len(before):
            self.notes[
                f"The chat template's generation prompt ends with {before[start:]!r}, which it does not write before "
                "all answers: generation begins with it, training does not."
            ] = None
        if not has_marks:
            return turn
        marked = _marked(turn, marks[len(earlier) :])
        if index and not start and (missing := _missing(_pieces(message), _trained(marked))):
            raise BadRecord(
                f"Expected marks that cover all of the answer in message {index + 1}, got none of {missing!r}."
            )
        return marked

    def _first_prompt(self, chat: Chat, text: str) -> str:
        """Return the prompt of an answer that is the first message, after what the template may write by itself."""
        header = self._header(Chat([self._shaped({"role": "user"}, _QUESTION)]), 1)
        if header in text:
            return text[: text.index(header) + len(header)] if header else self._write(chat, 0, prompt=True)[0]
        raise BadRecord("Expected a message before the first answer, got none.")

    def _diverging(self, chat: Chat, index: int, before: str, text: str) -> tuple[int, bool]:
        """Return where an answer begins in a text that does not begin with the answer's prompt.

        Another answer in its place shows what the text before both is. Also return whether `before` can stand there
        instead, as it does in generation: where the template writes earlier messages otherwise when this one follows,
        or where only white space differs. It cannot where the prompt opens a block for thinking that is not there in a
        finished message.
        """
        other, _ = self._write(_but(chat, index, self._answer()), index + 1)
        same, header = text[: _common(other, text)], self._header(chat, index)
        start = same.rfind(header) + len(header)
        last = _content(chat.messages[index - 1])
        if header and header in same and last and last not in other[start : other.rfind(_ANSWER)]:
            return start, True
        start = _common(before, same)
        if start < len(self._write(chat, index)[0]):
            raise BadRecord(
                f"Expected a template that renders the messages before message {index + 1} alike with and without it, "
                f"got texts that differ at character {start} ({text[start : start + 20]!r})."
            )
        return start, not before[start:].strip()

    def _header(self, chat: Chat, count: int) -> str:
        """Return what the generation prompt adds to the first messages."""
        before, after = (self._write(chat, count, prompt=prompt)[0] for prompt in (False, True))
        return after[len(before) :] if after.startswith(before) else ""

    def _ended(self, chat: Chat, index: int, text: str, start: int) -> Spanned:
        """Return the answer that starts there: to the tokens that end its turn, else to the end of the text."""
        closing = self._close(chat, index)
        if closing.end and text.endswith(closing.text):
            end = len(text) - len(closing.text) + closing.end
            return Spanned(text, ((start, end),))
        if not closing.end and (following := self._follow(chat, index)):
            return Spanned(text + following, ((start, len(text + following)),))
        # Calls may end differently from answers. A special token after an answer without an end belongs to the answer.
        has_other = closing.end or chat.messages[index].get("tool_calls")
        if has_other and (last := self._last_special.search(text, start)):
            return Spanned(text, ((start, last.end()),))
        return Spanned(text, ((start, len(text)),), has_end=False)

    def _continued(self, chat: Chat, index: int, before: str) -> Spanned | None:
        """Return an answer as generation writes it after a prompt that opens its thinking, which the template drops.

        None if the prompt does not end with the answer's beginning.
        """
        message, closing = chat.messages[index], self._close(chat, index)
        content, prompt = _content(message).lstrip(), before.rstrip()
        sizes = range(min(len(content), len(prompt)), 1, -1)
        same = next((size for size in sizes if prompt.endswith(content[:size])), 0)
        if not same or content[0].isalnum() or not closing.end or message.get("tool_calls"):
            return None
        text = before + content[same:].lstrip()
        return Spanned(text + closing.text, ((len(before), len(text) + closing.end),))

    def _close(self, chat: Chat, index: int) -> _Closing:
        """Return what the template writes after an answer in place of this one."""
        if self._closing is None:
            text, _ = self._write(_but(chat, index, self._answer()), index + 1)
            behind = text.partition(_ANSWER)[2]
            tokens = re.search(rf"(?:{self._end})+", behind)
            self._closing = _Closing(behind, tokens.end() if tokens else 0)
        return self._closing

    def _follow(self, chat: Chat, index: int) -> str:
        """Return the token that begins the next turn, and what is before it, in a template without end tokens."""
        has_calls = bool(chat.messages[index].get("tool_calls"))
        if has_calls not in self._following:
            here = chat if has_calls else _but(chat, index, self._answer())
            role = "tool" if has_calls else "user"
            more = replace(here, messages=[*here.messages[: index + 1], self._shaped({"role": role}, _QUESTION)])
            try:
                text, longer = self._write(here, index + 1)[0], self._write(more, index + 2)[0]
            except BadRecord:  # a template without tools: what is at the end of the text decides
                text, longer = "", ""
            if not has_calls:  # a further question may change how earlier answers are written
                text, longer = (one.rpartition(_ANSWER)[2] for one in (text, longer))
            found = re.match(rf"\s*(?:{self._end})", longer[len(text) :]) if longer.startswith(text) else None
            self._following[has_calls] = found.group() if found else ""
        return self._following[has_calls]

    def _fit(self, chat: Chat) -> Chat:
        """Return a chat in the forms that the template takes."""
        if self._has_parts is None:
            self._has_parts = self._takes_parts()
        if self._has_parts:
            shaped = [self._shaped(one, one["content"]) if one["content"] else one for one in chat.messages]
            chat = replace(chat, messages=shaped)
        return self._fit_calls(chat) if any(one.get("tool_calls") for one in chat.messages) else chat

    def _takes_parts(self) -> bool:
        """Return whether a text appears as a list of parts only, as in some templates of models with images."""
        for parts in (False, True):
            self._has_parts = parts
            try:
                if _QUESTION in self._write(Chat([self._shaped({"role": "user"}, _QUESTION)]), 1)[0]:
                    return parts
            except BadRecord:
                continue
        return False

    def _fit_calls(self, chat: Chat) -> Chat:
        """Return a chat whose calls the template writes: arguments as an object or text, no content as None or "".

        If there is no such form, it is the first one that the template accepts.
        """
        calls = [call["function"]["arguments"] for one in chat.messages for call in one.get("tool_calls", ())]
        kind = any(calls), all(one["content"] for one in chat.messages)
        known = (
            [self._forms[kind]] if kind in self._forms else [(False, False), (True, False), (False, True), (True, True)]
        )
        first: Chat | None = None
        problem: BadRecord | None = None
        for form in known:
            fitted = replace(chat, messages=[_in_form(one, *form) for one in chat.messages])
            try:
                text, _ = self._write(fitted, len(fitted.messages))
            except BadRecord as error:
                problem = problem or error
                continue
            first = first or fitted
            if _has_calls(fitted, text):
                self._forms[kind] = form
                return fitted
        if first is None and problem is not None:
            raise problem
        return first or chat

    def _answer(self) -> Message:
        return self._shaped({"role": "assistant"}, _ANSWER)

    def _shaped(self, message: Message, content: str) -> Message:
        return {**message, "content": [{"type": "text", "text": content}] if self._has_parts else content}

    def _note_unwritten(self, chat: Chat, message: Message, text: str) -> None:
        """Note which parts of a message the template does not write."""
        role = message["role"]
        if role != "assistant" and _missing([_content(message)], text):
            self.notes[f"The chat template does not write all messages of role {role!r}."] = None
        for key, value in message.items():
            if key in ("role", "content", "tool_calls", *_NAMES):
                continue
            is_text = isinstance(value, str)
            if _missing([value], text) if is_text else key not in self._template(chat):
                self.notes[f"The chat template does not write {key!r} of messages."] = None

    def _template(self, chat: Chat) -> str:
        return str(self._tokenizer.get_chat_template(None, chat.tools))

    def _has_marks(self, chat: Chat) -> bool:
        return bool(_MARKS.search(self._template(chat)))

    def _write(self, chat: Chat, count: int, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text of the first messages, and the ranges that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = chat.messages[:count]
        if not messages and not prompt:
            return "", []
        options: dict[str, Any] = {  # Any: values for the template
            **self._tokenizer.special_tokens_map,
            **chat.options,
            "chat_template": self._template(chat),
            "add_generation_prompt": prompt,
            "return_assistant_tokens_mask": self._has_marks(chat),
        }
        try:
            texts, marks = cast(
                "tuple[list[str], list[list[Span]]]", render_jinja_template([messages], chat.tools, **options)
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            if not messages:
                raise BadRecord("Expected a message before the first answer, got none.") from error
            roles = ", ".join(message["role"] for message in messages)
            raise BadRecord(f"Expected messages that the chat template accepts, got {roles}: {error}") from error
        return texts[0], [(first, end) for first, end in marks[0] if first < end] if marks else []


def _any_of(tokens: Iterable[str]) -> str:
    """Return a pattern of tokens, longest first: a token may be the beginning of another."""
    return "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token) or "(?!)"


def _but(chat: Chat, index: int, message: Message) -> Chat:
    """Return the chat up to a message, with another one in its place."""
    return replace(chat, messages=[*chat.messages[:index], message])


def _common(first: str, second: str) -> int:
    """Return the length of what two texts begin with."""
    same = (a == b for a, b in zip(first, second, strict=False))
    return next((at for at, is_same in enumerate(same) if not is_same), min(len(first), len(second)))


def _trained(part: Spanned) -> str:
    return "".join(part.text[first:end] for first, end in part.spans or ())


def _end_of(part: Spanned) -> int:
    return part.spans[-1][1] if part.spans else len(part.text)


def _marked(turn: Spanned, marks: Sequence[Span]) -> Spanned:
    """Return the parts of an answer that the template marks."""
    ((start, end),) = turn.spans or ()
    spans: list[Span] = []
    for first, last in ((max(a, start), min(b, end)) for a, b in marks):
        if spans and spans[-1][1] == first < last:
            spans[-1] = spans[-1][0], last
        elif first < last:
            spans.append((first, last))
    if not spans:
        raise BadRecord("Expected the template's generation marks to cover an answer, got none that does.")
    return Spanned(turn.text, tuple(spans), turn.has_end and spans[-1][1] == end)


def _content(message: Message) -> str:
    content = message["content"]
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _pieces(message: Message) -> list[str]:
    """Return what a template has to write for an answer: its thinking, its text, and the names in its calls."""
    pieces = [piece.strip() for piece in _THINKING.split(_content(message))]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    arguments = [
        json.loads(one["arguments"]) if isinstance(one["arguments"], str) else one["arguments"] for one in functions
    ]
    names = [name for one, keys in zip(functions, arguments, strict=True) for name in (one["name"], *keys)]
    return [piece for piece in [*pieces, *names] if piece]


def _unwritten(index: int, missing: str) -> BadRecord:
    shown = repr(missing if len(missing) <= 40 else f"{missing[:37]}...")
    return BadRecord(
        f"Expected the chat template to write all of the answer in message {index + 1}, got a text without {shown}."
    )


def _missing(pieces: Iterable[str], text: str) -> str:
    """Return the first piece that is not in a text, whatever its white space, and whether it is escaped as in JSON."""
    squeezed = ""
    for piece in pieces:
        if piece in text:
            continue
        squeezed = squeezed or "".join(text.split())
        forms = (piece, json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1])
        if not any("".join(form.split()) in squeezed for form in forms):
            return piece
    return ""


def _in_form(message: Message, is_text: bool, is_empty_text: bool) -> Message:
    """Return a message whose calls have arguments as text or as an object, and None or "" as missing content."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        given = call["function"]["arguments"]
        if isinstance(given, str) != is_text:
            given = json.dumps(given, ensure_ascii=False) if is_text else json.loads(given)
        calls.append({**call, "function": {**call["function"], "arguments": given}})
    return {**message, "content": message["content"] or ("" if is_empty_text else None), "tool_calls": calls}


def _has_calls(chat: Chat, text: str) -> bool:
    """Return whether a text has the calls of a chat, and none of Python's words for what is in them."""
    for message in chat.messages:
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in text or (arguments and repr(arguments) in text):
                return False
    return "None" not in text or all(message["content"] is not None for message in chat.messages)
