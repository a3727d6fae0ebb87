"""The machine of stored runs: durations fitted to their measurements, for other configs.

runs ─► responses of engines, spans of the trainer ─► least squares ─► costs ─► simulation ─► step time ─┐
  └─► measured step time ────────────────────────────────────────────────────────────────────────────────┴─►
                                                                                    one factor for all of its costs

A response of n tokens takes n steps of its engine. Each step has a fixed cost, a cost per response in flight and one
per token in the cache; caches that are recomputed after new weights (without `keep_cache`) cost something per token.
Prompts are counted with the steps. The factor stands for the rest: other processes of the machine, stages that hold
each other up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from configs.schema import RunConfig
from configs.task import PromptsConfig
from millrace.errors import InputError
from millrace.planning.durations import Costs, Lengths, mean_group_size, with_shares
from millrace.planning.measured import Floats, MeasuredRun, Rollouts, lengths_of, read_measured
from millrace.planning.simulation import simulate
from storage.stores.base import Store

_STEPS, _WARMUP, _ROUNDS = 100, 10, 2
"""Of the simulations by which costs are calibrated."""
_ROBUST_ROUNDS, _OUTLIER = 8, 3.0
"""Residuals beyond 3 times the median count less, the further the less."""
_SAMPLES = 1000
"""Moments at which the requests in flight are counted."""


@dataclass(frozen=True, kw_only=True)
class StoredMachine:
    """Every stage on the devices of the runs. All fits into memory, and GPUs are not divided."""

    runs: Sequence[MeasuredRun]
    engine: Sequence[float]
    """Seconds per engine step, per response in flight and step, per token in the cache and step, and per token of
    caches that are recomputed; the last is 0 if all runs kept theirs."""
    train: Sequence[float]
    """Seconds per optimizer step, per token of it with a forward and a backward pass, and per rollout."""
    cores: float | None
    """CPU cores that the stages share; None: they share nothing."""

    @property
    def name(self) -> str:
        return f"the machine of {', '.join(run.url for run in self.runs)}"

    def costs(self, config: RunConfig) -> Costs:
        """Returns durations under a config of the same model.

        Raises InputError if the runs all have one batch, and this config another one.
        """
        batches = {_batch(run.config) for run in self.runs}
        if len(batches) == 1 and _batch(config) not in batches:
            raise InputError(
                f"a step of the config has {_batch(config)} rollouts, and all runs fitted have {min(batches)}",
                expected="one more run, of another batch, that shows how its time depends on that number",
            )
        alike = self._alike(config)
        step, (train_step, train_token, train_rollout) = self.engine, self.train
        factor = fmean(run.factor for run in alike)
        if not config.training.pulls_without_advantage:
            # A backward pass has twice the products of a forward pass.
            train_token *= (1 + 2 * fmean(run.gradient_share for run in alike)) / 3

        def mean(cost: Callable[[MeasuredRun], float]) -> float:
            return factor * fmean(cost(run) for run in alike)

        return Costs(
            decode=lambda running, cached: factor * (step[0] + step[1] * running + step[2] * cached),
            prefill=lambda tokens: factor * step[3] * tokens,
            pads=_pads(config),
            rollout=mean(_rollout_seconds),
            pause=mean(_pause_seconds),
            push=mean(lambda run: run.push_seconds),
            score=mean(lambda run: _score_seconds(run, config.scoring.workers)),
            train=lambda tokens, rollouts: factor * (train_step + train_token * tokens + train_rollout * rollouts),
            handover=mean(lambda run: _trainer_seconds(run, "handover")),
            checkpoint=mean(lambda run: _trainer_seconds(run, "checkpoint") * run.config.training.checkpoint_every),
            overhead=_batch(config) * mean(_overhead_seconds),
            cores=self.cores,
        )

    def lengths(self, config: RunConfig) -> Lengths:
        """Returns the lengths of the groups of those runs that have the config's prompts; of all runs, if none has."""
        return lengths_of(self._alike(config), config)

    def memory(self, config: RunConfig) -> None:
        """All runs fitted."""

    def assumptions(self, config: RunConfig) -> Mapping[str, str]:
        """Returns the runs, their lengths, and what their stages share."""
        means = self.lengths(config).means
        cores = "separate for each stage" if self.cores is None else f"{self.cores:g} CPU cores, shared by all stages"
        runs = "; ".join(f"{run.url}, {len(run.steps.t) - 1} steps of {run.step_seconds:.3g} s" for run in self.runs)
        return {
            "durations": f"fitted to {runs}",
            "lengths": f"prompts of {means.prompt:.0f} tokens, responses of {means.response:.0f} (the same runs)",
            "devices": f"{cores} (--cores, or this host and training.device)",
        }

    def _alike(self, config: RunConfig) -> Sequence[MeasuredRun]:
        return [run for run in self.runs if _prompts(run.config) == _prompts(config)] or self.runs


def _prompts(config: RunConfig) -> list[tuple[float, PromptsConfig]]:
    return [(share, source.prompts) for share, source in with_shares(config)]


def fit_machine(stores: Sequence[Store], *, cores: float | None = None) -> StoredMachine:
    """Fits one run or more of one machine and model. `cores`: CPU cores that their stages shared, None if none.

    Raises InputError for a run that is too short, RunMissing and StreamCorrupt.
    """
    runs = [read_measured(store) for store in stores]
    machine = StoredMachine(runs=runs, engine=_fit_engine(runs), train=_fit_train(runs), cores=cores)
    for _ in range(_ROUNDS):
        ratios = [run.step_seconds / predict_step_seconds(run, machine) for run in machine.runs]
        runs = [replace(run, factor=run.factor * ratio) for run, ratio in zip(machine.runs, ratios, strict=True)]
        machine = replace(machine, runs=runs)
    return machine


def predict_step_seconds(run: MeasuredRun, machine: StoredMachine) -> float:
    """Simulates a run with its own lengths."""
    costs = machine.costs(run.config)
    return simulate(run.config, costs, lengths_of([run], run.config), steps=_STEPS, warmup=_WARMUP).step_seconds


def fit_costs(columns: Floats, seconds: Floats) -> list[float]:
    """Returns costs c ≥ 0 with `columns` [N, C] · c ≈ `seconds` [N], and the same sum. A few outliers count little."""
    costs, weights = np.zeros(columns.shape[1]), np.ones(len(seconds))
    for _ in range(_ROBUST_ROUNDS):
        costs = _solve_non_negative(columns * weights[:, None], seconds * weights)
        residuals = np.abs(seconds - columns @ costs)
        weights = np.sqrt(1 / np.maximum(1.0, residuals / max(_OUTLIER * float(np.median(residuals)), 1e-12)))
    total = float((columns @ costs).sum())
    return [float(cost) * (float(seconds.sum()) / total if total > 0 else 1.0) for cost in costs]


def _solve_non_negative(columns: Floats, values: Floats) -> Floats:
    """Solves least squares; a column whose coefficient would be negative is left out."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    chosen, solution = list(range(columns.shape[1])), np.zeros(columns.shape[1])
    while chosen:
        solved = np.linalg.lstsq(columns[:, chosen] / scale[chosen], values)[0]
        if (solved >= 0).all():
            solution[chosen] = solved / scale[chosen]
            break
        del chosen[int(np.argmin(solved))]
    return solution


def _fit_engine(runs: Sequence[MeasuredRun]) -> list[float]:
    generators = [_engine_rows(run, number, rollouts) for run in runs for number, rollouts in enumerate(run.rollouts)]
    columns, seconds = zip(*generators, strict=True)
    return fit_costs(np.concatenate(columns), np.concatenate(seconds))


def _engine_rows(run: MeasuredRun, generator: int, rollouts: Rollouts) -> tuple[Floats, Floats]:
    """Returns the factors of the engine's costs [N, 4], and the seconds [N] of each response."""
    times = run.generators[generator]
    started, finished, tokens = rollouts.started, rollouts.finished, rollouts.response_tokens
    t = np.linspace(times.begin, times.end, _SAMPLES)
    in_flight = (started <= t[:, None]) & (finished > t[:, None])
    progress = np.clip((t[:, None] - started) / np.maximum(finished - started, 1e-9), 0, 1)
    attended = np.where(in_flight, rollouts.prompt_tokens + tokens * progress, 0)
    running = in_flight.sum(axis=1)
    cached = running * attended.max(axis=1) if _pads(run.config) else attended.sum(axis=1)
    updates = np.array([t for t, _ in times.values.get("pause_seconds", ())])
    recomputed = updates[:0] if run.config.generation.keep_cache else updates
    inside = (started >= times.begin) & (finished <= times.end)
    begin, end, steps = started[inside], finished[inside], tokens[inside]

    def mean_over_life(values: Floats) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(values[1:] + values[:-1]) / 2 * (t[1] - t[0])])
        return np.asarray((np.interp(end, t, total) - np.interp(begin, t, total)) / np.maximum(end - begin, 1e-9))

    def sum_over_life(at: Floats, values: Floats) -> Floats:
        order = np.argsort(at)
        total = np.concatenate([[0.0], np.cumsum(values[order])])
        until_end, until_begin = (np.searchsorted(at[order], edge, side="left") for edge in (end, begin))
        return np.asarray(total[until_end] - total[until_begin])

    handled = _rollout_seconds(run) * sum_over_life(finished, np.ones(len(finished)))
    paused = _pause_seconds(run) * sum_over_life(updates, np.ones(len(updates)))
    columns = (
        steps,
        steps * mean_over_life(running),
        steps * mean_over_life(cached),
        sum_over_life(recomputed, np.interp(recomputed, t, cached)),
    )
    return np.stack(columns, axis=1), end - begin - handled - paused


def _fit_train(runs: Sequence[MeasuredRun]) -> list[float]:
    rows, seconds = [], []
    for run in runs:
        steps = run.steps
        work = (1 + 2 * steps.with_gradient / steps.rollouts) / 3 * steps.tokens
        # The end of a step is that of its hand-over.
        ends = steps.t - _trainer_seconds(run, "handover")
        for begin, end, activities in run.trainer.spans:
            inside = (ends > begin) & (ends <= end)
            if inside.any():
                rows.append([float(inside.sum()), float(work[inside].sum()), float(steps.rollouts[inside].sum())])
                seconds.append(activities.get("train", 0.0))
    return fit_costs(np.array(rows), np.array(seconds))


def _rollout_seconds(run: MeasuredRun) -> float:
    """Seconds of a generator per rollout that is not the engine's: it becomes a row, and others take its place."""
    pairs = list(zip(run.generators, run.rollouts, strict=True))
    finished = sum(int(times.includes(rollouts.finished).sum()) for times, rollouts in pairs)
    return sum(times.seconds("commit", "loading") for times in run.generators) / max(1, finished)


def _pause_seconds(run: MeasuredRun) -> float:
    updates = sum(times.count("pause_seconds") for times in run.generators)
    return sum(times.seconds("update_weights", "probe") for times in run.generators) / max(1, updates)


def _score_seconds(run: MeasuredRun, workers: int) -> float:
    """Seconds of a scorer per rollout, with this number of workers for the reward."""
    rate = float(run.steps.rollouts[1:].sum()) / float(run.steps.t[-1] - run.steps.t[0])
    rollouts = fmean(times.end - times.begin for times in run.scorers) * rate
    reward = sum(times.seconds("score") for times in run.scorers) * run.config.scoring.workers / workers
    return (reward + sum(times.seconds("loading", "commit") for times in run.scorers)) / rollouts


def _trainer_seconds(run: MeasuredRun, activity: str) -> float:
    """Mean of a step."""
    return run.trainer.seconds(activity) / max(1, int(run.trainer.includes(run.steps.t).sum()))


def _overhead_seconds(run: MeasuredRun) -> float:
    """Seconds per rollout that the trainer spends between steps: joined with its score, accounted for."""
    trainer = run.trainer
    uncounted = trainer.end - trainer.begin - trainer.seconds() + trainer.seconds("loading")
    return max(0.0, uncounted) / max(1.0, float(run.steps.rollouts[trainer.includes(run.steps.t)].sum()))


def _pads(config: RunConfig) -> bool:
    """Whether the engine computes all requests of a batch as if they were as long as the longest."""
    return config.generation.engine == "transformers"


def _batch(config: RunConfig) -> int:
    return round(config.training.groups_per_step * mean_group_size(config))
