"""One prompt at several versions: which groups are shown, and that text of a model stays text."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from dash.development.base_component import Component
from support.stored_run.run import Shape, StoredRun

from dashboard.pages import versions
from dashboard.pages.trajectories import GroupReaders, answer
from dashboard.read.groups import Group, Response
from dashboard.read.runs import Runs
from dashboard.read.same_prompt import Asked, SamePrompt
from dashboard.read.search import from_address
from dashboard.read.tokens import TokenTexts
from millrace.errors import InputError
from storage.stores.local import LocalStore

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>[x](javascript:alert(3))\u202e\x1b[2J\n"
SPELT = "<script>alert(1)</script><img src=x onerror=alert(2)>[x](javascript:alert(3))\\u202e␛[2J␊"


def components(root: Any) -> Iterator[Component]:
    if isinstance(root, Component):
        yield root
        yield from components(getattr(root, "children", None))
    elif isinstance(root, (list, tuple)):
        for child in root:
            yield from components(child)


def said(root: Any) -> str:
    children = [getattr(component, "children", None) for component in components(root)]
    flat = [text for one in children for text in (one if isinstance(one, list) else [one])]
    return " ".join(text for text in flat if isinstance(text, str))


def of_class(root: Any, name: str) -> list[Component]:
    return [one for one in components(root) if name in str(getattr(one, "className", "")).split()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A root with one run, `mine`: 40 groups, of which each prompt is answered by three or four."""
    root = tmp_path_factory.mktemp("runs")
    shape = Shape(steps=10, groups_per_step=4, generators=2, prompts=12, stale_share=0.0)
    StoredRun(LocalStore(root / "mine", fsync=False), "mine", shape).append(10)
    return Runs(str(root))


def test_a_group_leads_to_its_prompt_at_other_versions_and_back(runs: Runs) -> None:
    readers = GroupReaders()
    _, opened = answer(runs, readers, "mine", from_address("?group=17"))
    (link,) = [one for one in components(opened) if getattr(one, "href", None)]
    assert (link.children, link.href.endswith("&versions=all")) == ("The same prompt at other versions", True)
    _, across = answer(runs, readers, "mine", from_address(link.href))
    columns = of_class(across, "version")
    assert "3 groups answer this prompt, in all parts of the generators' streams" in said(across)
    assert [said(of_class(column, "facts")[0]).split(" mean")[0].strip() for column in columns] == [
        "group 5",
        "this group",
        "group 29",
    ]
    assert len(of_class(columns[0], "tokens")) == 4
    assert "reward" in said(columns[0])
    back = [one.href for one in components(across) if getattr(one, "children", None) == "Group 17 in full"]
    _, again = answer(runs, readers, "mine", from_address(back[0]))
    assert "Group 17" in said(again)


def test_versions_is_all_or_not_in_the_address() -> None:
    with pytest.raises(InputError, match="versions is 'some': expected all"):
        from_address("?versions=some")


def asked(number: int) -> Asked:
    return Asked(generator=0, row_id=4 * number, policy_version=number)


@pytest.mark.parametrize("at", [0, 1, 7, 8, 10, 18, 19])
def test_of_many_groups_the_first_the_last_and_the_opened_one_are_shown_in_order(at: int) -> None:
    found = SamePrompt(groups=tuple(asked(number) for number in range(20)), searched=1, parts=1)
    shown = [one.policy_version for one in versions.chosen(found, asked(at))]
    assert len(shown) == versions.MAX_COLUMNS
    assert shown == sorted(shown)
    assert {0, at, 19} <= set(shown)


def test_of_few_groups_all_are_shown() -> None:
    found = SamePrompt(groups=(asked(1), asked(2)), searched=1, parts=1)
    assert versions.chosen(found, None) == [asked(1), asked(2)]


def hostile_group() -> Group:
    trajectory = {
        "prompt_id": HOSTILE,
        "prompt_tokens": [1],
        "message_roles": [],
        "message_starts": [],
        "response_tokens": [1, 2],
        "span_versions": [3, 5],
        "finish_reason": HOSTILE,
    }
    whole = Response(
        row_id=0,
        trajectory=trajectory,
        score={"reward": 1.0},
        consumed={"outcome": HOSTILE},
        trainer_logprobs=None,
    )
    unread = replace(whole, row_id=1, trajectory=None, score=None, consumed=None)
    return Group(generator=0, group_id=1, responses=(whole, unread), problems=(HOSTILE,))


class Hostile(TokenTexts):
    """Whose every text is a script."""

    def text(self, ids: Any) -> str:
        return HOSTILE


def test_hostile_text_is_only_ever_the_text_of_an_element_and_is_spelt_out() -> None:
    group = hostile_group()
    found = SamePrompt(groups=(asked(1),), searched=3, parts=9)
    shown = versions.view([group], group, found, Hostile(None), lambda other: "?open=0.0")
    assert said(shown).count(SPELT) == 5
    assert "version 3 to 5" in said(shown)
    assert "It can't be read." in said(shown)
    for component in components(shown):
        others = {name: value for name, value in component.to_plotly_json()["props"].items() if name != "children"}
        assert "alert(" not in str(others)
        assert others.get("href", "?").startswith("?")


def test_a_search_that_ended_early_says_how_far_it_went_and_can_go_on() -> None:
    group = hostile_group()
    found = SamePrompt(groups=(asked(1),), searched=256, parts=900)
    shown = versions.view([group], group, found, TokenTexts(None), lambda other: "?open=0.0")
    assert "No other group answers this prompt, in the newest 256 of 900 parts" in said(shown)
    (further,) = [one for one in components(shown) if getattr(one, "children", None) == "Search further back"]
    assert further.href == "?open=0.0&versions=all"
