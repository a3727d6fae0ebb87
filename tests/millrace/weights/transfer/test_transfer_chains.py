"""How many copies leave the trainer."""

import pytest

from millrace.weights.transfer.chains import chains_of, num_chains

_GB = 1 << 30
_BUCKET = 64 << 20


def _num(*, generators: int, trainers: int, workers: int, others: float = 0.0) -> int:
    return num_chains(
        generators=generators,
        trainers=trainers,
        needed=16 * _GB,
        most_received=16 * _GB // workers,
        others=others,
        bucket_bytes=_BUCKET,
    )


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_single_trainer_rank_sends_one_copy(workers: int) -> None:
    assert _num(generators=16, trainers=1, workers=workers) == 1


def test_a_single_generator_is_one_chain() -> None:
    assert _num(generators=1, trainers=64, workers=1) == 1


def test_chains_are_more_with_more_trainer_ranks_and_fewer_if_they_are_busy() -> None:
    few, many = (_num(generators=64, trainers=ranks, workers=1) for ranks in (8, 512))
    assert 1 <= few < many
    assert _num(generators=64, trainers=512, workers=1, others=20.0 * _GB) < many


def test_long_chains_are_divided_when_filling_them_takes_long() -> None:
    assert _num(generators=128, trainers=64, workers=8) > _num(generators=4, trainers=64, workers=8)


def test_chains_differ_by_one_generator_at_most_and_have_each_once() -> None:
    chains = chains_of([0, 2, 3, 5, 7], 2)
    assert chains == ((0, 3, 7), (2, 5))
