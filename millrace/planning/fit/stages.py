"""Coefficients of each stage, from what runs measured."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millrace.errors import InputError
from millrace.planning.fit.coefficients import Coefficients, pads, passes_share
from millrace.planning.fit.contention import measured_slowdowns
from millrace.planning.fit.engine_steps import Stretches, find_stretches
from millrace.planning.fit.read import Activities, MeasuredRun
from millrace.planning.fit.regression import fit_costs
from millrace.planning.fit.sharing import Slowdowns

_LEAST_STRETCHES = 50
_LEAST_SPANS = 2
_Runs = Sequence[tuple[MeasuredRun, Slowdowns]]
_Handling = tuple[float, float]
"""What a generator does beside its engine: seconds (per rollout that ends, per time that some end)."""


def fit_coefficients(runs: Sequence[MeasuredRun], cores: float | None) -> Coefficients:
    """`cores` that the stages shared, None if none. Raises InputError where a run has too little for a fit."""
    for run in runs:
        _check_times(run)
    found = [(run, measured_slowdowns(run, cores)) for run in runs]
    handling = _per_rollout(found), _per_collect(found)
    engine = _fit_engine(found, handling)
    decode_step, decode_token, decode_context, prefill_pass, prefill_token = engine
    train_step, train_token, train_rollout = _fit_train(found)
    overhead_step, overhead_rollout = _fit_overhead(found)
    score_part, score_rollout = _fit_score(found)
    return Coefficients(
        decode_step=decode_step,
        decode_token=decode_token,
        decode_context=decode_context,
        prefill_pass=prefill_pass,
        prefill_token=prefill_token,
        recomputed_token=_recomputed_token(found, engine, handling),
        collect=handling[1],
        rollout=handling[0],
        pause=_mean([_per_update(run, ("update_weights", "probe")) / slow.generate for run, slow in found]),
        push=_mean([_push(run) for run in runs]),
        score_rollout=score_rollout,
        score_part=score_part,
        reward=_mean([run.reward_seconds / slow.score for run, slow in found]),
        train_step=train_step,
        train_token=train_token,
        train_rollout=train_rollout,
        handover=_mean([_per_step(run, "handover") / slow.train for run, slow in found]),
        checkpoint=_mean([_checkpoint(run) / slow.train for run, slow in found]),
        overhead_step=overhead_step,
        overhead_rollout=overhead_rollout,
    )


def _check_times(run: MeasuredRun) -> None:
    for stage, replicas in (("generate", run.generators), ("score", run.scorers), ("train", [run.trainer])):
        for replica, one in enumerate(replicas):
            logged = len(one.spans(run.begin, run.end))
            if logged < _LEAST_SPANS:
                raise InputError(
                    f"{run.url}: {stage} {replica} logged its times {logged} times after the warm-up; a fit needs "
                    f"{_LEAST_SPANS}, so {_LEAST_SPANS - logged} more, which come every few seconds"
                )


def _fit_engine(runs: _Runs, handling: _Handling) -> list[float]:
    columns, seconds = [], []
    for run, slow in runs:
        for generator in range(len(run.rollouts)):
            one = _usable(run, generator)
            columns.append(_columns(one, run))
            seconds.append(one.seconds / slow.generate - _handled(one, handling))
    return [float(one) for one in fit_costs(np.concatenate(columns), np.concatenate(seconds))]


def _columns(stretches: Stretches, run: MeasuredRun) -> npt.NDArray[np.float64]:
    """[N, 5]: what the engine's coefficients are multiplied with."""
    one = stretches
    return np.stack([one.steps, one.tokens, _context(one, run), one.passes, one.prefilled], axis=1)


def _context(stretches: Stretches, run: MeasuredRun) -> npt.NDArray[np.float64]:
    return stretches.padded if pads(run.config) else stretches.context


def _handled(stretches: Stretches, handling: _Handling) -> npt.NDArray[np.float64]:
    """[N] seconds that the generator spent on what had ended before each."""
    rollout, collect = handling
    return rollout * stretches.ended + collect * (stretches.ended > 0)


def _recomputed_token(runs: _Runs, engine: Sequence[float], handling: _Handling) -> float:
    """What stretches in which weights came in took in addition, per token in the caches."""
    extra, tokens = 0.0, 0.0
    for run, slow in runs:
        pause = _per_update(run, ("update_weights", "probe")) / slow.generate
        for generator in range(len(run.rollouts)):
            stretches, updates = _stretches(run, generator)
            one, updates = stretches[updates > 0], updates[updates > 0]
            expected = _columns(one, run) @ np.array(engine) + _handled(one, handling) + pause * updates
            extra += float((one.seconds / slow.generate - expected).sum())
            tokens += float((updates * _context(one, run) / one.steps).sum())
    return max(0.0, extra / tokens) if tokens else 0.0


def _stretches(run: MeasuredRun, generator: int) -> tuple[Stretches, npt.NDArray[np.int64]]:
    """Stretches after the warm-up, and how many times weights came in during each."""
    found = find_stretches(run.rollouts[generator])
    updates = np.array([t for t, _ in run.generators[generator].values.get("pause_seconds", ())])
    end = found.begin + found.seconds
    # The time of an update's row is that of its end.
    during = np.searchsorted(updates, end, side="right") - np.searchsorted(updates, found.begin)
    inside = (found.begin >= run.begin) & (end <= run.end)
    return found[inside], during[inside]


def _usable(run: MeasuredRun, generator: int) -> Stretches:
    """Stretches after the warm-up in which no weights came in."""
    found, updates = _stretches(run, generator)
    chosen = found[updates == 0]
    if len(chosen.begin) < _LEAST_STRETCHES:
        raise InputError(
            f"{run.url}: responses of generator {generator} ended at {len(chosen.begin)} moments after the warm-up; "
            f"a fit needs {_LEAST_STRETCHES}, so {_LEAST_STRETCHES - len(chosen.begin)} more"
        )
    return chosen


def _fit_train(runs: _Runs) -> list[float]:
    rows, seconds = [], []
    for run, slow in runs:
        tokens = run.steps.response_tokens + (
            run.steps.group_prompt_tokens if run.config.training.share_prefixes else run.steps.prompt_tokens
        )
        passes = np.array([passes_share(one) for one in (run.steps.pulling / run.steps.rollouts).tolist()])
        # The end of a step is that of its hand-over.
        ends = run.steps.t - _per_step(run, "handover")
        for begin, end, activities in _spans(run.trainer, run):
            inside = (ends > begin) & (ends <= end)
            if inside.any():
                rows.append([inside.sum(), (passes * tokens)[inside].sum(), run.steps.rollouts[inside].sum()])
                seconds.append(activities.get("train", 0.0) / slow.train)
    return [float(one) for one in fit_costs(np.array(rows, dtype=np.float64), np.array(seconds))]


def _fit_overhead(runs: _Runs) -> tuple[float, float]:
    """(per step, per rollout): all of a trainer's time that is neither a step's own nor waiting."""
    rows, seconds = [], []
    for run, slow in runs:
        begin, end, activities = run.trainer.between(run.begin, run.end)
        inside = (run.steps.t > begin) & (run.steps.t <= end)
        counted = sum(spent for name, spent in activities.items() if name != "loading")
        rows.append([inside.sum(), run.steps.rollouts[inside].sum()])
        seconds.append(max(0.0, end - begin - counted) / slow.train)
    found = fit_costs(np.array(rows, dtype=np.float64), np.array(seconds))
    return float(found[0]), float(found[1])


def _fit_score(runs: _Runs) -> tuple[float, float]:
    """(per part, per rollout beside the reward)."""
    rows, seconds = [], []
    for run, slow in runs:
        for scorer in run.scorers:
            begin, end, activities = scorer.between(run.begin, run.end)
            parts, rollouts = run.scored_between(begin, end)
            rows.append([parts / len(run.scorers), rollouts / len(run.scorers)])
            reward = run.reward_seconds / run.config.scoring.workers * rollouts / len(run.scorers)
            spent = sum(activities.get(name, 0.0) for name in ("loading", "score", "commit"))
            seconds.append(max(0.0, spent / slow.score - reward))
    found = fit_costs(np.array(rows, dtype=np.float64), np.array(seconds))
    return float(found[0]), float(found[1])


def _per_rollout(runs: _Runs) -> float:
    """Of a generator: what it spends on a finished rollout beside its engine, over all runs."""
    spent, ended = 0.0, 0
    for run, slow in runs:
        for generator, rollouts in zip(run.generators, run.rollouts, strict=True):
            begin, end, activities = generator.between(run.begin, run.end)
            spent += activities.get("commit", 0.0) / slow.generate
            ended += int(((rollouts.finished > begin) & (rollouts.finished <= end)).sum())
    return spent / max(1, ended)


def _per_collect(runs: _Runs) -> float:
    """Of a generator: what it spends on each time that responses end, beside its engine and those responses."""
    spent, times = 0.0, 0
    for run, slow in runs:
        for replica, generator in enumerate(run.generators):
            begin, end, activities = generator.between(run.begin, run.end)
            spent += activities.get("loading", 0.0) / slow.generate
            ends = find_stretches(run.rollouts[replica]).begin
            times += int(((ends > begin) & (ends <= end)).sum())
    return spent / max(1, times)


def _per_update(run: MeasuredRun, names: Sequence[str]) -> float:
    """Of a generator: seconds of these activities per version that it takes."""
    spent, updates = 0.0, 0
    for generator in run.generators:
        begin, end, activities = generator.between(run.begin, run.end)
        spent += sum(activities.get(name, 0.0) for name in names)
        updates += sum(begin < t <= end for t, _ in generator.values.get("pause_seconds", ()))
    return spent / max(1, updates)


def _push(run: MeasuredRun) -> float:
    """From the end of a hand-over until a generator begins to load the version, which it does between two steps."""
    found = [run.sync.mean(name, run.begin, run.end) for name in ("push_hash_seconds", "push_offer_seconds")]
    least = sum(value or 0.0 for value in found)
    delivered = []
    for generator in run.generators:
        names = [name for name in generator.values if name.startswith("delivery/")]
        means = [generator.mean(name, run.begin, run.end) for name in names]
        delivered += [mean for mean in means if mean is not None]
    if not delivered:
        return least
    # A delivery begins before the hand-over and ends with the update.
    return max(least, _mean(delivered) - _per_step(run, "handover") - _per_update(run, ("update_weights",)))


def _per_step(run: MeasuredRun, activity: str) -> float:
    begin, end, activities = run.trainer.between(run.begin, run.end)
    return activities.get(activity, 0.0) / max(1, int(((run.steps.t > begin) & (run.steps.t <= end)).sum()))


def _checkpoint(run: MeasuredRun) -> float:
    begin, end, activities = run.trainer.between(run.begin, run.end)
    versions = run.steps.policy_version[(run.steps.t > begin) & (run.steps.t <= end)]
    due = {run.config.training.checkpoint_every, run.config.evaluation.every or 0} - {0}
    made = sum(any(version % every == 0 for every in due) for version in versions.tolist())
    return activities.get("checkpoint", 0.0) / max(1, made)


def _spans(stage: Activities, run: MeasuredRun) -> list[tuple[float, float, dict[str, float]]]:
    ends = zip(stage.t, stage.t[1:], stage.seconds[1:], strict=False)
    return [(begin, end, seconds) for begin, end, seconds in ends if begin >= run.begin and end <= run.end]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
