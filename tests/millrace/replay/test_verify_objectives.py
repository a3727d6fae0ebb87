"""What a loss leaves out, weighs or averages otherwise is reproduced bit for bit: it follows from what is stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.replay.trained_run import train_and_store
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.replay.verify import verify

OWN = "tests.support.training.own_functions"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "masks": {
        "loss": "sequence_tis",
        "masks": {"min_token_ratio": 0.01, "max_token_ratio": 20, "max_kl": 1, "max_kl_negative": 0.5},
        "aggregation": "prompt_mean",
        "kl": {"coefficient": 0.1, "importance_weighted": True, "straight_through": True},
    },
    "not finite": {"loss": f"{OWN}:overflowing", "advantage": f"{OWN}:better_than_half", "non_finite": "mask"},
}


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_run_with_this_objective_is_reproduced_bit_for_bit(
    tmp_path: Path,
    make_model: Callable[..., LlamaForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
    objective: dict[str, Any],
) -> None:
    make_model(0).save_pretrained(tmp_path / "start")
    run = train_and_store(tmp_path / "run", tmp_path / "start", len(tokenizer), **objective)
    verdict = verify(run.store)
    assert verdict.sentence == "steps 1 to 12 and 4 checkpoints are the same bit for bit"
    assert len({one.hash for one in verdict.checkpoints}) == 4, "witness: the weights moved"
