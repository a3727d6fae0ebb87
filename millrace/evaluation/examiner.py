"""Asks a policy the prompts of each evaluation set and measures its answers.

prompts ─► tokens ─► engine ─┬─ greedy, once per prompt ───► reward ─► accuracy ─┐
                             └─ `samples` of each, sampled ► reward ─► pass@k, ──┴─► measures of the set
                                                                       majority
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from configs.prompts import EvaluationConfig, PromptsConfig
from millrace.evaluation.measures import Answered, accuracy, answer_given, sampled_measures
from millrace.evaluation.results import HELD_OUT
from millrace.models.decoder import decoder_of
from millrace.prompts.dataset import PromptSet, load_source
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt, Sampling

if TYPE_CHECKING:
    from millrace.chat.encoder import PromptEncoder  # loads transformers
    from millrace.generation.engines.base import Engine  # loads torch


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """Prompts that a version is measured on."""

    prompts: Sequence[Prompt]
    """At least one."""
    samples: int
    """Answers sampled per prompt, besides the greedy one; 1: only the greedy one."""


def evaluation_sets(
    evaluation: EvaluationConfig, config: PromptsConfig, prompts: PromptSet
) -> dict[str, EvaluationSet]:
    """The configured sets by name, the held-out ones of `prompts` first. Raises InputError as `load_prompts` does."""
    sets = {HELD_OUT: EvaluationSet(prompts=prompts.eval, samples=evaluation.samples)}
    for name, further in evaluation.sets.items():
        loaded = load_source(further.source, config)[: further.num_prompts]
        sets[name] = EvaluationSet(prompts=tuple(loaded), samples=further.samples)
    return sets


def with_evaluation_sets(prompts: PromptSet, sets: Mapping[str, EvaluationSet]) -> PromptSet:
    """Adds the prompts of the further sets to the evaluation prompts: everything that the policy is asked."""
    further = [prompt for name, part in sets.items() if name != HELD_OUT for prompt in part.prompts]
    return replace(prompts, eval=(*prompts.eval, *further))


class Stopped(Exception):
    """The evaluation was asked to stop before its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How answers are drawn and read; the same for every set."""

    sampling: Sampling
    """For sampled answers; greedy ones may be as long."""
    seed: int
    """For sampled answers."""
    batch_size: int
    """Answers decoded together."""
    answer_pattern: str | None
    """`scoring.answer_pattern`, which finds the answer in a response."""


class Examiner:
    """Measures a policy. `still_wanted` is called several times per second, between two tokens."""

    def __init__(
        self,
        engine: "Engine",
        encoder: "PromptEncoder",
        scorer: Scorer,
        rules: Rules,
        still_wanted: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._decode = decoder_of(encoder.tokenizer)
        self._scorer = scorer
        self._rules = rules
        self._still_wanted = still_wanted

    def measure(self, sets: Mapping[str, EvaluationSet]) -> dict[str, Any]:
        """The measures of all sets as `millrace.evaluation.results` stores them, the held-out set's at the top.

        Raises Stopped once `still_wanted` returns False; nothing is in flight then.
        """
        measured = {name: self._measure(prompts) for name, prompts in sets.items()}
        held_out = measured.pop(HELD_OUT)
        return {**held_out, "sets": measured} if measured else held_out

    def _measure(self, prompt_set: EvaluationSet) -> dict[str, Any]:
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=self._rules.sampling.max_new_tokens)
        answers = self._answers(prompt_set.prompts, greedy, seed=0)
        errors = sum(answer.reward is None for answer in answers)
        estimate = accuracy(answers) if errors < len(answers) else None
        measured = {
            "accuracy": None if estimate is None else estimate.value,
            "accuracy_interval": None if estimate is None else [estimate.low, estimate.high],
            "prompts": len(answers),
            "errors": errors,
        }
        samples = prompt_set.samples
        if samples == 1:
            return measured
        repeated = [prompt for prompt in prompt_set.prompts for _ in range(samples)]
        drawn = self._answers(repeated, self._rules.sampling, seed=self._rules.seed)
        errors = sum(answer.reward is None for answer in drawn)
        by_prompt = [drawn[first : first + samples] for first in range(0, len(drawn), samples)]
        measures = sampled_measures(by_prompt) if errors < len(drawn) else {}
        return {**measured, "samples": samples, "sample_errors": errors, **measures}

    def _answers(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        """One answer per prompt, in order."""
        size = self._rules.batch_size
        # The engine seeds the n-th prompt of a batch with seed + n, so no two prompts share a seed.
        return [
            answer
            for first in range(0, len(prompts), size)
            for answer in self._answers_of_batch(prompts[first : first + size], sampling, seed + first)
        ]

    def _answers_of_batch(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        tokens = [self._encoder.encode(prompt).tokens for prompt in prompts]
        try:
            responses = self._engine.generate(tokens, sampling, seed=seed, prompts=prompts, each_wait=self._check)
        except Stopped:
            self._engine.abort()
            raise
        answers = [response.answer_tokens for response in responses]
        texts = self._decode(
            [
                (*prompt_tokens, *response.tokens[: len(response.tokens) - len(answer)])
                for prompt_tokens, response, answer in zip(tokens, responses, answers, strict=True)
            ],
            answers,
            [response.finish_reason == "stop" for response in responses],
        )
        scores = self._scorer.score_many(list(zip(prompts, texts, strict=True)), self._check)
        # A response that its environment ended with an error has no reward.
        rewards = [
            score.reward if response.environment_error is None else None
            for score, response in zip(scores, responses, strict=True)
        ]
        pattern = self._rules.answer_pattern
        # Only responses that were scored in time are searched: on others the pattern may never finish.
        return [
            Answered(answer=None if reward is None else answer_given(text, pattern), reward=reward)
            for text, reward in zip(texts, rewards, strict=True)
        ]

    def _check(self) -> None:
        if not self._still_wanted():
            raise Stopped
