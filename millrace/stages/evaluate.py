"""The evaluate stage: measures one policy version on held-out prompts and stores one small result.

    checkpoint or base model ─► engine ─┬─ greedy, once per prompt ──────► reward ─► accuracy ─┐
                                        └─ `evaluation.samples` each ────► reward ─► pass@k, ──┴─► evaluations/
                                           at generation.temperature                 majority      <version>.json

An existing result is kept, so a resumed run does not measure twice. A result names its weights by their checksum,
because a trainer that was rolled back makes other weights under the same version.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from millrace.chat.encoder import PromptEncoder
from millrace.errors import InputError
from millrace.evaluation.measures import Answered, accuracy, answer_given, sampled_measures
from millrace.evaluation.results import read_result, write_result
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.generation.environments.episodes import in_environment
from millrace.generation.environments.exchange import exchange_of, prompt_encoder
from millrace.generation.environments.factory import environment_class
from millrace.models.loading import load_model
from millrace.models.start_folder import start_folder
from millrace.prompts.dataset import load_prompts
from millrace.rewards.scorer import Scorer, make_scorer
from millrace.runtime.arguments import EVALUATE_LATEST
from millrace.runtime.stage import Stage, run_stage
from millrace.training.checkpoints.names import weights_checksum
from millrace.training.checkpoints.policy_state import load_weights
from millrace.types import Prompt, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId
from storage.checkpoints import read_latest


def main(stage: Stage) -> None:
    """Evaluates the base model or the latest checkpoint, depending on the replica number."""
    config = stage.config
    torch.set_num_threads(config.training.threads)
    with stage.loading():
        folder = start_folder(stage.store, config.model.path, stage.arguments.handover)
        environment = environment_class(config.environment.name)
        encoder = prompt_encoder(folder, config.model, config.prompts, load_prompts(config.prompts), environment)
        model = load_model(folder, config.model.dtype)
        engine = in_environment(
            lambda stop: TransformersEngine(model, encoder.tokenizer, stop=stop, stop_token_ids=encoder.stop_token_ids),
            environment,
            lambda played: exchange_of(played, encoder),
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
    earlier = read_result(stage.store, engine.policy_version)
    if earlier is not None and earlier["weights_checksum"] == checksum:
        return
    with make_scorer(config.scoring, config.prompts) as scorer:
        stage.ready(f"measuring version {engine.policy_version}")
        started = time.monotonic()
        measured = _measures(_Examiner(stage, engine, encoder, scorer))
    result = {
        "policy_version": engine.policy_version,
        "weights_checksum": checksum,
        **measured,
        "seconds": time.monotonic() - started,
        "t": time.time(),
    }
    write_result(stage.store, result)
    stage.milestone(f"version {engine.policy_version}: held-out greedy accuracy {result['accuracy']:.3f}")


@dataclass(frozen=True, slots=True)
class _Examiner:
    """A policy and the scorer of its answers."""

    stage: Stage
    engine: Engine
    encoder: PromptEncoder
    scorer: Scorer

    def answers(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        """One answer per prompt, in order."""
        size = self.stage.config.evaluation.batch_size
        batches = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        # The engine seeds the n-th prompt of a batch with seed + n, so no two prompts share a seed.
        return [
            one
            for number, batch in enumerate(batches)
            for one in self._answers_of_batch(batch, sampling, seed + number * size)
        ]

    def _answers_of_batch(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        tokens = [self.encoder.encode(prompt).tokens for prompt in prompts]
        responses = self.engine.generate(tokens, sampling, seed=seed, asked=prompts)
        self.stage.beat()
        answers = [list(response.answer_tokens) for response in responses]
        texts = self.encoder.tokenizer.batch_decode(answers, skip_special_tokens=True)
        judged = self.scorer.score_many(list(zip(prompts, texts, strict=True)), self.stage.beat)
        # A response that its environment ended with an error has no reward.
        rewards = [
            one.score.reward if response.environment_error is None else None
            for one, response in zip(judged, responses, strict=True)
        ]
        pattern = self.stage.config.scoring.answer_pattern
        # Only responses that were scored in time are searched: on others the pattern may never finish.
        return [
            Answered(answer=None if reward is None else answer_given(text, pattern), reward=reward)
            for text, reward in zip(texts, rewards, strict=True)
        ]


def _measures(examiner: _Examiner) -> dict[str, Any]:
    """The measures of an evaluation, as they are stored."""
    config = examiner.stage.config
    prompts = load_prompts(config.prompts).eval[: config.evaluation.num_prompts]
    sampling = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens)
    greedy = examiner.answers(prompts, sampling, seed=0)
    estimate = accuracy(greedy)
    measured = {
        "accuracy": estimate.value,
        "accuracy_interval": [estimate.low, estimate.high],
        "prompts": len(greedy),
        "errors": sum(one.reward is None for one in greedy),
    }
    return measured if config.evaluation.samples == 1 else {**measured, **_sampled(examiner, prompts)}


def _sampled(examiner: _Examiner, prompts: Sequence[Prompt]) -> dict[str, Any]:
    config = examiner.stage.config
    generation, samples = config.generation, config.evaluation.samples
    sampling = Sampling(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_new_tokens=generation.max_new_tokens,
    )
    drawn = examiner.answers([prompt for prompt in prompts for _ in range(samples)], sampling, seed=config.seed)
    measures = sampled_measures([drawn[first : first + samples] for first in range(0, len(drawn), samples)])
    return {"samples": samples, "sample_errors": sum(one.reward is None for one in drawn), **measures}


if __name__ == "__main__":
    run_stage("evaluate", main)
