"""Writes a checkpoint of a stored run as a Hugging Face folder, completely or not at all.

checkpoint ─► weights of all its ranks, adapters merged in ─┐   (none for the base model)
           ─► adapter/, in PEFT's format, of a LoRA run ────┤
start model ─► configuration, tokenizer ────────────────────┴─► a temporary folder next to it ─► renamed

A promoted checkpoint is already stored as such a folder; `millrace.evaluation.promotion.fetch_promoted` copies it.
"""

import tempfile
from pathlib import Path

from configs.schema import ModelConfig
from millrace.chat.encoder import load_run_tokenizer
from millrace.errors import InputError, ModelFolderError, WeightsMismatch
from millrace.evaluation.promotion import new_folder
from millrace.maintenance.contents import best_stored
from millrace.models.loading import load_model, save_model
from millrace.models.start_folder import start_folder
from millrace.runs.record import attempt_of_step, read_run
from millrace.runtime.arguments import attempt_config
from millrace.training.checkpoints.policy_state import load_adapter, load_weights
from storage.checkpoints import Checkpoint, stored_checkpoints
from storage.stores.base import Store


def export_checkpoint(store: Store, folder: Path, version: int | None = None, *, best: bool = False) -> int:
    """Writes the checkpoint of policy version `version`, the best one evaluated, or the newest, to `folder`.

    A LoRA run's adapter is in its subfolder `adapter`. Returns its version; 0 if the base model is the best one
    evaluated, which is then written. Raises InputError if `folder` exists and is not empty, or if no such checkpoint is
    stored; RunMissing, ModelFolderError, and StreamCorrupt for a damaged file.
    """
    # Before the checkpoints, because "no run" says more than "no checkpoint".
    read_run(store)
    stored = stored_checkpoints(store)
    if not stored:
        raise InputError("no checkpoint", file=store.url, expected="a run with a checkpoint to export")
    step = max(stored) if version is None else version
    if best:
        result = best_stored(store, stored.values())
        if result is None:
            raise InputError("no evaluated checkpoint", file=store.url, expected="an evaluation to find the best by")
        step = int(result["policy_version"])
    if step not in stored and not (best and step == 0):
        expected = f"one of {', '.join(map(str, stored))}"
        raise InputError(f"no checkpoint of version {step}", file=store.url, expected=expected)
    model = attempt_config(attempt_of_step(store, step)).model
    with new_folder(folder) as made, tempfile.TemporaryDirectory() as temporary:
        start = start_folder(store, model.path, Path(temporary))
        write_model_folder(store, stored.get(step), start, model, made)
        if step in stored and (loaded := load_adapter(store, stored[step])) is not None:
            adapter, tensors = loaded
            (made / "adapter").mkdir()
            adapter.write(made / "adapter", tensors)
    return step


def write_model_folder(
    store: Store, checkpoint: Checkpoint | None, start: Path, model_config: ModelConfig, folder: Path
) -> None:
    """Writes configuration, generation configuration, tokenizer with the run's chat template, and the weights.

    The weights are in the `dtype` of the run's `model_config`, with adapters merged in. `start` is the folder of the
    run's start model, which is written itself if `checkpoint` is None. Raises ModelFolderError if it is another model,
    and StreamCorrupt; then nothing was written to `folder`.
    """
    model = load_model(start, model_config.dtype)
    if checkpoint is not None:
        try:
            load_weights(store, checkpoint, dict(model.named_parameters()))
        except (KeyError, RuntimeError, WeightsMismatch) as error:
            raise ModelFolderError(
                f"its model has other tensors than the checkpoint of version {checkpoint.step} ({error})",
                file=start,
                expected="the model that the run started from",
            ) from error
    save_model(model, folder)
    load_run_tokenizer(start, model_config).save_pretrained(folder)
