"""Mixtures of experts: engines say which experts computed a token, and the trainer routes by them, or keeps balance."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engines.one_by_one import response_logprobs, taken
from support.engines.policies import Offer
from support.training.families import CASES
from support.training.router_mismatch import measure
from support.training.samples import make_sample
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from configs.training import TrainingConfig
from millrace.generation.engines.transformers import TransformersEngine
from millrace.models.modules import NOT_RECORDED, routers
from millrace.models.supported import FAMILIES
from millrace.training.batch import Sample
from millrace.training.packing import microbatches
from millrace.training.policy import PackedPolicy
from millrace.training.trainer import Trainer
from millrace.types import Request, Response, Sampling

LAYERS, EXPERTS, K = 2, 4, 2
MIXTURES = [kind for kind, family in FAMILIES.items() if family.experts]
mixtures = pytest.mark.parametrize("kind", MIXTURES)
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=12)


def some_samples() -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        make_sample(
            random.integers(3, 40, prompt), random.integers(3, 40, response), rollout_logprobs=-1, advantage=0.0
        )
        for prompt, response in [(3, 4), (9, 12), (1, 1), (2, 11)]
    ]


def recorded(sample: Sample, experts_TLK: torch.Tensor) -> Sample:
    return replace(sample, routed_experts=experts_TLK.numpy().astype(np.uint16).flatten())


def random_experts(sample: Sample, seed: int) -> torch.Tensor:
    """[T, L, K] of different experts per token."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(sample.num_tokens - 1, LAYERS, EXPERTS, generator=random).argsort(dim=-1)[..., :K]


def routed(model: PreTrainedModel, tokens: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, [T, E] logits and [T, K] experts that `model` chooses for these tokens alone."""
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        item.register_forward_hook(lambda router, inputs, output: outputs.append((output[0], output[2])))
        for item in routers(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return outputs


def own_experts(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[T, L, K]."""
    return torch.stack([chosen_TK for _, chosen_TK in routed(model, tokens)], dim=1)


def with_experts(model: PreTrainedModel, sample: Sample, experts_TLK: torch.Tensor) -> torch.Tensor:
    """[R] log π of the response in transformers' own forward pass, in which these experts compute its tokens."""

    def choose(layer: int) -> object:
        def hook(router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> object:
            logits, _, own = output
            chosen = torch.cat([experts_TLK[:, layer], own[-1:]])
            probs = logits.softmax(dim=-1).gather(1, chosen)
            # These tiny models are configured so that all but OLMoE's weights add up to 1.
            weights = probs if "Olmoe" in type(router).__name__ else probs / probs.sum(dim=-1, keepdim=True)
            return logits, weights, chosen

        return hook

    hooks = [item.register_forward_hook(choose(layer)) for layer, item in enumerate(routers(model))]
    logprobs = taken(response_logprobs(model, sample), sample)
    for hook in hooks:
        hook.remove()
    return logprobs


@mixtures
def test_the_trainer_routes_by_recorded_experts_and_its_routers_learn(kind: str) -> None:
    model, samples = CASES[kind].model(seed=0), some_samples()
    experts = [random_experts(sample, seed) for seed, sample in enumerate(samples)]
    policy = PackedPolicy(deepcopy(model), router_replay=True)
    expected = torch.cat([with_experts(model, *item) for item in zip(samples, experts, strict=True)])
    expected.sum().backward()
    result = torch.zeros(len(expected))
    replayed = [recorded(*item) for item in zip(samples, experts, strict=True)]
    for batch in microbatches(replayed, max_tokens=25):
        logprobs_N = policy(batch)[0]
        logprobs_N.sum().backward()
        result[batch.in_batch_N] = logprobs_N.detach()
    torch.testing.assert_close(result, expected.detach(), rtol=0, atol=1e-5)
    for (name, parameter), other in zip(model.named_parameters(), policy.model.parameters(), strict=True):
        assert parameter.grad is not None
        largest = max(1.0, parameter.grad.abs().max().item())
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-5 * largest, msg=name)


@mixtures
def test_without_option_or_record_the_router_chooses(kind: str) -> None:
    model, samples = CASES[kind].model(seed=0), some_samples()
    nothing = [recorded(item, torch.full((item.num_tokens - 1, LAYERS, K), NOT_RECORDED)) for item in samples]
    other = [recorded(sample, random_experts(sample, seed)) for seed, sample in enumerate(samples)]
    plain, replaying = PackedPolicy(deepcopy(model)), PackedPolicy(deepcopy(model), router_replay=True)

    def logprobs(policy: PackedPolicy, batch: list[Sample]) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([policy(item)[0] for item in microbatches(batch, max_tokens=25)])

    unrecorded = logprobs(plain, samples)
    assert torch.equal(logprobs(plain, other), unrecorded)
    assert torch.equal(logprobs(replaying, samples), unrecorded)
    assert torch.equal(logprobs(replaying, nothing), unrecorded)
    assert (logprobs(replaying, other) - unrecorded).abs().max() > 0.01


def generated(engine: TransformersEngine) -> dict[int, tuple[Request, Response]]:
    done = {}
    while engine.in_flight:
        done |= {item.request.group_id: (item.request, item.response) for item in engine.collect(0.0)}
    return done


def requests() -> list[Request]:
    prompts = [(3, 4, 5), (3, 4, 5), tuple(range(3, 20)), (7,)]
    return [
        Request(group_id=i, sample_index=0, prompt_tokens=prompt, seed=i, response_tokens=(9, 8) if i == 3 else ())
        for i, prompt in enumerate(prompts)
    ]


def experts_of(response: Response) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(response.routed_experts, "<u2").astype(np.int64)).view(-1, LAYERS, K)


@mixtures
def test_the_transformers_engine_records_the_experts_of_every_token_but_the_last(
    kind: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = CASES[kind].model(seed=0)
    engine = TransformersEngine(deepcopy(model), tokenizer, records_experts=True)
    engine.submit(requests()[:3], SAMPLING)
    engine.collect(0.0)
    # One enters while others are being decoded.
    engine.submit(requests()[3:], SAMPLING)
    for request, response in generated(engine).values():
        text = [*request.prompt_tokens, *request.response_tokens, *response.tokens]
        assert torch.equal(experts_of(response), own_experts(model, text[:-1]))


def test_a_response_keeps_the_experts_that_computed_a_token_first(
    tokenizer: PreTrainedTokenizerFast, offer: Offer
) -> None:
    models = [CASES["qwen3_moe"].model(seed=seed) for seed in range(2)]
    engine = TransformersEngine(deepcopy(models[0]), tokenizer, records_experts=True, keep_cache=False)
    engine.submit(requests()[:1], SAMPLING)
    for _ in range(4):
        assert not engine.collect(0.0)
    engine.update_weights(offer(models[1], 1))
    ((request, response),) = generated(engine).values()
    (_, start) = response.version_spans[1]
    text = [*request.prompt_tokens, *response.tokens][:-1]
    first, second = (own_experts(model, text) for model in models)
    num_first = len(request.prompt_tokens) + start - 1
    assert 0 < num_first < len(text)
    assert torch.equal(experts_of(response)[:num_first], first[:num_first])
    assert torch.equal(experts_of(response)[num_first:], second[num_first:])


def test_a_response_in_pieces_has_the_experts_of_a_whole_one(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = TransformersEngine(CASES["mixtral"].model(seed=0), tokenizer, records_experts=True)
    engine.submit(requests()[2:3], SAMPLING)
    for _ in range(4):
        engine.collect(0.0)
    (begun,) = engine.interrupt()
    assert len(experts_of(begun.response)) == 17 + 4 - 1
    engine.submit([replace(begun.request, response_tokens=begun.response.tokens)], SAMPLING)
    ((_, rest),) = generated(engine).values()
    assert rest.routed_experts.startswith(begun.response.routed_experts)
    assert len(experts_of(rest)) == 17 + 4 + len(rest.tokens) - 1


def imbalance_of(kind: str, samples: list[Sample], max_tokens: int) -> float:
    policy = PackedPolicy(CASES[kind].model(seed=0), balances_experts=True)
    total = 0.0
    for batch in microbatches(samples, max_tokens, num_ranks=3):
        policy(batch)
        total += policy.routing.imbalance(batch).item()
    return total / len(samples)


@mixtures
def test_imbalance_is_the_mean_over_sequences_however_they_are_packed(kind: str) -> None:
    model, samples = CASES[kind].model(seed=0), some_samples()
    expected = []
    for sample in samples:
        # The last token is not computed: nothing is predicted from it.
        tokens = [*sample.prompt_tokens.tolist(), *sample.response_tokens[:-1].tolist()]
        for logits_TE, chosen_TK in routed(model, tokens):
            picks = [(chosen_TK == expert).sum().item() / (K * len(tokens)) for expert in range(EXPERTS)]
            means = logits_TE.softmax(dim=-1).mean(dim=0).tolist()
            expected.append(EXPERTS * sum(pick * mean for pick, mean in zip(picks, means, strict=True)))
    for max_tokens in (1, 25, 1000):
        assert imbalance_of(kind, samples, max_tokens) == pytest.approx(np.mean(expected), rel=1e-5)


def test_the_balance_loss_alone_brings_the_experts_into_balance() -> None:
    training = TrainingConfig(max_steps=50, learning_rate=0.01, router_aux_loss_coefficient=1.0)
    trainer = Trainer(CASES["qwen3_moe"].model(seed=0), training)
    # Without advantages nothing else has a gradient.
    measured = [trainer.step(some_samples()) for _ in range(30)]
    assert measured[0].grad_norm > 0
    policy = PackedPolicy(trainer.model, balances_experts=True)
    (batch,) = microbatches(some_samples(), 1000)
    policy(batch)
    after = policy.routing.imbalance(batch).item() / len(batch.indices)
    initial = imbalance_of("qwen3_moe", some_samples(), 1000)
    assert initial > 1.1
    assert after - 1 < (initial - 1) / 2


def test_replay_halves_the_mismatch_with_a_half_precision_generator() -> None:
    found = measure(num=6, num_tokens=48)
    for name in ("float32", "bfloat16"):
        own, replayed = found[name], found[f"{name}, replayed"]
        assert own["other_experts"] > 0
        assert replayed["other_experts"] == 0
        assert replayed["mismatch_kl"] < own["mismatch_kl"] / 2
