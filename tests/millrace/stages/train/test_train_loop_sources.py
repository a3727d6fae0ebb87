"""The trainer's loop with several sources: measures of each, what became of its groups, and mixtures that change."""

from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
from support.stages.trainer_bench import TrainerBench
from transformers import LlamaForCausalLM

from millrace.rollouts.consumed import TRAINED, read_consumed
from millrace.rollouts.ledger import Amount
from storage.stores.memory import MemoryStore

MakeBench = Callable[..., TrainerBench]
SOURCES = {"math": {"weight": 2}, "code": {"weight": 1}}


@pytest.fixture
def make_bench(memory_store: MemoryStore, make_model: Callable[..., LlamaForCausalLM]) -> MakeBench:
    """`make(**training)`: a trainer of two sources, `math` and `code`, and two groups a step."""

    def make(sources: dict[str, Any] = SOURCES, **training: Any) -> TrainerBench:
        return TrainerBench(memory_store, make_model, training=training, sources=sources)

    return make


def test_each_source_has_measures_of_its_own(make_bench: MakeBench) -> None:
    bench = make_bench(selection={"drop_zero_advantage": True})
    bench.commit(0, [[0, 0], [0] * 4], [1.0, 0.0], source="math", truncated=[1])
    bench.commit(1, [[0] * 8, [0] * 6, [0] * 4], [0.0, 0.0, 0.0], source="code")
    bench.commit(2, [[0] * 9, [0] * 9, [0] * 9], [90.0, 30.0, 30.0], source="code")
    assert bench.train() == 1
    expected = {
        "groups_trained": (1, 1),
        "groups_dropped": (0, 1),
        "reward_mean": (0.5, 50.0),
        "response_length_mean_tokens": (3.0, 9.0),
        "staleness_mean": (0.0, 0.0),
        "truncated_share": (0.5, 0.0),
        "response_seconds_mean": (1.0, 1.0),
        "score_seconds_mean": (0.25, 0.25),
        "zero_advantage_share": (0.0, 0.5),
        "length_ratio": (1.0, 1.0),
    }
    for name, of_sources in expected.items():
        assert [bench.metric(f"{name}/{source}") for source in SOURCES] == [[value] for value in of_sources], name
    assert bench.metric("reward_mean") == [pytest.approx(151 / 5)], "that of the step is of all responses"


def test_a_step_without_a_source_has_no_means_of_it(make_bench: MakeBench) -> None:
    bench = make_bench()
    for number in (0, 1):
        bench.commit(number, [[0], [0]], source="math")
    assert bench.train() == 1
    assert (bench.metric("groups_trained/math"), bench.metric("groups_trained/code")) == ([2.0], [0.0])
    for name in ("reward_mean", "zero_advantage_share", "length_ratio"):
        assert (len(bench.metric(f"{name}/math")), bench.metric(f"{name}/code")) == (1, []), name


def test_one_source_has_no_measures_apart_from_those_of_the_run(make_bench: MakeBench) -> None:
    bench = make_bench(sources={"math": {}})
    for number in (0, 1):
        bench.commit(number, [[0], [0]], source="math")
    assert bench.train() == 1
    assert len(bench.metric("reward_mean")) == 1
    assert bench.metric("reward_mean/math") == bench.metric("groups_trained/math") == []
    assert "sources" not in bench.status


def test_the_status_record_has_the_ledger_of_each_source_after_restarts(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(selection={"drop_zero_advantage": True}, checkpoint_every=3)
    number = 0

    def commit_step(version: int) -> None:
        nonlocal number
        for source, rewards in (("math", [1.0, 0.0]), ("code", [1.0, 1.0]), ("code", [0.0, None, 1.0])):
            bench.commit(number, [[version] * (len(rewards) + 1) for _ in rewards], rewards, source=source)
            number += 1

    for version in range(5):
        bench.later(lambda version=version: commit_step(version))

    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        # Version 5 is trained and no checkpoint holds it.
        patch.setattr("millrace.stages.train.train_state.TrainState.finish", killed)
        with pytest.raises(RuntimeError):
            bench.train()
    assert bench.status["sources"]["math"]["groups_trained"] == 5
    # The weights that sampled the last three groups are gone.
    number = 12
    bench.give_up(number)
    bench.later(lambda: commit_step(3))
    assert bench.train() == 5, "from the checkpoint of version 3"
    sources = bench.status["sources"]
    assert {name: (of["groups_trained"], of["groups_dropped"]) for name, of in sources.items()} == {
        "math": (5, 0),
        "code": (5, 5),
    }
    rows = read_consumed(bench.store).to_pylist()
    outcomes = Counter((row["source"], row["outcome"]) for row in rows)
    assert outcomes["code", "rolled_back"] > 0, "witness: what the killed trainer had left is counted too"
    for name, of_source in sources.items():
        ledger = {TRAINED: of_source["trained"], **of_source["dropped"]}
        for outcome, amount in ledger.items():
            tokens = sum(row["tokens"] for row in rows if (row["source"], row["outcome"]) == (name, outcome))
            assert amount == Amount(rollouts=outcomes[name, outcome], tokens=tokens).to_json(), (name, outcome)
    total = sum(amount["rollouts"] for of in sources.values() for amount in (of["trained"], *of["dropped"].values()))
    assert total == bench.account.taken().rollouts, "the ledgers of the sources are that of the run"


def test_a_mixture_that_moves_to_a_hard_source_is_no_collapse(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.control.collapse._MOST_KL", 1e9)
    bench = make_bench(on_collapse="stop")

    def commit_step(version: int) -> None:
        # 1 and 0.2 are earned throughout, and from version 12 on almost only the latter.
        hard = {0, 1} if version >= 12 and version % 10 else {1}
        for place in (0, 1):
            source, rewards = ("code", [0.4, 0.0]) if place in hard else ("math", [1.0, 1.0])
            bench.commit(2 * version + place, [[version], [version]], rewards, source=source)

    for version in range(30):
        bench.later(lambda version=version: commit_step(version))
    assert bench.train() == 30
    rewards = bench.metric("reward_mean")
    assert fmean(rewards[-10:]) < 0.5 * fmean(rewards[:10]), "witness: the mean of all responses falls as in a collapse"
