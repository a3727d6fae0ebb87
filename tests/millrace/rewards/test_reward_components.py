"""The components of rewards as metrics of a step."""

import json
import math

import pytest
from support.streams.scored_groups import scored_group

from millrace.rewards.base import MOST_COMPONENTS, Score, component_means
from millrace.rewards.factory import WeightedSum
from millrace.rewards.isolation.worker import read_score

HOSTILE = ["\ud800", "a\udfff", "", "a\nb", "\x1b[31m", "\0", "\u202e", "x" * 1001]


def texts(*components: dict[str, float]) -> list[str]:
    return [json.dumps(values) for values in components]


def test_each_component_is_averaged_over_the_responses_that_have_it() -> None:
    components = texts(
        {"math": 1.0, "format": 0.5}, {"math": 0.0}, {"math": 0.5, "length": math.inf}, {"math": math.nan}
    )
    assert component_means(components) == {"reward_component/math": 0.5, "reward_component/format": 0.5}


def test_the_number_of_component_metrics_is_limited() -> None:
    components = texts(*({f"case {number:03}": 1.0, "x" * 81: 1.0} for number in range(100)))
    assert list(component_means(components)) == [
        f"reward_component/case {number:03}" for number in range(MOST_COMPONENTS)
    ]


@pytest.mark.parametrize("rewards", [[1.0, None], [None, None]])
def test_a_response_whose_reward_failed_has_no_components(rewards: list[float | None]) -> None:
    means = component_means(scored_group(0, [[1], [1]], rewards).components)
    assert means == ({"reward_component/exact_match": 1.0} if rewards[0] else {})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_score_has_no_component_with_a_hostile_name(name: str) -> None:
    with pytest.raises(ValueError):
        Score(reward=1.0, components={name: 1.0})
    line = json.dumps({"reward": 1.0, "components": {name: 1.0}, "status": "ok", "error": None, "seconds": 0.0})
    assert read_score(line.encode()).status == "error"


def test_a_score_has_at_most_a_thousand_components() -> None:
    with pytest.raises(ValueError):
        Score(reward=1.0, components={str(number): 1.0 for number in range(1001)})


def test_a_sum_whose_names_grow_too_long_is_an_error() -> None:
    part = Score(reward=1.0, components={"x" * 1000: 1.0})
    assert WeightedSum([], {"math": 1.0}).combine({"math": part}).status == "error"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stored_component_with_a_hostile_name_is_no_metric(name: str) -> None:
    assert component_means(texts({"math": 1.0, name: 1.0})) == {"reward_component/math": 1.0}
