"""The trainer's checkpoints: files first, then one record that holds everything else, the stream cursors included.

    CheckpointWriter.commit    checkpoints/data/<step>-<uuid>/NAME ×n ──► checkpoints/log: checkpoint record
                               (durable, not yet visible)                 (the commit: files, state, cursors at once)
    read_latest                head of the log ──► back to the last checkpoint record, however long the log is

If several processes write the files of a checkpoint, each puts its own, and the writer commits the record
(`commit_stored`).

Cursors outside the record would be committed before or after it, and a crash in between would lose rows or train them
twice. A rolled-back trainer commits lower steps again: the latest checkpoint is the last record, not the highest step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storage import layout
from storage.errors import StreamCorrupt
from storage.stores.base import BytesLike, Store
from storage.streams.files import FileRef, get_file, put_file
from storage.streams.log import LogReader, LogWriter, backwards
from storage.streams.record import Record


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One committed state of the trainer."""

    step: int
    """Optimizer steps behind it: the policy version of its weights."""
    files: Mapping[str, FileRef]
    """Its files by name; `load_file` gets one."""
    state: dict[str, Any]
    """Free JSON object: cursors of the streams consumed, ledger, lineage."""
    incarnation: int
    """Incarnation of the trainer that committed it."""


class CheckpointWriter:
    """The one writer of a run's checkpoints; opening it fences every older one. Not thread-safe."""

    def __init__(self, store: Store, root: str = layout.CHECKPOINTS, *, writer: str = "trainer") -> None:
        self._store = store
        self._root = root
        self._log = LogWriter(store, root, writer)
        # Read after the fence: from now on no other writer can add a checkpoint.
        self.latest = read_latest(store, root)
        """The last checkpoint committed, by an earlier trainer or by this one; None if there is none."""

    @property
    def incarnation(self) -> int:
        """How many trainers the run had before this one: the epoch of the checkpoints' log."""
        return self._log.epoch

    def commit(self, step: int, files: Mapping[str, BytesLike], state: dict[str, Any]) -> Checkpoint:
        """Commit a checkpoint; on return it is durable and the latest.

        `state` is plain JSON: str keys, lists rather than tuples, finite numbers. Raises ValueError or TypeError if
        it is not, and Fenced if a newer trainer took over; then the checkpoint before stays the latest.
        """
        folder = f"{self._root}/{layout.new_checkpoint_data(step)}"
        refs = {name: put_file(self._store, f"{folder}/{name}", data) for name, data in files.items()}
        return self.commit_stored(step, refs, state)

    def adopt(self, checkpoint: Checkpoint, state: dict[str, Any]) -> Checkpoint:
        """Commit an earlier checkpoint as the latest, with another state; its files are referred to, not copied."""
        return self.commit_stored(checkpoint.step, checkpoint.files, state)

    def commit_stored(self, step: int, files: Mapping[str, FileRef], state: dict[str, Any]) -> Checkpoint:
        """Commit a checkpoint whose files are already durable in the store."""
        body = {"step": step, "files": {name: asdict(ref) for name, ref in files.items()}, "state": state}
        record = self._log.commit("checkpoint", body=body)
        self.latest = checkpoint_of(record, self._root)
        return self.latest


def read_latest(store: Store, root: str = layout.CHECKPOINTS) -> Checkpoint | None:
    """The last checkpoint committed, None if there is none; fences no writer. Raises StreamCorrupt."""
    return next(checkpoints_backwards(store, root), None)


def checkpoints_backwards(store: Store, root: str = layout.CHECKPOINTS) -> Iterator[Checkpoint]:
    """Every checkpoint committed so far, newest first. Raises StreamCorrupt."""
    cursor = LogReader.at_head(store, root).cursor
    return (checkpoint_of(record, root) for record in backwards(store, root, cursor) if record.kind == "checkpoint")


def stored_checkpoints(store: Store, root: str = layout.CHECKPOINTS) -> dict[int, Checkpoint]:
    """The checkpoints by policy version, ascending: those that were not rolled back and have their files."""
    checkpoints: list[Checkpoint] = []
    for checkpoint in checkpoints_backwards(store, root):
        # A trainer starts from the newest: earlier records of the same or a later step were rolled back.
        if not checkpoints or checkpoint.step < checkpoints[-1].step:
            checkpoints.append(checkpoint)
    return {
        checkpoint.step: checkpoint
        for checkpoint in reversed(checkpoints)
        if all(store.exists(ref.path) for ref in checkpoint.files.values())
    }


def first_of(store: Store, incarnation: int, root: str = layout.CHECKPOINTS) -> Checkpoint | None:
    """The first checkpoint that this incarnation of the trainer committed, None if none did. Raises StreamCorrupt."""
    first = None
    for checkpoint in checkpoints_backwards(store, root):
        if checkpoint.incarnation < incarnation:
            break
        if checkpoint.incarnation == incarnation:
            first = checkpoint
    return first


def load_file(store: Store, ref: FileRef) -> bytes:
    """The file's bytes, length and checksum verified. Raises StreamCorrupt."""
    return bytes(get_file(store, ref))


def load_files(store: Store, checkpoint: Checkpoint) -> dict[str, bytes]:
    """All files of a checkpoint by name, each verified. Raises StreamCorrupt."""
    return {name: load_file(store, ref) for name, ref in checkpoint.files.items()}


def checkpoint_of(record: Record, root: str) -> Checkpoint:
    """Reads the checkpoint from a record of the log in the folder `root`. Raises StreamCorrupt."""
    try:
        return Checkpoint(
            step=record.body["step"],
            files={name: FileRef(**ref) for name, ref in record.body["files"].items()},
            state=record.body["state"],
            incarnation=record.epoch,
        )
    except (KeyError, TypeError, AttributeError) as error:
        file = f"{root}/{layout.record(record.seq)}"
        raise StreamCorrupt(file, f"not a checkpoint's record: {error!r}") from error
