"""Token ids as text that a person can read, and any text as characters that do nothing but stand there.

start/tokenizer.json of the run ─┐
<model.path>/tokenizer.json ─────┴─► TokenTexts ─► a text a token ─► visible: what is unseen is spelt out ─► the page

A policy may write anything: control characters, and marks that turn the direction of a whole line around.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from storage import layout
from storage.errors import NotInStore
from storage.store import Store

_TOKENIZER = "tokenizer.json"
_SPELT_OUT = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that are not seen where they stand: controls, formats, lone surrogates, separators."""
_CONTROL_PICTURES = 0x2400
_DELETE = 0x7F
_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 4
"""Tokens that one character can be spread over: of UTF-8 it has so many bytes."""


class TokenTexts:
    """The texts of tokens, by the tokenizer; without one, their ids."""

    def __init__(self, tokenizer: Tokenizer | None, note: str = "") -> None:
        self._tokenizer = tokenizer
        self.note = note
        """Why ids are shown instead of texts; empty where they are not."""

    def text(self, ids: Sequence[int]) -> str:
        """All of it, special tokens included."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        decoded: str = self._tokenizer.decode([i for i in ids if i >= 0], skip_special_tokens=False)
        return decoded

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; '' where only a later one completes a character, or nothing is known of it.

        Tokens are decoded behind those before them: alone, some would lose the space that they begin with.
        """
        if self._tokenizer is None:
            return [f"{i} " for i in ids]
        pieces = []
        # Not `tokenizers.decoders.DecodeStream`: it raises a bare Exception at some sequences that models do sample.
        context, told = 0, 0
        for i in range(len(ids)):
            before, now = self.text(ids[context:told]), self.text(ids[context : i + 1])
            due = i + 1 - told >= _MOST_UNFINISHED or i + 1 == len(ids)
            if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not due):
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            context, told = told, i + 1
        return pieces


def read_tokens(store: Store, config: Mapping[str, Any]) -> TokenTexts:
    """By the tokenizer of the run's start model; where this machine lacks it, or it is damaged, `note` says so."""
    try:
        return TokenTexts(Tokenizer.from_buffer(_tokenizer_file(store, config)))
    except FileNotFoundError:
        return TokenTexts(None, "tokens are shown as their ids: the tokenizer of this run's model is not here")
    except ValueError as error:
        return TokenTexts(None, f"tokens are shown as their ids: {_TOKENIZER} of this run's model is damaged: {error}")


def visible(text: str) -> str:
    """`text` with each character that is not seen where it stands spelt out: ␊ for a line feed, \\u202e for a mark."""
    return "".join(_spelt_out(c) if unicodedata.category(c) in _SPELT_OUT else c for c in text)


def _tokenizer_file(store: Store, config: Mapping[str, Any]) -> bytes:
    """Raises FileNotFoundError."""
    try:
        return bytes(store.get(f"{layout.START_MODEL}/{_TOKENIZER}"))
    except NotInStore:
        path = config.get("model", {}).get("path")
        if not isinstance(path, str):
            raise
    return (Path(path) / _TOKENIZER).read_bytes()


def _spelt_out(character: str) -> str:
    code = ord(character)
    if code < ord(" "):
        return chr(_CONTROL_PICTURES + code)
    if code == _DELETE:
        return "␡"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
