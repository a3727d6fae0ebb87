"""What a generator had in flight, stored for its successor.

    drained, or from time to time ─► interrupted responses ─► ║ unfinished/<g> ║ newest part ─► the successor goes on

A part is everything that the generator had in flight at one moment, so only the newest part counts. Of that, a
successor takes what belongs to groups that are not committed yet, under weights that exist.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from millrace.rollouts.arrow import column_of_lists, columns_of_sampling, list_slices
from millrace.rollouts.groups_in_flight import num_tokens
from millrace.types import Request, Response, Trajectory
from storage import layout
from storage.errors import PartCorrupt, PartRemoved
from storage.schema import UNFINISHED
from storage.stores.base import Store
from storage.streams.log import backwards
from storage.streams.stream import StreamWriter, read_part, stream_head


class UnfinishedWriter:
    """Writes one generator's stream; opening it fences the generator's predecessors."""

    def __init__(self, store: Store, generator: int, vocab_size: int) -> None:
        path = layout.unfinished(generator)
        self._stream = StreamWriter(store, path, UNFINISHED, writer=f"generate-{generator}", vocab_size=vocab_size)

    def write(self, trajectories: Sequence[Trajectory], incarnation: int) -> None:
        """Commits all responses in flight, at least one; on return they are durable. Each has at least one token.

        `incarnation` is that of the newest weights. Raises Fenced.
        """
        versions = [version for one in trajectories for version, _ in one.response.version_spans]
        self._stream.write(
            _table(trajectories, incarnation),
            tokens=num_tokens(trajectories),
            min_policy_version=min(versions),
            max_policy_version=max(versions),
            incarnation=incarnation,
        )


def read_unfinished(store: Store, generator: int) -> list[tuple[int, Trajectory]]:
    """(incarnation of its newest weights, response) of all that a predecessor had in flight when it last stored that.

    The requests hold the group, the place in it and the time of admission alone. A part that is damaged or was removed
    counts as empty: its responses are generated again.
    """
    path = layout.unfinished(generator)
    for record in backwards(store, path, stream_head(store, path)):
        if record.kind == "data":
            try:
                return list(_trajectories(read_part(store, path, UNFINISHED, record)))
            except (PartCorrupt, PartRemoved):
                return []
    return []


def _table(trajectories: Sequence[Trajectory], incarnation: int) -> pa.Table:
    responses = [one.response for one in trajectories]
    versions = [[version for version, _ in response.version_spans] for response in responses]
    reasons = [None if r.finish_reason == "unfinished" else r.finish_reason for r in responses]
    columns = {
        "group_id": [one.request.group_id for one in trajectories],
        "sample_index": [one.request.sample_index for one in trajectories],
        "response_tokens": column_of_lists([response.tokens for response in responses], np.int32),
        "rollout_logprobs": column_of_lists([response.rollout_logprobs for response in responses], np.float32),
        "loss_mask": column_of_lists([response.loss_mask for response in responses], np.uint8),
        "span_versions": column_of_lists(versions, np.int64),
        "span_starts": column_of_lists([[start for _, start in r.version_spans] for r in responses], np.int32),
        "min_policy_version": [min(spans) for spans in versions],
        "max_policy_version": [max(spans) for spans in versions],
        "incarnation": [incarnation] * len(responses),
        "finish_reason": reasons,
        "environment_error": [response.environment_error for response in responses],
        "t_admitted": [one.request.t_admitted for one in trajectories],
        "t_started": [one.t_started for one in trajectories],
        "t_finished": [
            0.0 if reason is None else one.t_finished for one, reason in zip(trajectories, reasons, strict=True)
        ],
        **columns_of_sampling(responses),
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, type=UNFINISHED.field(name).type)
        for name, column in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=UNFINISHED)


def _trajectories(table: pa.Table) -> Iterator[tuple[int, Trajectory]]:
    names = (
        "response_tokens",
        "rollout_logprobs",
        "loss_mask",
        "span_versions",
        "span_starts",
        "kept_tokens",
        "kept_counts",
        "routed_experts",
    )
    lists = zip(*(list_slices(table[name]) for name in names), strict=True)
    rows = table.drop_columns(names).to_pylist()
    for row, (tokens, logprobs, mask, versions, starts, kept, counts, experts) in zip(rows, lists, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[1], mask, [1]]).astype(np.int8)))
        response = Response(
            tokens=tuple(tokens.tolist()),
            rollout_logprobs=tuple(logprobs.tolist()),
            version_spans=tuple(zip(versions.tolist(), starts.tolist(), strict=True)),
            finish_reason=row["finish_reason"] or "unfinished",
            kept_tokens=tuple(kept.tolist()),
            kept_counts=tuple(counts.tolist()),
            routed_experts=experts.tobytes(),
            environment_spans=tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)),
            environment_error=row["environment_error"],
        )
        request = Request(
            group_id=row["group_id"],
            sample_index=row["sample_index"],
            prompt_tokens=(),
            seed=0,
            t_admitted=row["t_admitted"],
        )
        yield (
            row["incarnation"],
            Trajectory(request=request, response=response, t_started=row["t_started"], t_finished=row["t_finished"]),
        )
