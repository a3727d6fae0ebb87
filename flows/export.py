"""`millrace export`: a checkpoint of a stored run as a Hugging Face folder, whole or not at all.

checkpoint ─► weights of all its ranks, adapters merged in ─┐
start model ─► configuration, tokenizer ────────────────────┴─► a folder beside the one asked for ─► renamed

A promoted checkpoint is stored as such a folder already: `millrace.promotion.fetch_promoted` writes that one out.
"""

import tempfile
from pathlib import Path

from configs.schema import RunConfig
from millrace.checkpointing.hugging_face import write_model_folder
from millrace.errors import InputError
from millrace.model import start_folder
from millrace.promotion import check_empty
from millrace.run import attempt_of_step, read_run
from storage.checkpoints import Checkpoint, stored_checkpoints
from storage.store import Store


def export_checkpoint(store: Store, folder: Path, version: int | None = None) -> int:
    """Writes the checkpoint of policy version `version`, or the newest, at `folder`; returns its version.

    Weights are in the number format of the run's `model.dtype`. Raises InputError where `folder` is there and not
    empty, or where no such checkpoint is stored; RunMissing, ModelFolderError, and StreamCorrupt for a damaged file.
    """
    check_empty(folder)
    checkpoint = _checkpoint(store, version)
    model = RunConfig.model_validate(attempt_of_step(store, checkpoint.step).config).model
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        start = start_folder(store, model.path, Path(temporary))
        write_model_folder(store, checkpoint, start, model.dtype, made)
        made.rename(folder)
    return checkpoint.step


def _checkpoint(store: Store, version: int | None) -> Checkpoint:
    # A place without a run has no checkpoints either: that there is no run is the better sentence.
    read_run(store)
    there = stored_checkpoints(store)
    if not there:
        raise InputError(f"{store.url}: no checkpoint is stored yet, so there is none to export")
    wanted = max(there) if version is None else version
    if wanted not in there:
        known = ", ".join(map(str, there))
        raise InputError(f"{store.url}: no checkpoint of version {wanted} is stored; those stored are of: {known}")
    return there[wanted]
