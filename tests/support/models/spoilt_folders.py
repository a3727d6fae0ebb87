"""Edits that spoil a model folder, those that must be refused and those that change nothing of the model."""

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
GATE = "model.layers.0.mlp.gate_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = json.loads('{"a":' * 400 + "1" + "}" * 400)


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


REFUSED: dict[str, Edit] = {
    "no config": remove("config.json"),
    "a pipe as config": put_fifo("config.json"),
    "an empty config": write("config.json", ""),
    "a list as config": write("config.json", "[]"),
    "a config nested without end": write("config.json", DEEP),
    "a config of blanks": write("config.json", " " * (17 << 20)),
    "a million layers": change_config(num_hidden_layers=1_000_000),
    "no layers": change_config(num_hidden_layers=0),
    "key heads that do not divide": change_config(num_key_value_heads=3),
    "wider heads": change_config(head_dim=16),
    "another width": change_config(hidden_size=24),
    "another vocabulary": change_config(vocab_size=300),
    "a vocabulary without the end": change_config(vocab_size=100),
    "an unknown rotary embedding": set_rotary(rope_type="spiral"),
    "rotary embeddings as a list": change_config(rope_parameters=[1, 2]),
    "rotary embeddings by length": set_rotary(rope_type="dynamic", factor=2.0),
    "rotary embeddings without a base": set_rotary(rope_theta=0),
    "rotary embeddings stretched by nothing": set_rotary(rope_type="linear", factor=0.0),
    "a size without end": change_config(hidden_size=float("inf")),
    "a norm that is no number": change_config(rms_norm_eps=float("nan")),
    "an unknown type of numbers": change_config(dtype="float7"),
    "a quantised model": change_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "an unknown attention": change_config(attn_implementation="flash_9"),
    "another family": change_config(model_type="gpt2"),
    "a family with more tensors": change_config(model_type="qwen3"),
    "an unknown activation": change_config(hidden_act="sigh"),
    "missing biases": change_config(attention_bias=True),
    "too many kinds of layers": change_config(layer_types=["full_attention"] * 9),
    "weights elsewhere": change_config(transformers_weights="../a.safetensors"),
    "an adapter": write("adapter_config.json", "{}"),
    "a missing tensor": change_tensors(lambda held: held.pop(GATE)),
    "a tensor of another shape": change_tensors(lambda held: held.update({GATE: torch.zeros(31, 16)})),
    "a tensor too many": change_tensors(lambda held: held.update({"model.layers.0.spare.weight": torch.zeros(3)})),
    "an output that is tied and another one": change_tensors(
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] + 1})
    ),
    "a tensor beyond the file": change_header(lambda held: held[GATE]["data_offsets"].__setitem__(1, 10**9)),
    "overlapping tensors": change_header(
        lambda held: held[GATE].update(data_offsets=held["model.norm.weight"]["data_offsets"])
    ),
    "a tensor of 2¹²⁴ values": change_header(lambda held: held[GATE].update(shape=[2**62, 2**62])),
    "a tensor of integers": change_tensors(lambda held: held.update({GATE: held[GATE].to(torch.int8)})),
    "a value that is no number": fill(GATE, float("nan")),
    "garbage as weights": write(WEIGHTS, os.urandom(4096)),
    "a header of exabytes": write(WEIGHTS, struct.pack("<Q", 2**62) + b"{}"),
    "weights cut off": lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 9),
    "a pipe as weights": put_fifo(WEIGHTS),
    "weights that a link has lost": put_dangling_link(WEIGHTS),
    "a pickle alone": both(remove(WEIGHTS), put_pickle("pytorch_model.bin")),
    "an index that leads outside": lambda folder: shard(folder, **{GATE: "../../secret.safetensors"}),
    "an index of a missing file": lambda folder: shard(folder, **{GATE: "part-7.safetensors"}),
    "an index of a missing tensor": lambda folder: shard(folder, spare="part-1.safetensors"),
    "garbage as index": both(remove(WEIGHTS), write(INDEX, b"\xff\x00")),
    "an index of gigabytes": both(remove(WEIGHTS), make_sparse(INDEX, 3 << 30)),
    "an index without metadata": both(remove(WEIGHTS), write(INDEX, '{"weight_map": {"a": "b"}}')),
    "no tokenizer": remove("tokenizer.json"),
    "garbage as tokenizer": write("tokenizer.json", os.urandom(512)),
    "a tokenizer of another kind": write("tokenizer.json", '{"model": 7}'),
    "an end of the text that is an object": change("tokenizer_config.json", eos_token={"content": [1]}),
    "a tokenizer without an end": remove_end,
    "a tokenizer that knows more": change_vocabulary(enlarge),
    "garbage as the tokenizer's settings": write("tokenizer_config.json", "{"),
    "a list of special tokens": write("special_tokens_map.json", "[]"),
    "added tokens without numbers": write("added_tokens.json", "7"),
    "garbage as generation config": write("generation_config.json", "]"),
    "an end that the model does not know": change("generation_config.json", eos_token_id=10**9),
    "a cache of an unknown kind": change("generation_config.json", cache_implementation="evil"),
    "an end as text": change("generation_config.json", eos_token_id="</s>"),
    "a pipe as chat template": put_fifo("chat_template.jinja"),
}
"""Folders that are refused before anything starts."""

SOUND: dict[str, Edit] = {
    "as it is": lambda folder: None,
    "a pickle beside the weights": put_pickle("pytorch_model.bin"),
    "code for the model": put_code("config.json", AutoConfig="own.Own", AutoModelForCausalLM="own.Own"),
    "code for the tokenizer": put_code("tokenizer_config.json", AutoTokenizer="own.Own"),
    "weights in two files": shard,
    "weights behind a link": lambda folder: (
        (folder / WEIGHTS).rename(folder / "b") and (folder / WEIGHTS).symlink_to("b")
    ),
    "the output beside the embedding that it is": change_tensors(
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()})
    ),
    "tensors of several types": change_tensors(lambda held: held.update({GATE: held[GATE].double()})),
    "weights without metadata": change_header(lambda held: held.pop("__metadata__")),
    "several ends": change("generation_config.json", eos_token_id=[1, 2]),
    "settings that nothing reads": change_config(made_by="a person", nested=NESTED),
}
"""Folders that are still the same model as the one without the edit."""
