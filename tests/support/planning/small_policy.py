"""A small Llama of given sizes as the trainer has it, and a batch for it: what cost models are compared with."""

from typing import Literal

from support.training.samples import make_sample
from transformers import LlamaConfig, LlamaForCausalLM

from millrace.planning.models import ModelShape
from millrace.training.batch import Microbatch
from millrace.training.layers import prepare_layers
from millrace.training.packing import pack
from millrace.training.policy import PackedPolicy

SMALL = ModelShape(name="small", layers=2, hidden=256, intermediate=704, heads=4, kv_heads=2, head_dim=64, vocabulary=8)


def small_policy(shape: ModelShape, *, checkpointing: Literal[False, True, "selective"]) -> PackedPolicy:
    """In float32, with random weights."""
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=shape.layers,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            vocab_size=shape.vocabulary,
        )
    )
    policy = PackedPolicy(model.train())
    prepare_layers(model, checkpointing=checkpointing, compiled=False)
    return policy


def one_response(tokens: int) -> Microbatch:
    """A prompt of one token and its response, `tokens` in all."""
    return pack(make_sample([1], [1] * (tokens - 1)))
