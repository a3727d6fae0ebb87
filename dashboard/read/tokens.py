"""Token ids as readable text, with invisible characters made visible.

start/tokenizer.json of the run ─┐
<model.path>/tokenizer.json ─────┴─► TokenTexts ─► one text per token ─► visible: escapes invisible characters ─► page

A policy may generate any text, including control characters and marks that reverse the direction of a line.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store

_TOKENIZER = "tokenizer.json"
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of invisible characters: controls, formats, lone surrogates, separators."""
_CONTROL_PICTURES = 0x2400
_DELETE = 0x7F
_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 4
"""Maximum number of tokens per character, which has at most four bytes in UTF-8."""


class TokenTexts:
    """Decodes tokens; without a tokenizer, formats their ids."""

    def __init__(self, tokenizer: Tokenizer | None, note: str = "") -> None:
        self._tokenizer = tokenizer
        self.note = note
        """Why ids are shown, a sentence; empty if texts are shown."""

    def text(self, ids: Sequence[int]) -> str:
        """Decodes all tokens, including special tokens."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        decoded: str = self._tokenizer.decode([i for i in ids if i >= 0], skip_special_tokens=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token adds; '' for a token whose character a later token completes.

        Tokens are decoded after their predecessors, because some would lose their leading space alone.
        """
        if self._tokenizer is None:
            return [f"{i} " for i in ids]
        pieces = []
        # `tokenizers.decoders.DecodeStream` raises a bare Exception for some sequences that models sample.
        context, done = 0, 0
        for i in range(len(ids)):
            previous, current = self.text(ids[context:done]), self.text(ids[context : i + 1])
            at_limit = i + 1 - done >= _MOST_UNFINISHED or i + 1 == len(ids)
            if len(current) <= len(previous) or (current.endswith(_UNFINISHED) and not at_limit):
                pieces.append("")
                continue
            pieces.append(current[len(previous) :])
            context, done = done, i + 1
        return pieces


def read_tokens(store: Store, config: Mapping[str, Any]) -> TokenTexts:
    """Loads the tokenizer of the run's start model; `note` explains a missing or damaged tokenizer."""
    try:
        return TokenTexts(Tokenizer.from_buffer(_tokenizer_file(store, config)))
    except FileNotFoundError:
        return TokenTexts(
            None, "Tokens are shown as their ids: the tokenizer of this run's model is missing on this machine."
        )
    except (ValueError, OSError) as error:
        return TokenTexts(None, f"Tokens are shown as their ids: {_TOKENIZER} of this run's model is damaged: {error}")


def visible(text: str) -> str:
    """Escapes invisible characters: ␊ for a line feed, \\u202e for a direction mark."""
    return "".join(_escaped(c) if unicodedata.category(c) in _INVISIBLE else c for c in text)


def shortened(text: str, most: int) -> str:
    """Returns `text`, or its first `most` characters and its length."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text):,} characters)"


def _tokenizer_file(store: Store, config: Mapping[str, Any]) -> bytes:
    """Raises FileNotFoundError."""
    try:
        return bytes(store.get(f"{layout.START_MODEL}/{_TOKENIZER}"))
    except NotInStore:
        path = config.get("model", {}).get("path")
        if not isinstance(path, str):
            raise
    return (Path(path).expanduser() / _TOKENIZER).read_bytes()


def _escaped(character: str) -> str:
    code = ord(character)
    if code < ord(" "):
        return chr(_CONTROL_PICTURES + code)
    if code == _DELETE:
        return "␡"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
