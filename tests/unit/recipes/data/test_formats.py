"""Kinds of records, prompts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from loopwright.recipes.data.formats import BadRecord, Chat, Ids, Prompted, Text, find_kind, to_example

ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
PAIR = {"prompt": "1 + 2 =", "completion": " 3"}


def read(value: Any, kind: str, style: str | None = None, *, has_template: bool = False) -> Any:
    return to_example(value, kind, style, has_template=has_template)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"messages": []}, "chat"),
        ({"conversations": []}, "chat"),
        ({**ALPACA, "text": "all of it"}, "instruct"),
        (PAIR, "completion"),
        ({"input_ids": [1], "labels": [1]}, "ids"),
        ({"text": "a", "url": "b"}, "text"),
        ({"url": "b"}, None),
        (["text"], None),
    ],
)
def test_keys_decide_about_the_kind(record: Any, kind: str | None) -> None:
    assert find_kind(record) == kind


@pytest.mark.parametrize(
    ("record", "kind", "style", "prompt"),
    [
        (ALPACA, "instruct", "alpaca", "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n"),
        ({**ALPACA, "input": ""}, "instruct", "alpaca", "### Instruction:\nAdd.\n\n### Response:\n"),
        (ALPACA, "instruct", "plain", "Add.\n\n1 and 2\n\n"),
        (ALPACA, "instruct", "{instruction} ({input}) -> ", "Add. (1 and 2) -> "),
        (PAIR, "completion", None, "1 + 2 ="),
        ({**PAIR, "prompt": "{x}"}, "completion", "Q: {prompt}\nA:", "Q: {x}\nA:"),
    ],
)
def test_styles_write_prompts(record: Any, kind: str, style: str | None, prompt: str) -> None:
    answer = record.get("output") or record["completion"]
    assert read(record, kind, style) == Prompted(prompt, answer)


def test_a_chat_template_writes_prompts_where_there_is_no_style() -> None:
    chat = read({**ALPACA, "system": "Be brief."}, "instruct", has_template=True)
    assert [(message["role"], message["content"]) for message in chat.messages] == [
        ("system", "Be brief."),
        ("user", "Add.\n\n1 and 2"),
        ("assistant", "3"),
    ]
    assert isinstance(read(ALPACA, "instruct", "alpaca", has_template=True), Prompted)


def test_messages_with_from_and_value_are_read() -> None:
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read(record, "chat") == Chat(expected)


def test_a_prompt_of_messages_is_not_trained() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chat = read({"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}, "completion")
    assert (len(chat.messages), chat.first_trained) == (4, 3)


def test_absent_keys_of_parquet_files_are_absent_for_templates() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    chat = read({"messages": [message]}, "chat")
    assert chat.messages == [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]


def test_labels_of_ids_are_a_mask() -> None:
    assert read({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "ids") == Ids([5, 6, 7], [False, True, True])
    assert read({"text": "a"}, "text") == Text("a")


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ([1], "chat", "Expected an object with keys, got [1]."),
        ({"text": "a"}, "chat", "Expected messages or conversations (chat data), got the keys text."),
        ({"messages": []}, "chat", "Expected a list of messages, got an empty list."),
        ({"messages": ["a"]}, "chat", "Expected message 1 to have role and content, got 'a'."),
        ({"messages": [{"role": "user"}]}, "chat", "Expected the content of message 1 to be text, got null."),
        ({"messages": [{"role": "assistant", "content": "\n"}]}, "chat", "Expected an answer in message 1, got an em"),
        (
            {"messages": [{"role": "asistant", "content": "a"}]},
            "chat",
            "Expected a known role in message 1, got 'asist",
        ),
        ({"conversations": [{"from": "gpt4", "value": "a"}]}, "chat", "Expected a known role in message 1, got 'gpt4'"),
        (
            {"messages": [{"role": "User", "content": "a"}]},
            "chat",
            "Expected a known role in message 1, got 'User' (did",
        ),
        ({**ALPACA, "output": ""}, "instruct", "Expected an answer in output, got an empty text."),
        ({**PAIR, "prompt": 1}, "completion", "Expected prompt to be a text, got 1."),
        ({"text": ""}, "text", "Expected text to be a text, got an empty text."),
        ({"input_ids": []}, "ids", "Expected input_ids to be a list of token ids, got an empty list."),
        ({"input_ids": [1, 2], "labels": [1]}, "ids", "Expected as many labels as input_ids (2), got 1."),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "ids", "Expected label 0 to be input_ids[0]=1 or -100, got 2."),
    ],
)
def test_what_a_kind_does_not_have_is_named(record: Any, kind: str, message: str) -> None:
    with pytest.raises(BadRecord) as error:
        read(record, kind, "plain")
    assert str(error.value).startswith(message)


def test_a_role_of_its_own_is_left_to_the_template() -> None:
    messages = [{"role": "critic", "content": "a"}, {"role": "function_call", "content": "b"}]
    made = read({"messages": messages}, "chat")
    assert isinstance(made, Chat)
    assert [one["role"] for one in made.messages] == ["critic", "function_call"]
