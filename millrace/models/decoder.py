"""Tokens to text, without transformers and torch where the tokenizer needs neither.

tokenizer.json, and a generic tokenizer_config.json ─► the library `tokenizers`      milliseconds
anything else: another class, extra settings       ─► transformers' tokenizer       seconds and 300 MB to import
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""transformers' names for whatever tokenizer.json says. Other classes may change what it says."""
_SPECIAL = frozenset({"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
_DROPPED = ("pad_token", "bos_token", "eos_token")
CONTEXT_TOKENS = 8
"""Tokens before a response that may spell `<think>` and a line break."""
_WITHOUT_EFFECT = frozenset({"backend", "model_max_length", "tokenizer_class"})


class Decoder:
    """Responses as rewards read them: without padding, begin and stop tokens; other special tokens stay.

    If the tokens before a response end with `<think>`, as chat templates may, its text begins with it.
    """

    def __init__(
        self, decode: Callable[[list[list[int]]], list[str]], special: Collection[int], dropped: Collection[int | None]
    ) -> None:
        """`special` are the ids of all special tokens, `dropped` those of padding, begin and end of a text."""
        self._decode = decode
        self._special = frozenset(special)
        self._dropped = frozenset(dropped)

    def __call__(
        self, contexts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], stopped: Sequence[bool]
    ) -> list[str]:
        """The texts of `responses`, given `contexts`, at least the last `CONTEXT_TOKENS` tokens before each.

        `stopped` says whether sampling each ended at a stop token.
        """
        kept = []
        for response, ended in zip(responses, stopped, strict=True):
            # In a chat, the special token that ends a response may be another than at a text's end.
            dropped = self._dropped | self._special.intersection(response[-1:] if ended else ())
            kept.append([token for token in response if token not in dropped])
        openings = self._decode([list(tokens[-CONTEXT_TOKENS:]) for tokens in contexts])
        texts = self._decode(kept)
        return [
            f"<think>\n{text}" if opening.rstrip().endswith("<think>") else text
            for opening, text in zip(openings, texts, strict=True)
        ]


def load_decoder(folder: Path) -> Decoder:
    """The decoder of the tokenizer in `folder`. Raises ModelFolderError as `load_tokenizer` does."""
    tokenizer = plain_tokenizer(folder)
    if tokenizer is None:
        # Imported late: the other way saves this import.
        from millrace.models.loading import load_tokenizer

        return decoder_of(load_tokenizer(folder))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return Decoder(
        lambda rows: tokenizer.decode_batch(rows, skip_special_tokens=False),
        [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special],
        [tokenizer.token_to_id(config[name]) for name in _DROPPED if config.get(name) is not None],
    )


def decoder_of(tokenizer: "PreTrainedTokenizerBase") -> Decoder:
    """The decoder of transformers' `tokenizer`."""
    return Decoder(
        lambda rows: tokenizer.batch_decode(rows, skip_special_tokens=False),
        {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special},
        [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id],
    )


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
    has_all = all(isinstance(token, str) and token in special for token in named)
    return tokenizer if config.get("eos_token") and has_all else None
