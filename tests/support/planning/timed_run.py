"""A stored run whose stages took exactly as long as some coefficients say, on a clock of its own.

    engine: a step ═ decode_step + decode_token · requests (+ prefill_pass) ─► groups ─► scorer ─► trainer: steps

The engine is never held up and no new weights reach it, so every time in the streams follows from the
coefficients.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from support.stored_run.metrics import metric_rows

from configs.schema import RunConfig
from configs.stored import DEFAULT_SOURCE
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.writer import TrajectoryWriter
from millrace.runs.record import create_run, read_run
from millrace.types import Prompt, Request, Response, Sampling, Trajectory
from storage import layout
from storage.schema import CONSUMED, METRIC, SCORE
from storage.stores.base import Store
from storage.streams.stream import StreamWriter

BEGIN = 1_700_000_000.0
_PROMPT = (3, 4, 5, 6, 7)
_SAMPLING = {DEFAULT_SOURCE: Sampling(temperature=1.0, top_p=1.0, max_new_tokens=1000)}


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, as in `Coefficients`."""

    decode_step: float = 0.002
    decode_token: float = 0.0003
    prefill_pass: float = 0.004
    score_part: float = 0.001
    reward: float = 0.0002
    train_step: float = 0.05
    train_token: float = 0.0001
    handover: float = 0.003
    overhead_rollout: float = 0.0005


class _Spans:
    """What a stage logs of its time."""

    def __init__(self, store: Store, stage: str, span: float) -> None:
        self._span = span
        self._stream = StreamWriter(store, layout.metrics(stage, 0), METRIC, writer=stage)
        self._seconds: dict[str, float] = {}
        self._logged = self.t = BEGIN

    def spend(self, what: str | None, seconds: float) -> None:
        """`what` is None for time that is not counted."""
        self.t += seconds
        if what is not None:
            self._seconds[what] = self._seconds.get(what, 0.0) + seconds
        if self.t - self._logged >= self._span:
            values = {f"time/{name}/seconds": spent for name, spent in self._seconds.items()}
            self._stream.write(metric_rows(values, t=self.t, incarnation=0, policy_version=0), tokens=0)
            self._seconds, self._logged = {}, self.t


def write_timed_run(
    store: Store,
    config: RunConfig,
    length: Callable[[int, int], int],
    times: Times,
    *,
    steps: int,
    span: float = 0.5,
    pulls: bool = True,
) -> None:
    """Writes a run of so many steps. `length` is that of a response by group and sample.

    Stages log their times every `span` seconds. `pulls`: whether rollouts have an advantage; the trainer computes those
    that have none in a third of the time.
    """
    create_run(store, "timed", config.model_dump(mode="json"))
    record = read_run(store)
    store.put(layout.RUN, json.dumps({**record, "t_started": BEGIN - 1}).encode())
    num_groups = steps * config.training.groups_per_step
    ready = []
    score, path = _Spans(store, "score", span), layout.annotations(f"scores/{config.scoring.reward}", 0, 0, 1)
    scores = StreamWriter(store, path, SCORE, writer="score-0")
    for t, trajectories, first_row in _generated(store, config, length, times, num_groups, span):
        score.spend("waiting for trajectories", max(0.0, t - score.t))
        score.spend("score", times.score_part + times.reward * len(trajectories))
        scores.write(_scores(first_row, len(trajectories), times.reward), tokens=len(trajectories))
        ready.append((score.t, first_row, trajectories))
    _train(store, config, times, ready, span, pulls)


def _generated(
    store: Store, config: RunConfig, length: Callable[[int, int], int], times: Times, num_groups: int, span: float
) -> Iterator[tuple[float, list[Trajectory], int]]:
    """(time, trajectories, first row) of each part, committed."""
    size = config.generation.group_size
    places = config.generation.groups_per_batch * size
    queue = [Request(group_id=g, sample_index=i, prompt=_prompt(g), prompt_tokens=_PROMPT, seed=0)
             for g in range(num_groups) for i in range(size)]  # fmt: skip
    running: list[tuple[Request, int, float]] = []
    whole: dict[int, list[Trajectory]] = {}
    generate = _Spans(store, "generate", span)
    storage = config.storage.model_copy(update={"commit_max_ms": 0.0})
    ids: dict[str, Any] = {"vocab_size": 16, "group_size": size, "num_generators": 1}
    with TrajectoryWriter(store, 0, _SAMPLING, storage, **ids) as writer:
        writer.restart(Lineage.after(None, 0))
        while queue or running:
            entering, queue = queue[: places - len(running)], queue[places - len(running) :]
            running += [(one, length(one.group_id, one.sample_index), generate.t) for one in entering]
            busy = times.decode_step + times.decode_token * len(running) + times.prefill_pass * bool(entering)
            generate.spend("generate", busy)
            running = [(request, left - 1, started) for request, left, started in running]
            for request, _, started in (one for one in running if not one[1]):
                tokens = length(request.group_id, request.sample_index)
                whole.setdefault(request.group_id, []).append(_trajectory(request, tokens, started, generate.t))
            running = [one for one in running if one[1]]
            done = [whole.pop(g) for g in list(whole) if len(whole[g]) == size]
            if trajectories := [one for group in done for one in sorted(group, key=lambda t: t.request.sample_index)]:
                first_row = writer.rows
                writer.append(trajectories)
                yield generate.t, trajectories, first_row


def _train(
    store: Store,
    config: RunConfig,
    times: Times,
    ready: Sequence[tuple[float, int, list[Trajectory]]],
    span: float,
    pulls: bool,
) -> None:
    train, size = _Spans(store, "train", span), config.generation.group_size
    consumed = StreamWriter(store, layout.CONSUMED, CONSUMED, writer="train-0")
    rows = [(t, first + k, one) for t, first, part in ready for k, one in enumerate(part)]
    batch = config.training.groups_per_step * size
    for version, at in enumerate(range(0, len(rows) - batch + 1, batch), 1):
        some = rows[at : at + batch]
        train.spend("waiting for scored groups", max(0.0, some[-1][0] - train.t))
        tokens = sum(len(one.response.tokens) for _, _, one in some)
        prompts = len(_PROMPT) * len({one.request.group_id for _, _, one in some})
        train.spend("train", times.train_step + times.train_token * (tokens + prompts) / (1 if pulls else 3))
        train.spend("handover", times.handover)
        consumed.write(_consumed(train.t, version, some, 1.0 if pulls else 0.0), tokens=tokens)
        train.spend(None, times.overhead_rollout * batch)


def _prompt(group: int) -> Prompt:
    return Prompt(prompt_id=str(group), text="1+1=", answer="2", source="arithmetic")


def _trajectory(request: Request, tokens: int, started: float, finished: float) -> Trajectory:
    response = Response(
        tokens=(1,) * tokens, rollout_logprobs=(0.0,) * tokens, version_spans=((0, 0),), finish_reason="stop"
    )
    return Trajectory(request=request, response=response, t_started=started, t_finished=finished)


def _scores(first_row: int, rows: int, seconds: float) -> pa.Table:
    same = {
        "reward": 1.0, "components": "{}", "status": "ok", "verifier_version": "1", "seconds": seconds, "t_scored": 1.0,
    }  # fmt: skip
    return pa.Table.from_pylist([{"row_id": first_row + k, **same} for k in range(rows)], schema=SCORE)


def _consumed(t: float, version: int, rows: Sequence[tuple[float, int, Trajectory]], advantage: float) -> pa.Table:
    same = {
        "t": t, "incarnation": 0, "policy_version": version, "generator": 0, "outcome": "trained", "staleness": 0,
        "staleness_in_flight": 0, "min_policy_version": 0, "max_policy_version": 0, "reward": 1.0,
        "advantage": advantage, "masked_tokens": 0, "source": "default",
    }  # fmt: skip
    return pa.Table.from_pylist(
        [
            {
                **same,
                "trajectory_row_id": row,
                "group_id": one.request.group_id,
                "prompt_id": str(one.request.group_id),
                "sample_index": one.request.sample_index,
                "tokens": len(one.response.tokens),
            }
            for _, row, one in rows
        ],
        schema=CONSUMED,
    )
