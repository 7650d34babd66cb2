"""Texts, chats and small tokenizers for the tests of recipes. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_LINE = "the quick brown fox jumps over a lazy dog while seven wizards count small boxes of liquid jugs"
WORDS = _LINE.split()

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentence(number: int, words: int = 6) -> str:
    """Return a sentence that depends on its number."""
    return " ".join(WORDS[(number * 7 + at * (number % 5 + 1)) % len(WORDS)] for at in range(words))


def chat(number: int, turns: int = 1) -> dict[str, Any]:
    """Return a record with messages whose answers have different lengths."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {number} {turn}: {sentence(number, 4)}?"})
        messages.append({"role": "assistant", "content": f"{sentence(number + turn, 3 + number % 7)}."})
    return {"messages": messages}


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one record per line and return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@cache
def _rules(special: tuple[str, ...]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(number, 12) for number in range(40)], trainer)
    return str(tokenizer.to_str())


def small_tokenizer(
    template: str | None = CHATML,
    *,
    special: tuple[str, ...] = ("<|im_end|>", "<|im_start|>"),
    end: str = "<|im_end|>",
    begin: str | None = None,
) -> Any:  # Any: transformers is imported where it is used
    """Return a byte-level tokenizer of 400 tokens.

    Args:
        template: Its chat template.
        special: Its special tokens.
        end: The one that ends texts.
        begin: The one that it puts before each text.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer.from_str(_rules(special))
    if begin is not None:
        pair = (begin, rules.token_to_id(begin))
        rules.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[pair])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token=end, bos_token=begin)
    tokenizer.chat_template = template
    return tokenizer
