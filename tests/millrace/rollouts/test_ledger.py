"""The ledger: every trajectory is counted in exactly one place, and a mismatch stops the run."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import LedgerMismatch
from millrace.rollouts.ledger import Account, Amount

amounts = st.builds(Amount, rollouts=st.integers(0, 100), tokens=st.integers(0, 1000))
events = st.lists(st.tuples(st.sampled_from(["train", "stale", "error"]), amounts, st.integers(0, 4)), max_size=20)


def amount(rollouts: int, tokens: int) -> Amount:
    return Amount(rollouts=rollouts, tokens=tokens)


def account_of(story: list[tuple[str, Amount, int]]) -> Account:
    account = Account()
    for what, some, staleness in story:
        if what == "train":
            account.train(some, generator=staleness % 2, staleness=staleness, reward_sum=0.5)
        else:
            account.drop(what, some, generator=staleness % 2, reward_sum=0.25)
            account.groups_dropped += 1
    return account


def consumed_by(account: Account) -> list[Amount]:
    """Amounts that the cursors of two generators' streams passed, in agreement with the account."""
    return [account.by_generator.get(generator, Amount()) for generator in range(2)]


def test_amounts_add_and_subtract_in_rollouts_and_in_tokens() -> None:
    assert amount(1, 10) + amount(2, 5) == amount(3, 15)
    assert amount(3, 15) - amount(2, 5) == amount(1, 10)
    assert Amount() == amount(0, 0)


@given(events)
def test_an_account_survives_json(story: list[tuple[str, Amount, int]]) -> None:
    account = account_of(story)
    assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account


@given(events)
def test_the_taken_amount_is_the_trained_and_dropped_one(story: list[tuple[str, Amount, int]]) -> None:
    account = account_of(story)
    assert account.taken() == sum((some for _, some, _ in story), Amount())
    assert account.trained == sum((some for what, some, _ in story if what == "train"), Amount())
    assert account.staleness.total() == account.trained.rollouts
    assert account.groups_dropped == sum(what != "train" for what, _, _ in story)


def test_masked_tokens_are_part_of_the_trained_ones() -> None:
    account = Account()
    account.train(amount(4, 40), generator=0, staleness=2, reward_sum=1.0, masked=amount(2, 9))
    account.train(amount(4, 30), generator=0, staleness=0, reward_sum=1.0)
    assert (account.masked, account.trained, account.taken()) == (amount(2, 9), amount(8, 70), amount(8, 70))
    account.balance(generated=amount(8, 70), scored=amount(8, 70), consumed=[amount(8, 70)])
    assert account.ledger()["masked"] == {"rollouts": 2, "tokens": 9}
    assert Account.from_json(json.loads(json.dumps(account.to_json()))) == account


def test_an_account_counts_by_staleness_and_by_reason() -> None:
    account = Account()
    account.train(amount(8, 80), generator=0, staleness=0, reward_sum=6.0)
    account.train(amount(8, 70), generator=0, staleness=2, reward_sum=2.0)
    account.drop("stale", amount(8, 90), generator=0, reward_sum=1.0)
    account.drop("stale", amount(4, 10), generator=0, reward_sum=0.5)
    assert account.staleness == {0: 8, 2: 8}
    assert account.dropped == {"stale": amount(12, 100)}
    assert account.reward_sums == {"trained": 8.0, "stale": 1.5}


@given(events, amounts, amounts)
def test_each_generated_trajectory_is_in_one_place(
    story: list[tuple[str, Amount, int]], buffered: Amount, in_flight: Amount
) -> None:
    account = account_of(story)
    scored = account.taken() + buffered
    account.balance(generated=scored + in_flight, scored=scored, consumed=consumed_by(account))
    assert (account.buffered, account.in_flight) == (buffered, in_flight)
    places = [account.trained, *account.dropped.values(), account.buffered, account.in_flight]
    assert sum(places, Amount()) == account.generated


def test_a_ledger_is_json_of_its_places() -> None:
    account = Account()
    account.train(amount(8, 80), generator=0, staleness=1, reward_sum=1.0)
    account.drop("error", amount(2, 20), generator=0, reward_sum=0.0)
    account.balance(generated=amount(20, 200), scored=amount(14, 140), consumed=[amount(10, 100)])
    assert json.loads(json.dumps(account.ledger())) == {
        "generated": {"rollouts": 20, "tokens": 200},
        "trained": {"rollouts": 8, "tokens": 80},
        "masked": {"rollouts": 0, "tokens": 0},
        "buffered": {"rollouts": 4, "tokens": 40},
        "in_flight": {"rollouts": 6, "tokens": 60},
        "dropped": {"error": {"rollouts": 2, "tokens": 20}},
    }


def mismatch(*scored_of: Amount, consumed: list[Amount], account: Account, balanced: list[Amount] | None = None) -> str:
    generated, scored = scored_of
    with pytest.raises(LedgerMismatch) as caught:
        account.balance(generated=generated, scored=scored, consumed=consumed, balanced=balanced or [])
    return str(caught.value)


@pytest.mark.parametrize("consumed", [amount(9, 80), amount(8, 81), amount(7, 80)])
def test_an_account_that_differs_from_the_cursors_is_a_mismatch_of_named_rows(consumed: Amount) -> None:
    account = account_of([("train", amount(8, 80), 0)])
    error = mismatch(amount(20, 200), amount(20, 200), consumed=[consumed], account=account)
    assert f"streams/trajectories/0, rows 0 to {max(consumed.rollouts, 8) - 1}:" in error
    for pair in (consumed, amount(8, 80)):
        assert re.search(rf"{pair.rollouts} (trajectories )?\({pair.tokens}\b", error)


def test_a_mismatch_names_the_rows_taken_since_the_last_balance() -> None:
    account = account_of([("train", amount(8, 80), 0), ("train", amount(8, 88), 1), ("stale", amount(4, 40), 1)])
    consumed, balanced = [amount(8, 80), amount(13, 130)], [amount(8, 80), amount(8, 88)]
    error = mismatch(amount(40, 400), amount(40, 400), consumed=consumed, account=account, balanced=balanced)
    assert "trajectories/1, rows 8 to 12:" in error


@pytest.mark.parametrize(
    ("generated", "scored", "place"),
    [(amount(20, 200), amount(7, 70), "buffered"), (amount(8, 80), amount(8, 85), "in flight")],
)
def test_a_negative_amount_in_a_place_is_a_mismatch(generated: Amount, scored: Amount, place: str) -> None:
    account = account_of([("train", amount(8, 80), 0)])
    assert place in mismatch(generated, scored, consumed=[amount(8, 80)], account=account)
