"""The evaluate stage, whose engine answers at once: `python -m benchmarks.sleeping.evaluate`, with a stage's arguments.

A policy that was never trained would go on to the longest response that the campaign allows.
"""

from unittest.mock import patch

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.sleeping.engines import SleepingEngine
from millrace.runtime.stage import run_stage
from millrace.stages import evaluate


def make_sleeping_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **how: object) -> SleepingEngine:
    """In place of `TransformersEngine`."""
    return SleepingEngine(seconds=0.0, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)


if __name__ == "__main__":
    with patch.object(evaluate, "TransformersEngine", make_sleeping_engine):
        run_stage("evaluate", evaluate.main)
