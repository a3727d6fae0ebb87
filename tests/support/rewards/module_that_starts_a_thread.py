"""A reward whose import starts a thread, which a fork would lose."""

import threading
import time
from typing import Any

_thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
_thread.start()


def lives(prompt: str, response: str, answer: str, meta: dict[str, Any]) -> bool:
    """Whether the thread is there where this is judged."""
    return _thread.is_alive()
