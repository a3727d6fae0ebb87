"""A run of MLflow with the same name, in an experiment of the tracking store that MLFLOW_TRACKING_URI names.

    a point ─► MLflow's metrics train/…, evaluation/… at the step policy_version, with the time of the measurement
    config ──► MLflow's parameters, once

The client writes without a buffer. MLflow can't delete metrics: of a version that a restarted trainer repeats it keeps
both values, and the metric `incarnation` says which trainer a step is from. Without MLFLOW_TRACKING_URI the store is
MLflow's own default, `mlflow.db` in the current folder.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dashboard.integrations.sinks.sink import MirrorState, Point, Sink
from dashboard.read.run_reader import settings
from millrace.errors import InputError, MissingExtra

# MLflow would report its use over the network.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
try:
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
except ImportError as error:
    raise MissingExtra("--mlflow", "mlflow-skinny", "mlflow") from error

_METRICS, _PARAMETERS = 1000, 100
"""MLflow's limits of one request."""
_CHARACTERS = 6000
"""MLflow's limit of a parameter's value."""
_RUN = "millrace.run"
"""Tag with the name and the start of the run, by which a mirror that is started again finds MLflow's run."""


class MLflow(Sink):
    """Writes to MLflow, and the mirror's state to `millrace-mlflow/` in the current folder."""

    def __init__(self, experiment: str, run_id: str) -> None:
        self.name = f"MLflow, experiment {experiment}, {os.environ.get('MLFLOW_TRACKING_URI') or 'mlflow.db'}"
        self.state_file = Path("millrace-mlflow") / f"{experiment}-{run_id}.json"
        self._experiment, self._run_id = experiment, run_id
        self._client: MlflowClient
        self._run: str
        """MLflow's id."""

    def open(self, run: Mapping[str, Any], config: Mapping[str, Any], state: MirrorState) -> None:
        """Begins or continues MLflow's run. Raises InputError for MLflow's errors."""
        try:
            state.save(self.state_file)
            # It would log how it creates its tables.
            logging.getLogger("mlflow").setLevel(logging.WARNING)
            self._client = MlflowClient()
            experiment = self._client.get_experiment_by_name(self._experiment)
            number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            tag = f"{self._run_id} {run['t_started']}"
            if found := self._client.search_runs([number], f"tags.`{_RUN}` = '{tag}'"):
                self._run = found[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
            else:
                self._run = self._create(number, tag, run, config)
        except (OSError, MlflowException) as error:
            raise self._refused(error) from error

    def write(self, points: Sequence[Point], state: MirrorState) -> None:
        """Raises InputError for MLflow's errors."""
        metrics = [
            Metric(name, value, round(1000 * point.t), point.policy_version)
            for point in points
            for name, value in (
                *point.values.items(),
                *([("incarnation", point.incarnation)] if point.incarnation >= 0 else []),
            )
        ]
        try:
            for start in range(0, len(metrics), _METRICS):
                self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS])
        except MlflowException as error:
            raise self._refused(error) from error
        state.rows += len(points)

    def close(self) -> None:
        """Ends MLflow's run, until a mirror continues it."""
        self._client.set_terminated(self._run)

    def _create(self, experiment: str, tag: str, run: Mapping[str, Any], config: Mapping[str, Any]) -> str:
        created = self._client.create_run(experiment, round(1000 * run["t_started"]), run_name=self._run_id)
        number: str = created.info.run_id
        parameters = [Param(name, text[:_CHARACTERS]) for name, text in settings(config).items()]
        for start in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(number, params=parameters[start : start + _PARAMETERS])
        # Last, so that a run without all its parameters is not continued.
        self._client.log_batch(number, tags=[RunTag(_RUN, tag)])
        return number

    def _refused(self, error: Exception) -> InputError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return InputError(f"MLflow: {first}", file=f"--mlflow {self._experiment}")
