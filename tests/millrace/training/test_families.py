"""A family of models is supported if trainer, transformers and engines agree about it, and its weights travel.

The reference is transformers' own forward pass of each sequence alone, with its eager attention.
"""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.one_by_one import response_logprobs, taken
from support.engines.policies import Offer, largest_mismatch
from support.engines.vllm_processes import running_vllm
from support.training.families import CASES, WINDOW, table
from support.training.samples import make_sample
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from configs.schema import ModelConfig
from configs.training import TrainingConfig
from millrace.generation.engines.base import Engine
from millrace.generation.engines.transformers import TransformersEngine
from millrace.maintenance.export import write_model_folder
from millrace.models.loading import load_model
from millrace.models.supported import FAMILIES
from millrace.training.batch import Sample
from millrace.training.packing import microbatches, pack
from millrace.training.policy import PackedPolicy
from millrace.training.trainer import Trainer
from millrace.types import Request, Sampling, Trajectory
from storage.checkpoints import CheckpointWriter
from storage.stores.local import LocalStore

TOLERANCE = 1e-5
"""Nats, in float32."""
families = pytest.mark.parametrize("family", CASES)


def samples() -> list[Sample]:
    """Most longer than the window, some of equal length."""
    random = np.random.default_rng(0)
    shapes = [(3, 4), (9, 21), (1, 1), (10, 20), (2, 33), (6, 1), (17, 18)]
    assert max(prompt + response for prompt, response in shapes) > 4 * WINDOW
    return [
        make_sample(
            random.integers(3, 40, prompt),
            random.integers(3, 40, response),
            rollout_logprobs=-1,
            temperature=temperature,
        )
        for (prompt, response), temperature in zip(shapes, (1.0, 0.5, 2.0, 1.0, 0.75, 1.0, 1.5), strict=True)
    ]


def test_the_list_of_families_is_the_trainers_and_that_of_the_docs() -> None:
    assert list(dict.fromkeys(case.model_type for case in CASES.values())) == list(FAMILIES)
    assert table() in (Path(__file__).parents[3] / "docs" / "models.md").read_text()


@families
def test_packed_log_pi_and_gradients_are_those_of_transformers(family: str) -> None:
    model, batch = CASES[family].model(seed=0), samples()
    policy = PackedPolicy(deepcopy(model))
    expected = torch.cat([taken(response_logprobs(model, sample), sample) for sample in batch])
    expected.sum().backward()
    logprobs = torch.zeros(len(expected))
    for microbatch in microbatches(batch, max_tokens=100):
        logprobs_N = policy(microbatch)[0]
        logprobs_N.sum().backward()
        logprobs[microbatch.in_batch_N] = logprobs_N.detach()
    assert expected.std() > 0.3, "the model has opinions"
    torch.testing.assert_close(logprobs, expected.detach(), rtol=0, atol=TOLERANCE)
    for (name, parameter), other in zip(model.named_parameters(), policy.model.parameters(), strict=True):
        assert parameter.grad is not None
        largest = max(1.0, parameter.grad.abs().max().item())
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=TOLERANCE * largest, msg=name)


def requests(num: int) -> list[Request]:
    prompts = [tuple(3 + (7 * i + j * j) % 37 for j in range(1 + 5 * i)) for i in range(num)]
    return [Request(group_id=i, sample_index=0, prompt_tokens=prompt, seed=i) for i, prompt in enumerate(prompts)]


def all_of(engine: Engine) -> list[Trajectory]:
    done: list[Trajectory] = []
    while engine.in_flight:
        done += engine.collect(1.0)
    return done


LONG = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=30)


@pytest.mark.slow
@families
def test_the_transformers_engine_samples_from_the_trainers_policy(
    family: str, tokenizer: PreTrainedTokenizerFast, offer: Offer, tmp_path: Path
) -> None:
    models = {version: CASES[family].model(seed=version) for version in range(2)}
    models[0].save_pretrained(tmp_path)
    engine = TransformersEngine(load_model(tmp_path, "float32"), tokenizer)
    for version, model in models.items():
        if version:
            engine.update_weights(offer(model, version))
        engine.submit(requests(6), LONG)
        done = all_of(engine)
        assert max(len(trajectory.response.tokens) for trajectory in done) == LONG.max_new_tokens
        for trajectory in done:
            assert trajectory.response.version_spans == ((version, 0),)
            assert largest_mismatch(models, trajectory.request.prompt_tokens, trajectory.response) < TOLERANCE


@pytest.mark.slow
@families
def test_a_checkpoint_becomes_a_folder_with_the_same_policy(
    family: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    CASES[family].model(seed=0).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    training = TrainingConfig(max_steps=1, learning_rate=0.05, max_tokens_per_microbatch=100)
    trainer = Trainer(load_model(tmp_path / "start", "float32"), training)
    trainer.step(samples())
    store = LocalStore(tmp_path / "run")
    checkpoint = CheckpointWriter(store).commit(1, trainer.state(), {})
    write_model_folder(store, checkpoint, tmp_path / "start", ModelConfig(dtype="float32"), tmp_path / "exported")
    exported, start = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        for name in ("exported", "start")
    )
    sample = samples()[3]
    with torch.no_grad():
        exported_logprobs, start_logprobs = (response_logprobs(model, sample) for model in (exported, start))
        torch.testing.assert_close(exported_logprobs, trainer.logprobs_of(pack(sample)), rtol=0, atol=TOLERANCE)
        assert (exported_logprobs - start_logprobs).abs().max() > 0.01, "it has learnt something"


ON_VLLM = [name for name, case in CASES.items() if case.vllm == "yes"]


@pytest.mark.extended
@pytest.mark.vllm
@pytest.mark.parametrize("family", ON_VLLM)
def test_vllm_samples_from_the_trainers_policy(family: str, offer: Offer, tmp_path: Path) -> None:
    models = {version: CASES[family].model(seed=version) for version in range(2)}
    with running_vllm(models[0], tmp_path) as engine:
        for version, model in models.items():
            if version:
                engine.update_weights(offer(model, version))
            engine.submit(requests(6), LONG)
            done = all_of(engine)
            assert max(len(trajectory.response.tokens) for trajectory in done) == LONG.max_new_tokens
            for trajectory in done:
                assert trajectory.response.version_spans == ((version, 0),)
                assert largest_mismatch(models, trajectory.request.prompt_tokens, trajectory.response) < TOLERANCE
