"""A stage's turns on the device that it shares: awake it has the device, asleep it holds nothing there.

    begin ─► free? ──no──► False: look again later
               │ yes
               └─► wake ─► True, at every look ─► work ─► end ─► sleep ─► the others'

The sign of life says since which version a stage is asleep. That is for people: nothing is decided from it.
"""

from typing import Protocol

from millrace.device import Device
from millrace.stages.process import Stage


class Sleeper(Protocol):
    """What lies on the device."""

    policy_version: int

    def sleep(self) -> None:
        """Gives the device's memory back, and keeps what it needs to go on elsewhere."""

    def wake(self) -> None:
        """Goes on as if it had never slept."""


class Turns:
    """Of `sleeper`, which is awake where `device` is held; on a device of the stage's own there is one, without end."""

    def __init__(self, stage: Stage, device: Device, sleeper: Sleeper) -> None:
        self._stage = stage
        self._device = device
        self._sleeper = sleeper
        if device.shared:
            self._tell(None)

    def begin(self) -> bool:
        """Whether the device is this stage's now, and the sleeper awake. Waits for nobody."""
        if self._device.held:
            return True
        if not self._device.take():
            return False
        with self._stage.busy("wake"):
            self._sleeper.wake()
        self._tell(None)
        return True

    def end(self) -> None:
        """Sleeps, if it shares the device and is awake; nothing may be in flight."""
        if not self._device.shared or not self._device.held:
            return
        with self._stage.busy("sleep"):
            self._sleeper.sleep()
        self._device.give_back()
        self._tell(self._sleeper.policy_version)

    def _tell(self, asleep_since_version: int | None) -> None:
        self._stage.progress(now=True, asleep_since_version=asleep_since_version)
