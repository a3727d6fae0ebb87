"""How good a policy version is on held-out prompts: figures from scored answers, each with its uncertainty.

one greedy answer per prompt ────► accuracy    mean reward; of several sources: their weighted mean
n sampled answers per prompt ─┬──► pass@k      for k = 1, 2, 4, … ≤ n: is one of k answers right?
                              └──► majority    is the answer that most of the n give right?

An answer is right if its reward is 1 or more. If its verifier failed, it is wrong and its reward counts as 0: a failing
verifier must not make a policy look better. A set whose verifier failed for every answer has no figures.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

from millrace.prompts.answers import after_thoughts, boxed, comparable, last_group

_Z = NormalDist().inv_cdf(0.975)
RIGHT = 1.0
"""Least reward of a right answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One response with its answer and its reward."""

    response: str
    """Text; of an environment's conversation the last turn."""
    answer: str | None
    """Equal for responses with the same answer; None if a response has none."""
    reward: float | None
    """None if the verifier failed."""

    @property
    def earned(self) -> float:
        """The reward, or 0 if there is none."""
        return 0.0 if self.reward is None else self.reward

    @property
    def is_right(self) -> bool:
        return self.earned >= RIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    value: float
    low: float | None
    """None if there is a single prompt and no bound on its values."""
    high: float | None


def answer_given(response: str, answer_pattern: str | None) -> str | None:
    r"""The answer in a response, without surrounding whitespace; None if there is none.

    It is the first group of the last match of `answer_pattern` after the last `</think>`. Without a pattern it is the
    content of the last `\boxed{…}`, and without a box all that follows the thoughts.
    """
    text = after_thoughts(response)
    if text is None:
        return None
    if answer_pattern is None:
        return boxed(text) or comparable(text) or None
    answer = last_group(text, answer_pattern)
    return None if answer is None else comparable(answer)


def accuracy(greedy: Sequence[Answered]) -> Estimate:
    """Mean reward of one answer per prompt (at least one prompt)."""
    return mean_over_prompts([answer.earned for answer in greedy])


def sampled_measures(sampled: Sequence[Sequence[Answered]]) -> dict[str, Any]:
    """`pass_at`, estimates by k, and `majority`, as JSON. Every prompt has the same number of answers (≥ 1)."""
    powers = [2**i for i in range(len(sampled[0]).bit_length())]
    majority = mean_over_prompts([float(majority_right(answers)) for answers in sampled])
    return {"pass_at": {str(k): asdict(pass_at(k, sampled)) for k in powers}, "majority": asdict(majority)}


def pass_at(k: int, sampled: Sequence[Sequence[Answered]]) -> Estimate:
    """How often at least one of `k` answers is right, from n ≥ k answers per prompt.

    The mean of 1 − C(n − right, k) / C(n, k) over the prompts is unbiased: Chen et al., "Evaluating Large Language
    Models Trained on Code", arXiv 2107.03374, section 2.1, equation 1.
    """
    wrong = [sum(not answer.is_right for answer in answers) for answers in sampled]
    return mean_over_prompts([1.0 - math.comb(number, k) / math.comb(len(sampled[0]), k) for number in wrong])


def majority_right(answers: Sequence[Answered]) -> bool:
    """Whether the most frequent answer is right; of equally frequent ones, the one given first.

    Self-consistency: Wang et al., arXiv 2203.11171. Responses without an answer have no vote.
    """
    votes = Counter(answer.answer for answer in answers if answer.answer is not None)
    # most_common keeps the order in which answers were first given among equals.
    winners = [answer for answer, _ in votes.most_common(1)]
    return any(answer.is_right for answer in answers if answer.answer in winners)


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt (at least one), with its 95 % interval.

    Values in [0, 1] get Wilson's interval (Wilson 1927, "Probable Inference") with the prompts as draws: exact where
    each is 0 or 1, too wide rather than too narrow in between. Other values get mean ± 1.96 standard errors.
    """
    n, mean = len(values), fmean(values)
    if min(values) >= 0 and max(values) <= 1:
        shrink = 1 + _Z**2 / n
        middle = (mean + _Z**2 / (2 * n)) / shrink
        half = _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / shrink
        return Estimate(value=mean, low=max(0.0, min(mean, middle - half)), high=min(1.0, max(mean, middle + half)))
    if n == 1:
        return Estimate(value=mean, low=None, high=None)
    half = _Z * stdev(values) / math.sqrt(n)
    return Estimate(value=mean, low=mean - half, high=mean + half)


def weighted_mean(estimates: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The mean of independent estimates (at least one), each with its positive weight, and its 95 % interval.

    The interval's ends are as far from the mean as the root of the summed squares of the weighted distances in the
    estimates' own intervals, below and above: the MOVER of Zou and Donner (2008), applied to Wilson's intervals as in
    Zou, Huang and Zhang, "A note on confidence interval estimation for a linear function of binomial proportions"
    (2009).
    """
    total = sum(weight for weight, _ in estimates)
    value = sum(weight * estimate.value for weight, estimate in estimates) / total
    below, above = 0.0, 0.0
    for weight, estimate in estimates:
        if estimate.low is None or estimate.high is None:
            return Estimate(value=value, low=None, high=None)
        below += (weight / total * (estimate.value - estimate.low)) ** 2
        above += (weight / total * (estimate.high - estimate.value)) ** 2
    return Estimate(value=value, low=value - math.sqrt(below), high=value + math.sqrt(above))
