"""What vLLM is started with: the user's arguments, Millrace's own above them, and a default below them."""

from pathlib import Path

import pytest
import torch

from configs.generation import RESERVED
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


def test_what_truncated_sampling_kept_is_asked_for_as_a_mask_on_a_gpu_and_as_log_probabilities_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}
    for devices in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        for truncates in (False, True):
            found = vllm_arguments(
                Path("/policy"), dtype="float32", engine_args={"max_logprobs": 5}, truncates=truncates
            )
            asked[devices, truncates] = (found["return_sampling_mask"], found["max_logprobs"])
    assert asked == {(0, False): (False, 5), (0, True): (False, -1), (1, False): (False, 5), (1, True): (True, 5)}


def test_vllm_is_told_from_the_start_that_it_is_to_sleep() -> None:
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={}, sleeps=True)["enable_sleep_mode"] is True
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={})["enable_sleep_mode"] is False


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="only without a CUDA device")
def test_on_a_cpu_prompts_are_computed_in_one_piece_unless_the_user_says_otherwise() -> None:
    assert vllm_arguments(Path("/policy"), dtype="float32", engine_args={})["enable_chunked_prefill"] is False
    asked = vllm_arguments(Path("/policy"), dtype="float32", engine_args={"enable_chunked_prefill": True})
    assert asked["enable_chunked_prefill"] is True
