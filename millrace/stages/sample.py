"""Samples answers of the start model to some prompts and scores them, for `millrace run --check`.

config ─► prompts, start model, reward ─► three answers to each of three prompts per source ─► texts and rewards

A child process, which answers the question that is its config (`millrace.preflight.child`).
"""

from pathlib import Path
from typing import Any

import torch

from configs.schema import RunConfig
from millrace.evaluation.examiner import EvaluationSet, Examiner
from millrace.preflight.child import serve
from millrace.prompts.dataset import load_all_prompts
from millrace.rewards.scorer import make_scorer
from millrace.stages.evaluate import load_asked_policy

NUM_PROMPTS, NUM_ANSWERS = 3, 3


def sample(question: Any) -> dict[str, Any]:
    """`prompts`: source, text, and pairs of answer and reward, null where it failed; `failure`: the first, a sentence.

    Raises InputError as the checks do.
    """
    config = RunConfig.model_validate(question)
    assert config.model.path is not None
    torch.set_num_threads(config.training.num_threads)
    sources = config.by_source()
    prompts = load_all_prompts(sources)
    engine, rules = load_asked_policy(config, Path(config.model.path).expanduser(), prompts)
    failures: list[str] = []
    shown = []
    with make_scorer(sources) as scorer:
        scorer.on_first_failure = failures.append
        examiner = Examiner(engine, scorer, rules, still_wanted=lambda: True)
        for source, of_source in prompts.items():
            asked = EvaluationSet(prompts=of_source.train[:NUM_PROMPTS], samples=NUM_ANSWERS)
            for answered in examiner.measure(source, asked)[1]:
                # The first one is greedy.
                pairs = [(answer.response, answer.reward) for answer in answered.answers[1:]]
                shown.append({"source": source, "prompt": answered.prompt.text, "answers": pairs})
    return {"prompts": shown, "failure": failures[0] if failures else None}


if __name__ == "__main__":
    serve(sample)
