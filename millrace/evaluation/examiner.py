"""Asks a policy the prompts of each evaluation set and measures its answers.

prompts ─► tokens ─► engine ─┬─ greedy, once per prompt ───► reward ─► accuracy ─┐
                             └─ `samples` of each, sampled ► reward ─► pass@k, ──┴─► measures of the set
                                                                       majority
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.chat.encoder import PromptEncoder
from millrace.evaluation.measures import Answered, accuracy, answer_given, sampled_measures
from millrace.evaluation.results import HELD_OUT
from millrace.evaluation.sets import EvaluationSet
from millrace.generation.engines.base import Engine
from millrace.models.decoder import decoder_of
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt, Response, Sampling


class Stopped(Exception):
    """The evaluation was asked to stop before its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How answers are drawn and read; the same for every set."""

    sampling: Sampling
    """Of sampled answers; greedy ones may be as long."""
    seed: int
    """Of sampled answers."""
    batch_size: int
    """Answers decoded together."""
    answer_pattern: str | None
    """`scoring.answer_pattern`: what of a response is its answer."""


class Examiner:
    """A policy, and the scorer of its answers. `still_wanted` is asked several times per second, between two tokens."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
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

        Raises Stopped once `still_wanted` says no; nothing is in flight then.
        """
        measured = {name: self._measure(one) for name, one in sets.items()}
        held_out = measured.pop(HELD_OUT)
        return {**held_out, "sets": measured} if measured else held_out

    def _measure(self, one: EvaluationSet) -> dict[str, Any]:
        greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=self._rules.sampling.max_new_tokens)
        answers = self._answers(one.prompts, greedy, seed=0)
        errors = sum(answer.reward is None for answer in answers)
        estimate = accuracy(answers) if errors < len(answers) else None
        measured = {
            "accuracy": None if estimate is None else estimate.value,
            "accuracy_interval": None if estimate is None else [estimate.low, estimate.high],
            "prompts": len(answers),
            "errors": errors,
        }
        return measured if one.samples == 1 else {**measured, **self._sampled(one)}

    def _sampled(self, one: EvaluationSet) -> dict[str, Any]:
        asked = [prompt for prompt in one.prompts for _ in range(one.samples)]
        drawn = self._answers(asked, self._rules.sampling, seed=self._rules.seed)
        errors = sum(answer.reward is None for answer in drawn)
        by_prompt = [drawn[first : first + one.samples] for first in range(0, len(drawn), one.samples)]
        measures = sampled_measures(by_prompt) if errors < len(drawn) else {}
        return {"samples": one.samples, "sample_errors": errors, **measures}

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
        responses = self._respond(tokens, prompts, sampling, seed)
        answers = [response.answer_tokens for response in responses]
        texts = self._decode(
            [
                (*asked, *response.tokens[: len(response.tokens) - len(answer)])
                for asked, response, answer in zip(tokens, responses, answers, strict=True)
            ],
            answers,
            [response.finish_reason == "stop" for response in responses],
        )
        judged = self._scorer.score_many(list(zip(prompts, texts, strict=True)), self._check)
        # A response that its environment ended with an error has no reward.
        rewards = [
            score.reward if response.environment_error is None else None
            for score, response in zip(judged, responses, strict=True)
        ]
        pattern = self._rules.answer_pattern
        # Only responses that were scored in time are searched: on others the pattern may never finish.
        return [
            Answered(answer=None if reward is None else answer_given(text, pattern), reward=reward)
            for text, reward in zip(texts, rewards, strict=True)
        ]

    def _respond(
        self, tokens: Sequence[Sequence[int]], prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[Response]:
        try:
            return self._engine.generate(tokens, sampling, seed=seed, prompts=prompts, each_wait=self._check)
        except Stopped:
            self._engine.abort()
            raise

    def _check(self) -> None:
        if not self._still_wanted():
            raise Stopped
