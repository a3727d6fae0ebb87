"""Pages of incomplete or damaged runs name the missing part, and show the rest."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import expect
from support.pages.dashboard_page import Watched, served
from support.pages.sites import store_run
from support.stored_run.run import Shape, StoredRun
from support.stores.faulty_store import flip_a_bit

from dashboard.pages.site import VIEWS
from dashboard.views.home import HOME
from storage import layout
from storage.progress import write_progress
from storage.stores.local import LocalStore

pytestmark = pytest.mark.browser

TRAINER_METRICS = layout.metrics("train", 0)
NOT_RECORDED, NO_STEP = "Not recorded in this run.", "No step has finished yet."


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    """Damage to a sound run of 24 versions, and the texts of its pages."""

    how: Callable[[Path], None]
    problem: str | None = None
    """In the box at the top of every page; None: there is no such box."""
    home: str
    """Said by the verdict or the charts of the home page."""
    staleness: int | str = 24
    """The version that the chart of staleness reaches to, or the sentence that says why it is empty."""


def rewind_before_the_trainer(run: Path) -> None:
    for folder in ("streams", "checkpoints", "progress", "evaluations"):
        shutil.rmtree(run / folder)
    record = {"t": 0.0, "pid": 1, "attempt": 0, "doing": "loading the model", "seconds": {}}
    write_progress(LocalStore(run, fsync=False), "generate", 0, record)


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def replace_with_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def last_file(folder: Path) -> Path:
    return sorted(folder.iterdir())[-1]


SPOILED = {
    "without-metrics": Spoiled(
        how=lambda run: shutil.rmtree(run / "streams/metrics"), home=NOT_RECORDED, staleness=NOT_RECORDED
    ),
    "before-the-trainer": Spoiled(how=rewind_before_the_trainer, home=NO_STEP, staleness=NO_STEP),
    "torn-record": Spoiled(
        how=lambda run: tear(last_file(run / layout.CONSUMED / "log")),
        problem="streams/consumed/log/",
        home="damaged: streams/consumed/log/",
    ),
    "flipped-bit": Spoiled(
        how=lambda run: flip_a_bit(last_file(run / TRAINER_METRICS / "seg")),
        problem=TRAINER_METRICS,
        home=f"damaged: {TRAINER_METRICS}",
    ),
    "folder-as-status": Spoiled(
        how=lambda run: replace_with_a_folder(run / layout.progress("train", 0)),
        problem=layout.progress("train", 0),
        home=f"damaged: {layout.progress('train', 0)}",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def runs(root: Path) -> None:
    for name, spoiled in SPOILED.items():
        run = StoredRun(LocalStore(root / name, fsync=False), name, Shape(steps=24, generators=1, seed=3))
        run.evaluate(0.25)
        run.append(24)
        spoiled.how(root / name)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's standard error."""
    return tmp_path_factory.mktemp("server") / "stderr"


@pytest.fixture(scope="module")
def address(root: Path, said: Path) -> Iterator[str]:
    with said.open("w") as errors, served(root, errors=errors) as address:
        yield address


@pytest.mark.extended
@pytest.mark.parametrize("name", SPOILED)
def test_each_page_of_a_spoiled_run_says_what_is_missing_and_shows_the_rest(
    watched: Watched, said: Path, name: str
) -> None:
    spoiled, page = SPOILED[name], watched.page
    answers: list[int] = []
    page.on("response", lambda response: answers.append(response.status))
    watched.open(f"/run/{name}")
    expect(page.locator("body")).to_contain_text(spoiled.home)
    for view in (HOME, *VIEWS):
        page.get_by_role("link", name=view.title, exact=True).click()
        expect(page.locator("nav [aria-current=page]")).to_have_text(view.title)
        for block in view.blocks:
            if block.requires is None:
                expect(page.locator(f"#{block.id} h2")).to_have_text(block.title)
        if spoiled.problem is not None:
            expect(page.get_by_role("alert").first).to_contain_text(spoiled.problem)
        else:
            expect(page.locator(".problems")).to_have_count(0)
        watched.wait_until_drawn()
        if view.name == "staleness":
            if isinstance(spoiled.staleness, str):
                expect(page.locator("#staleness-over-time")).to_contain_text(spoiled.staleness)
            else:
                assert watched.newest_version() == spoiled.staleness
    page.get_by_role("link", name="Trajectories", exact=True).click()
    expect(page.locator(".trajectories")).to_be_visible()
    assert set(answers) <= {200, 204, 304}, answers
    watched.assert_quiet()
    assert said.read_text() == ""


def test_each_page_of_a_run_whose_record_cant_be_read_says_so(root: Path, watched: Watched, said: Path) -> None:
    store_run(root, "unreadable", 1).store.put(layout.RUN, b"\x00garbage")
    for path in ("/run/unreadable", *(f"/run/unreadable/{view.name}" for view in VIEWS)):
        watched.open(path)
        expect(watched.page.get_by_role("alert").first).to_contain_text(f"unreadable: {layout.RUN}")
        expect(watched.page.locator(".nowhere")).to_contain_text("Nothing can be shown yet")
    watched.assert_quiet()
    assert said.read_text() == ""
