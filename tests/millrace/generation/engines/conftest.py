"""Fixtures of the tests of engines: weights to load, and one vLLM for them all."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from support.engines.policies import Offer
from support.engines.vllm_processes import HIDDEN_SIZE, running_vllm
from transformers import LlamaForCausalLM

if TYPE_CHECKING:
    from millrace.generation.engines.vllm.engine import VllmEngine

_LONGEST = 576
"""Tokens of a prompt with its response."""


@pytest.fixture(scope="session")
def make_policy(make_model: Callable[..., LlamaForCausalLM]) -> Callable[[int], LlamaForCausalLM]:
    """`make(seed)`: a policy that every engine can run, and whose folder has habits of decoding."""

    def make(seed: int) -> LlamaForCausalLM:
        model = make_model(seed, hidden_size=HIDDEN_SIZE)
        model.config.max_position_embeddings = _LONGEST
        model.generation_config.do_sample = True
        model.generation_config.temperature = 0.1
        model.generation_config.top_k = 2
        model.generation_config.repetition_penalty = 5.0
        return model

    return make


@pytest.fixture(scope="session")
def _running(
    make_policy: Callable[[int], LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Iterator["VllmEngine"]:
    folder = tmp_path_factory.mktemp("policy")
    with running_vllm(make_policy(0), folder, max_model_len=_LONGEST) as engine:
        yield engine


@pytest.fixture
def vllm_engine(_running: "VllmEngine", make_policy: Callable[[int], LlamaForCausalLM], offer: Offer) -> "VllmEngine":
    """vLLM with nothing in flight and the weights of `make_policy(0)`, version 0; for tests marked `vllm`.

    It recomputes caches after an update.
    """
    _running.abort()
    _running.keep_cache = False
    _running.update_weights(offer(make_policy(0), 0))
    return _running
