"""One campaign on every kind of store: the same seed ends in the same weights wherever the run lies."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced
from support.stores.ceph import CephServer
from support.stores.memory import unused_name

from millrace.runs.status import StatusReader
from storage.checkpoints import load_file, read_latest
from storage.stores.factory import open_store
from storage.stores.memory import MemoryStore

pytestmark = pytest.mark.campaign

SYNC = {"pipeline.mode": "sync", "training.max_steps": 3}


def final_weights(run_url: str) -> bytes:
    store = open_store(run_url)
    checkpoint = read_latest(store)
    assert checkpoint is not None
    return load_file(store, checkpoint.files["model.safetensors"])


@pytest.fixture(scope="module")
def weights_on_disk(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], prefect_api: str) -> bytes:
    millrace = Millrace(tmp_path_factory.mktemp("runs"), {**environment, "PREFECT_API_URL": prefect_api})
    ended = millrace.run(*millrace.campaign("disk", **FROM_SCRATCH, **SYNC))
    assert ended.code == 0, ended.output
    assert set(millrace.summary("disk")["staleness"]["histogram"]) == {"0"}
    return final_weights(str(millrace.root / "disk"))


@pytest.fixture
def memory_root() -> Iterator[str]:
    store = MemoryStore(unused_name())
    yield store.url
    shutil.rmtree(store.root, ignore_errors=True)


@pytest.mark.extended
def test_a_run_in_memory_ends_as_the_one_on_disk_does(
    millrace: Millrace, memory_root: str, weights_on_disk: bytes
) -> None:
    ended = millrace.run(*millrace.campaign("memory", root=memory_root, **FROM_SCRATCH, **SYNC))
    assert ended.code == 0, ended.output
    assert_balanced(StatusReader(open_store(f"{memory_root}/memory")).look())
    assert final_weights(f"{memory_root}/memory") == weights_on_disk


@pytest.mark.ceph
def test_a_run_on_s3_ends_as_the_one_on_disk_does(
    millrace: Millrace, ceph: CephServer, monkeypatch: pytest.MonkeyPatch, weights_on_disk: bytes
) -> None:
    root = f"s3://{ceph.make_bucket()}/runs"
    for name, value in ceph.environment.items():
        monkeypatch.setenv(name, value)
    millrace.environment |= ceph.environment
    ended = millrace.run(*millrace.campaign("far", root=root, **FROM_SCRATCH, **SYNC))
    assert ended.code == 0, ended.output
    assert_balanced(StatusReader(open_store(f"{root}/far")).look())
    assert final_weights(f"{root}/far") == weights_on_disk
    assert not list(Path(millrace.root).glob("far*"))
