"""Spoilt model folders: those to be refused, with a piece of the message, and those that are still the same model."""

import json
import os
import struct

import torch
from support.models.folder_edits import (
    INDEX,
    WEIGHTS,
    Edit,
    both,
    change,
    change_config,
    change_header,
    change_tensors,
    change_vocabulary,
    enlarge,
    fill,
    make_sparse,
    put_code,
    put_dangling_link,
    put_fifo,
    put_pickle,
    remove,
    remove_end,
    set_rotary,
    shard,
    write,
)

GATE = "model.layers.0.mlp.gate_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = json.loads('{"a":' * 400 + "1" + "}" * 400)
_WHOLE = r"model.safetensors: .*; expected a whole file of weights"
_LOADABLE = "that transformers can load "

REFUSED: dict[str, tuple[Edit, str]] = {
    # config.json
    "no config": (remove("config.json"), r"no config\.json; expected a model folder"),
    "a pipe as config": (put_fifo("config.json"), r"no config\.json; expected a model folder"),
    "an empty config": (write("config.json", ""), r"config\.json: not JSON"),
    "a list as config": (write("config.json", "[]"), r"config\.json: no JSON object"),
    "a config nested without end": (write("config.json", DEEP), r"config\.json: not JSON: .*nested too deeply"),
    "a config of blanks": (write("config.json", " " * (17 << 20)), r"config\.json: not JSON"),
    "a million layers": (change_config(num_hidden_layers=1_000_000), "lack layer 1; expected 1000000 layers"),
    "no layers": (change_config(num_hidden_layers=0), "num_hidden_layers is 0; expected a whole number above 0"),
    "three heads": (change_config(num_attention_heads=3, num_key_value_heads=3), "not a multiple of the number of at"),
    "key heads that do not divide": (change_config(num_key_value_heads=3), "num_key_value_heads is 3 and num_attent"),
    "wider heads": (change_config(head_dim=16), "is a tensor of the shape .*, as config.json describes it"),
    "another width": (change_config(hidden_size=24), r"expected \[\d+, 24\], as config.json describes it"),
    "another vocabulary": (change_config(vocab_size=300), r"expected \[300, 16\], as config.json describes it"),
    "a vocabulary without the end": (change_config(vocab_size=100), "eos_token_id is 257; expected token ids below"),
    "an unknown rotary embedding": (set_rotary(rope_type="spiral"), f"{_LOADABLE}.*spiral"),
    "rotary embeddings as a list": (change_config(rope_parameters=[1, 2]), r"rope_parameters is \[1, 2\]; expected"),
    "rotary embeddings by length": (set_rotary(rope_type="dynamic", factor=2.0), "rotary embeddings of type dynamic"),
    "rotary embeddings by length, under the old name": (
        change_config(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rotary embeddings of type dynamic",
    ),
    "rotary embeddings without a base": (set_rotary(rope_theta=0), "rope_parameters.rope_theta is 0; expected a num"),
    "rotary embeddings that lack a number": (set_rotary(rope_type="llama3", factor=8.0), "high_freq_factor"),
    "rotary embeddings stretched by nothing": (set_rotary(rope_type="linear", factor=0.0), "factor is 0.0; expected"),
    "a size without end": (change_config(hidden_size=float("inf")), "hidden_size is inf; expected a whole number"),
    "a norm that is no number": (change_config(rms_norm_eps=float("nan")), "rms_norm_eps is nan; expected a number"),
    "an unknown type of numbers": (change_config(dtype="float7"), f"{_LOADABLE}.*float7"),
    "a quantised model": (change_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized weights"),
    "an unknown attention": (change_config(attn_implementation="flash_9"), "attn_implementation is 'flash_9'"),
    "an attention from elsewhere": (change_config(_attn_implementation="evil/kernel"), "is 'evil/kernel'"),
    "another family": (change_config(model_type="gpt2"), "a gpt2 model can't be trained"),
    "a family as a list": (change_config(model_type=["llama"]), "model_type is"),
    "a family with more tensors": (change_config(model_type="qwen3"), "its weight files miss .*norm"),
    "an unknown activation": (change_config(hidden_act="sigh"), f"{_LOADABLE}.*sigh"),
    "an output that is not tied": (change_config(tie_word_embeddings=False), "its weight files miss lm_head.weight"),
    "missing biases": (change_config(attention_bias=True), "its weight files miss .*bias"),
    "too many kinds of layers": (change_config(layer_types=["full_attention"] * 9), "that transformers can load"),
    "weights elsewhere": (change_config(transformers_weights="../a.safetensors"), r"transformers_weights is '../a"),
    "an adapter": (write("adapter_config.json", "{}"), "it is an adapter of another model"),
    # Weights
    "a missing tensor": (change_tensors(lambda held: held.pop(GATE)), f"its weight files miss {GATE}"),
    "a tensor of another shape": (
        change_tensors(lambda held: held.update({GATE: torch.zeros(31, 16)})),
        rf"{GATE} is a tensor of the shape \[31, 16\] in the weight files; expected \[32, 16\]",
    ),
    "a tensor too many": (
        change_tensors(lambda held: held.update({"model.layers.0.spare.weight": torch.zeros(3)})),
        "its weight files hold model.layers.0.spare.weight",
    ),
    "an output that is tied and another one": (
        change_tensors(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] + 1})),
        "an output layer with other values than the embedding, but config.json says tie_word_embeddings",
    ),
    "a tensor beyond the file": (change_header(lambda held: held[GATE]["data_offsets"].__setitem__(1, 10**9)), _WHOLE),
    "overlapping tensors": (
        change_header(lambda held: held[GATE].update(data_offsets=held["model.norm.weight"]["data_offsets"])),
        _WHOLE,
    ),
    "a tensor of 2¹²⁴ values": (change_header(lambda held: held[GATE].update(shape=[2**62, 2**62])), _WHOLE),
    "a tensor of integers": (
        change_tensors(lambda held: held.update({GATE: held[GATE].to(torch.int8)})),
        f"{GATE} holds numbers of type I8; expected one of",
    ),
    "a tensor in eight bits": (
        change_tensors(lambda held: held.update({GATE: held[GATE].to(torch.float8_e4m3fn)})),
        f"{GATE} holds numbers of type F8_E4M3; expected one of",
    ),
    "a value that is no number": (fill(GATE, float("nan")), f"{GATE} holds values that are not finite"),
    "garbage as weights": (write(WEIGHTS, os.urandom(4096)), _WHOLE),
    "a header of exabytes": (write(WEIGHTS, struct.pack("<Q", 2**62) + b"{}"), _WHOLE),
    "weights cut off": (
        lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 9),
        _WHOLE,
    ),
    "a pipe as weights": (put_fifo(WEIGHTS), "model.safetensors: no regular file"),
    "weights that a link has lost": (put_dangling_link(WEIGHTS), "model.safetensors: no regular file"),
    "a pickle alone": (both(remove(WEIGHTS), put_pickle("pytorch_model.bin")), r"has no weights; expected \*\.safet"),
    "an index that leads outside": (
        lambda folder: shard(folder, **{GATE: "../../secret.safetensors"}),
        "expected the name of a file in the same folder",
    ),
    "an index of a missing file": (lambda folder: shard(folder, **{GATE: "part-7.safetensors"}), "part-7.safetensors"),
    "an index of a missing tensor": (lambda folder: shard(folder, spare="part-1.safetensors"), "does not hold spare"),
    "garbage as index": (both(remove(WEIGHTS), write(INDEX, b"\xff\x00")), "index.json: not JSON"),
    "an index of gigabytes": (both(remove(WEIGHTS), make_sparse(INDEX, 3 << 30)), "index.json: 3,221,225,472 bytes"),
    "an index of a list": (both(remove(WEIGHTS), write(INDEX, '{"metadata": {}, "weight_map": [1]}')), "weight_map is"),
    "an index without metadata": (
        both(remove(WEIGHTS), write(INDEX, '{"weight_map": {"a": "b"}}')),
        "metadata is no object",
    ),
    # The tokenizer and other settings
    "no tokenizer": (remove("tokenizer.json"), "no tokenizer; expected one of"),
    "garbage as tokenizer": (write("tokenizer.json", os.urandom(512)), "tokenizer.json: not JSON"),
    "a tokenizer of another kind": (write("tokenizer.json", '{"model": 7}'), "not a tokenizer that transformers c"),
    "a pipe as tokenizer": (put_fifo("tokenizer.json"), "no tokenizer; expected one of"),
    "an end of the text that is an object": (
        change("tokenizer_config.json", eos_token={"content": [1]}),
        "not a tokenizer that transformers can load .*eos_token",
    ),
    "a tokenizer without an end": (remove_end, "its tokenizer has no end-of-sequence token"),
    "a tokenizer that knows more": (change_vocabulary(enlarge), r"its tokenizer has .* tokens, its model knows \d+"),
    "garbage as the tokenizer's settings": (write("tokenizer_config.json", "{"), "tokenizer_config.json: not JSON"),
    "a list of special tokens": (write("special_tokens_map.json", "[]"), "special_tokens_map.json: no JSON"),
    "added tokens without numbers": (write("added_tokens.json", "7"), "added_tokens.json: no JSON object"),
    "garbage as generation config": (write("generation_config.json", "]"), "generation_config.json: not JSON"),
    "an end that the model does not know": (
        change("generation_config.json", eos_token_id=10**9),
        "eos_token_id is 1000000000; expected",
    ),
    "a cache of an unknown kind": (
        change("generation_config.json", cache_implementation="evil"),
        "that transformers can load .*Invalid `cache_implementation`",
    ),
    "an end as text": (change("generation_config.json", eos_token_id="</s>"), "eos_token_id is </s>; expected token"),
    "a pipe as chat template": (put_fifo("chat_template.jinja"), "chat_template.jinja: no regular file"),
}

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
