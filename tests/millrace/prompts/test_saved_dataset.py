"""Folders that the library `datasets` saved."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.prompts import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.files import read_prompts, rows_of, saved_records

ROWS = [{"question": f"q{n}", "answer": f"#### {n}", "id": str(n), "n": n} for n in range(5)]
FIELDS = ("question", "answer")


def save(url: str, parts: list[list[dict[str, Any]]]) -> None:
    """A folder as `Dataset.save_to_disk` makes one: a stream a part, and the list of them."""
    files = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, rows in zip(files, parts, strict=True):
        table = pa.Table.from_pylist(rows)
        with fsspec.open(f"{url}/{name}", "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    with fsspec.open(f"{url}/state.json", "w") as file:
        json.dump({"_data_files": [{"filename": name} for name in files], "_split": None}, file)


def wanted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in (*FIELDS, "id")} for row in rows]


def chosen(names: list[str]) -> list[str]:
    return [name for name in names if name in (*FIELDS, "id")]


def read(folder: str) -> list[dict[str, Any]]:
    records = saved_records(folder, chosen)
    assert records is not None
    return list(records)


def test_all_parts_are_read_in_order_and_only_the_columns_that_matter(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    save(str(folder), [ROWS[:3], ROWS[3:]])
    assert read(str(folder)) == read(f"{folder}/") == wanted(ROWS)


def test_a_folder_may_be_anywhere_fsspec_reaches() -> None:
    save("memory://test-saved/train", [ROWS])
    assert read("memory://test-saved/train") == wanted(ROWS)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the library `datasets` is not installed")
def test_what_the_library_itself_saves_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list(ROWS)
    DatasetDict(train=made, test=made.select([4, 2])).save_to_disk(str(tmp_path / "sums"))
    assert read(str(tmp_path / "sums" / "train")) == wanted(ROWS)
    assert read(str(tmp_path / "sums" / "test")) == wanted([ROWS[4], ROWS[2]])
    made.shuffle(seed=1).save_to_disk(str(tmp_path / "shuffled"), num_shards=2)
    assert sorted(row["id"] for row in read(str(tmp_path / "shuffled"))) == [row["id"] for row in ROWS]
    with pytest.raises(PromptsError) as caught:
        read(str(tmp_path / "sums"))
    assert (caught.value.file, caught.value.read) == (f"{tmp_path / 'sums'}", "holds the splits train, test")


FEATURES = {"answer": {"names": ["bad", "good"], "_type": "ClassLabel"}, "tags": [{"dtype": "string"}]}


def labelled(metadata: str) -> pa.Table:
    columns = {"prompt": ["a", "b"], "answer": pa.array([1, 0], pa.int64())}
    return pa.table(columns).replace_schema_metadata({"huggingface": metadata})


def test_a_class_label_is_read_as_its_name(tmp_path: Path) -> None:
    table = labelled(json.dumps({"info": {"features": FEATURES}}))
    pq.write_table(table, tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    assert [prompt.answer for prompt in read_prompts(source, PromptsConfig(source=source))] == ["good", "bad"]
    unlabelled = table.set_column(1, "answer", pa.array([-1, 2], pa.int64()))
    assert [row["answer"] for row in rows_of(unlabelled)] == [None, None]


@pytest.mark.parametrize("metadata", ["", "[]", "{}", '{"info": {"features": 3}}', '{"info": {"features": {"a": 1}}}'])
def test_metadata_of_another_shape_names_no_labels(metadata: str) -> None:
    assert [row["answer"] for row in rows_of(labelled(metadata))] == [1, 0]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="the library `datasets` is not installed")
def test_the_librarys_own_class_labels_are_read_as_their_names(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"question": Value("string"), "answer": ClassLabel(names=["bad", "good"])})
    made = Dataset.from_dict({"question": ["a", "b"], "answer": [1, 0]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "saved.parquet"))
    for source in (str(tmp_path / "saved"), str(tmp_path / "saved.parquet")):
        config = PromptsConfig(source=source, prompt_field="question")
        assert [prompt.answer for prompt in read_prompts(source, config)] == ["good", "bad"]


def test_a_folder_without_their_list_is_none_of_these(tmp_path: Path) -> None:
    assert saved_records(str(tmp_path), chosen) is None
    assert saved_records(str(tmp_path / "missing"), chosen) is None


def test_a_missing_part_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    save(str(tmp_path), [ROWS])
    part = tmp_path / "data-00000-of-00001.arrow"
    for damage in (lambda: part.write_bytes(part.read_bytes()[:200]), part.unlink):
        damage()
        with pytest.raises(PromptsError) as caught:
            read(str(tmp_path))
        assert caught.value.file == str(part)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", '{"_data_files": 3}'),
        ("state.json", '{"_data_files": ["a.arrow"]}'),
        ("state.json", '{"_data_files": [{"name": "a.arrow"}]}'),
        ("state.json", "[" * 100_000),
        ("state.json", '{"_data_files": ' + "9" * 5000 + "}"),
        ("dataset_dict.json", "3"),
        ("dataset_dict.json", '{"splits": {"train": 1}}'),
        ("dataset_dict.json", '{"splits": [1, 2]}'),
    ],
    ids=lambda text: text[:30],
)
def test_a_list_of_another_shape_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptsError) as caught:
        saved_records(str(tmp_path), chosen)
    assert caught.value.file == str(tmp_path / name)
