"""Folders that somebody has spoilt: those to be refused, with the sentence, and those that are the same model still."""

import json
import os
import struct

import torch
from support.models.folder_edits import (
    INDEX,
    WEIGHTS,
    Edit,
    both,
    changed,
    config,
    dangling,
    fifo,
    filled,
    gone,
    header,
    larger,
    pickled,
    rotary,
    sharded,
    sparse,
    tensors,
    vocabulary,
    with_code,
    without_end,
    written,
)

GATE = "model.layers.0.mlp.gate_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = json.loads('{"a":' * 400 + "1" + "}" * 400)

REFUSED: dict[str, tuple[Edit, str]] = {
    "no config": (gone("config.json"), r"no config\.json; expected a model folder"),
    "a pipe as config": (fifo("config.json"), r"no config\.json; expected a model folder"),
    "an empty config": (written("config.json", ""), r"config\.json: not JSON"),
    "a list as config": (written("config.json", "[]"), r"config\.json: no JSON object"),
    "a config nested without end": (written("config.json", DEEP), r"config\.json: not JSON: .*nested too deeply"),
    "a config of many megabytes": (written("config.json", " " * (17 << 20)), r"config\.json: .* bytes; expected"),
    "a million layers": (config(num_hidden_layers=1_000_000), r"lack layer 1; expected 1000000 layers"),
    "no layers": (config(num_hidden_layers=0), r"num_hidden_layers is 0; expected a whole number above 0"),
    "three heads": (
        config(num_attention_heads=3, num_key_value_heads=3),
        r"not a multiple of the number of attention heads",
    ),
    "key heads that do not divide": (
        config(num_key_value_heads=3),
        r"num_key_value_heads is 3 and num_attention_heads is 2",
    ),
    "wider heads": (
        config(head_dim=16),
        r"a tensor of the shape .*; expected .*, as config.json describes",
    ),
    "another width": (config(hidden_size=24), r"expected \[\d+, 24\]"),
    "another vocabulary": (config(vocab_size=300), r"expected \[300, 16\]"),
    "a vocabulary without the end": (
        config(vocab_size=100),
        r"eos_token_id is 257; expected token ids below vocab_size, 100",
    ),
    "an unknown rotary embedding": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        r"not a causal language model that transformers can load .*spiral",
    ),
    "rotary embeddings as a list": (config(rope_parameters=[1, 2]), r"rope_parameters is \[1, 2\]; expected an obj"),
    "rotary embeddings by length": (
        config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        r"rotary embeddings of type dynamic",
    ),
    "rotary embeddings by length, under the old name beside the new one": (
        config(rope_scaling={"type": "dynamic", "factor": 2.0}),
        r"rotary embeddings of type dynamic",
    ),
    "rotary embeddings without a base": (
        rotary(rope_theta=0),
        r"rope_parameters.rope_theta is 0; expected a number above",
    ),
    "rotary embeddings that lack a number": (
        rotary(rope_type="llama3", factor=8.0),
        r"that transformers can load .*high_freq_factor",
    ),
    "rotary embeddings stretched by nothing": (
        rotary(rope_type="linear", factor=0.0),
        r"rope_parameters.factor is 0.0; expected a number above 0",
    ),
    "a size without end": (config(hidden_size=float("inf")), r"hidden_size is inf; expected a whole number"),
    "a norm that is no number": (config(rms_norm_eps=float("nan")), r"rms_norm_eps is nan; expected a finite"),
    "a type of numbers that is not there": (config(dtype="float7"), r"that transformers can load .*float7"),
    "a quantised model": (config(quantization_config={"quant_method": "gptq", "bits": 4}), r"quantized weights"),
    "an attention that is not there": (
        config(attn_implementation="flash_attention_9"),
        r"attn_implementation is 'flash_a",
    ),
    "an attention from elsewhere": (
        config(_attn_implementation="evil/kernel"),
        r"attn_implementation is 'evil/kernel'",
    ),
    "another family": (config(model_type="gpt2"), r"a gpt2 model can't be trained"),
    "a family as a list": (config(model_type=["llama"]), r"model_type is"),
    "a family with more tensors": (config(model_type="qwen3"), r"its weight files miss .*norm"),
    "an unknown activation": (config(hidden_act="sigh"), r"that transformers can load .*sigh"),
    "an output that is not tied": (config(tie_word_embeddings=False), r"its weight files miss lm_head.weight"),
    "biases that are not there": (config(attention_bias=True), r"its weight files miss .*bias"),
    "kinds of layers that are too many": (config(layer_types=["full_attention"] * 9), r"that transformers can load"),
    "weights that are elsewhere": (config(transformers_weights="../a.safetensors"), r"transformers_weights is '../a"),
    "an adapter": (written("adapter_config.json", "{}"), r"it is an adapter of another model"),
    "a tensor that is missing": (tensors(lambda held: held.pop(GATE)), rf"its weight files miss {GATE}"),
    "a tensor of another shape": (
        tensors(lambda held: held.update({GATE: torch.zeros(31, 16)})),
        rf"{GATE} is a tensor of the shape \[31, 16\] in the weight files; expected \[32, 16\]",
    ),
    "a tensor too many": (
        tensors(lambda held: held.update({"model.layers.0.spare.weight": torch.zeros(3)})),
        r"its weight files hold model.layers.0.spare.weight; expected the tensors",
    ),
    "an output that is tied and another one": (
        tensors(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"] + 1})),
        r"an output layer with other values than the embedding, but config.json says tie_word_embeddings",
    ),
    "a tensor that ends behind the file": (
        header(lambda held: held[GATE]["data_offsets"].__setitem__(1, 10**9)),
        r"model.safetensors: .*; expected a whole file of weights",
    ),
    "tensors that overlap": (
        header(lambda held: held[GATE].update(data_offsets=held["model.norm.weight"]["data_offsets"])),
        r"model.safetensors: .*; expected a whole file of weights",
    ),
    "a tensor of more values than there are numbers": (
        header(lambda held: held[GATE].update(shape=[2**62, 2**62])),
        r"model.safetensors: .*; expected a whole file of weights",
    ),
    "a tensor of integers": (
        tensors(lambda held: held.update({GATE: held[GATE].to(torch.int8)})),
        rf"{GATE} holds numbers of type I8; expected one of",
    ),
    "a tensor in eight bits": (
        tensors(lambda held: held.update({GATE: held[GATE].to(torch.float8_e4m3fn)})),
        rf"{GATE} holds numbers of type F8_E4M3; expected one of",
    ),
    "a value that is no number": (filled(GATE, float("nan")), rf"{GATE} holds values that are not finite"),
    "garbage as weights": (
        written(WEIGHTS, os.urandom(4096)),
        r"model.safetensors: .*; expected a whole file of weights",
    ),
    "a header of exabytes": (written(WEIGHTS, struct.pack("<Q", 2**62) + b"{}"), r"its header claims 4,611,"),
    "a header of many megabytes": (
        written(WEIGHTS, struct.pack("<Q", 40 << 20) + b"{" + b" " * ((40 << 20) - 2) + b"}"),
        r"its header claims 41,943,040 bytes",
    ),
    "weights cut off": (
        lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 9),
        r"model.safetensors: .*; expected a whole file of weights",
    ),
    "a pipe as weights": (fifo(WEIGHTS), r"model.safetensors: no regular file"),
    "weights that a link has lost": (dangling(WEIGHTS), r"model.safetensors: no regular file"),
    "a pickle alone": (both(gone(WEIGHTS), pickled("pytorch_model.bin")), r"has no weights; expected \*\.safetensors"),
    "an index that leads outside": (
        lambda folder: sharded(folder, **{GATE: "../../secret.safetensors"}),
        r"expected the name of a file in the same folder",
    ),
    "an index of a file that is not there": (
        lambda folder: sharded(folder, **{GATE: "part-7.safetensors"}),
        r"part-7.safetensors: no such file",
    ),
    "an index of a tensor that is not there": (
        lambda folder: sharded(folder, spare="part-1.safetensors"),
        r"part-1.safetensors does not hold spare",
    ),
    "garbage as index": (both(gone(WEIGHTS), written(INDEX, b"\xff\x00")), r"index.json: not JSON"),
    "an index of gigabytes": (
        both(gone(WEIGHTS), sparse(INDEX, 3 << 30)),
        r"index.json: 3,221,225,472 bytes; expe",
    ),
    "an index of a list": (
        both(gone(WEIGHTS), written(INDEX, '{"metadata": {}, "weight_map": [1]}')),
        r"weight_map is no object",
    ),
    "an index without metadata": (
        both(gone(WEIGHTS), written(INDEX, '{"weight_map": {"a": "b"}}')),
        r"index.json: metadata is no object",
    ),
    "no tokenizer": (gone("tokenizer.json"), r"no tokenizer; expected one of"),
    "garbage as tokenizer": (written("tokenizer.json", os.urandom(512)), r"tokenizer.json: not JSON"),
    "a tokenizer of another kind": (written("tokenizer.json", '{"model": 7}'), r"not a tokenizer that transformers c"),
    "a pipe as tokenizer": (fifo("tokenizer.json"), r"no tokenizer; expected one of"),
    "a tokenizer without tokens": (vocabulary(dict.clear), r"tokenizer.json: its vocabulary is empty"),
    "a token with a number without end": (
        vocabulary(lambda vocab: vocab.update(far=2**31)),
        r"tokenizer.json: token 'far' has the number 2147483648; expected one below",
    ),
    "an end of the text that is an object": (
        changed("tokenizer_config.json", eos_token={"content": [1]}),
        r"not a tokenizer that transformers can load .*eos_token",
    ),
    "a tokenizer without an end": (without_end, r"its tokenizer has no end-of-sequence token"),
    "a tokenizer that knows more": (vocabulary(larger), r"its tokenizer has .* tokens, its model knows \d+; expected"),
    "garbage as the tokenizer's settings": (
        written("tokenizer_config.json", "{"),
        r"tokenizer_config.json: not JSON",
    ),
    "a list of special tokens": (written("special_tokens_map.json", "[]"), r"special_tokens_map.json: no JSON"),
    "added tokens without numbers": (written("added_tokens.json", "7"), r"added_tokens.json: no JSON object"),
    "garbage as generation config": (written("generation_config.json", "]"), r"generation_config.json: not JSON"),
    "an end that the model does not know": (
        changed("generation_config.json", eos_token_id=10**9),
        r"eos_token_id is 1000000000; expected",
    ),
    "a cache of an unknown kind": (
        changed("generation_config.json", cache_implementation="evil"),
        r"that transformers can load: Invalid `cache_implementation`",
    ),
    "an end as text": (changed("generation_config.json", eos_token_id="</s>"), r"eos_token_id is </s>; expected token"),
    "a pipe as chat template": (fifo("chat_template.jinja"), r"chat_template.jinja: no regular file"),
}

SOUND: dict[str, Edit] = {
    "as it is": lambda folder: None,
    "a pickle beside the weights": pickled("pytorch_model.bin"),
    "code for the model": with_code("config.json", AutoConfig="own.Own", AutoModelForCausalLM="own.Own"),
    "code for the tokenizer": with_code("tokenizer_config.json", AutoTokenizer="own.Own"),
    "weights in two files": sharded,
    "weights behind a link": lambda folder: [
        (folder / WEIGHTS).rename(folder / "blob"),
        (folder / WEIGHTS).symlink_to("blob"),
    ],
    "the output beside the embedding that it is": tensors(
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()})
    ),
    "tensors of several types": tensors(lambda held: held.update({GATE: held[GATE].double()})),
    "weights without metadata": header(lambda held: held.pop("__metadata__")),
    "several ends": changed("generation_config.json", eos_token_id=[1, 2]),
    "settings that nothing reads": config(made_by="a person", nested=NESTED),
}
