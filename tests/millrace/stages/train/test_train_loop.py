"""The trainer's loop on committed trajectories: staleness, waiting, checkpoints and early stops."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.stages.trainer_bench import TrainerBench
from transformers import LlamaForCausalLM

from configs.training import TrainingConfig
from millrace.evaluation.results import write_result
from millrace.evaluation.schedule import stop_if_no_better
from millrace.models.start_folder import store_start_model
from millrace.replay.verify import verify
from millrace.rollouts.ledger import Amount
from millrace.runs.history import read_steps
from millrace.training.checkpoints.names import weights_checksum
from storage.checkpoints import read_latest, stored_checkpoints
from storage.progress import write_progress
from storage.stores.memory import MemoryStore

STRAGGLERS = "waiting for groups that the step would leave too old"

MakeBench = Callable[..., TrainerBench]


@pytest.fixture
def make_bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> MakeBench:
    """`make(**config)`: a trainer in a separate store."""
    return lambda **config: TrainerBench(memory_store, make_model, **config)


def fresh_steps(bench: TrainerBench, first_group: int, last_version: int) -> int:
    """Two groups of the newest version for each step to that version; returns the next group's number."""
    for version in range(last_version):
        for group in (first_group + 2 * version, first_group + 2 * version + 1):
            bench.commit(group, [[version] * 4, [version] * 4])
    return first_group + 2 * last_version


def test_a_lost_version_is_handed_over_again_while_the_trainer_waits(make_bench: MakeBench) -> None:
    bench = make_bench()
    group = fresh_steps(bench, 0, 2)
    bench.later(lambda: bench.lost.append("a flipped bit"))
    bench.later(lambda: None)
    bench.later(lambda: fresh_steps(bench, group, 1))
    assert bench.train() == 3
    assert len(bench.dropped_at_handover) == 1 + 3 + 1
    assert sum("version 2 " in line for line in bench.stage.heard) == 1


def test_tokens_beyond_the_bound_are_masked_and_counted(make_bench: MakeBench) -> None:
    bench = make_bench(staleness={"too_old": "mask"})
    group = fresh_steps(bench, 0, 4)
    bench.train()
    # The trainer is at version 4, and 2 is the oldest that it may train.
    bench.commit(group, [[0, 0, 3], [1, 1], [4]], [1.0, 0.0, 0.5])
    bench.commit(group + 1, [[4], [4]])
    assert bench.train() == 5
    assert bench.outcomes()[group] == ["trained", "stale", "trained"]
    account = bench.account
    assert account.dropped == {"stale": Amount(rollouts=1, tokens=2)}
    assert account.masked == Amount(rollouts=1, tokens=2)
    assert account.trained == Amount(rollouts=16 + 4, tokens=64 + 6)
    assert account.groups_dropped == 0
    assert max(account.staleness) <= 2
    rows = [row for row in bench.consumed() if row["group_id"] == group]
    assert [(row["masked_tokens"], row["staleness"]) for row in rows] == [(2, 1), (2, 1), (0, 1)]
    # All three rewards make the baseline, 0.5.
    assert [row["advantage"] for row in rows] == [0.5, None, 0.0]
    assert bench.metric("masked_token_share")[-1] == pytest.approx(2 / 6)
    # One trained token came after an update in its response.
    [[*_, logprob]] = [logprobs for logprobs in bench.trainer_logprobs() if len(logprobs) == 3]
    assert bench.metric("mismatch_kl_after_update") == pytest.approx([-1.0 - logprob], abs=1e-6)
    assert bench.status["account"] == account.to_json()


def test_a_group_without_trainable_tokens_is_dropped_and_replaced(make_bench: MakeBench) -> None:
    bench = make_bench(staleness={"too_old": "mask"})
    group = fresh_steps(bench, 0, 4)
    bench.train()
    bench.commit(group, [[0, 0], [1]])
    for number in (1, 2):
        bench.commit(group + number, [[4], [4]])
    assert bench.train() == 5
    assert bench.outcomes()[group] == ["stale", "stale"]
    assert bench.account.dropped == {"stale": Amount(rollouts=2, tokens=3)}
    assert (bench.account.groups_dropped, bench.account.masked) == (1, Amount())
    # The bench's tokens are made up, far from the policy's.
    kinds = [kind for kind, _ in bench.stage.told if kind not in ("checkpoint.saved", "training.collapsed")]
    assert kinds == ["staleness.bound-hit"]


@pytest.mark.parametrize("too_old", ["drop", "wait"])
def test_one_too_old_token_drops_the_group_unless_tokens_are_masked(make_bench: MakeBench, too_old: str) -> None:
    bench = make_bench(staleness={"too_old": too_old})
    group = fresh_steps(bench, 0, 4)
    bench.train()
    bench.commit(group, [[1, 4, 4, 4], [4]])
    for number in (1, 2):
        bench.commit(group + number, [[4], [4]])
    assert bench.train() == 5
    assert bench.outcomes()[group] == ["stale", "stale"]
    assert (bench.account.groups_dropped, bench.account.masked) == (1, Amount())


def test_a_kept_group_is_trained_whole_and_the_ledger_counts_its_age(make_bench: MakeBench) -> None:
    bench = make_bench(staleness={"too_old": "keep"})
    group = fresh_steps(bench, 0, 4)
    bench.train()
    bench.commit(group, [[0, 0, 3], [1, 1], [4]], [1.0, 0.0, 0.5])
    bench.commit(group + 1, [[4], [4]])
    assert bench.train() == 5
    assert bench.outcomes()[group] == ["trained"] * 3
    account = bench.account
    assert (account.dropped, account.masked, account.groups_dropped) == ({}, Amount(), 0)
    assert account.trained == Amount(rollouts=16 + 5, tokens=64 + 8)
    assert account.staleness == {0: 16 + 2, 4: 3}, "four versions, under a bound of two"
    rows = [row for row in bench.consumed() if row["group_id"] == group]
    assert [(row["masked_tokens"], row["staleness"], row["advantage"]) for row in rows] == [
        (0, 4, 0.5),
        (0, 4, -0.5),
        (0, 4, 0.0),
    ]
    assert bench.metric("trained_tokens_of_staleness/4")[-1] == 2
    assert bench.metric("length_ratio")[-1] == 1.0
    assert "staleness.bound-hit" not in [kind for kind, _ in bench.stage.told]


@pytest.mark.slow
@pytest.mark.parametrize("order", [("drop", "mask"), ("mask", "drop"), ("keep", "drop", "mask")], ids="-".join)
def test_steps_before_and_after_a_change_of_too_old_are_replayed_exactly(
    make_bench: MakeBench, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path, order: tuple[str, ...]
) -> None:
    bench = make_bench(training={"groups_per_step": 1})
    make_model().save_pretrained(tmp_path)
    store_start_model(bench.store, tmp_path)
    numbers = itertools.count()
    version = bench.train()
    for number, setting in enumerate(order):
        while version < 5 * (number + 1):
            # The first member of one group began three versions ago.
            bench.commit(next(numbers), [[max(0, version - 3), version, version], [version] * 2])
            bench.commit(next(numbers), [[version], [version] * 5])
            version = bench.train(too_old=setting)
    account = bench.account
    assert account.masked.tokens > 0, "witness: some tokens were masked"
    assert account.groups_dropped > 0, "witness: some groups were dropped"
    assert sum(row["masked_tokens"] for row in bench.consumed() if row["outcome"] == "trained") == account.masked.tokens
    verdict = verify(bench.store)
    assert verdict.difference is None
    assert len(verdict.passed) == version


def test_the_trainer_waits_for_a_group_that_the_step_would_make_too_old(make_bench: MakeBench) -> None:
    bench = make_bench(staleness={"too_old": "wait"})
    bench.generator(0)
    fresh_steps(bench, 1, 3)
    # A group of version 0 may be trained by the trainer of version 2, and no later.
    assert bench.train() == 2
    assert bench.stage.waited == [STRAGGLERS]
    assert bench.train() == 2, "a trainer that was restarted waits as well"
    bench.commit(0, [[0, 0, 2], [1]], scored=False)
    bench.generator(2)
    assert bench.train() == 2, "committed, and not scored yet"
    assert bench.stage.waited == [STRAGGLERS]
    bench.score()
    assert bench.train() == 3
    steps = {row["group_id"]: row["policy_version"] for row in bench.consumed()}
    assert steps == {1: 1, 2: 1, 3: 2, 4: 2, 0: 3, 5: 3}, "it came last, and goes before group 6"
    assert bench.account.dropped == {}
    assert max(bench.account.staleness) == 2


def test_groups_that_a_straggler_let_pass_are_counted(make_bench: MakeBench) -> None:
    bench = make_bench(staleness={"too_old": "keep"})
    bench.later(lambda: fresh_steps(bench, 4, 1))
    bench.later(lambda: [bench.commit(group, [[0, 0], [0]]) for group in (3, 0)])
    fresh_steps(bench, 1, 1)
    assert bench.train() == 3
    assert bench.metric("overtaken_groups_max") == [0, 0, 4]
    assert bench.metric("overtaken_groups_mean") == [0, 0, 3]


@pytest.mark.parametrize(
    ("config", "record"),
    [
        ({}, {"t": 0.0}),
        ({}, {"oldest_version_in_flight": None}),
        ({"staleness": {"too_old": "mask"}}, {}),
        ({"staleness": {"too_old": "keep"}}, {}),
        ({"pipeline": {"mode": "sync"}}, {}),
    ],
    ids=["silent generator", "idle generator", "masks", "keeps", "sync mode"],
)
def test_the_trainer_does_not_wait_for_groups_in_flight(
    make_bench: MakeBench, config: dict[str, dict[str, str]], record: dict[str, object]
) -> None:
    bench = make_bench(**{"staleness": {"too_old": "wait"}, **config})
    bench.generator(**{"oldest_version_in_flight": 0, **record})
    fresh_steps(bench, 0, 4)
    assert bench.train() == 4


def test_the_length_bias_of_dropped_groups_is_reported_when_it_begins(make_bench: MakeBench) -> None:
    bench = make_bench(training={"groups_per_step": 1}, staleness={"too_old": "drop"})
    numbers = itertools.count()

    def commit(version: int) -> None:
        if version in (5, 28):
            bench.commit(next(numbers), [[0] * 40, [0] * 40], [1.0, 1.0])
        bench.commit(next(numbers), [[version] * 8, [version] * 8], [0.0, 0.5])

    for version in range(30):
        bench.later(partial(commit, version))
    assert bench.train() == 30
    ratios = bench.metric("length_ratio")
    assert ratios[:5] == [1.0] * 5
    # One group of 40 tokens a member was dropped among twenty of 8.
    assert ratios[19] == pytest.approx(8 / ((20 * 8 + 40) / 21))
    assert bench.metric("reward_ratio")[19] == pytest.approx(0.25 / ((20 * 0.25 + 1.0) / 21))
    events = [payload for kind, payload in bench.stage.told if kind == "staleness.length-bias"]
    # Once the window is full, and again after the ratio was back in bounds.
    assert [event["length_ratio"] for event in events] == [ratios[19], ratios[28]]
    assert events[0]["sentence"] in bench.stage.heard
    assert bench.status["length_ratio"] == ratios[-1]


def test_checkpoint_keep_leaves_the_newest_checkpoints_and_the_best(make_bench: MakeBench) -> None:
    bench = make_bench(training={"checkpoint_every": 1, "checkpoint_keep": 2})
    group = fresh_steps(bench, 0, 3)
    bench.train()
    assert list(stored_checkpoints(bench.store)) == [2, 3]
    best = stored_checkpoints(bench.store)[2]
    write_result(
        bench.store,
        {"policy_version": 2, "weights_checksum": weights_checksum(best), "accuracy": 0.9, "prompts": 10, "t": 1.0},
    )
    for more in range(6):
        bench.commit(group + more, [[3] * 4, [3] * 4])
    assert bench.train() == 6
    assert list(stored_checkpoints(bench.store)) == [2, 5, 6]


def test_the_status_has_the_rewards_of_all_steps_and_a_restarted_trainer_continues_them(make_bench: MakeBench) -> None:
    bench = make_bench(training={"checkpoint_every": 2})
    next_group = fresh_steps(bench, 0, 2)
    bench.train()
    curve = bench.status["reward_curve"]
    assert [version for version, _ in curve] == [1, 2]
    assert curve[-1][1] == bench.status["reward_mean"]
    write_progress(bench.store, "train", 0, {**bench.status, "reward_curve": [*curve, [3, 9.0]]})
    fresh_steps(bench, next_group, 2)
    bench.train()
    continued = bench.status["reward_curve"]
    assert [version for version, _ in continued] == [1, 2, 3, 4]
    assert continued[:2] == curve and continued[2] != [3, 9.0]


def test_a_restarted_trainer_reports_the_steps_that_it_repeats(make_bench: MakeBench) -> None:
    bench = make_bench(training={"checkpoint_every": 2})
    fresh_steps(bench, 0, 2)
    bench.train()
    saved = ("checkpoint.saved", {"policy_version": 2})
    assert bench.stage.told == [saved]
    # As if it had made three more steps and died.
    write_progress(bench.store, "train", 0, {**bench.status, "policy_version": 5})
    bench.train()
    ((kind, payload),) = [event for event in bench.stage.told if event != saved]
    assert (kind, payload["steps"]) == ("trainer.rolled-back", 3)
    assert any("from version 5 to 2" in line for line in bench.stage.heard)


def test_a_trainer_without_a_compiler_trains_uncompiled_and_says_so_once(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    bench = make_bench(training={"compile": True})
    fresh_steps(bench, 0, 2)
    assert bench.train() == 2
    ((kind, payload),) = [event for event in bench.stage.told if event[0] != "checkpoint.saved"]
    assert kind == "trainer.uncompiled"
    assert "no C++ compiler" in payload["sentence"]
    assert [line for line in bench.stage.heard if "uncompiled" in line] == [payload["sentence"]]
    assert [step.values["compiled"] for step in read_steps(bench.store)] == [0, 0]


@pytest.mark.parametrize(
    ("minutes", "config", "saved"),
    [
        (1e-9, {"training": {"checkpoint_every": 1000}}, [1, 2, 3, 4, 5, 6, 7]),
        (10.0, {"training": {"checkpoint_every": 3}, "evaluation": {"every": 2}}, [2, 3, 4, 6, 7]),
    ],
    ids=["minutes", "evaluated versions"],
)
def test_versions_are_checkpointed_by_time_and_for_evaluation(
    make_bench: MakeBench,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float,
    config: dict[str, dict[str, float]],
    saved: list[int],
) -> None:
    monkeypatch.setattr(TrainingConfig, "checkpoint_minutes", minutes)
    bench = make_bench(**config)
    fresh_steps(bench, 0, 7)
    assert bench.train() == 7
    assert list(stored_checkpoints(bench.store)) == saved


def test_training_ends_early_when_evaluations_do_not_improve(make_bench: MakeBench) -> None:
    bench = make_bench(evaluation={"stop_after": 2}, staleness={"max_staleness": 9})

    def evaluate(version: int, accuracy: float) -> None:
        write_result(bench.store, {"policy_version": version, "accuracy": accuracy, "prompts": 8, "t": 50.0})

    group = fresh_steps(bench, 0, 2)
    evaluate(0, 0.5)
    evaluate(1, 0.5)

    def decide() -> None:
        evaluate(2, 0.25)
        stop_if_no_better(bench.store, 0, 2)
        bench.commit(group, [[2], [2]])

    # While the trainer waits for groups.
    bench.later(decide)
    bench.later(lambda: bench.commit(group + 1, [[2], [2]]))
    bench.later(lambda: bench.commit(group + 2, [[2], [2]]))
    assert bench.train() == 3, "the step that it waited for is its last"
    assert not bench.stage.draining, "it ended without being drained"
    assert any("early at version 3" in line for line in bench.stage.heard)
    checkpoint = read_latest(bench.store)
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert bench.train() == 3, "and so does a trainer that is started again"
