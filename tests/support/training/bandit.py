"""A tiny policy in float64 to check losses against closed forms and finite differences."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from configs.training import TrainingConfig
from millrace.training.losses.base import LossInputs
from millrace.training.losses.factory import Loss, make_loss


def make(name: str, **parameters: object) -> Loss:
    """A loss with these parameters."""
    return make_loss(TrainingConfig.model_validate({"max_steps": 1, "loss": {"name": name, **parameters}}))


def vector(*values: float, requires_grad: bool = False) -> torch.Tensor:
    """[N] float64."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def tokens_of(
    trainer_logprobs_N: torch.Tensor,
    rollout_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    lengths: Sequence[int] | None = None,
    staleness: Sequence[int] | None = None,
) -> LossInputs:
    """The tokens of responses of these lengths and staleness; None: each token is a response, and fresh."""
    lengths = [1] * len(trainer_logprobs_N) if lengths is None else lengths
    response_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    staleness_Q = torch.tensor([0] * len(lengths) if staleness is None else staleness)
    return LossInputs(
        trainer_logprobs_N=trainer_logprobs_N,
        rollout_logprobs_N=rollout_logprobs_N,
        advantages_N=advantages_N,
        response_N=response_N,
        num_responses=len(lengths),
        staleness_N=staleness_Q[response_N],
    )


def pull(loss: Loss, trainer: float, rollout: float, advantage: float) -> float:
    """−d loss / d log π of a single token, which should be weight · advantage."""
    return pulls(loss, tokens_of(vector(trainer), vector(rollout), vector(advantage))).item()


def pulls(loss: Loss, tokens: LossInputs) -> torch.Tensor:
    """[N] −d Σ loss / d log π of each token."""
    trainer_logprobs_N = tokens.trainer_logprobs_N.detach().requires_grad_()
    (grad_N,) = torch.autograd.grad(
        loss(replace(tokens, trainer_logprobs_N=trainer_logprobs_N)).loss.sum(),
        trainer_logprobs_N,
        materialize_grads=True,
    )
    return -grad_N


class Bandit:
    """A softmax policy over 5 tokens, some sampled tokens, and the behaviour policy's log μ of them.

    `ratios` are π/μ of the tokens; each token is a response unless `lengths` has the tokens per response.
    """

    def __init__(
        self,
        ratios: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        *,
        advantages: Sequence[float] = (0.75, -1.25, 0.5, -0.5),
        lengths: Sequence[int] | None = None,
        staleness: Sequence[int] | None = None,
        seed: int = 1,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.logits_NV = torch.randn(len(ratios), 5, dtype=torch.float64, generator=random)
        self.actions_N = torch.randint(5, (len(ratios),), generator=random)
        self.advantages_N = vector(*advantages)
        self.rollout_logprobs_N = self.logprobs(self.logits_NV) - vector(*ratios).log()
        self._lengths, self._staleness = lengths, staleness

    def logprobs(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] log π of the sampled tokens."""
        return torch.log_softmax(logits_NV, dim=-1).gather(1, self.actions_N[:, None]).squeeze(1)

    def ratio(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """[N] π/μ of the sampled tokens."""
        return (self.logprobs(logits_NV) - self.rollout_logprobs_N).exp()

    def tokens(self, logits_NV: torch.Tensor | None = None) -> LossInputs:
        """The input of a loss, under these logits or the policy's own."""
        trainer_logprobs_N = self.logprobs(self.logits_NV if logits_NV is None else logits_NV)
        return tokens_of(
            trainer_logprobs_N,
            self.rollout_logprobs_N,
            self.advantages_N,
            lengths=self._lengths,
            staleness=self._staleness,
        )

    def gradient(self, loss: Loss) -> torch.Tensor:
        """[N, V] d loss / d logits, by autograd."""
        logits_NV = self.logits_NV.clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(self.tokens(logits_NV)).loss.sum(), logits_NV)
        return grad

    def central_differences(self, objective: Callable[[torch.Tensor], torch.Tensor], h: float = 1e-6) -> torch.Tensor:
        """[N, V] d objective(logits) / d logits, without autograd."""
        grad = torch.zeros_like(self.logits_NV)
        for index in range(grad.numel()):
            bump = torch.zeros_like(grad)
            bump.view(-1)[index] = h
            difference = objective(self.logits_NV + bump) - objective(self.logits_NV - bump)
            grad.view(-1)[index] = difference / (2 * h)
        return grad


def random_bandit(seed: int) -> Bandit:
    """Responses of 0 to 6 tokens, ratios from e^−1.5 to e^1.5, one advantage a response, one in four of them 0."""
    random = torch.Generator().manual_seed(seed)
    lengths = [0, 1, *torch.randint(0, 7, (6,), generator=random).tolist()]
    num_tokens = sum(lengths)
    advantages_Q = torch.randn(len(lengths), dtype=torch.float64, generator=random)
    advantages_Q[torch.rand(len(lengths), generator=random) < 0.25] = 0
    of_response_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Bandit(
        (3 * torch.rand(num_tokens, dtype=torch.float64, generator=random) - 1.5).exp().tolist(),
        advantages=advantages_Q[of_response_N].tolist(),
        lengths=lengths,
        staleness=torch.randint(0, 5, (len(lengths),), generator=random).tolist(),
        seed=seed,
    )
