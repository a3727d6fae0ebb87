"""Tokens become text that a person can read, and no character of it does anything but stand there."""

import json
import unicodedata
from pathlib import Path

import pytest
from support.stores.dict_store import DictStore
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import WordLevel

from dashboard.read.tokens import TokenTexts, read_tokens, visible


@pytest.fixture(scope="module")
def bytes_alone() -> Tokenizer:
    """A tokenizer of bytes: one byte of a long UTF-8 character is not a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def spaced() -> Tokenizer:
    """Words that begin with a space, which the decoder takes away from the first of a text."""
    tokenizer = Tokenizer(WordLevel({"▁a": 0, "▁b": 1, "c": 2}, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_each_piece_is_what_its_token_adds_to_the_text(bytes_alone: Tokenizer, spaced: Tokenizer) -> None:
    text = "a é 😀x"
    ids = bytes_alone.encode(text).ids
    pieces = TokenTexts(bytes_alone).pieces(ids)
    assert pieces == ["a", " ", "", "é", " ", "", "", "", "😀", "x"]
    assert "".join(pieces) == TokenTexts(bytes_alone).text(ids) == text
    assert TokenTexts(spaced).pieces([0, 1, 2, 1]) == ["a", " b", "c", " b"]
    assert TokenTexts(bytes_alone).pieces([ids[0], 99_999, -1]) == ["a", "", ""]


def test_bytes_that_never_become_a_character_are_shown_as_such_after_four_tokens(bytes_alone: Tokenizer) -> None:
    (byte,) = bytes_alone.encode("é").ids[:1]
    pieces = TokenTexts(bytes_alone).pieces([byte] * 9)
    assert [bool(piece) for piece in pieces] == [False, False, False, True, False, False, False, True, True]
    assert set("".join(pieces)) == {"\ufffd"}


def test_the_tokenizer_of_the_start_model_comes_before_the_model_folder(
    bytes_alone: Tokenizer, spaced: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(spaced.to_str())
    config = {"model": {"path": str(tmp_path)}}
    store = DictStore()
    assert read_tokens(store, config).text([0, 1]) == "a b"
    store.put("start/tokenizer.json", bytes_alone.to_str().encode())
    tokens = read_tokens(store, config)
    assert (tokens.text(bytes_alone.encode("hi").ids), tokens.note) == ("hi", "")


@pytest.mark.parametrize("config", [{}, {"model": {"path": None}}, {"model": {"path": "/nowhere/at/all"}}])
def test_without_a_tokenizer_ids_stand_for_tokens_and_that_is_said(config: dict[str, object]) -> None:
    tokens = read_tokens(DictStore(), config)
    assert (tokens.text([7, 8]), tokens.pieces([7, 8])) == ("7 8", ["7 ", "8 "])
    assert tokens.note


@pytest.mark.parametrize("content", [b"{", b"\xff", json.dumps({"model": 1}).encode()])
def test_a_damaged_tokenizer_is_reported_as_damaged(content: bytes) -> None:
    tokens = read_tokens(DictStore({"start/tokenizer.json": content}), {})
    assert "damaged" in tokens.note
    assert tokens.text([7]) == "7"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc\r", "a␊b␉c␍"),
        ("\x00\x1b[2J\x7f\x85", "␀␛[2J␡\\u0085"),
        ("abc\u202edcba\u2066\u200b\ufeff", "abc\\u202edcba\\u2066\\u200b\\ufeff"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\ud800 \U000e0041", "\\ud800 \\U000e0041"),
        ("é 漢 😀 <b>&amp;</b>", "é 漢 😀 <b>&amp;</b>"),
    ],
)
def test_what_is_not_seen_is_spelt_out_and_everything_else_stays(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_of_all_characters_none_is_left_that_is_not_seen() -> None:
    everything = visible("".join(map(chr, range(0x110000))))
    assert {unicodedata.category(c) for c in everything} & {"Cc", "Cf", "Cs", "Zl", "Zp"} == set()
    assert everything.encode()
