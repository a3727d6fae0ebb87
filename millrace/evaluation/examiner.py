"""Asks a policy the prompts of each evaluation set and measures its answers.

prompts ─► tokens ─► engine ─┬─ greedy, once per prompt ───► reward ─► accuracy ─┐
                             └─ `samples` of each, sampled ► reward ─► pass@k, ──┴─► measures of the set
                                                                       majority

Encoder, environment, sampling and reward are those of the set's source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from configs.task import EvaluationConfig
from millrace.evaluation.answers import AnsweredPrompt
from millrace.evaluation.measures import Answered, accuracy, answer_given, sampled_measures
from millrace.evaluation.results import HELD_OUT
from millrace.models.decoder import decoder_of
from millrace.prompts.dataset import PromptSet
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


def evaluation_sets(evaluation: EvaluationConfig, prompts: PromptSet) -> dict[str, EvaluationSet]:
    """The configured sets by name, the held-out ones of `prompts` first."""
    held_out = EvaluationSet(prompts=prompts.eval, samples=evaluation.samples)
    further = {
        name: EvaluationSet(prompts=prompts.sets[name], samples=s.samples) for name, s in evaluation.sets.items()
    }
    return {HELD_OUT: held_out, **further}


class Stopped(Exception):
    """The evaluation was asked to stop before its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How the answers to a source's prompts are drawn and read; the same for every set of it."""

    encoder: "PromptEncoder"
    sampling: Sampling
    """For sampled answers; greedy ones may be as long."""
    seed: int
    """For sampled answers."""
    batch_size: int
    """Answers decoded together."""
    answer_pattern: str | None
    """`scoring.answer_pattern`, which finds the answer in a response."""


@dataclass(frozen=True, slots=True)
class Examiner:
    """Measures a policy."""

    engine: "Engine"
    scorer: Scorer
    rules: Mapping[str, Rules]
    """By source."""
    still_wanted: Callable[[], bool]
    """Called several times per second, between two tokens."""

    def measure(self, source: str, prompt_set: EvaluationSet) -> tuple[dict[str, Any], list[AnsweredPrompt]]:
        """The measures of a set of this source, as `millrace.evaluation.results` stores them, and its answered prompts.

        Raises Stopped once `still_wanted` returns False; nothing is in flight then.
        """
        rules = self.rules[source]
        greedy = replace(rules.sampling, temperature=0.0, top_p=1.0, top_k=None)
        answers = self._answers(source, prompt_set.prompts, greedy, seed=0)
        errors = sum(answer.reward is None for answer in answers)
        estimate = accuracy(answers) if errors < len(answers) else None
        measured = {
            "accuracy": None if estimate is None else estimate.value,
            "accuracy_interval": None if estimate is None else [estimate.low, estimate.high],
            "prompts": len(answers),
            "errors": errors,
        }
        prompts, samples = prompt_set.prompts, prompt_set.samples
        if samples == 1:
            return measured, _answered(prompts, [[answer] for answer in answers])
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        drawn = self._answers(source, repeated, rules.sampling, seed=rules.seed)
        errors = sum(answer.reward is None for answer in drawn)
        by_prompt = [drawn[first : first + samples] for first in range(0, len(drawn), samples)]
        measures = sampled_measures(by_prompt) if errors < len(drawn) else {}
        answered = _answered(prompts, [[answer, *more] for answer, more in zip(answers, by_prompt, strict=True)])
        return {**measured, "samples": samples, "sample_errors": errors, **measures}, answered

    def _answers(self, source: str, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[Answered]:
        """One answer per prompt, in order."""
        answers: list[Answered] = []
        batch_size = self.rules[source].batch_size
        for first in range(0, len(prompts), batch_size):
            # The engine seeds the n-th prompt of a batch with seed + n, so no two prompts share a seed.
            answers += self._answers_of_batch(source, prompts[first : first + batch_size], sampling, seed + first)
        return answers

    def _answers_of_batch(
        self, source: str, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[Answered]:
        rules = self.rules[source]
        tokens = [rules.encoder.encode(prompt).tokens for prompt in prompts]
        try:
            responses = self.engine.generate(
                tokens, sampling, seed=seed, prompts=prompts, each_wait=self._check, source=source
            )
        except Stopped:
            self.engine.abort()
            raise
        answers = [response.answer_tokens for response in responses]
        # Everything before the answer: the prompt, and the turns of an environment.
        heads = [
            (*prompt_tokens, *response.tokens[: len(response.tokens) - len(answer)])
            for prompt_tokens, response, answer in zip(tokens, responses, answers, strict=True)
        ]
        decode = decoder_of(rules.encoder.tokenizer)
        texts = decode(heads, answers, [response.finish_reason == "stop" for response in responses])
        items = [(source, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        scores = self.scorer.score_many(items, self._check)
        answered: list[Answered] = []
        for text, score, response in zip(texts, scores, responses, strict=True):
            # A response that its environment ended with an error has no reward. Only responses that were scored in time
            # are searched for an answer: on others the pattern may never finish.
            reward = score.reward if response.environment_error is None else None
            answer = None if reward is None else answer_given(text, rules.answer_pattern)
            answered.append(Answered(response=text, answer=answer, reward=reward))
        return answered

    def _check(self) -> None:
        if not self.still_wanted():
            raise Stopped


def _answered(prompts: Sequence[Prompt], answers: Sequence[Sequence[Answered]]) -> list[AnsweredPrompt]:
    pairs = zip(prompts, answers, strict=True)
    return [AnsweredPrompt(prompt=prompt, answers=prompt_answers) for prompt, prompt_answers in pairs]
