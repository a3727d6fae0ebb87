"""A store in this machine's memory, shared by all of a user's processes until the next boot.

    memory://name/run   ──►  /dev/shm/millrace-<user id>/stores/name/run      files, as in any other folder

Each stage is a process, so a store inside one process could not be shared.
"""

import os
import stat
import tempfile
from pathlib import Path

from storage.errors import StoreDenied
from storage.stores.base import checked_path
from storage.stores.local import LocalStore

SHARED_MEMORY = Path("/dev/shm")


class MemoryStore(LocalStore):
    """`memory://name`: files below a private folder of the user, in shared memory if the machine has it.

    They take memory until they are deleted: `delete_tree`, or `rm -r` of the store's `root`. `memory://` alone is the
    parent of all of the user's stores. Raises BadName for a name that leaves that folder.
    """

    def __init__(self, name: str) -> None:
        name = name.strip("/")
        stores = memory_folder() / "stores"
        super().__init__(stores / checked_path(name) if name else stores, fsync=False)
        self.url = f"memory://{name}"


def memory_folder() -> Path:
    """This user's private folder in memory, created if needed; a temporary folder on machines without shared memory.

    Raises StoreDenied if another user owns its name.
    """
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    folder = (SHARED_MEMORY if usable else Path(tempfile.gettempdir())) / f"millrace-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        # The parent is writable by everyone: an existing folder may belong to another user, or be a link to theirs.
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise StoreDenied("not a folder of this user's", file=folder) from None
    return folder
