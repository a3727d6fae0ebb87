"""`millrace mirror --otlp`, with the real package and a receiver on this machine: the traces of trajectories."""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pages.otlp_receiver import Receiver, attributes_of, receiving
from support.stored_run.run import Shape, StoredRun
from support.stores.dict_store import DictStore
from support.streams.rows import read_rows

from dashboard.integrations.sinks import mirror
from dashboard.integrations.sinks.otlp import Traces
from millrace.errors import InputError
from storage import layout
from storage.schema import CONSUMED, SCORE, TRAJECTORY
from storage.stores.factory import open_store

SHAPE = Shape(steps=12, generators=2, scorers=2, max_staleness=2, stale_share=0.3, error_share=0.3, seed=5)
Key = tuple[int, int]
"""Generator and row_id of a trajectory."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """A run of six steps; the mirror's state is in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    run = StoredRun(DictStore(), "mine", SHAPE)
    run.append(6)
    return run


def send(run: StoredRun, receiver: Receiver) -> str:
    """Starts the mirror once; returns what it says."""
    traces = Traces(run.store, receiver.url)
    try:
        traces.copy()
    finally:
        traces.close()
    return traces.summary.split(" ─► ")[0]


def traces_of(receiver: Receiver) -> dict[Key, list[Any]]:
    """The spans of each trajectory, its root first; fails for a trace of two, or an id that is sent twice."""
    traces: dict[bytes, list[Any]] = defaultdict(list)
    for span in receiver.spans:
        traces[span.trace_id].append(span)
    assert len({span.span_id for span in receiver.spans}) == len(receiver.spans)
    by_key = {}
    for spans in traces.values():
        [root] = [span for span in spans if not span.parent_span_id]
        children = [span for span in spans if span.parent_span_id]
        assert {span.parent_span_id for span in children} <= {root.span_id}
        values = attributes_of(root)
        by_key[values["millrace.generator"], values["millrace.trajectory_row_id"]] = [root, *children]
    return by_key


def consumed_rows(run: StoredRun) -> dict[Key, dict[str, Any]]:
    rows = read_rows(run.store, layout.CONSUMED, CONSUMED)
    return {(row["generator"], row["trajectory_row_id"]): row for row in rows}


def test_the_spans_of_each_trajectory_have_the_times_that_are_stored(run: StoredRun, receiver: Receiver) -> None:
    send(run, receiver)
    trajectories = {
        (g, row["row_id"]): row for g in range(2) for row in read_rows(run.store, layout.trajectories(g), TRAJECTORY)
    }
    paths = [(g, layout.annotations("scores/exact_match", g, s, 2)) for g in range(2) for s in range(2)]
    scores = {(g, row["row_id"]): row for g, path in paths for row in read_rows(run.store, path, SCORE)}
    traces, consumed = traces_of(receiver), consumed_rows(run)
    assert traces.keys() == consumed.keys()
    for key, [root, *spans] in traces.items():
        trajectory, done = trajectories[key], consumed[key]["t"]
        by_name = defaultdict(list)
        for span in spans:
            by_name[span.name] += span.start_time_unix_nano, span.end_time_unix_nano
        moments = {
            (root.start_time_unix_nano, root.end_time_unix_nano): (trajectory["t_admitted"], done),
            tuple(by_name["queued"]): (trajectory["t_admitted"], trajectory["t_started"]),
            (by_name["sampled"][0], by_name["sampled"][-1]): (trajectory["t_started"], trajectory["t_finished"]),
            (by_name["scored"][-1],): (scores[key]["t_scored"],),
        }
        if consumed[key]["outcome"] == "trained":
            moments[by_name["trained"][-1],] = (done,)
        for sent, stored in moments.items():
            assert [nanoseconds / 1e9 for nanoseconds in sent] == pytest.approx(stored, abs=1e-6, rel=0)
        assert ("trained" in by_name) == (consumed[key]["outcome"] == "trained")


def test_a_trace_says_what_became_of_its_trajectory(run: StoredRun, receiver: Receiver) -> None:
    send(run, receiver)
    consumed = consumed_rows(run)
    for key, [root, *_] in traces_of(receiver).items():
        values, row = attributes_of(root), consumed[key]
        names = ("policy_version", "source", "outcome", "staleness", "reward", "advantage")
        assert [values.get(f"millrace.{name}") for name in names] == [row[name] for name in names]
        assert values["gen_ai.usage.output_tokens"] == row["tokens"]
        assert values["gen_ai.usage.input_tokens"] > 0
        assert (root.status.message != "") == (row["reward"] is None)
    assert {row["outcome"] for row in consumed.values()} == {"trained", "stale", "error"}
    [resource] = {tuple(sorted(resource.items())) for resource in receiver.resources}
    assert dict(resource)["service.name"] == "millrace"
    assert dict(resource)["millrace.run_id"] == "mine"


def test_a_mirror_that_is_started_again_sends_nothing_twice(run: StoredRun, receiver: Receiver) -> None:
    first = len(consumed_rows(run))
    assert [send(run, receiver) for _ in range(2)] == [f"{first} new traces", "0 new traces"]
    run.append(2)
    assert send(run, receiver) == f"{len(consumed_rows(run)) - first} new traces"
    assert traces_of(receiver).keys() == consumed_rows(run).keys()


def test_a_mirror_that_lost_its_state_sends_the_same_ids(run: StoredRun, receiver: Receiver, tmp_path: Path) -> None:
    send(run, receiver)
    sent = [(span.trace_id, span.span_id) for span in receiver.spans]
    [state] = (tmp_path / "millrace-otlp").iterdir()
    state.unlink()
    receiver.spans.clear()
    send(run, receiver)
    assert [(span.trace_id, span.span_id) for span in receiver.spans] == sent


def test_traces_that_are_not_accepted_are_sent_the_next_time(run: StoredRun, receiver: Receiver) -> None:
    receiver.code = 403
    with pytest.raises(InputError, match="403"):
        send(run, receiver)
    receiver.code = 200
    send(run, receiver)
    assert traces_of(receiver).keys() == consumed_rows(run).keys()


def test_a_step_whose_duration_is_not_stored_yet_waits(run: StoredRun, receiver: Receiver) -> None:
    objects = run.store.objects
    late = {path: objects.pop(path) for path in list(objects) if path.startswith(layout.metrics("train", 0))}
    assert send(run, receiver) == "0 new traces"
    objects.update(late)
    send(run, receiver)
    assert {"trained"} < {span.name for span in receiver.spans}


def test_a_part_that_cannot_be_read_is_named_and_the_rest_is_sent(
    run: StoredRun, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(path for path in sorted(run.store.objects) if path.startswith(f"{layout.trajectories(1)}/seg"))
    run.store.objects[file] = bytes(len(run.store.objects[file]))
    send(run, receiver)
    assert f"millrace: skipped: {file}" in capsys.readouterr().err
    assert 0 < len(traces_of(receiver)) < len(consumed_rows(run))


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://localhost", "http://user:secret@localhost", "http://"])
def test_an_address_that_cannot_be_used_is_refused(run: StoredRun, url: str) -> None:
    with pytest.raises(InputError) as refused:
        Traces(run.store, url)
    assert refused.value.key == "--otlp"


def test_the_command_says_how_many_traces_it_sent(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = StoredRun(open_store(str(tmp_path / "mine")), "mine", SHAPE)
    run.append(2)
    parser = argparse.ArgumentParser()
    mirror.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["mirror", run.store.url, "--otlp", f"{receiver.url}/v1/traces"])
    assert mirror.run(arguments) == 0
    assert capsys.readouterr().out == f"mine: {len(consumed_rows(run))} new traces ─► {receiver.url}\n"
