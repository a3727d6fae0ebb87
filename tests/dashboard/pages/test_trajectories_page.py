"""The page of trajectories answers a query, and a model's text stays text on it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages.components import components, of_class, words
from support.pages.hostile import HOSTILE, SPELT, HostileTexts, hostile_response
from support.pages.sites import store_run
from support.stored_run.run import Shape

from dashboard.pages.group import MAX_RESPONSES, MAX_TOKENS, colour, view
from dashboard.pages.trajectories import answer, layout
from dashboard.read.groups import Group, StoredResponse
from dashboard.read.runs import Runs
from dashboard.read.search import Query, address, from_address
from dashboard.read.tokens import TokenTexts
from millrace.errors import InputError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A root with one run, `mine`: twelve steps of six groups of four, some of them dropped."""
    root = tmp_path_factory.mktemp("runs")
    shape = Shape(steps=12, groups_per_step=6, generators=2, max_staleness=2, stale_share=0.2, error_share=0.2, seed=6)
    store_run(root, "mine", 12, shape)
    return Runs(str(root))


Ask = Callable[[str], tuple[Any, Any]]


@pytest.fixture
def ask(runs: Runs) -> Ask:
    """`ask("?group=1")`: the list and the open group."""
    return lambda search: answer(runs, "mine", from_address(search))


def test_groups_come_25_at_a_time_with_links_to_the_next_ones_and_to_each(ask: Ask, runs: Runs) -> None:
    consumed = runs.reader("mine").look().consumed
    total = np.count_nonzero(consumed["sample_index"] == 0)
    listed, group = ask("?")
    assert group is None
    assert f"{total} groups found, 1 to 25 shown." in words(listed)
    links = {link.children: link.href for link in components(listed) if hasattr(link, "href")}
    assert links["next"] == "?page=1"
    assert "previous" not in links
    newest = int(consumed["group_id"][np.flatnonzero(consumed["sample_index"] == 0)[-1]])
    listed, group = ask(links[str(newest)])
    assert group is not None
    assert f"Group {newest}" in words(group)
    last = (total - 1) // 25
    listed, _ = ask(f"?page={last}")
    links = {link.children: link.href for link in components(listed) if hasattr(link, "href")}
    assert ("next" in links, "previous" in links) == (False, True)


def test_one_group_that_is_found_is_opened_at_once_with_a_token_for_each_token(ask: Ask, runs: Runs) -> None:
    consumed = runs.reader("mine").look().consumed
    trained = np.flatnonzero((consumed["outcome"] == 0) & (consumed["sample_index"] == 0))[4]
    group_id = int(consumed["group_id"][trained])
    listed, group = ask(f"?group={group_id}")
    assert "1 group found." in words(listed)
    mine = consumed["group_id"] == group_id
    tokens = of_class(group, "token")
    assert len(tokens) == consumed["tokens"][mine].sum()
    coloured = [token for token in tokens if "π/μ" in token.title]
    assert len(coloured) == consumed["tokens"][mine & (consumed["outcome"] == 0)].sum() > 0


def test_a_text_finds_the_groups_with_it_in_their_prompt_or_a_response(ask: Ask, runs: Runs) -> None:
    listed, _ = ask("?")
    rows = [component for component in components(listed) if type(component).__name__ == "Tr"][1:]
    prompt = rows[0].children[1].children.split()[0]
    # This store has no tokenizer: a response is the ids of its tokens.
    tokens = runs.reader("mine").groups()[0].read(runs.reader("mine").look(), 0, 0).responses[-1].trajectory
    assert tokens is not None
    response = " ".join(map(str, tokens["response_tokens"]))
    listed, _ = ask(address(Query(text=response)))
    rows = [component for component in components(listed) if type(component).__name__ == "Tr"][1:]
    assert rows
    assert all(response[:40] in row.children[1].children for row in rows)
    listed, _ = ask(address(Query(text=prompt.upper())))
    assert "groups were searched." in words(listed)
    rows = [component for component in components(listed) if type(component).__name__ == "Tr"][1:]
    assert rows
    assert all(prompt in row.children[1].children for row in rows)


def test_groups_of_a_source_are_listed_with_its_name(tmp_path: Path) -> None:
    store_run(tmp_path, "mine", 4, Shape(steps=12, groups_per_step=6, sources=("math", "words")))
    listed, _ = answer(Runs(str(tmp_path)), "mine", from_address("?source=words"))
    header, *rows = [component for component in components(listed) if type(component).__name__ == "Tr"]
    assert "source" in words(header)
    assert len(rows) == 12
    assert {row.children[-1].children for row in rows} == {"words"}


def test_the_source_is_shown_only_if_there_are_several(ask: Ask) -> None:
    assert "source" not in words(ask("?")[0])
    for is_mixture in (True, False):
        fields = of_class(layout("mine", is_mixture=is_mixture), "field")
        (source,) = [field for field in fields if "source" in words(field)]
        assert bool(source.style) == (not is_mixture)


def test_a_run_that_is_not_there_is_refused_whatever_its_name(runs: Runs) -> None:
    for name in ("other", "../mine", "..%2fmine", "/etc", ""):
        with pytest.raises(InputError):
            answer(runs, name, from_address("?"))


def test_hostile_text_is_only_ever_the_text_of_an_element_and_is_spelt_out() -> None:
    group = Group(generator=0, group_id=1, responses=(hostile_response(0, 4),), problems=(HOSTILE,))
    shown = view(group, HostileTexts(None))
    assert words(shown).count(SPELT) >= 10
    # Elements of HTML, with no attribute that a browser follows or runs, and no Markdown.
    assert {component._namespace for component in components(shown)} == {"dash_html_components"}
    kinds = {type(component).__name__ for component in components(shown)}
    assert kinds <= {"Section", "Div", "P", "H2", "Span", "Strong", "Details", "Summary"}
    for component in components(shown):
        attributes = {name: value for name, value in component.to_plotly_json()["props"].items() if name != "children"}
        assert "alert(" not in str(attributes)
        assert not {"href", "src", "dangerously_allow_html"} & attributes.keys()


def test_tokens_carry_their_ratio_version_and_color_and_messages_their_role() -> None:
    truncated = hostile_response(0, 4)
    assert truncated.trajectory is not None
    truncated.trajectory["kept_counts"] = [1200, 1, 2, 0]
    shown = view(Group(generator=0, group_id=1, responses=(truncated,), problems=()), TokenTexts(None))
    tokens = of_class(shown, "token")
    assert [token.children for token in tokens] == ["0 ", "1 ", "2 ", "3 "]
    assert tokens[0].title == "token 0, id 0, log μ -1, drawn from 1,200 tokens, log π -1.69315, entropy 0.75, π/μ 0.5"
    colours = [token.style["backgroundColor"] for token in tokens]
    assert colours == [colour(0.5), colour(1.0), colour(1.0), colour(np.nan)]
    assert ["borderLeft" in token.style for token in tokens] == [False, False, True, False]
    (bar,) = of_class(shown, "versions")
    assert [span.children for span in bar.children] == ["v3", "v4"]
    assert [mark.children for mark in of_class(shown, "role")] == [SPELT, "assistant", SPELT]
    taught = replace(truncated, teacher_logprobs=[-2.5, -1.0, -1.0, -1.0])
    shown = view(Group(generator=0, group_id=1, responses=(taught,), problems=()), TokenTexts(None))
    assert ", log π_T -2.5, log π " in of_class(shown, "token")[0].title


def test_of_what_is_long_the_beginning_is_shown_and_how_much_is_not() -> None:
    many = tuple(hostile_response(i, 1 if i else MAX_TOKENS + 7) for i in range(MAX_RESPONSES + 3))
    shown = view(Group(generator=0, group_id=-1, responses=many, problems=()), TokenTexts(None))
    assert len(of_class(shown, "token")) == MAX_TOKENS + MAX_RESPONSES - 1
    assert " … and 7 more tokens" in words(shown)
    assert "3 more are not shown." in words(shown)


def test_a_response_of_which_little_can_be_read_shows_that_little() -> None:
    bare = StoredResponse(row_id=7, trajectory=None, score=None, consumed=None, trainer_logprobs=None)
    shown = view(Group(generator=1, group_id=-1, responses=(bare,), problems=("gone",)), TokenTexts(None))
    assert "gone" in words(shown)
    assert of_class(shown, "token") == []


def test_the_lowest_reward_is_first_and_the_same_answer_is_folded_below_its_first() -> None:
    def response(row_id: int, tokens: int, reward: float) -> StoredResponse:
        made = hostile_response(row_id, tokens)
        assert made.consumed is not None
        return replace(made, consumed={**made.consumed, "reward": reward})

    responses = (response(0, 3, 1.0), response(1, 4, 0.0), response(2, 3, 1.0))
    shown = view(Group(generator=0, group_id=1, responses=responses, problems=()), TokenTexts(None))
    assert [badge.children for badge in of_class(shown, "reward")] == ["reward 0", "reward 1", "reward 1"]
    folded = [each for each in components(shown) if "1 more with the same tokens" in words(each)]
    assert len(of_class(folded[-1], "token") or of_class(folded[-2], "token")) == 3


def test_tokens_are_coloured_by_what_the_address_says(ask: Ask) -> None:
    colours = {}
    for colouring in ("ratio", "logprob", "entropy", "advantage"):
        _, group = ask(f"?group=30&colour={colouring}")
        colours[colouring] = [token.style["backgroundColor"] for token in of_class(group, "token")]
        assert (
            f"colour={colouring}" in str([getattr(each, "href", "") for each in components(group)])
            or colouring == "ratio"
        )
    assert len(set(map(tuple, colours.values()))) == len(colours)
    with pytest.raises(InputError):
        from_address("?colour=pink")
