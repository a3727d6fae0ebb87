"""A stranger's checkout: the tracked files in a new folder, and the environment that `make install` makes there.

Commands run as a user who is not root, with a new home folder, behind a proxy that leads nowhere.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
_NOBODY = 65534
_NO_PROXY = "http://127.0.0.1:9"
_LIMIT_SECONDS = 900
SHORT = "--set training.max_steps=2 training.groups_per_step=4 generation.groups_per_batch=4 prompts.num_eval=16"
"""Makes a campaign of a few seconds."""
_INSTALLER = ("PIP_", "UV_", "SSL_", "REQUESTS_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
"""Variables that an installer may need: index, certificates and proxy."""


@dataclass(frozen=True, kw_only=True)
class EndedCommand:
    command: str
    code: int
    output: str
    """Standard output and errors."""

    def succeeded(self) -> str:
        """Returns the output. Fails the test if the exit code is not 0, or there is a traceback."""
        assert self.code == 0, f"{self.command} exited with {self.code}:\n{self.output}"
        assert "Traceback" not in self.output, self.output
        return self.output

    def refused(self) -> str:
        """Returns the only line of output. Fails the test unless the exit code is 2."""
        assert self.code == 2, f"{self.command} exited with {self.code}:\n{self.output}"
        lines = self.output.strip().splitlines()
        assert len(lines) == 1, self.output
        return lines[0]


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The stranger's folder."""

    folder: Path
    user: int | None
    """Its owner; None: this process's user."""

    def run(self, command: str, *, installs: bool = False) -> EndedCommand:
        """Runs a shell command there."""
        with self.running(command, installs=installs) as process:
            output, _ = process.communicate(timeout=_LIMIT_SECONDS)
        return EndedCommand(command=command, code=process.returncode, output=output)

    def millrace(self, arguments: str) -> EndedCommand:
        return self.run(f".venv/bin/millrace {arguments}")

    @contextmanager
    def running(self, command: str, *, installs: bool = False) -> Iterator["subprocess.Popen[str]"]:
        """The command as a process, which ends with the block."""
        environment = {
            "PATH": f"{self.folder}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder / "home"),
            "LANG": "C.UTF-8",
        }
        if installs:
            environment |= {name: value for name, value in os.environ.items() if name.startswith(_INSTALLER)}
        else:
            environment |= {"HTTP_PROXY": _NO_PROXY, "HTTPS_PROXY": _NO_PROXY}
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else [],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                # Some have a session of their own, as `script` gives one to what it runs.
                started = psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=60)
                for child in started:
                    with suppress(psutil.NoSuchProcess):
                        child.terminate()

    def write(self, path: str, content: str | bytes) -> None:
        """Writes a file of the stranger's own."""
        (self.folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
        self.own(path)

    def own(self, path: str) -> None:
        """Gives the file or folder at `path` to the stranger."""
        if self.user is not None:
            subprocess.run(["chown", "-R", f"{self.user}:{self.user}", str(self.folder / path)], check=True)


def wait_for_page(url: str, process: "subprocess.Popen[str]") -> None:
    """Waits until `url` answers. Fails the test if `process` ends first."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, process.communicate()[0]
        try:
            with direct.open(url, timeout=10) as answer:
                assert answer.status == 200
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)


def _python_of(user: int) -> str | None:
    """An interpreter that this user may run and that can make environments; None if there is none."""
    fine = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys._base_executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        try:
            ended = subprocess.run([python, "-c", fine], user=user, group=user, extra_groups=[], capture_output=True)
        except OSError:
            continue
        if ended.returncode == 0:
            return python
    return None


@contextmanager
def fresh_checkout() -> Iterator[Checkout]:
    """The tracked files in a new folder, as they are now, with the environment that `make install` makes."""
    python = _python_of(_NOBODY) if os.getuid() == 0 else None
    # Not pytest's own folder, which only its owner may enter.
    folder = Path(tempfile.mkdtemp(prefix="millrace-first-moves-"))
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "home").mkdir()
    made = Checkout(folder=folder, user=None if python is None else _NOBODY)
    made.own(".")
    try:
        made.run(f"make install PYTHON={python or sys._base_executable}", installs=True).succeeded()
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
