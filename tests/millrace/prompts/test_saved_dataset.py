"""Folders that the library `datasets` saved, and its class labels."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.files import read_prompts

ROWS = [{"question": f"q{n}", "answer": f"{n}", "id": f"row {n}", "n": n} for n in range(5)]
IDS = [str(row["id"]) for row in ROWS]

needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the library `datasets` is not installed"
)


def save(url: str, parts: list[list[dict[str, Any]]]) -> None:
    """Writes a folder as `Dataset.save_to_disk` does: one Arrow stream per part, and the list of them."""
    files = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, rows in zip(files, parts, strict=True):
        table = pa.Table.from_pylist(rows)
        with fsspec.open(f"{url}/{name}", "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
    with fsspec.open(f"{url}/state.json", "w") as file:
        json.dump({"_data_files": [{"filename": name} for name in files], "_split": None}, file)


def read_ids(folder: object) -> list[str]:
    source = str(folder)
    prompts = read_prompts(source, PromptsConfig(source=source, prompt_field="question"))
    assert {prompt.prompt_id: (prompt.text, prompt.answer) for prompt in prompts}.items() <= {
        row["id"]: (row["question"], row["answer"]) for row in ROWS
    }.items()
    return [prompt.prompt_id for prompt in prompts]


def test_all_parts_of_a_folder_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    save(str(folder), [ROWS[:3], ROWS[3:]])
    assert read_ids(folder) == read_ids(f"{folder}/") == IDS
    save("memory://test-saved/train", [ROWS])
    assert read_ids("memory://test-saved/train") == IDS


@needs_datasets
def test_folders_that_the_library_saved_are_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list(ROWS)
    DatasetDict(train=made, test=made.select([4, 2])).save_to_disk(str(tmp_path / "sums"))
    assert read_ids(tmp_path / "sums" / "train") == IDS
    assert read_ids(tmp_path / "sums" / "test") == [IDS[4], IDS[2]]
    made.shuffle(seed=1).save_to_disk(str(tmp_path / "shuffled"), num_shards=2)
    assert sorted(read_ids(tmp_path / "shuffled")) == IDS
    with pytest.raises(PromptsError) as caught:
        read_ids(tmp_path / "sums")
    assert "FOLDER/SPLIT" in str(caught.value.expected)


def answers(table: pa.Table, path: Path) -> list[str]:
    pq.write_table(table, path)
    return [prompt.answer for prompt in read_prompts(str(path), PromptsConfig(source=str(path)))]


def labelled(metadata: object, labels: list[int]) -> pa.Table:
    columns = {"prompt": ["a", "b"], "answer": pa.array(labels, pa.int64())}
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(metadata)})


def test_a_class_label_is_read_as_its_name(tmp_path: Path) -> None:
    features = {"answer": {"names": ["bad", "good"], "_type": "ClassLabel"}, "tags": [{"dtype": "string"}]}
    metadata = {"info": {"features": features}}
    assert answers(labelled(metadata, [1, 0]), tmp_path / "a.parquet") == ["good", "bad"]
    with pytest.raises(PromptsError) as caught:
        answers(labelled(metadata, [-1, 2]), tmp_path / "a.parquet")
    assert caught.value.key == "answer"


@pytest.mark.parametrize("metadata", [[], {}, {"info": {"features": 3}}, {"info": {"features": {"answer": 1}}}])
def test_metadata_of_another_shape_names_no_labels(metadata: object, tmp_path: Path) -> None:
    assert answers(labelled(metadata, [1, 0]), tmp_path / "a.parquet") == ["1", "0"]


@needs_datasets
def test_the_librarys_own_class_labels_are_read_as_their_names(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"question": Value("string"), "answer": ClassLabel(names=["bad", "good"])})
    made = Dataset.from_dict({"question": ["a", "b"], "answer": [1, 0]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "saved.parquet"))
    for source in (str(tmp_path / "saved"), str(tmp_path / "saved.parquet")):
        config = PromptsConfig(source=source, prompt_field="question")
        assert [prompt.answer for prompt in read_prompts(source, config)] == ["good", "bad"]


def test_a_missing_part_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    save(str(tmp_path), [ROWS])
    part = tmp_path / "data-00000-of-00001.arrow"
    for damage in (lambda: part.write_bytes(part.read_bytes()[:200]), part.unlink):
        damage()
        with pytest.raises(PromptsError) as caught:
            read_ids(tmp_path)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"_data_files": 3}',
        '{"_data_files": ["a.arrow"]}',
        '{"_data_files": [{"name": "a"}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_a_list_of_parts_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(PromptsError) as caught:
        read_ids(tmp_path)
    assert caught.value.key == "prompts.source"
