"""The strip at the top of a run's pages: an icon and words for each clause, and a link to its chart."""

from support.pages.run_data import run_data

from dashboard.pages.verdict import strip


def test_a_clause_shows_its_level_in_an_icon_and_in_words_and_links_to_its_chart() -> None:
    clauses, _ = strip(run_data(problems=("log/3.json: torn",))).children
    links = [item.children for item in clauses.children]
    assert [(link.children[0].children, link.children[0].title, link.className) for link in links[:3]] == [
        ("✓", "good", "good"),
        ("✕", "bad", "bad"),
        ("?", "unknown", "unknown"),
    ]
    assert links[1].children[1] == "damaged: log/3.json: torn"
    assert links[1].href == "/run/mine/ledger#ledger-balance"


def test_the_advice_stands_below_the_clauses() -> None:
    _, advice = strip(run_data(problems=("log/3.json: torn",))).children
    assert advice.children[1] == "Run `millrace fsck /runs/mine`: it says what is damaged and what can be done."
