"""The policy's Hugging Face folder: checked, loaded and saved. Nothing is downloaded, no pickle opened, no code run."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from millrace.errors import ModelFolderError

# A progress bar over tensors is noise in the logs of stages.
logging.disable_progress_bar()
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_LONGEST_REASON = 400
NOT_TIED = (
    "its weight files hold an output layer with other values than the embedding, but config.json says "
    "tie_word_embeddings; expected false there, or no such tensor"
)


def load_model(folder: Path, dtype: str) -> PreTrainedModel:
    """The causal language model in `folder`, in `dtype`.

    Raises ModelFolderError, also if the weight files and the model that config.json describes have different tensors
    (transformers would draw missing ones at random), or if a value is not finite.
    """
    with refused_in_a_sentence(folder):
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        # transformers' default attention, sdpa, leaves soft caps out without a word.
        attention = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_LOCAL,
            **attention,
        )
    model, about = loaded
    refuse_differences(folder, about)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.tie_word_embeddings and output.weight is not embedding.weight:
        raise ModelFolderError(NOT_TIED, file=folder)
    for name, parameter in model.named_parameters():
        refuse_not_finite(folder, name, parameter)
    return cast("PreTrainedModel", model)


def check_loads(folder: Path, tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> PreTrainedModel:
    """The model in `folder`, in `dtype`, without values: `tensors` are those of the weight files, on the meta device.

    Raises ModelFolderError if `load_model` would find other tensors than the model of config.json has.
    """
    with refused_in_a_sentence(folder):
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, loaded = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            device_map="meta",
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        if (folder / "generation_config.json").exists():
            GenerationConfig.from_pretrained(folder, local_files_only=True)
    refuse_differences(folder, loaded)
    return cast("PreTrainedModel", model)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Writes configuration and weights to `folder`, all readable by the same people."""
    model.save_pretrained(folder)
    # safetensors makes its files readable by their owner alone.
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


def is_tied(folder: Path) -> bool:
    """Whether the output layer of the model in `folder` is its embedding, by its config.json."""
    with refused_in_a_sentence(folder):
        return bool(AutoConfig.from_pretrained(folder, **_LOCAL).tie_word_embeddings)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values of `tensor` are finite. Needs no copy of it: NaN is its own smallest and largest value."""
    return all(bool(torch.isfinite(value)) for value in tensor.detach().aminmax())


def refuse_not_finite(folder: Path, name: str, tensor: torch.Tensor) -> None:
    """Raises ModelFolderError unless all values of the tensor `name` are finite."""
    if not is_finite(tensor):
        raise ModelFolderError(f"{name} holds values that are not finite", file=folder, expected="numbers")


def refuse_differences(folder: Path, loaded: Mapping[str, Any]) -> None:
    """Raises ModelFolderError unless the weight files have exactly the model's tensors, by transformers' report."""
    if missing := sorted(loaded["missing_keys"]):
        raise ModelFolderError(f"its weight files miss {_named(missing)}", file=folder)
    if differing := sorted(loaded["mismatched_keys"]):
        name, stored, expected = differing[0]
        read = f"a tensor of the shape {list(stored)} in the weight files"
        raise ModelFolderError(read, file=folder, key=name, expected=f"{list(expected)}, as config.json describes it")
    if unexpected := sorted(loaded["unexpected_keys"]):
        raise ModelFolderError(
            f"its weight files hold {_named(unexpected)}",
            file=folder,
            expected="the tensors that config.json describes",
        )


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def empty_model(folder: Path) -> PreTrainedModel:
    """The model in `folder` without values: names and shapes of its parameters. Raises ModelFolderError."""
    with refused_in_a_sentence(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model


def load_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, which must have an end-of-sequence token. Raises ModelFolderError.

    `chat_template` is Jinja that replaces its own chat template; None keeps that.
    """
    with refused_in_a_sentence(folder, what="tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    if tokenizer.eos_token_id is None:
        read = "its tokenizer has no end-of-sequence token"
        raise ModelFolderError(read, file=folder, expected="one, at which responses stop")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def end_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response of the model in `folder`: its tokenizer's, and those of generation_config.json.

    An instruct model often ends its turn with another token than the one that ends a text. Raises ModelFolderError.
    """
    named = None
    if (folder / "generation_config.json").is_file():
        with refused_in_a_sentence(folder, what="generation_config.json"):
            named = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    more = named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *more) if token is not None))


@contextmanager
def refused_in_a_sentence(folder: Path, what: str = "causal language model") -> Iterator[None]:
    """Raises ModelFolderError for any error of the block, which reads `folder`."""
    if not folder.is_dir():
        raise ModelFolderError("no such folder", file=folder, expected="a Hugging Face causal language model")
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # transformers takes a file's values apart without looking at them, and may raise anything for it. It adds pages
        # of advice.
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" …")
        raise ModelFolderError(f"not a {what} that transformers can load ({reason})", file=folder) from error
