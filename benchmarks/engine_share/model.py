"""A small random policy that never ends a response by itself, so that the benchmark can say how long each gets."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from configs.recipe import Recipe
from millrace.bootstrap.tiny_model import character_tokenizer, tiny_llama

_SHAPE = Recipe(hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024)
_SEPARATION = 16.0


def save_model(folder: Path, context: int) -> None:
    """Writes the policy and its tokenizer; `context` is the longest text, tokens."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer(["0123456789+="])
    endless(tiny_llama(_SHAPE, tokenizer, context)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def endless(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model, changed so that it never samples its end token. Its output layer must be its embedding.

    One feature, which no layer changes, separates that token from all others.
    """
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, 0] = _SEPARATION
        embedding[model.config.eos_token_id, 0] = -_SEPARATION
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[0] = 0.0
    return model
