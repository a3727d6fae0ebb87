"""Files of prompts: every format gives the same prompts, and a mistake is named with its line or row."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.files import read_prompts
from millrace.types import Prompt


def read(source: object, **options: Any) -> list[Prompt]:
    return read_prompts(str(source), PromptsConfig(source=str(source), **options))


def write_data_set(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    """A small data set in one of the three shapes that data sets come in; returns where it is."""
    path = folder / f"prompts{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path
    table = pa.Table.from_pylist(rows)
    if suffix == ".parquet":
        pq.write_table(table, path)
        return path
    path.mkdir()
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return path


def test_line_numbers_are_ids_unless_a_record_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b", "answer": "1"}\n\n{"prompt": "c", "answer": "2", "id": "mine"}\n')
    assert read(path) == [
        Prompt(prompt_id="prompts.jsonl:1", text="a\u2028b", answer="1", source="prompts.jsonl"),
        Prompt(prompt_id="mine", text="c", answer="2", source="prompts.jsonl"),
    ]


def test_a_file_may_be_anywhere_fsspec_reaches() -> None:
    url = "memory://test-prompts/prompts.jsonl"
    with fsspec.open(url, "w") as file:
        file.write('{"prompt": "a", "answer": "1"}\n')
    assert [prompt.source for prompt in read(url)] == ["prompts.jsonl"]


SUMS = [("1+1=", "2"), ("what, exactly, is 2+5?", "7"), ("3+4=\n", "007")]
RECORDS = [{"prompt": prompt, "answer": answer} for prompt, answer in SUMS]
WRITTEN = {
    "array.json": json.dumps(RECORDS, indent=1),
    "lines.json": "\n".join(map(json.dumps, RECORDS)),
    "bom.jsonl": "\ufeff" + "\n".join(map(json.dumps, RECORDS)),
    "bom.json": "\ufeff" + json.dumps(RECORDS),
    "table.csv": 'prompt,answer,unused\n1+1=,2,x\n"what, exactly, is 2+5?",7,\n"3+4=\n",007,\n',
    "windows.csv": '\ufeffanswer,prompt\r\n2,1+1=\r\n7,"what, exactly, is 2+5?"\r\n007,"3+4=\n"\r\n\r\n',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_json_csv_and_files_with_a_byte_order_mark_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WRITTEN[name].encode())
    assert [(prompt.text, prompt.answer) for prompt in read(path)] == SUMS


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,answer\n{'x' * 200_000},1\n")
    assert [prompt.answer for prompt in read(tmp_path / "a.csv")] == ["1"]


GSM8K = [
    {"question": "Ann buys 3 pens at $400 each. What does she pay?", "solution": "3 * 400 = 1,200.\n#### 1,200"},
    {"question": "It is 5 degrees and gets 12 colder. How warm is it?", "solution": "5 - 12 = -7\n#### -7"},
]
MATH = [
    {"question": "Halve $1$.", "level": "Level 1", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"question": "Add $1$ and $1$.", "level": "Level 1", "solution": r"$1+1=\boxed{2}$"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize(
    ("rows", "answer_format", "answers"),
    [(GSM8K, "gsm8k", ["1200", "-7"]), (MATH, "boxed", [r"\frac{1}{2}", "2"])],
    ids=["gsm8k", "math"],
)
def test_data_sets_in_the_shapes_of_gsm8k_and_math_are_read(
    tmp_path: Path, suffix: str, rows: list[dict[str, Any]], answer_format: str, answers: list[str]
) -> None:
    options = {"prompt_field": "question", "answer_field": "solution", "answer_format": answer_format}
    prompts = read(write_data_set(tmp_path, suffix, rows), **options)
    assert [prompt.text for prompt in prompts] == [row["question"] for row in rows]
    assert [prompt.answer for prompt in prompts] == answers

    (tmp_path / "bad").mkdir()
    source = write_data_set(tmp_path / "bad", suffix, [rows[0], {**rows[1], "solution": "I give up."}])
    with pytest.raises(PromptsError) as caught:
        read(source, **options)
    place = "line" if suffix == ".jsonl" else "row"
    mistake = caught.value
    assert (mistake.file, mistake.key, mistake.read) == (f"{source} {place} 2", "solution", '"I give up."')


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_ids_and_answers_may_be_whole_numbers(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": 7, "prompt": "1+1=", "answer": 2}, {"id": 8, "prompt": "1-2=", "answer": -1}]
    prompts = read(write_data_set(tmp_path, suffix, rows))
    assert [(prompt.prompt_id, prompt.answer) for prompt in prompts] == [("7", "2"), ("8", "-1")]


def test_a_fraction_is_read_as_it_is_written(tmp_path: Path) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text('{"prompt": "a", "answer": 3.50}\n{"prompt": "b", "answer": -1e-3}')
    assert [prompt.answer for prompt in read(lines)] == ["3.50", "-1e-3"]
    decimals = pa.array([Decimal("12.50"), Decimal("0.01"), Decimal("-2.50")])
    for values, expected in (
        (decimals, ["12.50", "0.01", "-2.50"]),
        (pa.array([0.1, 42, -2.5], pa.float64()), ["0.1", "42", "-2.5"]),
        (pa.array([0.1, 42, -2.5], pa.float32()), ["0.1", "42", "-2.5"]),
    ):
        pq.write_table(pa.table({"prompt": ["a", "b", "c"], "answer": values}), table)
        assert [prompt.answer for prompt in read(table)] == expected


GOOD = b'{"prompt": "a", "answer": "1"}\n'
MISTAKES: list[tuple[str, bytes, str, str | None, str]] = [
    # (name of the file, its content, the place in it, the key, what was read there)
    ("a.jsonl", b"\n \n", "", None, "no prompts"),
    ("a.jsonl", GOOD + b'\n{"answer": "b"}', " line 3", "prompt", "missing"),
    ("a.jsonl", GOOD + b'{"prompt": "b", "answer": NaN}', " line 2", "answer", "NaN"),
    ("a.jsonl", GOOD + b'{"prompt": "b", "answer": true}', " line 2", "answer", "true"),
    ("a.jsonl", GOOD + b'{"prompt": "b", "answer": "3", "answer": "4"}', " line 2", None, 'key "answer" stands twice'),
    ("a.jsonl", GOOD + b'{"prompt": null, "answer": "3"}', " line 2", "prompt", "null"),
    ("a.jsonl", GOOD + b'{"prompt": "", "answer": "3"}', " line 2", "prompt", '""'),
    ("a.jsonl", GOOD + b'{"prompt": "b", "answer": " "}', " line 2", "answer", '" "'),
    ("a.jsonl", GOOD + b'{"prompt": "\\ud800", "answer": "3"}', " line 2", "prompt", "half a surrogate pair"),
    ("a.jsonl", GOOD + b'{"prompt": "b", "answer": "3", "id": "a.jsonl:1"}', " line 2", "id", '"a.jsonl:1" again'),
    ("a.jsonl", GOOD + b'["b", "3"]', " line 2", None, "no object"),
    ("a.jsonl", GOOD + b'{"prompt": "b",', " line 2", None, "line 1 column 16"),
    ("a.jsonl", GOOD + b"[" * 100_000, " line 2", None, "values are nested too deeply"),
    ("a.jsonl", GOOD + b'{"prompt": ' + b"9" * 5000 + b"}", " line 2", None, "Exceeds the limit (4300 digits)"),
    ("a.jsonl", GOOD + b'{"prompt": "caf\xe9"}', " line 2", None, "can't decode byte 0xe9 in position 15"),
    ("a.json", b"[1, 2", "", None, "not JSON in UTF-8 ("),
    ("a.json", b"[1, 2]", " row 1", None, "no object"),
    ("a.json", b'[{"prompt": "a", "answer": "1", "answer": "2"}]', "", None, 'key "answer" stands twice'),
    ("a.csv", b"prompt\n1+1=\n", "", "column answer", "missing"),
    ("a.csv", b"", "", None, "Empty CSV file"),
    ("a.csv", b"prompt,answer,answer\n1+1=,2,3\n", "", "column answer", "there twice"),
    ("a.csv", b"prompt,answer\n1+1=,2\n2+2=\n", "", None, "Row #3: Expected 2 columns, got 1: 2+2="),
    ("a.csv", b"prompt,answer\ncaf\xe9,2\n", "", None, "invalid UTF8 data"),
    ("a.csv", b"prompt,answer\n1+1=,\n", " row 1", "answer", '""'),
    ("a\nb.csv", b'"pro\nmpt",answer\na,1\n', "", "column prompt", "missing"),
    ("a.parquet", b"PAR1 but not really PAR1", "", None, "Parquet file size is 24 bytes"),
]


@pytest.mark.parametrize(("name", "data", "place", "key", "read_there"), MISTAKES)
def test_a_mistake_in_a_file_is_one_line_with_its_place(
    tmp_path: Path, name: str, data: bytes, place: str, key: str | None, read_there: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(PromptsError) as caught:
        read(path)
    mistake = caught.value
    assert len(str(mistake).splitlines()) == 1
    assert (mistake.file, mistake.key) == (f"{path}{place}", key)
    assert read_there in mistake.read
    assert mistake.expected


@pytest.mark.parametrize(
    ("columns", "place", "key", "read_there"),
    [
        ({"prompt": ["a"]}, "", "column answer", "missing"),
        ({"prompt": ["a", "b"], "answer": [1.5, float("nan")]}, " row 2", "answer", "null"),
        (pa.table([["a"], ["1"], ["2"]], names=["prompt", "answer", "answer"]), "", "column answer", "there twice"),
        ({"prompt": ["a", None], "answer": ["1", "2"]}, " row 2", "prompt", "null"),
        ({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}, "", None, "no prompts"),
    ],
)
def test_a_mistake_in_a_parquet_file_is_named_with_its_row(
    tmp_path: Path, columns: Any, place: str, key: str | None, read_there: str
) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(PromptsError) as caught:
        read(path)
    assert (caught.value.file, caught.value.key, caught.value.read) == (f"{path}{place}", key, read_there)


@pytest.mark.parametrize("source", ["/nowhere/missing.jsonl", "nowhere://a.jsonl"])
def test_a_file_that_can_not_be_read_is_named(source: str) -> None:
    with pytest.raises(PromptsError) as caught:
        read(source)
    assert caught.value.file == source


def test_a_source_of_an_unknown_kind_is_named() -> None:
    with pytest.raises(PromptsError) as caught:
        read("a.txt")
    assert caught.value.key == "prompts.source"
    assert caught.value.read.startswith('"a.txt" (')


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_missing_key_is_answered_with_the_rows_keys_and_its_setting(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_text('{"question": "1+1=", "solution": "2"}' if suffix == "jsonl" else "question,solution\n1+1=,2\n")
    for settings, setting in (({}, "prompt_field"), ({"prompt_field": "question"}, "answer_field")):
        with pytest.raises(PromptsError) as caught:
            read_prompts(str(file), PromptsConfig(**settings))
        assert caught.value.expected == f"prompts.{setting} to name one of question, solution"
