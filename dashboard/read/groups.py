"""Single groups, read from the store on demand, with all stored data of each response.

RunData.consumed ─► (generator, row_id) ─► its record in the stream's log ─► one part ─► the group's rows
                                           ║ trajectories/<g> ║   part k
                                           ║ scores/…/<s>-of-S ║  part k div S of scorer k mod S; teachers alike
                                           ║ trainer_logprobs ║   the parts of its step

Read errors become sentences; other data is still shown.
"""

import re
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.stored import AnnotationKind, AnnotatorPools
from dashboard.read.model import RunData
from dashboard.read.parts import PartReader
from dashboard.read.tokens import TokenTexts
from millrace.errors import InputError
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.lineage import part_of_step
from storage import layout
from storage.errors import StorageError
from storage.schema import ANNOTATIONS, TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import backwards
from storage.streams.stream import stream_head

MAX_TEXT_ROWS, TEXT_SECONDS = 20_000, 2.0
"""Limits of a search for text."""
_AROUND = 30
"""Characters around a text that was found."""
_LARGEST_LOG_RATIO = 50.0

Row = Mapping[str, Any]
"""Column name → value, see `storage.schema`."""
Place = tuple[int, int]
"""Generator and row_id of a trajectory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredResponse:
    """A trajectory with its row in each stream; None if the row is missing or can't be read."""

    row_id: int
    trajectory: Row | None
    score: Row | None
    consumed: Row | None
    """None until the trainer has taken the response."""
    trainer_logprobs: npt.NDArray[np.float32] | None = None
    """[R] log-probabilities under the policy in training, nats; None unless trained."""
    trainer_entropies: npt.NDArray[np.float32] | None = None
    """[R] entropy of that policy's choice of each token, nats; None unless trained."""
    teacher_logprobs: Sequence[float] = ()
    """[R] log-probabilities under the teacher, nats; empty without a teacher."""

    @property
    def importance_ratios(self) -> npt.NDArray[np.float64] | None:
        """[R] π/μ of each token, NaN for tokens outside the loss; None unless both log-probabilities are known."""
        if self.trajectory is None or self.trainer_logprobs is None:
            return None
        rollout = np.asarray(self.trajectory["rollout_logprobs"], np.float64)
        if len(rollout) != len(self.trainer_logprobs):
            return None
        log_ratios = np.clip(self.trainer_logprobs - rollout, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        return np.where(np.asarray(self.trajectory["loss_mask"]) > 0, np.exp(log_ratios), np.nan)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The responses to one prompt."""

    generator: int
    group_id: int
    """-1 if its part can't be read."""
    responses: tuple[StoredResponse, ...]
    """At least one, by row_id."""
    problems: tuple[str, ...]
    """Read errors, one sentence each."""

    @property
    def prompt(self) -> Row | None:
        """The first trajectory, which contains the common prompt."""
        return self.responses[0].trajectory


def last_message_tokens(table: pa.Table, row: int) -> list[int]:
    """Returns the token ids of the prompt; for a conversation, of the last message before the policy's turn."""
    tokens: list[int] = table["prompt_tokens"][row].as_py()
    starts = [start for start in table["message_starts"][row].as_py() if start <= len(tokens)]
    return tokens[starts[-2] : starts[-1]] if len(starts) > 1 else tokens


class GroupReader:
    """Reads groups of the run in `store`; `config` belongs to the newest attempt. Thread-safe."""

    def __init__(self, store: Store, config: Mapping[str, Any]) -> None:
        self._pools = AnnotatorPools.of(config)
        self._num_generators: int = config["generation"]["replicas"]
        self._parts = PartReader(store)
        self._lock = threading.Lock()

    def read(self, run: RunData, generator: int, row: int) -> Group:
        """Reads the group that contains `row`. Raises InputError if the row does not exist."""
        if generator >= self._num_generators:
            raise InputError(generator, key="generator", expected=f"a number below {self._num_generators}")
        with self._lock:
            problems: list[str] = []
            consumed = _consumed_rows(run, generator, row)
            span = self._span(generator, row, problems)
            if span is None and consumed:
                span = range(min(consumed), max(consumed) + 1)
            if span is None:
                details = "".join(f": {problem}" for problem in problems)
                raise InputError(f"generator {generator} has no row {row} here{details}")
            trajectories = self._rows(layout.trajectories(generator), TRAJECTORY, span, problems)
            source = next((row["source"] for row in trajectories.values()), "")
            scores = self._annotations("scores", source, generator, span, problems)
            taught = self._annotations("teachers", source, generator, span, problems)
            trained = self._trained(generator, consumed, problems)
            responses = tuple(
                StoredResponse(
                    row_id=row_id,
                    trajectory=trajectories.get(row_id),
                    score=scores.get(row_id),
                    consumed=consumed.get(row_id),
                    **trained.get(row_id, {}),
                    teacher_logprobs=taught.get(row_id, {}).get("teacher_logprobs", ()),
                )
                for row_id in span
            )
            first = trajectories.get(span[0]) or consumed.get(span[0], {})
            return Group(
                generator=generator,
                group_id=first.get("group_id", -1),
                responses=responses,
                problems=tuple(dict.fromkeys(problems)),
            )

    def locate(self, group_id: int) -> tuple[int, int] | None:
        """Returns generator and first row of a group, even before the trainer takes it; None if it does not exist.

        If a group was generated twice, returns the second. Raises like `read_part`.
        """
        with self._lock:
            generator = group_id % self._num_generators
            path = layout.trajectories(generator)
            for record in backwards(self._parts.store, path, stream_head(self._parts.store, path)):
                if record.kind == "data" and group_id in (record.group_ids or (group_id,)):
                    table = self._parts.read(path, TRAJECTORY, record)
                    matches = np.flatnonzero(table["group_id"].to_numpy() == group_id)
                    if len(matches):
                        return generator, record.first_row_id + int(matches[0])
        return None

    def prompts(self, rows: Sequence[Place]) -> dict[Place, tuple[str, list[int]]]:
        """Returns name and token ids of the prompt of each row.

        For a conversation, the ids belong to its last message, because earlier messages may be common to all prompts.
        Skips rows in parts that can't be read.
        """
        with self._lock:
            return {
                place: (table["prompt_id"][i].as_py(), last_message_tokens(table, i))
                for place, table, i in self._located(rows)
                if table is not None
            }

    def find_text(self, text: str, groups: Mapping[Place, int], texts: TokenTexts) -> tuple[dict[Place, str], int]:
        """Searches prompts, with their names, and responses for `text`, ignoring case, for 2 s and in 20,000 rows.

        `groups`: first row of each group, in the order of the search, → number of its rows. Returns the groups that
        have the text, each with the words around its first occurrence, and how many groups were searched.
        """
        pattern, deadline, rows = re.compile(re.escape(text), re.IGNORECASE), time.monotonic() + TEXT_SECONDS, 0
        matches: dict[Place, str] = {}
        with self._lock:
            for searched, (place, table, i) in enumerate(self._located(groups)):
                rows += groups[place]
                if rows > MAX_TEXT_ROWS or time.monotonic() > deadline:
                    return matches, searched
                if table is None:
                    continue
                prompt = f"{table['prompt_id'][i].as_py()}  {texts.text(last_message_tokens(table, i))}"
                responses = table["response_tokens"].slice(i, groups[place]).to_pylist()
                for string in (prompt, *map(texts.text, responses)):
                    if (match := pattern.search(string)) is not None:
                        matches[place] = string[max(0, match.start() - _AROUND) : match.end() + _AROUND]
                        break
        return matches, len(groups)

    def _located(self, rows: Iterable[Place]) -> Iterator[tuple[Place, pa.Table | None, int]]:
        """Yields each row with its part and its index in that; None if it can't be read."""
        for generator, row in rows:
            path = layout.trajectories(generator)
            record = self._parts.record_of(path, row, [])
            table = None if record is None else self._parts.try_read(path, TRAJECTORY, record, [])
            yield (generator, row), table, 0 if record is None else row - record.first_row_id

    def _span(self, generator: int, row: int, problems: list[str]) -> range | None:
        """Returns the rows of the group that contains `row`."""
        part = self._parts.part_of(layout.trajectories(generator), TRAJECTORY, row, problems)
        if part is None:
            return None
        record, table = part
        group_ids = table["group_id"].to_numpy()
        starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
        i = bisect_right(starts, row - record.first_row_id) - 1
        ends = [*starts[1:].tolist(), len(group_ids)]
        return range(record.first_row_id + int(starts[i]), record.first_row_id + ends[i])

    def _rows(self, path: str, schema: pa.Schema, span: range, problems: list[str]) -> dict[int, Row]:
        """Reads the rows `span`, which are in one part; row_id → row."""
        part = self._parts.part_of(path, schema, span[0], problems)
        if part is None:
            return {}
        record, table = part
        rows = table.slice(span[0] - record.first_row_id, len(span)).to_pylist()
        return {row["row_id"]: row for row in rows}

    def _annotations(
        self, kind: AnnotationKind, source: str, generator: int, span: range, problems: list[str]
    ) -> dict[int, Row]:
        record = self._parts.record_of(layout.trajectories(generator), span[0], [])
        pool = self._pools.of_source(kind, source)
        if record is None or pool is None:
            return {}
        path = layout.annotations_of_part(pool, generator, record.part, self._pools.replicas[pool])
        return self._rows(path, ANNOTATIONS[kind], span, problems)

    def _trained(
        self, generator: int, consumed: Mapping[int, Row], problems: list[str]
    ) -> dict[int, dict[str, npt.NDArray[np.float32]]]:
        """Reads the trainer's values of each token: row_id → column → [R] values."""
        trained = [row_id for row_id, row in consumed.items() if row["outcome"] == TRAINED]
        if not trained:
            return {}
        incarnation, version = (consumed[trained[0]][name] for name in ("incarnation", "policy_version"))
        path = layout.TRAINER_LOGPROBS
        try:
            record = part_of_step(self._parts.store, path, version, incarnation)
            table = None if record is None else self._parts.read(path, TRAINER_LOGPROBS, record)
        except StorageError as error:
            problems.append(str(error))
            return {}
        values: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
        if table is not None:
            mine = (table["generator"].to_numpy() == generator) & (table["policy_version"].to_numpy() == version)
            mine &= np.isin(table["trajectory_row_id"].to_numpy(), trained)
            for i in np.flatnonzero(mine).tolist():
                values[table["trajectory_row_id"][i].as_py()] = {
                    name: table[name][i].values.to_numpy(zero_copy_only=False)
                    for name in ("trainer_logprobs", "trainer_entropies")
                }
        if len(values) < len(trained):
            problems.append(f"{path} has no rows yet of {len(trained) - len(values)} responses that were trained")
        return values


def _consumed_rows(run: RunData, generator: int, row: int) -> dict[int, Row]:
    """Returns the `consumed` rows of the group that contains `row`, by row_id; empty if not taken yet."""
    consumed = run.consumed
    matches = np.flatnonzero((consumed["generator"] == generator) & (consumed["trajectory_row_id"] == row))
    if len(matches) == 0:
        return {}
    # Rows of a group are adjacent, and sample_index counts from 0.
    first = int(matches[-1]) - int(consumed["sample_index"][matches[-1]])
    next_groups = np.flatnonzero(consumed["sample_index"][first + 1 :] == 0)
    end = first + 1 + int(next_groups[0]) if len(next_groups) else len(consumed["sample_index"])
    rows = [{name: column[i].item() for name, column in consumed.items()} for i in range(first, end)]
    return {
        values["trajectory_row_id"]: {
            **{name: None if value != value else value for name, value in values.items()},
            "outcome": consumed.outcomes[values["outcome"]],
            "source": consumed.sources[values["source"]],
            "prompt_id": consumed.prompts[values["prompt_id"]],
        }
        for values in rows
    }
