"""Weights through the store: anchors and deltas, and the bits of the newest version whatever happens in between."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.stages.failpoints import Failpoints
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore, flipped
from support.weights.versions import trained, trained_tensors

from millrace.errors import WeightsCorrupt
from millrace.weights import delta
from millrace.weights.base import Manifest, Weights
from millrace.weights.fingerprint import fingerprint
from millrace.weights.store import ANCHOR_EVERY, StoreReceiver, StoreSender
from storage import layout
from storage.checkpoints import CheckpointWriter, checkpoints_backwards
from storage.errors import NotInStore, StorageError
from storage.stores.local import LocalStore

PROCESS = Path(__file__).parents[2] / "support/weights/weights_process.py"
DATA = f"{layout.WEIGHTS}/data/*"
VERSIONS = 200


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def open_reader(store: DictStore, tmp_path: Path) -> Callable[[], StoreReceiver]:
    return lambda: StoreReceiver(store, tmp_path / "received")


def assert_taken(taken: Weights | None, expected: Weights, why: str = "") -> None:
    assert taken is not None, why
    assert taken.manifest == expected.manifest, why
    # Not the fingerprint in the manifest: one taken here, of what this test made.
    assert fingerprint(taken.tensors) == fingerprint(expected.tensors), why
    assert taken.shared is not None, why
    assert fingerprint(taken.shared.map()) == fingerprint(expected.tensors), why


def kinds(store: DictStore) -> str:
    """A letter a version, oldest first: (a)nchor or (d)elta."""
    return "".join(stored.state["kind"][0] for stored in checkpoints_backwards(store, layout.WEIGHTS))[::-1]


def file_of(store: DictStore, version: int) -> str:
    (checkpoint,) = [s for s in checkpoints_backwards(store, layout.WEIGHTS) if s.step == version]
    (ref,) = checkpoint.files.values()
    return ref.path


def test_a_reader_follows_and_one_that_comes_late_finds_the_newest(
    store: DictStore, open_reader: Callable[[], StoreReceiver]
) -> None:
    reader, newest = open_reader(), None
    assert reader.poll(None) is None
    writer = StoreSender(store)
    for version in range(4):
        writer.publish(trained(version))
        taken = reader.poll(newest)
        assert_taken(taken, trained(version))
        assert taken is not None
        newest = taken.id
        assert reader.poll(newest) is None
    assert_taken(reader.poll(None), trained(3), "asked again")
    assert_taken(open_reader().poll(None), trained(3), "late")
    assert kinds(store) == "addd"


def test_every_dtype_and_any_layout_arrives_bit_for_bit(
    store: DictStore, open_reader: Callable[[], StoreReceiver]
) -> None:
    chooser = torch.Generator().manual_seed(4)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    old = {str(dtype): torch.randn(20, 30, generator=chooser).to(dtype).mT for dtype in dtypes}
    old["scalar"] = torch.tensor(0.5)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["torch.float16"][3, 3] = float("nan")
    new["torch.float64"][1] = -0.0
    writer, reader = StoreSender(store), open_reader()
    for version, tensors in enumerate((old, new)):
        writer.publish(trained(version, tensors=tensors))
        assert_taken(reader.poll(None), trained(version, tensors=tensors))
    assert kinds(store) == "ad"


def test_a_later_incarnation_is_newer_than_any_version_of_an_earlier_one(
    store: DictStore, open_reader: Callable[[], StoreReceiver]
) -> None:
    writer, reader = StoreSender(store), open_reader()
    writer.publish(trained(9))
    writer.publish(trained(3, incarnation=1))
    assert_taken(reader.poll(trained(9).id), trained(3, incarnation=1))
    writer.publish(trained(10))
    assert reader.poll(trained(3, incarnation=1).id) is None


def test_anchors_come_first_regularly_and_wherever_a_delta_would_not_do(store: DictStore) -> None:
    writer = StoreSender(store)
    for version in range(2 * ANCHOR_EVERY):
        writer.publish(trained(version))
    assert kinds(store) == 2 * ("a" + 15 * "d")
    writer = StoreSender(store)
    everything = {name: tensor + 1 for name, tensor in trained_tensors(42).items()}
    without = {name: tensor for name, tensor in everything.items() if name != "norm"}
    for tensors in (trained_tensors(40), trained_tensors(41), everything, everything, without, without):
        writer.publish(trained(40, tensors=tensors))
    writer.publish(trained(40, incarnation=1, tensors=without))
    assert kinds(store)[2 * ANCHOR_EVERY :] == "ad" + "ad" + "ad" + "a"


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_many_changes_are_an_anchor_as_their_delta_would_be_long(store: DictStore, share: float) -> None:
    chooser = torch.Generator().manual_seed(5)
    old = {"w": torch.randn(300, 300, generator=chooser)}
    struck = torch.rand(300, 300, generator=chooser) < share
    new = {"w": torch.where(struck, torch.randn(300, 300, generator=chooser), old["w"])}
    writer = StoreSender(store)
    for version, tensors in enumerate((old, new)):
        writer.publish(trained(version, tensors=tensors))
    assert kinds(store) == "aa"


def test_what_was_offered_may_change_afterwards(store: DictStore, open_reader: Callable[[], StoreReceiver]) -> None:
    writer = StoreSender(store)
    for version in range(3):
        live = trained(version)
        writer.publish(live)
        for tensor in live.tensors.values():
            tensor.zero_()
    assert kinds(store) == "add"
    assert_taken(open_reader().poll(None), trained(2))


def test_a_version_without_a_fingerprint_is_refused(store: DictStore) -> None:
    unhashed = dataclasses.replace(trained(1), manifest=Manifest(id=trained(1).id))
    with pytest.raises(ValueError):
        StoreSender(store).publish(unhashed)


class Counting(DictStore):
    """Counts its gets."""

    gets = 0

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        self.gets += 1
        return super().get(path, start, length)


def test_looking_in_vain_is_one_look_at_the_store_and_a_delta_one_more(tmp_path: Path) -> None:
    store = Counting()
    writer, reader = StoreSender(store), StoreReceiver(store, tmp_path / "received")
    for version in range(10):
        writer.publish(trained(version))
    assert_taken(reader.poll(None), trained(9))
    reader.poll(trained(9).id)
    store.gets = 0
    assert reader.poll(trained(9).id) is None
    assert store.gets == 1
    writer.publish(trained(10))
    store.gets = 0
    assert_taken(reader.poll(trained(9).id), trained(10))
    assert store.gets == 3, "its record, the look behind it, its delta"


def test_closing_removes_the_file(store: DictStore, tmp_path: Path) -> None:
    StoreSender(store).publish(trained(0))
    reader = StoreReceiver(store, tmp_path / "received")
    assert_taken(reader.poll(None), trained(0))
    reader.close()
    assert list(tmp_path.iterdir()) == []
    assert_taken(reader.poll(None), trained(0), "reopened by the poll")


@pytest.mark.parametrize("damage", ["flipped", "missing"])
@pytest.mark.parametrize("version", [0, 2, 4])
def test_a_damaged_file_is_named_and_the_next_anchor_heals(
    store: DictStore, open_reader: Callable[[], StoreReceiver], version: int, damage: str
) -> None:
    writer = StoreSender(store)
    for number in range(5):
        writer.publish(trained(number))
    path = file_of(store, version)
    good = store.objects[path]
    for bit in random.Random(version).sample(range(8 * len(good)), 20) if damage == "flipped" else [0]:
        if damage == "flipped":
            store.objects[path] = flipped(good, bit)
        else:
            store.objects.pop(path)
        reader = open_reader()
        with pytest.raises(WeightsCorrupt, match=path):
            reader.poll(None)
    writer = StoreSender(store)
    writer.publish(trained(5))
    assert_taken(reader.poll(None), trained(5))


def test_a_delta_that_arrives_damaged_twice_is_made_good_from_the_anchor(store: DictStore, tmp_path: Path) -> None:
    faulty = FaultyStore(store, 8, bit_flip=Fault(calls=frozenset([1, 2]), paths=DATA))
    writer, reader = StoreSender(store), StoreReceiver(faulty, tmp_path / "received")
    writer.publish(trained(0))
    assert_taken(reader.poll(None), trained(0))
    writer.publish(trained(1))
    assert_taken(reader.poll(trained(0).id), trained(1))
    assert faulty.fired == {"bit_flip": 2}, "seed 8"


@pytest.mark.parametrize("order", [[2], [2, 1], [1, 1], [1, 3]], ids=["wrong base", "swapped", "twice", "one left out"])
@pytest.mark.parametrize("holds_the_anchor", [True, False])
def test_deltas_out_of_order_are_refused_and_the_file_is_named(
    store: DictStore, open_reader: Callable[[], StoreReceiver], order: list[int], holds_the_anchor: bool
) -> None:
    writer, reader = StoreSender(store), open_reader()
    writer.publish(trained(0))
    if holds_the_anchor:
        assert_taken(reader.poll(None), trained(0))
    log = CheckpointWriter(store, layout.WEIGHTS, writer="disorder")
    for version in order:
        old, new = trained(version - 1), trained(version)
        base, digest = (w.manifest.fingerprint.digest for w in (old, new) if w.manifest.fingerprint)
        files = {"weights.delta": delta.encode(old.tensors, new.tensors, base=base, digest=digest)}
        manifest = {**new.manifest.to_json(), "probe": None}
        log.commit(version, files, {"kind": "delta", "base": base, "manifest": manifest})
    with pytest.raises(WeightsCorrupt, match="weights/data/"):
        reader.poll(None)
    StoreSender(store).publish(trained(9))
    assert_taken(reader.poll(None), trained(9))


def test_tensors_that_are_not_those_of_the_manifest_are_named(
    store: DictStore, open_reader: Callable[[], StoreReceiver]
) -> None:
    other = {**trained_tensors(1), "norm": torch.zeros(80)}
    StoreSender(store).publish(dataclasses.replace(trained(1), tensors=other))
    with pytest.raises(WeightsCorrupt, match=r"norm$"):
        open_reader().poll(None)


class Overtaken(DictStore):
    """Once armed, the next read finds its weights deleted, and newer ones stored."""

    overtake: Callable[[], None] | None = None

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        if self.overtake is not None and path.startswith(f"{layout.WEIGHTS}/data/"):
            overtake, self.overtake = self.overtake, None
            overtake()
            raise NotInStore(f"{path}: not in {self.url}")
        return super().get(path, start, length)


def test_a_reader_that_gc_overtakes_gets_the_newer_version(tmp_path: Path) -> None:
    store = Overtaken()
    StoreSender(store).publish(trained(0))
    store.overtake = lambda: StoreSender(store).publish(trained(1))
    assert_taken(StoreReceiver(store, tmp_path / "received").poll(None), trained(1))
    assert store.overtake is None


def test_two_hundred_versions_arrive_through_faults_skips_and_restarts(tmp_path: Path) -> None:
    seed = 31
    chooser = random.Random(seed)
    inner = DictStore()
    for_writer = FaultyStore(inner, seed, error_before=0.02, error_after=0.02, lost_reply=0.05)
    for_reader = FaultyStore(inner, seed + 1, error_before=0.02, stale_read=0.2, bit_flip=Fault(rate=0.1, paths=DATA))
    history: dict[int, Weights] = {}
    writer: StoreSender | None = None
    reader = StoreReceiver(for_reader, tmp_path / "received")
    newest, refused, taken_count, restarts = None, 0, 0, 0
    for version in range(VERSIONS):
        history[version] = trained(version)
        while True:
            try:
                writer = writer or StoreSender(for_writer)
                writer.publish(history[version])
                break
            except OSError:
                # A stage ends here, and the next one opens the log again.
                writer = None
        if chooser.random() < 0.4:
            continue
        if chooser.random() < 0.1:
            reader, newest, restarts = StoreReceiver(for_reader, tmp_path / "received"), None, restarts + 1
        try:
            taken = reader.poll(newest)
        except (OSError, StorageError, WeightsCorrupt):
            refused += 1
            continue
        # None: a stale read hid the newest version.
        if taken is not None:
            why = f"seed {seed}, after version {version}"
            assert newest is None or taken.id.newer_than(newest), why
            assert_taken(taken, history[taken.id.policy_version], why)
            newest, taken_count = taken.id, taken_count + 1
    assert_taken(StoreReceiver(inner, tmp_path / "received").poll(None), history[VERSIONS - 1], f"seed {seed}")
    made = kinds(inner)
    summary = f"seed {seed}: {taken_count} taken, {refused} refused, {restarts} restarts, {made}"
    print(summary, dict(for_writer.fired), dict(for_reader.fired))
    assert {"error_before", "error_after", "lost_reply"} == for_writer.fired.keys(), summary
    assert {"error_before", "stale_read", "bit_flip"} == for_reader.fired.keys(), summary
    assert taken_count > 50, summary
    assert restarts > 3, summary
    assert made.count("d") > 100, summary


@pytest.mark.slow
def test_a_writer_killed_between_file_and_record_loses_nothing_that_was_offered(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run", fsync=False)
    places = [f"put.after:{DATA} 3", f"put.mid:{DATA} 4", f"put.mid:{layout.WEIGHTS}/log/* 6"]
    reader = StoreReceiver(store, tmp_path / "received")
    offered = -1
    for number, place in enumerate(places):
        failpoints = Failpoints(tmp_path / f"fired-{number}", f"store {place} kill")
        command = [sys.executable, str(PROCESS), "store", str(store.root), "100"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=failpoints.environment(), check=False)
        assert (ended.returncode, failpoints.missed()) == (-9, [])
        assert int(ended.stdout.split()[0]) == offered + 1, "it continues where the last one was killed"
        offered = int(ended.stdout.split()[-1])
        assert_taken(reader.poll(None), trained(offered), place)
        assert_taken(StoreReceiver(store, tmp_path / "late").poll(None), trained(offered), place)
    assert offered == 1 + 3 + 4
