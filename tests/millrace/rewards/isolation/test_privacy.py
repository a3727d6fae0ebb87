"""What a worker may learn about other processes of its user.

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
from configs.scoring import ScoringConfig
from millrace.rewards.factory import make_reward
from millrace.rewards.scorer import Scorer
from millrace.types import Prompt

prompt = Prompt(prompt_id="p", text="?", answer="", source="test")
reward = make_reward(ScoringConfig(reward="tests.support.rewards.own_rewards:looks_into"))
with Scorer(reward) as scorer:
    for timed in scorer.score_many([(prompt, name) for name in ("stat", "environ", "maps", "mem")]):
        print(timed.reward, timed.error)
"""

# A parent that hides itself or doesn't, and a child that looks at it, or may look at nobody.
LOOKER = """
import os, sys
from millrace.rewards.isolation.sandbox import hide, look_at_nobody

parent, (hides, looks) = os.getpid(), sys.argv[1]
if hides == "h":
    hide()
if os.fork() == 0:
    if looks == "n" and not look_at_nobody():
        print("no Landlock")
        os._exit(0)
    try:
        print(open(f"/proc/{parent}/environ").read().count("WHAT_IS_HIDDEN"))
    except PermissionError:
        print("denied")
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


def printed(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_CAPABILITIES + script, *arguments],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    ).stdout


def test_a_worker_reads_neither_environment_nor_memory_of_the_processes_before_it() -> None:
    assert printed(SCORER).splitlines() == ["2.0 None", "0.0 None", "0.0 None", "0.0 None"]


@pytest.mark.parametrize(
    ("does", "found"),
    [("-l", ["1"]), ("hl", ["denied"]), ("-n", ["denied", "no Landlock"])],
    ids=["nothing", "the one hides", "the other may look at nobody"],
)
def test_the_environment_of_a_process_is_open_to_its_user_unless_either_is_restricted(
    does: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHAT_IS_HIDDEN", "secret")
    assert printed(LOOKER, does).strip() in found
