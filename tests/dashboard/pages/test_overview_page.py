"""The table of all runs without a browser: its links, columns, notes and input fields."""

import json
from pathlib import Path
from typing import Any

import pytest
from dash import no_update
from support.pages.components import plain, texts, within
from support.pages.sites import LOCAL, open_client, open_site, store_run

from dashboard.pages import overview
from millrace.runs.record import end_attempt, read_run, write_note
from storage import layout
from storage.progress import read_status, write_progress


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def hrefs(tree: Any) -> dict[str, str]:
    """Where the links of a page lead, by their titles."""
    return {
        part["props"]["title"]: part["props"]["href"]
        for part in within(tree)
        if part["props"].get("title") and part["props"].get("href")
    }


def test_the_address_keeps_filter_order_and_columns_and_a_link_changes_one(root: Path) -> None:
    store_run(root, "one")
    store_run(root, "two", steps=5)
    body = plain(
        open_site(root).show("/", "?runs=two&filter=step>1&sort=step&column=training.max_steps&column=seed").body
    )
    kept = "filter=step%3E1"
    columns = "column=training.max_steps&column=seed"
    assert (
        hrefs(body).items()
        >= {
            "sort by step": f"/?runs=two&{kept}&sort=-step&{columns}",
            "remove the column seed": f"/?runs=two&{kept}&sort=step&column=training.max_steps",
            "compare one": f"/?runs=two,one&{kept}&sort=step&{columns}",
        }.items()
    )
    assert texts(body).index("one") < texts(body).index("two")
    assert "1 of 2 runs" in texts(plain(open_site(root).show("/", "?filter=step=5").body))
    assert "No run matches step=7." in texts(plain(open_site(root).show("/", "?filter=step=7").body))
    assert str(root / "none") in texts(plain(open_site(root / "none").show("/", "").body))


def test_the_table_shows_settings_and_notes_and_suggests_columns_that_differ(root: Path) -> None:
    for run_id, rate in (("one", "1e-05"), ("two", "0.0003")):
        run = store_run(root, run_id)
        record = json.loads(bytes(run.store.get(layout.RUN)))
        record["config"]["training"]["learning_rate"] = float(rate)
        run.store.put(layout.RUN, json.dumps(record).encode())
        write_note(run.store, f"keep {run_id}")
    body = plain(open_site(root).show("/", "?column=training.learning_rate&column=no.such.key").body)
    assert {"1e-05", "0.0003", "–", "keep"} <= set(texts(body).split())
    assert len([part for part in within(body) if part["type"] == "Img"]) == 2
    suggested = hrefs(plain(open_site(root).show("/", "").body))
    assert "add the column training.learning_rate" in suggested
    assert "add the column training.max_steps" not in suggested


def test_a_refresh_brings_the_table_only_if_it_has_changed(root: Path) -> None:
    run = store_run(root, "one", steps=6)
    run.finish()
    shown = open_site(root).show("/", "")
    first = open_site(root).refresh("/", "", shown.drawn_from, [], [overview.TABLE])
    drawn_from = {**shown.drawn_from, **first.drawn_from}
    again = open_site(root).refresh("/", "", drawn_from, [], [overview.TABLE])
    assert again.texts == [no_update]
    assert not again.drawn_from
    write_note(run.store, "seen")
    changed = open_site(root).refresh("/", "", drawn_from, [], [overview.TABLE])
    assert "seen" in texts(plain(changed.texts))


def test_what_is_typed_above_the_table_goes_into_the_address(root: Path) -> None:
    store_run(root, "one")
    question = {
        "output": "address.search",
        "outputs": {"id": "address", "property": "search"},
        "inputs": [
            {"id": "runs-filter", "property": "value", "value": " state=running "},
            {"id": "runs-column", "property": "value", "value": " seed "},
        ],
        "changedPropIds": ["runs-filter.value"],
        "state": [{"id": "address", "property": "search", "value": "?runs=one&sort=step"}],
    }
    answer = open_client(root).post("/_dash-update-component", json=question, headers=LOCAL)
    search = answer.json["response"]["address"]["search"]
    assert search == "?runs=one&filter=state%3Drunning&sort=step&column=seed"


def test_the_worst_run_is_first_and_each_row_links_to_its_evidence_and_its_predecessor(root: Path) -> None:
    store_run(root, "good").finish()
    bad = store_run(root, "bad")
    bad.evaluate(0.5)
    end_attempt(bad.store, 0, "failed")
    body = plain(open_site(root).show("/", "").body)
    names = [
        part["props"]["children"] for part in within(body) if part["props"].get("href") in ("/run/good", "/run/bad")
    ]
    assert names == ["bad", "good"]
    links = [part["props"].get("href", "") for part in within(body)]
    assert {"/run/bad/flow#flow-tracks", "/run/bad/flow#flow-idle", "/compare?runs=good,bad"} & set(links) >= {
        "/run/bad/flow#flow-tracks",
        "/run/bad/flow#flow-idle",
    }
    assert any(href.startswith("/compare?runs=") for href in links)
    assert "0.500  0.45–0.55" in texts(body)
    assert "1 need attention" in texts(body)


def test_an_empty_folder_says_how_to_start_a_run_and_a_missing_one_that_it_is_missing(root: Path) -> None:
    missing = texts(plain(open_site(root).show("/", "").body))
    root.mkdir()
    empty = texts(plain(open_site(root).show("/", "").body))
    assert "does not exist" in missing
    assert "has no runs yet" in empty
    assert "millrace run configs/presets/tiny-cpu.yaml" in empty


def test_a_tag_of_a_note_is_a_link_to_the_runs_that_have_it(root: Path) -> None:
    write_note(store_run(root, "one").store, "first try #baseline")
    body = plain(open_site(root).show("/", "").body)
    assert [part["props"]["href"] for part in within(body) if part["props"].get("children") == "#baseline"] == [
        "/?filter=%23baseline"
    ]


def test_a_trainer_before_its_first_step_has_a_row(root: Path) -> None:
    run = store_run(root, "loading")
    write_progress(run.store, "train", 0, {**read_status(run.store, "train", 0), "step": None})
    assert "3 of 6" in texts(plain(open_site(root).show("/", "").body))


def test_a_run_that_cant_be_judged_says_so_in_its_row(root: Path) -> None:
    store_run(root, "fine")
    run = store_run(root, "beyond-time")
    run.store.put(layout.RUN, json.dumps({**read_run(run.store), "t_started": 1e20}).encode())
    said = texts(plain(open_site(root).show("/", "").body))
    assert "beyond-time it can't be judged" in said
    assert "3 of 6" in said
