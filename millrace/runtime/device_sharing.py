"""Trainer and generators on one device: it belongs either to the trainer or to all generators.

    generator 0   ══ rollouts of v ══╗ asleep ·················╔══ rollouts of v + 1 ══╗
    generator 1   ══ rollouts of v ═════╗ asleep ··············╔══ rollouts of v + 1 ═════╗
                                        ▼                      ▲ v + 1 is there            ▼
    trainer       asleep ···············╔══ step, hand-over ═══╝ asleep ···················╔══ step ══
                                        a step's groups are scored, and the device is free

A file lock decides which side may use the device: generators share it, the trainer holds it alone. The kernel releases
the lock of a process that dies. Generators have work until all trajectories of their version are committed, the trainer
from a full step of groups until its version is handed over. So every wait for the device ends.
"""

import fcntl
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from millrace.runtime.stage import Stage


class Device:
    """A device that processes of one host share through a lock on `file`; None: only this process uses it.

    `alone`: whether this process needs it alone, as a trainer does, or shares it with others, as a generator does. A
    shared device is not taken yet, any other is always held.
    """

    def __init__(self, file: Path | None = None, *, alone: bool = True) -> None:
        self._file = None if file is None else file.open("ab")
        self._lock = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self.shared = file is not None
        self.held = not self.shared

    def take(self) -> bool:
        """Takes the device if it is free. Returns whether this process holds it; never waits."""
        if self._file is not None and not self.held:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, self._lock | fcntl.LOCK_NB)
                self.held = True
        return self.held

    def give_back(self) -> None:
        """Releases a shared device to others."""
        if self._file is not None:
            # The lock belongs to the open file description: unlocking also releases it in forked children.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self.held = False


class Sleeper(Protocol):
    """The owner of the device's memory, trainer or engine: `sleep` frees it, `wake` restores it as it was."""

    policy_version: int

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class DeviceTurns:
    """Wakes `sleeper` when it gets the device, and puts it to sleep before releasing it. An unshared one never sleeps.

    begin ─► free? ──no──► False: try again later
               │ yes
               └─► wake ─► True, also from further calls ─► work ─► end ─► sleep ─► the device is free
    """

    def __init__(self, stage: Stage, device: Device, sleeper: Sleeper) -> None:
        self._stage = stage
        self._device = device
        self._sleeper = sleeper
        if device.shared:
            self._publish(None)

    def begin(self) -> bool:
        """Returns whether this stage holds the device and is awake. Never waits for others."""
        if self._device.held:
            return True
        if not self._device.take():
            return False
        with self._stage.busy("wake"):
            self._sleeper.wake()
        self._publish(None)
        return True

    def end(self) -> None:
        """Sleeps and releases a shared device. Nothing may be in flight."""
        if not self._device.shared or not self._device.held:
            return
        with self._stage.busy("sleep"):
            self._sleeper.sleep()
        self._device.give_back()
        self._publish(self._sleeper.policy_version)

    def _publish(self, asleep_since_version: int | None) -> None:
        self._stage.update_status(now=True, asleep_since_version=asleep_since_version)
