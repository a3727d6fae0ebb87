"""Verifying a run whose trainer went back and lowered its learning rate: by as much as the decision says."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.replay.trained_run import train_and_store
from support.replay.verdicts import parted
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.replay.verify import verify
from millrace.runs.decisions import ROLL_BACK, StoredDecision
from storage import layout


@pytest.mark.slow
@pytest.mark.parametrize("measured", [{"rate_factor": 0.1, "good_rate": 1e-4, "bad_rate": 1e-3}, {}])
def test_steps_after_a_rollback_are_trained_with_the_rate_that_it_left(
    tmp_path: Path,
    make_model: Callable[..., LlamaForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
    measured: dict[str, float],
) -> None:
    make_model(0).save_pretrained(tmp_path / "start")
    decision = StoredDecision(
        t=1.0,
        incarnation=0,
        policy_version=6,
        action=ROLL_BACK,
        max_staleness=2,
        places=16,
        reason="version 8: the mean reward is gone",
        measured=measured,
    )
    run = train_and_store(tmp_path / "run", tmp_path / "start", len(tokenizer), decision=decision)
    assert verify(run.store).sentence == "steps 1 to 12 and 4 checkpoints are the same bit for bit"
    # The witness: without the decision the first step after the checkpoint makes other weights.
    (run.folder / layout.decision(0)).unlink()
    assert parted(verify(run.store))[:2] == (8, "logprobs")
