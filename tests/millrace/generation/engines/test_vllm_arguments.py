"""What vLLM is started with: the user's arguments, Millrace's own above them, and a default below them."""

from pathlib import Path

import pytest
import torch

from configs.engine_args import RESERVED
from millrace.generation.engines.vllm.arguments import vllm_arguments


def test_the_users_arguments_come_with_the_model_and_what_millrace_rests_on() -> None:
    user = {"max_num_seqs": 7, **dict.fromkeys(RESERVED)}
    arguments = vllm_arguments(Path("/policy"), dtype="bfloat16", engine_args=user)
    assert arguments.items() >= {"model": "/policy", "dtype": "bfloat16", "max_num_seqs": 7}.items()
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["enable_prefix_caching"] is True
    assert (arguments["skip_tokenizer_init"], arguments["enable_sleep_mode"]) == (True, False)
    assert arguments["generation_config"] == "vllm"
    assert arguments["weight_transfer_config"] == {"backend": "millrace"}


def test_vllm_is_told_from_the_start_that_it_is_to_sleep() -> None:
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={}, sleeps=True)["enable_sleep_mode"] is True
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={})["enable_sleep_mode"] is False


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="only without a CUDA device")
def test_on_a_cpu_prompts_are_computed_in_one_piece_unless_the_user_says_otherwise() -> None:
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={})["enable_chunked_prefill"] is False
    asked = vllm_arguments(Path("/policy"), dtype="float32", engine_args={"enable_chunked_prefill": True})
    assert asked["enable_chunked_prefill"] is True
