"""Scores lists of responses, each reward in its proper place.

(prompt, response) ─┬─ isolated: exact_match with a pattern, math, python, … ─► pool of processes ─┬─► weighted sum
                    └─ the others: exact_match, reward_model                 ─► this process      ─┘   ─► Score
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
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

_SANDBOX = "Operation not permitted"
"""The error of a system call that the sandbox of a worker refuses."""
Pairs = Sequence[tuple[Prompt, str]]
"""Prompts, each with a decoded response to it."""


def make_scorer(scoring: ScoringConfig, prompts: PromptsConfig, further: Sequence[str] = ()) -> "Scorer":
    """The scorer of a run, not loaded yet. Raises InputError for a reward or an option that can't be used.

    `further` are prompt sources besides those of `prompts`.
    """
    limits = Limits(workers=scoring.workers, timeout_seconds=scoring.timeout_seconds, memory_mb=scoring.memory_mb)
    # `Prompt.source` of the prompts that packages make.
    sources = [
        made.text
        for source in (prompts.source, prompts.eval_source, *further)
        if source is not None
        for made in prompt_sources(source, prompts)
    ]
    return Scorer(make_reward(scoring, sources), limits)


class Scorer:
    """A reward that is ready to score, within a `with` block; its processes end with the block.

    Entering loads the reward, which may take a while, and raises InputError with one sentence if it can't be loaded.
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
        """Check that the isolated rewards can be loaded, by loading them in a process that then ends.

        The others were checked when they were made. Returns the version of each reward, without those whose version is
        known only when they are loaded. Raises InputError as entering does.
        """
        versions = {part.name: part.version for part in self._local if hasattr(part, "version")}
        if self._pool is not None:
            with self._pool as pool:
                versions |= pool.versions
        return versions

    def first_unusable(self, prompts: Iterable[Prompt]) -> tuple[Prompt, str] | None:
        """The first prompt whose answer makes every response to it fail, with the reason; None if there is none."""
        for prompt in prompts:
            for part in self._parts:
                try:
                    part.check_answer(prompt.answer)
                except ValueError as error:
                    return prompt, f"the reward {part.name} fails: {error}"
        return None

    def __enter__(self) -> Self:
        versions: dict[str, str] = {}
        for part in self._local:
            part.load()
            versions[part.name] = part.version
        if self._pool is not None:
            versions |= self._pool.__enter__().versions
        reward = self._reward
        self.version = reward.versioned(versions) if isinstance(reward, WeightedSum) else versions[reward.name]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind, error, traceback)

    def score_many(self, pairs: Pairs, each: Callable[[], None] = lambda: None) -> list[Score]:
        """One score per pair, in order. `each` is called repeatedly meanwhile.

        Raises only for faults that no response caused, such as the loss of the fork server.
        """
        by_part = {part.name: self._score_here(part, pairs, each) for part in self._local}
        if self._pool is not None:
            by_part |= self._score_in_pool(self._pool, pairs, each)
        reward = self._reward
        if not isinstance(reward, WeightedSum):
            return by_part[reward.name]
        return [_summed(reward, dict(zip(by_part, row, strict=True))) for row in zip(*by_part.values(), strict=True)]

    def _score_in_pool(self, pool: Pool, pairs: Pairs, each: Callable[[], None]) -> dict[str, list[Score]]:
        names, num = [part.name for part in self._isolated], len(pairs)
        tasks = [Task(reward=name, prompt=prompt, response=response) for name in names for prompt, response in pairs]
        scores: dict[int, Score] = {}
        for number, score in pool.score(tasks, each):
            scores[number] = score
            self._report_failure(tasks[number].reward, tasks[number].prompt, score)
        return {name: [scores[part * num + row] for row in range(num)] for part, name in enumerate(names)}

    def _score_here(self, part: Reward, pairs: Pairs, each: Callable[[], None]) -> list[Score]:
        timed: list[Score] = []
        for first in range(0, len(pairs), part.batch_size):
            batch = pairs[first : first + part.batch_size]
            started = time.perf_counter()
            scores = _batch_scores(part, batch)
            seconds = (time.perf_counter() - started) / len(batch)
            timed += [replace(score, seconds=seconds) for score in scores]
            for (prompt, _), score in zip(batch, scores, strict=True):
                self._report_failure(part.name, prompt, score)
            each()
        return timed

    def _report_failure(self, name: str, prompt: Prompt, score: Score) -> None:
        if score.status != "ok" and not self._has_failed:
            self._has_failed = True
            self.on_first_failure(
                f"the reward {name} failed for a response to prompt {prompt.prompt_id}: {score.error}"
            )


def _batch_scores(part: Reward, batch: Pairs) -> list[Score]:
    try:
        return part.score_batch(batch)
    except Exception as error:  # noqa: BLE001 — as in `safe_score`
        return [failed(f"{type(error).__name__}: {error}")] * len(batch)


def _summed(reward: WeightedSum, by_part: Mapping[str, Score]) -> Score:
    return replace(reward.combine(by_part), seconds=sum(score.seconds for score in by_part.values()))


class FailingReward:
    """Ends a run whose reward fails for every response: it would generate and drop groups forever.

    Counts the groups in a row without any score, among those that one scorer process gets. A step's worth of them,
    `groups_per_step`, is too many. Another process begins to count at 0, so a resumed run can use a corrected reward.
    """

    def __init__(self, reward: str, groups_per_step: int) -> None:
        self._reward = reward
        self._groups_per_step = groups_per_step
        self._groups = 0
        self._errors: list[str] = []

    def check(self, group_ids: Iterable[int], errors: Sequence[str | None]) -> None:
        """Count further groups: `errors` has why each response got no score, None if it got one.

        Raises InputError once there are too many without a score.
        """
        for _, rows in groupby(zip(group_ids, errors, strict=True), key=itemgetter(0)):
            failed = [error for _, error in rows]
            if None in failed:
                self._groups, self._errors = 0, []
                continue
            self._groups += 1
            self._errors += [error for error in failed if error is not None]
            if self._groups == self._groups_per_step:
                raise InputError(self._sentence())

    def _sentence(self) -> str:
        first = self._errors[0]
        hint = "; a reward's process has no network, starts no process and writes no file" if _SANDBOX in first else ""
        return (
            f"scoring.reward is {self._reward}, and none of {len(self._errors):,} responses got a score: the last "
            f"{self._groups:,} groups, a whole step's worth; the first error: {first}{hint}"
        )
