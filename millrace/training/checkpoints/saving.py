"""Saving checkpoints: copied while training pauses, then written and committed in the background.

    every rank   begin ─ values copied into the files' ─┬─► training continues ─► … ─► finish, or the next begin, waits
                         images in main memory          └─► thread: images ─► store, durable ─┐
    rank 0                                                  all files of all ranks are stored ┴─► record: the commit

At most one checkpoint is in flight. Its record is written last: after a crash before that, the previous checkpoint is
the latest, and `millrace gc` removes the files. An error in the thread is raised by the next call.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from millrace.training.checkpoints.files import MOST_BYTES, FileImage, blocks_to_write, in_files
from millrace.training.checkpoints.names import file_name
from millrace.training.parallel.messages import exchange
from millrace.training.parallel.ranks import Ranks
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.stores.base import Store
from storage.streams.files import FileRef, put_file

_LOOK_SECONDS = 0.5
"""While a checkpoint is waited for, how often to look whether another of its files was written."""

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""The tensors of a checkpoint, by kind and name: see `millrace.training.checkpoints.policy_state`."""


class AsyncCheckpoints:
    """The checkpoints of a run's trainer, on this rank; the `with` block ends when all is written.

    `writer` is rank 0's, None on the others; between `begin` and `finish` only the thread may use it. Every rank begins
    the same checkpoints. A file holds at most `most_bytes` of tensors.
    """

    def __init__(
        self,
        store: Store,
        ranks: Ranks,
        writer: CheckpointWriter | None,
        *,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._writer = writer
        self._most_bytes = most_bytes
        self._group: dist.ProcessGroup | None = None
        if ranks.mesh is not None:
            # The thread needs its own group: the main threads use the default one at the same time. These ranks may be
            # some of the process group's.
            self._group = dist.new_group(ranks.mesh.mesh.flatten().tolist(), backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[None] | None = None
        self.on_progress: Callable[[], None] = lambda: None
        """Called while a checkpoint is waited for, after each file that was written meanwhile."""
        self.after_commit: Callable[[], None] = lambda: None
        """Rank 0's, called in the thread after each commit; its error is raised as that of the checkpoint."""
        self.on_saved: Callable[[int], None] = lambda _step: None
        """Called by `finish` with the policy version whose checkpoint was committed."""
        self._step = 0
        """Policy version of the last `begin`."""
        self._written = self._seen = 0
        self._images: dict[str, FileImage] = {}
        """By file name; reused by the next checkpoint."""

    def begin(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Begins the checkpoint of policy version `step`, with `tensors` and `state` as they are now.

        Rank 0 commits `state`, plain JSON, with the files. Waits for the previous checkpoint, and raises its error:
        what `CheckpointWriter.commit` raises, or OSError if another rank could not write its files.
        """
        self.finish()
        self._step = step
        self._images = dict(self._copied(tensors))
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        self._in_flight = self._thread.submit(self._save, step, deepcopy(dict(state)))

    def finish(self) -> None:
        """Waits until the checkpoint in flight, if any, is committed. Raises its error."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            while not wait([in_flight], _LOOK_SECONDS).done:
                # Waiting alone does not count as progress: the thread may hang.
                if self._written != self._seen:
                    self._seen = self._written
                    self.on_progress()
            in_flight.result()
            self.on_saved(self._step)

    def check(self) -> None:
        """Raises the error of the checkpoint in flight, if it has failed already; never waits."""
        if self._in_flight is not None and self._in_flight.done():
            self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.finish()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"the checkpoint in flight failed too: {failure!r}")
        finally:
            self._thread.shutdown()

    def _copied(self, tensors: Tensors) -> Iterator[tuple[str, FileImage]]:
        """This rank's files by name, with the values of this moment."""
        rank, size = self._ranks.rank, self._ranks.size
        for kind, named in tensors.items():
            for part, blocks in enumerate(in_files(dict(blocks_to_write(named, rank)), self._most_bytes)):
                if not blocks and size > 1:
                    continue
                name = file_name(kind, rank, size, part)
                image = self._images.get(name)
                if image is None or not image.fits(blocks):
                    image = FileImage(kind, blocks, size)
                image.take(blocks)
                yield name, image

    def _save(self, step: int, state: dict[str, Any]) -> None:
        """Runs in the thread. A rank that fails reports it before it raises, because the others wait for it."""
        failure: Exception | None = None
        outcome: dict[str, Any]
        try:
            named = f"{layout.CHECKPOINTS}/{layout.new_checkpoint_data(step)}"
            folder = exchange(named, self._ranks.size, self._group)[0]
            refs: dict[str, FileRef] = {}
            for name, image in self._images.items():
                refs[name] = put_file(self._store, f"{folder}/{name}", image.data)
                self._written += 1
            outcome = {"files": {name: asdict(ref) for name, ref in refs.items()}}
        except Exception as error:  # noqa: BLE001 — raised below
            failure, outcome = error, {"error": repr(error)}
        outcomes = [json.loads(text) for text in exchange(json.dumps(outcome), self._ranks.size, self._group)]
        if failure is not None:
            raise failure
        if self._writer is None:
            return
        for rank, report in enumerate(outcomes):
            if "error" in report:
                raise OSError(
                    f"rank {rank} could not write its files of the checkpoint of version {step}: {report['error']}"
                )
        files = {name: FileRef(**ref) for report in outcomes for name, ref in report["files"].items()}
        self._writer.commit_stored(step, files, state)
        self.after_commit()
