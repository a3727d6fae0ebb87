"""The smallest policy there is, in float64, to hold a loss against closed forms and finite differences."""

from collections.abc import Callable

import torch

from millrace.losses.base import Loss


def vector(*values: float, requires_grad: bool = False) -> torch.Tensor:
    """[T] float64."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def pull(loss: Loss, trainer: float, rollout: float, advantage: float) -> float:
    """−d loss / d log π of a single token: what the weight times the advantage should be."""
    trainer_logprobs = vector(trainer, requires_grad=True)
    judged = loss(trainer_logprobs, vector(rollout), vector(advantage))
    (grad,) = torch.autograd.grad(judged.loss.sum(), trainer_logprobs)
    return -grad.item()


class Bandit:
    """A softmax policy over 5 tokens, four sampled tokens of it, and what the behaviour policy thought of them.

    `ratios` are π/μ of the four; their advantages are 0.75, −1.25, 0.5 and −0.5.
    """

    def __init__(self, ratios: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)) -> None:
        random = torch.Generator().manual_seed(1)
        self.logits_TV = torch.randn(4, 5, dtype=torch.float64, generator=random)
        self.tokens_T = torch.tensor([0, 3, 4, 1])
        self.advantages_T = vector(0.75, -1.25, 0.5, -0.5)
        self.rollout_logprobs_T = self.logprobs(self.logits_TV) - vector(*ratios).log()

    def logprobs(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """[T] log π of the sampled tokens."""
        return torch.log_softmax(logits_TV, dim=-1).gather(1, self.tokens_T[:, None]).squeeze(1)

    def ratio(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """[T] π/μ of the sampled tokens."""
        return (self.logprobs(logits_TV) - self.rollout_logprobs_T).exp()

    def gradient(self, loss: Loss) -> torch.Tensor:
        """[T, V] d loss / d logits, by autograd."""
        logits_TV = self.logits_TV.clone().requires_grad_()
        judged = loss(self.logprobs(logits_TV), self.rollout_logprobs_T, self.advantages_T)
        (grad,) = torch.autograd.grad(judged.loss.sum(), logits_TV)
        return grad

    def central_differences(self, objective: Callable[[torch.Tensor], torch.Tensor], h: float = 1e-6) -> torch.Tensor:
        """[T, V] d objective(logits) / d logits, without autograd."""
        grad = torch.zeros_like(self.logits_TV)
        for index in range(grad.numel()):
            bump = torch.zeros_like(grad)
            bump.view(-1)[index] = h
            difference = objective(self.logits_TV + bump) - objective(self.logits_TV - bump)
            grad.view(-1)[index] = difference / (2 * h)
        return grad
