"""The tables of a profiled run, made of stored traces."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.operations.profile import report
from millrace.errors import InputError
from millrace.profiling.trace import ProfileRequest, Trace
from storage.stores.base import Store
from storage.stores.factory import open_store

REQUEST = ProfileRequest(after_version=3, num_steps=4)
PRODUCT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2e6}
TRAINER = Trace(
    process="train-0", thread=1, threads=1, dtype="float32", start=0.0, end=4e6, num_steps=4,
    events=[{**PRODUCT, "args": {"Input Dims": [[1000, 1000], [1000, 1000]]}}],
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def test_each_process_gets_a_table_over_the_trainers_steps(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    TRAINER.write(store)
    replace(TRAINER, process="generate-0", start=1e6, end=9e6).write(store)
    report(store, REQUEST)
    output = capsys.readouterr().out
    assert "train-0: 4.00 s of 4 steps of 1.000 s" in output
    assert "generate-0: 3.00 s of 4 steps of 1.000 s" in output
    # Two of four seconds, and 2 GFLOP in them.
    assert "GEMM 0.5000 50.0% 1.0" in " ".join(output.split())
    assert "ended early" not in output
    assert store.exists("profile/trace.json.gz")


def test_a_run_that_ended_early_shows_the_steps_there_were(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    replace(TRAINER, num_steps=1).write(store)
    report(store, REQUEST)
    assert "1 of 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize("traces", [[], [replace(TRAINER, num_steps=0)]])
def test_a_run_without_a_recorded_step_is_refused(store: Store, traces: list[Trace]) -> None:
    for trace in traces:
        trace.write(store)
    with pytest.raises(InputError) as caught:
        report(store, REQUEST)
    assert caught.value.key == "--steps"
    assert "step 4," in str(caught.value)
