"""Prompts: the split leaks nothing, the order skips and repeats nothing, bad files are named with their line."""

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.prompts import ArithmeticConfig, PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.dataset import PromptOrder, PromptSet, load_prompts
from millrace.types import Prompt


def load(digits: int = 2, max_sum: int = 99, **options: Any) -> PromptSet:
    arithmetic = ArithmeticConfig(digits=digits, max_sum=max_sum)
    return load_prompts(PromptsConfig(arithmetic=arithmetic, **options))


def write_jsonl(path: Path, records: Sequence[object]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def questions(num: int, start: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"question {n}", "answer": f"answer {n}"} for n in range(start, start + num)]


def numbered_prompts(num: int) -> list[Prompt]:
    return [Prompt(prompt_id=str(n), text=f"question {n}", answer="a", source="test") for n in range(num)]


# --- arithmetic


def test_arithmetic_prompts_are_zero_padded_sums() -> None:
    prompts = {prompt.prompt_id: prompt for half in (load().train, load().eval) for prompt in half}
    assert prompts["arith-05+07"] == Prompt(prompt_id="arith-05+07", text="05+07=", answer="12", source="arithmetic")
    assert prompts["arith-00+03"].answer == "03"


def test_a_larger_sum_makes_wider_answers() -> None:
    prompts = load(digits=1, max_sum=18, num_eval=10)
    answers = {prompt.text: prompt.answer for prompt in (*prompts.train, *prompts.eval)}
    assert answers["9+9="] == "18"
    assert {len(answer) for answer in answers.values()} == {2}


def test_arithmetic_holds_out_as_many_prompts_as_asked_and_trains_on_the_rest() -> None:
    prompts = load()
    assert (len(prompts.eval), len(prompts.train)) == (512, 5050 - 512)


def test_the_mirror_of_a_held_out_sum_is_set_aside_when_there_is_no_room_for_it() -> None:
    prompts = load(num_eval=511)
    assert (len(prompts.eval), len(prompts.train)) == (511, 5050 - 512)


@given(digits=st.integers(1, 2), max_sum=st.integers(5, 40), num_eval=st.integers(1, 15))
def test_no_sum_is_trained_on_whose_mirror_is_held_out(digits: int, max_sum: int, num_eval: int) -> None:
    prompts = load(digits=digits, max_sum=max_sum, num_eval=num_eval)
    held_out = {prompt.prompt_id.removeprefix("arith-") for prompt in prompts.eval}
    mirrored = {"+".join(reversed(pair.split("+"))) for pair in held_out}
    trained = {prompt.prompt_id.removeprefix("arith-") for prompt in prompts.train}
    assert len(held_out) == num_eval
    assert trained
    assert not trained & (held_out | mirrored)


@given(num_eval=st.integers(1, 15))
def test_holding_out_more_prompts_keeps_the_ones_held_out_before(num_eval: int) -> None:
    smaller, larger = load(digits=1, num_eval=num_eval), load(digits=1, num_eval=num_eval + 5)
    assert larger.eval[:num_eval] == smaller.eval


def test_the_split_is_the_one_that_stored_runs_were_made_with() -> None:
    assert [prompt.prompt_id for prompt in load().eval[:4]] == [
        "arith-32+58",
        "arith-58+32",
        "arith-16+26",
        "arith-26+16",
    ]


def test_too_few_sums_are_refused() -> None:
    with pytest.raises(PromptsError, match=r"^arithmetic: 3 prompts; expected more than the 3 held out of them$"):
        load(digits=1, max_sum=1, num_eval=3)


def test_a_question_that_stands_there_twice_is_held_out_once(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "prompts.jsonl", [*questions(10)] * 4)
    prompts = load(source=source, num_eval=4)
    assert len({prompt.text for prompt in prompts.eval}) == 4
    assert len(prompts.train) == 4 * 6
    assert not {prompt.text for prompt in prompts.eval} & {prompt.text for prompt in prompts.train}


# --- order


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50), shuffle=st.booleans())
def test_every_epoch_asks_every_prompt_once(num_prompts: int, seed: int, epoch: int, shuffle: bool) -> None:
    prompts = numbered_prompts(num_prompts)
    order = PromptOrder(prompts, seed=seed, shuffle=shuffle)
    asked = [order.prompt_at(n) for n in range(epoch * num_prompts, (epoch + 1) * num_prompts)]
    assert sorted(asked, key=lambda prompt: int(prompt.prompt_id)) == prompts


@given(
    num_prompts=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    visits=st.lists(st.integers(0, 100), min_size=1, max_size=30),
)
def test_a_group_has_the_same_prompt_whatever_was_asked_before(num_prompts: int, seed: int, visits: list[int]) -> None:
    prompts = numbered_prompts(num_prompts)
    ascending = PromptOrder(prompts, seed=seed, shuffle=True)
    expected = [ascending.prompt_at(n) for n in range(101)]
    jumping = PromptOrder(prompts, seed=seed, shuffle=True)
    assert [jumping.prompt_at(n) for n in visits] == [expected[n] for n in visits]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    prompts = numbered_prompts(50)

    def asked(seed: int, epoch: int) -> list[Prompt]:
        order = PromptOrder(prompts, seed=seed, shuffle=True)
        return [order.prompt_at(epoch * 50 + n) for n in range(50)]

    orders = [asked(0, 0), asked(0, 1), asked(1, 0), asked(1, 1), prompts]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_without_shuffling_prompts_are_asked_as_they_stand() -> None:
    prompts = numbered_prompts(3)
    order = PromptOrder(prompts, seed=0, shuffle=False)
    assert [order.prompt_at(n).prompt_id for n in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_a_negative_group_number_is_refused() -> None:
    with pytest.raises(ValueError, match="group number is -1; expected at least 0"):
        PromptOrder(numbered_prompts(3), seed=0, shuffle=True).prompt_at(-1)


# --- files


def test_a_jsonl_file_is_read_with_its_line_numbers_as_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b", "answer": "1"}\n\n{"prompt": "c", "answer": "2", "id": "mine"}\n')
    held = write_jsonl(tmp_path / "held.jsonl", questions(1))
    assert load(source=str(path), eval_source=held).train == (
        Prompt(prompt_id="prompts.jsonl:1", text="a\u2028b", answer="1", source="prompts.jsonl"),
        Prompt(prompt_id="mine", text="c", answer="2", source="prompts.jsonl"),
    )


def test_a_parquet_file_is_read_with_its_row_numbers_as_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"q": ["a", "b"], "n": [1, 2], "a": ["1", "2"]}), path)
    held = tmp_path / "held.parquet"
    pq.write_table(pa.table({"q": ["c"], "a": ["3"], "id": ["mine"]}), held)
    prompts = load(source=str(path), eval_source=str(held), prompt_field="q", answer_field="a")
    assert prompts.train == (
        Prompt(prompt_id="prompts.parquet:1", text="a", answer="1", source="prompts.parquet"),
        Prompt(prompt_id="prompts.parquet:2", text="b", answer="2", source="prompts.parquet"),
    )
    assert prompts.eval == (Prompt(prompt_id="mine", text="c", answer="3", source="held.parquet"),)


def test_a_file_may_be_anywhere_fsspec_reaches() -> None:
    url = "memory://test-prompts/prompts.jsonl"
    with fsspec.open(url, "w") as file:
        file.write("".join(f"{json.dumps(record)}\n" for record in questions(5)))
    assert load(source=url, num_eval=2).train[0].source == "prompts.jsonl"


@given(texts=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30), num_eval=st.integers(1, 4))
def test_no_text_of_a_file_is_both_trained_on_and_held_out(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], num_eval: int
) -> None:
    # Eight texts that no draw leaves out, so that holding out four prompts always leaves some to train on.
    records = [{"prompt": text, "answer": "x"} for text in [*"abcdefgh", *texts]]
    source = write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)
    prompts = load(source=source, num_eval=num_eval)
    trained = {prompt.text for prompt in prompts.train}
    assert len(prompts.eval) == num_eval
    assert trained
    assert not trained & {prompt.text for prompt in prompts.eval}


def test_a_prompt_of_the_evaluation_file_is_left_out_of_training(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "train.jsonl", questions(5))
    eval_source = write_jsonl(tmp_path / "eval.jsonl", questions(5, start=3))
    prompts = load(source=source, eval_source=eval_source)
    assert [prompt.text for prompt in prompts.train] == ["question 0", "question 1", "question 2"]
    assert len(prompts.eval) == 5


def test_a_training_file_that_is_all_evaluation_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "train.jsonl", questions(2))
    eval_source = write_jsonl(tmp_path / "eval.jsonl", questions(3))
    with pytest.raises(PromptsError) as caught:
        load(source=source, eval_source=eval_source)
    assert str(caught.value) == f"{source}: every prompt is in {eval_source} too; expected some to train on"


def test_a_file_with_too_few_prompts_to_hold_some_out_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "few.jsonl", questions(3))
    with pytest.raises(PromptsError, match=r"few\.jsonl: 3 prompts; expected more than the 3 held out of them$"):
        load(source=source, num_eval=3)


GOOD = b'{"prompt": "a", "answer": "1"}\n'
JSONL_MISTAKES = {
    b"": "FILE: no prompts; expected at least one",
    b"\n \n": "FILE: no prompts; expected at least one",
    GOOD + b'{"prompt": "b"}': 'FILE line 2: key "answer" is missing; expected text',
    GOOD + b'\n{"answer": "b"}': 'FILE line 3: key "prompt" is missing; expected text',
    GOOD + b'{"prompt": "b", "answer": NaN}': (
        'FILE line 2: key "answer" is NaN; expected text that is not empty, or a number'
    ),
    GOOD + b'{"prompt": "b", "answer": "3", "answer": "4"}': (
        'FILE line 2: key "answer" stands twice in {"prompt": "b", "answer": "4"}; expected one JSON object per line'
    ),
    GOOD + b'{"prompt": null, "answer": "3"}': 'FILE line 2: key "prompt" is null; expected text that is not empty',
    GOOD + b'{"prompt": "", "answer": "3"}': 'FILE line 2: key "prompt" is ""; expected text that is not empty',
    GOOD + b'{"prompt": "b", "answer": " "}': 'FILE line 2: key "answer" is " "; expected text that is not blank',
    GOOD + b'{"prompt": "b", "answer": "3", "id": true}': (
        'FILE line 2: key "id" is true; expected text that is not empty, or a number'
    ),
    GOOD + b'{"prompt": "\\ud800", "answer": "3"}': (
        'FILE line 2: key "prompt" holds half a surrogate pair; expected Unicode text'
    ),
    GOOD + b'{"prompt": "b", "answer": "3", "id": "prompts.jsonl:1"}': (
        'FILE line 2: id "prompts.jsonl:1" was used before; expected each id once'
    ),
    GOOD + b'["b", "3"]': 'FILE line 2: no object; expected one with the keys "prompt" and "answer"',
    GOOD + b'{"prompt": "b",': (
        "FILE line 2: not JSON at column 16 (Expecting property name enclosed in double quotes); "
        "expected one JSON object per line"
    ),
    GOOD + b"[" * 100_000: "FILE line 2: values are nested too deeply; expected one JSON object per line",
    GOOD + b'{"prompt": ' + b"9" * 5000 + b"}": (
        "FILE line 2: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; use "
        "sys.set_int_max_str_digits() to increase the limit; expected one JSON object per line"
    ),
    GOOD + b'{"prompt": "caf\xe9"}': "FILE line 2: byte 15 is not UTF-8; expected UTF-8 text",
}


@pytest.mark.parametrize("data", JSONL_MISTAKES)
def test_a_mistake_in_a_jsonl_file_is_named_with_its_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    with pytest.raises(PromptsError) as caught:
        load(source=str(path))
    assert str(caught.value).replace(str(path), "FILE") == JSONL_MISTAKES[data]


GSM8K = [
    {"question": "Ann buys 3 pens at $400 each. What does she pay?", "answer": "3 * 400 = 1,200.\n#### 1,200"},
    {"question": "It is 5 degrees and gets 12 colder. How warm is it?", "answer": "5 - 12 = -7\n#### -7"},
]
MATH = [
    {"problem": "Halve $1$.", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "Add $1$ and $1$.", "level": "Level 1", "type": "Algebra", "solution": r"$1+1=\boxed{2}$"},
]


def write_data_set(folder: Path, name: str, suffix: str, rows: list[dict[str, str]]) -> str:
    """A small data set in one of the three shapes that data sets come in; returns where it is."""
    path = folder / f"{name}{suffix}"
    if suffix == ".jsonl":
        return write_jsonl(path, rows)
    table = pa.Table.from_pylist(rows)
    if suffix == ".parquet":
        pq.write_table(table, path)
        return str(path)
    path.mkdir()
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize(
    ("rows", "prompt_field", "answer_field", "answer_format", "answers"),
    [
        (GSM8K, "question", "answer", "gsm8k", ["1200", "-7"]),
        (MATH, "problem", "solution", "boxed", [r"\frac{1}{2}", "2"]),
    ],
    ids=["gsm8k", "math"],
)
def test_data_sets_in_the_shapes_of_gsm8k_and_math_are_read(
    tmp_path: Path,
    suffix: str,
    rows: list[dict[str, str]],
    prompt_field: str,
    answer_field: str,
    answer_format: str,
    answers: list[str],
) -> None:
    source = write_data_set(tmp_path, "train", suffix, rows)
    asked_later = [{**rows[0], prompt_field: "Something else?"}]
    prompts = load(
        source=source,
        eval_source=write_data_set(tmp_path, "test", suffix, asked_later),
        prompt_field=prompt_field,
        answer_field=answer_field,
        answer_format=answer_format,
    )
    assert [prompt.text for prompt in prompts.train] == [row[prompt_field] for row in rows]
    assert [prompt.answer for prompt in prompts.train] == answers
    assert [prompt.answer for prompt in prompts.eval] == answers[:1]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize(
    ("answer_format", "expected"),
    [
        ("gsm8k", 'a worked solution that ends in "####" and the answer'),
        ("boxed", r"a solution with the answer in \boxed{…}, its braces balanced"),
    ],
)
def test_a_row_without_an_answer_is_named(tmp_path: Path, suffix: str, answer_format: str, expected: str) -> None:
    good = {"gsm8k": "#### 4", "boxed": r"\boxed{4}"}[answer_format]
    rows = [{"prompt": "a", "answer": good}, {"prompt": "b", "answer": "I give up."}]
    source = write_data_set(tmp_path, "prompts", suffix, rows)
    with pytest.raises(PromptsError) as caught:
        load(source=source, answer_format=answer_format)
    place = "line" if suffix == ".jsonl" else "row"
    assert str(caught.value) == f'{source} {place} 2: key "answer" is "I give up."; expected {expected}'


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"prompt": ["a"]}, 'FILE: column "answer" is missing; expected it among prompt'),
        (
            {"prompt": ["a", "b"], "answer": [1.5, float("nan")]},
            'FILE row 2: key "answer" is null; expected text that is not empty, or a number',
        ),
        (
            pa.table([["a"], ["1"], ["2"]], names=["prompt", "answer", "answer"]),
            'FILE: column "answer" stands twice; expected each once',
        ),
        (
            {"prompt": ["a", None], "answer": ["1", "2"]},
            'FILE row 2: key "prompt" is null; expected text that is not empty',
        ),
        (
            {"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())},
            "FILE: no prompts; expected at least one",
        ),
    ],
)
def test_a_mistake_in_a_parquet_file_is_named_with_its_row(
    tmp_path: Path, columns: dict[str, object], sentence: str
) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(PromptsError) as caught:
        load(source=str(path))
    assert str(caught.value).replace(str(path), "FILE") == sentence


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(PromptsError, match=r"prompts\.parquet: can't be read as Parquet .*; expected a Parquet file"):
        load(source=str(path))


def test_a_missing_file_an_unknown_protocol_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(PromptsError, match=r"missing\.jsonl: can't be read .*; expected a \.jsonl, "):
        load(source=missing)
    with pytest.raises(PromptsError, match=r"^nowhere://a\.jsonl: can't be read .*nowhere"):
        load(source="nowhere://a.jsonl")
    with pytest.raises(PromptsError) as caught:
        load(source="prompts.txt")
    assert str(caught.value) == (
        'prompts source "prompts.txt"; expected arithmetic, chains, reasoning_gym:TASK, verifiers:ENVIRONMENT, a '
        ".jsonl, .json, .csv or .parquet file, a folder that `datasets` saved, or ORG/NAME of a hub"
    )


SUMS = [("1+1=", "2"), ("what, exactly, is 2+5?", "7"), ("3+4=\n", "007")]
WRITTEN = {
    "array.json": json.dumps([{"prompt": prompt, "answer": answer} for prompt, answer in SUMS], indent=1),
    "lines.json": "\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in SUMS),
    "bom.jsonl": "\ufeff" + "\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in SUMS),
    "bom.json": "\ufeff" + json.dumps([{"prompt": prompt, "answer": answer} for prompt, answer in SUMS]),
    "table.csv": 'prompt,answer,unused\n1+1=,2,x\n"what, exactly, is 2+5?",7,\n"3+4=\n",007,\n',
    "windows.csv": '\ufeffanswer,prompt\r\n2,1+1=\r\n7,"what, exactly, is 2+5?"\r\n007,"3+4=\n"\r\n\r\n',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_json_csv_and_files_with_a_byte_order_mark_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WRITTEN[name].encode())
    prompts = load(source=str(path), eval_source="arithmetic")
    assert [(prompt.text, prompt.answer) for prompt in prompts.train] == SUMS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_ids_and_answers_may_be_whole_numbers(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [{"id": 7, "prompt": "1+1=", "answer": 2}, {"id": 8, "prompt": "1-2=", "answer": -1}]
    prompts = load(source=write_data_set(tmp_path, "prompts", suffix, rows), eval_source="arithmetic")
    assert [(prompt.prompt_id, prompt.answer) for prompt in prompts.train] == [("7", "2"), ("8", "-1")]


def answers_of(path: Path) -> list[str]:
    return [prompt.answer for prompt in load(source=str(path), eval_source="arithmetic").train]


def test_an_answer_may_be_a_fraction_which_is_read_as_it_is_written(tmp_path: Path) -> None:
    lines, decimals, doubles = tmp_path / "a.jsonl", tmp_path / "a.parquet", tmp_path / "b.parquet"
    lines.write_text('{"prompt": "a", "answer": 3.50}\n{"prompt": "b", "answer": -1e-3}')
    assert answers_of(lines) == ["3.50", "-1e-3"]
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [Decimal("12.50"), Decimal("0.01")]}), decimals)
    assert answers_of(decimals) == ["12.50", "0.01"]
    for kind in (pa.float64(), pa.float32()):
        pq.write_table(pa.table({"prompt": ["a", "b", "c"], "answer": pa.array([0.1, 42, -2.5], kind)}), doubles)
        assert answers_of(doubles) == ["0.1", "42", "-2.5"]


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,answer\n{'x' * 200_000},1\n")
    assert answers_of(tmp_path / "a.csv") == ["1"]


@pytest.mark.parametrize("name", ["a.csv", "a\nb.csv"])
def test_what_is_said_of_names_with_line_breaks_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('"pro\nmpt",answer\na,1\n')
    with pytest.raises(PromptsError) as caught:
        load(source=str(tmp_path / name))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", "[1, 2", r"a\.json: not JSON \(.*\); expected an array of objects, or one object per line"),
        ("a.json", "[1, 2]", r'a\.json row 1: no object; expected one with the keys "prompt" and "answer"'),
        ("a.csv", "prompt\n1+1=\n", r'a\.csv: column "answer" is missing; expected it among prompt'),
        ("a.csv", "", r'a\.csv: column "prompt" is missing'),
        ("a.csv", "prompt,answer,answer\n1+1=,2,3\n", r'a\.csv: column "answer" stands twice; expected each once'),
        (
            "a.json",
            '[{"prompt": "a", "answer": "1", "answer": "2"}]',
            r'a\.json: not JSON \(key "answer" stands twice in \{"prompt": "a", .*\); expected an array of objects',
        ),
        ("a.csv", "prompt,answer\n1+1=,2\n2+2=\n", r"a\.csv row 2: 1 values under a header of 2; expected as many"),
        ("a.csv", 'prompt,answer\n"1+1="x,2\n', r"a\.csv: can't be read as CSV \(.*\); expected a header, commas"),
        ("a.csv", "prompt,answer\n1+1=,\n", r'a\.csv row 1: key "answer" is ""; expected text that is not empty'),
        (
            "a.jsonl",
            '{"prompt": "a", "answer": true}',
            r'line 1: key "answer" is true; expected text that is not empty',
        ),
    ],
)
def test_a_mistake_in_such_a_file_is_one_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PromptsError, match=sentence):
        load(source=str(path))
