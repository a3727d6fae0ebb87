"""A run of Weights & Biases with the same id; offline unless WANDB_MODE says otherwise.

    a point ─► a row of W&B's history: policy_version, incarnation, unix_seconds, train/…  or  evaluation/…
               rows are numbered across starts, so that offline runs of several starts can be merged

W&B's process buffers rows before it writes them to its log, `….wandb`, and loses them if this process is killed. So
state is saved only after that log has grown and stopped growing.

W&B can't delete rows. Versions that a restarted trainer repeats get new rows with a higher incarnation.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboard.integrations.sinks.sink import MirrorState, Point, Sink
from millrace.errors import InputError, MissingExtra

try:
    import wandb
except ImportError as error:
    raise MissingExtra("--wandb", "wandb", "wandb") from error

_LOG_SECONDS = 0.5
"""How often W&B writes its log."""
_LOG_DEADLINE = 60.0
_PROJECT = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class WeightsAndBiases(Sink):
    """Writes rows and the mirror's state to `wandb/` in WANDB_DIR or the current folder.

    Raises InputError for a project name that W&B does not allow.
    """

    def __init__(self, project: str, run_id: str) -> None:
        if not _PROJECT.fullmatch(project):
            raise InputError(
                repr(project), key="--wandb", expected="a project name of letters, digits, '-', '_' and '.'"
            )
        self._project, self._run_id = project, run_id
        self._mode = os.environ.get("WANDB_MODE") or "offline"
        self.name = f"W&B, project {project}, {self._mode}"
        folder = Path(os.environ.get("WANDB_DIR", "."))
        self.state_file = folder / "wandb" / f"millrace-{project}-{run_id}.json"
        self._run: wandb.Run
        self._log: Path
        self._logged: int
        """Length of the log at the last flush, bytes."""

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], state: MirrorState) -> None:
        """Begins or continues W&B's run. Raises InputError for W&B's errors."""
        if self._mode == "disabled":
            raise InputError(
                "disabled, which stores nothing", key="WANDB_MODE", expected="online, offline or no --wandb"
            )
        if self._mode == "offline":
            # W&B would send its own error reports over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            # Fails if the folder can't be written; wandb.init would silently choose another one.
            state.save(self.state_file)
            self._run = wandb.init(
                project=self._project,
                id=self._run_id,
                name=self._run_id,
                config=dict(config),
                mode=self._mode,  # type: ignore[arg-type]  # W&B validates it
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
            raise InputError(f"W&B, mode {self._mode}: {first}", file=f"--wandb {self._project}") from error
        self.name += f", {self._run.dir.removesuffix('/files')}"
        self._log = Path(self._run.settings.sync_file)
        self._logged = self._log.stat().st_size
        self._run.define_metric("*", step_metric="policy_version")

    def write(self, points: Sequence[Point], state: MirrorState) -> None:
        for point in points:
            columns = {"policy_version": point.policy_version, "unix_seconds": point.t}
            if point.incarnation >= 0:
                columns["incarnation"] = point.incarnation
            # Without commit, W&B keeps the row open until the next one begins.
            self._run.log({**columns, **point.values}, step=state.rows, commit=True)
            state.rows += 1

    def flush(self) -> None:
        """Waits until the rows are in W&B's log. Raises InputError if it does not grow; call only after `write`."""
        previous, deadline = -1, time.monotonic() + _LOG_DEADLINE
        # A length that is unchanged for two write intervals means that no rows are pending.
        while (length := self._log.stat().st_size) != previous or length <= self._logged:
            if time.monotonic() > deadline:
                raise InputError(f"W&B has not written to {self._log} for {_LOG_DEADLINE:.0f} s", file="--wandb")
            previous = length
            time.sleep(2 * _LOG_SECONDS)
        self._logged = length

    def close(self) -> None:
        """Waits until W&B has written everything and, if online, sent it."""
        self._run.finish()
