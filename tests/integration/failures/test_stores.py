"""One campaign on every kind of store: the same seed ends in the same weights wherever the run lies."""

import shutil
from collections.abc import Iterator

import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced, final_weights
from support.stores.ceph import CephServer
from support.stores.memory import unused_name

from millrace.runs.status import StatusReader
from storage.stores.factory import open_store
from storage.stores.memory import MemoryStore

pytestmark = pytest.mark.campaign

SYNC = {**FROM_SCRATCH, "pipeline.mode": "sync", "training.max_steps": 3}


@pytest.fixture(scope="module")
def weights_on_disk(module_millrace: Millrace) -> bytes:
    assert set(module_millrace.finish("disk", **SYNC)["staleness"]["histogram"]) == {"0"}
    return final_weights(module_millrace.store("disk"))


@pytest.fixture
def memory_root() -> Iterator[str]:
    store = MemoryStore(unused_name())
    yield store.url
    shutil.rmtree(store.root, ignore_errors=True)


def check_campaign(millrace: Millrace, root: str, weights: bytes) -> None:
    millrace.run(*millrace.campaign("far", root=root, **SYNC)).expect_success()
    store = open_store(f"{root}/far")
    assert_balanced(StatusReader(store).look())
    assert final_weights(store) == weights
    assert not list(millrace.root.glob("far*"))


@pytest.mark.extended
def test_a_run_in_memory_ends_as_the_one_on_disk_does(
    millrace: Millrace, memory_root: str, weights_on_disk: bytes
) -> None:
    check_campaign(millrace, memory_root, weights_on_disk)


@pytest.mark.ceph
def test_a_run_on_s3_ends_as_the_one_on_disk_does(
    millrace: Millrace, ceph: CephServer, monkeypatch: pytest.MonkeyPatch, weights_on_disk: bytes
) -> None:
    for name, value in ceph.environment.items():
        monkeypatch.setenv(name, value)
    millrace.environment |= ceph.environment
    check_campaign(millrace, f"s3://{ceph.make_bucket()}/runs", weights_on_disk)
