"""What the page of trajectories shows for a query, and that text of a model stays text in it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dash.development.base_component import Component
from support.stored_run.run import Shape, StoredRun

from dashboard.pages import trajectories as trajectories_page
from dashboard.pages.group import MAX_RESPONSES, MAX_TOKENS, colour, view
from dashboard.pages.trajectories import answer, layout
from dashboard.read.group_readers import GroupReaders
from dashboard.read.groups import Group, Response
from dashboard.read.runs import Runs
from dashboard.read.search import FIELDS, MAX_CHARACTERS, Query, address, from_address
from dashboard.read.tokens import TokenTexts
from millrace.errors import InputError
from storage.stores.local import LocalStore

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>[x](javascript:alert(3))\u202e\x1b[2J\n"


def components(root: Any) -> Iterator[Component]:
    if isinstance(root, Component):
        yield root
        yield from components(getattr(root, "children", None))
    elif isinstance(root, (list, tuple)):
        for child in root:
            yield from components(child)


def texts(root: Any) -> list[str]:
    """Every text that stands in an element, in order."""
    found: list[str] = []
    for component in components(root):
        children = getattr(component, "children", None)
        found += [child for child in (children if isinstance(children, list) else [children]) if isinstance(child, str)]
    return found


def said(root: Any) -> str:
    return " ".join(texts(root))


def of_class(root: Any, name: str) -> list[Component]:
    return [component for component in components(root) if getattr(component, "className", None) == name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A root with one run, `mine`: twelve steps of six groups of four, some of them dropped."""
    root = tmp_path_factory.mktemp("runs")
    shape = Shape(steps=12, groups_per_step=6, generators=2, max_staleness=2, stale_share=0.2, error_share=0.2, seed=6)
    StoredRun(LocalStore(root / "mine", fsync=False), "mine", shape).append(12)
    return Runs(str(root))


Ask = Callable[[str], tuple[Any, Any]]


@pytest.fixture
def ask(runs: Runs) -> Ask:
    """`ask("?group=1")`: the list and the open group."""
    opened = GroupReaders()
    return lambda search: answer(runs, opened, "mine", from_address(search))


def test_groups_come_25_at_a_time_with_links_to_the_next_ones_and_to_each(ask: Ask, runs: Runs) -> None:
    consumed = runs.reader("mine").look().consumed
    total = np.count_nonzero(consumed["sample_index"] == 0)
    listed, group = ask("?")
    assert group is None
    assert f"{total} groups found, 1 to 25 shown." in said(listed)
    links = {link.children: link.href for link in components(listed) if hasattr(link, "href")}
    assert links["next"] == "?page=1"
    assert "previous" not in links
    newest = int(consumed["group_id"][np.flatnonzero(consumed["sample_index"] == 0)[-1]])
    listed, group = ask(links[str(newest)])
    assert group is not None
    assert f"Group {newest}" in said(group)
    last = (total - 1) // 25
    listed, _ = ask(f"?page={last}")
    links = {link.children: link.href for link in components(listed) if hasattr(link, "href")}
    assert ("next" in links, "previous" in links) == (False, True)


def test_the_link_of_a_version_finds_the_groups_of_its_step(ask: Ask, runs: Runs) -> None:
    consumed = runs.reader("mine").look().consumed
    first = (consumed["sample_index"] == 0) & (consumed["policy_version"] == 7)
    listed, _ = ask("?version=7")
    assert f"{np.count_nonzero(first)} groups found" in said(listed)


def test_one_group_that_is_found_is_opened_at_once_with_a_token_for_each_token(ask: Ask, runs: Runs) -> None:
    consumed = runs.reader("mine").look().consumed
    trained = np.flatnonzero((consumed["outcome"] == 0) & (consumed["sample_index"] == 0))[4]
    group_id = int(consumed["group_id"][trained])
    listed, group = ask(f"?group={group_id}")
    assert "1 group found." in said(listed)
    mine = consumed["group_id"] == group_id
    tokens = of_class(group, "token")
    assert len(tokens) == consumed["tokens"][mine].sum()
    coloured = [token for token in tokens if "π/μ" in token.title]
    assert len(coloured) == consumed["tokens"][mine & (consumed["outcome"] == 0)].sum() > 0


def test_a_text_finds_the_groups_whose_prompt_holds_it_and_how_many_were_searched_is_said(ask: Ask) -> None:
    listed, _ = ask("?")
    rows = [component for component in components(listed) if type(component).__name__ == "Tr"][1:]
    prompt = rows[0].children[1].children.split()[0]
    listed, _ = ask(address(Query(text=prompt.upper())))
    assert "groups were searched." in said(listed)
    rows = [component for component in components(listed) if type(component).__name__ == "Tr"][1:]
    assert rows
    assert all(prompt in row.children[1].children for row in rows)


def test_a_run_that_is_not_there_is_refused_whatever_its_name(runs: Runs) -> None:
    for name in ("other", "../mine", "..%2fmine", "/etc", ""):
        with pytest.raises(InputError, match="there is no run"):
            answer(runs, GroupReaders(), name, from_address("?"))


def test_the_layout_holds_the_run_and_a_field_for_each_thing_that_may_be_asked() -> None:
    (store,) = [one for one in components(trajectories_page.layout("mine")) if type(one).__name__ == "Store"]
    assert store.data == "mine"
    inputs = [one for one in components(trajectories_page.layout("mine")) if type(one).__name__ == "Input"]
    assert all(one.maxLength == MAX_CHARACTERS for one in inputs)
    asked = {one.id.removeprefix("trajectories-") for one in inputs}
    assert asked == set(FIELDS) - {"order", "page", "open", "versions"}


def response(row_id: int, tokens: int, **changes: Any) -> Response:
    """A trained one, whose every text is hostile."""
    trajectory = {
        "prompt_id": HOSTILE,
        "prompt_tokens": [1],
        "meta": HOSTILE,
        "response_tokens": list(range(tokens)),
        "rollout_logprobs": [-1.0] * tokens,
        "loss_mask": [1] * (tokens - 1) + [0],
        "kept_counts": [],
        "span_versions": [3, 4],
        "span_starts": [0, 2],
        "finish_reason": HOSTILE,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": tokens,
        "incarnation": 0,
        "seed": 5,
        "t_admitted": 1.0,
        "t_started": 1.5,
        "t_finished": 3.75,
        "message_roles": [HOSTILE, "assistant", HOSTILE],
        "message_starts": [0, 1, 3],
    }
    score = {
        "reward": 1.0,
        "components": HOSTILE,
        "status": HOSTILE,
        "error": HOSTILE,
        "verifier_version": HOSTILE,
        "seconds": 0.5,
    }
    taken = {
        "outcome": HOSTILE,
        "policy_version": 6,
        "staleness": 2,
        "staleness_in_flight": 1,
        "reward": 1.0,
        "advantage": None,
        "t": 5.0,
    }
    logprobs = np.full(tokens, -1.0, np.float32)
    logprobs[0] = np.log(0.5) - 1.0
    return Response(
        row_id=row_id, trajectory=trajectory, score=score, consumed=taken, trainer_logprobs=logprobs, **changes
    )


def test_hostile_text_is_only_ever_the_text_of_an_element_and_is_spelt_out() -> None:
    class Hostile(TokenTexts):
        """Whose every token is a script."""

        def text(self, ids: Any) -> str:
            return HOSTILE * len(ids)

        def pieces(self, ids: Any) -> list[str]:
            return [HOSTILE for _ in ids]

    group = Group(generator=0, group_id=1, responses=(response(0, 4),), problems=(HOSTILE,))
    shown = view(group, Hostile(None))
    spelt = "<script>alert(1)</script><img src=x onerror=alert(2)>[x](javascript:alert(3))\\u202e␛[2J␊"
    assert sum(spelt in text for text in texts(shown)) >= 10
    # Elements of HTML, with no attribute that a browser follows or runs, and no Markdown.
    assert {component._namespace for component in components(shown)} == {"dash_html_components"}
    kinds = {type(component).__name__ for component in components(shown)}
    assert kinds <= {"Section", "Div", "P", "H2", "H3", "Span"}
    for component in components(shown):
        others = {name: value for name, value in component.to_plotly_json()["props"].items() if name != "children"}
        assert "alert(" not in str(others)
        assert not {"href", "src", "dangerously_allow_html"} & others.keys()


def test_a_truncated_token_says_how_many_it_was_drawn_from() -> None:
    truncated = response(0, 4)
    truncated.trajectory["kept_counts"] = [1200, 1, 2, 0]
    group = Group(generator=0, group_id=1, responses=(truncated,), problems=())
    titles = [token.title for token in of_class(view(group, TokenTexts(None)), "token")]
    assert titles[0] == "token 0, id 0, log μ -1, drawn from 1,200 tokens, log π -1.69315, π/μ 0.5"
    assert titles[3] == "token 3, id 3, written by the environment"


def test_messages_are_labelled_with_their_roles_where_they_begin() -> None:
    one = response(0, 4)
    assert one.trajectory is not None
    roles = {"message_roles": ["user", "assistant", "tool", "assistant"], "message_starts": [0, 1, 3, 4]}
    trajectory = {**one.trajectory, "prompt_tokens": [1, 2], **roles}
    group = Group(generator=0, group_id=1, responses=(replace(one, trajectory=trajectory),), problems=())
    shown = view(group, TokenTexts(None))
    assert [mark.children for mark in of_class(shown, "role")] == ["user", "assistant", "tool", "assistant"]
    (tokens,) = of_class(shown, "tokens")
    assert [child.className for child in tokens.children] == ["token", "role", "token", "role", "token", "token"]


def test_tokens_carry_their_ratio_their_version_and_their_colour() -> None:
    group = Group(generator=0, group_id=1, responses=(response(0, 4),), problems=())
    shown = view(group, TokenTexts(None))
    tokens = of_class(shown, "token")
    assert [token.children for token in tokens] == ["0 ", "1 ", "2 ", "3 "]
    assert tokens[0].title == "token 0, id 0, log μ -1, log π -1.69315, π/μ 0.5"
    assert tokens[1].title.endswith("π/μ 1")
    assert tokens[3].title == "token 3, id 3, written by the environment"
    assert ["fontStyle" in token.style for token in tokens] == [False, False, False, True]
    assert [token.style["backgroundColor"] for token in tokens] == [
        colour(0.5),
        colour(1.0),
        colour(1.0),
        colour(np.nan),
    ]
    assert ["borderLeft" in token.style for token in tokens] == [False, False, True, False]
    (bar,) = of_class(shown, "versions")
    assert [(span.children, span.title) for span in bar.children] == [
        ("v3", "version 3: tokens 0 to 1"),
        ("v4", "version 4: tokens 2 to 3"),
    ]
    assert (
        "queued 0.500 s, sampled for 2.250 s, verified for 0.500 s, its step done 1.250 s after its last token"
        in said(shown)
    )


def test_ratios_of_half_and_twice_are_equally_far_from_1_and_no_colour_is_at_1() -> None:
    assert colour(1.0).endswith(" 0.000)")
    assert colour(0.5).rpartition(",")[2] == colour(2.0).rpartition(",")[2] == " 0.650)"
    assert colour(0.5).partition(",")[0] != colour(2.0).partition(",")[0]
    assert colour(1e-300) == colour(0.0) == colour(0.5)
    assert colour(1e300) == colour(2.0)


def test_of_what_is_long_the_beginning_is_shown_and_how_much_is_not() -> None:
    many = tuple(response(i, 1 if i else MAX_TOKENS + 7) for i in range(MAX_RESPONSES + 3))
    shown = view(Group(generator=0, group_id=-1, responses=many, problems=()), TokenTexts(None))
    assert len(of_class(shown, "token")) == MAX_TOKENS + MAX_RESPONSES - 1
    assert " … and 7 more tokens" in texts(shown)
    assert "3 more are not shown." in texts(shown)


def test_a_response_of_which_little_can_be_read_shows_that_little() -> None:
    bare = Response(row_id=7, trajectory=None, score=None, consumed=None, trainer_logprobs=None)
    shown = view(Group(generator=1, group_id=-1, responses=(bare,), problems=("gone",)), TokenTexts(None))
    assert "Its prompt can't be read." in said(shown)
    assert "not taken by the trainer yet" in said(shown)
    assert "gone" in texts(shown)
    assert of_class(shown, "token") == []


def test_a_root_that_is_one_run_has_its_page_too(runs: Runs) -> None:
    one = Runs(f"{runs.url}/mine")
    listed, _ = answer(one, GroupReaders(), one.ids()[0], from_address("?outcome=stale"))
    assert "groups found" in said(listed)


def test_no_two_components_of_the_page_share_an_id() -> None:
    ids = [component.id for component in components(layout("mine")) if getattr(component, "id", None)]
    assert len(ids) == len(set(ids))
