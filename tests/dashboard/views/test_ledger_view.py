"""The trainer's account is compared with the rows, and dropped rows are listed."""

from typing import Any

from support.pages.run_data import consumed_rows, run_data

from dashboard.read.model import RunData
from dashboard.views.ledger import MOST_DROPS, newest_drops, recount
from millrace.rollouts.ledger import Account, Amount

# Version 1: two trained and one stale; version 2: two trained. Generator 1 made the last of each.
_ROWS = consumed_rows(
    [1, 1, 1, 2, 2], outcome=[0, 0, 1, 0, 0], generator=[0, 0, 1, 0, 1], tokens=[3, 4, 5, 6, 7]
)  # fmt: skip


def _account() -> Account:
    account = Account()
    account.train(Amount(rollouts=3, tokens=13), generator=0, staleness=0, reward_sum=0.0)
    account.train(Amount(rollouts=1, tokens=7), generator=1, staleness=0, reward_sum=0.0)
    account.drop("stale", Amount(rollouts=1, tokens=5), generator=1, reward_sum=0.0)
    return account


def _run(account: Account, policy_version: int, consumed: Any = _ROWS) -> RunData:
    status = {"account": account.to_json(), "policy_version": policy_version}
    return run_data(stage_status={"train-0": status}, consumed=consumed)


def test_an_account_that_the_rows_bear_out_agrees() -> None:
    result = recount(_run(_account(), 2))
    assert result is not None
    assert (result.agrees, result.policy_version, result.behind) == (True, 2, 0)
    assert result.entries == {
        "trained": (Amount(rollouts=4, tokens=20),) * 2,
        "stale": (Amount(rollouts=1, tokens=5),) * 2,
        "generate-0": (Amount(rollouts=3, tokens=13),) * 2,
        "generate-1": (Amount(rollouts=2, tokens=12),) * 2,
    }


def test_one_token_that_the_rows_do_not_have_is_noticed() -> None:
    account = _account()
    account.trained += Amount(tokens=1)
    result = recount(_run(account, 2))
    assert result is not None and not result.agrees
    account_amount, rows = result.entries["trained"]
    assert account_amount - rows == Amount(tokens=1)


def test_a_drop_that_only_the_rows_or_only_the_account_has_is_noticed() -> None:
    account = _account()
    account.drop("corrupt", Amount(rollouts=1, tokens=1), generator=2, reward_sum=0.0)
    del account.dropped["stale"]
    result = recount(_run(account, 2))
    assert result is not None and not result.agrees
    differ = {name for name, (account_amount, rows) in result.entries.items() if account_amount != rows}
    assert differ == {"stale", "corrupt", "generate-2"}


def test_while_the_stream_is_behind_a_recount_may_be_short_but_never_exceed() -> None:
    result = recount(_run(_account(), 3))
    assert result is not None and result.agrees
    assert result.behind == 1
    short = Account()
    short.train(Amount(rollouts=3, tokens=13), generator=0, staleness=0, reward_sum=0.0)
    result = recount(_run(short, 3))
    assert result is not None and not result.agrees


def test_rows_of_one_group_dropped_together_are_one_drop() -> None:
    drops = newest_drops(
        run_data(
            consumed=consumed_rows(
                [5, 5, 5, 5, 6, 6],
                outcome=[1, 1, 1, 1, 0, 1],
                generator=[2, 2, 2, 2, 0, 0],
                group_id=[7, 7, 8, 8, 9, 9],
                trajectory_row_id=[40, 41, 42, 43, 10, 11],
                staleness=[3, 3, 4, 4, 0, 0],
            )
        )
    )
    assert drops == [
        ("6", "0", "11 to 11", "9", "stale", "0"),
        ("5", "2", "42 to 43", "8", "stale", "4"),
        ("5", "2", "40 to 41", "7", "stale", "3"),
    ]


def test_the_newest_drops_are_listed_and_none_where_nothing_was_dropped() -> None:
    rows = consumed_rows(range(1, 101), outcome=1, group_id=range(100), trajectory_row_id=range(100))
    drops = newest_drops(run_data(consumed=rows))
    assert (len(drops), drops[0][3], drops[-1][3]) == (MOST_DROPS, "99", str(100 - MOST_DROPS))
    assert newest_drops(run_data(consumed=consumed_rows([1, 2]))) == []
