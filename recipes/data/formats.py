"""Records as examples: the kind of a record by its keys, and the checks of what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from .settings import PROMPT_STYLES

# Any in this file: values from JSON.

__all__ = [
    "BadRecord",
    "Chat",
    "Example",
    "Ids",
    "Message",
    "NoTemplate",
    "Prompted",
    "Text",
    "find_kind",
    "to_example",
]

Message: TypeAlias = "dict[str, Any]"

# Kind -> sets of keys, one of which a record of this kind has. In this order: some data sets have text beside others.
KEYS: dict[str, tuple[frozenset[str], ...]] = {
    "chat": (frozenset({"messages"}), frozenset({"conversations"})),
    "completion": (frozenset({"prompt", "completion"}),),
    "instruct": (frozenset({"instruction", "output"}),),
    "ids": (frozenset({"input_ids"}),),
    "text": (frozenset({"text"}),),
}
# Names of roles in data with `conversations`, `from` and `value`.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "function": "tool"}
# Templates may have others; one that is nearly one of these is a mistake, and would silently not be trained.
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", *ROLES)
_NEARLY = 0.8  # "asistant" and "gpt4" are mistakes; "function_call" may be a role of a template


class BadRecord(ValueError):
    """A record is not what its kind expects: `Expected ..., got ...`."""


class NoTemplate(BadRecord):
    """A record needs a chat template, which the tokenizer does not have."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the tokenizer's chat template.

    Attributes:
        messages: With `role` and `content`.
        tools: Descriptions of tools for the template.
        first_trained: Index of the first message that may be trained; earlier ones are a prompt.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = 0


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt and its answer as text."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document, all of which is trained."""

    text: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Tokens, and which of them are trained; None for all."""

    ids: list[int]
    is_trained: list[bool] | None


Example: TypeAlias = "Chat | Prompted | Text | Ids"


def find_kind(value: Any) -> str | None:
    """Return the kind of a record by its keys; None if it has none."""
    if not isinstance(value, Mapping):
        return None
    return next((kind for kind, sets in KEYS.items() if any(keys <= set(value) for keys in sets)), None)


def to_example(value: Any, kind: str, style: str | None, *, has_template: bool) -> Example:
    """Return the example that a record holds.

    Args:
        value: The record.
        kind: "chat", "instruct", "completion", "text" or "ids".
        style: `prompt_style` of the settings.
        has_template: Whether the tokenizer has a chat template, which then writes prompts if there is no style.

    Raises:
        BadRecord: It has other keys, or a value is invalid.
    """
    if not isinstance(value, Mapping):
        raise BadRecord(f"Expected an object with keys, got {_brief(value)}.")
    if not any(keys <= set(value) for keys in KEYS[kind]):
        expected = " or ".join(" and ".join(sorted(keys)) for keys in KEYS[kind])
        raise BadRecord(f"Expected {expected} ({kind} data), got {_keys(value)}.")
    if kind == "chat":
        return _to_chat(value)
    if kind == "text":
        return Text(_text(value, "text"))
    if kind == "ids":
        return _to_ids(value)
    if kind == "completion" and isinstance(value["prompt"], list):
        return _to_chat_completion(value)
    if style is None and has_template:
        return _from_prompt(value, kind)
    return _to_prompted(value, kind, style)


def _to_chat(value: Mapping[str, Any]) -> Chat:
    messages = value["messages"] if "messages" in value else value["conversations"]
    return Chat(_messages(messages), value.get("tools") or None)


def _to_chat_completion(value: Mapping[str, Any]) -> Chat:
    """Read a prompt and a completion that are lists of messages."""
    prompt, completion = _messages(value["prompt"]), value["completion"]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return Chat(prompt + _messages(completion), value.get("tools") or None, len(prompt))


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRecord(f"Expected a list of messages, got {_brief(messages)}.")
    return [_message(message, number) for number, message in enumerate(messages, 1)]


def _message(message: Any, number: int) -> Message:
    if isinstance(message, Mapping) and "from" in message and "value" in message and "role" not in message:
        role = str(message["from"])
        message = {"role": ROLES.get(role, role), "content": message["value"]}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRecord(f"Expected message {number} to have role and content, got {_brief(message)}.")
    role = message["role"]
    if role not in KNOWN_ROLES and (near := get_close_matches(role.lower(), KNOWN_ROLES, n=1, cutoff=_NEARLY)):
        raise BadRecord(f"Expected a known role in message {number}, got {role!r} (did you mean {near[0]!r}?).")
    content, has_calls = message.get("content"), bool(message.get("tool_calls"))
    if not isinstance(content, str | list) and not (content is None and has_calls):
        raise BadRecord(f"Expected the content of message {number} to be text, got {_brief(content)}.")
    if message["role"] == "assistant" and not has_calls and not _has_text(content):
        raise BadRecord(f"Expected an answer in message {number}, got an empty one.")
    # Parquet files have every key in every message, with None where it is absent; templates test for presence.
    return {key: part for key, part in message.items() if part is not None or key == "content"}


def _has_text(content: Any) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


def _from_prompt(value: Mapping[str, Any], kind: str) -> Chat:
    """Return messages for the chat template from instruct or completion data."""
    if kind == "instruct":
        parts = [_text(value, "instruction"), _optional(value, "input")]
        prompt, answer = "\n\n".join(part for part in parts if part), _answer(value, "output")
    else:
        prompt, answer = _text(value, "prompt"), _answer(value, "completion")
    system = _optional(value, "system")
    start = [{"role": "system", "content": system}] if system else []
    return Chat([*start, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])


def _to_prompted(value: Mapping[str, Any], kind: str, style: str | None) -> Prompted:
    if kind == "instruct" and style is None:
        raise NoTemplate("Expected a prompt_style or a tokenizer with a chat template for instruct data, got neither.")
    answer = _answer(value, "output" if kind == "instruct" else "completion")
    fields = {"system": _optional(value, "system"), "input": _optional(value, "input")}
    if kind == "instruct":
        fields["instruction"] = _text(value, "instruction")
        fields["prompt"] = "\n\n".join(part for part in (fields["instruction"], fields["input"]) if part) + "\n\n"
    else:
        fields["instruction"] = fields["prompt"] = _text(value, "prompt")
    pattern = PROMPT_STYLES.get(style or "plain", style or "")
    if style == "alpaca" and not fields["input"]:
        pattern = pattern.replace("### Input:\n{input}\n\n", "")
    return Prompted(pattern.format(**fields), answer)


def _to_ids(value: Mapping[str, Any]) -> Ids:
    ids, labels = value["input_ids"], value.get("labels")
    if not _is_ids(ids) or min(ids) < 0:
        raise BadRecord(f"Expected input_ids to be a list of token ids, got {_brief(ids)}.")
    if labels is None:
        return Ids(list(ids), None)
    if not _is_ids(labels) or len(labels) != len(ids):
        got = f"{len(labels)}" if isinstance(labels, list) else _brief(labels)
        raise BadRecord(f"Expected as many labels as input_ids ({len(ids)}), got {got}.")
    for position, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, token):
            raise BadRecord(f"Expected label {position} to be input_ids[{position}]={token} or -100, got {label}.")
    return Ids(list(ids), [label != -100 for label in labels])


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _text(value: Mapping[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise BadRecord(f"Expected {key} to be a text, got {_brief(text)}.")
    return text


def _optional(value: Mapping[str, Any], key: str) -> str:
    return _text(value, key) if value.get(key) else ""


def _answer(value: Mapping[str, Any], key: str) -> str:
    answer = value[key]
    if not isinstance(answer, str) or not answer.strip():
        raise BadRecord(f"Expected an answer in {key}, got {_brief(answer)}.")
    return answer


def _keys(value: Mapping[str, Any]) -> str:
    return f"the keys {', '.join(map(str, value))}" if value else "no keys"


def _brief(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return {"": "an empty text", "[]": "an empty list", "{}": "an empty object"}.get(str(value), "null")
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
