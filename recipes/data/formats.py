"""Records as examples: the kind of a record by its keys, and the checks of what it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeGuard

from .settings import PROMPT_FIELDS, PROMPT_STYLES
from .sources import Json, JsonObject

Message: TypeAlias = "dict[str, Any]"  # Any: what a template reads, by the keys that it knows

# Kind -> sets of keys; a record of this kind has one of these sets. The order counts: some data sets also have text.
KEYS: dict[str, tuple[frozenset[str], ...]] = {
    "chat": (frozenset({"messages"}), frozenset({"conversations"})),
    "completion": (frozenset({"prompt", "completion"}),),
    "instruct": (frozenset({"instruction", "output"}),),
    "ids": (frozenset({"input_ids"}),),
    "text": (frozenset({"text"}),),
}
# Further keys that a kind reads; of "chat", and of completions that become one, also `_CHAT`.
_CHAT = frozenset({"system", "tools", "functions", "chat_template_kwargs"})
_MORE = {"instruct": frozenset({"input", "history"}), "ids": frozenset({"labels"})}
# Names of roles in OpenAI's older form, ShareGPT, LLaMA-Factory and others; "function_call" is the assistant's too.
ROLES = {
    **dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
    "human": "user",
}
# Templates may have others; one that is nearly one of these is a mistake, and would silently not be trained.
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", *ROLES)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_NEARLY = 0.8  # "asistant" and "gpt4" are mistakes; "ipython" is a role of some templates


class BadRecord(ValueError):
    """A record is not what its kind expects: `Expected ..., got ...`."""


class LeftOut(Exception):
    """A record is not trained; the text gives the reason."""


class NoTemplate(BadRecord):
    """A record needs a chat template, which the tokenizer does not have."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the tokenizer's chat template.

    Attributes:
        messages: With `role`, `content` as text or None, and calls in `tool_calls`, each with `function`.
        tools: Descriptions of tools for the template.
        first_trained: Index of the first message that may be trained; earlier ones are a prompt.
        untrained: Indices of answers that are not trained, by their weight of 0.
        options: Further arguments of the template.
    """

    messages: list[Message]
    tools: list[Any] | None = None  # Any: what transformers annotates
    first_trained: int = 0
    untrained: frozenset[int] = frozenset()
    options: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt and its answer as text."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document; all of it is trained."""

    text: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Tokens, and which of them are trained; None for all."""

    ids: list[int]
    is_trained: list[bool] | None


Example: TypeAlias = "Chat | Prompted | Text | Ids"


def find_kind(value: Json) -> str | None:
    """Return the kind of a record by its keys; None if it has none."""
    if not isinstance(value, Mapping):
        return None
    return next((kind for kind, sets in KEYS.items() if any(keys <= set(value) for keys in sets)), None)


def to_example(value: Json, kind: str, style: str | None, *, has_template: bool) -> Example:
    """Return the example that a record holds.

    Args:
        value: The record.
        kind: "chat", "instruct", "completion", "text" or "ids".
        style: `prompt_style` of the settings.
        has_template: Whether the tokenizer has a chat template, which then writes prompts if there is no style.

    Raises:
        BadRecord: It has other keys, or a value is invalid.
        LeftOut: It is marked as a wrong answer (`label`: false), or a text is empty.
    """
    if not isinstance(value, Mapping):
        raise BadRecord(f"Expected an object with keys, got {_brief(value)}.")
    if not any(keys <= set(value) for keys in KEYS[kind]):
        expected = " or ".join(" and ".join(sorted(keys)) for keys in KEYS[kind])
        raise BadRecord(f"Expected {expected} ({kind} data), got {_keys(value)}.")
    if kind == "text":
        if value["text"] is None or (isinstance(value["text"], str) and not value["text"].strip()):
            raise LeftOut("an empty text")
        return Text(_text(value, "text"))
    if kind == "ids":
        return _to_ids(value)
    if value.get("label") is False:
        raise LeftOut("label=false")
    if kind == "chat":
        return _chat(value, value["messages"] if "messages" in value else value["conversations"])
    if kind == "completion" and isinstance(value["prompt"], list):
        return _to_chat_completion(value)
    if style is None and has_template:
        return _from_prompt(value, kind)
    return _to_prompted(value, kind, style)


def unread_keys(value: Json, kind: str, style: str | None, *, has_template: bool) -> list[str]:
    """Return the keys of a record that its example does not depend on; arguments as of `to_example`."""
    if not isinstance(value, Mapping):
        return []
    read = {key for keys in KEYS[kind] for key in keys} | _MORE.get(kind, frozenset())
    is_chat = kind == "chat" or (kind != "text" and isinstance(value.get("prompt"), list))
    if is_chat or (kind in ("instruct", "completion") and style is None and has_template):
        read |= _CHAT
    elif kind in ("instruct", "completion"):
        pattern = PROMPT_STYLES.get(style or "plain", style or "")
        read = read - {"input"} | {name for name in PROMPT_FIELDS if f"{{{name}" in pattern}
        read |= {"input"} if kind == "instruct" and "{prompt" in pattern else set()
    if kind not in ("text", "ids") and isinstance(value.get("label"), bool):
        read |= {"label"}
    return [key for key, part in value.items() if key not in read and part not in (None, "", [], {})]


def _to_chat_completion(value: JsonObject) -> Chat:
    """Read a prompt and a completion that are lists of messages."""
    completion = value["completion"]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return _chat(value, value["prompt"], completion)


def _chat(value: JsonObject, messages: Json, completion: Json = None) -> Chat:
    """Return the chat of a record with the other entries that templates read.

    Args:
        value: The record.
        messages: A list of messages.
        completion: Messages that follow, which alone are trained; None trains all answers.
    """
    read = to_messages(messages)
    system = _optional(value, "system")
    if system and read[0]["role"] != "system":
        read = [{"role": "system", "content": system}, *read]
    elif system and read[0]["content"] != system:
        raise BadRecord("Expected one system message, got another one in system than in the messages.")
    first_trained = 0 if completion is None else len(read)
    read += [] if completion is None else to_messages(completion)
    weights = [message.pop("weight", 1) for message in read]
    if wrong := [weight for weight in weights if weight not in (0, 1)]:
        raise BadRecord(f"Expected the weight of a message to be 0 or 1, got {_brief(wrong[0])}.")
    options = value.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise BadRecord(f"Expected chat_template_kwargs to be an object, got {_brief(options)}.")
    untrained = frozenset(at for at, weight in enumerate(weights) if weight == 0)
    return Chat(read, _tools(value), first_trained, untrained, dict(options))


def _tools(value: JsonObject) -> list[Any] | None:
    """Return descriptions of tools in the form of OpenAI, made from JSON text or bare functions, too."""
    tools = _parsed(value.get("tools") or value.get("functions"), "tools")
    described = [tools] if isinstance(tools, Mapping) else _objects(tools or [])
    if described is None:
        raise BadRecord(f"Expected tools to be a list of objects, got {_brief(tools)}.")
    is_bare = [("name" in tool and "function" not in tool and "type" not in tool) for tool in described]
    wrapped = zip(described, is_bare, strict=True)
    return [{"type": "function", "function": tool} if bare else tool for tool, bare in wrapped] or None


def _objects(value: Json) -> list[JsonObject] | None:
    """Return a list of objects as it is; None for anything else."""
    found = [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else None
    return found if found == value else None


def _parsed(value: Json, name: str) -> Json:
    """Return the value of a JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        parsed: Json = json.loads(value) if value.strip() else None
    except ValueError as error:
        raise BadRecord(f"Expected {name} to be JSON, got {_brief(value)} ({error}).") from error
    return parsed


def to_messages(messages: Json, *, may_be_empty: bool = False) -> list[Message]:
    """Return messages with the roles, the text and the calls that templates take.

    Args:
        messages: In the form of OpenAI, ShareGPT, LLaMA-Factory or TRL.
        may_be_empty: Whether an answer may have no text.

    Raises:
        BadRecord: They are not messages.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRecord(f"Expected a list of messages, got {_brief(messages)}.")
    return [_message(message, number, may_be_empty) for number, message in enumerate(messages, 1)]


def _message(message: Json, number: int, may_be_empty: bool) -> Message:
    if isinstance(message, Mapping) and "from" in message and "value" in message and "role" not in message:
        others = {key: part for key, part in message.items() if key not in ("from", "value")}
        message = {"role": str(message["from"]), "content": message["value"], **others}
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str):
        raise BadRecord(f"Expected message {number} to have role and content, got {_brief(message)}.")
    if role not in KNOWN_ROLES and (near := get_close_matches(role.lower(), KNOWN_ROLES, n=1, cutoff=_NEARLY)):
        raise BadRecord(f"Expected a known role in message {number}, got {role!r} (did you mean {near[0]!r}?).")
    # Parquet files have every key in every message, with None where it is absent; templates test for presence.
    read: Message = {key: part for key, part in message.items() if part is not None}
    read["role"] = ROLES.get(role, role)
    calls = _parsed(read.pop("tool_calls", None), f"tool_calls of message {number}") or []
    if not isinstance(calls, list):
        raise BadRecord(f"Expected tool_calls of message {number} to be a list, got {_brief(calls)}.")
    calls = [*calls, read.pop("function_call")] if "function_call" in read else calls
    content: Json = read.get("content", read.pop("refusal", None))
    if role == "function_call":
        found, content = _parsed(content, f"the function call of message {number}"), None
        calls = found if isinstance(found, list) else [found]
    read["content"] = _content(content, number, read["role"])
    if calls:
        read["tool_calls"] = [_call(call, number) for call in calls]
    elif read["role"] == "assistant" and not may_be_empty and not (read["content"] or "").strip():
        raise BadRecord(f"Expected an answer in message {number}, got an empty one.")
    elif content is None:
        raise BadRecord(f"Expected the content of message {number} to be text, got null.")
    return read


def _content(content: Json, number: int, role: str) -> str | None:
    """Return the content of a message as text; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    has_types = isinstance(content, list) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and "type" in part) for part in content
    )
    if role == "tool" and not has_types:
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list):
        raise BadRecord(f"Expected the content of message {number} to be text, got {_brief(content)}.")
    return "".join(_part(part, number) for part in content)


def _part(part: Json, number: int) -> str:
    if isinstance(part, str):
        return part
    read = part if isinstance(part, Mapping) else {}
    kind = read.get("type")
    text = read.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        got = f"type {kind!r}" if kind else f"no type ({_brief(part)})"
        raise BadRecord(f"Expected the parts of message {number} to be text, got one of {got}.")
    return text


def _call(call: Json, number: int) -> JsonObject:
    """Return a call in OpenAI's form, with its arguments as an object or as the JSON text of one."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRecord(f"Expected the calls of message {number} to have a name, got {_brief(call)}.")
    arguments = function.get("arguments")
    parsed = _parsed(arguments, f"the arguments of {function['name']!r} in message {number}")
    if not isinstance(parsed, Mapping | None):
        raise BadRecord(
            f"Expected the arguments of {function['name']!r} in message {number} to be an object, got "
            f"{_brief(arguments)}."
        )
    has_text = isinstance(arguments, str) and parsed is not None
    named = {"name": function["name"], "arguments": arguments if has_text else parsed or {}}
    others = {} if function is call else {key: part for key, part in call.items() if part is not None}
    return {"type": "function", **others, "function": named}


def _from_prompt(value: JsonObject, kind: str) -> Chat:
    """Return messages for the chat template from instruct or completion data."""
    if kind == "instruct":
        parts = [_text(value, "instruction"), _optional(value, "input")]
        prompt, answer = "\n\n".join(part for part in parts if part), _answer(value, "output")
    else:
        prompt, answer = _text(value, "prompt"), _answer(value, "completion")
    roles = ("user", "assistant")
    said = [text for pair in _history(value, kind) for text in pair]
    messages: list[Json] = [{"role": roles[at % 2], "content": text} for at, text in enumerate([*said, prompt, answer])]
    return _chat(value, messages)


def _history(value: JsonObject, kind: str) -> list[list[str]]:
    """Return earlier pairs of a prompt and an answer, which instruct data may have."""
    pairs = value.get("history") or [] if kind == "instruct" else []
    found = [pair for pair in pairs if _is_pair(pair)] if isinstance(pairs, list) else None
    if found != pairs:
        raise BadRecord(f"Expected history to be a list of pairs of texts, got {_brief(pairs)}.")
    return found


def _is_pair(value: Json) -> TypeGuard[list[str]]:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)


def _to_prompted(value: JsonObject, kind: str, style: str | None) -> Prompted:
    if kind == "instruct" and style is None:
        raise NoTemplate("Expected a prompt_style or a tokenizer with a chat template for instruct data, got neither.")
    if _history(value, kind):
        raise BadRecord("Expected no history beside a prompt_style, which has no place for it, got one.")
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


def _to_ids(value: JsonObject) -> Ids:
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


def _is_ids(value: Json) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _text(value: JsonObject, key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise BadRecord(f"Expected {key} to be a text, got {_brief(text)}.")
    return text


def _optional(value: JsonObject, key: str) -> str:
    return _text(value, key) if value.get(key) else ""


def _answer(value: JsonObject, key: str) -> str:
    answer = value[key]
    if not isinstance(answer, str) or not answer.strip():
        raise BadRecord(f"Expected an answer in {key}, got {_brief(answer)}.")
    return answer


def _keys(value: JsonObject) -> str:
    return f"the keys {', '.join(map(str, value))}" if value else "no keys"


def _brief(value: Json) -> str:
    if value is None or value in ("", [], {}):
        return {"": "an empty text", "[]": "an empty list", "{}": "an empty object"}.get(str(value), "null")
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
