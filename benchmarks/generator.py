"""Speed of the `transformers` engine compared with `generate` of transformers, on one CPU thread.

    groups of 8 requests ─┬─► engine      prompts computed once per group, rows leave as they end      response tokens/s
                          └─► generate    all rows in one padded batch, until the last one ends        ratio by round

The models are random Llamas in float32: a response ends at each token with a probability of 1 in 16.

    python -m benchmarks.generator [--rounds 7] [--json FILE]
"""

import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.harness import finish, make_parser, median_ratio, print_table, time_rounds
from millrace.generation.engines.transformers import TransformersEngine
from millrace.types import Sampling

_VOCAB = 16
_PAD, _END = 0, 2
_GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class GeneratorCase:
    """A model, and the requests that are submitted together."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_groups: int
    prompt_tokens: int
    max_new_tokens: int


CASES = {
    # The demo's model and lengths.
    "0.2 M, 512 × (7 + 3)": GeneratorCase(
        hidden_size=64, num_layers=3, intermediate_size=256, num_groups=64, prompt_tokens=7, max_new_tokens=3
    ),
    "3.4 M, 64 × (7 + ≤ 64)": GeneratorCase(
        hidden_size=256, num_layers=4, intermediate_size=768, num_groups=8, prompt_tokens=7, max_new_tokens=64
    ),
    "3.4 M, 64 × (256 + ≤ 64)": GeneratorCase(
        hidden_size=256, num_layers=4, intermediate_size=768, num_groups=8, prompt_tokens=256, max_new_tokens=64
    ),
}


def main() -> None:
    """Measures, prints the figures and writes them as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, after one to warm up")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("expected at least one round")
    torch.set_num_threads(1)
    cases = {name: measure(case, arguments.rounds) for name, case in CASES.items()}
    rows = [
        [name, *(f"{rate:,.0f}" for rate in case["tokens_per_second"].values()), f"{case['ratio']:.2f}"]
        for name, case in cases.items()
    ]
    print_table("Response tokens per second", ("", "engine", "generate", "ratio"), rows)
    finish(arguments.json, {"cases": cases})


def measure(case: GeneratorCase, rounds: int) -> dict[str, Any]:
    """Measures response tokens per second of both, and their ratio: medians over `rounds`."""
    calls = contenders(case)
    tokens: dict[str, list[int]] = {name: [] for name in calls}

    def answer(name: str) -> None:
        # The round's number is the seed.
        tokens[name].append(calls[name](len(tokens[name])))

    seconds = time_rounds({name: partial(answer, name) for name in calls}, rounds)
    rates = {
        name: [count / taken for count, taken in zip(tokens[name][1:], seconds[name], strict=True)] for name in calls
    }
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": median_ratio(rates["engine"], rates["generate"]),
        "rounds": rates,
    }


def contenders(case: GeneratorCase) -> dict[str, Callable[[int], int]]:
    """Returns calls that answer all requests with a seed and return the number of response tokens."""
    torch.manual_seed(0)
    model = _model(case)
    prompts_UP = torch.randint(3, _VOCAB, (case.num_groups, case.prompt_tokens))
    prompts_BP = prompts_UP.repeat_interleave(_GROUP_SIZE, dim=0)
    prompts = [tuple(row) for row in prompts_BP.tolist()]
    words = models.WordLevel({str(token): token for token in range(_VOCAB)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="2")  # type: ignore[no-untyped-call]
    # An engine changes how its model computes.
    engine = TransformersEngine(deepcopy(model), tokenizer)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=case.max_new_tokens)

    def run_engine(seed: int) -> int:
        responses = engine.generate(prompts, sampling, seed=seed * len(prompts))
        return sum(len(response.tokens) for response in responses)

    def run_generate(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            texts_BT: torch.Tensor = model.generate(  # type: ignore[operator]  # a mixin of the model
                prompts_BP,
                attention_mask=torch.ones_like(prompts_BP),
                do_sample=True,
                top_k=0,
                max_new_tokens=case.max_new_tokens,
            )
        return int((texts_BT[:, case.prompt_tokens :] != _PAD).sum())

    return {"engine": run_engine, "generate": run_generate}


def _model(case: GeneratorCase) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=case.hidden_size,
        num_hidden_layers=case.num_layers,
        num_attention_heads=4,
        intermediate_size=case.intermediate_size,
        max_position_embeddings=512,
        pad_token_id=_PAD,
        bos_token_id=1,
        eos_token_id=_END,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        # All tokens are about equally likely.
        model.lm_head.weight.mul_(0.1)
    # The pad token is never sampled, so it marks the padding after a response.
    model.lm_head.register_forward_hook(_without_padding)
    return model


def _without_padding(module: object, inputs: object, logits_BSV: torch.Tensor) -> torch.Tensor:
    logits_BSV[..., _PAD] = -torch.inf
    return logits_BSV


if __name__ == "__main__":
    main()
