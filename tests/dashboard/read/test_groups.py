"""A group is read from all its streams; a part that cannot be read is a problem, and the rest is there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.stored_run.run import Shape, StoredRun, make_run
from support.stores.dict_store import DictStore
from support.stores.slow_store import SlowStore
from support.streams.rows import part_files, read_rows, teacher_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dashboard.read.groups import MAX_TEXT_ROWS, GroupReader, last_message_tokens
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.read.search import find, parse
from dashboard.read.tokens import TokenTexts
from millrace.errors import InputError
from millrace.maintenance.gc import Retention, carry_out, plan
from storage import layout
from storage.schema import SCORE, TEACHER, TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.local import LocalStore
from storage.streams.stream import StreamReader, StreamWriter

Look = Callable[[], RunData]


@pytest.fixture
def run(stored_run: StoredRun, watch: Callable[..., Look]) -> RunData:
    """The stored run, looked at."""
    data = watch(stored_run.store)()
    assert data.problems == ()
    return data


@pytest.fixture
def reader(stored_run: StoredRun, run: RunData) -> GroupReader:
    return GroupReader(stored_run.store, run.info.config)


def places(run: RunData, **fields: str) -> list[tuple[int, int]]:
    """Generator and first row of each group found, newest first."""
    columns = run.consumed
    starts = find(columns, parse(fields)).starts
    return [(int(columns["generator"][i]), int(columns["trajectory_row_id"][i])) for i in starts]


def test_every_group_that_was_taken_is_read_as_its_streams_tell_it(
    reader: GroupReader, run: RunData, dict_store: DictStore
) -> None:
    trajectories = {g: read_rows(dict_store, layout.trajectories(g), TRAJECTORY) for g in range(2)}
    scores = {
        g: {row["row_id"]: row for s in range(2) for row in read_rows(dict_store, score_path(run, g, s), SCORE)}
        for g in range(2)
    }
    logprobs = {
        (row["generator"], row["trajectory_row_id"]): (row["trainer_logprobs"], row["trainer_entropies"])
        for row in read_rows(dict_store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)
    }
    trained = 0
    for generator, first in places(run):
        group = reader.read(run, generator, first)
        assert group.problems == ()
        expected = [row for row in trajectories[generator] if row["group_id"] == group.group_id]
        assert [response.row_id for response in group.responses] == [row["row_id"] for row in expected]
        for response, row in zip(group.responses, expected, strict=True):
            assert response.trajectory == row
            assert response.score == scores[generator][row["row_id"]]
            assert response.consumed is not None
            assert response.consumed["reward"] == response.score["reward"]
            trainer = response.trainer_logprobs
            assert (trainer is not None) == (response.consumed["outcome"] == "trained")
            if trainer is not None:
                trained += 1
                assert response.trainer_entropies is not None
                assert (trainer.tolist(), response.trainer_entropies.tolist()) == logprobs[generator, row["row_id"]]
                ratios = np.exp(trainer.astype(np.float64) - np.array(row["rollout_logprobs"]))
                assert response.importance_ratios is not None
                np.testing.assert_allclose(response.importance_ratios, ratios, rtol=1e-12)
    assert trained == len(logprobs) == np.count_nonzero(run.trained) > 0


def score_path(run: RunData, generator: int, scorer: int) -> str:
    return layout.annotations(f"scores/{run.info.config['scoring']['reward']}", generator, scorer, 2)


def test_a_group_that_the_trainer_has_not_taken_is_located_by_its_number(
    reader: GroupReader, run: RunData, stored_run: StoredRun, watch: Callable[..., Look]
) -> None:
    older = set(run.consumed["group_id"].tolist())
    stored_run.append(2)
    now = set(watch(stored_run.store)().consumed["group_id"].tolist())
    new = min(now - older)
    # The look is the one before: to it, that group is not taken yet.
    place = reader.locate(new)
    assert place is not None
    group = reader.read(run, *place)
    assert group.group_id == new
    assert all(response.consumed is None for response in group.responses)
    assert all(response.importance_ratios is None for response in group.responses)
    assert all(response.trajectory is not None and response.score is not None for response in group.responses)
    for group_id in sorted(older):
        located = reader.locate(group_id)
        assert located is not None
        assert reader.read(run, *located).group_id == group_id
    assert reader.locate(10**9) is None
    assert reader.locate(-3) is None


@pytest.mark.parametrize(("generator", "row"), [(0, 10**7), (99, 0)])
def test_a_row_that_is_not_there_is_reported_as_missing(
    reader: GroupReader, run: RunData, generator: int, row: int
) -> None:
    with pytest.raises(InputError):
        reader.read(run, generator, row)


def oldest(run: RunData) -> tuple[int, int]:
    """A group of the first part of generator 0, which was trained."""
    return next(place for place in reversed(places(run, outcome="trained", generator="0")))


def test_a_response_has_its_teachers_log_probabilities(run: RunData, dict_store: DictStore) -> None:
    generator, first = oldest(run)
    part = StreamReader(dict_store, layout.trajectories(generator), TRAJECTORY).next()
    assert part is not None and first < part.record.rows
    taught = teacher_rows(0, [[-row / 8] for row in range(part.record.rows)])
    StreamWriter(dict_store, layout.annotations("teachers/expert", generator, 0, 1), TEACHER, "teach-0").write(
        taught, tokens=0
    )
    settings = {"teachers": {"expert": {"replicas": 1}}, "training": {"distillation": {"teacher": "expert"}}}
    group = GroupReader(dict_store, {**run.info.config, **settings}).read(run, generator, first)
    assert [list(response.teacher_logprobs) for response in group.responses] == [
        [-response.row_id / 8] for response in group.responses
    ]


def test_a_damaged_part_is_a_problem_and_the_trainers_rows_are_still_shown(
    reader: GroupReader, run: RunData, dict_store: DictStore
) -> None:
    generator, first = oldest(run)
    whole = reader.read(run, generator, first)
    path = part_files(dict_store, layout.trajectories(0))[0]
    dict_store.objects[path] = dict_store.objects[path][:-1] + b"?"
    fresh = GroupReader(dict_store, run.info.config)
    group = fresh.read(run, generator, first)
    assert len(group.problems) == 1
    assert group.problems[0].startswith(f"{path} (named by record ")
    assert (group.prompt, group.group_id) == (None, whole.group_id)
    for response, intact in zip(group.responses, whole.responses, strict=True):
        assert (response.row_id, response.trajectory) == (intact.row_id, None)
        assert (response.consumed, response.score) == (intact.consumed, intact.score)
        assert response.importance_ratios is None


@pytest.mark.parametrize("what", ["scores", "trainer_logprobs"])
def test_a_damaged_part_of_another_stream_takes_away_that_alone(run: RunData, dict_store: DictStore, what: str) -> None:
    generator, first = oldest(run)
    path = part_files(dict_store, score_path(run, 0, 0) if what == "scores" else layout.TRAINER_LOGPROBS)[0]
    dict_store.objects[path] = b"?"
    group = GroupReader(dict_store, run.info.config).read(run, generator, first)
    assert [problem.partition(" ")[0] for problem in group.problems] == [path]
    assert all(response.trajectory is not None and response.consumed is not None for response in group.responses)
    assert all((response.score is None) == (what == "scores") for response in group.responses)
    assert all(response.trainer_logprobs is None for response in group.responses) == (what == "trainer_logprobs")


def test_rows_that_gc_removed_are_reported_as_removed(run: RunData, dict_store: DictStore) -> None:
    carry_out(dict_store, plan(dict_store, Retention(keep_age=0.0, keep_checkpoints=1)))
    generator, first = oldest(run)
    group = GroupReader(dict_store, run.info.config).read(run, generator, first)
    assert len(group.problems) == 3
    assert all(response.consumed is not None and response.score is None for response in group.responses)


def test_a_damaged_record_hides_its_part_and_nothing_before(run: RunData, dict_store: DictStore) -> None:
    stream = StreamReader(dict_store, layout.trajectories(0), TRAJECTORY)
    hidden = list(iter(stream.next_record, None))[2].first_row_id
    path = f"{layout.trajectories(0)}/{layout.record(3)}"
    dict_store.objects[path] = b"?"
    reader = GroupReader(dict_store, run.info.config)
    generator, first = oldest(run)
    group = reader.read(run, generator, first)
    assert group.prompt is not None
    assert group.problems == ()
    group = reader.read(run, 0, hidden)
    assert group.prompt is None
    assert [problem.partition(":")[0] for problem in group.problems] == [path]


def test_prompts_are_read_and_those_in_damaged_parts_left_out(run: RunData, dict_store: DictStore) -> None:
    damaged = part_files(dict_store, layout.trajectories(1))[0]
    readable = GroupReader(dict_store, run.info.config).prompts(places(run))
    assert list(readable) == places(run)
    dict_store.objects[damaged] = b"?"
    store = SlowStore(dict_store.objects)
    reader = GroupReader(store, run.info.config)
    read = reader.prompts([*places(run), (0, 10**7)])
    assert damaged in store.gets, "the damaged part was met"
    assert 0 < len(read) < len(readable)
    assert read.items() <= readable.items()
    generator, first = next(iter(read))
    prompt = reader.read(run, generator, first).prompt
    assert prompt is not None
    assert read[generator, first] == (prompt["prompt_id"], prompt["prompt_tokens"])


def test_of_a_conversation_the_last_message_is_what_was_asked() -> None:
    table = pa.table(
        {
            "prompt_tokens": [[10, 11, 12, 13, 14, 15], [10, 11], [10, 11, 12]],
            "message_starts": [[0, 2, 5, 8], [], [0, 3]],
        }
    )
    assert [last_message_tokens(table, row) for row in range(3)] == [[12, 13, 14], [10, 11], [10, 11, 12]]


def test_a_run_seen_before_it_had_a_tokenizer_shows_texts_once_it_has_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "mine", fsync=False)
    make_run(store, "mine", Shape(steps=1, groups_per_step=1, group_size=2, generators=1))
    run = RunReader(store)
    groups, texts = run.groups()
    assert texts.text([0]) == "0"
    store.put_if_absent("start/tokenizer.json", Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str().encode())
    assert run.groups()[1].text([0]) == "a"
    assert run.groups()[0] is groups
    assert run.groups()[1] is run.groups()[1]


def test_a_text_is_found_in_prompts_and_responses_and_parts_that_cant_be_read_are_left_out(
    run: RunData, dict_store: DictStore
) -> None:
    reader, groups = GroupReader(dict_store, run.info.config), dict.fromkeys(places(run), 4)
    group = reader.read(run, *next(iter(groups)))
    response = group.responses[1].trajectory
    assert response is not None
    for text in (response["prompt_id"].upper(), " ".join(map(str, response["response_tokens"]))):
        matches, searched = reader.find_text(text, groups, TokenTexts(None))
        assert text.casefold() in matches[next(iter(groups))].casefold()
        assert searched == len(groups)
    dict_store.objects[part_files(dict_store, layout.trajectories(1))[0]] = b"?"
    everything = GroupReader(dict_store, run.info.config).find_text("", groups, TokenTexts(None))[0]
    assert 0 < len(everything) < len(groups)
    assert reader.find_text("", dict.fromkeys(groups, MAX_TEXT_ROWS), TokenTexts(None))[1] == 1
