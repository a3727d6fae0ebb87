"""Settings that adaptive control can't be combined with."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.schema import RunConfig


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"staleness": {"control": "adaptive", "min_staleness": 5, "max_staleness": 4}},
            "staleness.min_staleness is 5 and staleness.max_staleness is 4; expected min_staleness to be at most",
        ),
        (
            {"staleness": {"control": "adaptive"}, "pipeline": {"mode": "sync"}},
            "staleness.control is adaptive and pipeline.mode is sync, which has a bound of 0; expected control to be",
        ),
        (
            {"staleness": {"control": "adaptive"}, "training": {"loss": "reinforce"}},
            "staleness.control is adaptive and training.loss is reinforce, which has no importance ratios",
        ),
        (
            {"staleness": {"ess_floor": 0.9, "ess_target": 0.8}},
            "staleness.ess_floor is 0.9 and staleness.ess_target is 0.8; expected ess_floor to be less",
        ),
    ],
)
def test_what_adaptive_control_can_not_do_is_refused_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    changed = {**changed, "training": {"max_steps": 1, **changed.get("training", {})}}
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(changed)
    assert sentence in str(refused.value)


def test_adaptive_control_scales_the_learning_rate_by_the_effective_sample_size() -> None:
    config = RunConfig.model_validate({"staleness": {"control": "adaptive"}, "training": {"max_steps": 1}})
    assert config.effective_training.schedule.ess_scaling
    assert not config.training.schedule.ess_scaling
