"""vLLM as Millrace drives it: it means the same policy as the trainer, whatever weights come while it generates."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engines.policies import Offer, all_of, largest_mismatch, spans
from support.engines.vllm_processes import (
    BLOCK_SIZE,
    HIDDEN_SIZE,
    engine_core,
    left_behind,
    running_vllm,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from millrace.generation.engines.vllm.startup import vllm_processes
from millrace.types import Request, Sampling, Trajectory
from millrace.weights.base import Probe
from millrace.weights.probe import NUM_LOGPROBS, largest_difference, probe_tokens, tolerance_between

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.vllm

MakePolicy = Callable[[int], LlamaForCausalLM]

TOLERANCE = tolerance_between("float32", "float32")
LONG = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=50)
# A block of the cache and more, so that those who share it share a block.
SHARED_PREFIX = [1, *(3 + i * i % 12 for i in range(BLOCK_SIZE + 8))]


def requests(prompts: Sequence[Sequence[int]], first_group: int = 0) -> list[Request]:
    return [
        Request(group_id=first_group + i, sample_index=0, prompt_tokens=tuple(prompt), seed=first_group + i)
        for i, prompt in enumerate(prompts)
    ]


def mismatch(models: dict[int, PreTrainedModel], done: Sequence[Trajectory]) -> float:
    return max(largest_mismatch(models, trajectory.request.prompt_tokens, trajectory.response) for trajectory in done)


def said_by_trainer(model: PreTrainedModel, tokens: Sequence[int]) -> Probe:
    with torch.no_grad():
        logprobs_V = torch.log_softmax(model(input_ids=torch.tensor([list(tokens)])).logits[0, -1], dim=-1)
    best = logprobs_V.topk(NUM_LOGPROBS)
    logprobs = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Probe(tokens=tuple(tokens), logprobs=logprobs)


def probe(engine: "VllmEngine", model: PreTrainedModel, tokens: Sequence[int]) -> float:
    return largest_difference(said_by_trainer(model, tokens), engine.next_logprobs(tokens, NUM_LOGPROBS))[0]


def num_cached(engine: "VllmEngine", tokens: Sequence[int]) -> int:
    """How many of these tokens vLLM finds in its cache: of that the engine itself says nothing."""
    parameters = engine._parameters(Sampling(temperature=0.0, top_p=1.0, max_new_tokens=1), seed=0, logprobs=0)
    return int(engine._run(engine._complete(tokens, parameters)).num_cached_tokens)


def checksums(engine: "VllmEngine") -> list[dict[str, str]]:
    """Returns checksums of the tensors that the kernels use, a dictionary per worker."""
    result: list[dict[str, str]] = engine._run(engine._llm.compute_weight_checksums())
    return result


def test_each_token_is_of_its_spans_version_through_many_updates(
    vllm_engine: "VllmEngine", make_policy: MakePolicy, offer: Offer
) -> None:
    models: dict[int, PreTrainedModel] = {0: make_policy(0)}
    prompts = [[1, 3 + i % 12, 3 + i % 11] for i in range(12)]
    done: list[Trajectory] = []
    for version in range(1, 26):
        vllm_engine.submit(requests(prompts, first_group=12 * version), LONG)
        done += vllm_engine.collect(1.0)
        models[version] = make_policy(version)
        vllm_engine.update_weights(offer(models[version], version))
    done += all_of(vllm_engine)

    assert len(done) == 25 * 12
    for trajectory in done:
        versions, starts = zip(*trajectory.response.version_spans, strict=True)
        assert starts[0] == 0
        assert list(versions) == sorted(set(versions))
        assert list(starts) == sorted(set(starts))
        assert starts[-1] < len(trajectory.response.tokens)
    most = max(len(trajectory.response.version_spans) for trajectory in done)
    crossed = sum(len(trajectory.response.version_spans) > 1 for trajectory in done)
    assert most >= 4, "versions in a trajectory"
    assert {version for trajectory in done for version, _, _ in spans(trajectory.response)} == set(models)
    worst = mismatch(models, done)
    print(f"25 updates: {crossed} of {len(done)} trajectories of up to {most} versions, |Δ log π| ≤ {worst:.2g}")
    assert worst < TOLERANCE
    # The counter-proof: under the version before, none of it would fit.
    shifted = {version + 1: model for version, model in models.items()} | {0: models[1]}
    assert mismatch(shifted, done) > 100 * TOLERANCE


def test_a_shared_prefix_is_computed_again_under_new_weights(
    vllm_engine: "VllmEngine", make_policy: MakePolicy, offer: Offer
) -> None:
    vllm_engine.submit(requests([[*SHARED_PREFIX, 3 + i % 12] for i in range(32)]), LONG)
    vllm_engine.collect(1.0)
    assert num_cached(vllm_engine, SHARED_PREFIX) == BLOCK_SIZE
    vllm_engine.update_weights(offer(make_policy(1), 1))
    assert vllm_engine.in_flight
    worst = probe(vllm_engine, make_policy(1), SHARED_PREFIX)
    assert num_cached(vllm_engine, SHARED_PREFIX) == BLOCK_SIZE, "cached again, under the new weights"
    again = probe(vllm_engine, make_policy(1), SHARED_PREFIX)
    in_flight = mismatch({0: make_policy(0), 1: make_policy(1)}, all_of(vllm_engine))
    print(f"|Δ log π| ≤ {worst:.2g} recomputed, {again:.2g} cached, {in_flight:.2g} in flight")
    assert max(worst, again, in_flight) < TOLERANCE


def test_the_probe_reads_no_kept_cache_and_would_find_one(
    vllm_engine: "VllmEngine", make_policy: MakePolicy, offer: Offer
) -> None:
    tokens = probe_tokens(SHARED_PREFIX[:10], max_new_tokens=BLOCK_SIZE + 8)
    assert len(tokens) > BLOCK_SIZE
    assert probe(vllm_engine, make_policy(0), tokens) < TOLERANCE
    vllm_engine.keep_cache = True
    vllm_engine.update_weights(offer(make_policy(1), 1))
    salted = probe(vllm_engine, make_policy(1), tokens)
    # The counter-proof: under the salt of the update before, the old cache is still there.
    vllm_engine._num_updates -= 1
    assert num_cached(vllm_engine, tokens) == BLOCK_SIZE
    stale = probe(vllm_engine, make_policy(1), tokens)
    vllm_engine._num_updates += 1
    print(f"|Δ log π| {stale:.2g} with the old cache, {salted:.2g} with a new salt")
    assert stale > 100 * TOLERANCE
    assert salted < TOLERANCE


def test_more_prompts_than_fit_into_one_step_are_sampled_with_their_seeds(
    vllm_engine: "VllmEngine", make_policy: MakePolicy
) -> None:
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 15, (200, 55), generator=random).tolist()
    budget = vllm_engine._llm.vllm_config.scheduler_config.max_num_batched_tokens
    assert budget < 200 * 55
    assert budget % 55, "the last one would be cut"
    vllm_engine.submit(requests(prompts), Sampling(temperature=1.0, top_p=1.0, max_new_tokens=2))
    assert mismatch({0: make_policy(0)}, all_of(vllm_engine)) < TOLERANCE


@pytest.mark.extended
def test_after_many_updates_weights_are_bit_for_bit_those_of_a_fresh_start(
    vllm_engine: "VllmEngine", make_policy: MakePolicy, offer: Offer, tmp_path: Path
) -> None:
    at_first = checksums(vllm_engine)
    for version in range(1, 11):
        vllm_engine.update_weights(offer(make_policy(version), version))
    with running_vllm(make_policy(10), tmp_path) as fresh:
        assert checksums(vllm_engine) == checksums(fresh)
        # What the kernels made of a tied layer's weights is in no checksum: it shows here.
        for tokens in ([1, 3], SHARED_PREFIX):
            expected = fresh.next_logprobs(tokens, NUM_LOGPROBS)
            assert vllm_engine.next_logprobs(tokens, NUM_LOGPROBS) == expected
    assert checksums(vllm_engine) != at_first


def test_an_update_that_fails_stops_generation_until_one_succeeds(
    vllm_engine: "VllmEngine", make_policy: MakePolicy, offer: Offer
) -> None:
    weights = offer(make_policy(1), 1)
    with pytest.raises(ValueError, match="shared memory"):
        vllm_engine.update_weights(replace(weights, shared=None))
    assert weights.shared is not None
    gone = replace(weights, shared=replace(weights.shared, path=f"{weights.shared.path}-gone"))
    vllm_engine.submit(requests([[1, 3]] * 8), LONG)
    with pytest.raises(Exception, match="No such file"):
        vllm_engine.update_weights(gone)
    assert vllm_engine._run(vllm_engine._llm.is_paused())
    assert vllm_engine.policy_version == 0
    vllm_engine.update_weights(weights)
    assert mismatch({0: make_policy(0), 1: make_policy(1)}, all_of(vllm_engine)) < TOLERANCE


def architecture(name: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A tiny model of an architecture, every parameter of it random, biases and norms too."""
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)),
    }
    model = models[name]()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms are ones at first, biases zeros.
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.3)
    return model


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "telling", "workers"),
    [
        pytest.param("llama", "lm_head", 1, marks=pytest.mark.extended),
        pytest.param("qwen2", "q_proj.bias", 1, marks=pytest.mark.extended),
        pytest.param("qwen3", "q_norm", 1, marks=pytest.mark.extended),
        ("qwen3", "q_norm", 2),
    ],
)
def test_every_architecture_agrees_with_the_trainer_before_and_after_updates(
    name: str, telling: str, workers: int, tokenizer: PreTrainedTokenizerFast, offer: Offer, tmp_path: Path
) -> None:
    models = {version: architecture(name, tokenizer, seed=version) for version in range(3)}
    assert any(telling in parameter for parameter, _ in models[0].named_parameters())
    prompts = [[1, 3 + i % 12, 3 + i % 11] for i in range(16)]
    previous = vllm_processes()
    with running_vllm(models[0], tmp_path, tensor_parallel_size=workers) as engine:
        processes = vllm_processes() - previous
        assert len(processes) == 1 + workers
        for version in range(3):
            if version:
                engine.update_weights(offer(models[version], version))
            engine.submit(requests(prompts), LONG)
            done = all_of(engine)
            assert {trajectory.response.version_spans for trajectory in done} == {((version, 0),)}
            worst = mismatch(dict(models), done)
            print(f"{name}, {workers} workers, version {version}: |Δ log π| ≤ {worst:.2g}")
            assert worst < TOLERANCE
    assert not left_behind(processes)


@pytest.mark.extended
def test_a_killed_engine_core_is_an_error_for_all_callers_and_leaves_nothing(
    make_policy: MakePolicy, offer: Offer, tmp_path: Path
) -> None:
    previous = vllm_processes()
    with running_vllm(make_policy(0), tmp_path) as engine, ThreadPoolExecutor(2) as threads:
        processes = vllm_processes() - previous
        core = engine_core(processes)
        # So that nobody who waits can have an answer before it dies.
        core.suspend()
        engine.submit(requests([[1, 3]] * 8), LONG)
        collecting = threads.submit(all_of, engine)
        updating = threads.submit(engine.update_weights, offer(make_policy(1), 1))
        core.kill()
        for waiting in (collecting, updating):
            with pytest.raises(Exception, match="EngineCore"):
                waiting.result()
        engine.submit(requests([[1, 3]]), LONG)
        with pytest.raises(Exception, match="EngineCore"):
            all_of(engine)
    assert len(processes) == 2
    assert not left_behind(processes)


@pytest.mark.extended
def test_a_worker_that_outlives_its_core_is_ended_with_the_engine(make_policy: MakePolicy, tmp_path: Path) -> None:
    previous = vllm_processes()
    with running_vllm(make_policy(0), tmp_path):
        processes = vllm_processes() - previous
        core = engine_core(processes)
        (worker,) = processes - {core}
        worker.suspend()
        core.kill()
    assert not left_behind(processes)
