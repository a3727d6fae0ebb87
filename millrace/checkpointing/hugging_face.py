"""A checkpoint's policy as a Hugging Face folder: what transformers and vLLM load as it is."""

from pathlib import Path

import torch

from millrace.checkpointing.policy_state import load_weights
from millrace.errors import ModelFolderError
from millrace.model import load_model, load_tokenizer
from storage.checkpoints import Checkpoint
from storage.store import Store


def write_model_folder(store: Store, checkpoint: Checkpoint, start: Path, dtype: str, folder: Path) -> None:
    """Writes configuration, generation configuration, tokenizer and weights, these in `dtype`, adapters merged in.

    `start` is the folder of the model that the run started from. Raises ModelFolderError where it is another one, and
    StreamCorrupt; then `folder` holds nothing that could be taken for a model.
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
