"""One prompt at several versions: which groups are shown, and that text of a model stays text."""

from dataclasses import replace

import pytest
from support.pages.components import components, of_class, words
from support.pages.hostile import HOSTILE, SPELT, HostileTexts, hostile_response
from support.pages.sites import store_run
from support.stored_run.run import Shape

from dashboard.pages import versions
from dashboard.pages.trajectories import answer
from dashboard.read.groups import Group
from dashboard.read.runs import Runs
from dashboard.read.search import from_address


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A root with one run, `mine`: 40 groups, three or four for each prompt."""
    root = tmp_path_factory.mktemp("runs")
    shape = Shape(steps=10, groups_per_step=4, generators=2, prompts=12, stale_share=0.0)
    store_run(root, "mine", 10, shape)
    return Runs(str(root))


def test_a_group_leads_to_its_prompt_at_other_versions_and_back(runs: Runs) -> None:
    _, opened = answer(runs, "mine", from_address("?group=17"))
    (link,) = [component for component in components(opened) if "versions=all" in getattr(component, "href", "")]
    assert (link.children, link.href.endswith("&versions=all")) == ("The same prompt at other versions", True)
    _, across = answer(runs, "mine", from_address(link.href))
    columns = of_class(across, "version")
    assert "3 groups answered this prompt. " in words(across)
    assert [words(of_class(column, "facts")[0]).split(" mean")[0].strip() for column in columns] == [
        "group 5",
        "this group",
        "group 29",
    ]
    assert len(of_class(columns[0], "tokens")) == 4
    assert "reward" in words(columns[0])
    back = [
        component.href for component in components(across) if getattr(component, "children", None) == "Group 17 in full"
    ]
    _, again = answer(runs, "mine", from_address(back[0]))
    assert "Group 17" in words(again)


@pytest.mark.parametrize("at", [0, 7, 19])
def test_of_many_groups_the_first_the_last_and_the_opened_one_are_shown_in_order(at: int) -> None:
    groups = [(0, 4 * number) for number in range(20)]
    shown = versions.chosen(groups, groups[at])
    assert len(shown) == versions.MAX_COLUMNS
    assert shown == sorted(shown)
    assert {groups[0], groups[at], groups[19]} <= set(shown)


def test_hostile_text_is_only_ever_the_text_of_an_element_and_is_spelt_out() -> None:
    whole = hostile_response(0, 2)
    unread = replace(whole, row_id=1, trajectory=None, score=None, consumed=None)
    group = Group(generator=0, group_id=1, responses=(whole, unread), problems=(HOSTILE,))
    shown = versions.view([group], group, 1, HostileTexts(None), lambda other: "?open=0.0")
    assert words(shown).count(SPELT) >= 5
    assert "version 3 to 4" in words(shown)
    assert "It can't be read." in words(shown)
    for component in components(shown):
        attributes = {name: value for name, value in component.to_plotly_json()["props"].items() if name != "children"}
        assert "alert(" not in str(attributes)
        assert attributes.get("href", "?").startswith("?")
