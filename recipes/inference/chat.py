"""`chat`: a conversation with a model on a terminal, or with lines from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import override

from ...errors import ConfigError
from ...messages import counted
from .model import InferenceSettings, OpenedModel, num_positions, open_any, quiet_transformers, raise_problems
from .prompts import find_prompt_style, render_chat
from .sampling import Sampling, length_problem, sample

# Any in this file: plain values for JSON.

_PROMPT, _ANSWER = "You: ", "Model: "
_ROOM = 4  # an answer gets at least this part of the context while earlier messages can be left out for it
_HELP = "/reset begins a new conversation, /exit ends the program, Ctrl-C ends an answer.\n"


@dataclass(frozen=True)
class ChatSettings(InferenceSettings):
    """Settings of `chat`, besides those of the model.

    Args:
        system: Message of the system, before the conversation.
        max_new_tokens: Largest number of tokens of an answer, which also ends with the model's context.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Number of the most probable tokens that are considered; None for all.
        top_p: Share of the probability that is considered, the most probable tokens first.
        seed: Of the random choice in the first answer, counted up for each further one; None for a different one
            each time.
    """

    system: str | None = None
    max_new_tokens: int = 500
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int | None = None

    def sampling(self, answer: int = 0) -> Sampling:
        """Return how the tokens of an answer are chosen."""
        seed = None if self.seed is None else self.seed + answer
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p, seed)

    @override
    def problems(self) -> list[str]:
        return [*super().problems(), *self.sampling().problems()]


@dataclass(frozen=True)
class ChatReport:
    """A finished conversation.

    Attributes:
        messages: Of the last conversation, with `role` and `content`.
        answers: Number of answers.
        new_tokens: Tokens of all answers.
        duration_s: Seconds in which answers were written.
    """

    messages: list[dict[str, str]]
    answers: int
    new_tokens: int
    duration_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def describe(self) -> str:
        """Return a line on the answers."""
        rate = self.new_tokens / max(self.duration_s, 1e-9)
        return f"{counted(self.answers, 'answer')}, {counted(self.new_tokens, 'token')} ({rate:.1f} per second)"


class Conversation:
    """Messages so far, and the answers of a model to them.

    Args:
        opened: The model.
        settings: How it answers.
        write: Called with each piece of text.
    """

    def __init__(self, opened: OpenedModel, settings: ChatSettings, write: Callable[[str], object]) -> None:
        self._opened, self._settings, self._write = opened, settings, write
        self.messages: list[dict[str, str]] = []
        self.answers = self.new_tokens = 0
        self.duration_s = 0.0

    def reset(self) -> None:
        """Begin a new conversation."""
        self.messages.clear()

    def say(self, text: str) -> str:
        """Add a message of the user, and return the answer; one that is interrupted is not kept.

        Raises:
            ConfigError: The message alone does not fit into the model's context.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        asked, prompt = self._fitting(asked)
        answer = sample(self._opened, prompt, self._settings.sampling(self.answers), self._write)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self.answers += 1
        self.new_tokens += len(answer.ids)
        self.duration_s += answer.duration_s
        return answer.text

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """Return a conversation and its tokens; if it leaves no room for an answer, without its first messages."""
        limit = num_positions(self._opened.model)
        room = 0 if limit is None else min(self._settings.max_new_tokens, limit // _ROOM)
        is_cut = False
        while True:
            ids = render_chat(messages, self._opened.tokenizer, system=self._settings.system)
            if limit is None or len(ids) + room <= limit or len(messages) < 3:
                break
            messages, is_cut = messages[2:], True
        problem = length_problem(len(ids), self._opened.model)
        if problem:
            raise ConfigError(problem, fix="write less.")
        if is_cut:
            self._write("(The conversation is longer than the model's context: its first messages are left out.)\n")
        return messages, ids


def chat(settings: ChatSettings) -> ChatReport:
    """Hold a conversation until /exit, or the end of the input.

    Lines are read from the standard input; if that is not a terminal, they are repeated in the output.

    Raises:
        ConfigError: Settings are invalid, or the tokenizer has no chat template.
    """
    raise_problems(settings.problems())
    with quiet_transformers():
        opened = open_any(settings)
        find_prompt_style("chat", opened.location, opened.tokenizer)
        talk = Conversation(opened, settings, _write)
        _write(f"Chat with {settings.model}. {_HELP}")
        for line in _lines():
            if line in ("/exit", "/quit"):
                break
            if line.startswith("/"):
                _obey(line, talk)
            elif line:
                _answer(line, talk)
    return ChatReport(talk.messages, talk.answers, talk.new_tokens, round(talk.duration_s, 3))


def _obey(command: str, talk: Conversation) -> None:
    if command == "/reset":
        talk.reset()
        _write("(new conversation)\n")
    else:
        _write(_HELP)


def _answer(line: str, talk: Conversation) -> None:
    _write(_ANSWER)
    try:
        talk.say(line)
    except KeyboardInterrupt:
        _write(" (interrupted)")
    except ConfigError as error:
        _write(f"({error.what})")
    _write("\n")


def _lines() -> Iterator[str]:
    """Yield lines of the standard input, without spaces around them."""
    if sys.stdin.isatty():
        import readline  # absent on Windows; it gives input() its history and its keys

        assert readline
    while True:
        try:
            line = input(_PROMPT) if sys.stdin.isatty() else _piped()
        except EOFError:
            _write("\n")
            return
        except KeyboardInterrupt:
            _write("\n")
            return
        yield line.strip()


def _piped() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    _write(f"{_PROMPT}{line.strip()}\n")
    return line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
