"""Scored groups as the loader hands them on, made by hand, and the stream `consumed` as a trainer writes it."""

import json
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from configs.stored import DEFAULT_SOURCE
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.scored_group import ScoredGroup
from storage.stores.base import Store


def scored_group(
    number: int,
    versions: Sequence[Sequence[int]],
    rewards: Sequence[float | None],
    loss_masks: Sequence[Sequence[int]] | None = None,
    *,
    truncated: Collection[int] = (),
    max_new_tokens: int = 16,
    source: str = DEFAULT_SOURCE,
    task: str = "test",
    teacher_logprobs: Sequence[Sequence[float] | None] | None = None,
) -> ScoredGroup:
    """Group `number`, of generator number mod 2, its first row ten times that.

    `versions` are those that sampled each token of each member; `loss_masks` has 1 for each token of the policy, by
    default all; `truncated` are the members that were cut off; `task` is the source that the prompt names;
    `teacher_logprobs` are as in `ScoredGroup`, by default of no teacher.
    """
    starts = [[t for t, version in enumerate(member) if t == 0 or version != member[t - 1]] for member in versions]
    spans = [[member[start] for start in starts_of] for member, starts_of in zip(versions, starts, strict=True)]
    return ScoredGroup(
        group_id=number,
        source=source,
        prompt_id=f"prompt-{number}",
        generator=number % 2,
        first_row_id=10 * number,
        prompt_tokens=[np.array([1], dtype=np.int32) for _ in versions],
        response_tokens=[np.zeros(len(member), dtype=np.int32) for member in versions],
        rollout_logprobs=[np.full(len(member), -0.5, dtype=np.float32) for member in versions],
        loss_mask=[np.array(mask, dtype=np.uint8) for mask in loss_masks or [[1] * len(member) for member in versions]],
        span_versions=[np.array(span, dtype=np.int64) for span in spans],
        span_starts=[np.array(member, dtype=np.int32) for member in starts],
        kept_tokens=[np.zeros(0, dtype=np.int32) for _ in versions],
        kept_counts=[np.zeros(0, dtype=np.int32) for _ in versions],
        routed_experts=[np.zeros(0, dtype=np.uint16) for _ in versions],
        masked_tokens=[0] * len(versions),
        truncated=[i in truncated for i in range(len(versions))],
        max_new_tokens=max_new_tokens,
        meta=json.dumps({"source": task}),
        temperature=1.0,
        rewards=list(rewards),
        teacher_logprobs=[
            None if values is None else np.array(values, dtype=np.float32)
            for values in teacher_logprobs or [[]] * len(versions)
        ],
        teacher_top_tokens=[np.zeros(0, dtype=np.int32) for _ in versions],
        teacher_top_logprobs=[np.zeros(0, dtype=np.float32) for _ in versions],
        components=["{}" if reward is None else json.dumps({"exact_match": reward}) for reward in rewards],
        response_seconds=np.ones(len(versions)),
        score_seconds=np.ones(len(versions), dtype=np.float32),
        min_policy_versions=np.array([min(member) for member in versions], dtype=np.int64),
        max_policy_versions=np.array([max(member) for member in versions], dtype=np.int64),
        part_max_policy_version=max(max(member) for member in versions),
        incarnation=0,
    )


Rewards = Mapping[int, Sequence[float | None]]


def consume(
    store: Store,
    version: int,
    trained: Rewards,
    *,
    dropped: Rewards | None = None,
    reason: str = "zero_advantage",
    incarnation: int = 0,
) -> None:
    """The step that made `version`: it trained some groups and dropped others for `reason`, by their numbers."""
    writer = ConsumedWriter(store, incarnation)
    write_step(writer, version, trained, dropped or {}, reason)
    writer.close()


def write_step(
    writer: ConsumedWriter, version: int, trained: Rewards, dropped: Rewards, reason: str = "zero_advantage"
) -> None:
    """Adds a step as `consume` does."""
    for number, rewards in dropped.items():
        writer.drop(scored_group(number, [[0]] * len(rewards), rewards), reason, version - 1)
    groups = [scored_group(number, [[0]] * len(rewards), rewards) for number, rewards in trained.items()]
    known = sum(len(group.trained) for group in groups)
    values = [np.zeros(1, dtype=np.float32)] * known
    writer.step(version, groups, [0.0] * known, values, values)
