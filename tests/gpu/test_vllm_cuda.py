"""vLLM on GPUs keeps to the trainer's policy through updates: under captured graphs, with experts, in fp8, on two GPUs.

The model computes in bfloat16, so log-probabilities are compared by their median: a logit that is rounded, or a token
that is routed to another expert, moves single ones by far.
"""

import statistics
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from support.engines.policies import Offer, all_of, mismatches
from support.engines.vllm_processes import running_vllm
from support.training.families import CASES
from transformers import PreTrainedModel

from millrace.types import Request, Sampling, Trajectory
from millrace.weights.probe import NUM_LOGPROBS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

VERSIONS = range(4)
CLOSE = 0.05
"""Median |Δ log π| in bfloat16 under the version that drew a token, nats; under another it is a multiple of it."""
LONG = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=50)


def policies(family: str) -> dict[int, PreTrainedModel]:
    """By version: models in float32 whose weights are numbers of bfloat16."""
    return {version: CASES[family].model(seed=version).bfloat16().float() for version in VERSIONS}


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    return deepcopy(model).bfloat16()


def requests(version: int) -> list[Request]:
    prompts = [(1, 3 + i % 12, 3 + i % 11) for i in range(16)]
    return [
        Request(group_id=100 * version + i, sample_index=0, prompt_tokens=prompt, seed=100 * version + i)
        for i, prompt in enumerate(prompts)
    ]


def median_mismatch(models: dict[int, PreTrainedModel], done: Sequence[Trajectory]) -> float:
    return statistics.median(
        mismatch
        for trajectory in done
        for mismatch in mismatches(models, trajectory.request.prompt_tokens, trajectory.response)
    )


def assert_follows_updates(family: str, offer: Offer, folder: Path, *, workers: int = 1) -> None:
    """Each token is of its span's version while versions arrive in the middle of responses."""
    models = policies(family)
    done: list[Trajectory] = []
    model = in_bfloat16(models[0])
    with running_vllm(model, folder, dtype="bfloat16", enforce_eager=False, tensor_parallel_size=workers) as engine:
        engine.keep_cache = False
        for version in VERSIONS:
            if version:
                engine.update_weights(offer(in_bfloat16(models[version]), version))
            engine.submit(requests(version), LONG)
            done += engine.collect(0.0)
        done += all_of(engine)
    assert len(done) == 16 * len(VERSIONS)
    assert max(len(trajectory.response.version_spans) for trajectory in done) > 1, "an update in a response"
    shifted = {version: models[(version + 1) % len(models)] for version in models}
    own, other = median_mismatch(models, done), median_mismatch(shifted, done)
    print(f"{family}: median |Δ log π| {own:.2g}, under other versions {other:.2g}")
    assert own < CLOSE
    assert other > 5 * CLOSE


def test_updates_reach_responses_under_captured_graphs(offer: Offer, tmp_path: Path) -> None:
    assert_follows_updates("qwen3", offer, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_updates_reach_experts(family: str, offer: Offer, tmp_path: Path) -> None:
    assert_follows_updates(family, offer, tmp_path)


def test_an_update_of_gpt_oss_is_refused_and_names_experts_and_sinks(offer: Offer, tmp_path: Path) -> None:
    first, second = (in_bfloat16(model) for model in list(policies("gpt_oss").values())[:2])
    # vLLM copies both without their weight loaders. Once it no longer does, the preflight need not refuse gpt-oss.
    with (
        running_vllm(first, tmp_path, dtype="bfloat16", enforce_eager=False) as engine,
        pytest.raises(Exception, match=r"layers\.0\.attn \(.*layers\.0\.mlp\.experts\.routed_experts \("),
    ):
        engine.update_weights(offer(second, 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")
def test_updates_reach_both_gpus_of_an_engine(offer: Offer, tmp_path: Path) -> None:
    assert_follows_updates("llama", offer, tmp_path, workers=2)


def test_an_fp8_engine_computes_after_an_update_as_one_that_starts_with_it(offer: Offer, tmp_path: Path) -> None:
    first, second = (in_bfloat16(model) for model in list(policies("llama").values())[:2])
    probes = []
    for start, update in ((first, second), (second, None)):
        folder = tmp_path / f"{len(probes)}"
        with running_vllm(
            start, folder, dtype="bfloat16", enforce_eager=False, quantization="fp8_per_tensor"
        ) as engine:
            if update is not None:
                engine.update_weights(offer(update, 1))
            probes.append(engine.next_logprobs([1, 3, 5], NUM_LOGPROBS))
    assert probes[0] == pytest.approx(probes[1], abs=1e-6)
