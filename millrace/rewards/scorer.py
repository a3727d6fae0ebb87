"""Scores lists of responses, each by the reward of its source, and each reward in its proper place.

                          ┌─ remote: http, judge, asked for as soon as submitted ─► a service     ─┐
source, prompt, response ─┼─ isolated: exact_match with a pattern, math, …    ─► pools of processes ─┼─► weighted sum
                          └─ the others: exact_match, reward_model            ─► this process       ─┘   ─► Score
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from configs.sources import naming_source
from configs.stored import DEFAULT_SOURCE
from configs.task import EvaluationConfig, PromptsConfig, ScoringConfig
from millrace.errors import InputError
from millrace.prompts.packages import prompt_sources
from millrace.rewards.base import Reward, Score, failed
from millrace.rewards.factory import WeightedSum, make_reward
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits
from millrace.rewards.isolation.worker import Task
from millrace.rewards.services.remote import Asked, RemoteReward
from millrace.types import Prompt

Item = tuple[str, Prompt, str]
"""The name of a source, one of its prompts, and a decoded response to that."""


class ScoredSource(Protocol):
    """The sections of a source's config that decide how its responses are scored."""

    prompts: PromptsConfig
    scoring: ScoringConfig
    evaluation: EvaluationConfig


def make_scorer(sources: Mapping[str, ScoredSource]) -> "Scorer":
    """Make the scorer of these sources, as `RunConfig.by_source` returns them; it is loaded on entering.

    Raises InputError, which names the source, for an unusable reward or option.
    """
    rewards, limits = {}, {}
    for name, config in sources.items():
        scoring = config.scoring
        with naming_source(name):
            rewards[name] = make_reward(scoring, _package_sources(config))
        limits[name] = Limits(
            workers=scoring.workers, timeout_seconds=scoring.timeout_seconds, memory_mb=scoring.memory_mb
        )
    return Scorer(rewards, limits)


def _package_sources(config: ScoredSource) -> list[str]:
    prompts = config.prompts
    named = [prompts.source, prompts.eval_source, *(further.source for further in config.evaluation.sets.values())]
    return [package.text for source in named if source is not None for package in prompt_sources(source, prompts)]


@dataclass(frozen=True)
class Submitted:
    """Items on their way to scores."""

    items: Sequence[Item]
    rows_of: Mapping[Reward, Sequence[int]]
    """The rows of each reward."""
    asked: Mapping[RemoteReward, Sequence[Asked]]

    @property
    def is_answered(self) -> bool:
        """Whether all answers of services have arrived."""
        return all(request.answer.done() for requests in self.asked.values() for request in requests)


class Scorer:
    """The rewards of all sources, ready to score within a `with` block; their processes end with the block.

    Rewards of one name with equal options are loaded once, isolated ones once for each pool. A pool is of rewards with
    equal limits; pools take turns, so that `Limits.workers` processes work at once. Entering loads the rewards. It
    raises InputError, which names a source, if one can't be loaded.
    """

    def __init__(self, rewards: Mapping[str, Reward], limits: Mapping[str, Limits] = MappingProxyType({})) -> None:
        """`rewards` and `limits`, if not the default ones, by source."""
        self._rewards = dict(rewards)
        # By source; those of this process come first.
        self._parts: dict[str, list[Reward]] = {}
        loaded: dict[object, Reward] = {}
        by_pool: dict[tuple[Limits, bool] | None, list[Reward]] = {}
        for source, reward in rewards.items():
            self._parts[source] = []
            for part in sorted(_parts_of(reward), key=lambda part: part.isolated):
                # In a pool with a reward that needs new processes, all would get new ones.
                pool = (limits.get(source, Limits()), part.fresh) if part.isolated else None
                key = (pool, part.name, json.dumps(dict(part.options), sort_keys=True))
                if key not in loaded:
                    loaded[key] = part
                    part.source = source
                    by_pool.setdefault(pool, []).append(part)
                self._parts[source].append(loaded[key])
        own = by_pool.pop(None, [])
        self.remote = [part for part in own if isinstance(part, RemoteReward)]
        """The rewards that services compute."""
        self._local = [part for part in own if not isinstance(part, RemoteReward)]
        self._pools = [(Pool(parts, pool[0]), parts) for pool, parts in by_pool.items() if pool is not None]
        self.versions: dict[str, str] = {}
        """`Reward.version` of each source's reward, stored with each score."""
        self.on_first_failure: Callable[[str], None] = lambda sentence: None
        """Called at once, and only once for each source, when a response gets no score."""
        self._have_failed: set[str] = set()

    def check(self) -> dict[str, str]:
        """Load the isolated rewards in processes that then end; the others were checked when they were made.

        Returns the versions of the rewards that are known so far, by name; if rewards of one name have different
        versions, the further ones by name and source. Raises InputError as entering does.
        """
        here = (*self._local, *self.remote)
        versions = {part: part.version for part in here if hasattr(part, "version")}
        for pool, parts in self._pools:
            with pool:
                versions |= zip(parts, pool.versions, strict=True)
        by_name: dict[str, str] = {}
        for part, version in versions.items():
            is_first = by_name.get(part.name, version) == version
            by_name[part.name if is_first else f"{part.name} of {part.source}"] = version
        return by_name

    def first_unusable(self, source: str, prompts: Iterable[Prompt]) -> tuple[Prompt, str] | None:
        """Return the first of a source's prompts whose answer makes every response to it fail, with the reason."""
        for prompt in prompts:
            for part in self._parts[source]:
                try:
                    part.check_answer(prompt.answer)
                except ValueError as error:
                    return prompt, f"the reward {part.name} fails: {error}"
        return None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            here = (*self._local, *self.remote)
            for part in here:
                with naming_source(part.source):
                    part.load()
            for remote in self.remote:
                stack.callback(remote.endpoint.close)
            versions = {part: part.version for part in here}
            for pool, parts in self._pools:
                versions |= zip(parts, stack.enter_context(pool).versions, strict=True)
            self._processes = stack.pop_all()
        for source, reward in self._rewards.items():
            by_name = {part.name: versions[part] for part in self._parts[source]}
            self.versions[source] = (
                reward.combine_versions(by_name) if isinstance(reward, WeightedSum) else by_name[reward.name]
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._processes.close()

    def score_many(self, items: Sequence[Item], each: Callable[[], None] = lambda: None) -> list[Score]:
        """Return one score per item, in order. `each` is called repeatedly meanwhile.

        Raises only for faults that no response caused, such as the loss of the fork server, and LimitReached.
        """
        return self.collect(self.submit(items), each)

    def submit(self, items: Sequence[Item]) -> "Submitted":
        """Ask services for the scores of `items`; other rewards begin with `collect`."""
        rows_of: dict[Reward, list[int]] = {}
        for row, (source, _, _) in enumerate(items):
            for part in self._parts[source]:
                rows_of.setdefault(part, []).append(row)
        asked = {
            part: part.submit([items[row][1:] for row in rows_of[part]]) for part in self.remote if part in rows_of
        }
        return Submitted(items, rows_of, asked)

    def collect(self, submitted: "Submitted", each: Callable[[], None] = lambda: None) -> list[Score]:
        """Return one score per submitted item, in order, as `score_many` does."""
        items, rows_of = submitted.items, submitted.rows_of
        scores: list[dict[Reward, Score]] = [{} for _ in items]
        for part in self._local:
            rows = rows_of.get(part, [])
            for row, score in zip(rows, self._score_here(part, [items[row] for row in rows], each), strict=True):
                scores[row][part] = score
        for pool, parts in self._pools:
            places = [(number, row) for number, part in enumerate(parts) for row in rows_of.get(part, [])]
            tasks = [Task(reward=number, prompt=items[row][1], response=items[row][2]) for number, row in places]
            for task, score in pool.score(tasks, each):
                number, row = places[task]
                scores[row][parts[number]] = score
                self._report_failure(parts[number], items[row], score)
        for remote, asked in submitted.asked.items():
            with naming_source(remote.source):
                answers = remote.collect(asked, each)
            for row, score in zip(rows_of[remote], answers, strict=True):
                scores[row][remote] = score
                self._report_failure(remote, items[row], score)
        return [self._total(source, scores[row]) for row, (source, _, _) in enumerate(items)]

    def _total(self, source: str, scores: Mapping[Reward, Score]) -> Score:
        reward, by_name = self._rewards[source], {part.name: scores[part] for part in self._parts[source]}
        if not isinstance(reward, WeightedSum):
            return by_name[reward.name]
        exchange = {name: part for score in by_name.values() for name, part in score.exchange.items()}
        seconds = sum(score.seconds for score in by_name.values())
        t = max(score.t for score in by_name.values())
        return replace(reward.combine(by_name), seconds=seconds, t=t, exchange=exchange)

    def _score_here(self, part: Reward, items: Sequence[Item], each: Callable[[], None]) -> list[Score]:
        scores: list[Score] = []
        for first in range(0, len(items), part.batch_size):
            batch = items[first : first + part.batch_size]
            started = time.perf_counter()
            try:
                results = part.score_batch([(prompt, response) for _, prompt, response in batch])
            except Exception as error:  # noqa: BLE001 — as in `safe_score`
                results = [failed(f"{type(error).__name__}: {error}")] * len(batch)
            seconds = (time.perf_counter() - started) / len(batch)
            for item, score in zip(batch, results, strict=True):
                scores.append(replace(score, seconds=seconds))
                self._report_failure(part, item, score)
            each()
        return scores

    def _report_failure(self, part: Reward, item: Item, score: Score) -> None:
        source, prompt, _ = item
        if score.status != "ok" and source not in self._have_failed:
            self._have_failed.add(source)
            of_source = "" if source == DEFAULT_SOURCE else f" of source {source}"
            self.on_first_failure(
                f"the reward {part.name} failed for a response to prompt {prompt.prompt_id}{of_source}: {score.error}"
            )


def _parts_of(reward: Reward) -> Sequence[Reward]:
    return reward.parts if isinstance(reward, WeightedSum) else (reward,)


class FailingReward:
    """Ends a run with a source whose reward fails for every response: it would generate and drop groups forever.

    Counts the responses of each source in a row without a score in this process, up to those of a whole step.
    """

    def __init__(self, rewards: Mapping[str, str], responses_per_step: Mapping[str, int]) -> None:
        """`rewards` are the names of the rewards; both are by source."""
        self._rewards = rewards
        self._responses_per_step = responses_per_step
        self._errors: dict[str, list[str]] = {source: [] for source in rewards}

    def check(self, results: Iterable[tuple[str, str | None]]) -> None:
        """Count further responses: the source of each, and the reason why it got no score, None if it got one.

        Raises InputError, which names the source, once there are too many without a score.
        """
        for source, error in results:
            if error is None:
                self._errors[source] = []
            else:
                self._errors[source].append(error)
        for source, errors in self._errors.items():
            if len(errors) < self._responses_per_step[source]:
                continue
            # The error of a system call that the sandbox refuses.
            is_sandboxed = "Operation not permitted" in errors[0]
            with naming_source(source):
                raise InputError(
                    f"{self._rewards[source]}, and none of the last {len(errors):,} responses, a whole step's worth, "
                    f"got a score; the first error: {errors[0]}",
                    key="scoring.reward",
                    expected="a reward that needs no network, process or written file" if is_sandboxed else None,
                )
