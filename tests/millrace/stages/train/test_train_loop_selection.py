"""The trainer's loop with a selection: dropped groups are replaced, and each row is counted once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stages.trainer_bench import HurriedStage, TrainerBench
from support.stores.memory import unused_name
from transformers import LlamaForCausalLM

from configs.requests import ReplayRequest, Selection
from configs.training import SelectionConfig
from millrace.errors import ReplayError
from millrace.models.start_folder import store_start_model
from millrace.replay.selection import select
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import verify
from millrace.rollouts.consumed import read_consumed
from millrace.rollouts.ledger import Amount
from millrace.rollouts.staleness import admission_limit
from millrace.runs.status import StatusReader
from millrace.runtime.arguments import StageArguments
from millrace.stages.train.replay_loop import ReplayLoop
from millrace.stages.train.train_state import open_train_state
from millrace.training.trainer import Trainer
from storage.stores.memory import MemoryStore

MakeBench = Callable[..., TrainerBench]


@pytest.fixture
def make_bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> MakeBench:
    """`make(**selection)`: a trainer of two groups a step, which masks tokens beyond the bound."""
    return lambda **selection: TrainerBench(
        memory_store, make_model, training={"selection": selection}, staleness={"too_old": "mask"}
    )


def test_a_group_without_spread_is_dropped_and_replaced(make_bench: MakeBench) -> None:
    bench = make_bench(drop_zero_advantage=True)
    bench.commit(0, [[0, 0], [0]], [1.0, 1.0])
    bench.commit(1, [[0], [0]], [1.0, 0.0])
    room: list[int] = []
    bench.later(lambda: room.append(bench.status["groups_dropped"]))
    bench.later(lambda: bench.commit(2, [[0], [0]], [0.0, 1.0]))
    assert bench.train() == 1
    assert room == [1], "the generator reads this while the trainer waits for its step"
    assert bench.outcomes() == {0: ["zero_advantage"] * 2, 1: ["trained"] * 2, 2: ["trained"] * 2}
    account = bench.account
    assert account.dropped == {"zero_advantage": Amount(rollouts=2, tokens=3)}
    assert (account.groups_dropped, account.reward_sums["zero_advantage"]) == (1, 2.0)
    assert bench.metric("zero_advantage_share") == [pytest.approx(1 / 3)]
    assert bench.metric("length_ratio") == [1.0], "groups dropped for their rewards are not a bias of length"
    status = StatusReader(bench.store).look()
    assert status["zero_advantage_share"] == pytest.approx(1 / 3)
    assert status["ledger"]["dropped"]["zero_advantage"] == {"rollouts": 2, "tokens": 3}


def test_by_default_a_group_without_spread_is_trained_and_counted(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.commit(0, [[0], [0]], [1.0, 1.0])
    bench.commit(1, [[0], [0]], [1.0, 0.0], truncated=[0])
    assert bench.train() == 1
    assert bench.outcomes() == {0: ["trained"] * 2, 1: ["trained"] * 2}
    assert bench.metric("zero_advantage_share") == [0.5]


def test_a_restarted_trainer_drops_uncounted_groups_again(make_bench: MakeBench) -> None:
    bench = make_bench(drop_zero_advantage=True)
    for number, of_members in enumerate(([1.0, 0.0], [1.0, 0.0], [1.0, 1.0])):
        bench.commit(number, [[0], [0]], of_members)
    assert bench.train() == 1
    assert bench.status["groups_dropped"] == 1
    assert bench.account.groups_dropped == 0, "the step for which it was taken is not done"
    for number in (3, 4):
        bench.commit(number, [[1], [1]], [1.0, 0.0])
    counts: list[int] = []
    bench.later(lambda: counts.append(bench.status["groups_dropped"]))
    assert bench.train() == 2
    assert counts == [1], "counted again, and once"
    assert bench.dropped_at_handover == [0, 0, 0, 1], "the predecessor's count is gone before a generator has weights"
    assert Counter(row["group_id"] for row in bench.consumed()) == dict.fromkeys(range(5), 2)
    assert bench.account.dropped == {"zero_advantage": Amount(rollouts=2, tokens=2)}


def test_in_sync_mode_a_dropped_group_is_replaced_under_the_same_weights(
    memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]
) -> None:
    training = {"max_steps": 6, "selection": {"drop_zero_advantage": True}}
    bench = TrainerBench(memory_store, make_model, training=training, pipeline={"mode": "sync"})
    made: list[int] = []

    def generate() -> None:
        """All groups that a generator may admit; two in three have no spread."""
        version, dropped = bench.status["policy_version"], bench.status["groups_dropped"]
        limit = admission_limit(version, max_staleness=0, groups_per_step=2, groups_dropped=dropped)
        for number in range(len(made), limit):
            bench.commit(number, [[version], [version]], [1.0, float(number % 3 > 0)])
            made.append(version)

    for _ in range(60):
        bench.later(generate)
    assert bench.train() == 6
    assert list(bench.account.staleness) == [0]
    expected = ["trained" if number % 3 == 0 else "zero_advantage" for number in range(len(made))]
    assert [bench.outcomes()[number][0] for number in range(len(made))] == expected
    assert expected.count("trained") == 12, "and no group is left over"


def test_a_run_without_any_spread_is_reported_once(make_bench: MakeBench) -> None:
    bench = make_bench(drop_zero_advantage=True)
    for number in range(25):
        bench.commit(number, [[0], [0]], [0.0, 0.0])
    assert bench.train() == 0
    [(kind, payload)] = [event for event in bench.stage.told if event[0] != "checkpoint.saved"]
    assert (kind, payload["zero_advantage_share"]) == ("selection.starving", 1.0)
    assert payload["sentence"] in bench.stage.heard
    assert bench.status["zero_advantage_share"] == 1.0
    assert StatusReader(bench.store).look()["zero_advantage_share"] == 1.0, "before the first step too"


def test_truncated_responses_are_counted_separately(make_bench: MakeBench) -> None:
    bench = make_bench(truncated="mask")
    bench.commit(0, [[0, 0], [0], [0]], [0.0, 1.0, None], truncated=[0])
    bench.commit(1, [[0, 0, 0], [0]], [0.0, 1.0], truncated=[0, 1])
    bench.later(lambda: bench.commit(2, [[0], [0]], [0.0, 1.0]))
    assert bench.train() == 1
    assert bench.outcomes()[0] == ["truncated", "trained", "error"]
    assert bench.outcomes()[1] == ["truncated", "truncated"]
    rows = [row["advantage"] for row in bench.consumed() if row["group_id"] == 0]
    assert rows == [None, 0.5, None], "the reward of the response that was cut off counts in the baseline"
    account = bench.account
    assert account.dropped == {"truncated": Amount(rollouts=3, tokens=6), "error": Amount(rollouts=1, tokens=1)}
    assert account.groups_dropped == 1
    # The error is taken and not trained; truncated responses count as neither.
    assert bench.metric("length_ratio") == [1.0]


def test_runs_with_a_selection_are_replayed_bit_for_bit(
    make_bench: MakeBench, make_model: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    bench = make_bench(drop_zero_advantage=True, truncated="mask", overlong_buffer=12)
    make_model().save_pretrained(tmp_path)
    store_start_model(bench.store, tmp_path)
    version = bench.train()
    number = 0
    while version < 6:
        old = max(0, version - 3)
        for members, rewards, cut in (
            ([[version] * 2, [version] * 3], [1.0, 1.0], []),
            ([[old, version], [version] * 9, [version] * 16], [1.0, 1.0, 1.0], [2]),
            ([[version] * 16, [version] * 16], [0.0, 1.0], [0, 1]),
            ([[version] * 5, [version]], [0.0, 1.0], []),
        ):
            bench.commit(number, members, rewards, truncated=cut)
            number += 1
        version = bench.train()
    outcomes = {outcome for of_group in bench.outcomes().values() for outcome in of_group}
    assert outcomes == {"trained", "zero_advantage", "truncated"}, "witness"
    assert bench.account.masked.tokens > 0, "witness: some tokens were too old"
    rows = select(SourceRun(bench.store), Selection(dropped=True))
    assert len(rows) == len(bench.outcomes()), "a replay may train dropped groups, as all can be read"
    verdict = verify(bench.store)
    assert (verdict.difference, len(verdict.passed)) == (None, version)


def test_a_replay_applies_its_selection_and_refuses_an_empty_batch(
    make_bench: MakeBench, make_model: Callable[..., LlamaForCausalLM], memory_store: MemoryStore
) -> None:
    bench = make_bench()
    for number, of_members in enumerate(([1.0, 1.0, 1.0], [1.0, 0.0, 0.5], [0.0, 0.0], [1.0, 1.0])):
        bench.commit(number, [[0]] * len(of_members), of_members, truncated=[2] if number == 1 else [])
    assert bench.train() == 2
    selection = SelectionConfig(drop_zero_advantage=True, truncated="mask")
    training = bench.config.training.model_copy(update={"selection": selection})
    store = MemoryStore(unused_name())
    arguments = StageArguments(run_url=store.url, attempt=0, replica=0, handover=Path("/nowhere"))
    config = bench.config.model_copy(update={"training": training})
    stage = HurriedStage(name="train", arguments=arguments, config=config, store=store)
    trainer = Trainer(make_model(), training)
    with open_train_state(stage, trainer) as state, pytest.raises(ReplayError) as refused:
        ReplayLoop(state, ReplayRequest(sources=[bench.store.url], run_id="replay")).run()
    assert "2 zero_advantage" in refused.value.read
    rows = read_consumed(store).to_pylist()
    assert [(row["group_id"], row["outcome"]) for row in rows] == [
        *[(0, "zero_advantage")] * 3,
        *[(1, "trained")] * 2,
        (1, "truncated"),
    ]


group_rewards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=3)
stories = st.lists(
    st.tuples(group_rewards, st.sets(st.integers(0, 2)), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stories, st.sampled_from(["train", "mask"]))
def test_every_trajectory_is_counted_once_with_any_selection(
    make_model: Callable[..., LlamaForCausalLM],
    story: list[tuple[list[float | None], set[int], int, bool]],
    truncated: str,
) -> None:
    """Groups with rewards, those cut off and the age of the first token; after some of them the trainer is stopped."""
    selection = {"drop_zero_advantage": True, "truncated": truncated}
    bench = TrainerBench(MemoryStore(unused_name()), make_model, training={"selection": selection})
    version = 0
    for number, (of_members, cut, age, stop) in enumerate(story):
        versions = [[max(0, version - age), *[version] * i] for i in range(len(of_members))]
        bench.commit(number, versions, of_members, truncated=cut)
        if stop:
            version = bench.train()
    for number in (len(story), len(story) + 1):
        bench.commit(number, [[version], [version]], [1.0, 0.0])
    bench.train()
    account, rows = bench.account, bench.consumed()
    trained_groups = {row["group_id"] for row in rows if row["outcome"] == "trained"}
    # Groups taken since the last step are not counted yet, and will be taken again.
    assert set(Counter((row["group_id"], row["sample_index"]) for row in rows).values()) <= {1}
    by_outcome = Counter(row["outcome"] for row in rows)
    assert by_outcome.pop("trained") == account.trained.rollouts
    assert by_outcome == {reason: amount.rollouts for reason, amount in account.dropped.items()}
    assert account.groups_dropped == len({row["group_id"] for row in rows} - trained_groups)
    for row in rows:
        equal = len({r for r in [*story, ([1.0, 0.0],)][min(row["group_id"], len(story))][0] if r is not None}) == 1
        assert not (equal and row["outcome"] == "trained")


@pytest.mark.parametrize("decides", [{"prompts": {"curriculum_window": 2}}, {"sources": {"default": {}}}])
def test_in_sync_mode_outcomes_are_stored_before_the_next_step(
    memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM], decides: dict[str, dict[str, object]]
) -> None:
    bench = TrainerBench(memory_store, make_model, pipeline={"mode": "sync"}, **decides)
    bench.commit(0, [[0], [0]])
    bench.commit(1, [[0], [0]])
    outcomes: list[dict[int, list[str]]] = []
    bench.later(lambda: outcomes.append(bench.outcomes()))
    assert bench.train() == 1
    assert outcomes == [{0: ["trained"] * 2, 1: ["trained"] * 2}]
