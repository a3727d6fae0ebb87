"""From what stored runs measured to the seconds of each thing on their machine, apart from the config.

runs ─► steps of engines, spans of trainer and scorers ─► least squares ─► coefficients ─► simulation ─► step time ─┐
  └─► measured step time ───────────────────────────────────────────────────────────────────────────────────────────┴─►
                                                                                     one factor for all coefficients

That factor stands for what no coefficient does: other processes of the machine, threads of a stage that hold each
other up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import Costs
from millrace.planning.fit.engine_steps import Stretches, find_stretches
from millrace.planning.fit.measured import MeasuredRun
from millrace.planning.simulation import simulate

_LEAST_STRETCHES, _LEAST_SPANS = 50, 2
_STEPS, _WARMUP, _ROUNDS = 100, 10, 2
"""Of the simulations by which coefficients are calibrated."""
_ROBUST_ROUNDS, _OUTLIER = 8, 3.0
"""Residuals beyond so many times the median one count less, the further the less."""
_LOADING = ("update_weights", "probe")
"""A generator's activities when it takes a version."""
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Seconds of work, without waiting: each is what one more of something costs."""

    decode_step: float
    """Per step of an engine, whatever it decodes."""
    decode_token: float
    """Per token that a step samples: one of each request."""
    decode_context: float
    """Per token in the key-value cache and step; in an engine that pads, padding included."""
    prefill_pass: float
    """Per time that requests enter an engine."""
    prefill_token: float
    """Per token that is computed for requests that enter."""
    recomputed_token: float
    """Per token of the caches that are computed again after new weights, counted in the same way."""
    collect: float
    """Of a generator, per time that responses end: it looks for weights and for room."""
    rollout: float
    """Of a generator, per rollout that it finishes: it becomes a row, and is committed."""
    pause: float
    """Of a generator, per version that it takes: verified, loaded, probed."""
    push: float
    """Per version, until generators may take it: hashed and offered."""
    score_rollout: float
    """Of a scorer, per rollout, without the reward."""
    score_part: float
    """Of a scorer, per part of trajectories: read, committed."""
    reward: float
    """Of the reward itself, per rollout."""
    train_step: float
    """Per optimizer step."""
    train_token: float
    """Per token of a step, prompts included, with a forward and a backward pass."""
    train_rollout: float
    """Per rollout of a step."""
    handover: float
    """Per version, of the trainer."""
    checkpoint: float
    """Per checkpoint, of the trainer."""
    overhead_step: float
    """Of the trainer between two steps: ledger, status, metrics."""
    overhead_rollout: float
    """The same, per rollout: joined with its score, accounted for."""

    def scaled(self, factor: float) -> "Coefficients":
        """All of them times a factor."""
        return Coefficients(**{field.name: factor * getattr(self, field.name) for field in fields(self)})

    def costs(self, config: RunConfig, *, pulling: float, reward: float | None, cores: float | None) -> Costs:
        """Durations under `config`.

        `pulling`: share of its rollouts that take a backward pass. `reward`: seconds per rollout of another reward than
        the measured one.
        """
        rollouts = config.training.groups_per_step * config.generation.group_size
        reward_seconds = self.reward if reward is None else reward
        train_token = self.train_token * _passes_share(pulling)
        return Costs(
            decode=lambda running, context: (
                self.decode_step + self.decode_token * running + self.decode_context * context
            ),
            prefill=lambda tokens: self.prefill_pass + self.prefill_token * tokens,
            recompute=lambda tokens: self.recomputed_token * tokens,
            pads=_pads(config),
            collect=self.collect,
            score=self.score_rollout + reward_seconds / config.scoring.workers,
            train=lambda tokens, count: self.train_step + train_token * tokens + self.train_rollout * count,
            handover=self.handover,
            push=self.push,
            pause=self.pause,
            checkpoint=self.checkpoint,
            rollout=self.rollout,
            score_part=self.score_part,
            overhead=self.overhead_step + self.overhead_rollout * rollouts,
            cores=cores,
        )


def fit_coefficients(runs: Sequence[MeasuredRun], cores: float | None) -> Coefficients:
    """Fits runs whose stages shared so many cores, None if each had devices of its own.

    With the coefficients, steps of the runs take as long as they took, in the geometric mean over the runs. Raises
    InputError where a run has too little for a fit.
    """
    coefficients = _uncalibrated([_Run(run, cores) for run in runs])
    for _ in range(_ROUNDS):
        logs = [math.log(run.step_seconds / predicted_step_seconds(run, coefficients, cores)) for run in runs]
        coefficients = coefficients.scaled(math.exp(sum(logs) / len(logs)))
    return coefficients


def predicted_step_seconds(run: MeasuredRun, coefficients: Coefficients, cores: float | None) -> float:
    """Simulates a run with its own lengths."""
    costs = coefficients.costs(run.config, pulling=run.pulling_share, reward=None, cores=cores)
    return simulate(run.config, costs, run.lengths(), steps=_STEPS, warmup=_WARMUP).step_seconds


def fit_costs(columns: _Floats, seconds: _Floats) -> _Floats:
    """Returns [C] coefficients c ≥ 0 with `columns` [N, C] · c ≈ `seconds` [N], and the same sum over all rows.

    A few outliers count little.
    """
    costs = _non_negative(columns, seconds)
    for _ in range(_ROBUST_ROUNDS):
        residuals = np.abs(seconds - columns @ costs)
        scale = _OUTLIER * max(float(np.median(residuals)), 1e-12)
        root = np.sqrt(1 / np.maximum(1.0, residuals / scale))
        costs = _non_negative(columns * root[:, None], seconds * root)
    total = float((columns @ costs).sum())
    return costs * (float(seconds.sum()) / total) if total > 0 else costs


def _non_negative(columns: _Floats, seconds: _Floats) -> _Floats:
    """The best non-negative coefficients: of all choices of columns, as there are few."""
    num = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    gram, moment = (columns / scale).T @ (columns / scale), (columns / scale).T @ seconds
    best, best_gain = np.zeros(num), 0.0
    for size in range(1, num + 1):
        for chosen in combinations(range(num), size):
            at = list(chosen)
            solved = np.linalg.lstsq(gram[np.ix_(at, at)], moment[at], rcond=1e-9)[0]
            # By how much it lowers the sum of squares.
            gain = float(2 * solved @ moment[at] - solved @ gram[np.ix_(at, at)] @ solved)
            if (solved >= 0).all() and gain > best_gain * (1 + 1e-9):
                best = np.zeros(num)
                best[at], best_gain = solved, gain
    scaled: _Floats = best / scale
    return scaled


class _Run:
    """A run with how many times as long as alone the work of each of its stages took, mean over its time."""

    def __init__(self, run: MeasuredRun, cores: float | None) -> None:
        self.run = run
        config = run.config
        stages = {"generate": run.generators, "score": run.scorers, "train": [run.trainer]}
        threads = {
            "generate": config.generation.threads,
            "score": config.scoring.threads,
            "train": config.training.threads,
        }
        for stage, replicas in stages.items():
            for replica, activities in enumerate(replicas):
                logged = len(activities.spans(run.begin, run.end))
                if logged < _LEAST_SPANS:
                    raise InputError(
                        f"{run.url}: {stage} {replica} logged its times {logged} times after the warm-up; a fit needs "
                        f"{_LEAST_SPANS}, so {_LEAST_SPANS - logged} more, which come every few seconds"
                    )
        loads = [
            (stage, threads[stage], 1 - activities.idle_share(run.begin, run.end))
            for stage, replicas in stages.items()
            for activities in replicas
        ]
        self.slow = {
            stage: 1.0
            if cores is None
            else expected_slowdown(threads[stage], [load[1:] for load in _others(loads, stage)], cores)
            for stage in stages
        }

    def per_update(self, names: Sequence[str]) -> float:
        """Seconds of these activities per version that a generator takes."""
        run, spent, updates = self.run, 0.0, 0
        for generator in run.generators:
            begin, end, activities = generator.between(run.begin, run.end)
            spent += sum(activities.get(name, 0.0) for name in names)
            updates += sum(begin < t <= end for t, _ in generator.values.get("pause_seconds", ()))
        return spent / max(1, updates) / self.slow["generate"]

    def per_step(self, activity: str) -> float:
        """Seconds of an activity of the trainer per step."""
        run = self.run
        begin, end, activities = run.trainer.between(run.begin, run.end)
        return activities.get(activity, 0.0) / max(1, int(run.steps.between(begin, end).sum())) / self.slow["train"]

    def checkpoint(self) -> float:
        """Seconds of a checkpoint."""
        run, training = self.run, self.run.config.training
        begin, end, activities = run.trainer.between(run.begin, run.end)
        versions = run.steps.policy_version[run.steps.between(begin, end)].tolist()
        due = {training.checkpoint_every, run.config.evaluation.every or 0} - {0}
        made = sum(any(version % every == 0 for every in due) for version in versions)
        return activities.get("checkpoint", 0.0) / max(1, made) / self.slow["train"]

    def push(self) -> float:
        """Seconds from the end of a hand-over until a generator begins to load the version, between two steps."""
        run = self.run
        names = "push_hash_seconds", "push_offer_seconds"
        least = sum(run.sync.mean(name, run.begin, run.end) or 0.0 for name in names)
        means = [
            generator.mean(name, run.begin, run.end)
            for generator in run.generators
            for name in generator.values
            if name.startswith("delivery/")
        ]
        delivered = [mean for mean in means if mean is not None]
        if not delivered:
            return least
        # A delivery begins before the hand-over and ends with the update.
        handover = self.per_step("handover") * self.slow["train"]
        update = self.per_update(_LOADING[:1]) * self.slow["generate"]
        return max(least, _mean(delivered) - handover - update)

    def stretches(self, generator: int) -> tuple[Stretches, npt.NDArray[np.int64]]:
        """Stretches after the warm-up, and how many times weights came in during each."""
        run, found = self.run, find_stretches(self.run.rollouts[generator])
        updates = np.array([t for t, _ in run.generators[generator].values.get("pause_seconds", ())])
        end = found.begin + found.seconds
        # The time of an update's row is that of its end.
        during = np.searchsorted(updates, end, side="right") - np.searchsorted(updates, found.begin)
        inside = (found.begin >= run.begin) & (end <= run.end)
        return found[inside], during[inside]

    def undisturbed(self, generator: int) -> Stretches:
        """Stretches after the warm-up in which no weights came in. Raises InputError if they are too few."""
        stretches, updates = self.stretches(generator)
        chosen = stretches[updates == 0]
        if (count := len(chosen.begin)) < _LEAST_STRETCHES:
            raise InputError(
                f"{self.run.url}: responses of generator {generator} ended at {count} moments after the warm-up; "
                f"a fit needs {_LEAST_STRETCHES}, so {_LEAST_STRETCHES - count} more"
            )
        return chosen

    def context(self, stretches: Stretches) -> _Floats:
        """Tokens in the cache, as the engine counts them."""
        return stretches.padded if _pads(self.run.config) else stretches.context

    def columns(self, stretches: Stretches) -> _Floats:
        """[N, 5]: what the engine's coefficients are multiplied with."""
        counts = stretches.steps, stretches.tokens, self.context(stretches), stretches.passes, stretches.prefilled
        return np.stack(counts, axis=1)


def _uncalibrated(runs: Sequence[_Run]) -> Coefficients:
    rollout, collect = _fit_handling(runs)
    engine = _fit_engine(runs, rollout, collect)
    train = _fit_train(runs)
    overhead_step, overhead_rollout = _fit_overhead(runs)
    score_part, score_rollout = _fit_score(runs)
    return Coefficients(
        decode_step=engine[0],
        decode_token=engine[1],
        decode_context=engine[2],
        prefill_pass=engine[3],
        prefill_token=engine[4],
        recomputed_token=_recomputed_token(runs, engine, rollout, collect),
        collect=collect,
        rollout=rollout,
        pause=_mean([run.per_update(_LOADING) for run in runs]),
        push=_mean([run.push() for run in runs]),
        score_rollout=score_rollout,
        score_part=score_part,
        reward=_mean([run.run.reward_seconds / run.slow["score"] for run in runs]),
        train_step=train[0],
        train_token=train[1],
        train_rollout=train[2],
        handover=_mean([run.per_step("handover") for run in runs]),
        checkpoint=_mean([run.checkpoint() for run in runs]),
        overhead_step=overhead_step,
        overhead_rollout=overhead_rollout,
    )


def _fit_handling(runs: Sequence[_Run]) -> tuple[float, float]:
    """Seconds of a generator outside its engine (per rollout that ends, per time that some end)."""
    committed, ended, loaded, times = 0.0, 0, 0.0, 0
    for each in runs:
        run = each.run
        for generator, rollouts in zip(run.generators, run.rollouts, strict=True):
            begin, end, activities = generator.between(run.begin, run.end)
            committed += activities.get("commit", 0.0) / each.slow["generate"]
            loaded += activities.get("loading", 0.0) / each.slow["generate"]
            ended += int(((rollouts.finished > begin) & (rollouts.finished <= end)).sum())
            ends = find_stretches(rollouts).begin
            times += int(((ends > begin) & (ends <= end)).sum())
    return committed / max(1, ended), loaded / max(1, times)


def _fit_engine(runs: Sequence[_Run], rollout: float, collect: float) -> list[float]:
    columns, seconds = [], []
    for each in runs:
        for generator in range(len(each.run.rollouts)):
            stretches = each.undisturbed(generator)
            columns.append(each.columns(stretches))
            seconds.append(stretches.seconds / each.slow["generate"] - _handled(stretches, rollout, collect))
    return [float(cost) for cost in fit_costs(np.concatenate(columns), np.concatenate(seconds))]


def _handled(stretches: Stretches, rollout: float, collect: float) -> _Floats:
    """[N] seconds that the generator spent on what had ended before each."""
    return rollout * stretches.ended + collect * (stretches.ended > 0)


def _recomputed_token(runs: Sequence[_Run], engine: Sequence[float], rollout: float, collect: float) -> float:
    """What stretches in which weights came in took in addition, per token in the caches."""
    extra, tokens = 0.0, 0.0
    for each in runs:
        pause = each.per_update(_LOADING)
        for generator in range(len(each.run.rollouts)):
            stretches, updates = each.stretches(generator)
            stretches, updates = stretches[updates > 0], updates[updates > 0]
            expected = each.columns(stretches) @ np.array(engine) + _handled(stretches, rollout, collect)
            extra += float((stretches.seconds / each.slow["generate"] - expected - pause * updates).sum())
            tokens += float((updates * each.context(stretches) / stretches.steps).sum())
    return max(0.0, extra / tokens) if tokens else 0.0


def _fit_train(runs: Sequence[_Run]) -> list[float]:
    rows, seconds = [], []
    for each in runs:
        run, steps = each.run, each.run.steps
        work = (1 + 2 * steps.pulling / steps.rollouts) / 3 * steps.tokens
        # The end of a step is that of its hand-over.
        ends = steps.t - each.per_step("handover") * each.slow["train"]
        for begin, end, activities in run.trainer.spans(run.begin, run.end):
            inside = (ends > begin) & (ends <= end)
            if inside.any():
                rows.append([inside.sum(), work[inside].sum(), steps.rollouts[inside].sum()])
                seconds.append(activities.get("train", 0.0) / each.slow["train"])
    return [float(cost) for cost in fit_costs(np.array(rows, dtype=np.float64), np.array(seconds))]


def _fit_overhead(runs: Sequence[_Run]) -> list[float]:
    """(per step, per rollout): all of a trainer's time that is neither a step's own nor waiting."""
    rows, seconds = [], []
    for each in runs:
        run = each.run
        begin, end, activities = run.trainer.between(run.begin, run.end)
        inside = run.steps.between(begin, end)
        counted = sum(spent for name, spent in activities.items() if name != "loading")
        rows.append([inside.sum(), run.steps.rollouts[inside].sum()])
        seconds.append(max(0.0, end - begin - counted) / each.slow["train"])
    return [float(cost) for cost in fit_costs(np.array(rows, dtype=np.float64), np.array(seconds))]


def _fit_score(runs: Sequence[_Run]) -> list[float]:
    """(per part, per rollout without the reward)."""
    rows, seconds = [], []
    for each in runs:
        run, count = each.run, len(each.run.scorers)
        for scorer in run.scorers:
            begin, end, activities = scorer.between(run.begin, run.end)
            # Scorers follow the generators within milliseconds.
            parts = [size for t, size in run.parts if begin < t <= end]
            rows.append([len(parts) / count, sum(parts) / count])
            reward = run.reward_seconds / run.config.scoring.workers * sum(parts) / count
            spent = sum(activities.get(name, 0.0) for name in ("loading", "score", "commit"))
            seconds.append(max(0.0, spent / each.slow["score"] - reward))
    return [float(cost) for cost in fit_costs(np.array(rows, dtype=np.float64), np.array(seconds))]


def expected_slowdown(threads: int, others: Sequence[tuple[int, float]], cores: float) -> float:
    """Mean of max(1, busy threads ÷ cores) while a process with so many threads is busy.

    `others`: (threads, share of the time in which it is busy) of each other process, busy independently of each other.
    """
    chances = {threads: 1.0}
    for more, share in others:
        after: dict[int, float] = {}
        for busy, chance in chances.items():
            after[busy] = after.get(busy, 0.0) + chance * (1 - share)
            after[busy + more] = after.get(busy + more, 0.0) + chance * share
        chances = after
    return sum(chance * max(1.0, busy / cores) for busy, chance in chances.items())


def _others(loads: Sequence[tuple[str, int, float]], stage: str) -> list[tuple[str, int, float]]:
    """All loads but the first of a stage."""
    first = next(place for place, load in enumerate(loads) if load[0] == stage)
    return [*loads[:first], *loads[first + 1 :]]


def _passes_share(pulling: float) -> float:
    """Work of forward passes over all tokens and backward passes over this share of them, as a share of both over all.

    A backward pass has twice the products of a forward pass.
    """
    return (1 + 2 * pulling) / 3


def _pads(config: RunConfig) -> bool:
    """Whether the engine computes all requests of a batch as if they were as long as the longest."""
    return config.generation.engine == "transformers"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
