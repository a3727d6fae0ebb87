"""What `training.compute_dtype: bfloat16` changes on this CPU: the time of a step, and the log-probabilities.

    a batch that the model itself sampled ─┬─► step in float32    log π, seconds
                                           └─► step in bfloat16   log π, seconds: ratio by round, Δ log π by token

Weights, optimizer state and gradients between ranks are float32 in both. One thread. A CPU without bfloat16 products
(`lscpu` lists avx512_bf16 or amx_bf16) is slower in it. Without `--model`: a random Llama of 3.4 million parameters.

    python -m benchmarks.compute_dtype [--model FOLDER] [--rounds 5] [--json FILE]
"""

import os
import statistics
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.report import machine, make_parser, write_json
from benchmarks.timing import in_turn, median_ratio
from configs.training import TrainingConfig
from millrace.models.loading import load_model
from millrace.training.batch import Sample
from millrace.training.parallel.ranks import Ranks
from millrace.training.trainer import Trainer

_DTYPES: tuple[Literal["float32"], Literal["bfloat16"]] = ("float32", "bfloat16")


def main() -> None:
    """Measures, prints the figures and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model folder, instead of the random model")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one to warm up")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 responses")
    parser.add_argument("--lengths", type=int, nargs=2, default=[7, 42], metavar=("PROMPT", "RESPONSE"))
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.groups < 1 or min(arguments.lengths) < 1:
        parser.error("expected at least one round, one group, and one token of each")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model() if arguments.model is None else load_model(arguments.model, "float32")
    samples = sample_batch(model, arguments.groups, *arguments.lengths)
    found = measure(model, samples, arguments.rounds)
    _print(found)
    setting = {**machine(), "load": os.getloadavg()[0], "torch": torch.__version__}
    write_json(arguments.json, {"machine": setting, **found})


def make_model() -> PreTrainedModel:
    """A random Llama of 3.4 million parameters."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
    )
    model: PreTrainedModel = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


@torch.inference_mode()
def sample_batch(model: PreTrainedModel, groups: int, prompt: int, response: int) -> list[Sample]:
    """Groups of 8 responses that the model sampled to random prompts, without an end."""
    model.eval()  # type: ignore[no-untyped-call]
    prompts_BP = torch.randint(model.config.vocab_size, (groups, prompt)).repeat_interleave(8, dim=0)
    texts_BT: torch.Tensor = model.generate(  # type: ignore[operator]  # a mixin of the model
        prompts_BP,
        attention_mask=torch.ones_like(prompts_BP),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        repetition_penalty=1.0,
        min_new_tokens=response,
        max_new_tokens=response,
    )
    return [
        Sample(
            prompt_tokens=text[:prompt],
            response_tokens=text[prompt:],
            rollout_logprobs=np.full(response, -1.0, dtype=np.float32),
            loss_mask=np.ones(response, dtype=np.uint8),
            temperature=1.0,
            advantage=1.0 if i % 2 else -1.0,
            staleness=0,
        )
        for i, text in enumerate(texts_BT.numpy().astype(np.int32))
    ]


def measure(model: PreTrainedModel, samples: list[Sample], rounds: int) -> dict[str, Any]:
    """Seconds of both, the ratio, and how far log π in bfloat16 is from that in float32, nats."""
    trainers = {dtype: _trainer(model, dtype) for dtype in _DTYPES}
    # Before the first step: the weights are the same.
    float32, bfloat16 = (
        np.concatenate(trainers[dtype].step(samples).trainer_logprobs).astype(np.float64) for dtype in _DTYPES
    )
    timed = [
        in_turn({dtype: lambda dtype=dtype: lambda: trainers[dtype].step(samples) for dtype in _DTYPES}, turn)  # type: ignore[misc]
        for turn in range(rounds)
    ]
    seconds = {dtype: [one[dtype] for one in timed] for dtype in _DTYPES}
    difference = bfloat16 - float32
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": sum(sample.num_tokens for sample in samples),
        "seconds": seconds,
        "speedup": median_ratio(seconds["float32"], seconds["bfloat16"]),
        "logprob_difference_mean": float(np.abs(difference).mean()),
        "logprob_difference_max": float(np.abs(difference).max()),
        # Unbiased for tokens sampled in float32, and never negative (Schulman, Approximating KL Divergence, 2020).
        "kl": float((np.expm1(difference) - difference).mean()),
    }


def _trainer(model: PreTrainedModel, dtype: Literal["float32", "bfloat16"]) -> Trainer:
    training = TrainingConfig(max_steps=1, max_importance_ratio=2.0, learning_rate=1e-6, compute_dtype=dtype)
    return Trainer(deepcopy(model), training, max_new_tokens=64, ranks=Ranks.alone(torch.device("cpu")))


def _print(found: dict[str, Any]) -> None:
    seconds = {dtype: statistics.median(values) for dtype, values in found["seconds"].items()}
    console = Console(width=120)
    console.print(f"{found['parameters'] / 1e6:,.1f} M parameters, {found['tokens']:,} tokens")
    for dtype, median in seconds.items():
        console.print(f"{dtype:9}{median:8.3f} s a step, {found['tokens'] / median:,.0f} tokens/s")
    console.print(
        f"bfloat16: {found['speedup']:.2f} times as fast; |Δ log π| mean {found['logprob_difference_mean']:.4f}, "
        f"max {found['logprob_difference_max']:.3f}; KL of float32 to bfloat16 {found['kl']:.1e} nats"
    )


if __name__ == "__main__":
    main()
