"""Memory stores of this test session; other sessions may run at the same time."""

import shutil
import uuid

from storage.stores.memory import MemoryStore

_SESSION = f"test-{uuid.uuid4().hex}"


def unused_name() -> str:
    """An unused name for a MemoryStore. The store lasts until `remove_stores`, or until it is removed."""
    return f"{_SESSION}/{uuid.uuid4().hex}"


def remove_stores() -> None:
    """Removes every store named by `unused_name` in this process."""
    shutil.rmtree(MemoryStore(_SESSION).root, ignore_errors=True)
