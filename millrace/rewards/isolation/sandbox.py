"""The sandbox of a worker, which may compute, read files, and answer.

The filter is the kernel's seccomp, built by libseccomp, which knows every processor's system calls by name; Debian and
Ubuntu always have it. It allows the calls of a list and refuses all others with PermissionError: a worker has no
network, starts no process, sends no signal, writes no file and can't look into other processes. It can still read the
files that the scorer's user can read. A hole in the kernel is a hole in the sandbox.

Workers run as the scorer's user, who may read the environment and memory of all his processes under /proc:

    the scorer, the fork server ──hide()────────────► not dumpable: closed to the user's other processes
    worker                      ──look_at_nobody()──► a Landlock domain: every process outside of it is closed
"""

import ctypes
import os
import resource
import struct
import tempfile
from dataclasses import dataclass

from millrace.errors import InputError
from millrace.forking.process_settings import die_with_parent

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_EQUAL, _MASKED = 4, 7
_NO_SUCH_CALL = -1
_CLONE_THREAD = 0x00010000
_CAPABILITIES_VERSION = 0x20080522
_OPEN_FILES = 64
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_INSTRUCTION_BYTES = 8
_LONGEST_STATM = 256
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""System calls, the same on every processor."""
_MAKE_SYMLINK = struct.pack("Q", 1 << 12)
"""A ruleset has to handle something. This is forbidden to workers anyway."""

_COMPUTE = """
    arch_prctl brk clock_getres clock_gettime clock_nanosleep close close_range dup dup2 dup3 epoll_create1 epoll_ctl
    epoll_pwait epoll_pwait2 epoll_wait eventfd2 exit exit_group fadvise64 futex get_mempolicy getcpu getcwd getegid
    geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrusage getsid
    gettid gettimeofday getuid madvise membarrier mlock mmap mprotect mremap munlock munmap nanosleep pause pipe pipe2
    poll ppoll pselect6 restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
    rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler
    sched_yield select set_robust_list set_tid_address sigaltstack socketpair sysinfo time times uname wait4 waitid
    alarm getitimer setitimer timer_create timer_delete timer_getoverrun timer_gettime timer_settime
    """
_READ = """
    access chdir faccessat faccessat2 fchdir fstat fstatfs getdents getdents64 lseek lstat newfstatat pread64 preadv
    read readahead readlink readlinkat readv stat statfs statx
    """
_ANSWER = "getsockname getsockopt recvfrom recvmsg sendmsg sendto setsockopt shutdown write writev"
"""Over open descriptors: its socket, and pairs of sockets within the process."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TERMINAL_QUERIES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: not those that put words into a terminal."""
_DESCRIPTOR_QUERIES = (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: not those that have signals sent."""

_SUBJECT = "rewards that run foreign code"
_KEPT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "LANG", "LANGUAGE")
_SET = {
    # Order of sets: a sum of floats over a set must be the same in every process.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # A process that is forked must have one thread only.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of scoring."""

    workers: int = 1
    """Responses scored at once."""
    timeout_seconds: float = 10.0
    """Per response, by the clock."""
    memory_mb: int = 1024
    """Per worker, beyond what loading the rewards took, MiB."""


class _Comparison(ctypes.Structure):
    _fields_ = (("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class _Program(ctypes.Structure):
    """The kernel's `sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def scrubbed(environment: dict[str, str]) -> dict[str, str]:
    """The part of the environment that workers may see: no keys, addresses or secrets."""
    return {name: value for name, value in environment.items() if name in _KEPT or name.startswith("LC_")} | _SET


def hide() -> None:
    """Close this process's environment and memory to the user's other processes, for good.

    It also leaves no core dump, and only root can attach a debugger. A program that it starts is open again.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def look_at_nobody() -> bool:
    """Close the environment, memory and open files of every other process to this one, for good.

    Returns False if the kernel has no Landlock (Linux 5.13). Then only those of hidden processes are closed.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ruleset = _libc.syscall(_CREATE_RULESET, _MAKE_SYMLINK, ctypes.c_size_t(len(_MAKE_SYMLINK)), 0)
    if ruleset < 0:
        return False
    try:
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


class Sandbox:
    """Built once by the fork server, entered by each worker. Raises InputError without libseccomp."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        try:
            self._library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        except OSError as error:
            read = f"libseccomp.so.2 can't be loaded ({error})"
            raise InputError(read, file=_SUBJECT, expected="Linux with the package libseccomp2") from error
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._filter = ctypes.c_void_p(self._library.seccomp_init(_ERRNO | _EPERM))
        self._add_rules()
        # `seccomp_load` would compile the filter anew in each worker, a millisecond each time.
        with tempfile.TemporaryFile(buffering=0) as file:
            _check(self._library.seccomp_export_bpf(self._filter, file.fileno()), "seccomp_export_bpf")
            file.seek(0)
            self._program = file.read()

    def enter(self, parent: int) -> None:
        """Restrict the calling process for good. It is killed when the process `parent`, which forked it, ends."""
        die_with_parent(parent)
        _limit_resources(self._limits)
        # A scorer may run as root, as in many containers; its workers must not have root's powers.
        _check(_libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()), "capset")
        look_at_nobody()
        program = _Program(len(self._program) // _INSTRUCTION_BYTES, self._program)
        _check(_libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0), "prctl for seccomp")

    def try_out(self) -> None:
        """Enter it in a child. Raises InputError if the kernel refuses, as in some containers."""
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                self.enter(server)
            except OSError as error:
                os._exit(error.errno or 1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            reason = os.strerror(os.waitstatus_to_exitcode(status))
            raise InputError(f"Linux's seccomp refuses ({reason})", file=_SUBJECT, expected="a kernel with seccomp")

    def _add_rules(self) -> None:
        for name in f"{_COMPUTE} {_READ} {_ANSWER}".split():
            self._rule(_ALLOW, name)
        for name, flags in (("open", 1), ("openat", 2)):
            self._rule(_ALLOW, name, flags, _MASKED, _WRITING, 0)
        # A thread is a clone that shares everything. The flags of clone3 lie in memory, out of a filter's sight; where
        # it does not exist, glibc takes clone.
        self._rule(_ALLOW, "clone", 0, _MASKED, _CLONE_THREAD, _CLONE_THREAD)
        self._rule(_ERRNO | _ENOSYS, "clone3")
        # A process's own limits only; without capabilities they can only be lowered.
        self._rule(_ALLOW, "prlimit64", 0, _EQUAL, 0)
        for name, argument, allowed in (("ioctl", 1, _TERMINAL_QUERIES), ("fcntl", 1, _DESCRIPTOR_QUERIES)):
            for value in allowed:
                self._rule(_ALLOW, name, argument, _EQUAL, value)

    def _rule(self, action: int, name: str, *comparison: int) -> None:
        """`comparison`: index of an argument, operator, and one or two values; none for any arguments."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        # An older library does not know the newest names, and so does not allow them.
        if number != _NO_SUCH_CALL:
            array = (_Comparison * 1)(_Comparison(*comparison))
            code = self._library.seccomp_rule_add_array(self._filter, action, number, len(comparison) > 0, array)
            _check(code, f"seccomp_rule_add for {name}")


def _limit_resources(limits: Limits) -> None:
    # `open` makes a forked process copy many pages of the interpreter.
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    mapped = int(os.read(descriptor, _LONGEST_STATM).split()[0]) * resource.getpagesize()
    os.close(descriptor)
    # The pool kills a worker that has taken memory_mb. This limit is for one large allocation. It is twice as high,
    # since a verifier may catch the MemoryError and call the answer wrong.
    most = mapped + 2 * limits.memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


def _check(code: int, what: str) -> None:
    if code:
        raise OSError(-code if code < -1 else ctypes.get_errno(), f"{what} failed")
