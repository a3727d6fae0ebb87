"""Scores lists of responses, each reward in its proper place.

(prompt, response) ─┬─ isolated: exact_match with a pattern, math, python, … ─► pool of processes ─┬─► weighted sum
                    └─ the others: exact_match, reward_model                 ─► this process      ─┘   ─► Score
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from configs.prompts import PromptsConfig
from configs.scoring import ScoringConfig
from millrace.errors import InputError
from millrace.prompts.packages import prompt_sources
from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.factory import WeightedSum, make_reward
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.isolation.worker import Task
from millrace.types import Prompt

Pairs = Sequence[tuple[Prompt, str]]
"""Prompts, each with a decoded response to it."""


def make_scorer(scoring: ScoringConfig, prompts: PromptsConfig, further: Sequence[str] = ()) -> "Scorer":
    """Make the scorer of a run; it is loaded on entering. Raises InputError for an unusable reward or option.

    `further` are prompt sources besides those of `prompts`.
    """
    limits = Limits(workers=scoring.workers, timeout_seconds=scoring.timeout_seconds, memory_mb=scoring.memory_mb)
    named = [source for source in (prompts.source, prompts.eval_source, *further) if source is not None]
    sources = [package_source.text for source in named for package_source in prompt_sources(source, prompts)]
    return Scorer(make_reward(scoring, sources), limits)


class Scorer:
    """A reward that is ready to score, within a `with` block; its processes end with the block.

    Entering loads the reward and raises InputError if it can't be loaded.
    """

    def __init__(self, reward: Reward, limits: Limits | None = None) -> None:
        self._reward = reward
        self._parts = reward.parts if isinstance(reward, WeightedSum) else (reward,)
        self._local = [part for part in self._parts if not part.isolated]
        self._isolated = [part for part in self._parts if part.isolated]
        self._pool = Pool(self._isolated, limits or Limits()) if self._isolated else None
        self.name = reward.name
        self.version = ""
        """`Reward.version`, stored with each score."""
        self.on_first_failure: Callable[[str], None] = lambda sentence: None
        """Called at once, and only once, when a response gets no score."""
        self._has_failed = False

    def check(self) -> dict[str, str]:
        """Load the isolated rewards in a process that then ends; the others were checked when they were made.

        Returns the versions of the rewards that are known so far. Raises InputError as entering does.
        """
        versions = {part.name: part.version for part in self._local if hasattr(part, "version")}
        if self._pool is not None:
            with self._pool as pool:
                versions |= pool.versions
        return versions

    def first_unusable(self, prompts: Iterable[Prompt]) -> tuple[Prompt, str] | None:
        """Return the first prompt whose answer makes every response to it fail, with the reason."""
        for prompt in prompts:
            for part in self._parts:
                try:
                    part.check_answer(prompt.answer)
                except ValueError as error:
                    return prompt, f"the reward {part.name} fails: {error}"
        return None

    def __enter__(self) -> Self:
        for part in self._local:
            part.load()
        versions = {part.name: part.version for part in self._local}
        if self._pool is not None:
            versions |= self._pool.__enter__().versions
        reward = self._reward
        self.version = reward.combine_versions(versions) if isinstance(reward, WeightedSum) else versions[reward.name]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind, error, traceback)

    def score_many(self, pairs: Pairs, each: Callable[[], None] = lambda: None) -> list[Score]:
        """Return one score per pair, in order. `each` is called repeatedly meanwhile.

        Raises only for faults that no response caused, such as the loss of the fork server.
        """
        scores = {part.name: self._score_here(part, pairs, each) for part in self._local}
        if self._pool is not None:
            names = [part.name for part in self._isolated]
            tasks = [Task(reward=name, prompt=prompt, response=text) for name in names for prompt, text in pairs]
            by_number: dict[int, Score] = {}
            for number, score in self._pool.score(tasks, each):
                by_number[number] = score
                self._report_failure(tasks[number].reward, tasks[number].prompt, score)
            for part, name in enumerate(names):
                scores[name] = [by_number[part * len(pairs) + row] for row in range(len(pairs))]
        reward = self._reward
        if not isinstance(reward, WeightedSum):
            return scores[reward.name]
        rows = [dict(zip(scores, row, strict=True)) for row in zip(*scores.values(), strict=True)]
        return [replace(reward.combine(row), seconds=sum(score.seconds for score in row.values())) for row in rows]

    def _score_here(self, part: Reward, pairs: Pairs, each: Callable[[], None]) -> list[Score]:
        scores: list[Score] = []
        for first in range(0, len(pairs), part.batch_size):
            batch = pairs[first : first + part.batch_size]
            started = time.perf_counter()
            try:
                results = part.score_batch(batch)
            except Exception as error:  # noqa: BLE001 — as in `safe_score`
                results = [failed(f"{type(error).__name__}: {error}")] * len(batch)
            seconds = (time.perf_counter() - started) / len(batch)
            for (prompt, _), score in zip(batch, results, strict=True):
                scores.append(replace(score, seconds=seconds))
                self._report_failure(part.name, prompt, score)
            each()
        return scores

    def _report_failure(self, name: str, prompt: Prompt, score: Score) -> None:
        if score.status != "ok" and not self._has_failed:
            self._has_failed = True
            self.on_first_failure(
                f"the reward {name} failed for a response to prompt {prompt.prompt_id}: {score.error}"
            )


class FailingReward:
    """Ends a run whose reward fails for every response: it would generate and drop groups forever.

    Counts the responses in a row without a score in this process, up to a step's worth, `responses_per_step`.
    """

    def __init__(self, reward: str, responses_per_step: int) -> None:
        self._reward = reward
        self._responses_per_step = responses_per_step
        self._errors: list[str] = []

    def check(self, errors: Sequence[str | None]) -> None:
        """Count further responses. `errors`: per response the reason why it got no score, None if it got one.

        Raises InputError once there are too many without a score.
        """
        for error in errors:
            self._errors = [] if error is None else [*self._errors, error]
        if len(self._errors) < self._responses_per_step:
            return
        # The error of a system call that the sandbox refuses.
        is_sandboxed = "Operation not permitted" in self._errors[0]
        raise InputError(
            f"{self._reward}, and none of the last {len(self._errors):,} responses, a whole step's worth, got a score; "
            f"the first error: {self._errors[0]}",
            key="scoring.reward",
            expected="a reward that needs no network, process or written file" if is_sandboxed else None,
        )
