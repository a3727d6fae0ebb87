"""`millrace import`: a model from elsewhere as a Hugging Face folder that trainer and engines take as it is.

source ─► read in the wanted dtype ─► special tokens, template, generation config set ─► written beside FOLDER
             nothing missing, nothing left over                                             │ read again: the same
                                                                                            ▼ weights?
                                                                                   renamed to FOLDER
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from millrace.chat.template import TemplateRenderer
from millrace.errors import ChatError, InputError, MissingExtra
from millrace.importing.sources import located
from millrace.models.loading import load_model, load_tokenizer, save_model
from millrace.models.supported import check_trainable

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
        raise InputError(f"{folder} exists already; expected the name of a folder that import may create")
    template = None if chat_template is None else _text_of(chat_template)
    with located(source) as found, _refused_in_a_sentence(source):
        tokenizer = _read_tokenizer(found)
        model, done = _read_model(found, dtype)
        check_trainable(model.config.to_dict())
        done += _mend_special_tokens(model, tokenizer, source)
        done += _mend_template(tokenizer, template)
        done += _mend_turn_ends(model, tokenizer, source)
        _write(model, tokenizer, folder, dtype)
    return done


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read as a chat template: {error}") from error


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
        raise InputError(f"{source}: not a causal language model that can be imported: {reason[0]}") from error


def _arguments(found: Path) -> dict[str, Any]:
    """How transformers is told where the model is."""
    if found.is_dir():
        return {"pretrained_model_name_or_path": found, "local_files_only": True}
    return {"pretrained_model_name_or_path": found.parent, "gguf_file": found.name, "local_files_only": True}


def _read_tokenizer(found: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(**_arguments(found))
    if not found.is_dir():
        _add_ends(tokenizer, found)
    return tokenizer


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


def _read_model(found: Path, dtype: str) -> tuple[PreTrainedModel, list[str]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **_arguments(found), dtype=getattr(torch, dtype), output_loading_info=True
    )
    model, about = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about[what]:
            named = ", ".join(sorted(map(str, about[what]))[:4])
            raise InputError(
                f"{found.name}: {len(about[what])} {what.replace('_keys', '')} tensors ({named}); expected those of a "
                f"{type(model).__name__}"
            )
    size = sum(parameter.numel() for parameter in model.parameters())
    kept = f"{size / 1e6:,.1f} million parameters of a {type(model).__name__}"
    if found.is_dir():
        return model, [f"weights: {kept}, in {dtype}"]
    kinds = _check_gguf(found, size)
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
        raise InputError(f"{path.name}: holds {stored:,} weights, and the model made of it {size:,}; expected the same")
    return ", ".join(sorted({tensor.tensor_type.name for tensor in weights}))


def _mend_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> list[str]:
    config, done = model.config, []
    if tokenizer.eos_token_id is None:
        raise InputError(f"{source}: its tokenizer has no end-of-sequence token, so no response could stop")
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{source}: its tokenizer has {len(tokenizer):,} tokens, its model knows {config.vocab_size:,}; expected "
            "a tokenizer of the model's own"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        done.append(f"padding token: there was none, now {tokenizer.eos_token}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and tokenizer.model_max_length > longest:
        tokenizer.model_max_length = longest
        done.append(f"longest text: {longest:,} tokens, as the model's config says")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        theirs, before = getattr(tokenizer, name), getattr(config, name)
        if theirs is not None and theirs not in (before if isinstance(before, list) else [before]):
            setattr(config, name, theirs)
            done.append(f"{name} of the config: {before}, now {theirs}, the tokenizer's {_token(tokenizer, theirs)}")
    named = (f"{kind} {getattr(tokenizer, f'{kind}_token')}" for kind in ("bos", "eos", "pad"))
    return [f"tokenizer: {len(tokenizer):,} tokens; {', '.join(named)}", *done]


def _mend_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> list[str]:
    before = tokenizer.chat_template
    if template is not None:
        tokenizer.chat_template = template
        return [f"chat template: {'set' if before is None else 'replaced'}"]
    if before is None:
        return ["chat template: none; --chat-template FILE sets one"]
    return ["chat template: kept"]


def _mend_turn_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str) -> list[str]:
    """Generation stops at the end of a sequence, and at the token that ends a turn in the chat template."""
    config = model.generation_config
    before = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    wanted = [token for token in before if token is not None]
    for token in (tokenizer.eos_token_id, _turn_end(tokenizer, source)):
        if token is not None and token not in wanted:
            wanted.append(token)
    config.eos_token_id = wanted
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    stops = f"generation stops at {', '.join(_token(tokenizer, token) for token in wanted)}"
    return [stops if wanted == before else f"{stops}; it was {before}"]


def _turn_end(tokenizer: PreTrainedTokenizerBase, source: str) -> int | None:
    """The token that ends an assistant's turn in the chat template; None without a template."""
    if tokenizer.chat_template is None:
        return None
    try:
        (end,) = TemplateRenderer(tokenizer).stop_token_ids
    except ChatError as error:
        raise InputError(f"{source}: {error}; expected another template, with --chat-template FILE") from error
    return end


def _token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str) -> None:
    """Writes a folder beside `folder`, checks what is read back from it, and gives it its name."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.absolute().parent, prefix=".tmp-import-") as temporary:
        written = Path(temporary) / "model"
        save_model(model, written)
        tokenizer.save_pretrained(written)
        again = dict(load_model(written, dtype).named_parameters())
        here = dict(model.named_parameters())
        if differing := [name for name in here.keys() | again.keys() if not _same(here.get(name), again.get(name))]:
            raise InputError(f"{folder}: {sorted(differing)[0]} read back differs from what was written")
        load_tokenizer(written)
        written.rename(folder)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
