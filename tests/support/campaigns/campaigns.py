"""Campaigns as a person runs them: the real command, real processes, and a separate root folder."""

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from support.stages.failpoints import Failpoints

from storage.checkpoints import load_file, read_latest
from storage.failpoints import FIRED, SPECS
from storage.stores.base import Store
from storage.stores.factory import open_store

REPOSITORY = Path(__file__).parents[3]
PRESET = REPOSITORY / "configs" / "presets" / "tiny-cpu.yaml"
QUICK: dict[str, object] = {
    "model.warm_start_steps": 10,
    "training.max_steps": 6,
    "training.groups_per_step": 16,
    "training.checkpoint_every": 2,
    "generation.groups_per_batch": 8,
    "prompts.num_eval": 32,
}
"""A campaign of a few seconds, too short to learn anything."""
BASE_INSTALL = {"PYTHONPATH": str(Path(__file__).with_name("base_install"))}
"""Environment of a command that finds no more packages than a base install has, as far as imports take long."""
SESSION_FOLDER = "MILLRACE_TEST_SESSION"
"""Names the folder that all workers of a test session share; tests/conftest.py makes and removes it."""
FROM_SCRATCH: dict[str, object] = {"model.path": None, "promotion.margin": 0.0}
"""Settings for a campaign that makes its own start model, and promotes."""
_READS_ALL = "-dac_override,-dac_read_search"
WITHOUT_ROOTS_RIGHTS = ("setpriv", f"--bounding-set={_READS_ALL}", f"--inh-caps={_READS_ALL}")
"""Starts a command of root without root's right to read forbidden files."""


@functools.cache
def start_model() -> Path:
    """Folder of the start model of `QUICK`, made once per test session: the first worker that needs it makes it."""
    folder = Path(os.environ[SESSION_FOLDER])
    made = folder / "start"
    with (folder / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            unfinished = folder / "start.unfinished"
            sets = [f"{key}={json.dumps(value)}" for key, value in QUICK.items()]
            command = [sys.executable, "-m", "support.campaigns.start_model", str(unfinished), *sets]
            subprocess.run(command, cwd=REPOSITORY / "tests", check=True)
            unfinished.rename(made)
    return made


def quick() -> dict[str, object]:
    """`QUICK` with the shared start model and without promotion."""
    return {**QUICK, "model.path": str(start_model()), "promotion.margin": None}


@dataclass(frozen=True)
class Ended:
    code: int
    output: str

    def expect_success(self) -> str:
        assert self.code == 0, self.output
        return self.output

    def expect_refusal(self) -> str:
        """Returns the last line of a command that ended with exit code 2 and without a traceback."""
        assert self.code == 2, self.output
        assert "Traceback" not in self.output, self.output
        return self.output.strip().splitlines()[-1]


class Millrace:
    """The `millrace` command with a separate root folder."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root = root
        self.environment = environment
        self.prefix: tuple[str, ...] = ()
        """Comes before the command's interpreter, such as `WITHOUT_ROOTS_RIGHTS`."""
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, module: str = "flows.cli.main") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kills the controllers that a failed test left running; their stages end with them."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def run(self, *arguments: str, module: str = "flows.cli.main") -> Ended:
        return await_end(self.start(*arguments, module=module), 400)

    def finish(self, run_id: str, *flags: str, **settings: object) -> dict[str, Any]:
        """Runs a quick campaign to its end. Returns its summary, whose ledger balances."""
        self.run(*self.campaign(run_id, *flags, **settings)).expect_success()
        summary = self.summary(run_id)
        assert_balanced(summary)
        return summary

    def arm(self, folder: Path, *specs: str) -> Failpoints:
        """Arms failpoints for the commands that start from now on; `folder` gets their witnesses."""
        armed = Failpoints(folder, *specs)
        environment = armed.environment()
        self.environment |= {name: environment[name] for name in (SPECS, FIRED)}
        return armed

    def store(self, run_id: str) -> Store:
        return open_store(str(self.root / run_id))

    def version(self, run_id: str) -> int:
        """The trainer's policy version; −1 before it has one."""
        version: int = self.status_record(run_id, "train-0").get("policy_version", -1)
        return version

    def wait_for_version(self, run_id: str, version: int, seconds: float = 120, *, every: float = 0.05) -> None:
        wait_until(lambda: self.version(run_id) >= version, f"version {version} of {run_id}", seconds, every=every)

    def campaign(self, run_id: str, *flags: str, root: str | None = None, **settings: object) -> list[str]:
        """The arguments of a quick campaign, in its own root folder or elsewhere."""
        chosen = {**quick(), **settings}
        sets = [part for key, value in chosen.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return ["run", str(PRESET), "--root", root or str(self.root), "--run-id", run_id, *sets, *flags]

    def summary(self, run_id: str) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.root / run_id / "summary.json").read_text())
        return summary

    def status(self, run_id: str) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.run("status", str(self.root / run_id), "--json").expect_success())
        return status

    def status_record(self, run_id: str, name: str) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.root / run_id / "progress" / f"{name}.json").read_text())
        except FileNotFoundError:
            return {}
        return status


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120, *, every: float = 0.05) -> None:
    """Checks the condition every `every` seconds: polling a server too often would slow it down."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(every)


def stages_of(run_url: str | Path) -> list[psutil.Process]:
    """All living stage processes of the run, found by their command lines."""
    stages = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "millrace.stages." in command and str(run_url) in command and process.status() != psutil.STATUS_ZOMBIE:
            stages.append(process)
    return stages


def send(process: subprocess.Popen[str], signal_number: signal.Signals) -> Ended:
    process.send_signal(signal_number)
    return await_end(process, 120)


def await_end(process: subprocess.Popen[str], seconds: float) -> Ended:
    """Waits for the command. If it takes too long, the test fails with its output so far."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        # Bytes, though the process is opened as text.
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else str(late.stdout)
        raise AssertionError(f"not over within {seconds:.0f} s; its output until then:\n{output}") from None
    return Ended(process.returncode, output)


def assert_balanced(summary: dict[str, Any]) -> None:
    """generated = trained + buffered + in flight + dropped, in rollouts and in tokens."""
    ledger = summary["ledger"]
    parts = [ledger["trained"], ledger["buffered"], ledger["in_flight"], *ledger["dropped"].values()]
    for unit in ("rollouts", "tokens"):
        assert sum(part[unit] for part in parts) == ledger["generated"][unit]


def final_weights(store: Store, step: int | None = None) -> bytes:
    """The weights of the latest checkpoint, which must be of version `step` if that is given."""
    checkpoint = read_latest(store)
    assert checkpoint is not None
    assert step is None or checkpoint.step == step
    return load_file(store, checkpoint.files["model.safetensors"])
