"""The page of a run's record: config against the defaults, attempts, provenance and logs."""

from dataclasses import replace

import pytest
from support.pages.run_data import PROVENANCE, T, attempt, run_data, with_config
from support.stored_run.run import Shape, make_run

from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.views.blocks import Rows
from dashboard.views.record import VIEW
from millrace.runs.provenance import Origin
from millrace.runs.record import AttemptEnd
from storage.stores.local import LocalStore

EVIL = "<script>alert(1)</script>\u202e"


def rows(name: str, run: RunData) -> dict[str, list[str]]:
    """The cells of a table's rows by their first."""
    built = next(block for block in VIEW.blocks if block.id == f"record-{name}").build([run])
    assert isinstance(built, Rows)
    return {first: list(cells) for first, *cells in built.rows}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    store = LocalStore(tmp_path_factory.mktemp("runs") / "mine", fsync=False)
    make_run(store, "mine", Shape(steps=2, groups_per_step=4, max_staleness=7))
    return RunReader(store).look()


def test_settings_that_differ_from_the_defaults_come_first_and_all_others_are_folded(stored: RunData) -> None:
    changed, defaults = rows("changed", stored), rows("defaults", stored)
    assert changed["staleness.max_staleness"] == ["7", "4"]
    assert changed["training.max_steps"] == ["2", "–"]
    assert defaults["pipeline.mode"] == ["async"]
    assert not changed.keys() & defaults.keys()
    assert changed["training.loss.name"] == ["ppo_clip", "aipo"]
    assert VIEW.blocks[-1].id == "record-defaults" and len(VIEW.blocks) == VIEW.num_key + 2


def test_the_config_of_a_stranger_is_shown_as_text() -> None:
    run = with_config(run_data(), {EVIL: {"key": EVIL}})
    for defaults, default in (([], "–"), (["<b>\u202e"], "<b>\\u202e")):
        attempts = (replace(run.info.attempts[0], origin=Origin(defaults={f"{EVIL}.key": defaults})),)
        changed = rows("changed", replace(run, info=replace(run.info, attempts=attempts)))
        assert changed["<script>alert(1)</script>\\u202e.key"] == ["<script>alert(1)</script>\\u202e", default]


def test_attempts_tell_how_they_ended_and_what_had_changed_before_them() -> None:
    run = run_data()
    newer = replace(PROVENANCE, commit="decade", dependencies={"torch": "2.10.0"})
    attempts = (
        attempt(end=AttemptEnd(state="failed", cause="disk full", t=T - 50)),
        attempt(number=1, t_started=T - 40, first_step=2, changes=["seed was 1 and is 2"], provenance=newer),
        attempt(number=2, t_started=T - 20, first_step=3, provenance=newer),
    )
    cells = rows("attempts", replace(run, info=replace(run.info, attempts=attempts)))
    assert list(cells) == ["2", "1", "0"]
    assert cells["0"][1:4] == ["10 s", "failed: disk full", "0"]
    assert cells["1"][2] == "killed"
    assert cells["1"][-1] == (
        "seed was 1 and is 2; commit was c0ffee and is decade; dependencies.torch was 2.9.0 and is 2.10.0"
    )
    assert (cells["2"][2], cells["2"][-1]) == ("running", "")


def test_the_provenance_has_code_packages_and_machine_and_the_hashes_are_folded(stored: RunData) -> None:
    made_by = rows("provenance", stored)
    assert {"commit", "machine", "CPU", "GPUs", "python", "torch"} <= made_by.keys()
    run = run_data()
    with_inputs = attempt(inputs={"model.path models/a": "files 012", EVIL: "rows 3"})
    made_by = rows("hashes", replace(run, info=replace(run.info, attempts=(with_inputs,))))
    assert made_by["model.path models/a"] == ["files 012"]
    assert made_by["<script>alert(1)</script>\\u202e"] == ["rows 3"]


def test_logs_without_lines_are_named_in_one_line(stored: RunData) -> None:
    assert rows("logs", stored) == {"empty": ["generate-0, generate-1, score-0, sync_weights-0, train-0"]}
