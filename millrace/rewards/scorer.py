"""Judges whole lists of responses, each reward where it belongs.

(prompt, response) ─┬─ isolated: exact_match with a pattern, math, python, … ─► pool of processes ─┬─► weighted sum
                    └─ the others: exact_match, reward_model                 ─► this process      ─┘   ─► Judged
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.pool import Pool
from millrace.rewards.sandbox import Limits
from millrace.rewards.weighted_sum import WeightedSum
from millrace.rewards.wire import Judged, Task
from millrace.types import Prompt

Pairs = Sequence[tuple[Prompt, str]]
"""Prompts, each with a decoded response to it."""


class Scorer:
    """A reward that is ready to judge, within a `with` block; the processes that judge end with it.

    Entering it loads what judging takes, which may be a while, and raises InputError with one sentence where that can't
    be loaded.
    """

    def __init__(self, reward: Reward, limits: Limits | None = None) -> None:
        self._reward = reward
        self._parts = reward.parts if isinstance(reward, WeightedSum) else (reward,)
        self._local = [part for part in self._parts if not part.isolated]
        self._isolated = [part for part in self._parts if part.isolated]
        self._pool = Pool(self._isolated, limits or Limits()) if self._isolated else None
        self.name = reward.name
        """What configs call the reward."""
        self.version = ""
        """What rows of scores say of it; changes whenever the same response could get another reward than before."""

    def check(self) -> None:
        """Looks whether the isolated rewards can be loaded, by loading them in a process that ends then.

        The others have looked for themselves when they were made. Raises InputError as entering does.
        """
        if self._pool is not None:
            with self._pool:
                pass

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

    def score_many(self, pairs: Pairs, each: Callable[[], None] = lambda: None) -> list[Judged]:
        """One for each pair and in their order. `each` is called again and again meanwhile.

        Raises only for what is no response's fault, such as the loss of the process that judges are forked from.
        """
        by_part = {part.name: _judged_here(part, pairs, each) for part in self._local}
        if self._pool is not None:
            by_part |= self._judged_apart(self._pool, pairs, each)
        reward = self._reward
        if not isinstance(reward, WeightedSum):
            return by_part[reward.name]
        return [_summed(reward, dict(zip(by_part, row, strict=True))) for row in zip(*by_part.values(), strict=True)]

    def _judged_apart(self, pool: Pool, pairs: Pairs, each: Callable[[], None]) -> dict[str, list[Judged]]:
        names, num = [part.name for part in self._isolated], len(pairs)
        tasks = [Task(reward=name, prompt=prompt, response=response) for name in names for prompt, response in pairs]
        judged = dict(pool.judge(tasks, each))
        return {name: [judged[turn * num + row] for row in range(num)] for turn, name in enumerate(names)}


def _judged_here(part: Reward, pairs: Pairs, each: Callable[[], None]) -> list[Judged]:
    judged: list[Judged] = []
    for first in range(0, len(pairs), part.batch_size):
        batch = pairs[first : first + part.batch_size]
        started = time.perf_counter()
        scores = _batch_scores(part, batch)
        seconds = (time.perf_counter() - started) / len(batch)
        judged += [Judged(score=score, seconds=seconds) for score in scores]
        each()
    return judged


def _batch_scores(part: Reward, batch: Pairs) -> list[Score]:
    try:
        return part.score_batch(batch)
    except Exception as error:  # noqa: BLE001 — as in `safe_score`
        return [failed(f"{type(error).__name__}: {error}")] * len(batch)


def _summed(reward: WeightedSum, judged: Mapping[str, Judged]) -> Judged:
    score = reward.combine({name: one.score for name, one in judged.items()})
    return Judged(score=score, seconds=sum(one.seconds for one in judged.values()))
