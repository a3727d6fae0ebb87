"""Edits of the files of a model folder; most functions return the edit."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MARK = "MILLRACE_TEST_MARK"
"""Names a file that code, or a pickle, of the folder would make."""

Edit = Callable[[Path], object]


def change_config(**values: object) -> Edit:
    return change("config.json", **values)


def change(name: str, **values: object) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def write(name: str, content: str | bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def put_fifo(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def put_dangling_link(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder.parent / "nowhere")

    return edit


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        edit(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def fill(name: str, value: float) -> Edit:
    return change_tensors(lambda held: held[name].view(-1)[-1:].fill_(value))


def shard(folder: Path, **weight_map: str) -> None:
    held = load_file(folder / WEIGHTS)
    names = sorted(held)
    (folder / WEIGHTS).unlink()
    for number, half in enumerate((names[::2], names[1::2])):
        save_file({name: held[name] for name in half}, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {**files, **weight_map}}))


def put_pickle(name: str) -> Edit:
    """A pickle that leaves a mark when it is opened."""
    mark = f"cposix\nsystem\n(S'touch ${MARK}'\ntR."
    return write(name, mark)


def put_code(name: str, **auto_map: str) -> Edit:
    """Code in the folder that leaves a mark when it runs, and that a file of settings names."""

    def edit(folder: Path) -> None:
        code = f"import os, pathlib\npathlib.Path(os.environ[{MARK!r}]).touch()\nclass Own: pass\n"
        (folder / "own.py").write_text(code)
        change(name, auto_map=auto_map)(folder)

    return edit


def remove_end(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in values.items() if "eos" not in name}))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)


def change_vocabulary(edit: Callable[[dict[str, int]], object]) -> Edit:
    def apply(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        edit(values["model"]["vocab"])
        path.write_text(json.dumps(values))

    return apply


def enlarge(vocab: dict[str, int]) -> None:
    size = len(vocab) + 64
    vocab |= {f"<more {number}>": size + number for number in range(1000)}


def change_header(edit: Callable[[dict[str, dict[str, list[int]]]], object]) -> Edit:
    """Changes the header of the weight file, and no tensor."""

    def apply(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        values = json.loads(data[8:end])
        edit(values)
        changed = json.dumps(values).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(changed)) + changed + data[end:])

    return apply


def make_sparse(name: str, size: int) -> Edit:
    """A file of zeros that takes no room on the disk."""

    def edit(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, size)

    return edit


def set_rotary(**values: object) -> Edit:
    return change_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **values})


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]
