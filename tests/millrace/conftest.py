"""Fixtures of the tests of millrace/: a policy that is made in a few milliseconds, and trajectories of any group."""

import shutil
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from support.engines.policies import Offer, offering
from support.replay.trained_run import TrainedRun, train_and_store
from support.stores.memory import unused_name
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.types import Prompt, Request, Response, Trajectory
from storage.stores.memory import MemoryStore

# Two test processes with a thread pool each are far slower on two cores than two single threads.
torch.set_num_threads(1)


@pytest.fixture
def memory_store() -> Iterator[MemoryStore]:
    store = MemoryStore(unused_name())
    yield store
    shutil.rmtree(store.root, ignore_errors=True)


@pytest.fixture
def offer() -> Iterator[Offer]:
    with offering() as offer:
        yield offer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(["0123456789+="])


@pytest.fixture(scope="session")
def make_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., LlamaForCausalLM]:
    """`make(seed)`: a tiny Llama whose weights are large enough for it to have opinions; it has two attention heads."""

    def make(seed: int = 0, hidden_size: int = 16) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.3, generator=random)
        return model

    return make


@pytest.fixture(scope="session")
def make_trajectories() -> Callable[..., list[Trajectory]]:
    """`make(group_ids, group_size)`: trajectories whose tokens and lengths tell them apart."""

    def make(group_ids: Sequence[int], group_size: int = 2, policy_version: int = 0) -> list[Trajectory]:
        return [
            Trajectory(
                request=_request(group_id, index),
                response=_response(group_id, index, policy_version),
                t_started=1.5,
                t_finished=1.75 + group_id,
            )
            for group_id in group_ids
            for index in range(group_size)
        ]

    return make


def _request(group_id: int, index: int) -> Request:
    return Request(
        group_id=group_id,
        sample_index=index,
        prompt=Prompt(prompt_id=f"p{group_id}", text=f"{group_id}+1=", answer=str(group_id + 1), source="test"),
        prompt_tokens=(1, *(3 + int(digit) for digit in str(group_id))),
        seed=2**62 + index,
        t_admitted=1.25,
    )


def _response(group_id: int, index: int, policy_version: int) -> Response:
    length = 1 + (3 * group_id + index) % 4
    return Response(
        tokens=tuple(3 + (group_id + index + t) % 12 for t in range(length)),
        rollout_logprobs=tuple(-(group_id + 1) / (index + t + 2) for t in range(length)),
        version_spans=((policy_version, 0),),
        finish_reason="stop" if length < 4 else "length",
    )


@pytest.fixture(scope="session")
def unchanged(
    tmp_path_factory: pytest.TempPathFactory,
    make_model: Callable[..., LlamaForCausalLM],
    tokenizer: PreTrainedTokenizerFast,
) -> TrainedRun:
    """A stored run, trained once a session, for tests that only read it."""
    start = tmp_path_factory.mktemp("start")
    make_model(0).save_pretrained(start)
    return train_and_store(tmp_path_factory.mktemp("trained") / "run", start, len(tokenizer))
