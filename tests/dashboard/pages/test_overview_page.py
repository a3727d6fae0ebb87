"""The table of all runs without a browser: its links, columns, notes, and what is typed above it."""

import json
from pathlib import Path
from typing import Any

import pytest
from dash import no_update
from support.pages.components import plain, texts, within
from support.stored_run.run import Shape, StoredRun

from dashboard.pages import address, overview
from dashboard.pages.site import Site
from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.views.registry import VIEWS
from millrace.runs.note import write_note
from storage import layout
from storage.stores.local import LocalStore

LOCAL = {"Host": "127.0.0.1:8050"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def stored(root: Path, run_id: str, steps: int = 3) -> StoredRun:
    run = StoredRun(LocalStore(root / run_id, fsync=False), run_id, Shape(steps=6))
    run.append(steps)
    return run


def site(root: Path) -> Site:
    return Site(Runs(str(root)), VIEWS)


def hrefs(tree: Any) -> dict[str, str]:
    """Where the links of a page lead, by their titles."""
    return {
        part["props"]["title"]: part["props"]["href"]
        for part in within(tree)
        if part["props"].get("title") and part["props"].get("href")
    }


def test_filter_order_and_columns_are_kept_in_the_address_and_each_link_changes_one_of_them(root: Path) -> None:
    stored(root, "one")
    stored(root, "two", steps=5)
    search = "?runs=two&filter=step>1&sort=step&column=training.max_steps&column=seed"
    body = plain(site(root).show("/", search).body)
    links = hrefs(body)
    kept = "filter=step%3E1"
    assert links["sort by step"] == f"/?runs=two&{kept}&sort=-step&column=training.max_steps&column=seed"
    assert links["sort by training.max_steps"].endswith(
        "&sort=-training.max_steps&column=training.max_steps&column=seed"
    )
    assert links["remove the column seed"] == f"/?runs=two&{kept}&sort=step&column=training.max_steps"
    assert links["compare one"] == f"/?runs=two,one&{kept}&sort=step&column=training.max_steps&column=seed"
    assert (
        address.overview(address.table_of(search))
        == f"/?runs=two&{kept}&sort=step&column=training.max_steps&column=seed"
    )
    heads = {texts(part): part["props"].get("aria-sort") for part in within(body) if part["type"] == "Th"}
    assert heads["step ▲"] == "ascending"
    assert heads["seed"] == "none"
    assert texts(body).index("one") < texts(body).index("two")
    assert "1 of 2 runs" in texts(plain(site(root).show("/", "?filter=step=5").body))
    assert "No run matches step=7." in texts(plain(site(root).show("/", "?filter=step=7").body))


def test_what_an_address_may_say_of_the_table_is_bounded() -> None:
    at = address.table_of("?" + "&".join(f"column={i}{'x' * 1000}" for i in range(100)) + f"&filter={'y' * 1000}&sort=")
    assert len(at.columns) == address.MAX_COLUMNS
    assert {len(text) for text in (*at.columns, at.filter)} == {address.MAX_CHARACTERS}
    assert at.sort == address.DEFAULT_SORT


def test_the_table_shows_settings_notes_and_the_reward_and_suggests_what_tells_runs_apart(root: Path) -> None:
    for run_id, rate in (("one", "1e-05"), ("two", "0.0003")):
        run = stored(root, run_id)
        record = json.loads(bytes(run.store.get(layout.RUN)))
        record["config"]["training"]["learning_rate"] = float(rate)
        run.store.put(layout.RUN, json.dumps(record).encode())
    write_note(LocalStore(root / "one"), "keep")
    plainly = plain(site(root).show("/", "").body)
    assert "keep" in texts(plainly)
    assert hrefs(plainly)["add the column training.learning_rate"] == "/?column=training.learning_rate"
    assert "add the column training.max_steps" not in hrefs(plainly)
    body = plain(site(root).show("/", "?column=training.learning_rate&column=no.such.key").body)
    assert {"1e-05", "0.0003", "–"} <= set(texts(body).split())
    drawn = [part["props"]["alt"] for part in within(body) if part["type"] == "Img"]
    assert len(drawn) == 2
    assert all(alt.startswith("reward: from ") for alt in drawn)


def test_a_refresh_brings_the_table_only_if_it_has_changed(root: Path) -> None:
    run = stored(root, "one", steps=6)
    run.finish()
    shown = site(root).show("/", "")
    first = site(root).refresh("/", "", shown.drawn_from, [], [overview.TABLE])
    again = site(root).refresh("/", "", first.drawn_from, [], [overview.TABLE])
    assert [*again.texts, again.drawn_from] == [no_update, no_update]
    write_note(run.store, "seen")
    changed = site(root).refresh("/", "", first.drawn_from, [], [overview.TABLE])
    assert "seen" in texts(plain(changed.texts))


def test_what_is_typed_above_the_table_goes_into_the_address(root: Path) -> None:
    stored(root, "one")
    app = make_app(Runs(str(root)), VIEWS, host="127.0.0.1", token=None)
    page = app.server.test_client()

    def typed(text: str, column: str | None, search: str) -> Any:
        question = {
            "output": "address.search",
            "outputs": {"id": "address", "property": "search"},
            "inputs": [
                {"id": "runs-filter", "property": "value", "value": text},
                {"id": "runs-column", "property": "value", "value": column},
            ],
            "changedPropIds": ["runs-filter.value"],
            "state": [{"id": "address", "property": "search", "value": search}],
        }
        answer = page.post("/_dash-update-component", json=question, headers=LOCAL)
        assert answer.status_code == 200
        return answer.json["response"].get("address", {}).get("search")

    assert typed(" state=running ", "", "?runs=one&sort=step") == "?runs=one&filter=state%3Drunning&sort=step"
    assert typed("", " seed ", "?column=name") == "?column=name&column=seed"
    assert typed("", None, "?filter=x&runs=one") == "?runs=one"
    assert typed("x", "", "?filter=x") is None
