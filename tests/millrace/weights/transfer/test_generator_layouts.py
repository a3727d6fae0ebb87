"""What vLLM's workers need of a model like Llama."""

import pytest

from millrace.errors import InputError
from millrace.weights.transfer.generator_layouts import vllm_layout, whole_layout
from millrace.weights.transfer.layout import Layout, Region, TensorSpec

_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 4
_LAYER = "model.layers.0."


def _layout(name: str, shape: tuple[int, ...], tensor: int) -> list[Region | None]:
    layout = vllm_layout([TensorSpec(name, "bfloat16", shape)], tensor=tensor, num_heads=_HEADS, num_kv_heads=_KV_HEADS)
    return [layout.held(worker).get(name) for worker in range(layout.size)]


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_columns_are_rows_of_the_weight(name: str) -> None:
    assert _layout(f"{_LAYER}{name}.weight", (32, 16), 2) == [((0, 16), (0, 16)), ((16, 32), (0, 16))]
    assert _layout(f"{_LAYER}{name}.bias", (32,), 2) == [((0, 16),), ((16, 32),)]


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_rows_are_columns_of_the_weight_and_every_worker_has_the_bias(name: str) -> None:
    assert _layout(f"{_LAYER}{name}.weight", (16, 32), 2) == [((0, 16), (0, 16)), ((0, 16), (16, 32))]
    assert _layout(f"{_LAYER}{name}.bias", (16,), 2) == [((0, 16),)] * 2


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.v_proj"])
def test_a_head_of_keys_is_on_several_workers_if_there_are_more_than_heads(name: str) -> None:
    rows = _KV_HEADS * _HEAD_DIM
    assert [box and box[0] for box in _layout(f"{_LAYER}{name}.weight", (rows, 16), 2)] == [(0, 4), (4, 8)]
    boxes = _layout(f"{_LAYER}{name}.weight", (rows, 16), 8)
    assert [box and box[0] for box in boxes] == [(0, 4)] * 4 + [(4, 8)] * 4


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_vocabulary_is_padded_and_the_last_workers_may_need_less(name: str) -> None:
    assert _layout(name, (100, 16), 2) == [((0, 64), (0, 16)), ((64, 100), (0, 16))]
    assert _layout(name, (60, 16), 8)[-2:] == [((48, 56), (0, 16)), ((56, 60), (0, 16))]
    assert _layout(name, (40, 16), 8)[4:] == [((32, 40), (0, 16)), None, None, None]


@pytest.mark.vllm
@pytest.mark.parametrize("vocabulary", [40, 64, 100, 128_256])
@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_vocabularies_are_divided_as_vllm_does(vocabulary: int, tensor: int) -> None:
    embedding = pytest.importorskip("vllm.model_executor.layers.vocab_parallel_embedding")
    padded = embedding.pad_vocab_size(vocabulary)
    for worker, box in enumerate(_layout("lm_head.weight", (vocabulary, 2), tensor)):
        theirs = embedding.VocabParallelEmbedding._get_indices(padded, padded, vocabulary, vocabulary, worker, tensor)
        rows = box[0] if box else (theirs.org_vocab_start_index,) * 2
        assert rows == (theirs.org_vocab_start_index, theirs.org_vocab_end_index)


@pytest.mark.parametrize("name", ["input_layernorm.weight", "self_attn.q_norm.weight", "post_attention_layernorm.bias"])
def test_every_worker_has_all_norms(name: str) -> None:
    assert _layout(f"{_LAYER}{name}", (16,), 4) == [((0, 16),)] * 4


def test_a_single_worker_needs_everything_whatever_its_name() -> None:
    specs = [TensorSpec("model.layers.0.mlp.experts.down_proj", "bfloat16", (4, 2, 2)), TensorSpec("x", "float32", ())]
    alone = vllm_layout(specs, tensor=1, num_heads=7, num_kv_heads=3)
    assert alone == whole_layout(specs) == Layout.of(specs, [{spec.name: spec.whole for spec in specs}])


@pytest.mark.parametrize(
    ("name", "shape", "tensor", "sentence"),
    [
        (
            f"{_LAYER}self_attn.q_proj.weight",
            (32, 16),
            3,
            "8 heads and 2 key-value heads can't be divided among 3 workers",
        ),
        (f"{_LAYER}mlp.up_proj.weight", (30, 16), 4, r"up_proj.weight \[30, 16\] can't be divided among 4 workers"),
        (f"{_LAYER}mlp.down_proj.weight", (16, 30), 4, r"down_proj.weight \[16, 30\] can't be divided among 4 workers"),
        (
            f"{_LAYER}mlp.experts.down_proj",
            (4, 2, 2),
            2,
            "experts.down_proj has no rule for a division among 2 workers",
        ),
    ],
)
def test_what_vllm_can_not_divide_is_one_sentence(
    name: str, shape: tuple[int, ...], tensor: int, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        _layout(name, shape, tensor)
