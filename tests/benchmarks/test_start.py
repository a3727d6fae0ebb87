"""The arithmetic of the report; the campaigns themselves are run by hand."""

import subprocess
import sys
import time

from benchmarks.start.__main__ import report
from benchmarks.start.campaign import Campaign, Moment
from benchmarks.start.processes import ProcessTree, Sampled


def _campaign(first_step: float, *, listens: bool = True) -> Campaign:
    def moment(process: str, what: str, seconds: float) -> Moment:
        return Moment(process=process, what=what, seconds=seconds, since_last=seconds / 2, cpu_seconds=seconds / 4)

    moments = [moment("controller", "starts", 0.0), moment("train-0", "first step done", first_step)]
    if listens:
        moments.append(moment("private server", "listens", 3.0))
    cpu = {"controller": 2.0, "train-0": first_step / 2}
    return Campaign(moments=moments, cpu_seconds=cpu, pss_bytes={"controller": 100, "train-0": int(first_step)})


def test_the_report_holds_the_medians_of_what_every_campaign_reached() -> None:
    result = report([_campaign(10.0), _campaign(30.0, listens=False), _campaign(12.0)])
    assert result["first_step_seconds"] == {"median": 12.0, "each": [10.0, 30.0, 12.0]}
    assert result["cpu_seconds"]["median"] == 2.0 + 6.0
    assert result["pss_bytes"] == {"median": 112, "each": [110, 130, 112]}
    assert result["processes"]["train-0"] == {"cpu_seconds": 6.0, "pss_bytes": 12}
    assert [(moment["process"], moment["what"], moment["seconds"]) for moment in result["moments"]] == [
        ("controller", "starts", 0.0),
        ("train-0", "first step done", 12.0),
    ]


def test_processor_time_is_that_of_the_last_sample() -> None:
    sampled = Sampled(pid=1, command=[], started=9.0, times=[10.0, 11.0], cpu_seconds=[0.5, 0.75])
    assert [sampled.cpu_until(t) for t in (9.5, 10.0, 10.9, 12.0)] == [0.0, 0.5, 0.5, 0.75]


def test_a_process_and_its_children_are_seen_with_their_start_and_memory() -> None:
    called = time.time()
    # Both end with their standard input.
    command = [sys.executable, "-c", "import subprocess; subprocess.run(['cat'])"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as process,
        ProcessTree(process.pid) as tree,
    ):
        while not any(sampled.command == ["cat"] for sampled in tree.found.values()):
            time.sleep(0.02)
        sizes = tree.pss_bytes()
        assert process.stdin is not None
        process.stdin.close()
    parent, child = sorted(tree.found.values(), key=lambda sampled: sampled.started)
    assert (parent.pid, child.command) == (process.pid, ["cat"])
    # The kernel counts in steps of 0.01 s.
    assert called - 0.02 <= parent.started <= child.started <= time.time()
    assert sizes[parent.pid] > sizes[child.pid] > 0
