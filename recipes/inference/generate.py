"""`generate`: the text with which a model continues a prompt or a conversation."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...errors import ConfigError
from ...messages import counted
from .model import InferenceSettings, open_any, quiet_transformers, raise_problems
from .prompts import find_prompt_style, read_messages, render_chat, render_prompt
from .sampling import Sampling, length_problem, sample

# Any in this file: plain values for JSON, and configurations of transformers.


@dataclass(frozen=True)
class GenerateSettings(InferenceSettings):
    """Settings of `generate`, besides those of the model.

    Args:
        prompt: A text; or pass `messages`.
        messages: A conversation to continue: a JSON file, or a list of mappings with `role` and `content`.
        system: Message of the system before it.
        prompt_style: How the prompt is written: "chat" by the chat template, "text" as it is, "alpaca", "plain", a
            format string, or "auto" as in training.
        max_new_tokens: Largest number of tokens of the answer, which also ends with the model's context.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Number of the most probable tokens that are considered; None for all.
        top_p: Share of the probability that is considered, the most probable tokens first.
        seed: Of the random choice; None for a different one each time.
        use_cache: Whether keys and values of earlier tokens are kept.
        stream: Whether the text is written to the standard output as it comes.
    """

    prompt: str | None = None
    messages: list[dict[str, Any]] | Path | None = None
    system: str | None = None
    prompt_style: str = "auto"
    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int | None = None
    use_cache: bool = True
    stream: bool = True

    def sampling(self) -> Sampling:
        """Return how tokens are chosen."""
        return Sampling(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.seed, use_cache=self.use_cache
        )

    @override
    def problems(self) -> list[str]:
        problems = [*super().problems(), *self.sampling().problems()]
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            problems.append(f"prompt: Expected either prompt or messages, got {got}.")
        return problems


@dataclass(frozen=True)
class GenerateReport:
    """What was written.

    Attributes:
        text: The answer, without special tokens.
        prompt_tokens: Tokens of the prompt.
        new_tokens: Tokens of the answer.
        stopped_by: "end" after an end token, "length" after `max_new_tokens`, "context" at the model's last position.
        duration_s: Seconds, without opening the model.
        prompt_style: How the prompt was written.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    stopped_by: str
    duration_s: float
    prompt_style: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def describe(self) -> str:
        """Return a line on the answer, which was written when it came."""
        rate = self.new_tokens / max(self.duration_s, 1e-9)
        return (
            f"{counted(self.new_tokens, 'token')} in {self.duration_s:.1f} s ({rate:.1f} per second), stopped by "
            f"{self.stopped_by}; prompt of {counted(self.prompt_tokens, 'token')} as {self.prompt_style}"
        )


def generate(settings: GenerateSettings) -> GenerateReport:
    """Continue a prompt, and write the text while it comes.

    Raises:
        ConfigError: Settings are invalid, or the prompt leaves no position in the model's context.
    """
    raise_problems(settings.problems())
    messages = None if settings.messages is None else read_messages(settings.messages)
    with quiet_transformers():
        opened = open_any(settings)
        style = find_prompt_style(settings.prompt_style, opened.location, opened.tokenizer)
        if messages is not None:
            style = find_prompt_style("chat", opened.location, opened.tokenizer)
            ids = render_chat(messages, opened.tokenizer, system=settings.system)
        else:
            ids = render_prompt(str(settings.prompt), style, opened.tokenizer, system=settings.system)
        problem = length_problem(len(ids), opened.model)
        if problem:
            raise ConfigError(problem, fix="pass another prompt.")
        answer = sample(opened, ids, settings.sampling(), _write if settings.stream else None)
    if settings.stream:
        _write("\n")
    return GenerateReport(answer.text, len(ids), len(answer.ids), answer.stopped_by, round(answer.duration_s, 3), style)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
