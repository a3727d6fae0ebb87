"""Conversations in a user's data: accepted, or refused with their row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.dataset import load_prompts
from millrace.prompts.files import read_prompts
from millrace.prompts.messages import checked_messages, checked_tools
from millrace.types import Prompt

USER = {"role": "user", "content": "2 + 3?"}
CALL = {"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "name": "add"},
]


def calling(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}


def read(path: Path, text: str) -> list[Prompt]:
    path.write_text(text)
    return read_prompts(str(path), PromptsConfig(source=str(path)))


def test_json_text_of_messages_is_a_conversation_and_other_text_is_not(tmp_path: Path) -> None:
    written = json.dumps([USER]).replace('"', '""')
    [conversation] = read(tmp_path / "a.csv", f'messages,answer\n"{written}",5\n')
    assert (conversation.messages, conversation.text) == ((USER,), "2 + 3?")
    lists = ["[1, 2] reversed?", "[1, 2]", "[]", '[{"a": 1}]', "[{role}]"]
    rows = "".join(json.dumps({"prompt": text, "answer": "5"}) + "\n" for text in lists)
    assert [(prompt.text, prompt.messages) for prompt in read(tmp_path / "a.jsonl", rows)] == [(t, ()) for t in lists]


def test_messages_in_pythons_notation_are_refused_with_their_row(tmp_path: Path) -> None:
    with pytest.raises(PromptsError) as caught:
        read(tmp_path / "a.csv", f'prompt,answer\n"{[USER]}",5\n')
    assert caught.value.file == f"{tmp_path / 'a.csv'} row 1"


def test_parts_are_joined_and_arguments_read() -> None:
    system, user, assistant, tool = checked_messages(CONVERSATION, "a.jsonl line 1")
    assert user == USER
    assert assistant["content"] == ""
    assert assistant["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]
    assert (system, tool) == (CONVERSATION[0], CONVERSATION[3])


@pytest.mark.parametrize(
    ("messages", "place", "key", "read_there"),
    [
        ([], "", "the conversation", "[]"),
        ("hello", "", "the conversation", '"hello"'),
        (["hello"], " message 1", "the message", '"hello"'),
        ([{"role": "robot", "content": "a"}], " message 1", "role", '"robot"'),
        ([{"content": "a"}], " message 1", "role", "null"),
        ([{"role": "user"}], " message 1", "content", "null"),
        ([{"role": "user", "content": ""}], " message 1", "content", '""'),
        ([USER, {"role": "assistant", "content": "5"}], "", "the last message", "the assistant's"),
        ([{"role": "user", "content": [{"type": "image"}]}], " message 1", "a part of content", '{"type": "image"}'),
        ([{**USER, "tool_calls": [CALL]}], " message 1", "tool_calls", "set by the user"),
        ([{**USER, "masked": 1}], " message 1", '"masked"', "unknown"),
        ([{"role": "assistant", "content": "5", "weight": 0.5}, USER], " message 1", "weight", "0.5"),
        ([{"role": "assistant", "tool_calls": [{}]}, USER], " message 1", "a tool call", "{}"),
        ([calling("{a")], " message 1", "arguments of a tool call", "not JSON"),
        ([calling([1])], " message 1", "arguments of a tool call", "[1]"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_message(
    messages: object, place: str, key: str, read_there: str
) -> None:
    with pytest.raises(PromptsError) as caught:
        checked_messages(messages, "a.jsonl line 7")
    assert (caught.value.file, caught.value.key) == (f"a.jsonl line 7{place}", key)
    assert caught.value.read.startswith(read_there)


@pytest.mark.parametrize(
    "tools", ["[", '"add"', "[1]", '[{"function": {}}]', '[{"function": {"name": "a", "name": "b"}}]']
)
def test_what_is_no_list_of_functions_is_refused(tools: str) -> None:
    with pytest.raises(PromptsError) as caught:
        checked_tools(tools, "tools.json")
    assert caught.value.file == "tools.json"


@pytest.mark.parametrize("key", ["prompt", "messages"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_may_hold_conversations_and_tools(tmp_path: Path, key: str, suffix: str) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    records = [
        {key: [{"role": "user", "content": f"{n} + 1?"}], "tools": [tool], "answer": str(n + 1), "other": n}
        for n in range(3)
    ]
    path = tmp_path / f"asked.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    prompts = read_prompts(str(path), PromptsConfig(source=str(path)))
    assert [prompt.text for prompt in prompts] == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert [prompt.messages for prompt in prompts] == [tuple(record[key]) for record in records]
    assert [prompt.tools for prompt in prompts] == [(tool,)] * 3


def test_conversations_that_end_alike_are_different_prompts(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    records = [
        {"messages": [{"role": "system", "content": str(n)}, {"role": "user", "content": "and?"}], "answer": "1"}
        for n in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    prompts = load_prompts(PromptsConfig(source=str(path), num_eval=2))
    assert (len(prompts.train), len(prompts.eval)) == (4, 2)
    assert not {prompt.prompt_id for prompt in prompts.train} & {prompt.prompt_id for prompt in prompts.eval}
