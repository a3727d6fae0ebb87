"""gc removes only files that are no longer needed: checkpoints resume, scorers continue, fsck finds no damage."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.dict_store import DictStore
from support.streams.rows import teacher_rows
from support.weights.versions import trained

from millrace.evaluation.results import write_result
from millrace.maintenance.contents import Contents
from millrace.maintenance.fsck import fsck
from millrace.maintenance.gc import RemovalPlan, Retention, carry_out, plan
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.checkpoints.names import weights_checksum
from millrace.weights.fingerprint import fingerprint
from millrace.weights.store import ANCHOR_EVERY, StoreReceiver, StoreSender
from storage import layout
from storage.checkpoints import CheckpointWriter, checkpoints_backwards, load_file, read_latest
from storage.errors import PartRemoved, StreamCorrupt
from storage.schema import SCORE, TEACHER, TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.base import BytesLike, Entry
from storage.stores.local import LocalStore
from storage.streams.log import LogReader
from storage.streams.stream import StreamReader, StreamWriter, read_removed

StartRun = Callable[..., Any]

DAY = 86400.0
KEEP_NO_ROWS = Retention(keep_age=0.0)
LATER = 2 * 3600.0
"""Seconds after which a file without a record is garbage."""


def gc(store: DictStore, retention: Retention, now: float | None = None) -> RemovalPlan:
    made = plan(store, retention, now=now)
    carry_out(store, made)
    return made


def paths(made: RemovalPlan, kind: str) -> list[str]:
    return [removal.path for removal in made.removals if removal.kind == kind]


def taken_from(run: Any, state: list[dict[str, Any]]) -> list[tuple[int, list[float | None]]]:
    """The groups that a loader opened there returns, with their rewards."""
    groups = list(iter(run.open_loader(state).take, None))
    assert all(isinstance(group, ScoredGroup) for group in groups)
    return [(group.group_id, group.rewards) for group in groups]


def with_files(store: DictStore, root: str = layout.CHECKPOINTS) -> list[bool]:
    """Whether the files of each checkpoint exist, oldest first."""
    contents = Contents(store)
    return [contents.has_files(checkpoint) for checkpoint in contents.checkpoints(root)]


def test_the_planned_files_go_and_every_record_stays(small_run: Any, dict_store: DictStore) -> None:
    objects = dict(dict_store.objects)
    made = plan(dict_store, Retention(), now=time.time() + 400 * DAY)
    assert paths(made, "rows") == [], "without a limit no rows go"
    heads = {stream.path: LogReader(dict_store, stream.path).to_head() for stream in Contents(dict_store).streams}
    made = plan(dict_store, KEEP_NO_ROWS)
    assert dict_store.objects == objects, "planning removes nothing"
    carry_out(dict_store, made)
    gone = objects.keys() - dict_store.objects.keys()
    assert not any("/log/" in path for path in gone)
    assert heads == {path: LogReader(dict_store, path).to_head() for path in heads}, "records and sums stay"
    assert sorted(gone) == sorted(removal.path for removal in made.removals)
    assert made.freed().keys() == {"checkpoints", "weights", "rows"}
    for kind, freed in made.freed().items():
        assert freed == sum(len(objects[path]) for path in paths(made, kind)) > 0


def test_a_part_of_trajectories_and_its_scores_go_together(small_run: Any, dict_store: DictStore) -> None:
    gc(dict_store, KEEP_NO_ROWS)
    for generator in range(2):
        end = read_removed(dict_store, layout.trajectories(generator))
        assert end > 2
        scores = [layout.annotations("scores/exact_match", generator, scorer, 2) for scorer in range(2)]
        assert [read_removed(dict_store, path) for path in scores] == [len(range(s, end, 2)) for s in range(2)]
        for path in (layout.trajectories(generator), *scores):
            files = [f"{path}/{record.file}" for record in Contents(dict_store).read_log(path).parts]
            removed = read_removed(dict_store, path)
            assert [file in dict_store.objects for file in files] == [part >= removed for part in range(len(files))]


def test_rows_that_one_of_two_rewards_has_not_scored_stay(small_run: Any, dict_store: DictStore) -> None:
    assert paths(plan(dict_store, KEEP_NO_ROWS), "rows")
    late = StreamWriter(dict_store, layout.annotations("scores/other", 0, 0, 1), SCORE, "late")
    first = StreamReader(dict_store, layout.annotations("scores/exact_match", 0, 0, 2), SCORE).next()
    assert first is not None
    late.write(first.table, tokens=first.record.tokens)
    gc(dict_store, KEEP_NO_ROWS)
    assert read_removed(dict_store, layout.trajectories(0)) == 1
    assert read_removed(dict_store, layout.annotations("scores/other", 0, 0, 1)) == 1
    assert read_removed(dict_store, layout.trajectories(1)) > 1


def test_rows_that_a_teacher_has_not_passed_stay(small_run: Any, dict_store: DictStore) -> None:
    path = layout.annotations("teachers/expert", 0, 0, 1)
    first = StreamReader(dict_store, layout.trajectories(0), TRAJECTORY).next()
    assert first is not None
    late = StreamWriter(dict_store, path, TEACHER, "teach-0")
    late.write(teacher_rows(0, [None] * first.record.rows), tokens=first.record.tokens)
    gc(dict_store, KEEP_NO_ROWS)
    assert read_removed(dict_store, layout.trajectories(0)) == read_removed(dict_store, path) == 1
    assert read_removed(dict_store, layout.trajectories(1)) > 1


def test_young_rows_and_rows_of_recent_versions_stay(small_run: Any, dict_store: DictStore) -> None:
    # Version 6 is the newest. Each version has two parts of trajectories and one of log-probabilities.
    most = plan(dict_store, KEEP_NO_ROWS).marks[layout.trajectories(0)]
    assert most > 8
    for retention, days, expected in (
        (Retention(), 8, (0, 0)),
        (KEEP_NO_ROWS, 1, (most, 6)),
        (Retention(max_bytes=0), 1, (most, 6)),
        (Retention(keep_age=7 * DAY), 1, (0, 0)),
        (Retention(keep_age=7 * DAY), 8, (most, 6)),
        (Retention(keep_versions=3), 1, (8, 3)),
        (Retention(keep_age=7 * DAY, keep_versions=3), 1, (0, 0)),
        (Retention(keep_age=7 * DAY, keep_versions=3), 8, (8, 3)),
        (Retention(keep_versions=100), 8, (0, 0)),
    ):
        marks = plan(dict_store, retention, now=time.time() + days * DAY).marks
        removed = tuple(marks.get(path, 0) for path in (layout.trajectories(0), layout.TRAINER_LOGPROBS))
        assert removed == expected, (retention, days)


def test_a_limit_on_bytes_takes_the_oldest_parts_and_no_more(small_run: Any, dict_store: DictStore) -> None:
    kept = ("streams/metrics/", f"{layout.CONSUMED}/")
    sizes = {p: len(data) for p, data in dict_store.objects.items() if "/seg/" in p and not p.startswith(kept)}
    total = sum(sizes.values())
    for cap in (total, total - 1, total // 2, 0):
        made = plan(dict_store, Retention(max_bytes=cap))
        left = total - made.freed()["rows"]
        needed = total - plan(dict_store, KEEP_NO_ROWS).freed()["rows"]
        assert left <= cap or left == needed
        assert bool(made.notes) == (left > cap)
        if made.removals and left <= cap:
            # The streams are equally old part by part, so that they are cut at about the same place.
            ends = [made.marks.get(layout.trajectories(generator), 0) for generator in range(2)]
            assert abs(ends[0] - ends[1]) <= 2
    assert paths(plan(dict_store, Retention(max_bytes=total)), "rows") == []


def test_outcomes_stay_when_rows_and_log_probabilities_go(small_run: Any, dict_store: DictStore) -> None:
    consumed = {path: data for path, data in dict_store.objects.items() if path.startswith(layout.CONSUMED)}
    checkpoint = read_latest(dict_store)
    assert checkpoint is not None
    expected = taken_from(small_run, checkpoint.state["intake"])
    gc(dict_store, KEEP_NO_ROWS)
    with pytest.raises(PartRemoved):
        StreamReader(dict_store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS).next()
    assert consumed.items() <= dict_store.objects.items()
    assert taken_from(small_run, checkpoint.state["intake"]) == expected
    small_run.train(num_groups=2)
    assert fsck(dict_store).findings == []


class Listing(DictStore):
    """Its listing may be older than its contents."""

    listed: list[Entry] | None = None

    def entries(self, prefix: str = "") -> list[Entry]:
        return super().entries(prefix) if self.listed is None or prefix else self.listed


def test_a_part_written_after_the_listing_stays(start_run: StartRun) -> None:
    store = Listing()
    run = start_run(store).campaign()
    store.listed = store.entries()
    run.train(num_groups=2)
    made = plan(store, Retention(keep_age=DAY), now=time.time() + 2 * DAY)
    assert LogReader.at_head(store, layout.TRAINER_LOGPROBS).cursor.part == 7
    assert made.marks[layout.TRAINER_LOGPROBS] == 6


def test_the_checkpoint_with_the_best_evaluation_stays(small_run: Any, dict_store: DictStore) -> None:
    checkpoints = Contents(dict_store).checkpoints()

    def evaluate(number: int, accuracy: float, checksum: str | None = None) -> None:
        checkpoint = checkpoints[number]
        weights = {"policy_version": checkpoint.step, "weights_checksum": checksum or weights_checksum(checkpoint)}
        write_result(dict_store, {**weights, "accuracy": accuracy, "prompts": 8, "t": 50.0})

    evaluate(0, 0.9, checksum="00000000")
    evaluate(1, 0.75)
    evaluate(2, 0.5)
    gc(dict_store, Retention(keep_checkpoints=2))
    assert with_files(dict_store) == [False, True, False, False, True, True], "other weights of a version don't count"
    evaluate(4, 0.8)
    gc(dict_store, Retention(keep_checkpoints=1))
    assert with_files(dict_store) == [False, False, False, False, True, True]
    assert fsck(dict_store).damaged == 0


def as_of(store: DictStore, seq: int) -> DictStore:
    """The store as if the log of weights ended with record number `seq`."""
    last = f"{layout.WEIGHTS}/{layout.record(seq)}"
    hint = f"{layout.WEIGHTS}/{layout.HEAD}"
    later = {path for path in store.objects if path.startswith(f"{layout.WEIGHTS}/log/") and path > last}
    return DictStore({path: data for path, data in store.objects.items() if path not in later | {hint}})


@pytest.mark.parametrize("versions", [1, 2, 3, ANCHOR_EVERY, ANCHOR_EVERY + 1, ANCHOR_EVERY + 2, 2 * ANCHOR_EVERY + 1])
def test_the_newest_two_weights_stay_with_their_anchors(
    start_run: StartRun, dict_store: DictStore, tmp_path: Path, versions: int
) -> None:
    start_run(dict_store)
    writer = StoreSender(dict_store)
    for version in range(versions):
        writer.publish(trained(version))
    made = gc(dict_store, Retention())
    # Anchors are 0, 16 and 32.
    first = max(0, versions - 2) // ANCHOR_EVERY * ANCHOR_EVERY
    assert len(paths(made, "weights")) == first
    records = [
        record for record in Contents(dict_store).read_log(layout.WEIGHTS).records if record.kind == "checkpoint"
    ]
    for version in range(first, versions):
        taken = StoreReceiver(as_of(dict_store, records[version].seq), tmp_path / "received").poll(None)
        assert taken is not None
        assert taken.id.policy_version == version
        assert fingerprint(taken.tensors) == fingerprint(trained(version).tensors)
    assert fsck(dict_store).damaged == 0
    writer.publish(trained(versions))
    taken = StoreReceiver(dict_store, tmp_path / "received").poll(None)
    assert taken is not None
    assert taken.id.policy_version == versions


def test_an_adopted_checkpoint_keeps_its_files_and_its_rows(small_run: Any, dict_store: DictStore) -> None:
    _, _, earlier, *_ = checkpoints_backwards(dict_store)
    CheckpointWriter(dict_store).adopt(earlier, earlier.state)
    gc(dict_store, Retention(keep_age=0.0, keep_checkpoints=1))
    for ref in earlier.files.values():
        load_file(dict_store, ref)
    assert taken_from(small_run, earlier.state["intake"])
    assert with_files(dict_store) == [False, False, False, True, False, False, True]
    assert fsck(dict_store).damaged == 0


def test_old_files_without_a_record_go(small_run: Any, dict_store: DictStore) -> None:
    small_run.promote()
    small_run.restart_generator(0)
    dead = [
        f"{layout.trajectories(0)}/seg/0-dead.arrows",
        "checkpoints/data/00000003-dead/model",
        "weights/data/00000003-dead/weights.safetensors",
        f"{layout.PROMOTED}/data/00000007-1/model.safetensors",
    ]
    kept = [f"{layout.trajectories(0)}/seg/1-beef.arrows", "notes.txt", layout.report(0), layout.promotion(0)]
    for path in (*dead, *kept):
        dict_store.put(path, b"?")
    assert paths(plan(dict_store, Retention()), "orphans") == []
    made = gc(dict_store, Retention(), now=time.time() + LATER)
    assert sorted(paths(made, "orphans")) == sorted(dead)
    assert all(path in dict_store.objects for path in kept)


def test_interrupted_writes_of_a_local_store_go(start_run: StartRun, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    start_run(store).generate(0)
    (tmp_path / "streams" / ".tmp-1").write_bytes(b"half")
    (tmp_path / ".tmp-start" / "inner").mkdir(parents=True)
    (tmp_path / ".tmp-start" / "inner" / "model").write_bytes(b"half")
    reasons = {finding.file: finding.reason for finding in fsck(store).findings}
    assert reasons == dict.fromkeys(["streams/.tmp-1", ".tmp-start"], "an interrupted write")
    assert plan(store, Retention()).removals == []
    made = plan(store, Retention(), now=time.time() + LATER)
    carry_out(store, made)
    assert sorted(paths(made, "orphans")) == [".tmp-start", "streams/.tmp-1"]
    assert not list(tmp_path.rglob(".tmp-*"))
    assert fsck(store).findings == []


def test_a_damaged_log_stops_gc_before_it_removes_anything(small_run: Any, dict_store: DictStore) -> None:
    missing = f"{layout.trajectories(1)}/{layout.record(4)}"
    del dict_store.objects[missing]
    objects = dict(dict_store.objects)
    with pytest.raises(StreamCorrupt):
        gc(dict_store, KEEP_NO_ROWS, now=time.time() + LATER)
    assert dict_store.objects == objects


class Dying(DictStore):
    """Fails, once armed, at the n-th change from then on, and at each after it."""

    left: int | None = None

    def put(self, path: str, data: BytesLike) -> None:
        self._change()
        super().put(path, data)

    def delete(self, path: str) -> None:
        self._change()
        super().delete(path)

    def _change(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise OSError("killed")


@pytest.mark.slow
def test_after_a_kill_at_any_change_the_next_gc_finishes(start_run: StartRun) -> None:
    store = Dying()
    run = start_run(store).campaign()
    sound = dict(store.objects)
    state = run.loader.state()
    expected = taken_from(run, state)
    made = plan(store, KEEP_NO_ROWS)
    num_changes = len(made.removals) + len(made.marks)
    carry_out(store, made)
    finished = set(store.objects)
    for survived in range(num_changes):
        store.objects, store.left = dict(sound), survived
        with pytest.raises(OSError):
            carry_out(store, made)
        store.left = None
        assert fsck(store).damaged == 0, f"after {survived} changes"
        assert taken_from(run, state) == expected
        gc(store, KEEP_NO_ROWS)
        assert set(store.objects) == finished, f"after {survived} changes"
    assert num_changes > 20


actions = st.lists(
    st.sampled_from(["generate 0", "generate 1", "score", "train", "checkpoint", "adopt", "weights", "restart", "gc"]),
    max_size=40,
)
retentions = st.builds(
    Retention,
    keep_age=st.none() | st.sampled_from([0.0, 1800.0, 7 * DAY]),
    keep_versions=st.none() | st.integers(1, 5),
    max_bytes=st.none() | st.integers(0, 60_000),
    keep_checkpoints=st.integers(1, 4),
)


def play(run: Any, story: list[str], retention: Retention) -> None:
    """Moves the run on, with a gc wherever the story has one."""
    has_checkpoint = False
    for action in story:
        what, _, generator = action.partition(" ")
        if what == "generate":
            run.generate(int(generator), num_groups=2)
        elif what == "score":
            run.score_everything()
        elif what == "train":
            run.train(num_groups=3)
        elif what == "checkpoint":
            run.checkpoint()
            has_checkpoint = True
        elif what == "adopt" and has_checkpoint:
            run.adopt()
        elif what == "weights":
            run.send_weights()
        elif what == "restart":
            run.restart_generator(0)
        elif what == "gc":
            gc(run.store, retention, now=time.time() + LATER)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(story=actions, retention=retentions)
def test_after_any_gc_every_kept_checkpoint_can_be_resumed(
    start_run: StartRun, story: list[str], retention: Retention
) -> None:
    collected, untouched = start_run(DictStore()), start_run(DictStore())
    play(collected, [*story, "gc"], retention)
    play(untouched, [action for action in story if action != "gc"], retention)
    store = collected.store

    assert fsck(store).damaged == 0
    checkpoints, twins = Contents(store).checkpoints(), Contents(untouched.store).checkpoints()
    files = [frozenset(ref.path for ref in checkpoint.files.values()) for checkpoint in checkpoints]
    kept = list(dict.fromkeys(reversed(files)))[: retention.keep_checkpoints]
    for checkpoint, names, twin in zip(checkpoints, files, twins, strict=True):
        if names in kept:
            for ref in checkpoint.files.values():
                load_file(store, ref)
            later = taken_from(collected, checkpoint.state["intake"])
            assert later == taken_from(untouched, twin.state["intake"])
    # Scorers and generators continue too.
    collected.generate(0)
    collected.score_everything()
    assert fsck(store).damaged == 0
    if any(read_removed(store, layout.trajectories(generator)) for generator in range(2)):
        with pytest.raises(PartRemoved):
            list(iter(collected.open_loader(None).take, None))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_promoted_models_stay(keep: int, small_run: Any, dict_store: DictStore) -> None:
    for _ in range(3):
        small_run.version += 1
        small_run.promote()
    made = gc(dict_store, Retention(keep_age=0.0, keep_checkpoints=keep), now=time.time() + 400 * DAY)
    assert with_files(dict_store, layout.PROMOTED) == [number >= 3 - keep for number in range(3)]
    assert paths(made, "orphans") == []
    assert fsck(dict_store).findings == []
    assert read_latest(dict_store, layout.PROMOTED) is not None
