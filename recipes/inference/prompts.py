"""Prompts for generation: written as in training, by the chat template, a prompt style, or as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ..data.chat_text import ChatText
from ..data.encoding import first_tokens
from ..data.formats import BadRecord, Prompted, to_example, to_messages
from ..data.settings import DataSettings
from ..exporting.location import ModelLocation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any in this file: messages from JSON.
Message = Mapping[str, Any]

_CHAT, _TEXT = "chat", "text"
_ANSWER = "loopwright answer"


def find_prompt_style(asked: str, location: ModelLocation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return "chat", "text", or a style of `PROMPT_STYLES` or format string.

    "auto" is the style of the training, if that is known, else "chat" for a tokenizer with a chat template.

    Raises:
        ConfigError: It is unknown, or "chat" for a tokenizer without a template.
    """
    if asked == "auto":
        asked = _trained_style(location) or (_CHAT if tokenizer.chat_template else _TEXT)
    if asked == _CHAT and not tokenizer.chat_template:
        raise ConfigError(
            f"prompt_style: Expected a tokenizer with a chat template, got {location.tokenizer}, which has none.",
            fix="pass prompt_style=text, another style, or tokenizer=FOLDER with a chat template.",
        )
    if asked not in (_CHAT, _TEXT):
        problems = [one for one in DataSettings(data=".", prompt_style=asked).problems() if "prompt_style" in one]
        if problems:
            raise ConfigError(
                problems[0].replace("Expected ", "Expected auto, chat, text, ", 1), fix="pass one of them."
            )
    return asked


def render_prompt(
    prompt: str, style: str, tokenizer: PreTrainedTokenizerBase, *, system: str | None = None
) -> list[int]:
    """Return the tokens of a prompt, up to where the answer begins.

    Args:
        prompt: The user's text.
        style: From `find_prompt_style`.
        tokenizer: Has the chat template.
        system: Message of the system; of styles without a field for it, an error.
    """
    if style == _CHAT:
        return render_chat([{"role": "user", "content": prompt}], tokenizer, system=system)
    text = prompt if style == _TEXT else _styled(prompt, style, system)
    if system is not None and system not in text:
        raise ConfigError(
            f"system: Expected prompt_style=chat or a style with {{system}}, got prompt_style={style!r}.",
            fix="leave system out, or put it into the prompt.",
        )
    return [*first_tokens(tokenizer), *tokenizer(text, add_special_tokens=False)["input_ids"]]


def render_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, *, system: str | None = None
) -> list[int]:
    """Return the tokens of a conversation and the beginning of the next answer.

    Raises:
        ConfigError: The template refuses the messages.
    """
    first = [{"role": "system", "content": system}] if system is not None else []
    try:
        text = ChatText(tokenizer, "all").prompt(to_messages([*first, *messages], may_be_empty=True))
    except BadRecord as error:
        raise ConfigError(f"messages: {error}", fix="change the messages, or leave system out.") from error
    # Templates write special tokens themselves; a tokenizer that adds its own would double the first one.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_messages(messages: Path | str | Sequence[Message]) -> list[Message]:
    """Return messages from a JSON file (a list, or a mapping with `messages`), or as they are.

    Raises:
        ConfigError: They are not messages with `role` and `content`.
    """
    values: Any = messages
    if isinstance(messages, str | Path):
        try:
            values = json.loads(Path(messages).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"messages: Expected a JSON file, got {messages} ({error}).", fix="pass a file with a list of messages."
            ) from error
    values = values.get("messages") if isinstance(values, Mapping) else values
    is_valid = isinstance(values, Sequence) and all(isinstance(one, Mapping) and "role" in one for one in values)
    if not is_valid or not values:
        raise ConfigError(
            f"messages: Expected a list of messages with role and content, got {values!r}.",
            fix='pass [{"role": "user", "content": "..."}].',
        )
    return list(values)


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: the model's, the tokenizer's, and what its template ends a turn with.

    Args:
        model: Model of transformers, or a PeftModel.
        tokenizer: With or without a chat template.
    """
    configured = model.generation_config.eos_token_id
    found = list(configured) if isinstance(configured, list | tuple) else [configured]
    found.append(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        found += map(tokenizer.convert_tokens_to_ids, ChatText(tokenizer, "assistant").end_tokens())
    return sorted({int(token) for token in found if token is not None})


def _trained_style(location: ModelLocation) -> str | None:
    """Return the style of the training; None if it is not known."""
    trained = location.trained
    if trained.get("prompt_style"):
        return str(trained["prompt_style"])
    return _TEXT if trained.get("command") == "pretrain" or trained.get("kind") == "text" else None


def _styled(prompt: str, style: str, system: str | None) -> str:
    """Return a prompt in a style, as training data of completions are written."""
    record = {"prompt": prompt, "completion": _ANSWER, **({"system": system} if system else {})}
    example = to_example(record, "completion", style, has_template=False)
    assert isinstance(example, Prompted)
    return example.prompt
