"""Stored configs: their hash, and how two differ."""

from configs.stored import changed_keys, config_hash


def test_the_hash_of_a_config_never_changes() -> None:
    expected = "3de9d6a8de7b4e6ba530641bdac5217c6c474d9b9af2fb2430852caef99ce4e1"
    assert config_hash({"b": {"c": 1.5, "a": None}, "a": "é"}) == expected


def test_each_key_that_differs_is_a_sentence_unless_one_config_has_no_such_key() -> None:
    previous = {"name": "a", "section": {"old": 1, "same": [1], "below": {"rate": None}}, "other": 1}
    after = {"name": "b", "section": {"new": 1, "same": [1], "below": {"rate": 0.5}}, "other": {"x": 1}}
    assert changed_keys(previous, after) == [
        'name was "a" and is "b"',
        'other was 1 and is {"x": 1}',
        "section.below.rate was null and is 0.5",
    ]
    assert changed_keys(previous, previous) == []
