"""What a fit reads of a stored run: when its steps ended, what its rollouts were, and what its stages did when.

║ consumed ║ ─► steps: end, rollouts and tokens trained      ┐
║ trajectories ║ ─► rollouts: group, lengths, start and end  ├─► a measured run, without its warm-up
║ scores ║ ─► seconds of the reward                          │
║ metrics ║ ─► seconds of each activity, updates of weights  ┘

Only what the newest attempt did counts: an earlier one may have had another config. Times are unix seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import StoredLengths
from millrace.rollouts.consumed import TRAINED
from millrace.runs.record import latest_attempt
from storage import layout
from storage.schema import CONSUMED, METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import StreamReader

LEAST_STEPS = 20
"""Steps after the warm-up."""
_WARMUP_STEPS = 5
_WARMUP_SHARE = 0.1
_TIME, _SECONDS, _WAITING = "time/", "/seconds", "waiting"
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """Rollouts of one generator, [N] each, in the order of its stream."""

    group: _Ints
    prompt_tokens: _Ints
    response_tokens: _Ints
    started: _Floats
    finished: _Floats

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, kw_only=True, eq=False)
class Activities:
    """What one stage process spent its time on, as it logged it every few seconds."""

    t: Sequence[float]
    """Ascending; each is the end of a span of time that begins at the one before."""
    seconds: Sequence[dict[str, float]]
    """By activity, in that span; the first span's beginning is unknown."""
    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(time, value) of each other metric by name."""

    def spans(self, begin: float, end: float) -> list[tuple[float, float, dict[str, float]]]:
        """(begin, end, seconds by activity) of each span that is within `begin` and `end` as a whole."""
        ends = zip(self.t, self.t[1:], self.seconds[1:], strict=False)
        return [(first, last, seconds) for first, last, seconds in ends if first >= begin and last <= end]

    def between(self, begin: float, end: float) -> tuple[float, float, dict[str, float]]:
        """(begin, end, seconds by activity) of those spans together."""
        spans = self.spans(begin, end)
        total: dict[str, float] = {}
        for _, _, activities in spans:
            for name, seconds in activities.items():
                total[name] = total.get(name, 0.0) + seconds
        return (spans[0][0], spans[-1][1], total) if spans else (begin, begin, total)

    def idle_share(self, begin: float, end: float) -> float:
        """Share of those spans in which the stage waited for others."""
        first, last, seconds = self.between(begin, end)
        waited = sum(spent for name, spent in seconds.items() if name.startswith(_WAITING))
        return min(1.0, waited / (last - first)) if last > first else 0.0

    def mean(self, name: str, begin: float, end: float) -> float | None:
        """Mean of a metric's values within that time; None if there is none."""
        values = [value for t, value in self.values.get(name, ()) if begin <= t <= end]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Optimizer steps in order, [N] each."""

    policy_version: _Ints
    t: _Floats
    """Their ends."""
    rollouts: _Ints
    """Trained."""
    tokens: _Ints
    """Computed: responses, and each prompt once per group if prefixes are shared, else once per rollout."""
    pulling: _Ints
    """Rollouts that took a backward pass: those without advantage take none, unless something else pulls at them."""

    def between(self, begin: float, end: float) -> npt.NDArray[np.bool_]:
        """Which steps ended in that time."""
        return (self.t > begin) & (self.t <= end)


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRun:
    """A stored run."""

    url: str
    config: RunConfig
    steps: Steps
    """After the warm-up, and the last one of it."""
    rollouts: Sequence[Rollouts]
    """By generator, warm-up included."""
    generators: Sequence[Activities]
    scorers: Sequence[Activities]
    trainer: Activities
    sync: Activities
    parts: Sequence[tuple[float, int]]
    """(time at which its newest response ended, rows) of each part of trajectories."""
    reward_seconds: float
    """Mean of the reward alone, per rollout."""

    @property
    def begin(self) -> float:
        """End of the warm-up."""
        return float(self.steps.t[0])

    @property
    def end(self) -> float:
        """End of the last step."""
        return float(self.steps.t[-1])

    @property
    def pulling_share(self) -> float:
        """Share of the rollouts trained that took a backward pass."""
        return float(self.steps.pulling.sum() / self.steps.rollouts.sum())

    @property
    def step_seconds(self) -> float:
        """Mean, from the end of one step to the end of the next."""
        return (self.end - self.begin) / (len(self.steps.t) - 1)

    def lengths(self) -> StoredLengths:
        """Lengths of its own groups."""
        generation = self.config.generation
        return StoredLengths(
            groups=self.groups(), group_size=generation.group_size, max_tokens=generation.max_new_tokens
        )

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Tokens of the prompt and of each response, of each group after the first ones up to the first one missing.

        Behind that, long groups would be missing more often than short ones.
        """
        groups: dict[int, tuple[int, list[int]]] = {}
        for rollouts in self.rollouts:
            columns = rollouts.group, rollouts.prompt_tokens, rollouts.response_tokens
            for group, prompt, response in zip(*columns, strict=True):
                groups.setdefault(int(group), (int(prompt), []))[1].append(int(response))
        whole = takewhile(lambda number: number in groups, range(min(groups), max(groups) + 1))
        return [(groups[number][0], tuple(groups[number][1])) for number in whole]


def read_measured(store: Store) -> MeasuredRun:
    """Reads the newest attempt of a run. Raises InputError if it has too few steps; RunMissing, StreamCorrupt."""
    attempt = latest_attempt(store)
    config = RunConfig.model_validate(attempt.config)
    since = attempt.t_started
    read = [_rollouts(store, generator, since) for generator in range(config.generation.replicas)]
    rollouts = [each for each, _ in read]
    steps = _steps(store, since, rollouts, config)
    warmup = max(_WARMUP_STEPS, round(_WARMUP_SHARE * len(steps.t)))
    left = max(0, len(steps.t) - warmup)
    if left < LEAST_STEPS:
        raise InputError(
            f"{store.url}: its newest attempt has {len(steps.t)} steps, {left} after a warm-up of {warmup}; "
            f"a fit needs {LEAST_STEPS}, so {LEAST_STEPS - left} more"
        )
    kept = Steps(**{name: getattr(steps, name)[warmup - 1 :] for name in Steps.__dataclass_fields__})
    return MeasuredRun(
        url=store.url,
        config=config,
        steps=kept,
        rollouts=rollouts,
        generators=[_activities(store, "generate", k, since) for k in range(config.generation.replicas)],
        scorers=[_activities(store, "score", k, since) for k in range(config.scoring.replicas)],
        trainer=_activities(store, "train", 0, since),
        sync=_activities(store, "sync_weights", 0, since),
        parts=[part for _, parts in read for part in parts],
        reward_seconds=_reward_seconds(store, config),
    )


def _rollouts(store: Store, generator: int, since: float) -> tuple[Rollouts, list[tuple[float, int]]]:
    """Reads one generator's rollouts, and the time and rows of each part."""
    columns = ("group_id", "prompt_tokens", "response_tokens", "t_started", "t_finished")
    parts = []
    for table in _tables(store, layout.trajectories(generator), TRAJECTORY, columns):
        tokens = [pc.list_value_length(table[name]).cast(pa.int64()) for name in columns[1:3]]
        plain = [table["group_id"], *tokens, table["t_started"], table["t_finished"]]
        parts.append([column.to_numpy() for column in plain])
    group, prompt, response, started, finished = _joined(parts, len(columns))
    inside = started >= since
    rollouts = Rollouts(
        group=group[inside].astype(np.int64),
        prompt_tokens=prompt[inside].astype(np.int64),
        response_tokens=response[inside].astype(np.int64),
        started=started[inside],
        finished=finished[inside],
    )
    return rollouts, [(float(part[4].max()), len(part[4])) for part in parts if part[4].max() >= since]


def _steps(store: Store, since: float, rollouts: Sequence[Rollouts], config: RunConfig) -> Steps:
    columns = ("t", "policy_version", "group_id", "outcome", "tokens", "advantage")
    parts = []
    for table in _tables(store, layout.CONSUMED, CONSUMED, columns):
        # A step's drops may have the same version as its rows, so only what was trained says when a step ended.
        trained = table.filter((pc.field("outcome") == TRAINED) & (pc.field("t") >= since))
        parts.append([trained[name].to_numpy() for name in columns if name != "outcome"])
    t, version, group, tokens, advantage = _joined(parts, 5)
    prompt_of: dict[int, int] = {}
    for each in rollouts:
        prompt_of |= zip(each.group.tolist(), each.prompt_tokens.tolist(), strict=True)
    prompts = np.array([prompt_of.get(int(number), 0) for number in group], dtype=np.int64)
    versions, where = np.unique(version, return_inverse=True)
    if config.training.share_prefixes:
        first = np.zeros(len(group), dtype=bool)
        first[np.unique(np.stack([where, group]), axis=1, return_index=True)[1]] = True
        prompts = prompts * first
    ends = np.zeros(len(versions))
    np.maximum.at(ends, where, t)

    def summed(values: npt.NDArray[Any]) -> _Ints:
        return np.bincount(where, weights=values, minlength=len(versions)).astype(np.int64)

    return Steps(
        policy_version=versions.astype(np.int64),
        t=ends,
        rollouts=summed(np.ones(len(group))),
        tokens=summed(tokens + prompts),
        pulling=summed((advantage != 0) | config.training.pulls_without_advantage),
    )


def _activities(store: Store, stage: str, replica: int, since: float) -> Activities:
    spans: dict[float, dict[str, float]] = {}
    values: dict[str, list[tuple[float, float]]] = {}
    for table in _tables(store, layout.metrics(stage, replica), METRIC, ("t", "name", "value")):
        for t, name, value in zip(*(table[column].to_pylist() for column in ("t", "name", "value")), strict=True):
            if t < since:
                continue
            if name.startswith(_TIME):
                spans.setdefault(t, {})[name.removeprefix(_TIME).removesuffix(_SECONDS)] = value
            else:
                values.setdefault(name, []).append((t, value))
    ordered = sorted(spans)
    return Activities(t=ordered, seconds=[spans[t] for t in ordered], values=values)


def _reward_seconds(store: Store, config: RunConfig) -> float:
    seconds, rows, scorers = 0.0, 0, config.scoring.replicas
    for generator in range(config.generation.replicas):
        for scorer in range(scorers):
            path = layout.scores(config.scoring.reward, generator, scorer, scorers)
            for table in _tables(store, path, SCORE, ("seconds",)):
                seconds += pc.sum(table["seconds"]).as_py() or 0.0
                rows += table.num_rows
    return seconds / rows if rows else 0.0


def _tables(store: Store, path: str, schema: pa.Schema, columns: Sequence[str]) -> Iterator[pa.Table]:
    # Damaged parts are left out: a fit is about many.
    return (part.table for part in StreamReader(store, path, schema, columns=columns).readable())


def _joined(parts: Sequence[Sequence[npt.NDArray[Any]]], columns: int) -> list[npt.NDArray[Any]]:
    if not parts:
        return [np.zeros(0) for _ in range(columns)]
    return [np.concatenate([part[k] for part in parts]) for k in range(columns)]
