"""Workers run as the scorer's user, who may read the environment and memory of all his processes under /proc.

the scorer, the fork server ──hide()────────────► not dumpable: closed to the user's other processes
worker                      ──look_at_nobody()──► a Landlock domain: every process outside of it is closed
"""

import ctypes
import os
import struct

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""System calls, the same on every processor."""
_MAKE_SYMLINK = struct.pack("Q", 1 << 12)
"""A ruleset has to handle something. This is forbidden to workers anyway."""

_libc = ctypes.CDLL(None, use_errno=True)


def hide() -> None:
    """Close this process's environment and memory to the user's other processes, for good.

    It also leaves no core dump, and only root can attach a debugger. A program that it starts is open again.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def look_at_nobody() -> bool:
    """Close the environment, memory and open files of every other process to this one, for good.

    Returns False if the kernel has no Landlock (Linux 5.13). Then those of hidden processes alone are closed.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ruleset = _libc.syscall(_CREATE_RULESET, _MAKE_SYMLINK, ctypes.c_size_t(len(_MAKE_SYMLINK)), 0)
    if ruleset < 0:
        return False
    try:
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
