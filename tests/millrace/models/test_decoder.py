"""Texts are the same whether transformers or the library below it decodes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from millrace.errors import ModelFolderError
from millrace.models.decoder import load_decoder
from millrace.models.loading import load_tokenizer

_IMPORTS = """
import sys
from pathlib import Path
from millrace.models.decoder import load_decoder
load_decoder(Path(sys.argv[1]))
print("transformers" in sys.modules)
"""


@pytest.fixture
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _change(folder: Path, name: str, **settings: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def _texts(folder: Path, tokens: list[list[int]]) -> list[str]:
    return load_decoder(folder)([[]] * len(tokens), tokens, [False] * len(tokens))


def _assert_same_texts(folder: Path) -> None:
    expected = load_tokenizer(folder)
    tokens = [[], list(range(len(expected))), [*reversed(range(len(expected)))], [expected.eos_token_id] * 3]
    dropped = {expected.pad_token_id, expected.bos_token_id, expected.eos_token_id}
    kept = [[token for token in row if token not in dropped] for row in tokens]
    assert _texts(folder, tokens) == expected.batch_decode(kept, skip_special_tokens=False)


def _needs_transformers(folder: Path) -> bool:
    ended = subprocess.run([sys.executable, "-c", _IMPORTS, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout == "True\n"


def test_a_plain_tokenizer_decodes_as_in_transformers_and_does_not_import_it(folder: Path) -> None:
    _assert_same_texts(folder)
    assert not _needs_transformers(folder)


@pytest.mark.slow
def test_settings_that_change_texts_are_left_to_transformers(folder: Path) -> None:
    _change(folder, "tokenizer_config.json", clean_up_tokenization_spaces=True)
    _assert_same_texts(folder)
    assert _needs_transformers(folder)


def test_a_padding_token_that_only_the_config_names_is_left_out_too(folder: Path) -> None:
    _change(folder, "tokenizer_config.json", pad_token="7")
    _assert_same_texts(folder)
    assert "7" not in _texts(folder, [[*range(len(load_tokenizer(folder)))]])[0]


def test_a_folder_without_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="tokenizer"):
        load_decoder(tmp_path)
    with pytest.raises(ModelFolderError, match="no such folder"):
        load_decoder(tmp_path / "none")


@pytest.mark.parametrize("content", ["garbage", "[]", "3", "{}", '{"model": {"type": "BPE"}}', "[" * 100_000])
def test_a_tokenizer_that_cannot_be_read_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFolderError, match="not a tokenizer that transformers can load"):
        load_decoder(tmp_path)
