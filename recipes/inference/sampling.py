"""Sampling of tokens from a model, and their text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .model import OpenedModel, num_positions
from .prompts import end_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

# Any in this file: models of transformers and peft.


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: Largest number of tokens of an answer.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Number of the most probable tokens that are considered; None for all.
        top_p: Share of the probability that is considered, the most probable tokens first.
        seed: Of the random choice; None for a different one each time.
        use_cache: Whether keys and values of earlier tokens are kept; the tokens are the same without, later.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int | None = None
    use_cache: bool = True

    def problems(self) -> list[str]:
        """Return every invalid setting as `name: Expected ..., got ...`."""
        problems = []
        if self.max_new_tokens < 1:
            problems.append(f"max_new_tokens: Expected at least 1, got {self.max_new_tokens}.")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature: Expected 0 or more, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top_k: Expected at least 1, or null for all tokens, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p: Expected a share in (0, 1], got {self.top_p}.")
        return problems


@dataclass(frozen=True)
class Answer:
    """What a model has written.

    Attributes:
        text: Without special tokens.
        ids: Its tokens, the one that ended it included.
        stopped_by: "end" after an end token, "length" after the largest number of tokens, "context" at the model's last
            position.
        duration_s: Seconds.
    """

    text: str
    ids: list[int]
    stopped_by: str
    duration_s: float


def length_problem(prompt_tokens: int, model: Any) -> str:
    """Return why a prompt cannot be continued; empty if it can."""
    if prompt_tokens == 0:
        return "prompt: Expected at least one token, got none."
    limit = num_positions(model)
    if limit is None or prompt_tokens < limit:
        return ""
    return f"prompt: Expected fewer tokens than the model's {limit} positions, got {prompt_tokens}."


def sample(
    opened: OpenedModel, prompt: Sequence[int], sampling: Sampling, write: Callable[[str], object] | None = None
) -> Answer:
    """Continue a prompt.

    The global random generators are left as they were.

    Args:
        opened: The model.
        prompt: Tokens, at least one, and fewer than the model has positions.
        sampling: How tokens are chosen. The answer also ends with the model's context.
        write: Called with each piece of text when it is known.
    """
    model, tokenizer = opened.model, opened.tokenizer
    stops = end_tokens(model, tokenizer)
    limit = num_positions(model)
    if limit is not None:
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, limit - len(prompt)))
    streamer = _Streamer(TextPieces(tokenizer, write))
    ids = torch.tensor([list(prompt)], device=opened.device)
    started = time.perf_counter()
    devices = [ids.device] if ids.device.type == "cuda" else []
    with torch.inference_mode(), torch.random.fork_rng(devices), _without_own_config(model):
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_generation_config(opened, sampling, stops),
            streamer=streamer,
        )
    new = [int(one) for one in out[0, ids.shape[1] :]]
    full = "context" if len(prompt) + len(new) == limit else "length"
    stopped_by = "end" if new and new[-1] in stops else full
    return Answer(streamer.pieces.text, new, stopped_by, time.perf_counter() - started)


class TextPieces:
    """Text of tokens that come one by one; a character of several tokens appears when it is complete.

    Args:
        tokenizer: Decodes them.
        write: Called with each piece of text.

    Attributes:
        text: All of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object] | None = None) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        # Decoding begins at a token whose text is out already: the first token of a text may lose its space.
        self._start = self._end = 0
        self.text = ""

    def add(self, ids: Sequence[int]) -> None:
        """Add tokens."""
        self._ids += ids
        known, text = self._decode(self._start, self._end), self._decode(self._start, None)
        if text.endswith("\ufffd"):
            return
        self._put(text[len(known) :])
        self._start, self._end = self._end, len(self._ids)

    def finish(self) -> None:
        """Write what is left: bytes that do not make a character."""
        known, text = self._decode(self._start, self._end), self._decode(self._start, None)
        self._put(text[len(known) :])
        self._start = self._end = len(self._ids)

    def _decode(self, start: int, end: int | None) -> str:
        return str(
            self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _put(self, text: str) -> None:
        self.text += text
        if text and self._write is not None:
            self._write(text)


class _Streamer:
    """What `generate` calls with the prompt first, and then with each token."""

    def __init__(self, pieces: TextPieces) -> None:
        self.pieces = pieces
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.pieces.add(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        self.pieces.finish()


@contextmanager
def _without_own_config(model: Any) -> Iterator[None]:
    """Replace the model's configuration: `generate` reads from it whatever the passed one does not set."""
    from transformers import GenerationConfig

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    owners = [base] if base is model else [base, model]  # a PeftModel has a separate reference
    before = [one.generation_config for one in owners]
    for one in owners:
        one.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for one, config in zip(owners, before, strict=True):
            one.generation_config = config


def _generation_config(opened: OpenedModel, sampling: Sampling, stops: list[int]) -> GenerationConfig:
    """Return a configuration that depends on the settings and the tokens only, not on the model's."""
    from transformers import GenerationConfig

    pad = opened.tokenizer.pad_token_id
    choice: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        choice = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
        }
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=pad if pad is not None else next(iter(stops), None),
        use_cache=sampling.use_cache,
        **choice,
    )
