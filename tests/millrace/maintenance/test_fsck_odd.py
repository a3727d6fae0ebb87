"""Records whose checksum is right and whose values are odd, as a writer with a defect would leave them."""

import dataclasses
from typing import Any

import pytest
from support.stores.dict_store import DictStore

from millrace.maintenance.fsck import fsck
from millrace.rollouts.unfinished import UnfinishedWriter
from millrace.types import Request, Response, Trajectory
from storage import layout
from storage.streams.log import LogReader
from storage.streams.record import Record, encode

STREAMS = [layout.trajectories(0), layout.scores("exact_match", 0, 0, 2), layout.CONSUMED, layout.CHECKPOINTS]
ODD: dict[type, list[Any]] = {
    int: [-1, -(2**40), 2**40, 10**30],
    str: ["", "../../run.json", "\x00\x1b[31m"],
    list: [[-1], [5, 5]],
    dict: [{}, {"account": 5}, {"intake": None, "account": {}}, {"intake": [{}], "files": 3}],
}
COMPARED = {
    "rows",
    "bytes",
    "checksum",
    "file",
    "part",
    "prev",
    "first_row_id",
    "tokens",
    "group_ids",
    "min_policy_version",
}
"""What the rows of a trajectory stream, their file or the records before say as well."""


def odd_records(record: Record) -> list[tuple[str, Record]]:
    """(field, record) with one odd value each."""
    odd = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name not in ("kind", "seq", "schema_version"):
            others = [other for other in ODD[type(value)] if other != value]
            odd += [(field.name, dataclasses.replace(record, **{field.name: other})) for other in others]
    return odd


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
def test_fsck_takes_no_odd_value_for_granted_and_fails_on_none(
    small_run: Any, dict_store: DictStore, stream: str
) -> None:
    records = {path: path.rpartition("/")[2] for path in dict_store.objects if path.startswith(f"{stream}/log/")}
    path = max(records, key=lambda path: records[path])
    record = list(iter(LogReader(dict_store, stream).next, None))[-1]
    sound = dict_store.objects[path]
    overlooked = set()
    for name, odd in odd_records(record):
        dict_store.objects[path] = encode(odd)
        if dict_store.objects[path] != sound and not fsck(dict_store).findings:
            overlooked.add(name)
    if stream == layout.trajectories(0):
        assert not overlooked & COMPARED


def test_responses_in_flight_are_sound_though_their_record_names_no_groups(
    small_run: Any, dict_store: DictStore
) -> None:
    parts = fsck(dict_store).parts
    response = Response(
        tokens=(3, 5), rollout_logprobs=(-0.5, -0.25), version_spans=((2, 0),), finish_reason="unfinished"
    )
    request = Request(group_id=90, sample_index=0, prompt_tokens=(), seed=0)
    trajectory = Trajectory(request=request, response=response, t_started=1.0, t_finished=0.0)
    UnfinishedWriter(dict_store, 0, vocab_size=16).write([trajectory], 0)
    report = fsck(dict_store)
    assert report.findings == []
    assert report.parts == parts + 1
