"""Kinds of records, prompts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from loopwright.recipes.data.formats import (
    BadRecord,
    Chat,
    Ids,
    LeftOut,
    Prompted,
    Text,
    find_kind,
    to_example,
    unread_keys,
)

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
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert chat.messages == [{"role": "assistant", "content": None, "tool_calls": calls}]


CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED_AS_TEXT = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
PARTS = [{"type": "text", "text": "one "}, {"type": "output_text", "text": "two"}]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "one two"}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        ({"role": "tool", "content": {"sum": 3}}, {"role": "tool", "content": '{"sum": 3}'}),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"role": "assistant", "content": None, "tool_calls": [CALLED_AS_TEXT]},
        ),
        (
            {"role": "assistant", "tool_calls": '[{"name": "add", "arguments": {"a": 1}}]'},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        ),
        (
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        ),
        ({"from": "observation", "value": "3"}, {"role": "tool", "content": "3"}),
        ({"role": "model", "content": "3"}, {"role": "assistant", "content": "3"}),
        ({"role": "ai", "content": "3"}, {"role": "assistant", "content": "3"}),
        ({"role": "human", "content": "3", "name": "Eve"}, {"role": "user", "content": "3", "name": "Eve"}),
    ],
)
def test_messages_of_other_programs_are_read(message: Any, expected: Any) -> None:
    assert read({"messages": [message]}, "chat").messages == [expected]


def test_what_stands_beside_messages_is_part_of_the_chat() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "assistant", "content": "c", "weight": 1},
    ]
    tool = {"name": "add", "parameters": {}}
    record = {"messages": messages, "system": "s", "functions": [tool], "chat_template_kwargs": {"thinking": False}}
    chat = read(record, "chat")
    assert [one["content"] for one in chat.messages] == ["s", "a", "b", "c"]
    assert chat.untrained == {2}
    assert chat.tools == [{"type": "function", "function": tool}]
    assert chat.options == {"thinking": False}
    assert read({"messages": messages, "tools": '[{"name": "add", "parameters": {}}]'}, "chat").tools == chat.tools
    assert not any("weight" in one for one in chat.messages)


def test_a_history_is_part_of_instruct_data() -> None:
    chat = read({**ALPACA, "history": [["q", "a"]]}, "instruct", has_template=True)
    assert [one["content"] for one in chat.messages] == ["q", "a", "Add.\n\n1 and 2", "3"]


@pytest.mark.parametrize("record", [{"messages": [{"role": "assistant", "content": "a"}]}, PAIR, ALPACA])
def test_a_wrong_answer_is_left_out(record: Any) -> None:
    kind = find_kind(record) or ""
    with pytest.raises(LeftOut, match="label=false"):
        read({**record, "label": False}, kind, has_template=True)
    assert read({**record, "label": True}, kind, has_template=True)


@pytest.mark.parametrize(
    ("record", "style", "unread"),
    [
        ({"messages": [], "system": "s", "tools": [], "id": 7, "label": 3, "source": None}, None, ["id", "label"]),
        ({**ALPACA, "system": "s", "history": [], "label": True}, None, []),
        ({**ALPACA, "system": "s"}, "alpaca", ["system"]),
        ({**ALPACA, "system": "s"}, "{system} {instruction}", ["input"]),
        ({**PAIR, "input": "i"}, "{prompt}", ["input"]),
        ({"text": "a", "url": "b"}, None, ["url"]),
    ],
)
def test_keys_that_are_not_read_are_found(record: Any, style: str | None, unread: list[str]) -> None:
    assert unread_keys(record, find_kind(record) or "", style, has_template=True) == unread


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
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "chat",
            "Expected the parts of message 1 t",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "chat", "Expected the parts of message 1 to be text, got"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "chat", "Expected tool_calls of message 1 to be a"),
        ({"instruction": "a", "output": "b", "history": 5}, "instruct", "Expected history to be a list of pairs"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": 5}, "chat", "Expected tools to be a list of obj"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "chat",
            "Expected the calls of message 1 to have a",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "a=1"}]}]},
            "chat",
            "Expected the arguments of 'f' in message 1 to be JSON",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "weight": 0.5}]},
            "chat",
            "Expected the weight of a message to",
        ),
        (
            {"messages": [{"role": "system", "content": "a"}], "system": "b"},
            "chat",
            "Expected one system message, got another one",
        ),
        ({**ALPACA, "history": [["a", "b"]]}, "instruct", "Expected no history beside a prompt_style"),
        ({**ALPACA, "output": ""}, "instruct", "Expected an answer in output, got an empty text."),
        ({**PAIR, "prompt": 1}, "completion", "Expected prompt to be a text, got 1."),
        ({"text": 3}, "text", "Expected text to be a text, got 3."),
        ({"input_ids": []}, "ids", "Expected input_ids to be a list of token ids, got an empty list."),
        ({"input_ids": [1, 2], "labels": [1]}, "ids", "Expected as many labels as input_ids (2), got 1."),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "ids", "Expected label 0 to be input_ids[0]=1 or -100, got 2."),
    ],
)
def test_what_a_kind_does_not_have_is_named(record: Any, kind: str, message: str) -> None:
    with pytest.raises(BadRecord) as error:
        read(record, kind, "plain")
    assert str(error.value).startswith(message)


def test_an_unknown_role_is_left_to_the_template() -> None:
    messages = [{"role": "critic", "content": "a"}, {"role": "ipython", "content": "b"}]
    made = read({"messages": messages}, "chat")
    assert isinstance(made, Chat)
    assert [one["role"] for one in made.messages] == ["critic", "ipython"]
