"""Tokens to text, without transformers and torch where the tokenizer needs neither.

tokenizer.json, and a generic tokenizer_config.json ─► the library `tokenizers`      milliseconds
anything else: a class of its own, extra settings   ─► transformers' tokenizer       seconds and 300 MB to import
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Decoder = Callable[[Sequence[Sequence[int]]], list[str]]
"""Texts of lists of token ids, without special tokens."""

_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""transformers' names for whatever tokenizer.json says. Other classes may change what it says."""
_SPECIAL = frozenset({"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
_WITHOUT_EFFECT = frozenset({"backend", "model_max_length", "tokenizer_class"})


def load_decoder(folder: Path) -> Decoder:
    """The decoder of the tokenizer in `folder`. Raises ModelFolderError as `load_tokenizer` does."""
    tokenizer = plain_tokenizer(folder)
    if tokenizer is not None:
        return lambda tokens: tokenizer.decode_batch([list(one) for one in tokens], skip_special_tokens=True)
    # Imported late: this is what the other way saves.
    from millrace.models.loading import load_tokenizer

    loaded = load_tokenizer(folder)
    return lambda tokens: loaded.batch_decode([list(one) for one in tokens], skip_special_tokens=True)


def plain_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `folder` if transformers would decode exactly as its tokenizer.json says, otherwise None."""
    try:
        config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
        plain = config.get("tokenizer_class") in _CLASSES and set(config) <= _SPECIAL | _WITHOUT_EFFECT
        if not plain or (folder / "special_tokens_map.json").exists() or (folder / "added_tokens.json").exists():
            return None
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001 — `tokenizers` raises bare Exceptions; transformers then says what is wrong
        return None
    # transformers' own calls do neither, whatever tokenizer.json says.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    named = [config[name] for name in _SPECIAL & set(config) if config[name] is not None]
    # transformers would add a token that tokenizer.json does not have.
    known = all(isinstance(token, str) and token in special for token in named)
    return tokenizer if config.get("eos_token") and known else None
