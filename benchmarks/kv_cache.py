"""What it costs to compute the key-value cache again at each weight update, and what keeping it would do instead.

    requests ─► vLLM, an update every --every seconds ─► tokens/s, pauses ─┬─ none       the weights stay
                        │                                                  ├─ recompute  what Millrace does
                        └► each token's log-probability ─► |difference|    └─ keep       the old weights' cache stays

The difference is taken against the weights of the version that a token's span names, from the whole text before it:
what a trainer would compute. A version is a step of ±--learning-rate in every element, as large as AdamW's first ones.
Each round measures every mode once, with prompts of its own; a figure is the median of the rounds, a difference the
largest. The next update is due --every seconds after the last one ended: where that is shorter than it takes to compute
all that is in flight again, hardly anything is generated.

    python -m benchmarks.kv_cache [--every 0.2 1.0] [--repeats 3] [--json PATH]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from millrace.engines.vllm import VllmEngine
from millrace.types import Request, Sampled, Sampling
from millrace.weights.base import Manifest, Weights, WeightsId
from millrace.weights.landing import Landing
from millrace.weights.shared import shapes_of
from storage.memory import memory_folder

_VOCAB = 512
_EOS = 0
_SCORED = 8
"""Trajectories of each measurement whose tokens are scored again: one forward pass for each of their versions."""
Update = Callable[[VllmEngine, Weights], float]


def main() -> None:
    """Measures all modes on one engine, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, nargs="+", default=[0.2, 1.0], help="seconds from update to update")
    parser.add_argument("--requests", type=int, default=16, help="requests in flight at the start")
    parser.add_argument("--group-size", type=int, default=8, help="requests that share a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=96)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="step of every element at an update")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rounds = []
    landing = Landing(memory_folder() / f"benchmark-{uuid.uuid4().hex}")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        make_policy().save_pretrained(folder)
        engine = _start(Path(folder), arguments.requests, arguments.prompt_tokens + arguments.max_new_tokens)
        try:
            # The first round warms up.
            for number in range(arguments.repeats + 1):
                rounds.append(_round(engine, landing, arguments, number))
        finally:
            engine.close()
            landing.close()
    modes = summary(rounds[1:])
    result = {
        "modes": modes,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
    }
    _print(modes)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def make_policy() -> LlamaForCausalLM:
    """Version 0: 3 million parameters, large enough for its tokens to depend on what was before them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        initializer_range=0.06,
        eos_token_id=_EOS,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


@torch.no_grad()
def take_step(model: PreTrainedModel, policy_version: int, learning_rate: float) -> None:
    """Turns the weights of the version before into those of `policy_version`, in place."""
    random = torch.Generator().manual_seed(policy_version)
    for parameter in model.parameters():
        signs = torch.empty_like(parameter).bernoulli_(generator=random).mul_(2).sub_(1)
        parameter.add_(signs, alpha=learning_rate)


def update_keeping_cache(engine: VllmEngine, weights: Weights) -> float:
    """`engine.update_weights`, but what the old weights left in the cache is used on. Returns the pause, seconds."""
    assert weights.shared is not None
    update = WeightTransferUpdateRequest(update_info={"tensors": weights.shared.to_json()})
    version = weights.id.policy_version
    # Not something that the engine offers: no run may do this.
    llm = engine._llm

    async def work() -> None:
        await llm.pause_generation(mode="keep", clear_cache=False)
        await llm.start_weight_update()
        await llm.update_weights(update)
        await llm.finish_weight_update(str(version))
        await llm.resume_generation()

    started = time.monotonic()
    engine._run(work())
    engine.policy_version = version
    return time.monotonic() - started


def summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each mode, over rounds of `tokens_per_second`, `pauses` (seconds) and `difference` (nats)."""
    return {
        mode: {
            "tokens_per_second": statistics.median(measured[mode]["tokens_per_second"] for measured in rounds),
            "updates": sum(len(measured[mode]["pauses"]) for measured in rounds),
            "pause_seconds": statistics.median(pauses) if pauses else 0.0,
            "longest_pause_seconds": max(pauses, default=0.0),
            "largest_difference": max(measured[mode]["difference"] for measured in rounds),
        }
        for mode in rounds[0]
        for pauses in [[pause for measured in rounds for pause in measured[mode]["pauses"]]]
    }


def _start(folder: Path, num_requests: int, longest: int) -> VllmEngine:
    return VllmEngine(
        folder,
        dtype="float32",
        eos_token_id=_EOS,
        engine_args={
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": True,
            "max_model_len": longest,
            "max_num_seqs": num_requests,
            "block_size": 32,
        },
    )


def _round(
    engine: VllmEngine, landing: Landing, arguments: argparse.Namespace, number: int
) -> dict[str, dict[str, Any]]:
    modes: dict[str, tuple[float, Update]] = {"none": (float("inf"), VllmEngine.update_weights)}
    for every in arguments.every:
        modes[f"recompute {every:g} s"] = (every, VllmEngine.update_weights)
        modes[f"keep {every:g} s"] = (every, update_keeping_cache)
    names = list(modes)
    # Another one begins each time, so that all meet the same disturbances.
    turn = number % len(names)
    measured = {
        name: _measure(engine, landing, arguments, number * len(names) + names.index(name), *modes[name])
        for name in [*names[turn:], *names[:turn]]
    }
    return {name: measured[name] for name in names}


def _measure(
    engine: VllmEngine, landing: Landing, arguments: argparse.Namespace, seed: int, every: float, update: Update
) -> dict[str, Any]:
    model = make_policy()
    engine.update_weights(_offered(model, 0, landing))
    done: list[Sampled] = []
    pauses: list[float] = []
    engine.submit(
        _requests(arguments, seed), Sampling(temperature=1.0, top_p=1.0, max_new_tokens=arguments.max_new_tokens)
    )
    started = time.monotonic()
    due = started + every
    while engine.in_flight:
        done += engine.collect(min(1.0, max(0.0, due - time.monotonic())))
        if time.monotonic() >= due and engine.in_flight:
            take_step(model, len(pauses) + 1, arguments.learning_rate)
            pauses.append(update(engine, _offered(model, len(pauses) + 1, landing)))
            due = time.monotonic() + every
    seconds = time.monotonic() - started
    return {
        "tokens_per_second": sum(len(sampled.response.tokens) for sampled in done) / seconds,
        "pauses": pauses,
        "difference": largest_difference(done[:: max(1, len(done) // _SCORED)], arguments.learning_rate),
    }


def largest_difference(done: Sequence[Sampled], learning_rate: float) -> float:
    """The largest |rollout − trainer log-probability| of all their tokens, nats."""
    model = make_policy()
    worst = 0.0
    for version in range(1 + max(sampled.response.version_spans[-1][0] for sampled in done)):
        if version:
            take_step(model, version, learning_rate)
        worst = max([worst, *(_difference(model, version, sampled) for sampled in done)])
    return worst


@torch.no_grad()
def _difference(model: PreTrainedModel, version: int, sampled: Sampled) -> float:
    """Of the tokens that this version sampled; the model has its weights."""
    prompt, response = sampled.request.prompt_tokens, sampled.response
    ends = [*(start for _, start in response.version_spans[1:]), len(response.tokens)]
    for (of, start), end in zip(response.version_spans, ends, strict=True):
        if of == version:
            text = torch.tensor([[*prompt, *response.tokens[:end]]])
            logprobs_RV = torch.log_softmax(model(input_ids=text).logits[0, len(prompt) + start - 1 : -1], dim=-1)
            expected_R = logprobs_RV.gather(1, text[0, len(prompt) + start :, None]).squeeze(1)
            return (torch.tensor(response.rollout_logprobs[start:end]) - expected_R).abs().max().item()
    return 0.0


def _requests(arguments: argparse.Namespace, seed: int) -> list[Request]:
    random = torch.Generator().manual_seed(seed)
    num_groups = -(-arguments.requests // arguments.group_size)
    prompts_GP = torch.randint(1, _VOCAB, (num_groups, arguments.prompt_tokens), generator=random).tolist()
    return [
        Request(
            group_id=i // arguments.group_size,
            sample_index=i % arguments.group_size,
            prompt_tokens=tuple(prompts_GP[i // arguments.group_size]),
            seed=i,
        )
        for i in range(arguments.requests)
    ]


def _offered(model: PreTrainedModel, policy_version: int, landing: Landing) -> Weights:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = landing.tensors_for(shapes_of(parameters))
    for name, parameter in parameters.items():
        tensors[name].copy_(parameter)
    manifest = Manifest(id=WeightsId(incarnation=0, policy_version=policy_version, t_offered=time.time()))
    return Weights(manifest=manifest, tensors=tensors, shared=landing.shared)


def _print(modes: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Weight updates in flight")
    for heading in ("", "tokens/s", "updates", "pause, ms", "longest", "|Δ log π|, nats"):
        table.add_column(heading, justify="right" if heading else "left")
    for mode, figures in modes.items():
        table.add_row(
            mode,
            f"{figures['tokens_per_second']:,.0f}",
            str(figures["updates"]),
            f"{1000 * figures['pause_seconds']:.0f}",
            f"{1000 * figures['longest_pause_seconds']:.0f}",
            f"{figures['largest_difference']:.2g}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
