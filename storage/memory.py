"""A store in this machine's memory: gone at the next boot, shared by all of a user's processes until then."""

import os
import tempfile
from pathlib import Path

from storage.local import LocalStore

_SHARED_MEMORY = Path("/dev/shm")


class MemoryStore(LocalStore):
    """`memory://name`: files below a folder of this user's alone, in shared memory where the machine has it.

    Stages are processes of their own, so a store inside one process would join none of them. What lies here takes
    memory until it is deleted.
    """

    def __init__(self, name: str) -> None:
        name = name.strip("/")
        super().__init__(memory_folder() / "stores" / name if name else memory_folder() / "stores", fsync=False)
        self.url = f"memory://{name}"


def memory_folder() -> Path:
    """This user's own folder in memory; among the temporary files where the machine has no such place."""
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    folder = (_SHARED_MEMORY if usable else Path(tempfile.gettempdir())) / f"millrace-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder
