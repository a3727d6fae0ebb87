"""Runs with masks, other averages or a learning rate lowered by a rollback are reproduced bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.replay.trained_run import TrainedRun, train_and_store
from support.replay.verdicts import parted
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from configs.requests import Selection
from millrace.replay.compare import compare
from millrace.replay.results import summarize_comparison
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import verify
from millrace.runs.decisions import RATE_FACTOR, ROLL_BACK, StoredDecision
from storage import layout

OWN = "tests.support.training.own_functions"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "masks": {
        "loss": "sequence_tis",
        "masks": {"min_token_ratio": 0.01, "max_token_ratio": 20, "max_kl": 1, "max_kl_negative": 0.5},
        "aggregation": "prompt_mean",
        "kl": {"coefficient": 0.1, "importance_weighted": True},
    },
    "not finite": {"loss": f"{OWN}:overflowing", "advantage": f"{OWN}:better_than_half", "non_finite": "mask"},
}


@pytest.fixture
def train(
    tmp_path: Path, make_model: Callable[..., LlamaForCausalLM], tokenizer: PreTrainedTokenizerFast
) -> Callable[..., TrainedRun]:
    """`train(**training)`: a run with these settings."""
    make_model(0).save_pretrained(tmp_path / "start")
    return partial(train_and_store, tmp_path / "run", tmp_path / "start", len(tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_run_with_this_objective_is_reproduced_bit_for_bit(
    train: Callable[..., TrainedRun], objective: dict[str, Any]
) -> None:
    verdict = verify(train(**objective).store)
    assert verdict.sentence == "steps 1 to 12 and 4 checkpoints are the same bit for bit"
    assert len({checkpoint.hash for checkpoint in verdict.checkpoints}) == 4, "the weights moved"


@pytest.mark.slow
def test_steps_after_a_rollback_use_its_learning_rate(train: Callable[..., TrainedRun]) -> None:
    decision = StoredDecision(
        t=1.0,
        incarnation=0,
        policy_version=6,
        action=ROLL_BACK,
        max_staleness=2,
        reason="version 8: the mean reward is gone",
        measured={RATE_FACTOR: 0.1},
    )
    run = train(decision=decision)
    assert verify(run.store).sentence == "steps 1 to 12 and 4 checkpoints are the same bit for bit"
    table = compare(SourceRun(run.store), ["aipo"], selection=Selection(from_step=9, to_step=9))
    assert summarize_comparison(table)["logprob_error"] == 0.0
    # Without the decision, the first step after the checkpoint makes other weights.
    (run.folder / layout.decision(0)).unlink()
    assert parted(verify(run.store))[:2] == (8, "logprobs")
