"""Lengths drawn from stored groups."""

from millrace.planning.fit.lengths import StoredLengths

_GROUPS = [(3, (1, 2)), (5, (8, 9)), (7, (30, 40))]


def _lengths(group_size: int = 2, max_tokens: int = 100, seed: int = 0) -> StoredLengths:
    return StoredLengths(groups=_GROUPS, group_size=group_size, max_tokens=max_tokens, seed=seed)


def test_each_group_is_a_stored_one_as_a_whole() -> None:
    drawn = {(prompt, tuple(responses)) for prompt, responses in map(_lengths().of_group, range(100))}
    assert drawn == set(_GROUPS)


def test_a_group_is_the_same_whenever_it_is_asked_for() -> None:
    again = [_lengths().of_group(number) for number in reversed(range(20))]
    assert again[::-1] == [_lengths().of_group(number) for number in range(20)]
    assert again != [_lengths(seed=1).of_group(number) for number in reversed(range(20))]


def test_groups_of_another_size_are_drawn_from_the_responses_of_one() -> None:
    for prompt, responses in map(_lengths(group_size=5).of_group, range(100)):
        assert len(responses) == 5
        assert set(responses) <= set(dict(_GROUPS)[prompt])


def test_responses_longer_than_allowed_are_cut_off() -> None:
    longest = {max(responses) for _, responses in map(_lengths(max_tokens=10).of_group, range(100))}
    assert longest == {2, 9, 10}
