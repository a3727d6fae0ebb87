"""The strip at the top of a run's pages: an icon and words for each clause, and a link to its chart."""

from support.pages.run_data import run_data

from dashboard.pages.verdict import strip


def test_a_clause_shows_its_level_and_links_to_its_chart_and_the_advice_is_below() -> None:
    clauses, advice = strip(run_data(problems=("log/3.json: torn",))).children
    links = [item.children for item in clauses.children]
    assert [(link.children[0].title, link.className) for link in links[:3]] == [
        ("good", "good"),
        ("bad", "bad"),
        ("unknown", "unknown"),
    ]
    assert links[1].href == "/run/mine/ledger#ledger-balance"
    assert "millrace fsck" in advice.children[1]
