"""Weight files of a model folder that are damaged or incomplete are refused by their headers."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millrace.errors import ModelFolderError
from millrace.preflight.model_folder import check_weight_files

CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 20, "hidden_size": 8}
WEIGHTS, SHARD = "model.safetensors", "part-1.safetensors"
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, np.ndarray]:
    made = {"model.embed_tokens.weight": np.zeros((20, 8), np.float32), "model.norm.weight": np.zeros(8, np.float32)}
    for layer in range(3):
        made[f"model.layers.{layer}.self_attn.q_proj.weight"] = np.zeros((8, 8), np.float32)
        made[f"model.layers.{layer}.mlp.down_proj.weight"] = np.zeros((8, 16), np.float32)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / WEIGHTS)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    held = load_file(folder / WEIGHTS)
    edit(held)
    save_file(held, folder / WEIGHTS)


def write_index(folder: Path, weight_map: object) -> None:
    """Rename `model.safetensors`, which transformers would prefer to an index."""
    (folder / WEIGHTS).rename(folder / SHARD)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path, config: dict[str, Any] = CONFIG) -> ModelFolderError:
    with pytest.raises(ModelFolderError) as caught:
        check_weight_files(folder, config)
    assert caught.value.expected
    return caught.value


def test_a_whole_folder_is_fine_with_an_index_and_without(folder: Path) -> None:
    check_weight_files(folder, CONFIG)
    write_index(folder, dict.fromkeys(tensors(), SHARD))
    check_weight_files(folder, CONFIG)


def test_a_missing_layer_is_named(folder: Path) -> None:
    change(folder, lambda held: [held.pop(name) for name in list(held) if "layers.2" in name])
    mistake = refusal(folder)
    assert mistake.file == str(folder)
    assert "layer 2" in mistake.read


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        os.urandom(4096),
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 8) + b"{}      ",
        struct.pack("<Q", 4) + b"[[[[",
    ],
)
def test_a_file_in_another_format_is_named(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert refusal(folder).file in (str(folder), str(folder / WEIGHTS))


@pytest.mark.parametrize(
    ("weight_map", "file"),
    [
        ({"a": "../../secret.safetensors"}, INDEX),
        ({"a": "/etc/passwd"}, INDEX),
        ({"a": 5}, INDEX),
        ({"a": "gone.safetensors"}, "gone.safetensors"),
        ({"model.layers.9.x": SHARD}, INDEX),
        ([], INDEX),
        ({}, INDEX),
    ],
)
def test_an_index_that_leads_astray_is_refused(folder: Path, weight_map: object, file: str) -> None:
    write_index(folder, weight_map)
    assert refusal(folder).file == str(folder / file)


def test_a_million_layers_are_refused_at_once(folder: Path) -> None:
    assert "layer 3" in refusal(folder, {**CONFIG, "num_hidden_layers": 1_000_000}).read


def test_the_check_does_not_import_torch() -> None:
    code = "import sys, millrace.preflight.model_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
