"""Stored configs: keys that have another name today, and the hash."""

from typing import Any

import pytest

from configs import stored
from configs.schema import dotted_fields
from configs.stored import RENAMED, changed_keys, config_hash, current_key, put_key, with_current_keys


def test_every_renamed_key_leads_to_a_key_of_today() -> None:
    assert set(RENAMED.values()) <= dotted_fields().keys()
    assert not RENAMED.keys() & dotted_fields().keys()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_stored_value_is_found_under_today_s_key(old: str, new: str) -> None:
    before: dict[str, Any] = {"seed": 1}
    put_key(before, old, 0.25)
    after: dict[str, Any] = {"seed": 1}
    put_key(after, new, 0.25)
    for config in (before, after):
        # Empty sections may be left over, as the schema allows.
        assert with_current_keys(config) == after


def test_a_section_may_be_renamed_or_a_key_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "RENAMED", {"model.warm": "model.bootstrap", "seed": "run.seed"})
    config = {"seed": 3, "model": {"path": None, "warm": {"threads": 2}}}
    assert with_current_keys(config) == {"run": {"seed": 3}, "model": {"path": None, "bootstrap": {"threads": 2}}}
    assert current_key("model.warm.threads") == "model.bootstrap.threads"
    assert current_key("model.warmth") is None


def test_a_config_that_holds_both_names_keeps_today_s_value() -> None:
    config = {"model": {"bootstrap": {"slip_rate": 0.1, "error_rate": 0.2}}}
    assert with_current_keys(config) == {"model": {"bootstrap": {"error_rate": 0.2}}}


@pytest.mark.parametrize("config", [{}, {"model": None}, {"model": {"bootstrap": 3}}])
def test_what_is_no_section_stays_for_the_validation(config: dict[str, Any]) -> None:
    assert with_current_keys(dict(config)) == config


def test_the_hash_of_a_config_never_changes() -> None:
    expected = "3de9d6a8de7b4e6ba530641bdac5217c6c474d9b9af2fb2430852caef99ce4e1"
    assert config_hash({"b": {"c": 1.5, "a": None}, "a": "é"}) == expected


def test_each_key_that_differs_is_a_sentence_unless_one_config_has_no_such_key() -> None:
    before = {"name": "a", "section": {"old": 1, "same": [1], "below": {"rate": None}}, "other": 1}
    after = {"name": "b", "section": {"new": 1, "same": [1], "below": {"rate": 0.5}}, "other": {"x": 1}}
    assert changed_keys(before, after) == [
        'name was "a" and is "b"',
        'other was 1 and is {"x": 1}',
        "section.below.rate was null and is 0.5",
    ]
    assert changed_keys(before, before) == []
