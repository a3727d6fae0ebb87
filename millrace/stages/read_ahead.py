"""Reads scored groups while the trainer computes, so that they are at hand when its step is done.

step n ──────────────────────► step n + 1 ──────► …
  └─ thread: parts, scores ─►──┘ takes its groups at once
"""

from types import TracebackType

from millrace.rollouts.loader import RolloutLoader
from millrace.runtime.background import Background

_LOOK_SECONDS = 0.05


class ReadAhead(Background):
    """Fills a loader as long as the `with` block runs, in which nothing else may use the loader.

    At the end of the block, it raises what `RolloutLoader.refill` has raised, unless the block raised too.
    """

    def __init__(self, loader: RolloutLoader) -> None:
        super().__init__("read ahead", join_seconds=None)
        self._loader = loader
        self._error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._over.wait(_LOOK_SECONDS):
                self._loader.refill()
        except BaseException as error:  # noqa: BLE001 — raised at the end of the block
            self._error = error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._error is not None and error is None:
            raise self._error
