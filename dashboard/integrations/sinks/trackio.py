"""A run of trackio with the same name; in trackio's own folder, unless TRACKIO_SERVER_URL or TRACKIO_SPACE_ID is set.

    a point ─► a row of trackio's log at the step policy_version: incarnation, unix_seconds, train/…  or  evaluation/…

trackio writes in the background, and waits for that only when a run is finished. So each batch of points begins and
finishes its run, which the next batch continues. trackio can't delete rows: of a version that a restarted trainer
repeats it keeps both, and the newest `incarnation` counts.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from dashboard.integrations.sinks.sink import MirrorState, Point, Sink
from millrace.errors import InputError, MissingExtra

try:
    import trackio
except ImportError as error:
    raise MissingExtra("--trackio", "trackio", "trackio") from error


class Trackio(Sink):
    """Writes to trackio, and the mirror's state to `millrace-trackio/` in the current folder."""

    def __init__(self, project: str, run_id: str) -> None:
        self.name = f"trackio, project {project}"
        self.state_file = Path("millrace-trackio") / f"{project}-{run_id}.json"
        self._project, self._run_id = project, run_id
        self._config: Mapping[str, Any] = {}

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], state: MirrorState) -> None:
        """Raises InputError if the state can't be saved."""
        self._config = config
        state.save(self.state_file)

    def write(self, points: Sequence[Point], state: MirrorState) -> None:
        """Raises InputError for trackio's errors."""
        try:
            # It prints how to open its pages.
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
                run = trackio.init(
                    project=self._project,
                    name=self._run_id,
                    config=dict(self._config),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
                for point in points:
                    columns = {"unix_seconds": point.t}
                    if point.incarnation >= 0:
                        columns["incarnation"] = point.incarnation
                    run.log({**columns, **point.values}, step=point.policy_version)
                trackio.finish()
        except (OSError, ValueError) as error:
            raise InputError(f"trackio: {error}", file=f"--trackio {self._project}") from error
        state.rows += len(points)
