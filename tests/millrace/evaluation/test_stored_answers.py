"""The stored answers of an evaluation."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.evaluation.evaluated import Answers, evaluate, table_of
from support.stores.dict_store import DictStore

from millrace.evaluation.answers import cut, read_answers, write_answers
from millrace.evaluation.results import Result, read_result
from storage import layout
from storage.errors import StreamCorrupt
from storage.streams.files import put_file

ANSWERS: dict[str, Answers] = {"a": [("A", 1.0), ("x", 0.0)], "b": [("y", None), ("B", 1.0)]}


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


def stored(store: DictStore, version: int) -> Result:
    result = read_result(store, version)
    assert result is not None
    return result


def test_the_answers_of_a_result_are_read_as_written(dict_store: DictStore) -> None:
    evaluate(dict_store, 3, ANSWERS)
    answers = read_answers(dict_store, stored(dict_store, 3))
    assert answers is not None
    assert answers.to_pylist() == [
        {
            "set": "held_out",
            "prompt_id": f"id {prompt}",
            "prompt": prompt,
            "expected": prompt.upper(),
            "responses": [response for response, _ in pairs],
            "rewards": [reward for _, reward in pairs],
        }
        for prompt, pairs in ANSWERS.items()
    ]


def test_a_result_without_answers_has_none(dict_store: DictStore) -> None:
    assert read_answers(dict_store, {"policy_version": 3}) is None


def test_a_new_evaluation_replaces_the_answers_and_first_removes_the_result(dict_store: DictStore) -> None:
    evaluate(dict_store, 3, ANSWERS)
    write_answers(dict_store, 3, table_of({"c": [("C", 1.0)]}))
    assert read_result(dict_store, 3) is None
    evaluate(dict_store, 3, {"d": [("D", 1.0)]})
    answers = read_answers(dict_store, stored(dict_store, 3))
    assert answers is not None
    assert answers["prompt"].to_pylist() == ["d"]


def test_long_texts_are_cut_in_the_middle() -> None:
    text = "begin" + "-" * 20_000 + "end"
    [row] = table_of({text: [(text, 1.0)]}).to_pylist()
    for shown in (row["prompt"], *row["responses"]):
        assert shown.startswith("begin-") and shown.endswith("-end")
        assert len(shown) < 8_100
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefgh", 5) == "abc … (3 characters) … gh"


def test_the_texts_of_a_file_have_a_limit_together() -> None:
    answers: Answers = [("x" * 7_000, 1.0)] * 8_000
    [responses] = table_of({"a": answers})["responses"].to_pylist()
    assert sum(map(len, responses)) < 33_000_000


def test_damaged_answers_are_refused(dict_store: DictStore) -> None:
    evaluate(dict_store, 3, ANSWERS)
    result, path = stored(dict_store, 3), layout.answers(3)
    whole = dict_store.objects[path]
    for damaged in (whole[:-1], whole[:40] + b"?" + whole[41:], b""):
        dict_store.objects[path] = damaged
        with pytest.raises(StreamCorrupt) as caught:
            read_answers(dict_store, result)
        assert caught.value.file == path
    del dict_store.objects[path]
    with pytest.raises(StreamCorrupt):
        read_answers(dict_store, result)


@pytest.mark.parametrize("ref", [None, "answers/00000003.parquet", {}, {"path": "../x", "bytes": 1, "checksum": "0"}])
def test_a_result_with_a_malformed_reference_is_refused(dict_store: DictStore, ref: object) -> None:
    with pytest.raises(StreamCorrupt):
        read_answers(dict_store, {"policy_version": 3, "answers": ref})


def test_a_file_with_other_content_is_refused(dict_store: DictStore) -> None:
    rows = table_of(ANSWERS)
    unscored = rows.set_column(5, rows.field("rewards"), pa.array([[], [1.0]], rows.field("rewards").type))
    for number, table in enumerate((pa.table({"set": ["a"]}), unscored)):
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        ref = write_file(dict_store, f"answers/{number}.parquet", memoryview(sink.getvalue()))
        with pytest.raises(StreamCorrupt):
            read_answers(dict_store, {"policy_version": 3, "answers": ref})
    with pytest.raises(StreamCorrupt):
        read_answers(dict_store, {"policy_version": 3, "answers": write_file(dict_store, "answers/text", b"no table")})


def write_file(store: DictStore, path: str, data: bytes | memoryview) -> dict[str, object]:
    ref = put_file(store, path, data)
    return {"path": ref.path, "bytes": ref.bytes, "checksum": ref.checksum}
