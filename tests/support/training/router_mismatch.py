"""How far π and μ are apart in a mixture of experts, without and with router replay.

a tiny random mixture ─► engine `transformers` in bfloat16 ─► responses, log μ, experts ─┐
                     └─► trainer, by its own routers and by the recorded experts ────────┴─► the two compared

The weights are the same on both sides, up to the rounding of the engine's: whatever differs is numerics.
"""

from copy import deepcopy

import numpy as np
import torch
from support.engines.policies import all_of
from support.training.samples import make_sample
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.generation.engines.transformers import TransformersEngine
from millrace.models.modules import routers
from millrace.training.batch import Sample
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy
from millrace.types import Request, Sampling

VOCAB, LAYERS, EXPERTS, K = 256, 4, 32, 4


def mixture(seed: int) -> PreTrainedModel:
    """Qwen 3's kind, 1.9 million parameters, all random."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        max_position_embeddings=2048,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1, generator=numbers)
    return model


def responses(model: PreTrainedModel, num: int, num_tokens: int) -> list[Sample]:
    """Responses that the engine samples with these weights in bfloat16, with the experts that it chose."""
    tokenizer = character_tokenizer([chr(0x100 + i) for i in range(VOCAB - 3)])
    # No token ends a response: all have the same length.
    engine = TransformersEngine(deepcopy(model).bfloat16(), tokenizer, stop_token_ids=[VOCAB], records_experts=True)
    random = np.random.default_rng(0)
    prompts = random.integers(3, VOCAB, (num, 32))
    engine.submit(
        [
            Request(group_id=i, sample_index=0, prompt_tokens=tuple(prompt), seed=i)
            for i, prompt in enumerate(prompts.tolist())
        ],
        Sampling(temperature=1.0, top_p=1.0, max_new_tokens=num_tokens),
    )
    return [
        make_sample(
            done.request.prompt_tokens,
            done.response.tokens,
            rollout_logprobs=done.response.rollout_logprobs,
            routed_experts=np.frombuffer(done.response.routed_experts, dtype=np.uint16),
        )
        for done in sorted(all_of(engine), key=lambda done: done.request.group_id)
    ]


@torch.no_grad()
def compared(model: PreTrainedModel, samples: list[Sample], *, replays: bool) -> dict[str, float]:
    """π of `model`, in its own number format, against μ: over all response tokens."""
    policy = PackedPolicy(deepcopy(model), router_replay=replays)
    chosen: list[torch.Tensor] = []
    for router in routers(policy.model):
        router.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    log_ratios, others, picks = [], 0.0, 0
    for batch in microbatches(samples, max_tokens=4096):
        log_ratios.append(policy(batch)[0] - batch.rollout_logprobs_N)
        assert batch.routed_experts_SX is not None
        recorded_SLK = batch.routed_experts_SX.view(-1, LAYERS, K)[batch.predicts_N]
        found_SLK = torch.stack(chosen, dim=1)[batch.predicts_N]
        chosen.clear()
        others += (recorded_SLK[..., None] != found_SLK[..., None, :]).all(dim=-1).sum().item()
        picks += recorded_SLK.numel()
    log_ratio_N = torch.cat(log_ratios)
    return {
        # Of log r on samples of μ, the mean of r − 1 − log r is KL(μ‖π) too, and never below 0.
        "mismatch_kl": (log_ratio_N.exp() - 1 - log_ratio_N).mean().item(),
        "mean_log_ratio": log_ratio_N.abs().mean().item(),
        "largest_log_ratio": log_ratio_N.abs().max().item(),
        "ratio_beyond_20_percent": (log_ratio_N.abs() > np.log(1.2)).float().mean().item(),
        "other_experts": others / picks,
    }


def measure(num: int, num_tokens: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """The comparisons by name: the trainer's number format, and whether it replays."""
    model = mixture(seed)
    samples = responses(model, num, num_tokens)
    formats = {"float32": model, "bfloat16": deepcopy(model).bfloat16()}
    return {
        f"{name}{', replayed' if replays else ''}": compared(trained, samples, replays=replays)
        for name, trained in formats.items()
        for replays in (False, True)
    }
