"""Copies a run's metrics to the trackers of `mirror.*`, by `millrace mirror --follow` next to the campaign."""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from configs.operation import MirrorConfig
from storage import layout
from storage.stores.base import Store
from tasks.start import log_path

_PACKAGES = {
    "tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "otlp": "opentelemetry",
}  # fmt: skip
_LAST_SECONDS = 60.0
"""Time to copy the rows that were written just before the run ended."""


def check_mirror(config: MirrorConfig) -> None:
    """Raises MissingExtra for a tracker whose package is not installed."""
    for name, package in _PACKAGES.items():
        if getattr(config, name) is not None and importlib.util.find_spec(package) is None:
            importlib.import_module(f"dashboard.integrations.sinks.{name}")


@contextmanager
def mirrored(config: MirrorConfig, store: Store) -> Iterator[None]:
    """Copies the run in `store` while the block lasts, which includes its end. Its output is the log of `mirror-0`.

    A tracker that fails does not touch the campaign, and a campaign that is killed ends the copying.
    """
    options = [f"--{name}={target}" for name, target in config if target is not None]
    if not options:
        yield
        return
    command = [sys.executable, "-m", "flows.cli.main", "mirror", store.url, *options, "--follow"]
    path = log_path(store, layout.log_file("mirror", 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_SECONDS)
            process.kill()
            process.wait()
