"""fsck finds whatever is not as it was committed, names it, and takes nothing that is sound for damaged."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.stores.dict_store import DictStore

from millrace.errors import InputError
from millrace.evaluation.results import write_result
from millrace.maintenance.fsck import Finding, Report, fsck
from millrace.prompts.curriculum import Block, write_block
from millrace.rollouts.scored_group import LostPart
from storage import layout
from storage.checkpoints import CheckpointWriter, read_latest
from storage.schema import CONSUMED, SCORE
from storage.stores.local import LocalStore
from storage.streams.log import LogReader
from storage.streams.stream import StreamReader, StreamWriter

TRAJECTORIES = layout.trajectories(0)
SCORES = layout.scores("exact_match", 0, 0, 2)


def damaged(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.level == "damaged"]


def segments(store: DictStore, stream: str) -> list[str]:
    """Paths of a stream's part files, in order."""
    records = iter(LogReader(store, stream).next, None)
    return [f"{stream}/{record.file}" for record in records if record.kind == "data"]


def flip(store: DictStore, path: str, bit: int = 0) -> None:
    data = bytearray(store.objects[path])
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    store.objects[path] = bytes(data)


def test_a_sound_run_is_verified_whole_and_left_as_it_is(small_run: Any, dict_store: DictStore) -> None:
    before = dict(dict_store.objects)
    report = fsck(dict_store, quarantine=True)
    assert report.findings == []
    assert dict_store.objects == before
    records = [path for path in before if "/log/" in path]
    parts = [path for path in before if "/seg/" in path]
    assert (report.streams, report.parts) == (9, len(parts))
    assert report.records == len(records)
    # Six versions, each with a checkpoint and its weights in the store.
    assert report.checkpoints == 12
    verified = [*records, *parts, layout.RUN, *(p for p in before if "/data/" in p or p.startswith("start/"))]
    assert report.bytes == sum(len(before[path]) for path in verified)


def change_account(state: dict[str, Any]) -> None:
    state["account"]["trained"]["rollouts"] += 1


def change_cursor(state: dict[str, Any]) -> None:
    state["intake"][1]["trajectories"]["rows"] += 2


def forget_cursors(state: dict[str, Any]) -> None:
    del state["intake"]


def rows_of_consumed(store: DictStore) -> list[dict[str, Any]]:
    reader = StreamReader(store, layout.CONSUMED, CONSUMED)
    return [row for part in iter(reader.next, None) for row in part.table.to_pylist()]


def rewrite_consumed(store: DictStore, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """The same stream, of other rows, as a writer would commit them."""
    rows = rows_of_consumed(store)
    store.delete_tree(layout.CONSUMED)
    writer = StreamWriter(store, layout.CONSUMED, CONSUMED, "w")
    writer.write(pa.Table.from_pylist(change(rows), schema=CONSUMED), tokens=0)


def lose_a_row(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows[1:]


def change_first(name: str, value: object) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Changes the first trajectory, which was trained."""
    return lambda rows: [rows[0] | {name: value}, *rows[1:]]


def test_rows_after_the_checkpoint_and_rolled_back_rows_do_not_count(small_run: Any, dict_store: DictStore) -> None:
    small_run.generate(0, num_groups=3)
    small_run.score_everything()
    small_run.train(num_groups=2)
    ahead = rows_of_consumed(dict_store)
    assert max(row["policy_version"] for row in ahead) == 7
    assert fsck(dict_store).findings == [], "version 7 has no checkpoint yet"
    # Its trainer dies, another goes on from version 6 and makes version 7 once more.
    small_run.return_to_latest()
    small_run.train(num_groups=2)
    small_run.checkpoint()
    again = [row for row in rows_of_consumed(dict_store) if row["policy_version"] == 7]
    assert {row["incarnation"] for row in again} == {0, 1}, "both tell of version 7"
    assert fsck(dict_store).findings == []


@pytest.mark.parametrize("stream", [layout.CONSUMED, layout.TRAINER_LOGPROBS])
def test_a_damaged_part_of_what_the_trainer_told_is_one_finding_and_can_be_moved(
    small_run: Any, dict_store: DictStore, stream: str
) -> None:
    path = segments(dict_store, stream)[1]
    flip(dict_store, path, bit=1234)
    (finding,) = damaged(fsck(dict_store, quarantine=True))
    assert (finding.file, finding.movable) == (path, True)
    assert fsck(dict_store).damaged == 0


def test_what_no_record_names_is_noted_and_is_no_damage(small_run: Any, dict_store: DictStore) -> None:
    small_run.restart_generator(0)
    orphans = {
        f"{TRAJECTORIES}/seg/0-dead.arrows": "never committed",
        f"{TRAJECTORIES}/seg/1-beef.arrows": "not committed yet: its writer may still be running",
        "checkpoints/data/00000003-dead/model": "never committed",
        "notes.txt": "not a file of a run",
        "streams/other/0/log/000000000000.json": "not a file of a run",
    }
    for path in orphans:
        dict_store.put(path, b"?")
    for harmless in ("summary.json", "progress/train-0.json", "logs/train-0.log"):
        dict_store.put(harmless, b"{}")
    write_result(dict_store, {"policy_version": 0, "accuracy": 0.5, "prompts": 8, "t": 50.0})
    report = fsck(dict_store)
    assert {finding.file: finding.reason for finding in report.findings} == orphans
    assert report.damaged == 0


def test_cut_off_writes_of_a_local_store_are_noted(start_run: Callable[..., Any], tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    start_run(store).generate(0)
    (tmp_path / TRAJECTORIES / "seg" / ".tmp-1").write_bytes(b"half")
    (tmp_path / ".tmp-start" / "inner").mkdir(parents=True)
    (tmp_path / ".tmp-start" / "inner" / "model").write_bytes(b"half")
    found = {finding.file: finding.reason for finding in fsck(store).findings}
    assert found == dict.fromkeys([f"{TRAJECTORIES}/seg/.tmp-1", ".tmp-start"], "an interrupted write")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["a flipped bit", "a missing file"])
def test_any_damage_to_what_was_committed_is_named(small_run: Any, dict_store: DictStore, loss: str) -> None:
    chooser = random.Random(20)
    sound = dict(dict_store.objects)
    committed = [path for path in sound if any(kind in path for kind in ("/log/", "/seg/", "/data/", "start/"))]
    if loss == "a missing file":
        # A log that has lost its newest record is a shorter log.
        newest = {path.rpartition("/")[0]: path for path in sorted(sound) if "/log/" in path}.values()
        committed = [path for path in committed if path not in newest]
    for path in chooser.sample(committed, 40):
        dict_store.objects = dict(sound)
        if loss == "a missing file":
            del dict_store.objects[path]
        else:
            flip(dict_store, path, chooser.randrange(8 * len(sound[path])))
        named = [finding.file for finding in damaged(fsck(dict_store))]
        assert path in named, f"{loss} of {path} (seed 20): {named}"


def test_a_missing_record_is_damage_that_cannot_be_moved(small_run: Any, dict_store: DictStore) -> None:
    path = f"{TRAJECTORIES}/{layout.record(3)}"
    del dict_store.objects[path]
    behind = sum(path.startswith(f"{TRAJECTORIES}/log/") for path in dict_store.objects) - 3
    (finding,) = [finding for finding in damaged(fsck(dict_store)) if finding.file == path]
    assert str(behind) in finding.reason
    assert not finding.movable


@pytest.mark.parametrize("num_parts", [1, 2])
def test_scores_of_other_rows_or_of_none_are_damage(
    start_run: Callable[..., Any], dict_store: DictStore, num_parts: int
) -> None:
    run = start_run(dict_store)
    for _ in range(num_parts):
        run.generate(0)
    run.score(0, 0)
    table = StreamReader(dict_store, SCORES, SCORE).next()
    assert table is not None
    second = layout.scores("exact_match", 0, 1, 2)
    StreamWriter(dict_store, second, SCORE, "w").write(table.table, tokens=0)
    assert [finding.file for finding in damaged(fsck(dict_store))] == [second]


def newest_checkpoint(store: DictStore) -> str:
    return max(path for path in store.objects if path.startswith("checkpoints/log/"))


@pytest.mark.parametrize("change", [change_account, change_cursor, forget_cursors])
def test_a_latest_checkpoint_that_does_not_match_the_streams_is_damage(
    small_run: Any, dict_store: DictStore, change: Callable[[dict[str, Any]], None]
) -> None:
    latest = read_latest(dict_store)
    assert latest is not None
    change(latest.state)
    CheckpointWriter(dict_store).commit(latest.step, {}, latest.state)
    assert [finding.file for finding in damaged(fsck(dict_store))] == [newest_checkpoint(dict_store)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lose_a_row,
        *(
            change_first(name, value)
            for name, value in (
                ("tokens", 99),
                ("outcome", "stale"),
                ("generator", 7),
                ("masked_tokens", 1),
                ("staleness", 9),
            )
        ),
    ],
)
def test_a_record_of_consumed_rows_that_contradicts_the_account_is_damage(
    small_run: Any, dict_store: DictStore, change: Callable[..., Any]
) -> None:
    rewrite_consumed(dict_store, lambda rows: rows)
    assert fsck(dict_store).findings == []
    rewrite_consumed(dict_store, change)
    assert [finding.file for finding in damaged(fsck(dict_store))] == [newest_checkpoint(dict_store)]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        *((layout.RUN, content) for content in (b"", b"{", b"[1]", b"\xff", b"{}", b'{"run_id": "a"}', b"[" * 100_000)),
        *((layout.ended(0), content) for content in (b"", b"{}", b'{"state": "well"}')),
        *((layout.START_MANIFEST, content) for content in (b"{", b"{}", b'{"files": {"a": {"path": 1}}}')),
        (layout.promotion(0), b"{torn"),
        (layout.decision(0), b"{}"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_small_file_without_its_content_is_damage(
    small_run: Any, dict_store: DictStore, path: str, content: bytes
) -> None:
    dict_store.objects[path] = content
    assert [finding.file for finding in damaged(fsck(dict_store))] == [path]


def test_damaged_files_in_quarantine_are_out_of_the_way_and_the_run_goes_on(
    small_run: Any, dict_store: DictStore
) -> None:
    part, model = segments(dict_store, TRAJECTORIES)[-3], next(p for p in dict_store.objects if p.endswith("/model"))
    gone = segments(dict_store, SCORES)[0]
    for path in (part, model):
        flip(dict_store, path)
    del dict_store.objects[gone]
    was = {path: dict_store.objects[path] for path in (part, model)}
    sound = {path: data for path, data in dict_store.objects.items() if path not in was}

    first = fsck(dict_store, quarantine=True)
    assert sorted(finding.file for finding in damaged(first)) == sorted([part, model, gone])
    for path, data in was.items():
        assert path not in dict_store.objects
        assert dict_store.objects[f"quarantine/{path}"] == data
    for path in (part, model, gone):
        note = json.loads(dict_store.objects[f"quarantine/{path}.json"])
        assert (note["file"], note["record"]) == (path, next(f.record for f in first.findings if f.file == path))
    left = {path: data for path, data in dict_store.objects.items() if not path.startswith("quarantine/")}
    assert left == sound

    second = fsck(dict_store)
    assert second.damaged == 0
    assert sorted(f.file for f in second.findings if f.level == "set aside") == sorted([part, model, gone])
    taken = list(iter(small_run.open_loader(None).take, None))
    lost = [group for group in taken if isinstance(group, LostPart)]
    assert len(lost) == 2
    assert sum(group.amount().rollouts for group in taken) == 72, "all that was scored, the lost parts included"


@pytest.mark.slow
def test_a_restored_file_is_verified_again(small_run: Any, dict_store: DictStore) -> None:
    part = segments(dict_store, TRAJECTORIES)[0]
    sound = dict_store.objects[part]
    flip(dict_store, part)
    fsck(dict_store, quarantine=True)
    dict_store.objects[part] = sound
    assert fsck(dict_store).findings == []
    flip(dict_store, part, bit=77)
    assert [finding.file for finding in damaged(fsck(dict_store))] == [part]
    with pytest.raises(InputError):
        fsck(dict_store, quarantine=True)
    assert part in dict_store.objects


def test_a_damaged_record_is_never_moved(small_run: Any, dict_store: DictStore) -> None:
    path = f"{TRAJECTORIES}/{layout.record(2)}"
    flip(dict_store, path, bit=99)
    before = dict(dict_store.objects)
    assert path in [finding.file for finding in damaged(fsck(dict_store, quarantine=True))]
    assert dict_store.objects == before


def test_a_promoted_model_is_verified_whole_and_never_moved_aside(small_run: Any, dict_store: DictStore) -> None:
    before = fsck(dict_store)
    small_run.promote()
    sound = fsck(dict_store)
    assert sound.findings == []
    promoted = [path for path in dict_store.objects if path.startswith(f"{layout.PROMOTED}/")]
    assert (sound.checkpoints, sound.records) == (before.checkpoints + 1, before.records + 2)
    assert sound.bytes == before.bytes + sum(len(dict_store.objects[path]) for path in promoted)
    (path,) = (path for path in promoted if path.endswith("model.safetensors"))
    flip(dict_store, path)
    (finding,) = damaged(fsck(dict_store, quarantine=True))
    assert (finding.file, finding.record, finding.movable) == (path, 1, False)
    assert path in dict_store.objects


def test_a_torn_evaluation_is_damage_and_in_quarantine_the_run_can_do_without_it(
    small_run: Any, dict_store: DictStore
) -> None:
    for version in (0, 5):
        write_result(dict_store, {"policy_version": version, "accuracy": 0.5, "prompts": 8, "t": 50.0})
    assert fsck(dict_store).damaged == 0
    path = layout.evaluation(5)
    dict_store.objects[path] = dict_store.objects[path][:-7]
    (finding,) = damaged(fsck(dict_store, quarantine=True))
    assert (finding.file, finding.movable) == (path, True)
    assert path not in dict_store.objects
    assert fsck(dict_store).damaged == 0


def test_a_damaged_or_missing_block_of_a_curriculum_is_damage(small_run: Any, dict_store: DictStore) -> None:
    bytes_before = fsck(dict_store).bytes
    block = Block(prompts=[1, 0], turns=[0.0, 0.0], num_prompts=2, num_easy=0, num_hard=0)
    paths = [layout.curriculum_block(number) for number in range(3)]
    for number in range(3):
        assert write_block(dict_store, number, block)
    assert fsck(dict_store).bytes == bytes_before + sum(len(dict_store.objects[path]) for path in paths)
    flip(dict_store, paths[1], 40)
    [finding] = damaged(fsck(dict_store, quarantine=True))
    assert (finding.file, paths[1] in dict_store.objects) == (paths[1], True)
    del dict_store.objects[paths[1]]
    assert [finding.file for finding in damaged(fsck(dict_store))] == [paths[1]]
