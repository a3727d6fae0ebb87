"""A checkpoint's policy as a Hugging Face folder, which transformers and vLLM load."""

from pathlib import Path

import torch

from millrace.errors import ModelFolderError
from millrace.models.loading import load_model, load_tokenizer
from millrace.training.checkpoints.policy_state import load_weights
from storage.checkpoints import Checkpoint
from storage.stores.base import Store


def write_model_folder(store: Store, checkpoint: Checkpoint, start: Path, dtype: str, folder: Path) -> None:
    """Writes configuration, generation configuration, tokenizer, and the weights in `dtype` with adapters merged in.

    `start` is the folder of the run's start model. Raises ModelFolderError if it is another model, and StreamCorrupt;
    then nothing was written to `folder`.
    """
    model = load_model(start, dtype)
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
    model.save_pretrained(folder)
    load_tokenizer(start).save_pretrained(folder)
