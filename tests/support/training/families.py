"""The families that the trainer can train, each as a tiny random model whose windows are shorter than the tests' texts.

The table in docs/models.md is made from this list.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millrace.models.supported import FAMILIES

WINDOW = 8
"""Positions that a layer with a window sees."""
_SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    # Heads of 32 features are the smallest that vLLM's attention on a CPU knows.
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BOTH_KINDS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A tiny model of a family."""

    model_type: str
    label: str = ""
    """Which of the family's models, if there are several cases."""
    attention: str
    """What its attention and its logits need, for the table."""
    config: dict[str, Any] = field(default_factory=dict)
    """What its config.json has beyond sizes."""
    vllm: str = "yes"
    """Whether vLLM on a CPU agrees with the trainer: `yes`, or why not."""

    def model(self, seed: int) -> PreTrainedModel:
        """Its weights are large enough for it to have opinions; biases, norms and sinks are random too."""
        config = AutoConfig.for_model(self.model_type, **_SHAPE | self.config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        numbers = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                drawn = torch.randn(parameter.shape, generator=numbers)
                # The initial weights are overwritten; norms stay near 1, or near 0 where 1 is added to them.
                parameter.mul_(parameter.dim() == 1 and "norm" in name).add_(drawn, alpha=0.15)
        return model


CASES = {
    f"{case.model_type} {case.label}".strip(): case
    for case in (
        FamilyCase(model_type="llama", attention="full", config={"tie_word_embeddings": True}),
        FamilyCase(model_type="mistral", attention="sliding windows", config={"sliding_window": WINDOW}),
        FamilyCase(model_type="qwen2", attention="full"),
        FamilyCase(
            model_type="qwen2",
            label="windows",
            attention="sliding windows in some layers",
            config={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
            vllm="refuses windows in some layers",
        ),
        FamilyCase(model_type="qwen3", attention="full; norms of heads", config={"tie_word_embeddings": True}),
        FamilyCase(
            model_type="gemma2",
            attention="sliding windows in some layers; soft caps of scores and logits",
            # Caps that bite.
            config={
                "sliding_window": WINDOW,
                "layer_types": _BOTH_KINDS,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 2.0,
                "query_pre_attn_scalar": 16,
            },
        ),
        FamilyCase(
            model_type="gemma3_text",
            attention="sliding windows in some layers; norms of heads",
            config={"sliding_window": WINDOW, "layer_types": _BOTH_KINDS, "query_pre_attn_scalar": 16},
        ),
        FamilyCase(
            model_type="phi3",
            attention="full, or sliding windows; partial rotary",
            config={
                "sliding_window": WINDOW,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        ),
        FamilyCase(model_type="olmo2", attention="full; norms over all heads"),
        FamilyCase(
            model_type="olmo3",
            attention="sliding windows in some layers; norms over all heads",
            config={"sliding_window": WINDOW, "layer_types": _BOTH_KINDS},
        ),
        FamilyCase(
            model_type="smollm3",
            attention="full; some layers without rotary",
            config={"no_rope_layers": [1, 0], "tie_word_embeddings": True},
        ),
        FamilyCase(
            model_type="granite",
            attention="full; scores and logits scaled",
            config={
                "attention_multiplier": 0.2,
                "logits_scaling": 3.0,
                "residual_multiplier": 0.5,
                "embedding_multiplier": 2.0,
            },
        ),
        FamilyCase(
            model_type="mixtral",
            attention="full, or sliding windows",
            config={"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        FamilyCase(
            model_type="qwen3_moe",
            attention="full; norms of heads",
            config={"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
        ),
        FamilyCase(
            model_type="gpt_oss",
            attention="sliding windows in some layers; sinks",
            config={
                "sliding_window": WINDOW,
                "layer_types": _BOTH_KINDS,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
            vllm="no kernel for its experts",
        ),
        FamilyCase(
            model_type="olmoe",
            attention="full; norms over all heads",
            config={"num_experts": 4, "num_experts_per_tok": 2},
        ),
    )
}
"""By `model_type` and label."""


def table() -> str:
    """The table of docs/models.md. `test_families.py` checks every entry."""
    within = "≤ 1e-5"
    rows = [
        ("family", "`model_type`", "attention and logits", "trainer", "engine `transformers`", "vLLM on a CPU"),
        ("---",) * 6,
        *(
            (
                FAMILIES[case.model_type].name,
                f"`{case.model_type}`",
                case.attention,
                within,
                within,
                within if case.vllm == "yes" else case.vllm,
            )
            for case in CASES.values()
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace("| --- ", "|---").replace("|--- |", "|---|")
