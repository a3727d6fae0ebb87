"""Rollouts of a stored run as demonstrations: chosen by a condition, each once, named by the content of their parts."""

import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from support.replay.trained_run import TrainedRun, rewrite
from support.streams.rows import read_rows

from configs.task import PromptsConfig
from millrace.errors import InputError, PromptsError
from millrace.prompts.dataset import load_prompts
from millrace.prompts.stored import is_stored_run, rows_where, stored_demonstrations, stored_parts
from millrace.rollouts.consumed import read_consumed
from millrace.types import Prompt
from storage import layout
from storage.schema import TRAJECTORY
from storage.streams.stream import write_removed

WHERE = "reward >= 0.25 and outcome = 'trained'"


def tokens(prompts: list[Prompt]) -> list[tuple[int, ...]]:
    return [prompt.demonstration.tokens for prompt in prompts if prompt.demonstration is not None]


def test_the_rollouts_that_fulfil_the_condition_are_learned_as_they_were_sampled(unchanged: TrainedRun) -> None:
    prompts = stored_demonstrations(unchanged.store.url, WHERE)
    rows = {
        (generator, row["row_id"]): row
        for generator in (0, 1)
        for row in read_rows(unchanged.store, layout.trajectories(generator), TRAJECTORY)
    }
    chosen = [
        rows[row["generator"], row["trajectory_row_id"]]
        for row in read_consumed(unchanged.store).to_pylist()
        if row["outcome"] == "trained" and row["reward"] >= 0.25
    ]
    pairs = {(tuple(row["prompt_tokens"]), tuple(row["response_tokens"])): row["prompt_id"] for row in chosen}
    assert pairs
    assert Counter(tokens(prompts)) == Counter(response for _, response in pairs)
    assert {prompt.prompt_id for prompt in prompts} <= {row["prompt_id"] for row in chosen}
    assert {prompt.answer for prompt in prompts} == {"1"}


def doubled(table: pa.Table) -> pa.Table:
    """The second row of a part says what the first one says."""
    same = table.take([0, 0, *range(2, table.num_rows)])
    for name in ("row_id", "sample_index"):
        same = same.set_column(same.schema.get_field_index(name), same.schema.field(name), table[name])
    return same


def test_equal_pairs_of_prompt_and_response_are_learned_once(unchanged: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(unchanged.folder, tmp_path / "run")
    copy = TrainedRun(tmp_path / "run")
    rewrite(copy, layout.trajectories(0), TRAJECTORY, doubled)
    prompts = stored_demonstrations(copy.store.url, "true")
    assert 0 < len(prompts) < len(stored_demonstrations(unchanged.store.url, "true"))
    pairs = [(prompt.text, tokens([prompt])[0]) for prompt in prompts]
    assert len(set(pairs)) == len(pairs)


def test_without_a_condition_only_right_answers_are_learned(unchanged: TrainedRun) -> None:
    assert len(stored_demonstrations(unchanged.store.url, "true")) > len(
        stored_demonstrations(unchanged.store.url, WHERE)
    )
    # No reward of this run is 1.
    with pytest.raises(PromptsError) as caught:
        stored_demonstrations(unchanged.store.url, None)
    assert "reward >= 1" in caught.value.read


def test_a_condition_that_does_not_end_is_interrupted(unchanged: TrainedRun) -> None:
    endless = "reward >= (select count(*) from range(1000000) a, range(1000000) b where (a.range + b.range) % 7 = 3)"
    with pytest.raises(InputError) as caught:
        rows_where(read_consumed(unchanged.store), endless, longest_ms=100)
    assert "maximum execution time" in caught.value.read


def test_a_text_may_hold_the_name_of_a_function(unchanged: TrainedRun) -> None:
    assert rows_where(read_consumed(unchanged.store), "outcome <> 'random()'").num_rows > 0


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("reward > 9", "reward > 9"),
        ("rewards > 0", "rewards"),
        ("1; 2", "1; 2"),
        *(
            (where, "changes with")
            for where in ("random() < 2", "now() > '2020-01-01'", "uuid() > ''", "Random () < 2")
        ),
        ("current_date > '2020-01-01'", "changes with"),
        ("current_timestamp > '2020-01-01'", "changes with"),
        ("1 = (select count(*) from range(1) using sample 1)", "changes with"),
    ],
)
def test_a_condition_that_chooses_nothing_or_is_none_is_refused(unchanged: TrainedRun, where: str, part: str) -> None:
    with pytest.raises(PromptsError) as caught:
        stored_demonstrations(unchanged.store.url, where)
    assert part in caught.value.read


def test_a_run_is_a_source_of_prompts_with_a_held_out_half(unchanged: TrainedRun, tmp_path: Path) -> None:
    url = unchanged.store.url
    prompts = load_prompts(PromptsConfig(source=url, demonstrations=True, where=WHERE, num_eval=2))
    assert {prompt.text for prompt in prompts.train}.isdisjoint(prompt.text for prompt in prompts.eval)
    assert [is_stored_run(source) for source in (url, str(tmp_path), "no/run", "shown.jsonl")] == [True] + [False] * 3


def test_a_condition_needs_a_stored_run(tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.raises(PromptsError) as caught:
        load_prompts(PromptsConfig(source=str(path), demonstrations=True, where=WHERE, num_eval=1))
    assert caught.value.key == "prompts.source"


def test_the_parts_name_their_content(unchanged: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(unchanged.folder, tmp_path / "run")
    copy = TrainedRun(tmp_path / "run")
    assert stored_parts(copy.store.url) == stored_parts(unchanged.store.url)
    assert layout.trajectories(1) in stored_parts(copy.store.url)


def test_rollouts_that_were_removed_are_named(unchanged: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(unchanged.folder, tmp_path / "run")
    store = TrainedRun(tmp_path / "run").store
    write_removed(store, layout.trajectories(0), parts=2, why="a test")
    with pytest.raises(PromptsError) as caught:
        stored_demonstrations(store.url, "true")
    assert "first 2 parts" in caught.value.read
