"""Files of demonstrations: the prompt, the response to learn, and mistakes named with file and line."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.dataset import load_prompts
from millrace.prompts.files import read_prompts
from millrace.types import Demonstration, Prompt

USER, ASSISTANT = {"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}
TOOL = {"role": "tool", "content": "42"}


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "shown.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def read(source: str, *, learned: bool = True, **options: Any) -> list[Prompt]:
    return read_prompts(source, PromptsConfig(source=source, demonstrations=True, **options), learned=learned)


def test_a_conversation_is_learned_from_the_first_turn_of_the_assistant_on(tmp_path: Path) -> None:
    turns = [ASSISTANT, USER, {"role": "assistant", "content": "pong, pong"}]
    (prompt,) = read(written(tmp_path, {"messages": [USER, *turns]}))
    assert (prompt.messages, prompt.text) == ((USER,), "ping")
    assert prompt.demonstration == Demonstration(messages=tuple(turns))
    assert prompt.answer == "pong, pong"


def turn(text: str, **marks: object) -> dict[str, Any]:
    return {**ASSISTANT, "content": text, **marks}


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss_mask": 0}, {"trainable": False}, {"train": 0.0}])
def test_a_turn_that_the_data_excludes_is_not_learned(tmp_path: Path, mark: dict[str, Any]) -> None:
    said = [USER, turn("a", **mark), USER, turn("b", train=True), USER, turn("c", **mark), USER, turn("d", weight=1)]
    (prompt,) = read(written(tmp_path, {"messages": [*said, USER, turn("e", **mark)]}))
    assert prompt.messages == (USER, turn("a"), USER)
    assert prompt.demonstration == Demonstration(messages=(turn("b"), USER, turn("c"), USER, turn("d")), unlearned=(2,))
    assert prompt.answer == "d"


def test_a_response_of_its_own_is_all_that_is_learned_of_its_row(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ping", "response": "pong", "answer": "PONG"},
        {"prompt": [USER, ASSISTANT, USER], "response": "pong"},
    ]
    text, chat = read(written(tmp_path, *rows))
    assert (text.text, text.messages, text.answer) == ("ping", (), "PONG")
    assert chat.messages == (USER, ASSISTANT, USER)
    assert text.demonstration == chat.demonstration == Demonstration(messages=(ASSISTANT,))


def test_tables_have_demonstrations_too(tmp_path: Path) -> None:
    csv, parquet = tmp_path / "shown.csv", tmp_path / "shown.parquet"
    pa.csv.write_csv(pa.table({"question": ["ping"], "completion": ["pong"], "unused": [1]}), csv)
    (of_csv,) = read(str(csv), prompt_field="question", response_field="completion")
    pq.write_table(pa.Table.from_pylist([{"messages": [USER, ASSISTANT]}]), parquet)
    (of_parquet,) = read(str(parquet))
    assert of_csv.demonstration == of_parquet.demonstration == Demonstration(messages=(ASSISTANT,))


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": [USER]}, "the last message"),
        ({"messages": [USER, ASSISTANT, TOOL]}, "the last message"),
        ({"messages": [ASSISTANT]}, "the first message"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "message 3"),
        ({"messages": []}, "the conversation"),
        ({"messages": [USER, turn("a", weight=0)]}, "each turn of the assistant"),
        ({"prompt": "ping"}, "response"),
        ({"prompt": "ping", "response": ""}, "response"),
        ({"prompt": [USER, ASSISTANT], "response": "pong"}, "the last message"),
    ],
)
def test_a_row_without_a_response_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], key: str) -> None:
    source = written(tmp_path, {"messages": [USER, ASSISTANT]}, row)
    with pytest.raises(PromptsError) as caught:
        read(source)
    assert (caught.value.file, caught.value.key) == (f"{source} line 2", key)


def test_prompts_for_evaluation_need_no_response(tmp_path: Path) -> None:
    plain = {"prompt": [USER], "answer": "pong"}
    asked = read(written(tmp_path, plain, {"messages": [USER, ASSISTANT]}), learned=False)
    assert [prompt.messages for prompt in asked] == [(USER,), (USER,)]


def test_held_out_questions_are_not_learned_whatever_their_response(tmp_path: Path) -> None:
    rows = [{"prompt": f"ping {n % 3}", "response": f"pong {n}"} for n in range(9)]
    prompts = load_prompts(PromptsConfig(source=written(tmp_path, *rows), demonstrations=True, num_eval=1))
    assert len(prompts.train) == 6
    assert {prompt.text for prompt in prompts.train}.isdisjoint(prompt.text for prompt in prompts.eval)


@pytest.mark.parametrize("source", ["arithmetic", "chains", "reasoning_gym:chain_sum"])
def test_a_source_without_responses_is_refused(source: str) -> None:
    with pytest.raises(PromptsError) as caught:
        load_prompts(PromptsConfig(source=source, demonstrations=True))
    assert caught.value.key == "prompts.source"


def test_a_demonstration_survives_json() -> None:
    shown = Demonstration(messages=(ASSISTANT,), tokens=(1, 2), unlearned=(2,))
    prompt = Prompt(prompt_id="p", text="ping", answer="", source="test", demonstration=shown)
    assert Prompt.from_json(json.loads(json.dumps(asdict(prompt)))) == prompt
