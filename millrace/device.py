"""The device that a run's trainer and generators share: at any time it is the trainer's, or the generators'.

    generator 0   ══ rollouts of v ══╗ asleep ·················╔══ rollouts of v + 1 ══╗
    generator 1   ══ rollouts of v ═════╗ asleep ··············╔══ rollouts of v + 1 ═════╗
                                        ▼                      ▲ v + 1 is there            ▼
    trainer       asleep ···············╔══ step, hand-over ═══╝ asleep ···················╔══ step ══
                                        a step's worth is scored, and the device is free

Whose turn it is, a lock of the operating system decides: generators hold it together, the trainer alone. The kernel
takes it from a process that dies, so there is nothing to clean up, and no sign of life has to be believed. Nobody
keeps it without work for it: generators have work until all rollouts of their version are committed, the trainer from
a step's worth of groups until its version is handed over. So whoever waits for it waits for work that ends.
"""

import fcntl
from pathlib import Path


class Device:
    """A device that a process shares with nobody: it always has it."""

    shared = False
    held = True

    def take(self) -> bool:
        """Whether the device is this process's now. Waits for nothing."""
        return self.held

    def give_back(self) -> None:
        """Lets the others have it."""


class SharedDevice(Device):
    """A device whose processes know each other by `file`, on the host of all of them.

    `alone`: whether this process wants it for itself, as a trainer does, or together with all others that don't.
    """

    shared = True

    def __init__(self, file: Path, *, alone: bool) -> None:
        self.held = False
        self._file = file.open("ab")
        self._how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH

    def take(self) -> bool:
        if not self.held:
            try:
                fcntl.flock(self._file, self._how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.held = True
        return True

    def give_back(self) -> None:
        # The lock is the open file's: a child that was forked meanwhile, and holds it after us, lets go of it too.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.held = False


def open_device(handover: Path, *, colocated: bool, alone: bool) -> Device:
    """The device of a process whose run has its shared memory in `handover`; not taken yet if it is shared."""
    return SharedDevice(handover / "device", alone=alone) if colocated else Device()
