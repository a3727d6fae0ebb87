"""A run of Weights & Biases, with the run's own id; offline unless WANDB_MODE says otherwise.

    a point ─► a row of W&B's history: policy_version, incarnation, unix_seconds, train/…  or  evaluation/…
               numbered on from start to start, so that runs written offline in several goes fit together

W&B's own process keeps rows for a while before they are in its log, `….wandb`, and loses them if this one is killed: so
nothing is remembered before that log has grown and come to rest.

W&B takes nothing back. Versions that a restarted trainer made again are rows of their own, with a higher incarnation.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboard.sinks.sink import Memory, Point
from millrace.errors import InputError

try:
    import wandb
except ImportError as error:
    raise InputError("--wandb needs the package wandb: pip install wandb") from error

_LOG_SECONDS = 0.5
"""How often W&B writes its log."""
_LOG_DEADLINE = 60.0
_PROJECT = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class WeightsAndBiases:
    """Writes into `wandb/` of WANDB_DIR or of the current folder, and remembers how far beside it.

    Raises InputError for a project's name that W&B does not allow.
    """

    def __init__(self, project: str, run_id: str) -> None:
        if not _PROJECT.fullmatch(project):
            raise InputError(f"--wandb {project!r}: expected the name of a project: letters, digits, '-', '_' and '.'")
        self._project, self._run_id = project, run_id
        self._mode = os.environ.get("WANDB_MODE") or "offline"
        self.name = f"W&B, project {project}, {self._mode}"
        folder = Path(os.environ.get("WANDB_DIR", "."))
        self.memory = folder / "wandb" / f"millrace-{project}-{run_id}.json"
        self._run: wandb.Run
        self._log: Path
        self._logged: int
        """Length of the log when it was flushed last, bytes."""

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], memory: Memory) -> None:
        """Begin or go on with W&B's run. Raises InputError where W&B can't."""
        if self._mode == "disabled":
            raise InputError("--wandb with WANDB_MODE=disabled would keep nothing: unset it, or leave --wandb out")
        if self._mode == "offline":
            # W&B's own reports of its faults would leave the machine.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            # Here already: W&B would go elsewhere without a word.
            memory.save(self.memory)
            self._run = wandb.init(
                project=self._project,
                id=self._run_id,
                name=self._run_id,
                config=dict(config),
                mode=self._mode,  # type: ignore[arg-type]  # the person's word; W&B says which it knows
                resume=None if self._mode == "offline" else "allow",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    x_disable_machine_info=True,
                    x_transaction_log_flush_interval=_LOG_SECONDS,
                ),
            )
        except (OSError, ValueError, wandb.Error) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"--wandb {self._project}, mode {self._mode}: W&B says: {first}") from error
        self.name += f", {self._run.dir.removesuffix('/files')}"
        self._log = Path(self._run.settings.sync_file)
        self._logged = self._log.stat().st_size
        self._run.define_metric("*", step_metric="policy_version")

    def write(self, points: Sequence[Point], memory: Memory) -> None:
        """A row of history a point."""
        for point in points:
            own = {"policy_version": point.policy_version, "unix_seconds": point.t}
            if point.incarnation >= 0:
                own["incarnation"] = point.incarnation
            # Else W&B keeps the row open until the next one begins.
            self._run.log({**own, **point.values}, step=memory.rows, commit=True)
            memory.rows += 1

    def roll_back(self, policy_version: int, memory: Memory) -> None:
        """Nothing: the rows that follow have a higher incarnation."""

    def flush(self) -> None:
        """The rows are in W&B's log. Raises InputError where W&B does not write it; call it only behind `write`."""
        before, deadline = -1, time.monotonic() + _LOG_DEADLINE
        # Quiet over two of its writes: nothing more is on its way.
        while (length := self._log.stat().st_size) != before or length <= self._logged:
            if time.monotonic() > deadline:
                raise InputError(f"--wandb: W&B has not written to {self._log} for {_LOG_DEADLINE:.0f} s")
            before = length
            time.sleep(2 * _LOG_SECONDS)
        self._logged = length

    def close(self) -> None:
        """W&B has written everything, and sent it unless it is offline."""
        self._run.finish()
