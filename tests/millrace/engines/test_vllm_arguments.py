"""What vLLM is started with: the user's arguments, Millrace's own above them, and a default below them."""

from pathlib import Path

import pytest
import torch

from millrace.engines.vllm_arguments import OWN, vllm_arguments


def test_the_users_arguments_come_with_the_model_and_what_millrace_rests_on() -> None:
    arguments = vllm_arguments(Path("/policy"), dtype="bfloat16", engine_args={"max_num_seqs": 7, **dict.fromkeys(OWN)})
    assert arguments.items() >= {"model": "/policy", "dtype": "bfloat16", "max_num_seqs": 7}.items()
    assert {name: arguments[name] for name in OWN} == OWN


def test_vllm_is_told_from_the_start_that_it_is_to_sleep() -> None:
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={}, sleeps=True)["enable_sleep_mode"] is True
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={})["enable_sleep_mode"] is False


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="only without a CUDA device")
def test_on_a_cpu_prompts_are_computed_in_one_piece_unless_the_user_says_otherwise() -> None:
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={})["enable_chunked_prefill"] is False
    asked = vllm_arguments(Path("/policy"), dtype="float32", engine_args={"enable_chunked_prefill": True})
    assert asked["enable_chunked_prefill"] is True
