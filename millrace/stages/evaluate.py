"""The evaluation stage: one policy version, held-out prompts, one small result in the store.

    checkpoint or base model ─► engine ─┬─ greedily, once a prompt ──────► reward ─► accuracy ─┐
                                        └─ `evaluation.samples` of each ─► reward ─► pass@k, ──┴─► evaluations/
                                           at generation.temperature                 majority      <version>.json

A result that is already there is kept: a resumed run does not measure twice. It names the weights it is of by their
checksum, for a trainer that went back makes other ones under the same version.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from millrace.checkpointing.names import weights_checksum
from millrace.checkpointing.policy_state import load_weights
from millrace.engines.base import Engine
from millrace.engines.transformers import TransformersEngine
from millrace.environments.episodes import in_environment
from millrace.environments.factory import environment_class
from millrace.errors import InputError
from millrace.evaluation import Answered, accuracy, answer_given, sampled_measures
from millrace.model import load_model, load_tokenizer, start_folder
from millrace.rewards.scorer import Scorer
from millrace.stages.arguments import EVALUATE_LATEST
from millrace.stages.inputs import load_prompt_set
from millrace.stages.process import Stage, run_stage
from millrace.stages.scoring import make_scorer
from millrace.types import Prompt, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId
from storage import layout
from storage.checkpoints import read_latest
from storage.errors import NotInStore
from storage.store import Store


def main(stage: Stage) -> None:
    """Evaluates the base model or the latest checkpoint, as its replica number says."""
    config = stage.config
    torch.set_num_threads(config.training.threads)
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        tokenizer = load_tokenizer(folder)
        model = load_model(folder, config.model.dtype)
        engine = in_environment(
            lambda stop: TransformersEngine(model, tokenizer, stop=stop),
            environment_class(config.environment.name),
            tokenizer,
            max_turns=config.environment.max_turns,
            each_turn=stage.beat,
        )
    checksum = None
    if stage.replica == EVALUATE_LATEST:
        checkpoint = read_latest(stage.store)
        if checkpoint is None:
            raise InputError(f"{stage.store.url}: no checkpoint to evaluate yet")
        weights_id = WeightsId(
            incarnation=checkpoint.incarnation, policy_version=checkpoint.step, t_offered=time.time()
        )
        checksum = weights_checksum(checkpoint)
        tensors = load_weights(stage.store, checkpoint, dict(model.named_parameters()))
        engine.update_weights(Weights(manifest=Manifest(id=weights_id), tensors=tensors))
    if _is_measured(stage.store, engine.policy_version, checksum):
        return
    with make_scorer(config) as scorer:
        stage.ready(f"measuring version {engine.policy_version}")
        started = time.monotonic()
        measured = _measures(_Examination(stage, engine, tokenizer, scorer))
    result = {
        "policy_version": engine.policy_version,
        "weights_checksum": checksum,
        **measured,
        "seconds": time.monotonic() - started,
        "t": time.time(),
    }
    stage.store.put(layout.evaluation(engine.policy_version), json.dumps(result).encode())
    stage.milestone(f"version {engine.policy_version}: held-out greedy accuracy {result['accuracy']:.3f}")


@dataclass(frozen=True, slots=True)
class _Examination:
    """A policy that is asked, and who judges what it answers."""

    stage: Stage
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    scorer: Scorer

    def answers(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        """One to each prompt, in order."""
        size = self.stage.config.evaluation.batch_size
        batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        # The engine gives the n-th of a batch the seed that follows by n: no two prompts share one.
        return [
            one
            for number, batch in enumerate(batches)
            for one in self._answers_of_batch(batch, sampling, seed + number * size)
        ]

    def _answers_of_batch(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        tokens = [self.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
        responses = self.engine.generate(tokens, sampling, seed=seed, asked=prompts)
        self.stage.beat()
        said = [list(response.answer_tokens) for response in responses]
        texts = self.tokenizer.batch_decode(said, skip_special_tokens=True)
        judged = self.scorer.score_many(list(zip(prompts, texts, strict=True)), self.stage.beat)
        # What its environment broke off says nothing, whatever its text would earn.
        rewards = [
            one.score.reward if response.environment_error is None else None
            for one, response in zip(judged, responses, strict=True)
        ]
        pattern = self.stage.config.scoring.answer_pattern
        # Only what could be judged in time is searched here: a pattern may keep some responses busy for ever.
        return [
            Answered(answer=None if reward is None else answer_given(text, pattern), reward=reward)
            for text, reward in zip(texts, rewards, strict=True)
        ]


def _measures(examination: _Examination) -> dict[str, Any]:
    """The figures of an evaluation, as they are stored."""
    config = examination.stage.config
    prompts = load_prompt_set(config).eval[: config.evaluation.num_prompts]
    greedily = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens)
    greedy = examination.answers(prompts, greedily, seed=0)
    estimate = accuracy(greedy)
    measured = {
        "accuracy": estimate.value,
        "accuracy_interval": [estimate.low, estimate.high],
        "prompts": len(greedy),
        "errors": sum(one.reward is None for one in greedy),
    }
    return measured if config.evaluation.samples == 1 else {**measured, **_sampled(examination, prompts)}


def _sampled(examination: _Examination, prompts: Sequence[Prompt]) -> dict[str, Any]:
    config = examination.stage.config
    generation, samples = config.generation, config.evaluation.samples
    sampling = Sampling(
        temperature=generation.temperature, top_p=generation.top_p, max_new_tokens=generation.max_new_tokens
    )
    drawn = examination.answers([prompt for prompt in prompts for _ in range(samples)], sampling, seed=config.seed)
    measures = sampled_measures([drawn[first : first + samples] for first in range(0, len(drawn), samples)])
    return {"samples": samples, "sample_errors": sum(one.reward is None for one in drawn), **measures}


def _is_measured(store: Store, policy_version: int, checksum: str | None) -> bool:
    try:
        result = json.loads(bytes(store.get(layout.evaluation(policy_version))))
    except NotInStore:
        return False
    return bool(result["weights_checksum"] == checksum)


if __name__ == "__main__":
    run_stage("evaluate", main)
