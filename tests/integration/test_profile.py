"""`millrace profile`: a short campaign, its traces and its tables."""

import gzip
import json
from pathlib import Path

import pytest
from support.campaigns.campaigns import PRESET, Millrace, quick

from millrace.profiling.breakdown import CATEGORIES
from millrace.profiling.trace import read_traces
from storage.stores.factory import open_store

pytestmark = [pytest.mark.slow, pytest.mark.campaign]


def arguments(millrace: Millrace, steps: int, **settings: object) -> list[str]:
    sets = [f"{key}={json.dumps(value)}" for key, value in {**quick(), **settings}.items()]
    return ["profile", str(PRESET), "--steps", str(steps), "--root", str(millrace.root), "--set", *sets]


def only_run(millrace: Millrace) -> Path:
    (run,) = (folder for folder in millrace.root.iterdir() if folder.is_dir())
    return run


def test_three_steps_leave_a_table_and_a_trace_of_trainer_and_generator_on_one_clock(millrace: Millrace) -> None:
    output = millrace.run(*arguments(millrace, 3)).expect_success()
    for words in ("train-0: ", " of 3 steps", "generate-0: ", "of peak", "thread", *CATEGORIES):
        assert words in output
    run = only_run(millrace)
    assert run.name.startswith("tiny-cpu-profile-")
    generator, trainer = read_traces(open_store(str(run)))
    assert (generator.process, trainer.process, trainer.num_steps) == ("generate-0", "train-0", 3)
    assert generator.start < trainer.end
    assert trainer.start < generator.end
    for trace, activity in ((trainer, "train"), (generator, "generate")):
        names = {event["name"] for event in trace.events if event.get("ph") == "X"}
        assert {activity, "aten::mm"} <= names
        products = [event["ts"] for event in trace.events if event["name"] == "aten::mm"]
        assert trace.start <= min(products)
        assert max(products) <= trace.end
    merged = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))
    assert len(merged["traceEvents"]) == len(trainer.events) + len(generator.events)
    assert {event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"} >= {
        "train-0",
        "generate-0",
    }


@pytest.mark.extended
def test_a_run_that_ends_early_shows_the_steps_there_were(millrace: Millrace) -> None:
    output = millrace.run(*arguments(millrace, 3, **{"budget.max_steps": 5})).expect_success()
    assert "2 of 3 steps" in output
