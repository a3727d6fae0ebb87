"""The trainer's loop under adaptive control."""

import time
from collections.abc import Callable

import pytest
from support.stages.trainer_bench import HurriedStage, TrainerBench
from transformers import LlamaForCausalLM

from millrace.runs.decisions import read_decisions
from storage.stores.memory import MemoryStore

ADAPTIVE = {"control": "adaptive", "max_staleness": 3}

MakeBench = Callable[..., TrainerBench]


@pytest.fixture
def make_bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> MakeBench:
    """`make(**config)`: a trainer in a separate store."""
    return lambda **config: TrainerBench(memory_store, make_model, **config)


@pytest.fixture(autouse=True)
def made_up_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the bench's trajectories are made up, far from the policy's."""
    monkeypatch.setattr("millrace.control.collapse._MOST_KL", 1e9)
    monkeypatch.setattr("configs.operation.StalenessConfig.ess_target", 0.02)
    monkeypatch.setattr("millrace.control.rule.Means.expected_ess", lambda self, other, bound: 1.0)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer seems to have waited all of its time."""
    monkeypatch.setattr(HurriedStage, "seconds", lambda self, what: time.monotonic())


def commit_step(bench: TrainerBench, version: int, rewards: list[float] | None = None) -> None:
    """The two groups of the step from `version`, sampled by it; the generator has waited half of its time."""
    for group in (2 * version, 2 * version + 1):
        bench.commit(group, [[version] * 4, [version] * 4], rewards)
    bench.generator(None, seconds={"idle": float(version), "generate": float(version)})


def steps(bench: TrainerBench, first: int, last: int, rewards: list[float] | None = None) -> None:
    for version in range(first, last):
        bench.later(lambda version=version: commit_step(bench, version, rewards))


@pytest.mark.usefixtures("waiting")
def test_a_new_bound_is_published_with_the_next_version(make_bench: MakeBench) -> None:
    bench = make_bench(staleness=ADAPTIVE)
    steps(bench, 0, 10)
    assert bench.train() == 10
    [decision] = read_decisions(bench.store)
    # Five steps after the first two, with generators that wait half of their time: twice as many groups in flight.
    assert (decision.action, decision.policy_version, decision.max_staleness) == ("raise", 7, 3)
    assert "100%" in decision.reason
    assert "generators 50%" in decision.reason
    assert list(bench.bounds.values()) == [1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3]
    assert bench.metric("max_staleness")[-1] <= 3
    [event] = [payload for kind, payload in bench.stage.told if kind == "staleness.control"]
    assert event["max_staleness"] == 3
    assert event["sentence"] in bench.stage.heard


@pytest.mark.usefixtures("waiting")
def test_a_generator_with_only_stragglers_counts_as_waiting_for_room(make_bench: MakeBench) -> None:
    bench = make_bench(staleness=ADAPTIVE)

    def commit_late(version: int) -> None:
        commit_step(bench, version)
        bench.generator(None, seconds={"idle": 0.0, "generate": 2.0 * version}, starved_ms=1000 * version)

    for version in range(8):
        bench.later(lambda version=version: commit_late(version))
    assert bench.train() == 8
    [decision] = read_decisions(bench.store)
    assert "generators 50%" in decision.reason


@pytest.mark.usefixtures("waiting")
def test_a_restarted_trainer_uses_the_bounds_of_its_checkpoint(make_bench: MakeBench) -> None:
    bench = make_bench(staleness={**ADAPTIVE, "too_old": "mask"})
    steps(bench, 0, 8)
    bench.train()
    assert bench.bounds[8] == 3
    bench.bounds.clear()
    bench.train()
    assert bench.bounds == {8: 3}
    # Tokens of versions up to 7 were sampled under a bound of 1: of 5, 6 was the last trainer that could take them, and
    # of 7 it is this one.
    bench.commit(100, [[5, 7], [7, 7]])
    bench.commit(101, [[5, 5], [5, 5]])
    bench.commit(102, [[8, 8], [8, 8]])
    assert bench.train() == 9
    assert bench.outcomes()[101] == ["stale", "stale"]
    rows = [row for row in bench.consumed() if row["group_id"] == 100]
    assert [row["masked_tokens"] for row in rows] == [1, 0]
    # Of the step from version 8: a token of version 5 is masked, three of version 7 and four of version 8 are trained.
    assert bench.metric("trained_tokens_of_staleness/1")[-1] == 3
    assert bench.metric("trained_tokens_of_staleness/0")[-1] == 4


def test_a_fixed_bound_never_changes(make_bench: MakeBench) -> None:
    bench = make_bench()
    steps(bench, 0, 3)
    bench.train()
    assert set(bench.bounds.values()) == {2}
    assert read_decisions(bench.store) == []
