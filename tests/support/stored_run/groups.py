"""Generated groups, column by column: the weights that sampled them, their lengths and rewards.

    steps ─► Groups (one value per group) ─► Rollouts (one value per row) ─► tables of every stream

No model samples anything, but all invariants hold that a reader may rely on: versions are not newer than the trainer's,
no trained group exceeds the staleness bound, and groups that exceed it are dropped as stale.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY, in_order

VOCAB_SIZE = 128
MIN_TOKENS, MAX_TOKENS = 4, 200
TRAINED, STALE, ERROR = 0, 1, 2
OUTCOMES = ("trained", "stale", "error")
_SECONDS_IN_FLIGHT, _SECONDS_IN_QUEUE = 0.5, 0.4

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """[groups] in the order in which the trainer takes them: for each step first the dropped, then the trained."""

    group_id: Numbers
    generator: Numbers
    step: Numbers
    """The policy version made by the step that takes them."""
    prompt: Numbers
    """Number of the prompt that each answers."""
    stale: Numbers
    min_version: Numbers
    max_version: Numbers

    @property
    def staleness(self) -> Numbers:
        """When taken, policy versions."""
        return self.step - 1 - self.min_version


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """[rows] the members of some groups, in order."""

    groups: Groups
    group: Numbers
    """Index of its group in `groups`."""
    sample_index: Numbers
    row_id: Numbers
    """In its generator's stream."""
    tokens: Numbers
    max_version: Numbers
    reward: Numbers
    """NaN if the verifier failed."""
    outcome: Numbers
    advantage: Numbers
    """NaN unless trained."""
    t_finished: Numbers
    """Unix seconds."""
    offsets: Numbers
    """[rows + 1] of the per-token values."""
    rollout_logprobs: Numbers
    """[all tokens] nats."""

    def of(self, column: str) -> Numbers:
        """A column of `groups`, one value per row."""
        values: Numbers = getattr(self.groups, column)[self.group]
        return values


def make_groups(
    random: np.random.Generator,
    steps: range,
    *,
    first_group: int,
    groups_per_step: int,
    generators: int,
    max_staleness: int,
    stale_share: float,
    prompts: int,
) -> Groups:
    """The groups taken by the steps that make the versions `steps`; about `stale_share` of them are too old.

    Each of the `prompts` is asked once per epoch.
    """
    versions = np.array(steps)
    # The first steps can't have stale groups.
    dropped = np.where(versions > max_staleness + 2, random.poisson(groups_per_step * stale_share, len(versions)), 0)
    each = groups_per_step + dropped
    step = np.repeat(versions, each)
    place = np.arange(len(step)) - np.repeat(np.cumsum(each) - each, each)
    stale = place < np.repeat(dropped, each)
    group_id = first_group + np.arange(len(step))
    generator = group_id % generators
    sway = max_staleness * (0.5 + 0.4 * np.sin(step / 40 + generator)) + random.normal(0, 0.6, len(step))
    lag = np.where(stale, max_staleness + 1, np.clip(np.rint(sway), 0, max_staleness)).astype(np.int64)
    lag = np.minimum(lag, step - 1)
    min_version = step - 1 - lag
    return Groups(
        group_id=group_id,
        generator=generator,
        step=step,
        prompt=group_id % prompts,
        stale=stale,
        min_version=min_version,
        max_version=min_version + np.minimum(lag, random.integers(0, 3, len(step))),
    )


def make_rollouts(
    random: np.random.Generator,
    groups: Groups,
    *,
    group_size: int,
    first_rows: list[int],
    t_step: Numbers,
    error_share: float,
) -> Rollouts:
    """`group_size` members per group; in `error_share` of the groups, the verifier failed for one.

    `first_rows` are the next row_ids, by generator; `t_step` is when each group is taken, unix seconds.
    """
    num_groups, rows = len(groups.group_id), len(groups.group_id) * group_size
    group = np.repeat(np.arange(num_groups), group_size)
    sample_index = np.tile(np.arange(group_size), num_groups)
    typical = np.log(20 + 20 * np.minimum(1, groups.step / 1000)) + 0.4 * groups.stale
    tokens = np.clip(np.exp(random.normal(typical[group], 0.6)), MIN_TOKENS, MAX_TOKENS).astype(np.int32)
    in_flight = (groups.max_version - groups.min_version)[group]
    # The first member was in flight the longest.
    spread = np.where(sample_index == 0, in_flight, random.integers(0, in_flight + 1))
    reward = (random.random(rows) < _success(groups.step)[group]).astype(np.float32)
    # At most one member per group, so that at least two others remain to be compared.
    reward[(random.random(num_groups) < error_share)[group] & (sample_index == 1)] = np.nan
    known = ~np.isnan(reward)
    outcome = np.where(groups.stale[group], STALE, np.where(known, TRAINED, ERROR))
    mean = np.nanmean(reward.reshape(num_groups, group_size), axis=1)[group]
    offsets = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    return Rollouts(
        groups=groups,
        group=group,
        sample_index=sample_index,
        row_id=_row_ids(groups.generator[group], first_rows),
        tokens=tokens,
        max_version=groups.min_version[group] + spread,
        reward=reward,
        outcome=outcome,
        advantage=np.where(outcome == TRAINED, reward - mean, np.nan).astype(np.float32),
        t_finished=t_step[group] - _SECONDS_IN_QUEUE - 0.1 * random.random(rows),
        offsets=offsets,
        rollout_logprobs=-random.standard_exponential(int(offsets[-1]), dtype=np.float32),
    )


def trajectory_rows(rollouts: Rollouts, generator: int, *, incarnation: int, epoch: int) -> pa.Table:
    """Rows of `TRAJECTORY` of one generator."""
    chosen = np.flatnonzero(rollouts.of("generator") == generator)
    rows, tokens = len(chosen), rollouts.tokens[chosen]
    group_ids = rollouts.of("group_id")[chosen]
    oldest, newest = rollouts.of("min_version")[chosen], rollouts.max_version[chosen]
    spans = newest - oldest + 1
    nth = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
    per_token = _per_token(rollouts, chosen)
    finished = rollouts.t_finished[chosen]
    numbers, of_prompt = np.unique(rollouts.of("prompt")[chosen], return_inverse=True)
    prompts = [_prompt(number) for number in numbers.tolist()]
    metas = [json.dumps({"prompt": text, "answer": answer, "source": "arithmetic"}) for text, answer in prompts]
    return _table(
        TRAJECTORY,
        row_id=rollouts.row_id[chosen],
        group_id=group_ids,
        prompt_id=pa.array([text for text, _ in prompts]).take(pa.array(of_prompt)),
        sample_index=rollouts.sample_index[chosen],
        prompt_tokens=pa.array([[ord(sign) for sign in text] for text, _ in prompts]).take(pa.array(of_prompt)),
        response_tokens=_lists(tokens, ord("0") + np.arange(tokens.sum()) % 10),
        rollout_logprobs=_lists(tokens, rollouts.rollout_logprobs[per_token]),
        span_versions=_lists(spans, np.repeat(oldest, spans) + nth),
        span_starts=_lists(spans, np.repeat(tokens, spans) * nth // np.repeat(spans, spans)),
        min_policy_version=oldest,
        max_policy_version=newest,
        incarnation=np.full(rows, incarnation),
        loss_mask=_lists(tokens, np.ones(tokens.sum())),
        finish_reason=pa.array(["stop", "length"]).take(pa.array((tokens == MAX_TOKENS).astype(np.int8))),
        temperature=np.ones(rows),
        top_p=np.ones(rows),
        max_new_tokens=np.full(rows, MAX_TOKENS),
        generator=np.full(rows, generator),
        epoch=np.full(rows, epoch),
        seed=rollouts.row_id[chosen],
        t_admitted=finished - _SECONDS_IN_FLIGHT - 0.1,
        t_started=finished - _SECONDS_IN_FLIGHT,
        t_finished=finished,
        meta=pa.array(metas).take(pa.array(of_prompt)),
        **dict.fromkeys(_EMPTY, pa.array([[]] * rows)),
    )


def score_rows(rollouts: Rollouts, generator: int) -> pa.Table:
    """Rows of `SCORE` for the same rows as `trajectory_rows`."""
    chosen = np.flatnonzero(rollouts.of("generator") == generator)
    failed = np.isnan(rollouts.reward[chosen]).astype(np.int8)
    rows = len(chosen)
    return _table(
        SCORE,
        row_id=rollouts.row_id[chosen],
        reward=pa.array(rollouts.reward[chosen], from_pandas=True),
        components=pa.repeat(pa.scalar('{"exact_match": 1.0}'), rows),
        status=pa.array(["ok", "timeout"]).take(pa.array(failed)),
        error=pa.array([None, "took longer than 1 s"]).take(pa.array(failed)),
        verifier_version=pa.repeat(pa.scalar("exact_match-1"), rows),
        seconds=np.full(rows, 1e-5),
    )


def consumed_rows(rollouts: Rollouts, *, incarnation: int, t_step: Numbers) -> pa.Table:
    """Rows of `CONSUMED`, one per rollout; `t_step` is when each group was taken."""
    groups = rollouts.groups
    return _table(
        CONSUMED,
        t=t_step[rollouts.group],
        incarnation=np.full(len(rollouts.group), incarnation),
        policy_version=rollouts.of("step"),
        generator=rollouts.of("generator"),
        trajectory_row_id=rollouts.row_id,
        group_id=rollouts.of("group_id"),
        sample_index=rollouts.sample_index,
        outcome=pa.array(OUTCOMES).take(pa.array(rollouts.outcome)),
        staleness=rollouts.of("staleness"),
        staleness_in_flight=(groups.max_version - groups.min_version)[rollouts.group],
        min_policy_version=rollouts.of("min_version"),
        max_policy_version=rollouts.max_version,
        tokens=rollouts.tokens,
        reward=pa.array(rollouts.reward, from_pandas=True),
        advantage=pa.array(rollouts.advantage, from_pandas=True),
        masked_tokens=np.zeros(len(rollouts.group)),
    )


def logprob_rows(random: np.random.Generator, rollouts: Rollouts, *, incarnation: int) -> pa.Table:
    """Rows of `TRAINER_LOGPROBS` for the trained rollouts, from a policy slightly ahead of the sampling one."""
    chosen = np.flatnonzero(rollouts.outcome == TRAINED)
    tokens = rollouts.tokens[chosen]
    drift = random.normal(0, 0.02, int(tokens.sum())) * (1 + np.repeat(rollouts.of("staleness")[chosen], tokens))
    logprobs = np.minimum(0, rollouts.rollout_logprobs[_per_token(rollouts, chosen)] + drift)
    return _table(
        TRAINER_LOGPROBS,
        incarnation=np.full(len(chosen), incarnation),
        policy_version=rollouts.of("step")[chosen],
        generator=rollouts.of("generator")[chosen],
        trajectory_row_id=rollouts.row_id[chosen],
        trainer_logprobs=_lists(tokens, logprobs),
    )


def _success(steps: Numbers) -> Numbers:
    """The share of right responses at each step."""
    success: Numbers = 0.3 + 0.5 * (1 - np.exp(-steps / 300))
    return success


def _row_ids(generators: Numbers, first_rows: list[int]) -> Numbers:
    row_ids = np.empty(len(generators), np.int64)
    for generator, first in enumerate(first_rows):
        chosen = generators == generator
        row_ids[chosen] = first + np.arange(np.count_nonzero(chosen))
    return row_ids


def _per_token(rollouts: Rollouts, chosen: Numbers) -> Numbers:
    """Which of all tokens belong to the chosen rows."""
    is_chosen = np.zeros(len(rollouts.tokens), np.bool_)
    is_chosen[chosen] = True
    return np.repeat(is_chosen, rollouts.tokens)


def _prompt(number: int) -> tuple[str, str]:
    left, right = number % 50, number // 50 % 50
    return f"{left}+{right}=", str(left + right)


_EMPTY = ("message_roles", "message_starts", "kept_tokens", "kept_counts", "routed_experts")
"""Lists that no response of a made-up run has."""


def _lists(lengths: Numbers, flat: Numbers) -> tuple[Numbers, Numbers]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), flat


def _table(schema: pa.Schema, **columns: Any) -> pa.Table:
    arrays = {}
    for name, values in columns.items():
        wanted = schema.field(name).type
        if isinstance(values, tuple):
            arrays[name] = pa.ListArray.from_arrays(pa.array(values[0]), pa.array(values[1]).cast(wanted.value_type))
        else:
            arrays[name] = (values if isinstance(values, pa.Array) else pa.array(values)).cast(wanted)
    return in_order(pa.table(arrays), schema)
