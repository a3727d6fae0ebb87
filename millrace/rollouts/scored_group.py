"""Groups of trajectories with their annotations, joined row by row from one part of each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from configs.stored import AnnotationKind, AnnotatorPools, kind_of
from millrace.rollouts.arrow import RESPONSE_LISTS, list_slices
from millrace.rollouts.ledger import Amount
from millrace.rollouts.staleness import staleness
from storage import layout
from storage.errors import StreamCorrupt
from storage.streams.record import Record
from storage.streams.stream import Part


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredGroup:
    """G trajectories of one prompt, with their scores and their teacher's log-probabilities."""

    group_id: int
    source: str
    """Name of the source in the config."""
    prompt_id: str
    """Id of the prompt in its source's prompts."""
    generator: int
    first_row_id: int
    """Position of its first row in the generator's stream."""
    prompt_tokens: list[npt.NDArray[np.int32]]
    """[G] of [P] token ids."""
    response_tokens: list[npt.NDArray[np.int32]]
    """[G] of [R] token ids."""
    rollout_logprobs: list[npt.NDArray[np.float32]]
    """[G] of [R] log μ of the behaviour policy, nats."""
    loss_mask: list[npt.NDArray[np.uint8]]
    """[G] of [R] 1 where a token is trainable."""
    span_versions: list[npt.NDArray[np.int64]]
    """[G] of [spans] the policy version that sampled each span of tokens."""
    span_starts: list[npt.NDArray[np.int32]]
    """[G] of [spans] index of each span's first token, ascending from 0."""
    kept_tokens: list[npt.NDArray[np.int32]]
    """[G] token ids that truncated sampling could draw from, response token by response token; empty if nothing was
    truncated."""
    kept_counts: list[npt.NDArray[np.int32]]
    """[G] of [R] how many of them belong to each response token; empty if nothing was truncated."""
    routed_experts: list[npt.NDArray[np.uint16]]
    """[G] as the column of this name: experts of each token but the last; empty if they were not recorded."""
    masked_tokens: list[int]
    """[G] tokens masked because they are too old: see `millrace.rollouts.masking`."""
    truncated: list[bool]
    """[G] whether each was cut off, at `max_new_tokens` or by the limit of turns."""
    masks_truncated: bool = False
    """Whether truncated members are masked: see `millrace.rollouts.masking`."""
    max_new_tokens: int
    """Maximum length of a response, tokens."""
    meta: str
    """JSON object: the prompt's answer and source, and whether the responses were demonstrated."""
    temperature: float
    rewards: list[float | None]
    """[G]; None where the reward failed."""
    components: list[str]
    """[G] JSON object: the components of each reward by name."""
    teacher_logprobs: list[npt.NDArray[np.float32] | None]
    """[G] of [R] log π_T of the teacher of its source, nats; empty without a teacher, None where it failed."""
    teacher_top_tokens: list[npt.NDArray[np.int32]]
    """[G] of [R, k] flat: the teacher's likeliest tokens at each response token; empty if they were not stored."""
    teacher_top_logprobs: list[npt.NDArray[np.float32]]
    """[G] of [R, k] flat: log π_T of these, nats."""
    response_seconds: npt.NDArray[np.float64]
    """[G] from the request of each response's first token to its last token."""
    score_seconds: npt.NDArray[np.float32]
    """[G] duration of each verification."""
    min_policy_versions: npt.NDArray[np.int64]
    """[G] oldest version that sampled a token of each."""
    max_policy_versions: npt.NDArray[np.int64]
    """[G] newest version that sampled a token of each."""
    part_max_policy_version: int
    """Newest version in its part, which is accepted or refused as a whole."""
    incarnation: int
    """The incarnation of the trainer whose weights sampled it."""

    @property
    def min_policy_version(self) -> int:
        """Oldest version that sampled a token of the group, masked ones included."""
        return int(self.min_policy_versions.min())

    @property
    def oldest_versions(self) -> npt.NDArray[np.int64]:
        """[G] oldest version that sampled a trainable token; for members without one, as `min_policy_versions`."""
        oldest = self.min_policy_versions.copy()
        for i, versions in enumerate(self.span_versions):
            if len(versions) > 1 and self.loss_mask[i].any():
                oldest[i] = self.token_versions(i)[self.loss_mask[i] > 0].min()
        return oldest

    def token_versions(self, member: int) -> npt.NDArray[np.int64]:
        """[R] the policy version that sampled each token of a member's response."""
        versions, num_tokens = self.span_versions[member], len(self.response_tokens[member])
        if len(versions) == 1:
            # The usual case, several times as fast.
            return np.full(num_tokens, versions[0])
        return np.repeat(versions, np.diff(self.span_starts[member], append=num_tokens))

    def is_masked(self, member: int) -> bool:
        """Whether all tokens of a member are too old."""
        return self.masked_tokens[member] > 0 and not self.loss_mask[member].any()

    @property
    def oldest_version(self) -> int:
        """Oldest version that sampled a trainable token; without trainable tokens, as `min_policy_version`."""
        trainable = [np.count_nonzero(mask) > 0 for mask in self.loss_mask]
        return int(self.oldest_versions[trainable].min()) if any(trainable) else self.min_policy_version

    def staleness(self, trainer_version: int) -> int:
        """Policy versions by which `trainer_version` is ahead of `oldest_version`."""
        return staleness(trainer_version, self.oldest_version)

    @property
    def max_policy_version(self) -> int:
        """Newest version that sampled a token of the group."""
        return int(self.max_policy_versions.max())

    @property
    def verified(self) -> list[int]:
        """Members with a reward. A failed reward is an error, not a 0."""
        return [i for i, reward in enumerate(self.rewards) if reward is not None]

    @property
    def is_demonstration(self) -> bool:
        """Whether no policy sampled the responses: they are demonstrations of their prompt."""
        return bool(json.loads(self.meta).get("demonstration", False))

    @property
    def is_taught(self) -> bool:
        """Whether any member has its teacher's log-probabilities."""
        return any(logprobs is not None and len(logprobs) for logprobs in self.teacher_logprobs)

    @property
    def trained(self) -> list[int]:
        """Members that a step trains: those with a reward, a trainable token, and their teacher's log-probabilities.

        All rewards count in the baseline.
        """
        return [i for i in range(len(self.rewards)) if self.drop_reason_of(i) is None]

    @property
    def selected(self) -> list[int]:
        """Members that are not masked as truncated."""
        return [i for i in range(len(self.rewards)) if not (self.masks_truncated and self.truncated[i])]

    def drop_reason_of(self, member: int) -> str | None:
        """Why a step that trains the group leaves this member out; None if it is trained."""
        if self.rewards[member] is None or self.teacher_logprobs[member] is None:
            return "error"
        if self.masks_truncated and self.truncated[member]:
            return "truncated"
        return "stale" if self.is_masked(member) else None

    @property
    def drop_reason(self) -> str | None:
        """Why no step can train the group; None if one can."""
        # Members are compared with each other, unless there is only one.
        if len(self.verified) < min(2, len(self.rewards)):
            return "error"
        reasons = {self.drop_reason_of(i) for i in self.verified}
        return None if None in reasons else next(name for name in ("error", "stale", "truncated") if name in reasons)

    def amount(self, members: list[int] | None = None) -> Amount:
        """Amount of `members`, or of all."""
        chosen = range(len(self.rewards)) if members is None else members
        return Amount(rollouts=len(chosen), tokens=sum(len(self.response_tokens[i]) for i in chosen))

    def masked_amount(self) -> Amount:
        """Trained members that have masked tokens, and the number of these tokens."""
        counts = [self.masked_tokens[i] for i in self.trained if self.masked_tokens[i]]
        return Amount(rollouts=len(counts), tokens=sum(counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class LostPart:
    """A part whose trajectories or annotations can't be read."""

    generator: int
    record: Record
    """Its commit record, which is sound."""
    left: Amount
    """Rows that were not taken before the damage."""
    num_groups: int
    """Groups that were not."""
    reason: str
    """The file, the record and the damage."""

    def amount(self) -> Amount:
        """The amount that is lost."""
        return self.left


def merge_annotations(
    trajectories: Part, annotations: Mapping[str, Part], pools: AnnotatorPools, generator: int
) -> dict[AnnotationKind, pa.Table]:
    """The annotations of a part of trajectories by kind, each row from the pool of its source.

    `annotations` are by pool. A row of a source without a pool is one of `elsewhere`. Raises StreamCorrupt where the
    rows do not correspond.
    """
    expected = trajectories.record
    for pool, part in annotations.items():
        record = part.record
        if (record.first_row_id, record.rows) != (expected.first_row_id, expected.rows):
            path = layout.annotations_of_part(pool, generator, expected.part, pools.replicas[pool])
            raise StreamCorrupt(
                f"{path}/{record.file}",
                f"annotates {record.rows} rows from {record.first_row_id} on, "
                f"expected {expected.rows} from {expected.first_row_id} on",
                record.seq,
            )
    merged: dict[AnnotationKind, pa.Table] = {}
    for kind in dict.fromkeys(map(kind_of, annotations)):
        of_kind = {pool: part.table for pool, part in annotations.items() if kind_of(pool) == kind}
        if len(of_kind) == 1:
            (merged[kind],) = of_kind.values()
            continue
        begins: dict[str | None, int] = {pool: number * expected.rows for number, pool in enumerate(of_kind)}
        sources = trajectories.table["source"].to_pylist()
        # No pool serves a source without one, so any of them says `elsewhere`.
        rows = [begins.get(pools.of_source(kind, source), 0) + row for row, source in enumerate(sources)]
        merged[kind] = pa.concat_tables(of_kind.values()).take(pa.array(rows))
    return merged


def zip_groups(trajectories: Part, merged: Mapping[AnnotationKind, pa.Table], generator: int) -> list[ScoredGroup]:
    """The groups of a part of trajectories with their annotations, as `merge_annotations` returns them, row by row."""
    table = trajectories.table
    group_ids = table["group_id"].to_numpy()
    starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
    ends = [*starts[1:].tolist(), len(group_ids)]
    # Lists are views of their flat values.
    by_member: dict[str, Any] = {name: list_slices(table[name]) for name in ("prompt_tokens", *RESPONSE_LISTS)}
    oldest, newest = table["min_policy_version"].to_numpy(), table["max_policy_version"].to_numpy()
    by_member["truncated"] = pc.equal(table["finish_reason"], "length").to_pylist()
    scored = merged["scores"]
    by_member["rewards"] = scored["reward"].to_pylist()
    by_member |= _taught(merged["teachers"]) if "teachers" in merged else dict.fromkeys(_TAUGHT, [_EMPTY] * len(oldest))
    response_seconds = table["t_finished"].to_numpy() - table["t_started"].to_numpy()
    score_seconds = scored["seconds"].to_numpy()
    names = ("group_id", "source", "prompt_id", "max_new_tokens", "incarnation", "temperature", "meta")
    by_group = {name: table[name] for name in names}
    return [
        ScoredGroup(
            **{name: values[start:end] for name, values in by_member.items()},
            **{name: values[start].as_py() for name, values in by_group.items()},
            generator=generator,
            first_row_id=trajectories.record.first_row_id + start,
            masked_tokens=[0] * (end - start),
            components=scored["components"][start:end].to_pylist(),
            response_seconds=response_seconds[start:end],
            score_seconds=score_seconds[start:end],
            min_policy_versions=oldest[start:end],
            max_policy_versions=newest[start:end],
            part_max_policy_version=trajectories.record.max_policy_version,
        )
        for start, end in zip(starts.tolist(), ends, strict=True)
    ]


_TAUGHT = ("teacher_logprobs", "teacher_top_tokens", "teacher_top_logprobs")
_EMPTY = np.zeros(0, dtype=np.float32)


def _taught(table: pa.Table) -> dict[str, list[Any]]:
    """[rows] of each of the columns `_TAUGHT`, as in `ScoredGroup`."""
    by_row, statuses = {name: list_slices(table[name]) for name in _TAUGHT}, table["status"].to_pylist()
    logprobs = zip(by_row["teacher_logprobs"], statuses, strict=True)
    return {**by_row, "teacher_logprobs": [None if status == "error" else values for values, status in logprobs]}
