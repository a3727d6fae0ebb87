"""The lock by which trainer and generators take turns: one or many, and free as soon as a process dies."""

import subprocess
import sys
from pathlib import Path

from millrace.device import open_device

HOLD = """
import sys
from pathlib import Path
from millrace.device import open_device
device = open_device(Path(sys.argv[1]), colocated=True, alone=sys.argv[2] == "alone")
print(device.take(), flush=True)
sys.stdin.read()
"""


def test_generators_hold_it_together_and_a_trainer_only_when_all_have_given_it_back(tmp_path: Path) -> None:
    one, two = (open_device(tmp_path, colocated=True, alone=False) for _ in range(2))
    trainer = open_device(tmp_path, colocated=True, alone=True)
    assert one.take()
    assert two.take()
    assert not trainer.take()
    one.give_back()
    assert not trainer.take()
    two.give_back()
    assert trainer.take()
    assert not one.take()
    assert (trainer.held, one.held, two.held) == (True, False, False)
    trainer.give_back()
    assert one.take()


def test_who_has_it_may_take_it_again_and_gives_it_back_once(tmp_path: Path) -> None:
    generator, trainer = (open_device(tmp_path, colocated=True, alone=alone) for alone in (False, True))
    assert generator.take()
    assert generator.take()
    generator.give_back()
    assert trainer.take()


def test_on_a_device_of_their_own_all_have_it_always(tmp_path: Path) -> None:
    devices = [open_device(tmp_path, colocated=False, alone=alone) for alone in (True, True, False)]
    assert all(device.take() and device.held and not device.shared for device in devices)
    devices[0].give_back()
    assert devices[0].held
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_has_given_it_back(tmp_path: Path) -> None:
    device = open_device(tmp_path, colocated=True, alone=False)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "alone"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert not device.take()
    holder.kill()
    holder.communicate()
    assert device.take()
