"""Where a run came from: software, machine, user functions, start model."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from support.stores.dict_store import DictStore

from configs.schema import RunConfig
from configs.stored import config_hash
from millrace.runs.provenance import differences, provenance, read_start_hashes, record_start_hashes

CONFIG = {"training": {"max_steps": 3}}


def test_provenance_names_libraries_cpu_functions_and_config() -> None:
    module = "tests.support.training.own_functions"
    training = {"max_steps": 3, "loss": {"name": f"{module}:capped"}, "advantage": f"{module}:better_than_half"}
    config = RunConfig.model_validate({"training": training}).model_dump(mode="json")
    made_by = provenance(config)
    assert {"torch", "pyarrow", "prefect"} <= made_by.dependencies.keys()
    assert made_by.cpu, "the same code on another CPU may round otherwise"
    assert made_by.config_hash == config_hash(config)
    files = sorted((Path(__file__).parents[3] / "tests/support/training").glob("*.py"))
    expected = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    assert {made_by.dependencies[f"{module}:{name}"] for name in ("capped", "better_than_half")} == {expected}


def test_differences_between_two_processes_are_named_with_both_values() -> None:
    a = provenance(CONFIG)
    dependencies = a.dependencies | {"torch": "0.1", "abacus": "1"}
    b = replace(a, cpu="an abacus", commit="0123abcd", config_hash="another", dependencies=dependencies)
    assert differences(a, a) == {}
    assert differences(a, b) == {
        "commit": (a.commit, "0123abcd"),
        "cpu": (a.cpu, "an abacus"),
        "dependencies.torch": (a.dependencies["torch"], "0.1"),
    }


FILES = {"model.safetensors": b"weights", "config.json": b"{}", "tokenizer.json": b"{ }", "merges.txt": b"a b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_weights_and_tokenizer_files_are_hashed_once_per_run(folder: Path) -> None:
    store = DictStore()
    assert read_start_hashes(store) is None
    (folder / "README.md").write_text("a model")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"the same in another format")
    record_start_hashes(store, folder)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    assert read_start_hashes(store) == hashes
    (folder / "model.safetensors").write_bytes(b"other weights")
    record_start_hashes(store, folder)
    assert read_start_hashes(store) == hashes
