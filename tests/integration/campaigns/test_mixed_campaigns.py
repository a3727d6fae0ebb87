"""Campaigns of mixtures: with kills, with changes on resume, and with a single source."""

import itertools
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, await_end, final_weights
from support.streams.rows import read_rows

from dashboard.queries.events import config_changes
from dashboard.read.run_reader import RunReader
from millrace.prompts.blocks import PromptBlock, read_block
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import verify
from millrace.runs.record import latest_attempt
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.checkpoints import stored_checkpoints
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.base import Store

pytestmark = pytest.mark.campaign

STEPS, GROUPS = 8, 8
SETTINGS: dict[str, object] = {
    # The calculator needs characters that the shared start model does not know.
    "model.path": None,
    "training.max_steps": STEPS,
    "training.groups_per_step": GROUPS,
    "generation.groups_per_batch": 4,
    "prompts.num_eval": 16,
    # A block of prompts is two steps.
    "staleness.max_staleness": 1,
}
SUMS: dict[str, Any] = {"weight": 2.0, "scoring": {"reward": "tests.support.rewards.own_rewards:length"}}
DIGITS: dict[str, Any] = {"prompts": {"digits": 1}, "generation": {"group_size": 4}}
CALCULATOR: dict[str, Any] = {
    "prompts": {"digits": 1},
    "environment": {"name": "calculator", "max_turns": 2},
    "generation": {"max_new_tokens": 12},
}
MIXTURE = {"sums": SUMS, "digits": {**DIGITS, "scoring": {"replicas": 1}}, "calculator": CALCULATOR}
"""Replica 1 of the score stage scores the digits alone."""
KILLS = (
    "generate-0 generate.before_commit 3 kill",
    "generate-0 put.after:streams/trajectories/0/log/* 3 kill",
    "score-0 score.before_commit 2 kill",
    "score-1 score.before_commit 2 kill",
    "score-0 put.mid:streams/scores/*/seg/* 3 kill",
    "train-0 train.mid_step 4 kill",
)


def blocks(store: Store) -> list[PromptBlock]:
    numbers = itertools.count()
    return list(iter(lambda: read_block(store, next(numbers)), None))


def sources_by_group(store: Store) -> list[str]:
    """The source of each group by its number, as decided."""
    sources: list[str] = []
    for block in blocks(store):
        names = {group: name for name, source in block.sources.items() for group in source.groups}
        sources += [names[group] for group in range(len(names))]
    return sources


def trained_groups(store: Store, *, after: int = 0) -> Counter[str]:
    """Groups of each source in the batches of the steps after this version."""
    run = SourceRun(store)
    names = run.groups["source"].to_pylist()
    return Counter(names[row] for step in run.steps if step > after for row in run.batch(step))


def assert_replayed(store: Store) -> None:
    verdict = verify(store)
    assert (verdict.difference, len(verdict.passed)) == (None, STEPS)


def assert_every_group_is_as_decided(store: Store) -> None:
    """Also those that were made several times."""
    rows = read_rows(store, layout.trajectories(0), TRAJECTORY)
    sources = sources_by_group(store)
    assert {row["source"] for row in rows if row["source"] != sources[row["group_id"]]} == set()
    prompts = {(row["group_id"], row["prompt_id"]) for row in rows}
    assert len(prompts) == len({group_id for group_id, _ in prompts})


def assert_complete(millrace: Millrace, run_id: str) -> None:
    summary, store = millrace.summary(run_id), millrace.store(run_id)
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    assert_balanced(summary)
    millrace.run("fsck", store.url).expect_success()
    trained = trained_groups(store)
    assert {name: source["groups_trained"] for name, source in summary["sources"].items()} == trained
    assert_every_group_is_as_decided(store)
    assert_replayed(store)


def run_killed(millrace: Millrace, tmp_path: Path, run_id: str, **settings: object) -> Store:
    """Runs the mixture with kills at KILLS, and of the trainer at version 5."""
    armed = millrace.arm(tmp_path / "fired", *KILLS)
    process = millrace.start(*millrace.campaign(run_id, **settings))
    millrace.wait_for_version(run_id, 5, 300, every=0.01)
    os.kill(millrace.status_record(run_id, "train-0")["pid"], signal.SIGKILL)
    await_end(process, 400).expect_success()
    assert armed.missed() == []
    return millrace.store(run_id)


def test_killed_in_sync_mode_a_mixture_asks_the_same_and_ends_in_the_same_weights(
    millrace: Millrace, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "sources": MIXTURE, "pipeline.mode": "sync"}
    millrace.finish("calm", **settings)
    calm = millrace.store("calm")
    killed = run_killed(millrace, tmp_path, "killed", **settings)
    assert_complete(millrace, "killed")
    assert blocks(killed) == blocks(calm)
    assert final_weights(killed, STEPS) == final_weights(calm, STEPS)
    assert trained_groups(killed) == trained_groups(calm)
    shares = {"sums": 0.5, "digits": 0.25, "calculator": 0.25}
    for name, groups in trained_groups(calm).items():
        assert groups == pytest.approx(shares[name] * STEPS * GROUPS, abs=2)


@pytest.mark.extended
def test_killed_in_async_mode_a_mixture_keeps_its_shares_and_is_replayed_bit_for_bit(
    millrace: Millrace, tmp_path: Path
) -> None:
    store = run_killed(millrace, tmp_path, "killed", **SETTINGS, sources=MIXTURE)
    assert_complete(millrace, "killed")
    trained = trained_groups(store)
    assert trained.total() == STEPS * GROUPS
    # Groups of the newest weights are still buffered or in flight.
    for name, share in {"sums": 0.5, "digits": 0.25, "calculator": 0.25}.items():
        assert trained[name] == pytest.approx(share * STEPS * GROUPS, abs=GROUPS)


def test_a_resumed_run_has_other_weights_and_a_source_more(millrace: Millrace) -> None:
    cut = 2
    settings = {**SETTINGS, "budget.max_steps": cut}
    millrace.finish("grown", **settings, sources={"sums": SUMS, "calculator": CALCULATOR})
    store = millrace.store("grown")
    former = blocks(store)
    assert set(trained_groups(store)) == {"sums", "calculator"}

    sources = {"sums": {**SUMS, "weight": 1.0}, "calculator": CALCULATOR, "digits": {**DIGITS, "weight": 2.0}}
    ended = millrace.run(*millrace.campaign("grown", "--resume", **SETTINGS, sources=sources))
    output = ended.expect_success()
    recorded = latest_attempt(store).changes
    changes = ["budget.max_steps was", "sources.digits was not set", "sources.sums.weight was 2.0 and is 1.0"]
    assert [change[: len(start)] for change, start in zip(recorded, changes, strict=True)] == changes
    assert all(f"resumed with another setting: {change}" in output for change in recorded)
    view = RunReader(store).look()
    assert config_changes(view) == {cut: recorded}

    summary = millrace.summary("grown")
    assert_complete(millrace, "grown")
    assert blocks(store)[: len(former)] == former
    trained = trained_groups(store, after=cut)
    assert trained["digits"] > 0
    digits = summary["sources"]["digits"]
    assert (digits["groups_trained"], digits["weight"]) == (trained["digits"], 2.0)
    assert 0 <= digits["accuracy"] <= 1
    # The start model is evaluated again, with the added source.
    assert view.evaluation_sets["digits"]["policy_version"].tolist() == [0, STEPS]
    assert view.evaluation_sets["sums"]["policy_version"].tolist() == [0, cut, STEPS]
    rows = read_rows(store, layout.trajectories(0), TRAJECTORY)
    scores = read_rows(store, layout.annotations("scores/exact_match", 0, 0, 1), SCORE)
    versions = {(row["source"], score["verifier_version"]) for row, score in zip(rows, scores, strict=False)}
    (version,) = {version for source, version in versions if source == "digits"}
    assert "own_rewards" not in version
    assert {score["status"] for score in scores} == {"ok"}

    without = {name: sources[name] for name in ("sums", "calculator")}
    line = millrace.run(*millrace.campaign("grown", "--resume", **settings, sources=without)).expect_refusal()
    assert "sources.digits" in line
    assert latest_attempt(store).changes == recorded


@pytest.mark.extended
def test_in_sync_mode_the_run_of_one_source_is_the_run_without_sources(millrace: Millrace) -> None:
    one = {"prompts": {"digits": 2}, "generation": {"max_new_tokens": 4}, "scoring": {"reward": "exact_match"}}
    settings = {**SETTINGS, "pipeline.mode": "sync"}
    for run_id, sources in {"plain": {}, "named": {"sums": one}}.items():
        millrace.finish(run_id, **settings, sources=sources)
    plain, named = (millrace.store(run_id) for run_id in ("plain", "named"))
    streams = [(layout.trajectories(0), TRAJECTORY), (layout.annotations("scores/exact_match", 0, 0, 1), SCORE)]
    streams += [(layout.CONSUMED, CONSUMED), (layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)]
    for path, schema in streams:
        assert untimed(read_rows(named, path, schema)) == untimed(read_rows(plain, path, schema))
    assert weights(named) == weights(plain)
    assert {row["source"] for row in read_rows(named, layout.trajectories(0), TRAJECTORY)} == {"sums"}


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the name of their source, and without times."""
    times = ("t", "t_admitted", "t_started", "t_finished", "t_environment", "t_scored", "seconds")
    return [{name: value for name, value in row.items() if name not in ("source", *times)} for row in rows]


def weights(store: Store) -> dict[int, str]:
    """The checksum of the weights of each checkpoint, by version."""
    return {version: weights_checksum(checkpoint) for version, checkpoint in stored_checkpoints(store).items()}
