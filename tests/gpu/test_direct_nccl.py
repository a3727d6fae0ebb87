"""`direct` over NCCL: shards go from the trainer's GPUs to the generator's, and every element arrives."""

import pytest
import torch
from support.gpu.direct_members import push_between

pytestmark = [
    pytest.mark.gpu,
    # NCCL lets no two members of a group share a GPU.
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices"),
]


@pytest.mark.parametrize("trainer_ranks", [1, 3])
def test_shards_reach_the_generator_s_gpu_bit_for_bit_with_the_plan_s_bytes(trainer_ranks: int) -> None:
    if torch.cuda.device_count() <= trainer_ranks:
        pytest.skip(f"needs {trainer_ranks + 1} GPUs")
    push_between(trainer_ranks + 1, "cuda")


def test_a_generator_killed_in_a_push_is_an_error_for_the_trainer_in_time() -> None:
    push_between(2, "cuda", killed=True)
