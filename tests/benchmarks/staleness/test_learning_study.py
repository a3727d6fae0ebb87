"""The study of learning in virtual time: a real policy, whose tokens and steps take the time of a cost model."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import start_model
from support.stores.dict_store import DictStore

from benchmarks.staleness_study.comparison import ADAPTIVE
from benchmarks.staleness_study.learning import config_of, phases_of, study, to_accuracy
from benchmarks.staleness_study.learning_tasks import TASKS, costs_of
from benchmarks.virtual_time.policy import run_policy
from configs.load import load_config
from configs.schema import RunConfig
from millrace.evaluation.results import ResultsReader
from millrace.planning.simulation.costs import Costs
from millrace.rewards.base import Reward, Score
from millrace.runs.history import Step, read_steps
from millrace.types import Prompt
from storage import layout
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.extended

STEPS, TOKEN, TRAIN = 4, 2.0, 5.0
COSTS: Costs = replace(costs_of(TASKS["tiny"]), decode=lambda requests, tokens: TOKEN, train=lambda tokens, _: TRAIN)


def config(bound: int, **settings: object) -> RunConfig:
    """A run of `STEPS` steps of 4 groups."""
    given = {
        "model.path": str(start_model()),
        "pipeline.mode": "async" if bound else "sync",
        "staleness.max_staleness": bound,
        "training.max_steps": STEPS,
        "training.groups_per_step": 4,
        "training.learning_rate": 1e-2,
        "generation.groups_per_batch": 4,
        "evaluation.every": 2,
        "evaluation.num_prompts": 8,
        "promotion.margin": "null",
        **settings,
    }
    return load_config("configs/presets/tiny-cpu.yaml", [f"{key}={value}" for key, value in given.items()])


class EvenEnd(Reward):
    """1 for a response that ends with an even digit: half of those of a policy that has learned nothing."""

    name = "even_end"
    version = "1"

    def score(self, prompt: Prompt, response: str) -> Score:
        return Score(reward=float(response.strip()[-1:] in tuple("02468")))


@pytest.fixture(scope="module", autouse=True)
def _rewarded() -> Iterator[None]:
    # Of the addition task the short start model knows nothing, so it would never earn anything.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.virtual_time.policy.make_reward", lambda *_: EvenEnd())
        yield


def played(bound: int, costs: Mapping[int, Costs] | None = None) -> Store:
    store = DictStore()
    run_policy(config(bound), costs or {0: COSTS}, store)
    return store


@pytest.fixture(scope="module")
def overlapping() -> Store:
    """A campaign with a bound of 2."""
    return played(2)


def ends_of_steps(store: Store) -> list[float]:
    """When each version's metrics were written, seconds."""
    return [step.t for step in read_steps(store) if step.policy_version > 0]


def trajectories(store: Store) -> list[dict[str, Any]]:
    return [
        row
        for part in StreamReader(store, layout.trajectories(0), TRAJECTORY).readable()
        for row in part.table.to_pylist()
    ]


def test_the_same_campaign_takes_the_same_time_and_learns_the_same_again(overlapping: Store) -> None:
    first, second = overlapping, played(2)
    assert ends_of_steps(first) == ends_of_steps(second)
    assert [row["response_tokens"] for row in trajectories(first)] == [
        row["response_tokens"] for row in trajectories(second)
    ]
    results, again = (ResultsReader(store).read() for store in (first, second))
    assert [result["policy_version"] for result in results] == [0, 2, 4]
    assert results == again


def test_a_token_and_a_step_take_what_the_costs_say_and_nothing_else_takes_time() -> None:
    store = played(0)
    rows = trajectories(store)
    for row in rows:
        assert row["t_finished"] - row["t_started"] == pytest.approx(TOKEN * len(row["response_tokens"]))
        assert len(row["rollout_logprobs"]) == len(row["response_tokens"])
    # Nothing overlaps: the longest response of a step, the step, the way of its weights.
    longest = [
        max(len(row["response_tokens"]) for row in rows if row["max_policy_version"] == version)
        for version in range(STEPS)
    ]
    way = COSTS.handover + COSTS.push + COSTS.pause
    ends = [0.0, *ends_of_steps(store)]
    for version, (before, end) in enumerate(itertools.pairwise(ends)):
        assert end - before == pytest.approx(TOKEN * longest[version] + TRAIN + way, abs=0.15)


def test_new_weights_reach_responses_in_flight_and_no_token_is_older_than_the_bound(overlapping: Store) -> None:
    store = overlapping
    assert any(len(row["span_versions"]) > 1 for row in trajectories(store))
    steps = [step.values for step in read_steps(store) if step.policy_version > 0]
    assert max(step["staleness_max"] for step in steps) == 2
    # In the first step sampler and trainer have the same policy, and then no longer.
    assert steps[0]["chi_square"] == pytest.approx(0.0, abs=1e-6)
    assert max(step["chi_square"] for step in steps) > 1e-4


def test_the_costs_of_a_version_hold_from_it_on() -> None:
    store = played(2, {0: COSTS, 2: replace(COSTS, train=lambda tokens, _: 10 * TRAIN)})
    ends = ends_of_steps(store)
    assert ends[1] - ends[0] < 3 * TRAIN
    assert ends[3] - ends[2] >= 10 * TRAIN


def test_campaigns_of_a_task_differ_in_bound_loss_and_seed_and_share_their_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.staleness_study.learning.start_model", lambda root, preset: start_model())
    campaigns = study(Path("/nowhere"), ["chain"], ["aipo", "reinforce"], ["0", "4"], range(2))
    assert len(campaigns) == len({one.run for one in campaigns}) == 2 * 5, "reinforce has no adaptive control"
    configs = {(one.loss, one.bound, one.seed): config_of(one) for one in campaigns}
    assert configs["aipo", "0", 0].pipeline.mode == "sync"
    assert configs["aipo", ADAPTIVE, 1].staleness.control == "adaptive"
    # Places for what the bound admits, and for six steps at most.
    assert configs["reinforce", "4", 0].generation.groups_per_batch == 5 * 16
    assert configs["aipo", ADAPTIVE, 0].generation.groups_per_batch == 6 * 16


def test_the_time_to_an_accuracy_is_a_geometric_mean_if_every_seed_came_to_it() -> None:
    slow = {"curve": [(float(10 * k), 0.1 * k) for k in range(10)]}
    fast = {"curve": [(float(40 * k), 0.1 * k) for k in range(10)]}
    # The mean of three evaluations is 0.4 at the fifth and sixth: at 50 and 200 s.
    assert to_accuracy([slow, fast], 0.4) == pytest.approx(100.0)
    assert to_accuracy([slow, {"curve": [(0.0, 0.1)] * 5}], 0.4) is None


def test_a_phase_costs_its_seconds_per_step_each_counted_by_its_effective_sample_size() -> None:
    task = replace(TASKS["disturbed"], phases=("calm", "slow generators"))
    steps = [
        Step(policy_version=k + 1, incarnation=0, t=t, values={"ratio_effective_sample_size": worth})
        for k, (t, worth) in enumerate([(10.0, 1.0), (20.0, 1.0), (60.0, 0.8), (100.0, 0.8)])
    ]
    assert [(phase["name"], phase["first"]) for phase in phases_of(task, steps)] == [
        ("calm", 0),
        ("slow generators", 2),
    ]
    assert [phase["seconds_per_step"] for phase in phases_of(task, steps)] == pytest.approx([10.0, 50.0])
    slow, calm = costs_of(task, "slow generators"), costs_of(task)
    assert slow.decode(1, 1) == 4 * calm.decode(1, 1)
    assert costs_of(task, "slow reward").score_part > calm.score_part == 0
