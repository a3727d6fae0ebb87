"""The batch and the results of one step, as `millrace show` reports them."""

import json

import pytest
from support.replay.scripted_run import CONFIG, GROUPS, MEMBERS, RATIO, ScriptedRun
from support.stores.dict_store import DictStore
from support.stores.slow_store import SlowStore

from millrace.errors import ReplayError, RunMissing
from millrace.evaluation.results import write_result
from millrace.replay.show import show


def test_a_step_is_shown_with_its_batch_in_order() -> None:
    shown = show(ScriptedRun(DictStore()).steps(1, 4).close(), 3)
    assert [group["group_id"] for group in shown["groups"]] == [6, 7, 8]
    group = shown["groups"][1]
    assert (group["prompt_id"], group["prompt"], group["answer"]) == ("p7", "7+1=", "8")
    assert (group["source"], group["generator"], group["first_row_id"]) == ("default", 0, 7 * MEMBERS)
    assert (group["min_policy_version"], group["max_policy_version"], group["staleness"]) == (2, 2, 0)
    assert group["rewards"] == [0.0, 1.0]
    assert group["advantages"] == [-0.5, 0.5]
    assert group["lengths"] == [1 + 7 % 3, 1 + 8 % 3]
    assert [group["staleness"] for group in shown["groups"]] == [0] * GROUPS
    assert (shown["step"], shown["incarnation"], shown["attempt"], shown["dropped"]) == (3, 0, 0, {})
    assert json.loads(json.dumps(shown))["groups"][2]["group_id"] == 8


def test_ratios_are_those_of_the_stored_log_probabilities() -> None:
    shown = show(ScriptedRun(DictStore(), changed={"trainer_logprobs": 3}).steps(1, 3).close(), 3)
    everywhere = RATIO + 2 / 8
    assert shown["ratios"]["p05"] == shown["ratios"]["p50"] == pytest.approx(everywhere, rel=1e-6)
    assert shown["ratios"]["max"] == pytest.approx(everywhere * 2.718281828, rel=1e-6), "of one token"
    assert [group["ratios"]["max"] == shown["ratios"]["max"] for group in shown["groups"]] == [False, True, False]
    tokens = [sum(group["lengths"]) for group in shown["groups"]]
    means = [group["ratios"]["mean"] for group in shown["groups"]]
    whole = sum(mean * count for mean, count in zip(means, tokens, strict=True)) / sum(tokens)
    assert shown["ratios"]["mean"] == pytest.approx(whole, rel=1e-6)


def test_numbers_and_evaluation_are_those_of_the_new_version() -> None:
    store = ScriptedRun(DictStore()).steps(1, 3).close()
    write_result(store, {"policy_version": 2, "accuracy": 0.25, "prompts": 8, "t": 50.0})
    shown = show(store, 2)
    assert shown["measured"] == {"loss": 0.25, "grad_norm": 0.5}
    assert shown["evaluation"] is not None
    assert shown["evaluation"]["accuracy"] == 0.25
    assert show(store, 3)["evaluation"] is None


def test_a_step_is_shown_with_the_config_of_its_attempt() -> None:
    run = ScriptedRun(DictStore()).steps(1, 3)
    run.resume(training=CONFIG["training"] | {"threads": 2})
    store = run.steps(4, 4).close()
    shown = [show(store, step) for step in (3, 4)]
    expected = [(0, 0, 1), (1, 1, 2)]
    assert [(step["attempt"], step["incarnation"], step["config"]["training"]["threads"]) for step in shown] == expected


def test_failed_and_stale_trajectories_are_not_trained_on() -> None:
    shown = show(ScriptedRun(DictStore(), changed={"failed": 2}).steps(1, 2).close(), 2)
    assert [group["rewards"] for group in shown["groups"]] == [[None, 1.0]] * GROUPS
    assert [group["advantages"] for group in shown["groups"]] == [[None, 0.0]] * GROUPS
    shown = show(ScriptedRun(DictStore(), changed={"stale": 2}).steps(1, 2).close(), 2)
    assert [group["group_id"] for group in shown["groups"]] == [3, 4]
    assert shown["dropped"] == {"stale": MEMBERS}


def test_the_dashboards_address_is_shown_if_known() -> None:
    store = ScriptedRun(DictStore()).steps(1, 1).close()
    shown = show(store, 1, dashboard_url="http://here:8050/")
    assert shown["dashboard"] == "http://here:8050/run/scripted/trajectories?version=1"
    assert show(store, 1)["dashboard"] is None


def test_a_step_that_was_trained_again_is_shown_as_it_was_trained_last() -> None:
    run = ScriptedRun(DictStore()).steps(1, 4)
    run.resume()
    store = run.steps(3, 3, first_group=50).close()
    assert [group["group_id"] for group in show(store, 3)["groups"]] == [50, 51, 52]
    assert (show(store, 2)["incarnation"], show(store, 3)["incarnation"]) == (0, 1)
    with pytest.raises(ReplayError) as raised:
        show(store, 4)
    assert raised.value.expected == "one of 1 to 3"


def test_a_step_of_a_longer_run_takes_hardly_more_reads() -> None:
    def num_gets(steps: int) -> int:
        store = SlowStore(ScriptedRun(DictStore()).steps(1, steps).close().objects)
        show(store, steps // 2)
        return len(store.gets)

    assert num_gets(160) <= num_gets(40) + 24, "the logarithm of the number of records"


def test_a_missing_step_or_run_is_refused() -> None:
    store = ScriptedRun(DictStore()).steps(1, 3).close()
    for step in (0, 4):
        with pytest.raises(ReplayError):
            show(store, step)
    with pytest.raises(ReplayError):
        show(ScriptedRun(DictStore()).close(), 1)
    with pytest.raises(RunMissing):
        show(DictStore(), 1)
