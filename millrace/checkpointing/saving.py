"""Checkpoints on their way out: copied while training stands still, written and committed while it goes on.

    every rank   begin ─ values copied into the files' ─┬─► training goes on ─► … ─► finish, or the next begin, waits
                         images in the main memory      └─► thread: images ─► store, durable ─┐
    rank 0                                                  all files of all ranks are there ─┴─► record: the commit

At most one is on its way. The record comes last: whoever dies before it leaves the checkpoint before, and files that
`millrace gc` removes. What goes wrong in the thread is raised by the next call.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from millrace.checkpointing.blocks import blocks_to_write
from millrace.checkpointing.image import MOST_BYTES, FileImage, in_files
from millrace.checkpointing.names import file_name
from millrace.parallel.ranks import Ranks
from millrace.parallel.wire import exchange
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.files import FileRef, put_file
from storage.store import Store

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""What a checkpoint holds, by kind and name: `millrace.checkpointing.policy_state.policy_state` makes it."""


class AsyncCheckpoints:
    """The checkpoints of a run's trainer, of which this process is one rank; a `with` block ends when all is written.

    `writer` is rank 0's, None on the others; between `begin` and `finish` it is the thread's. Every rank makes one, at
    the same point, and begins the same checkpoints. `most_bytes` of tensors go into one file.
    """

    def __init__(
        self, store: Store, ranks: Ranks, writer: CheckpointWriter | None, *, most_bytes: int = MOST_BYTES
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._writer = writer
        self._most_bytes = most_bytes
        # Of the thread's own: what the main threads say to each other meanwhile must not get in between.
        self._group = None if ranks.size == 1 else _group(ranks)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._on_its_way: Future[None] | None = None
        self._images: dict[str, FileImage] = {}
        """By file name; what the last checkpoint left."""

    def begin(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Takes the checkpoint of policy version `step`: `tensors` and `state` as they are now; both may change later.

        `state` is what rank 0 commits beside the files, plain JSON. Waits for the checkpoint before. Raises what that
        one met: what `CheckpointWriter.commit` raises, and OSError where another rank could not write its files.
        """
        self.finish()
        self._images = dict(self._taken(tensors))
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        self._on_its_way = self._thread.submit(self._save, step, deepcopy(dict(state)))

    def finish(self) -> None:
        """Waits until the checkpoint that is on its way, if any, is committed. Raises what it met."""
        on_its_way, self._on_its_way = self._on_its_way, None
        if on_its_way is not None:
            on_its_way.result()

    def check(self) -> None:
        """Raises what the checkpoint on its way has met so far; waits for nothing."""
        if self._on_its_way is not None and self._on_its_way.done():
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
            error.add_note(f"the checkpoint on its way failed too: {failure!r}")
        finally:
            self._thread.shutdown()

    def _taken(self, tensors: Tensors) -> Iterator[tuple[str, FileImage]]:
        """This rank's files by name, with the values of now."""
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
        """In the thread. A rank that fails says so to the others before it raises: they would wait for it."""
        folder = exchange(f"{layout.CHECKPOINTS}/{layout.new_checkpoint_data(step)}", self._ranks.size, self._group)[0]
        failure: Exception | None = None
        said: dict[str, Any]
        try:
            refs = {name: put_file(self._store, f"{folder}/{name}", image.data) for name, image in self._images.items()}
            said = {"files": {name: asdict(ref) for name, ref in refs.items()}}
        except Exception as error:  # noqa: BLE001 — raised below
            failure, said = error, {"error": repr(error)}
        everyone = [json.loads(one) for one in exchange(json.dumps(said), self._ranks.size, self._group)]
        if failure is not None:
            raise failure
        if self._writer is None:
            return
        for rank, one in enumerate(everyone):
            if "error" in one:
                raise OSError(
                    f"rank {rank} could not write its files of the checkpoint of version {step}: {one['error']}"
                )
        files = {name: FileRef(**ref) for one in everyone for name, ref in one["files"].items()}
        self._writer.commit_stored(step, files, state)


def _group(ranks: Ranks) -> dist.ProcessGroup:
    assert ranks.mesh is not None
    group = dist.new_group(ranks.mesh.mesh.flatten().tolist(), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
