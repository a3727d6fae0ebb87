"""Campaigns that are stopped, lose their controller or get a second one. Killed stages: see the kill matrix."""

import re
import signal
import time

import psutil
import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced, await_end, send, stages_of, wait_until

from benchmarks.sleeping.pace import VARIABLE, LongTail, Pace
from storage import layout
from storage.checkpoints import read_latest
from storage.schema import TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign

# Long enough that no test machine finishes it before it is interrupted.
ENDLESS = {"training.max_steps": 100_000}


def wait_for_step(millrace: Millrace, run_id: str, step: int) -> None:
    wait_until(
        lambda: millrace.status_record(run_id, "train-0").get("policy_version", -1) >= step, f"step {step} of {run_id}"
    )


@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.extended)]
)
def test_a_stopped_campaign_drains_says_so_and_can_be_resumed_with_the_ledger_exact(
    millrace: Millrace, signal_number: signal.Signals, code: int
) -> None:
    process = millrace.start(*millrace.campaign("stopped", **ENDLESS))
    wait_for_step(millrace, "stopped", 3)
    ended = send(process, signal_number)
    assert ended.code == code, ended.output
    assert "--run-id stopped --resume" in ended.output
    assert stages_of(millrace.root / "stopped") == []
    stopped = millrace.status("stopped")
    assert stopped["state"] == "stopped"
    assert_balanced(stopped)
    checkpoint = read_latest(open_store(str(millrace.root / "stopped")))
    assert checkpoint is not None
    assert checkpoint.step == stopped["steps"], "what was trained is checkpointed"

    more = {"training.max_steps": stopped["steps"] + 4}
    ended = millrace.run(*millrace.campaign("stopped", "--resume", **more))
    assert ended.code == 0, ended.output
    summary = millrace.summary("stopped")
    assert_balanced(summary)
    assert summary["steps"] == stopped["steps"] + 4
    assert summary["ledger"]["trained"]["rollouts"] == summary["steps"] * 16 * 8
    assert summary["ledger"]["generated"]["rollouts"] > stopped["ledger"]["generated"]["rollouts"]
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"] == 2


@pytest.mark.extended
def test_a_campaign_that_is_stopped_within_a_long_step_loses_no_step(millrace: Millrace) -> None:
    pace = Pace(generate=0.0, score=0.0, train=25.0, rollouts_per_step=8)
    millrace.environment[VARIABLE] = pace.to_json()
    settings = {
        "generation.group_size": 4,
        "generation.groups_per_batch": 2,
        "training.groups_per_step": 2,
        "training.checkpoint_every": 1000,
        "training.checkpoint_minutes": None,
        **ENDLESS,
    }
    process = millrace.start(*millrace.campaign("long", **settings), module="benchmarks.sleeping.campaign")

    def trained_once() -> bool:
        assert process.poll() is None, await_end(process, 60).output
        trained: int = millrace.status_record("long", "train-0").get("policy_version", 0)
        return trained >= 1

    wait_until(trained_once, "its first step", 300)
    # Its groups are there already, so it is well within its second step by then, and no checkpoint is due.
    time.sleep(5)
    ended = send(process, signal.SIGINT)
    assert ended.code == 130, ended.output
    assert "stopping: each stage finishes and commits what it is doing" in ended.output
    checkpoint = read_latest(open_store(str(millrace.root / "long")))
    assert checkpoint is not None
    assert checkpoint.step == 2, "the step that took longer than a stage once had to drain"
    assert_balanced(millrace.status("long"))


@pytest.mark.extended
def test_attempts_shorter_than_a_response_still_get_on_and_no_token_is_sampled_twice(millrace: Millrace) -> None:
    # Eight responses of 512 tokens, which take 6 s.
    tail = LongTail(sigma=0.0, mean_tokens=512, seconds_per_token=6 / 512, places=8)
    pace = Pace(generate=0.0, score=0.0, train=0.1, rollouts_per_step=8, long_tail=tail)
    millrace.environment[VARIABLE] = pace.to_json()
    settings = {
        # Its own start model, whose context has room for them.
        "model.path": None,
        "generation.group_size": 4,
        "generation.groups_per_batch": 2,
        "generation.max_new_tokens": 512,
        "training.groups_per_step": 2,
        "training.max_tokens_per_microbatch": 1024,
        "training.max_steps": 1,
    }
    arguments = millrace.campaign("short", "--resume", "latest", **settings)
    sleeping = "benchmarks.sleeping.campaign"
    carried_over = []
    for tokens in (8 * 100, 8 * 250):
        process = millrace.start(*arguments, module=sleeping)
        wait_until(
            lambda: millrace.status_record("short", "generate-0").get("tokens_in_flight", 0) >= tokens,  # noqa: B023
            f"{tokens} tokens in flight",
        )
        ended = send(process, signal.SIGTERM)
        assert ended.code == 143, ended.output
        found = re.search(r"stopped, with (\d+) tokens of unfinished responses stored", ended.output)
        assert found is not None, ended.output
        carried_over.append(int(found[1]))
        assert millrace.status("short")["ledger"]["generated"]["tokens"] == 0
    ended = millrace.run(*arguments, module=sleeping)
    assert ended.code == 0, ended.output
    summary = millrace.summary("short")
    assert (summary["state"], summary["steps"]) == ("finished", 1)
    assert_balanced(summary)
    assert summary["ledger"]["generated_twice"] == {"tokens": 0}
    assert millrace.status_record("short", "generate-0")["tokens_continued"] == sum(carried_over)
    reader = StreamReader(open_store(str(millrace.root / "short")), layout.trajectories(0), TRAJECTORY)
    lengths = [len(tokens) for part in iter(reader.next, None) for tokens in part.table["response_tokens"].to_pylist()]
    assert set(lengths) == {512}


@pytest.mark.extended
def test_a_campaign_can_be_stopped_before_it_trains(millrace: Millrace) -> None:
    process = millrace.start(
        *millrace.campaign("early", **{**ENDLESS, **FROM_SCRATCH, "model.warm_start_steps": 100_000})
    )
    wait_until(lambda: bool(millrace.status_record("early", "bootstrap-0")), "the bootstrap")
    ended = send(process, signal.SIGTERM)
    assert ended.code == 143, ended.output
    assert stages_of(millrace.root / "early") == []


@pytest.mark.extended
def test_a_killed_controller_leaves_no_stage_behind_and_its_run_can_be_resumed(millrace_alone: Millrace) -> None:
    process = millrace_alone.start(*millrace_alone.campaign("orphan", **ENDLESS))
    wait_for_step(millrace_alone, "orphan", 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5, "four stages and the private server"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    steps = millrace_alone.status("orphan")["steps"]
    ended = millrace_alone.run(*millrace_alone.campaign("orphan", "--resume", **{"training.max_steps": steps + 2}))
    assert ended.code == 0, ended.output
    assert_balanced(millrace_alone.summary("orphan"))


@pytest.mark.extended
def test_a_run_that_is_resumed_elsewhere_is_given_up_by_its_first_controller(millrace: Millrace) -> None:
    first = millrace.start(*millrace.campaign("contested", **ENDLESS))
    wait_for_step(millrace, "contested", 3)
    second = millrace.start(*millrace.campaign("contested", "--resume", **ENDLESS))
    ended = await_end(first, 200)
    assert ended.code == 3, ended.output
    assert "took over" in ended.output
    wait_until(
        lambda: (
            millrace.status_record("contested", "train-0").get("attempt") == 1
            and millrace.status_record("contested", "train-0")["policy_version"] >= 4
        ),
        "the second controller to train",
    )
    ended = send(second, signal.SIGTERM)
    assert ended.code == 143, ended.output
    assert_balanced(millrace.status("contested"))
