"""Runs the parts one after the other, each in a process of its own, and never stops early."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_check.parts import COUNTS, FIGURES, OUT, Part

_TAIL_LINES = 60

Outcome = Literal["passed", "failed", "too slow", "left out"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a part."""

    name: str
    shows: str
    command: str
    outcome: Outcome
    reason: str
    """Why it was left out or failed; empty otherwise."""
    seconds: float
    tests: dict[str, int]
    """Tests by outcome: passed, failed, skipped; empty if it is no test."""
    figures: Any
    """A benchmark's figures; None for others."""
    output: str
    """Its last lines."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """What parts may need of the machine."""

    gpus: int
    installed: Callable[[str], str | None]
    """Version of a distribution, None if it is not installed."""


def check(parts: Sequence[Part], equipment: Equipment, tell: Callable[[str], None]) -> list[Result]:
    """The results in the order of `parts`; `tell` gets a line before and after each."""
    results = []
    for number, part in enumerate(parts, start=1):
        tell(f"[{number}/{len(parts)}] {part.name} …")
        result = check_part(part, equipment)
        tell(f"[{number}/{len(parts)}] {part.name}: {summary(result)}")
        results.append(result)
    return results


def summary(result: Result) -> str:
    """The outcome in a few words."""
    tests = ", ".join(f"{number} {name}" for name, number in result.tests.items() if number)
    details = "; ".join(filter(None, (result.reason, tests)))
    seconds = "" if result.outcome == "left out" else f" in {result.seconds:.0f} s"
    return f"{result.outcome}{seconds}{f' ({details})' if details else ''}"


def check_part(part: Part, equipment: Equipment) -> Result:
    """Runs one part, unless the machine lacks what it needs."""
    if equipment.gpus < part.gpus:
        return _result(part, "left out", f"needs {part.gpus} GPUs, and there are {equipment.gpus}")
    if part.package is not None and equipment.installed(part.package) is None:
        return _result(part, "left out", f"needs the package {part.package}, which is not installed")
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-check-") as made:
        out, log = Path(made), Path(made, "output.txt")
        command = [sys.executable, *(argument.replace(OUT, made) for argument in part.command)]
        began = time.monotonic()
        with log.open("wb") as output:
            code = _run(command, output.fileno(), part.minutes * 60)
        seconds = time.monotonic() - began
        tests = _counts(out / COUNTS)
        about = {"seconds": seconds, "tests": tests, "figures": _figures(out / FIGURES), "output": _tail(log)}
    if code is None:
        return _result(part, "too slow", f"stopped after {part.minutes:g} minutes", **about)
    if code != 0:
        return _result(part, "failed", f"exit code {code}", **about)
    if tests and not tests["passed"]:
        return _result(part, "left out", "every test was skipped", **about)
    return _result(part, "passed", "", **about)


def _run(command: Sequence[str], output: int, seconds: float) -> int | None:
    """The exit code; None if it took too long and was killed, with all that it started."""
    # A session of its own: what the part leaves behind is found by it.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _counts(file: Path) -> dict[str, int]:
    if not file.is_file():
        return {}
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for suite in ElementTree.parse(file).getroot().iter("testsuite"):
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        found = {
            "passed": found["passed"] + total - skipped - failed,
            "failed": found["failed"] + failed,
            "skipped": found["skipped"] + skipped,
        }
    return found


def _figures(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _result(
    part: Part,
    outcome: Outcome,
    reason: str,
    *,
    seconds: float = 0.0,
    tests: dict[str, int] | None = None,
    figures: Any = None,
    output: str = "",
) -> Result:
    return Result(
        name=part.name,
        shows=part.shows,
        command=" ".join(("python", *part.command)),
        outcome=outcome,
        reason=reason,
        seconds=round(seconds, 1),
        tests=tests or {},
        figures=figures,
        output=output,
    )
