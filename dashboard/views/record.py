"""The page of a run's record: its config, attempts, provenance and the ends of its logs."""

import re
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from dashboard.queries.run_table import ABSENT
from dashboard.queries.verdict.rules import duration
from dashboard.read.model import AttemptInfo, RunData
from dashboard.read.run_reader import settings
from dashboard.read.tokens import shortened, visible
from dashboard.views.blocks import Table, View, rows_per_run
from millrace.runs.provenance import differences, read_start_hashes
from millrace.runs.status import STAGES
from storage import layout
from storage.errors import StorageError
from storage.stores.factory import open_store

_ATTEMPTS = ("attempt", "started", "took", "ended", "at version", "mode", "weights by", "changes")
_CHARACTERS = 400
"""Limit on a value, and on a line of a log."""
LINES = 20
"""Lines read of each log."""
_LOG_BYTES, _MOST_LOGS = 16 << 10, 64
"""Limits on the end of a log, and on the number of logs."""
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


def _settings(run: RunData, *, is_default: bool) -> list[tuple[str, ...]]:
    changed = run.info.attempts[-1].origin.defaults
    defaults = settings({key: default for key, values in changed.items() for default in values})

    def differs(key: str, value: str) -> bool:
        # A setting may hold others, such as the parameters of a loss, and only some of these may differ.
        return defaults.get(key) != value and any(key == name or key.startswith(f"{name}.") for name in changed)

    return [
        (_text(key), _text(value), *([] if is_default else [_text(defaults.get(key, ABSENT))]))
        for key, value in settings(run.info.config).items()
        if differs(key, value) != is_default
    ]


def _attempts(run: RunData) -> list[tuple[str, ...]]:
    attempts = run.info.attempts
    pairs = list(zip((None, *attempts), attempts, strict=False))
    return [_attempt(run, attempt, previous) for previous, attempt in reversed(pairs)]


def _attempt(run: RunData, attempt: AttemptInfo, previous: AttemptInfo | None) -> tuple[str, ...]:
    changes = list(attempt.changes)
    if previous is not None:
        pairs = differences(previous.provenance, attempt.provenance).items()
        changes += [f"{name} was {old} and is {new}" for name, (old, new) in pairs]
    end = attempt.end
    is_newest = attempt is run.info.attempts[-1]
    state = end.state if end else str((run.status or {}).get("state", ABSENT)) if is_newest else "killed"
    return (
        str(attempt.number),
        time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(attempt.t_started)),
        duration(end.t - attempt.t_started) if end else ABSENT,
        _text(f"{state}: {end.cause}" if end and end.cause else state),
        str(attempt.first_step),
        _text(attempt.mode),
        _text(attempt.transport),
        _text("; ".join(changes)),
    )


def _provenance(run: RunData) -> list[tuple[str, ...]]:
    """Returns code, packages and machine of the newest attempt."""
    attempt = run.info.attempts[-1]
    made_by, origin = attempt.provenance, attempt.origin
    changes = "; ".join(f"{key}: {old} → {new}" for key, (old, new) in origin.changes.items())
    devices = {name: gpus for name, status in run.stage_status.items() if (gpus := status.get("devices"))}
    named = {
        "commit": f"{made_by.commit or ABSENT}{', with uncommitted changes' if made_by.dirty else ''}",
        "nearest preset": f"{origin.preset or ABSENT}{'; ' if changes else ''}{changes}",
        "machine": made_by.platform,
        "CPU": made_by.cpu,
        "GPUs": "; ".join(f"{name}: {', '.join(map(str, gpus))}" for name, gpus in devices.items()) or "none",
        "python": made_by.python,
        **{name: version or ABSENT for name, version in made_by.dependencies.items()},
    }
    return [(_text(name), _text(value)) for name, value in named.items()]


def _hashes(run: RunData) -> list[tuple[str, ...]]:
    attempt = run.info.attempts[-1]
    named = {"config, SHA-256": attempt.provenance.config_hash or ABSENT, **attempt.inputs}
    try:
        hashes = read_start_hashes(open_store(run.info.url)) or {}
        named |= {f"start model, {name}": f"SHA-256 {digest}" for name, digest in hashes.items()}
    except (StorageError, OSError) as error:
        named["start model"] = f"its hashes can't be read: {error}"
    return [(_text(name), _text(value)) for name, value in named.items()]


def _logs(run: RunData) -> list[tuple[str, ...]]:
    """Returns the end of each log; those without lines share a row."""
    ends = log_ends(run.info.url, [name for name in run.stage_status if name.rpartition("-")[0] in STAGES])
    empty = [name for name, text in ends.items() if not text]
    return [*((name, text) for name, text in ends.items() if text), *([("empty", ", ".join(empty))] if empty else [])]


def log_ends(url: str, expected: Collection[str]) -> dict[str, str]:
    """Returns the last lines of each log of the run at `url`, by `<stage>-<replica>`; invisible characters are escaped.

    A log that is empty, and an `expected` one that does not exist, is ''. A log that can't be read says so.
    """
    ends = dict.fromkeys(sorted(expected), "")
    try:
        store = open_store(url)
        for entry in store.entries(layout.LOGS)[:_MOST_LOGS]:
            name = visible(entry.path.removeprefix(f"{layout.LOGS}/").removesuffix(".log"))
            try:
                data = bytes(store.get(entry.path, max(0, entry.bytes - _LOG_BYTES), _LOG_BYTES))
                lines = _COLOUR.sub(b"", data).decode("utf-8", "replace").splitlines()
                ends[name] = "\n".join(visible(line[:_CHARACTERS]) for line in lines[-LINES:])
            except (StorageError, OSError) as error:
                ends[name] = f"It can't be read: {visible(str(error))}"
    except (StorageError, OSError) as error:
        ends["all"] = f"The logs can't be listed: {visible(str(error))}"
    return ends


def _text(text: str) -> str:
    return shortened(visible(text), _CHARACTERS)


def _table(
    name: str, title: str, sentence: str, header: Sequence[str], rows: Callable[[RunData], list[tuple[str, ...]]]
) -> Table:
    build = partial(rows_per_run, header=header, rows=rows)
    return Table(id=f"record-{name}", title=title, sentence=sentence, build=build, wide=True)


VIEW = View(
    name="record",
    title="Config and logs",
    sentence="Config, attempts, provenance, and the end of each log.",
    blocks=(
        _table(
            "changed",
            "Settings that differ from the defaults",
            "The config of the newest attempt; the other settings are folded below.",
            ("setting", "value", "default"),
            lambda run: _settings(run, is_default=False),
        ),
        _table(
            "attempts",
            "Attempts",
            "Each start of the run, the newest first, with the settings, inputs, code and packages that changed.",
            _ATTEMPTS,
            _attempts,
        ),
        _table(
            "provenance",
            "Provenance",
            "Code, packages and machine of the newest attempt.",
            ("", "value"),
            _provenance,
        ),
        _table(
            "logs",
            "Logs",
            f"The last {LINES} lines of each process, and those that wrote none; the files are in the run's folder.",
            ("process", "last lines"),
            _logs,
        ),
        _table(
            "hashes",
            "Hashes",
            "Content of the config, the model, prompts, teachers and rewards.",
            ("", "value"),
            _hashes,
        ),
        _table(
            "defaults",
            "Other settings",
            "The rest of the config.",
            ("setting", "value"),
            lambda run: _settings(run, is_default=True),
        ),
    ),
)
