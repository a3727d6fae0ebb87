"""The table of a running campaign in the Prefect UI: speed of each stage, queue, staleness of the trajectories.

    status now ─┬─ since the last table: tokens per second, busy and idle share of each stage
                └─ so far: versions, queue, staleness histogram

Each table stays in the server's database as a row. So one is written only if something changed, at most every 30 s, and
once at the end: no more than 120 rows per hour.
"""

import time
from collections.abc import Callable
from typing import Any

from flows.display.progress import Rates

EVERY_SECONDS = 30.0
"""Least time between two tables."""
_STAGES = {"generate": "generate", "score": "score", "train": "train", "sync_weights": "sync"}
"""Stage → its key in the `seconds` of a status."""

Row = dict[str, str]
"""The columns `figure`, `now` and `detail`."""


class CampaignTable:
    """Makes a new table when one is due. `write` shows it, and raises if it can't."""

    def __init__(self, write: Callable[[list[Row]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._rates = Rates(clock)
        self._before: dict[str, Any] | None = None
        self._written_at = 0.0
        self._shown: dict[str, Any] | None = None

    def look(self, status: dict[str, Any], *, over: bool) -> None:
        """Call it with every status. `over`: this is the last one."""
        now = self._clock()
        if self._before is None:
            # Rates need two statuses: this one is the start.
            self._rates.look(status)
            self._before, self._written_at = status, now
        if now - self._written_at < EVERY_SECONDS and not over:
            return
        content = {name: status[name] for name in ("tokens", "steps", "ledger", "staleness")}
        if content == self._shown:
            return
        made = rows(status, self._before, self._rates.look(status))
        self._before, self._written_at = status, now
        self._write(made)
        self._shown = content


def rows(status: dict[str, Any], before: dict[str, Any], rates: dict[str, float]) -> list[Row]:
    """The table. `before`: the status at the last table; `rates`: tokens per second since then, by stage."""
    ledger, staleness = status["ledger"], status["staleness"]
    buffered, in_flight = (ledger[what]["rollouts"] for what in ("buffered", "in_flight"))
    found = [
        {
            "figure": stage,
            "now": _speed(rates.get(stage)),
            "detail": _share(status["seconds"], before["seconds"], short),
        }
        for stage, short in _STAGES.items()
    ]
    found += [
        {
            "figure": "version",
            "now": f"{status['steps']:,} of {status['max_steps']:,}",
            "detail": f"{status['policy_versions_used']:,} used by generators",
        },
        {
            "figure": "queue",
            "now": f"{buffered + in_flight:,} rollouts",
            "detail": f"{buffered:,} buffered, {in_flight:,} in flight",
        },
        {
            "figure": "staleness",
            "now": "–" if staleness["mean"] is None else f"mean {staleness['mean']:.2f}",
            "detail": "–" if staleness["max"] is None else f"max {staleness['max']} of {staleness['bound']}",
        },
    ]
    total = sum(staleness["histogram"].values())
    found += [
        {"figure": f"rollouts of staleness {value}", "now": f"{count:,}", "detail": f"{count / total:.1%}"}
        for value, count in staleness["histogram"].items()
    ]
    return found


def _speed(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:,.0f} tokens/s"


def _share(now: dict[str, float], before: dict[str, float], stage: str) -> str:
    # A restarted stage may count from a lower value.
    busy = max(0.0, now[stage] - before[stage])
    idle = max(0.0, now[f"idle_{stage}"] - before[f"idle_{stage}"])
    return f"busy {busy / (busy + idle):.0%}, idle {idle / (busy + idle):.0%}" if busy + idle else "–"
