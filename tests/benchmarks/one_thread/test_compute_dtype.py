"""The benchmark of number formats compares the same weights on the same tokens."""

import torch

from benchmarks.compute_dtype import make_model, measure, sample_batch


def test_bfloat16_differs_in_log_probabilities_by_rounding_alone() -> None:
    torch.manual_seed(0)
    model = make_model()
    samples = sample_batch(model, groups=1, prompt=3, response=4)
    found = measure(model, samples, rounds=1)
    assert found["tokens"] == 8 * 7
    assert 0 < found["logprob_difference_mean"] <= found["logprob_difference_max"] < 0.1
    assert 0 < found["kl"] < 1e-3
    assert {dtype: len(values) for dtype, values in found["seconds"].items()} == {"float32": 1, "bfloat16": 1}
