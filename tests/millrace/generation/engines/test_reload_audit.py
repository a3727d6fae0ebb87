"""A version that did not reach every layer of vLLM's model is refused. Model, loaders and reload are vLLM's own."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engines.policies import Offer
from support.engines.vllm_models import one_process_group, update, worker_engine
from transformers import LlamaForCausalLM

from millrace.errors import WeightsMismatch

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.worker import WorkerEngine

pytestmark = pytest.mark.vllm

Pairs = Iterable[tuple[str, torch.Tensor]]
MakePolicy = Callable[[int], LlamaForCausalLM]

FP8 = "fp8_per_channel"
"""The online quantization that vLLM's CPU build computes without AMX."""
QKV = "model.layers.0.self_attn.qkv_proj"


@pytest.fixture(scope="module", autouse=True)
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process_group(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def policy(make_policy: MakePolicy) -> MakePolicy:
    def make(seed: int) -> LlamaForCausalLM:
        return make_policy(seed).bfloat16()

    return make


@pytest.fixture(scope="module")
def engine(policy: MakePolicy, tmp_path_factory: pytest.TempPathFactory) -> "WorkerEngine":
    return worker_engine(policy(0), tmp_path_factory.mktemp("policy"))


def tensors(engine: "WorkerEngine") -> dict[str, torch.Tensor]:
    """Returns copies of the tensors that the kernels read."""
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def assert_same(updated: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> None:
    assert updated.keys() == fresh.keys()
    assert [name for name in fresh if not same_bytes(updated[name], fresh[name])] == []


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # torch does not compare numbers of eight bits.
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def copying_bare(model: Any, name: str) -> Callable[[Pairs], set[str]]:
    """The model's `load_weights`, which copies one parameter without its loader."""
    load = model.load_weights

    def load_weights(weights: Pairs) -> set[str]:
        pairs = dict(weights)
        model.get_parameter(name).data.copy_(pairs.pop(name))
        return {name, *load(pairs.items())}

    return load_weights


def doubling(model: Any, name: str) -> Callable[[Pairs], set[str]]:
    """The model's `load_weights`, which loads a shard's sibling of the same size twice, and never the shard."""
    load, sibling = model.load_weights, name.replace("v_proj", "k_proj")

    def load_weights(weights: Pairs) -> set[str]:
        pairs = dict(weights)
        loaded: set[str] = load(
            (key, tensor) if key != name else (sibling, pairs[sibling]) for key, tensor in pairs.items()
        )
        return loaded

    return load_weights


def omitting(model: Any, name: str) -> Callable[[Pairs], set[str]]:
    load = model.load_weights
    return lambda weights: load((key, tensor) for key, tensor in weights if key != name)


@pytest.mark.parametrize(
    ("change", "parameter", "layer"),
    [
        (copying_bare, "model.norm.weight", "model.norm"),
        (omitting, "model.norm.weight", "model.norm"),
        (omitting, "model.layers.0.self_attn.v_proj.weight", QKV),
        (omitting, "model.embed_tokens.weight", "model.embed_tokens"),
        (doubling, "model.layers.0.self_attn.v_proj.weight", QKV),
    ],
    ids=["copied bare", "absent", "absent part of a fused layer", "absent and tied", "its sibling twice"],
)
def test_a_version_that_misses_a_layer_is_refused_and_the_next_one_is_whole(
    engine: "WorkerEngine",
    policy: MakePolicy,
    offer: Offer,
    tmp_path: Path,
    change: Callable[..., Any],
    parameter: str,
    layer: str,
) -> None:
    engine.model.load_weights = change(engine.model, parameter)
    try:
        with pytest.raises(WeightsMismatch) as refusal:
            update(engine, offer(policy(1), 1))
    finally:
        del engine.model.load_weights
    assert str(refusal.value).count("elements") == 1, "no other layer is named"
    assert f" {layer} (" in str(refusal.value)
    update(engine, offer(policy(2), 2))
    assert_same(tensors(engine), tensors(worker_engine(policy(2), tmp_path)))


def test_a_quantized_model_is_after_updates_as_one_loaded_with_the_last_version(
    policy: MakePolicy, offer: Offer, tmp_path: Path
) -> None:
    quantized = worker_engine(policy(0), tmp_path / "old", quantization=FP8)
    at_first = tensors(quantized)
    for version in range(1, 4):
        update(quantized, offer(policy(version), version))
    fresh = worker_engine(policy(3), tmp_path / "new", quantization=FP8)
    assert_same(tensors(quantized), tensors(fresh))
    scale, weight = tensors(quantized)[f"{QKV}.weight_scale"], tensors(quantized)[f"{QKV}.weight"]
    assert weight.dtype == torch.float8_e4m3fn
    assert not torch.equal(scale, at_first[f"{QKV}.weight_scale"])
    queries = policy(3).get_parameter("model.layers.0.self_attn.q_proj.weight")
    restored = (weight.float() * scale.t()).t()[: len(queries)]
    # Three bits of mantissa.
    torch.testing.assert_close(restored, queries.float(), rtol=2**-4, atol=1e-3)


def test_a_quantized_layer_without_its_weights_is_refused(policy: MakePolicy, offer: Offer, tmp_path: Path) -> None:
    quantized = worker_engine(policy(0), tmp_path, quantization=FP8)
    quantized.model.load_weights = omitting(quantized.model, "model.layers.0.self_attn.v_proj.weight")
    with pytest.raises(WeightsMismatch) as refusal:
        update(quantized, offer(policy(1), 1))
    assert f" {QKV} (" in str(refusal.value)
