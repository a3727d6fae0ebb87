"""Streams and events of a device that does all work at once and in order, in place of torch.cuda's."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing to note."""

    def wait(self, *_: Any) -> None:
        """Returns at once."""

    synchronize = wait

    def query(self) -> bool:
        """It has happened."""
        return True


class Stream:
    """A queue that is always empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Returns at once."""

    wait_event = synchronize = wait_stream

    def record_event(self, *_: Any) -> Event:
        """An event that has happened."""
        return Event()


def cuda_streams() -> AbstractContextManager[Any]:
    """For the `with` block, torch.cuda answers as with one device that never has work queued."""

    def nothing(*_: Any) -> None:
        pass

    return patch.multiple(
        torch.cuda,
        Event=Event,
        Stream=Stream,
        current_stream=lambda *_: Stream(),
        stream=lambda _: nullcontext(),
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_device_capability=lambda *_: (9, 0),
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
    )
