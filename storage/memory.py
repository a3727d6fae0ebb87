"""A store in this machine's memory: gone at the next boot, shared by all of a user's processes until then.

    memory://name/run   ──►  /dev/shm/millrace-<user id>/stores/name/run      files, as in any other folder

Stages are processes of their own, so a store inside one process would join none of them.
"""

import os
import stat
import tempfile
from pathlib import Path

from storage.errors import StoreDenied
from storage.local import LocalStore
from storage.store import checked_path

_SHARED_MEMORY = Path("/dev/shm")


class MemoryStore(LocalStore):
    """`memory://name`: files below a folder of this user's alone, in shared memory where the machine has it.

    What lies here takes memory until it is deleted: `delete_tree`, or `rm -r` of its `root`. `memory://` alone holds
    all of the user's. Raises BadName for a name that leaves that folder.
    """

    def __init__(self, name: str) -> None:
        name = name.strip("/")
        stores = memory_folder() / "stores"
        super().__init__(stores / checked_path(name) if name else stores, fsync=False)
        self.url = f"memory://{name}"


def memory_folder() -> Path:
    """This user's own folder in memory, made if need be; among the temporary files where there is no memory disk.

    Raises StoreDenied where somebody else has taken its name.
    """
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    folder = (_SHARED_MEMORY if usable else Path(tempfile.gettempdir())) / f"millrace-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        # Everybody may write where it lies: what is there already may be another user's, or point to another user's.
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise StoreDenied(f"{folder} is not a folder of this user's") from None
    return folder
