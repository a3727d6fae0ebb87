"""Members of one push as `make gpu-check` starts them on GPUs, here over gloo."""

import pytest
from support.gpu.direct_members import push_between


@pytest.mark.slow
def test_shards_of_four_ranks_reach_a_generator_bit_for_bit() -> None:
    push_between(5, "cpu")


@pytest.mark.slow
def test_a_generator_killed_in_a_push_is_an_error_for_the_trainer_in_time() -> None:
    push_between(2, "cpu", killed=True)
