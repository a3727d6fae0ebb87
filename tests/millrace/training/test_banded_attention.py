"""Attention in a band, block by block, is that of the whole matrix of scores, and so are its gradients."""

import pytest
import torch

from millrace.training.attention import BLOCK, Band, banded_attention

R, H, G, D = 2, 4, 2, 8
SCALING = 0.3


def inputs(length: int) -> list[torch.Tensor]:
    """query, key, value, sinks."""
    random = torch.Generator().manual_seed(length)
    shapes = [(R, H, length, D), (R, G, length, D), (R, G, length, D), (H,)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def whole(query: torch.Tensor, key: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
    """[R, H, T, T] scores, those that are not seen at −∞."""
    scores_RHTT = query @ key.repeat_interleave(H // G, dim=1).transpose(-1, -2) * SCALING
    if softcap is not None:
        scores_RHTT = softcap * torch.tanh(scores_RHTT / softcap)
    distance_TT = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    seen_TT = (distance_TT >= 0) & (distance_TT < (window or query.shape[2]))
    return scores_RHTT.masked_fill(~seen_TT, -torch.inf)


@pytest.mark.parametrize("length", [1, 7, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [
        (5, None, False),
        (BLOCK + 9, None, False),
        (None, 1.5, False),
        (5, 1.5, False),
        (None, None, True),
        (5, None, True),
    ],
)
def test_it_is_that_of_the_whole_matrix(length: int, window: int | None, softcap: float | None, sinks: bool) -> None:
    query, key, value, sinks_H = inputs(length)
    scores_RHTT = whole(query, key, window, softcap)
    if sinks:
        column_RHT1 = sinks_H[None, :, None, None].expand(R, H, length, 1)
        probs_RHTT = torch.cat([scores_RHTT, column_RHT1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs_RHTT = scores_RHTT.softmax(dim=-1)
    expected = probs_RHTT @ value.repeat_interleave(H // G, dim=1)
    band = Band(window=window, softcap=softcap, sinks_H=sinks_H if sinks else None)
    result = banded_attention(query, key, value, SCALING, band)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
    leaves = [query, key, value, *([sinks_H] if sinks else [])]
    pull = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = torch.autograd.grad((result * pull).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * pull).sum(), leaves)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("band", [Band(window=16), Band(window=16, sinks_H=torch.zeros(H)), Band(softcap=2.0)], ids=str)
def test_memory_for_the_backward_pass_grows_with_the_length(band: Band) -> None:
    assert kept(8 * BLOCK, band) < 20 * kept(BLOCK, band)


def kept(length: int, band: Band) -> int:
    """Bytes of the tensors that autograd saves, each storage once."""
    storages: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    query, key, value, _ = inputs(length)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        held = banded_attention(query, key, value, SCALING, band)
    assert held.requires_grad
    return sum(storages.values())
