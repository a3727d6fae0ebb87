"""Reads a stored run for a fit: when its steps ended, its rollouts, and how its stages spent their time.

║ consumed ║ ─► steps: end, rollouts and tokens trained      ┐
║ trajectories ║ ─► rollouts: group, lengths, start and end  ├─► a measured run, without its warm-up
║ metrics ║ ─► seconds of each activity, updates of weights  ┘

Only the newest attempt counts: an earlier one may have had another config. Times are unix seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import Lengths, common_group_size, max_new_tokens
from millrace.rollouts.consumed import TRAINED
from millrace.runs.record import latest_attempt
from storage import layout
from storage.schema import CONSUMED, METRIC, TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import StreamReader

_LEAST_STEPS, _LEAST_SPANS = 20, 2
_WARMUP_STEPS, _WARMUP_SHARE = 5, 0.1
_TIME, _SECONDS = "time/", "/seconds"
Floats = npt.NDArray[np.float64]


class Rollouts(NamedTuple):
    """Rollouts of one generator, [N] each, warm-up included."""

    group: Floats
    prompt_tokens: Floats
    response_tokens: Floats
    started: Floats
    finished: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """How one stage process spent its time after the warm-up, as it logged it every few seconds."""

    spans: Sequence[tuple[float, float, dict[str, float]]]
    """(begin, end, seconds by activity), one after the other."""
    values: dict[str, list[tuple[float, float]]]
    """(time, value) of each other metric by name."""

    @property
    def begin(self) -> float:
        return self.spans[0][0]

    @property
    def end(self) -> float:
        return self.spans[-1][1]

    def includes(self, t: Floats) -> npt.NDArray[np.bool_]:
        """Which of these times are within the spans."""
        return (t > self.begin) & (t <= self.end)

    def seconds(self, *activities: str) -> float:
        """Sums these activities; all that are counted if none is named."""
        return sum(
            spent for *_, span in self.spans for name, spent in span.items() if name in activities or not activities
        )

    def count(self, name: str) -> int:
        """Counts the values of a metric within the spans."""
        return sum(self.begin < t <= self.end for t, _ in self.values.get(name, ()))


class Steps(NamedTuple):
    """Optimizer steps in order, [N] each."""

    policy_version: Floats
    t: Floats
    """Their ends."""
    rollouts: Floats
    """Trained."""
    tokens: Floats
    """Computed: responses, and a prompt of mean length per group if prefixes are shared, else per rollout."""
    with_gradient: Floats
    """Rollouts that took a backward pass: those without advantage take none, unless another loss term needs it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRun:
    """A stored run."""

    url: str
    config: RunConfig
    steps: Steps
    """After the warm-up, and the last one of it."""
    rollouts: Sequence[Rollouts]
    """By generator."""
    generators: Sequence[StageTimes]
    scorers: Sequence[StageTimes]
    trainer: StageTimes
    push_seconds: float
    """From the hand-over of a version until a generator begins to load it, mean."""
    factor: float = 1.0
    """Measured ÷ predicted seconds of a step, for all costs of configs with the same prompts."""

    @property
    def step_seconds(self) -> float:
        """Mean, from the end of one step to the end of the next."""
        return float(self.steps.t[-1] - self.steps.t[0]) / (len(self.steps.t) - 1)

    @property
    def gradient_share(self) -> float:
        """Share of the rollouts trained that took a backward pass."""
        return float(self.steps.with_gradient.sum() / self.steps.rollouts.sum())

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the tokens of the prompt and of each response, of each group up to the first one missing.

        Behind that, long groups would be missing more often than short ones.
        """
        groups: dict[int, tuple[int, list[int]]] = {}
        for rollouts in self.rollouts:
            for group, prompt, response in zip(*rollouts[:3], strict=True):
                groups.setdefault(int(group), (int(prompt), []))[1].append(int(response))
        whole = takewhile(lambda number: number in groups, range(min(groups), max(groups) + 1))
        return [(groups[number][0], tuple(groups[number][1])) for number in whole]


def lengths_of(runs: Sequence[MeasuredRun], config: RunConfig) -> Lengths:
    """Returns the lengths of these runs' groups, for a config."""
    groups = [group for run in runs for group in run.groups()]
    return Lengths(groups=groups, group_size=common_group_size(config), max_tokens=max_new_tokens(config))


def read_measured(store: Store) -> MeasuredRun:
    """Reads the newest attempt. Raises InputError if it has too little for a fit; RunMissing, StreamCorrupt."""
    attempt = latest_attempt(store)
    config, since = RunConfig.model_validate(attempt.config), attempt.t_started
    rollouts = [_read_rollouts(store, generator, since) for generator in range(config.generation.replicas)]
    steps = _read_steps(store, since, rollouts, config)
    warmup = max(_WARMUP_STEPS, round(_WARMUP_SHARE * len(steps.t)))
    left = max(0, len(steps.t) - warmup)
    if left < _LEAST_STEPS:
        raise InputError(
            f"its newest attempt has {len(steps.t)} steps, {left} after a warm-up of {warmup}",
            file=store.url,
            expected=f"{_LEAST_STEPS - left} more for a fit",
        )
    kept = Steps(*(values[warmup - 1 :] for values in steps))
    window = float(kept.t[0]), float(kept.t[-1])

    def read(stage: str, replicas: int) -> list[StageTimes]:
        return [_read_times(store, stage, replica, window) for replica in range(replicas)]

    generators, trainer = read("generate", config.generation.replicas), _read_times(store, "train", 0, window)
    return MeasuredRun(
        url=store.url,
        config=config,
        steps=kept,
        rollouts=rollouts,
        generators=generators,
        scorers=read("score", config.annotators.total("scores")),
        trainer=trainer,
        push_seconds=_mean_push(generators, trainer, _read_metrics(store, "sync_weights", 0, window)[1]),
    )


def _read_rollouts(store: Store, generator: int, since: float) -> Rollouts:
    columns = ("group_id", "prompt_tokens", "response_tokens", "t_started", "t_finished")
    parts = []
    for table in _tables(store, layout.trajectories(generator), TRAJECTORY, columns):
        table = table.filter(pc.field("t_started") >= since)
        lengths = [pc.list_value_length(table[name]) for name in columns[1:3]]
        parts.append([table["group_id"], *lengths, table["t_started"], table["t_finished"]])
    return Rollouts(*_join(parts, len(columns)))


def _read_steps(store: Store, since: float, rollouts: Sequence[Rollouts], config: RunConfig) -> Steps:
    columns = ("t", "policy_version", "outcome", "tokens", "advantage")
    parts = []
    for table in _tables(store, layout.CONSUMED, CONSUMED, columns):
        # Dropped rows may have the version of the step too, so only trained rows show when a step ended.
        trained = table.filter((pc.field("outcome") == TRAINED) & (pc.field("t") >= since))
        parts.append([trained[name] for name in columns if name != "outcome"])
    t, version, tokens, advantage = _join(parts, 4)
    versions, step = np.unique(version, return_inverse=True)
    ends = np.zeros(len(versions))
    np.maximum.at(ends, step, t)

    def summed(values: npt.NDArray[Any]) -> Floats:
        return np.bincount(step, weights=values, minlength=len(versions)).astype(np.float64)

    num_rollouts = summed(np.ones(len(t)))
    prompt = float(np.concatenate([each.prompt_tokens for each in rollouts]).mean()) if len(t) else 0.0
    num_prompts = config.training.groups_per_step if config.training.share_prefixes else num_rollouts
    return Steps(
        policy_version=versions,
        t=ends,
        rollouts=num_rollouts,
        tokens=summed(tokens) + prompt * num_prompts,
        with_gradient=summed((advantage != 0) | config.training.pulls_without_advantage),
    )


def _read_metrics(
    store: Store, stage: str, replica: int, window: tuple[float, float]
) -> tuple[dict[float, dict[str, float]], dict[str, list[tuple[float, float]]]]:
    """Returns seconds by activity and time of the row, and (time, value) of each other metric, in that window."""
    rows: dict[float, dict[str, float]] = {}
    values: dict[str, list[tuple[float, float]]] = {}
    for table in _tables(store, layout.metrics(stage, replica), METRIC, ("t", "name", "value")):
        for t, name, value in zip(*(table[column].to_pylist() for column in ("t", "name", "value")), strict=True):
            if window[0] <= t <= window[1]:
                if name.startswith(_TIME):
                    rows.setdefault(t, {})[name.removeprefix(_TIME).removesuffix(_SECONDS)] = value
                else:
                    values.setdefault(name, []).append((t, value))
    return rows, values


def _read_times(store: Store, stage: str, replica: int, window: tuple[float, float]) -> StageTimes:
    rows, values = _read_metrics(store, stage, replica, window)
    times = sorted(rows)
    # A row has the seconds since the one before, so the first row of the window does not count.
    spans = [(begin, end, rows[end]) for begin, end in pairwise(times)]
    if len(spans) < _LEAST_SPANS:
        raise InputError(
            f"{stage} {replica} logged its times {len(spans)} times after the warm-up",
            file=store.url,
            expected=f"{_LEAST_SPANS - len(spans)} more for a fit, which come every few seconds",
        )
    return StageTimes(spans=spans, values=values)


def _mean_push(
    generators: Sequence[StageTimes], trainer: StageTimes, sync: dict[str, list[tuple[float, float]]]
) -> float:
    """Means of a version's hashing and offer, and where it is longer of its delivery, hand-over and loading aside."""
    least = sum(_mean_value(sync.get(name, ())) for name in ("push_hash_seconds", "push_offer_seconds"))
    delivered = [
        _mean_value(values) - times.seconds("update_weights") / max(1, times.count("pause_seconds"))
        for times in generators
        for name, values in times.values.items()
        if name.startswith("delivery/")
    ]
    handover = trainer.seconds("handover") / max(1, len(sync.get("push_hash_seconds", ())))
    return max(least, sum(delivered) / len(delivered) - handover) if delivered else least


def _mean_value(values: Sequence[tuple[float, float]]) -> float:
    return sum(value for _, value in values) / len(values) if values else 0.0


def _tables(store: Store, path: str, schema: pa.Schema, columns: Sequence[str]) -> Iterator[pa.Table]:
    # Damaged parts are left out: a fit is about many.
    return (part.table for part in StreamReader(store, path, schema, columns=columns).readable())


def _join(parts: Sequence[Sequence[Any]], columns: int) -> list[Floats]:
    """Joins each column of all parts as float64, which holds ids and times exactly."""
    return [
        np.concatenate([np.zeros(0), *(part[k].to_numpy().astype(np.float64) for part in parts)])
        for k in range(columns)
    ]
