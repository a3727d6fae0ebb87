"""A checkpoint's policy as a Hugging Face folder, which transformers and vLLM load."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from configs.schema import ModelConfig
from millrace.chat.encoder import load_run_tokenizer
from millrace.errors import ModelFolderError
from millrace.models.loading import load_model, save_model
from millrace.training.checkpoints.policy_state import load_weights
from storage.checkpoints import Checkpoint
from storage.stores.base import Store


def write_model_folder(
    store: Store, checkpoint: Checkpoint | None, start: Path, own: ModelConfig, folder: Path
) -> None:
    """Writes configuration, generation configuration, tokenizer with the run's chat template, and the weights.

    The weights are in the `dtype` of `own`, the run's config, with adapters merged in. `start` is the folder of the
    run's start model, which is written itself if `checkpoint` is None. Raises ModelFolderError if it is another model,
    and StreamCorrupt; then nothing was written to `folder`.
    """
    model = load_model(start, own.dtype)
    if checkpoint is not None:
        _load(model, store, checkpoint, start)
    save_model(model, folder)
    load_run_tokenizer(start, own).save_pretrained(folder)


def _load(model: PreTrainedModel, store: Store, checkpoint: Checkpoint, start: Path) -> None:
    parameters = dict(model.named_parameters())
    try:
        weights = load_weights(store, checkpoint, parameters)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
    except (KeyError, RuntimeError) as error:
        raise ModelFolderError(
            f"{start}: its model has other tensors than the checkpoint of version {checkpoint.step} ({error}); "
            "expected the model that the run started from"
        ) from error
