"""Campaigns that are stopped, lose their controller or get a second one. Killed stages: see the kill matrix."""

import re
import signal
import time

import psutil
import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced, await_end, send, stages_of, wait_until
from support.streams.rows import read_rows

from benchmarks.sleeping.pace import SleepingPace
from storage import layout
from storage.checkpoints import read_latest
from storage.schema import TRAJECTORY

pytestmark = pytest.mark.campaign

# Long enough that no test machine finishes it before it is interrupted.
ENDLESS = {"training.max_steps": 100_000}


def checkpointed_step(millrace: Millrace, run_id: str) -> int:
    checkpoint = read_latest(millrace.store(run_id))
    assert checkpoint is not None
    return checkpoint.step


@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.extended)]
)
def test_a_stopped_campaign_drains_says_so_and_is_resumed_with_an_exact_ledger(
    millrace: Millrace, signal_number: signal.Signals, code: int
) -> None:
    process = millrace.start(*millrace.campaign("stopped", **ENDLESS))
    millrace.wait_for_version("stopped", 3)
    ended = send(process, signal_number)
    assert ended.code == code, ended.output
    again = ended.output.rpartition("continue with:\n")[2].splitlines()[0]
    assert "--run-id stopped " in again
    assert again.endswith(" --resume")
    assert stages_of(millrace.root / "stopped") == []
    stopped = millrace.status("stopped")
    assert stopped["state"] == "stopped"
    assert_balanced(stopped)
    assert checkpointed_step(millrace, "stopped") == stopped["steps"], "every step is checkpointed"

    summary = millrace.finish("stopped", "--resume", **{"training.max_steps": stopped["steps"] + 4})
    assert summary["steps"] == stopped["steps"] + 4
    assert summary["ledger"]["trained"]["rollouts"] == summary["steps"] * 16 * 8
    assert summary["ledger"]["generated"]["rollouts"] > stopped["ledger"]["generated"]["rollouts"]
    assert summary["staleness"]["mean"] <= summary["staleness"]["bound"] == 2


@pytest.mark.extended
def test_a_campaign_that_is_stopped_within_a_long_step_loses_no_step(millrace: Millrace) -> None:
    millrace.environment |= SleepingPace(slots=8, train_seconds=25.0).to_environment()
    settings = {
        "generation.group_size": 4,
        "generation.groups_per_batch": 2,
        "training.groups_per_step": 2,
        "training.checkpoint_every": 1000,
        **ENDLESS,
    }
    process = millrace.start(*millrace.campaign("long", **settings), module="benchmarks.sleeping.campaign")

    def trained_once() -> bool:
        assert process.poll() is None, await_end(process, 60).output
        return millrace.version("long") >= 1

    wait_until(trained_once, "its first step", 300)
    # Its groups have arrived, so it is well within its second step by then, and no checkpoint is due.
    time.sleep(5)
    ended = send(process, signal.SIGINT)
    assert ended.code == 130, ended.output
    assert "stopping: each stage finishes and commits what it is doing" in ended.output
    assert checkpointed_step(millrace, "long") == 2, "the step that took longer than a stage once had to drain"
    assert_balanced(millrace.status("long"))


@pytest.mark.extended
def test_attempts_shorter_than_a_response_make_progress_and_sample_no_token_twice(millrace: Millrace) -> None:
    # Eight responses of 512 tokens, which take 6 s.
    pace = SleepingPace(mean_tokens=512, seconds_per_token=6 / 512, slots=8, train_seconds=0.1)
    millrace.environment |= pace.to_environment()
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
        stored = re.search(r"stopped, with (\d+) tokens of unfinished responses stored", ended.output)
        assert stored is not None, ended.output
        carried_over.append(int(stored[1]))
        assert millrace.status("short")["ledger"]["generated"]["tokens"] == 0
    millrace.run(*arguments, module=sleeping).expect_success()
    summary = millrace.summary("short")
    assert (summary["state"], summary["steps"]) == ("finished", 1)
    assert_balanced(summary)
    assert summary["ledger"]["generated_twice"] == {"tokens": 0}
    assert millrace.status_record("short", "generate-0")["tokens_continued"] == sum(carried_over)
    rows = read_rows(millrace.store("short"), layout.trajectories(0), TRAJECTORY)
    assert {len(row["response_tokens"]) for row in rows} == {512}


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
    millrace_alone.wait_for_version("orphan", 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 5, "four stages and the private server"
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    steps = millrace_alone.status("orphan")["steps"]
    millrace_alone.finish("orphan", "--resume", **{"training.max_steps": steps + 2})


@pytest.mark.extended
def test_a_run_that_is_resumed_elsewhere_is_given_up_by_its_first_controller(millrace: Millrace) -> None:
    first = millrace.start(*millrace.campaign("contested", **ENDLESS))
    millrace.wait_for_version("contested", 3)
    second = millrace.start(*millrace.campaign("contested", "--resume", **ENDLESS))
    ended = await_end(first, 200)
    assert ended.code == 3, ended.output
    assert "took over" in ended.output
    wait_until(lambda: millrace.status_record("contested", "train-0").get("attempt") == 1, "the second trainer")
    millrace.wait_for_version("contested", 4)
    ended = send(second, signal.SIGTERM)
    assert ended.code == 143, ended.output
    assert_balanced(millrace.status("contested"))
