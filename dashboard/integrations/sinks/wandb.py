"""A run of Weights & Biases, with the run's own id; offline unless WANDB_MODE says otherwise.

    a point ─► a row of W&B's history: policy_version, incarnation, unix_seconds, train/…  or  evaluation/…
               numbered across starts, so that runs written offline in several starts fit together

W&B's own process buffers rows before they are in its log, `….wandb`, and loses them if this one is killed. So state is
saved only after that log has grown and stopped growing.

W&B can't delete rows. Versions that a restarted trainer repeats get rows of their own, with a higher incarnation.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboard.integrations.sinks.sink import MirrorState, Point, Text
from millrace.errors import InputError, MissingExtra

try:
    import wandb
except ImportError as error:
    raise MissingExtra("--wandb", "wandb", "wandb") from error

_LOG_SECONDS = 0.5
"""How often W&B writes its log."""
_LOG_DEADLINE = 60.0
_PROJECT = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class WeightsAndBiases:
    """Writes into `wandb/` of WANDB_DIR or the current folder, with its state beside it.

    Raises InputError for a project name that W&B does not allow.
    """

    takes_texts = False
    """W&B has the config from `open`, and a row of its history shows no text."""

    def __init__(self, project: str, run_id: str) -> None:
        if not _PROJECT.fullmatch(project):
            raise InputError(f"--wandb {project!r}: expected the name of a project: letters, digits, '-', '_' and '.'")
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
        """Begin or continue W&B's run. Raises InputError if W&B can't."""
        if self._mode == "disabled":
            raise InputError("--wandb with WANDB_MODE=disabled would keep nothing: unset it, or leave --wandb out")
        if self._mode == "offline":
            # W&B would send its own error reports over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            # Before wandb.init, which would silently choose another folder if this one can't be written.
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
            raise InputError(f"--wandb {self._project}, mode {self._mode}: W&B says: {first}") from error
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

    def write_texts(self, texts: Sequence[Text]) -> None:
        """Nothing."""

    def roll_back(self, policy_version: int, state: MirrorState) -> None:
        """Nothing: the rows that follow have a higher incarnation."""

    def flush(self) -> None:
        """Wait until the rows are in W&B's log. Raises InputError if it does not grow; call only after `write`."""
        previous, deadline = -1, time.monotonic() + _LOG_DEADLINE
        # Unchanged over two write intervals: nothing more is pending.
        while (length := self._log.stat().st_size) != previous or length <= self._logged:
            if time.monotonic() > deadline:
                raise InputError(f"--wandb: W&B has not written to {self._log} for {_LOG_DEADLINE:.0f} s")
            previous = length
            time.sleep(2 * _LOG_SECONDS)
        self._logged = length

    def close(self) -> None:
        """Wait until W&B has written everything, and sent it unless offline."""
        self._run.finish()
