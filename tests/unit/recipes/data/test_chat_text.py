"""Masks of chats under templates of eight styles: what is trained, compared as text."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from recipe_texts import CHATML, small_tokenizer

from loopwright.recipes.data.encoding import Encoder
from loopwright.recipes.data.formats import BadRecord, Chat

CHATML_TOKENS = ("<|im_end|>", "<|im_start|>")
HEADERS = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HEADER_TOKENS = ("<|eot_id|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>")
TURNS = (  # without a role for the system, and another name for the assistant
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TURN_TOKENS = ("<end_of_turn>", "<bos>", "<start_of_turn>")
BRACKETS = (  # without a generation prompt; the answer begins with a space
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
BRACKET_TOKENS = ("</s>", "<s>", "[INST]", "[/INST]")
MARKED = (  # the marks cover the end token
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # drops the thinking of all answers but the last one
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("message.content", "message.content | trim")
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TWO_TURNS = [
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and  three?"},
    {"role": "assistant", "content": "five, of  course.\n"},
]
TEMPLATES = {
    "chatml": (CHATML, CHATML_TOKENS, None, ["two<|im_end|>", "five, of  course.\n<|im_end|>"]),
    "headers": (HEADERS, HEADER_TOKENS, "<|begin|>", ["two<|eot_id|>", "five, of  course.<|eot_id|>"]),
    "turns": (TURNS, TURN_TOKENS, "<bos>", ["two<end_of_turn>", "five, of  course.<end_of_turn>"]),
    "brackets": (BRACKETS, BRACKET_TOKENS, "<s>", [" two</s>", " five, of  course.\n</s>"]),
    "marked": (MARKED, CHATML_TOKENS, None, ["two<|im_end|>", "five, of  course.\n<|im_end|>"]),
    "forgetful": (FORGETFUL, CHATML_TOKENS, None, ["two<|im_end|>", "five, of  course.\n<|im_end|>"]),
    "trimming": (TRIMMING, CHATML_TOKENS, None, ["two<|im_end|>", "five, of  course.<|im_end|>"]),
    "strict": (STRICT, CHATML_TOKENS, None, ["two<|im_end|>", "five, of  course.\n<|im_end|>"]),
}


def samples(
    tokenizer: Any, messages: list[dict[str, Any]], train_on: str = "assistant"
) -> list[list[tuple[str, bool]]]:
    """Return each sample of a chat as texts, each with whether it is trained."""
    encoder = Encoder(tokenizer, train_on)
    found = []
    for drafts in encoder.drafts(Chat(messages)):
        (part,) = encoder.encode(drafts)
        mask = np.ones(len(part.ids), bool) if part.is_trained is None else part.is_trained
        runs = groupby(zip(part.ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1])
        found.append([(tokenizer.decode([token for token, _ in run]), is_trained) for is_trained, run in runs])
    return found


def trained(sample: list[tuple[str, bool]]) -> list[str]:
    return [text for text, is_trained in sample if is_trained]


def tokenizer_of(name: str) -> Any:
    template, special, begin, _ = TEMPLATES[name]
    return small_tokenizer(template, special=special, end=special[0], begin=begin)


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_with_their_end_tokens_are_trained(name: str) -> None:
    tokenizer = tokenizer_of(name)
    (sample,) = samples(tokenizer, TWO_TURNS)
    assert trained(sample) == TEMPLATES[name][3]
    assert "".join(text for text, _ in sample) == tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_those_that_the_template_makes(name: str) -> None:
    tokenizer = tokenizer_of(name)
    encoder = Encoder(tokenizer, "assistant")
    ((draft,),) = encoder.drafts(Chat(TWO_TURNS))
    (part,) = encoder.encode([draft])
    assert part.ids.tolist() == list(tokenizer.apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_answer_alone_is_trained_on_request(name: str) -> None:
    (sample,) = samples(tokenizer_of(name), TWO_TURNS, "last")
    assert trained(sample) == TEMPLATES[name][3][1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_everything_is_trained_on_request(name: str) -> None:
    tokenizer = tokenizer_of(name)
    (sample,) = samples(tokenizer, TWO_TURNS, "all")
    assert trained(sample) == [tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)]


def test_a_template_that_drops_thinking_gives_a_sample_per_answer() -> None:
    messages = [dict(message) for message in TWO_TURNS]
    messages[1]["content"] = "<think>easy</think>two"
    messages[3]["content"] = "<think>add</think>five"
    first, second = samples(tokenizer_of("forgetful"), messages)
    assert trained(first) == ["<think>easy</think>two<|im_end|>"]
    assert trained(second) == ["<think>add</think>five<|im_end|>"]
    assert "easy" not in "".join(text for text, _ in second)


def test_a_generation_prompt_that_opens_thinking_is_no_part_of_a_plain_answer() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    (sample,) = samples(small_tokenizer(template), TWO_TURNS)
    assert trained(sample) == ["two<|im_end|>", "five, of  course.\n<|im_end|>"]


def test_a_template_without_an_end_token_trains_to_the_end_of_the_answer() -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    (sample,) = samples(small_tokenizer(template + prompt), TWO_TURNS[:2])
    assert trained(sample) == ["two\n"]


def test_words_that_begin_with_a_space_are_trained_where_tokens_keep_it() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE(unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", *BRACKET_TOKENS], show_progress=False)
    rules.train_from_iterator(["one and two? five, of course three."] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = BRACKETS
    encoder = Encoder(tokenizer, "assistant")
    ((draft,),) = encoder.drafts(Chat([*TWO_TURNS[:3], {"role": "assistant", "content": "five, of course."}]))
    (part,) = encoder.encode([draft])
    pieces = tokenizer.convert_ids_to_tokens(part.ids[part.is_trained].tolist())
    assert "".join(pieces).replace("▁", " ") == " two</s> five, of course.</s>"


@pytest.mark.parametrize(
    ("name", "roles", "message"),
    [
        ("turns", ["system", "user", "assistant"], "got system, user, assistant: System role not supported"),
        ("strict", ["user", "user", "assistant"], "got user, user, assistant: Roles must alternate"),
        ("chatml", ["user"], "Expected at least one message of the assistant, got none"),
    ],
)
def test_messages_that_a_template_refuses_are_named(name: str, roles: list[str], message: str) -> None:
    messages = [{"role": role, "content": "a"} for role in roles]
    with pytest.raises(BadRecord, match=message):
        samples(tokenizer_of(name), messages)


def test_a_history_that_changes_with_the_answer_is_refused() -> None:
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(BadRecord, match="renders the messages before message 2 alike"):
        samples(small_tokenizer(template), TWO_TURNS)


def test_marks_that_cover_nothing_are_refused() -> None:
    template = MARKED.replace("message.role == 'assistant'", "message.role == 'bot'")
    with pytest.raises(BadRecord, match="generation marks to cover an answer"):
        samples(small_tokenizer(template), TWO_TURNS)


def test_messages_of_a_prompt_are_not_trained() -> None:
    tokenizer = small_tokenizer()
    encoder = Encoder(tokenizer, "assistant")
    ((draft,),) = encoder.drafts(Chat(TWO_TURNS, first_trained=3))
    assert [draft.text[first:end] for first, end in draft.spans] == ["five, of  course.\n<|im_end|>"]
