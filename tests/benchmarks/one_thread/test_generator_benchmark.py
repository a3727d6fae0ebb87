"""The benchmark of the generator counts what both contenders sampled."""

import torch

from benchmarks.generator import CASES, Case, contenders, measure

_TINY = Case(hidden_size=16, num_layers=1, intermediate_size=16, num_groups=2, prompt_tokens=3, max_new_tokens=5)


def test_both_contenders_answer_every_request_and_count_their_tokens() -> None:
    for call in contenders(_TINY).values():
        counts = [call(seed) for seed in range(6)]
        # A response has one token at least, and ends early in some rounds.
        assert all(16 <= count <= 80 for count in counts)
        assert min(counts) < 80
        assert len(set(counts)) > 1


def test_a_measurement_has_a_rate_per_round_and_contender() -> None:
    found = measure(_TINY, rounds=2)
    assert {name: len(rates) for name, rates in found["rounds"].items()} == {"engine": 2, "generate": 2}
    assert min(found["tokens_per_second"].values()) > 0
    assert found["ratio"] > 0


def test_the_models_have_as_many_parameters_as_their_names_say() -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        per_layer = 4 * case.hidden_size**2 + 3 * case.hidden_size * case.intermediate_size
        assert f"{case.num_layers * per_layer / 1e6:.1f} M" == name.split(",")[0]
