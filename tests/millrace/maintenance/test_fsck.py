"""fsck finds and names all damage, and reports no damage in a sound run."""

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from support.evaluation.evaluated import evaluate
from support.stores.dict_store import DictStore
from support.streams.rows import teacher_rows

from millrace.errors import InputError
from millrace.evaluation.results import write_result
from millrace.maintenance.contents import Contents
from millrace.maintenance.fsck import Finding, Report, fsck
from millrace.prompts.blocks import PromptBlock, SourceBlock, write_block
from millrace.rollouts.scored_group import LostPart
from millrace.rollouts.unfinished import UnfinishedWriter
from millrace.types import Request, Response, Trajectory
from storage import layout
from storage.checkpoints import CheckpointWriter, read_latest
from storage.schema import CONSUMED, SCORE, TEACHER
from storage.streams.record import encode
from storage.streams.stream import StreamReader, StreamWriter

TRAJECTORIES = layout.trajectories(0)
SCORES = layout.annotations("scores/exact_match", 0, 0, 2)


def damaged(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.level == "damaged"]


def damaged_files(store: DictStore) -> list[str]:
    return [finding.file for finding in damaged(fsck(store))]


def segments(store: DictStore, stream: str) -> list[str]:
    """Paths of a stream's part files, in order."""
    return [f"{stream}/{record.file}" for record in Contents(store).read_log(stream).parts]


def flip(store: DictStore, path: str, bit: int = 0) -> None:
    data = bytearray(store.objects[path])
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    store.objects[path] = bytes(data)


def test_a_sound_run_is_verified_whole_and_not_changed(small_run: Any, dict_store: DictStore) -> None:
    objects = dict(dict_store.objects)
    report = fsck(dict_store, quarantine=True)
    assert report.findings == []
    assert dict_store.objects == objects
    records = [path for path in objects if "/log/" in path]
    parts = [path for path in objects if "/seg/" in path]
    # Six versions, each with a checkpoint and its weights in the store.
    assert (report.streams, report.parts, report.records, report.checkpoints) == (9, len(parts), len(records), 12)


def test_rows_of_a_teacher_that_are_not_those_of_the_trajectories_are_damage(
    small_run: Any, dict_store: DictStore
) -> None:
    path = layout.annotations("teachers/expert", 0, 0, 1)
    StreamWriter(dict_store, path, TEACHER, "teach-0").write(teacher_rows(0, [None] * 99), tokens=0)
    (finding,) = damaged(fsck(dict_store))
    assert finding.file.startswith(path)
    assert "99 rows" in finding.reason


def rows_of_consumed(store: DictStore) -> list[dict[str, Any]]:
    reader = StreamReader(store, layout.CONSUMED, CONSUMED)
    return [row for part in iter(reader.next, None) for row in part.table.to_pylist()]


def rewrite_consumed(store: DictStore, rows: list[dict[str, Any]]) -> None:
    """Replaces the stream by one with other rows; all checksums are right."""
    store.delete_tree(layout.CONSUMED)
    StreamWriter(store, layout.CONSUMED, CONSUMED, "w").write(pa.Table.from_pylist(rows, schema=CONSUMED), tokens=0)


def test_only_surviving_rows_up_to_the_checkpoint_count(small_run: Any, dict_store: DictStore) -> None:
    small_run.generate(0, num_groups=3)
    small_run.score_everything()
    small_run.train(num_groups=2)
    assert max(row["policy_version"] for row in rows_of_consumed(dict_store)) == 7
    assert fsck(dict_store).findings == [], "version 7 has no checkpoint yet"
    # A new trainer resumes from version 6 and makes version 7 again.
    small_run.return_to_latest()
    small_run.train(num_groups=2)
    small_run.checkpoint()
    repeated = [row for row in rows_of_consumed(dict_store) if row["policy_version"] == 7]
    assert {row["incarnation"] for row in repeated} == {0, 1}
    assert fsck(dict_store).findings == []


@pytest.mark.parametrize("stream", [layout.CONSUMED, layout.TRAINER_LOGPROBS])
def test_a_damaged_part_of_the_trainers_streams_is_moved(small_run: Any, dict_store: DictStore, stream: str) -> None:
    path = segments(dict_store, stream)[1]
    flip(dict_store, path, bit=1234)
    (finding,) = damaged(fsck(dict_store, quarantine=True))
    assert (finding.file, finding.movable) == (path, True)
    assert fsck(dict_store).damaged == 0


def test_a_file_that_was_never_committed_is_a_note(small_run: Any, dict_store: DictStore) -> None:
    small_run.restart_generator(0)
    orphans = ["checkpoints/data/00000003-dead/model", f"{TRAJECTORIES}/seg/0-dead.arrows"]
    of_others = (f"{TRAJECTORIES}/seg/1-beef.arrows", "notes.txt", "logs/train-0.log", "streams/other/0/log/1.json")
    for path in (*orphans, *of_others):
        dict_store.put(path, b"?")
    assert [(finding.level, finding.file) for finding in fsck(dict_store).findings] == [("note", o) for o in orphans]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["a flipped bit", "a missing file"])
def test_any_damage_is_named(small_run: Any, dict_store: DictStore, loss: str) -> None:
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
        assert path in damaged_files(dict_store), f"{loss}, seed 20"


@pytest.mark.parametrize("loss", ["a flipped bit", "a missing file"])
def test_a_damaged_record_is_never_moved(small_run: Any, dict_store: DictStore, loss: str) -> None:
    path = f"{TRAJECTORIES}/{layout.record(3)}"
    later = sum(path.startswith(f"{TRAJECTORIES}/log/") for path in dict_store.objects) - 4
    if loss == "a missing file":
        del dict_store.objects[path]
    else:
        flip(dict_store, path, bit=99)
    objects = dict(dict_store.objects)
    (finding,) = [finding for finding in damaged(fsck(dict_store, quarantine=True)) if finding.file == path]
    assert f"the {later} records after it" in finding.reason
    assert dict_store.objects == objects


@pytest.mark.parametrize("num_parts", [1, 2])
def test_scores_of_other_or_missing_rows_are_damage(
    start_run: Callable[..., Any], dict_store: DictStore, num_parts: int
) -> None:
    run = start_run(dict_store)
    for _ in range(num_parts):
        run.generate(0)
    run.score(0, 0)
    table = StreamReader(dict_store, SCORES, SCORE).next()
    assert table is not None
    second = layout.annotations("scores/exact_match", 0, 1, 2)
    StreamWriter(dict_store, second, SCORE, "w").write(table.table, tokens=0)
    assert damaged_files(dict_store) == [second]


def newest_checkpoint(store: DictStore) -> str:
    return max(path for path in store.objects if path.startswith("checkpoints/log/"))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["account"]["trained"].update(rollouts=1),
        lambda state: state["intake"][1]["trajectories"].update(rows=1),
        lambda state: state.pop("intake"),
    ],
)
def test_a_checkpoint_that_contradicts_the_streams_is_damage(
    small_run: Any, dict_store: DictStore, change: Callable[[dict[str, Any]], None]
) -> None:
    latest = read_latest(dict_store)
    assert latest is not None
    change(latest.state)
    CheckpointWriter(dict_store).commit(latest.step, {}, latest.state)
    assert damaged_files(dict_store) == [newest_checkpoint(dict_store)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [None, {"tokens": 99}, {"outcome": "stale"}, {"generator": 7}, {"masked_tokens": 1}, {"staleness": 9}]
)
def test_consumed_rows_that_contradict_the_account_are_damage(
    small_run: Any, dict_store: DictStore, change: dict[str, Any] | None
) -> None:
    first, *other_rows = rows_of_consumed(dict_store)
    rewrite_consumed(dict_store, [first, *other_rows])
    assert fsck(dict_store).findings == []
    rewrite_consumed(dict_store, other_rows if change is None else [first | change, *other_rows])
    assert damaged_files(dict_store) == [newest_checkpoint(dict_store)]


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
def test_a_small_file_with_other_content_is_damage(
    small_run: Any, dict_store: DictStore, path: str, content: bytes
) -> None:
    dict_store.objects[path] = content
    assert damaged_files(dict_store) == [path]


def test_a_run_continues_without_quarantined_files(small_run: Any, dict_store: DictStore) -> None:
    part, model = segments(dict_store, TRAJECTORIES)[-3], next(p for p in dict_store.objects if p.endswith("/model"))
    missing = segments(dict_store, SCORES)[0]
    for path in (part, model):
        flip(dict_store, path)
    del dict_store.objects[missing]
    objects = dict(dict_store.objects)

    report = fsck(dict_store, quarantine=True)
    assert sorted(finding.file for finding in damaged(report)) == sorted([part, model, missing])
    for finding in damaged(report):
        note = json.loads(dict_store.objects[f"quarantine/{finding.file}.json"])
        assert (note["file"], note["record"]) == (finding.file, finding.record)
    moved = {path: dict_store.objects[f"quarantine/{path}"] for path in (part, model)}
    left = {path: data for path, data in dict_store.objects.items() if not path.startswith("quarantine/")}
    assert moved | left == objects
    assert moved.keys().isdisjoint(left)

    findings = fsck(dict_store).findings
    assert sorted((f.level, f.file) for f in findings) == sorted(("set aside", p) for p in (part, model, missing))
    taken = list(iter(small_run.open_loader(None).take, None))
    assert sum(isinstance(group, LostPart) for group in taken) == 2
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
    assert damaged_files(dict_store) == [part]
    with pytest.raises(InputError):
        fsck(dict_store, quarantine=True)
    assert part in dict_store.objects


def test_a_damaged_promoted_model_is_found_and_not_moved(small_run: Any, dict_store: DictStore) -> None:
    report = fsck(dict_store)
    small_run.promote()
    sound = fsck(dict_store)
    assert sound.findings == []
    assert (sound.checkpoints, sound.records) == (report.checkpoints + 1, report.records + 2)
    (path,) = (p for p in dict_store.objects if p.startswith(layout.PROMOTED) and p.endswith("model.safetensors"))
    flip(dict_store, path)
    (finding,) = damaged(fsck(dict_store, quarantine=True))
    assert (finding.file, finding.record, finding.movable) == (path, 1, False)
    assert path in dict_store.objects


def test_damaged_evaluations_move_and_blocks_of_prompts_do_not(small_run: Any, dict_store: DictStore) -> None:
    source = SourceBlock(
        groups=[0, 1],
        positions=[0, 1],
        num_prompts=2,
        num_easy=0,
        num_hard=0,
        weight=1.0,
        credit=0.0,
        num_dropped=0,
    )
    block = PromptBlock(policy_version=0, sources={"default": source})
    for number in range(3):
        write_result(dict_store, {"policy_version": number, "accuracy": 0.5, "prompts": 8, "t": 50.0})
        assert write_block(dict_store, number, block)
    assert fsck(dict_store).damaged == 0
    result, prompt_block = layout.evaluation(1), layout.prompt_block(1)
    for path in (result, prompt_block):
        dict_store.objects[path] = dict_store.objects[path][:-7]
    findings = damaged(fsck(dict_store, quarantine=True))
    assert sorted((finding.file, finding.movable) for finding in findings) == [(result, True), (prompt_block, False)]
    assert result not in dict_store.objects
    assert damaged_files(dict_store) == [prompt_block]
    del dict_store.objects[prompt_block]
    assert damaged_files(dict_store) == [prompt_block]


def test_damaged_answers_of_an_evaluation_are_set_aside(small_run: Any, dict_store: DictStore) -> None:
    evaluate(dict_store, 2, {"a": [("A", 1.0)]})
    assert fsck(dict_store).damaged == 0
    path = layout.answers(2)
    dict_store.objects[path] = dict_store.objects[path][:-7]
    assert [(finding.file, finding.movable) for finding in damaged(fsck(dict_store, quarantine=True))] == [(path, True)]
    assert path not in dict_store.objects
    assert damaged_files(dict_store) == []


def test_unfinished_responses_are_sound(small_run: Any, dict_store: DictStore) -> None:
    parts = fsck(dict_store).parts
    response = Response(
        tokens=(3, 5), rollout_logprobs=(-0.5, -0.25), version_spans=((2, 0),), finish_reason="unfinished"
    )
    request = Request(group_id=90, sample_index=0, prompt_tokens=(), seed=0)
    trajectory = Trajectory(request=request, response=response, t_started=1.0, t_finished=0.0)
    UnfinishedWriter(dict_store, 0, vocab_size=16).write([trajectory], 0)
    report = fsck(dict_store)
    assert (report.findings, report.parts) == ([], parts + 1)


@pytest.mark.parametrize(
    "change",
    [{"rows": 3}, {"first_row_id": 5}, {"tokens": 99}, {"group_ids": [5]}, {"min_policy_version": 2}, {"file": "../x"}],
)
def test_a_record_that_contradicts_its_rows_is_damage(
    small_run: Any, dict_store: DictStore, change: dict[str, Any]
) -> None:
    record = Contents(dict_store).read_log(TRAJECTORIES).records[-1]
    odd_record = dataclasses.replace(record, **change)
    dict_store.objects[f"{TRAJECTORIES}/{layout.record(record.seq)}"] = encode(odd_record)
    assert f"{TRAJECTORIES}/{odd_record.file}" in damaged_files(dict_store)
