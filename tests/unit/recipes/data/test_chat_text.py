"""Masks of chats under templates of eight styles: what is trained, compared as text."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_texts import CHATML, small_tokenizer

from loopwright.recipes.data.encoding import Encoder
from loopwright.recipes.data.formats import BadRecord, Chat, Prompted, to_example
from loopwright.recipes.inference.prompts import end_tokens

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


def test_a_history_that_changes_with_the_answer_is_that_of_generation() -> None:
    template = "{{ messages | length }}" + CHATML
    tokenizer = small_tokenizer(template)
    for at, sample in zip((1, 3), samples(tokenizer, TWO_TURNS), strict=True):
        prompt = tokenizer.apply_chat_template(TWO_TURNS[:at], tokenize=False, add_generation_prompt=True)
        assert sample == [(prompt, False), (f"{TWO_TURNS[at]['content']}<|im_end|>", True), ("\n", False)]


def test_a_history_that_the_answer_becomes_part_of_is_refused() -> None:
    template = (
        "{% for one in messages %}{% if loop.first or loop.previtem.role != one.role %}<|im_start|>{{ one.role }}\n"
        "{% endif %}{{ one.content }}{% if loop.last or loop.nextitem.role != one.role %}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(BadRecord, match="renders the messages before message 3 alike"):
        samples(small_tokenizer(template), [*ask("one"), {"role": "assistant", "content": "two"}])


def test_marks_that_cover_nothing_are_refused() -> None:
    template = MARKED.replace("message.role == 'assistant'", "message.role == 'bot'")
    with pytest.raises(BadRecord, match="generation marks to cover an answer"):
        samples(small_tokenizer(template), TWO_TURNS)


def test_messages_of_a_prompt_are_not_trained() -> None:
    tokenizer = small_tokenizer()
    encoder = Encoder(tokenizer, "assistant")
    ((draft,),) = encoder.drafts(Chat(TWO_TURNS, first_trained=3))
    assert [draft.text[first:end] for first, end in draft.spans] == ["five, of  course.\n<|im_end|>"]


def test_end_tokens_of_generation_are_those_of_the_template() -> None:
    from types import SimpleNamespace

    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    for template, special, found in (
        (COHERE, COHERE_TOKENS, ["<|END|>"]),  # writes no calls
        (ROLES, ROLE_TOKENS, ["<|user|>", "<|observation|>"]),
    ):
        tokenizer = small_tokenizer(template, special=special, end=special[0])
        assert end_tokens(model, tokenizer) == sorted(tokenizer.convert_tokens_to_ids([special[0], *found]))


# The end of a turn.

COHERE = (  # the end of the answer and the end of the turn are two tokens
    "{% for message in messages %}<|START|><|{{ message.role }}|>{% if message.role == 'assistant' %}<|ANSWER|>"
    "{{ message.content }}<|/ANSWER|>{% else %}{{ message.content }}{% endif %}<|END|>{% endfor %}"
    "{% if add_generation_prompt %}<|START|><|assistant|><|ANSWER|>{% endif %}"
)
COHERE_TOKENS = ("<|eos|>", "<|START|>", "<|user|>", "<|assistant|>", "<|ANSWER|>", "<|/ANSWER|>", "<|END|>")
ROLES = (  # as of GLM-4: the next role ends a turn
    "{% for message in messages %}<|{{ 'observation' if message.role == 'tool' else message.role }}|>\n"
    "{{ message.content }}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROLE_TOKENS = ("<|eos|>", "<|user|>", "<|assistant|>", "<|observation|>", "</answer>")
OWN_TOKENS = (*CHATML_TOKENS, "</answer>", "</tool_call>", "</think>")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def ask(*answers: str) -> list[dict[str, Any]]:
    return [
        message
        for number, answer in enumerate(answers)
        for message in ({"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": answer})
    ]


@pytest.mark.parametrize("answer", ["<answer>2</answer>", "a</tool_call>", "\\boxed{2}", "b</think> </answer>\n"])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_that_ends_with_a_special_token_is_trained_with_the_end_of_its_turn(
    answer: str, template: str
) -> None:
    (sample,) = samples(small_tokenizer(template, special=OWN_TOKENS), ask(answer, "two"))
    assert trained(sample) == [f"{answer}<|im_end|>", "two<|im_end|>"]


def test_a_turn_that_ends_with_two_tokens_is_trained_with_both() -> None:
    tokenizer = small_tokenizer(COHERE, special=COHERE_TOKENS, end="<|eos|>")
    (sample,) = samples(tokenizer, ask("one", "two"))
    assert trained(sample) == ["one<|/ANSWER|><|END|>", "two<|/ANSWER|><|END|>"]


def test_a_turn_that_the_next_role_ends_is_trained_with_it() -> None:
    tokenizer = small_tokenizer(ROLES, special=ROLE_TOKENS, end="<|eos|>")
    called = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<answer>2</answer>"},
    ]
    (sample,) = samples(tokenizer, ask("one", "two</answer>"))
    assert trained(sample) == ["one<|user|>", "two</answer><|user|>"]
    (sample,) = samples(tokenizer, called)
    assert trained(sample) == [
        json.dumps(CALL["function"]) + "<|observation|>",
        "<answer>2</answer><|user|>",
    ]


@pytest.mark.parametrize("answers", [("one",), ("one", "two", "three")])
def test_end_tokens_that_take_the_white_space_behind_them_are_trained(answers: tuple[str, ...]) -> None:
    # As of Phi-3: "<|end|>" swallows the line's end, and the text ends with another token.
    template = (
        "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = small_tokenizer(template, special=("<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"), end="<|eos|>")
    (sample,) = samples(swallowing(tokenizer), ask(*answers))
    assert trained(sample) == [f"{answer}<|end|>" for answer in answers]


def swallowing(tokenizer: Any) -> Any:
    """Return the tokenizer with special tokens that take the white space behind them."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in rules["added_tokens"]:
        token["rstrip"] = True
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(rules)), eos_token=tokenizer.eos_token
    )
    made.chat_template = tokenizer.chat_template
    return made


def test_everything_is_trained_with_the_end_of_the_last_turn() -> None:
    tokenizer = small_tokenizer(ROLES, special=ROLE_TOKENS, end="<|eos|>")
    (sample,) = samples(tokenizer, ask("one"), "all")
    assert trained(sample) == ["<|user|>\nQuestion 0?<|assistant|>\none<|user|>"]
    with pytest.raises(BadRecord, match="got a text without 'add'"):
        samples(small_tokenizer(), [*ask("one"), {"role": "assistant", "content": "", "tool_calls": [CALL]}], "all")


# Marks.

TWICE_MARKED = (  # thinking is a range of its own
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}<think>{{ message.reasoning_content }}</think>{% endgeneration %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_all_marks_of_an_answer_are_trained() -> None:
    messages = ask("one", "two", "three")
    for number, message in enumerate(messages[1::2]):
        message["reasoning_content"] = f"reason {number}"
    expected = [
        f"<think>reason {number}</think>{answer}<|im_end|>" for number, answer in enumerate(["one", "two", "three"])
    ]
    tokenizer = small_tokenizer(TWICE_MARKED)
    assert [trained(sample) for sample in samples(tokenizer, messages)] == [expected]
    assert [trained(sample) for sample in samples(tokenizer, messages, "last")] == [expected[2:]]


def test_of_answers_that_touch_the_last_alone_is_trained_on_request() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    )
    messages = [*ask("one"), {"role": "assistant", "content": "two"}]
    (sample,) = samples(small_tokenizer(template), messages, "last")
    assert sample == [("Question 0?\none<|im_end|>", False), ("two<|im_end|>", True)]


def test_marks_without_the_end_of_the_turn_are_found_beside_other_special_tokens() -> None:
    template = MARKED.replace("{{ message.content }}<|im_end|>{% endgen", "{{ message.content }}{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}<|im_end|>", 1
    )
    tokenizer = small_tokenizer(template, special=OWN_TOKENS)
    ((draft,),) = Encoder(tokenizer, "assistant").drafts(Chat(ask("<answer>2</answer>")))
    assert [draft.text[first:end] for first, end in draft.spans or ()] == ["<answer>2</answer>"]
    assert not draft.has_end


# What the template writes of messages.


def test_answers_of_weight_zero_are_not_trained() -> None:
    messages = ask("one", "two", "three")
    messages[3]["weight"] = 0
    chat = to_example({"messages": messages}, "chat", None, has_template=True)
    ((draft,),) = Encoder(small_tokenizer(), "assistant").drafts(chat)
    assert [draft.text[first:end] for first, end in draft.spans] == ["one<|im_end|>", "three<|im_end|>"]


CALLING = CHATML.replace(
    "{{ message.content }}<|im_end|>",
    "{{ message.content }}{% for call in message.tool_calls %}<call>{{ ARGUMENTS }}</call>{% endfor %}<|im_end|>",
)


@pytest.mark.parametrize(
    "template",
    [
        "call.function.name ~ ' ' ~ (call.function.arguments | tojson)",  # takes an object
        "call.function.name + ' ' + call.function.arguments",  # takes text
        "call.function.name ~ ' ' ~ call.function.arguments",  # writes Python's text of an object
    ],
)
@pytest.mark.parametrize("arguments", [{"a": "b"}, '{"a": "b"}'])
def test_arguments_are_written_once_as_json(template: str, arguments: Any) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": arguments}]}
    record = {"messages": [{"role": "user", "content": "1 + 1?"}, call]}
    tokenizer = small_tokenizer(CALLING.replace("ARGUMENTS", template))
    encoder, chat = Encoder(tokenizer, "assistant"), to_example(record, "chat", None, has_template=True)
    ((draft,),) = encoder.drafts(chat)
    assert [draft.text[first:end] for first, end in draft.spans] == ['<call>add {"a": "b"}</call><|im_end|>']


def test_a_call_that_the_template_does_not_write_is_refused() -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(BadRecord, match="all of the answer in message 2, got a text without 'add'"):
        samples(small_tokenizer(CHATML), messages)


CUTTING = (  # as of DeepSeek-R1: opens thinking, and cuts it away
    "{% for message in messages %}{% if message.role == 'user' %}<|user|>{{ message.content }}{% else %}<|assistant|>"
    "{{ message.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def test_thinking_that_the_template_cuts_away_is_trained_behind_the_prompt_that_opens_it() -> None:
    tokenizer = small_tokenizer(CUTTING, special=("<|end|>", "<|user|>", "<|assistant|>"), end="<|end|>")
    first, second = samples(tokenizer, ask("<think>easy</think>one", "<think>\nhard\n</think>\n\ntwo"))
    assert first == [("<|user|>Question 0?<|assistant|><think>\n", False), ("easy</think>one<|end|>", True)]
    assert trained(second) == ["hard\n</think>\n\ntwo<|end|>"]
    with pytest.raises(BadRecord, match="got a text without 'easy'"):
        samples(small_tokenizer(CUTTING.replace("<think>\n{% endif %}", "{% endif %}")), ask("<think>easy</think>one"))


@pytest.mark.parametrize("answer", ["<b>one</b>", "thin", "one"])
def test_a_prompt_that_opens_thinking_leaves_plain_answers_whole_and_is_named(answer: str) -> None:
    tokenizer = small_tokenizer(CUTTING, special=("<|end|>", "<|user|>", "<|assistant|>"), end="<|end|>")
    encoder = Encoder(tokenizer, "assistant")
    ((draft,),) = encoder.drafts(Chat(ask(answer)))
    assert [draft.text[first:end] for first, end in draft.spans] == [f"{answer}<|end|>"]
    assert [note[:57] for note in encoder.notes] == [
        "The chat template's generation prompt ends with '<think>\\n'"[:57]
    ]


def test_what_a_template_leaves_out_of_other_messages_is_noted_once() -> None:
    template = CHATML.replace("{{ message.content }}", "{{ message.content if message.role != 'critic' }}")
    encoder = Encoder(small_tokenizer(template), "assistant")
    for _ in range(2):
        critic = {"role": "critic", "content": "bad", "name": "Eve", "rating": 5}
        encoder.drafts(Chat([{**ask("one")[0], "tool_call_id": "7"}, critic, *ask("one")]))
    assert list(encoder.notes) == [
        "The chat template does not write all messages of role 'critic'.",
        "The chat template does not write 'name' of messages.",
        "The chat template does not write 'rating' of messages.",
    ]


def test_a_template_that_takes_lists_of_parts_gets_them() -> None:
    template = CHATML.replace("{{ message.content }}", "{% for part in message.content %}{{ part.text }}{% endfor %}")
    (sample,) = samples(small_tokenizer(template), TWO_TURNS)
    assert trained(sample) == ["two<|im_end|>", "five, of  course.\n<|im_end|>"]


# The tokens of an answer are those behind the tokens of its prompt.


@pytest.mark.parametrize(
    ("prompt", "answer"), [("Say: ", "the dog"), ("Q\n", "\nfox"), ("1 + 2 =", " 3"), ("a", "b"), ("Say:  ", " the")]
)
def test_prompts_have_the_tokens_of_generation(prompt: str, answer: str) -> None:
    tokenizer = merging_tokenizer()
    encoder = Encoder(tokenizer, "assistant")
    ((draft,),) = encoder.drafts(Prompted(prompt, answer))
    (part,) = encoder.encode([draft])
    assert part.ids[~part.is_trained].tolist() == tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(part.ids[part.is_trained]) == f"{answer}<|im_end|>"


def test_answers_that_begin_with_the_prompts_white_space_have_tokens_of_their_own() -> None:
    tokenizer = merging_tokenizer()
    messages = ask("\nfox", "\n\nthe dog")
    ((draft,),) = (encoder := Encoder(tokenizer, "assistant")).drafts(Chat(messages))
    (part,) = encoder.encode([draft])
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    joined = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert joined[: len(prompt)] != prompt  # what would be trained otherwise
    assert part.ids.tolist()[: len(prompt)] == prompt
    assert not part.is_trained[: len(prompt)].any()
    runs = groupby(zip(part.ids, part.is_trained, strict=True), key=lambda pair: pair[1])
    texts = [tokenizer.decode([token for token, _ in run]) for is_trained, run in runs if is_trained]
    assert texts == ["\nfox<|im_end|>", "\n\nthe dog<|im_end|>"]


def merging_tokenizer() -> Any:
    """Return a tokenizer with tokens for white space with what follows it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rules.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": list(CHATML_TOKENS), "initial_alphabet": alphabet, "show_progress": False}
    rules.train_from_iterator([" the", "\nfox", "\n\n", "ab"] * 9, trainers.BpeTrainer(vocab_size=290, **options))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


# Templates that TRL has twice: as their models have them, and with marks.

FOLDERS = [
    *(Path(one) / "chat_templates" for one in (getattr(find_spec("trl"), "submodule_search_locations", None) or ())),
    *Path(__file__).parents[4].glob(".venv-peers/lib/python3*/site-packages/trl/chat_templates"),
]
PAIRS = sorted(one.stem for folder in FOLDERS[:1] for one in folder.glob("*_training.jinja"))
TOKENS = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|</s>|<(?:start|end)_of_turn>|<end_of_utterance>"
)
NAMED_CALL = {"id": "call00001", **CALL}
CHATS = {
    "plain": ask("two", "five, of  course."),
    "tagged": ask("so <answer>2</answer>"),
    "thinking": ask("<think>\nhard one\n</think>\n\ntwo", "<think>\neasy one\n</think>\n\nfive"),
    "calls": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [NAMED_CALL]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It is 2."},
    ],
}
# These marks leave out: thinking, which this template cuts away with marks as well; the token that ends a call, and the
# header that the generation prompt does not write behind a tool's message. The last takes calls without content, where
# transformers' own rendering fails.
DIFFERENT = {("deepseekv3", "thinking"), ("diffusion_gemma", "calls"), ("deepseek_r1_distill", "calls")}


@pytest.mark.skipif(not PAIRS, reason="no chat templates of TRL: install trl, or make .venv-peers/installed")
@pytest.mark.parametrize("name", [one.removesuffix("_training") for one in PAIRS] or ["none"])
def test_answers_are_those_that_trl_marks(name: str) -> None:
    plain, marked = (trl_tokenizer(f"{name}{suffix}") for suffix in ("", "_training"))
    compared = set()
    for kind, messages in CHATS.items():
        record = to_example({"messages": messages}, "chat", None, has_template=True)
        try:
            found, also = ([trained(one) for one in samples(each, record.messages)] for each in (plain, marked))
        except BadRecord:  # no calls, or no tools, in this template
            continue
        for number, answer in enumerate(text for sample in found for text in sample):
            if (name, kind) not in DIFFERENT:
                marks = trl_marked(marked, shaped(f"{name}_training", messages[: 2 * number + 2]))
                before = shaped(name, messages[: 2 * number + 1])
                compare(answer, marks, plain.apply_chat_template(before, tokenize=False, add_generation_prompt=True))
        assert sum(map(len, also)) == sum(map(len, found))
        compared.add(kind)
    assert {"plain", "tagged", "thinking"} <= compared


def shaped(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that a template takes: with lists of parts, or the JSON text of arguments."""
    if name.startswith(("idefics3", "llava_next", "smolvlm")):
        return [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    called = [{**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}] if name == "deepseekv3" else [NAMED_CALL]
    return [{**one, "tool_calls": called} if "tool_calls" in one else one for one in messages]


def compare(answer: str, marked: str, prompt: str) -> None:
    """Check that marks cover an answer, and else what the prompt ends with and what is behind the end of the turn."""
    assert answer in marked
    before, _, behind = marked.partition(answer)
    assert before.strip() in prompt[-60:]
    assert behind.strip() in ("", "<|eos|>")


def trl_marked(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Return the last text that the marks cover, as transformers finds it."""
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    runs = groupby(zip(out["input_ids"], out["assistant_masks"], strict=True), key=lambda pair: pair[1])
    texts = [tokenizer.decode([token for token, _ in run]) for is_marked, run in runs if is_marked]
    return str(texts[-1])


def trl_tokenizer(name: str) -> Any:
    template = (FOLDERS[0] / f"{name}.jinja").read_text()
    special = tuple(dict.fromkeys(["<|eos|>", "<|bos|>", "</s>", *TOKENS.findall(template)]))
    end = "</s>" if name.startswith("llava") else "<|eos|>"
    return small_tokenizer(template, special=special, end=end, begin="<|bos|>")
