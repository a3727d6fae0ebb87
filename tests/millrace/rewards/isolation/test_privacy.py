"""The secrets of a user's other processes, which no worker may read.

The scorer of these tests has no capabilities, as one that is not root: otherwise the kernel would protect it anyway.
"""

import subprocess
import sys

import pytest

WITHOUT_CAPABILITIES = """
import ctypes
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
"""

SCORER = """
from configs.task import ScoringConfig
from millrace.rewards.factory import make_reward
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

prompt = Prompt(prompt_id="p", text="?", answer="", source="test")
reward = make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:looks_into"))
with Scorer({"default": reward}) as scorer:
    for score in scorer.score_many([("default", prompt, name) for name in ("stat", "environ", "maps", "mem")]):
        print(score.reward, score.error)
"""

# A parent that hides itself or not, and a child that reads its environment, restricted or not.
READER = """
import os, sys
from millrace.rewards.isolation.sandbox import hide, look_at_nobody

parent = os.getpid()
if "hide" in sys.argv:
    hide()
if os.fork() == 0:
    if "restrict" in sys.argv and not look_at_nobody():
        print("no Landlock")
        os._exit(0)
    try:
        print(open(f"/proc/{parent}/environ").read().count("HIDDEN_NAME"))
    except PermissionError:
        print("denied")
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


def printed(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", WITHOUT_CAPABILITIES + script, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout


def test_a_worker_reads_neither_environment_nor_memory_of_its_ancestors() -> None:
    assert printed(SCORER).splitlines() == ["2.0 None", "0.0 None", "0.0 None", "0.0 None"]


@pytest.mark.parametrize(
    ("arguments", "results"),
    [([], ["1"]), (["hide"], ["denied"]), (["restrict"], ["denied", "no Landlock"])],
    ids=["neither", "the parent hides", "the child is restricted"],
)
def test_hiding_or_restricting_closes_the_environment_of_a_process(
    arguments: list[str], results: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN_NAME", "secret")
    assert printed(READER, *arguments).strip() in results
