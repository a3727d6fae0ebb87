"""Unfinished responses of a generator, stored for its successor.

    drained, or from time to time ─► interrupted responses ─► ║ unfinished/<g> ║ newest part ─► the successor continues

A part holds all responses that the generator had in flight at one moment, so only the newest part counts. The successor
continues those whose groups are not committed yet and whose weights exist.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from millrace.rollouts.arrow import RESPONSE_LISTS, list_slices, rows_of
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
        reasons = [trajectory.response.finish_reason for trajectory in trajectories]
        versions = [version for each in trajectories for version, _ in each.response.version_spans]
        self._stream.write(
            rows_of(
                trajectories,
                UNFINISHED,
                incarnation=incarnation,
                finish_reason=[None if reason == "unfinished" else reason for reason in reasons],
                environment_error=[trajectory.response.environment_error for trajectory in trajectories],
                t_finished=[
                    0.0 if reason == "unfinished" else trajectory.t_finished
                    for trajectory, reason in zip(trajectories, reasons, strict=True)
                ],
            ),
            tokens=num_tokens(trajectories),
            min_policy_version=min(versions),
            max_policy_version=max(versions),
            incarnation=incarnation,
        )


def read_unfinished(store: Store, generator: int) -> list[tuple[int, Trajectory]]:
    """Returns the responses that a predecessor last stored, each with the incarnation of its newest weights.

    Their requests hold only group, sample index and time of admission. A part that is damaged or was removed counts as
    empty: its responses are generated again.
    """
    path = layout.unfinished(generator)
    for record in backwards(store, path, stream_head(store, path)):
        if record.kind == "data":
            try:
                return list(_trajectories(read_part(store, path, UNFINISHED, record)))
            except (PartCorrupt, PartRemoved):
                return []
    return []


def _trajectories(table: pa.Table) -> Iterator[tuple[int, Trajectory]]:
    lists = zip(*(list_slices(table[name]) for name in RESPONSE_LISTS), strict=True)
    rows = table.drop_columns(RESPONSE_LISTS).to_pylist()
    for row, values in zip(rows, lists, strict=True):
        columns = dict(zip(RESPONSE_LISTS, values, strict=True))
        edges = np.flatnonzero(np.diff(np.concatenate([[1], columns["loss_mask"], [1]]).astype(np.int8)))
        spans = zip(columns["span_versions"].tolist(), columns["span_starts"].tolist(), strict=True)
        response = Response(
            tokens=tuple(columns["response_tokens"].tolist()),
            rollout_logprobs=tuple(columns["rollout_logprobs"].tolist()),
            version_spans=tuple(spans),
            finish_reason=row["finish_reason"] or "unfinished",
            kept_tokens=tuple(columns["kept_tokens"].tolist()),
            kept_counts=tuple(columns["kept_counts"].tolist()),
            routed_experts=columns["routed_experts"].tobytes(),
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
