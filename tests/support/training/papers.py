"""Objectives as their papers print them: padded rows of responses, to be maximised, differentiated by autograd alone.

Written from the formulas, with none of the product's code. Shapes: B responses, T places for tokens. `sg`, the papers'
stop-gradient, stands wherever a formula holds something fixed; everything else is differentiated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A batch of responses."""

    pi_BT: torch.Tensor
    """log π, float64; any value at masked places."""
    mu_BT: torch.Tensor
    """log μ of the policy that sampled; papers call it π_old or β."""
    mask_BT: torch.Tensor
    """Bool: where a token counts."""
    advantages_B: torch.Tensor
    staleness_B: torch.Tensor
    before_BT: torch.Tensor | None = None
    """log π before the first update on the batch; None if this is the first."""

    @property
    def advantages(self) -> torch.Tensor:
        """[B, 1]."""
        return self.advantages_B[:, None]

    @property
    def log_ratios(self) -> torch.Tensor:
        """[B, T] log π/μ; 0 where no token counts."""
        return torch.where(self.mask_BT, self.pi_BT - self.mu_BT, 0.0)

    @property
    def ratios(self) -> torch.Tensor:
        """[B, T] π/μ; 1 where no token counts."""
        return self.log_ratios.exp()

    @property
    def products(self) -> torch.Tensor:
        """[B, 1] of each response's ratios."""
        return self.log_ratios.sum(1, keepdim=True).exp()

    @property
    def geometric_means(self) -> torch.Tensor:
        """[B, 1] of each response's ratios; 1 for a response without tokens."""
        lengths_B1 = self.mask_BT.sum(1, keepdim=True).clamp(min=1)
        return (self.log_ratios.sum(1, keepdim=True) / lengths_B1).exp()


Terms = Callable[[Rows], torch.Tensor]
"""[B, T] or [B, 1]: the term of each token in the objective, before it is averaged."""


def sg(value: torch.Tensor) -> torch.Tensor:
    """The papers' stop-gradient."""
    return value.detach()


def reinforce(rows: Rows) -> torch.Tensor:
    """Williams 1992: A log π."""
    return rows.advantages * rows.pi_BT


def ppo_clip(low: float, high: float) -> Terms:
    """PPO, arXiv 1707.06347, eq. 7; with two bounds DAPO, arXiv 2503.14476, eq. 8."""

    def terms(rows: Rows) -> torch.Tensor:
        ratio, advantage = rows.ratios, rows.advantages
        return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)

    return terms


def dual_clip(low: float, high: float, most: float) -> Terms:
    """Dual-clip PPO, arXiv 1912.09729: max(PPO's term, c A) where A < 0."""

    def terms(rows: Rows) -> torch.Tensor:
        usual, advantage = ppo_clip(low, high)(rows), rows.advantages
        return torch.where(advantage < 0, torch.maximum(usual, most * advantage), usual)

    return terms


def decoupled_ppo(low: float, high: float, *, interpolated: bool) -> Terms:
    """Decoupled PPO, arXiv 2110.00641: (π_prox/μ) min(r A, clip(r) A), r = π/π_prox.

    π_prox is π before the first update on the batch, or, as in A-3PO, arXiv 2512.06547, geometrically between μ and π.
    """

    def log_prox(rows: Rows) -> torch.Tensor:
        if not interpolated:
            return rows.pi_BT if rows.before_BT is None else rows.before_BT
        d_B1 = rows.staleness_B[:, None].double()
        alpha_B1 = torch.where(d_B1 > 0, 1 / d_B1, 0.0)
        return alpha_B1 * rows.mu_BT + (1 - alpha_B1) * rows.pi_BT

    def terms(rows: Rows) -> torch.Tensor:
        log_prox_BT, advantage = sg(log_prox(rows)), rows.advantages
        ratio_BT = (rows.pi_BT - log_prox_BT).exp()
        clipped = torch.minimum(ratio_BT * advantage, ratio_BT.clamp(1 - low, 1 + high) * advantage)
        return (log_prox_BT - rows.mu_BT).exp() * clipped

    return terms


def truncated(most: float) -> Terms:
    """sg(min(r, C)) A log π: AIPO, arXiv 2505.24034; TIS; CISPO, arXiv 2506.13585, eq. 4, without its lower bound."""
    return lambda rows: sg(rows.ratios.clamp(max=most)) * rows.advantages * rows.pi_BT


def sequence_tis(most: float) -> Terms:
    """Truncated importance sampling of responses, richardli.xyz/rl-collapse: sg(min(ρ, C)) A log π."""
    return lambda rows: sg(rows.products.clamp(max=most)) * rows.advantages * rows.pi_BT


def icepop(low: float, high: float) -> Terms:
    """IcePop, arXiv 2510.18855: r A where low ≤ r ≤ high, else 0."""

    def terms(rows: Rows) -> torch.Tensor:
        ratio = rows.ratios
        return torch.where((ratio >= low) & (ratio <= high), ratio * rows.advantages, 0.0)

    return terms


def sequence_mask(low: float, high: float) -> Terms:
    """Masked importance sampling of responses, richardli.xyz/rl-collapse: ρ A where low ≤ ρ ≤ high, for each response.

    A response's term stands once. Its gradient by each token's log π is ρ A, as if each token had the term.
    """

    def terms(rows: Rows) -> torch.Tensor:
        product = rows.products
        once = torch.where((product >= low) & (product <= high), product * rows.advantages, 0.0)
        lengths_B1 = rows.mask_BT.sum(1, keepdim=True).clamp(min=1)
        return (once / lengths_B1).expand_as(rows.pi_BT)

    return terms


def geometric_mask(low: float, high: float, most: float) -> Terms:
    """Geometric mask with truncated weights, richardli.xyz/rl-collapse."""

    def terms(rows: Rows) -> torch.Tensor:
        mean = sg(rows.geometric_means)
        return torch.where((mean >= low) & (mean <= high), truncated(most)(rows), 0.0)

    return terms


def gspo(low: float, high: float) -> Terms:
    """GSPO, arXiv 2507.18071, eq. 5 and 7: min(s A, clip(s) A), s differentiated through all tokens of the response."""

    def terms(rows: Rows) -> torch.Tensor:
        mean, advantage = rows.geometric_means, rows.advantages
        return torch.minimum(mean * advantage, mean.clamp(1 - low, 1 + high) * advantage).expand_as(rows.pi_BT)

    return terms


def sapo(tau_positive: float, tau_negative: float) -> Terms:
    """SAPO, arXiv 2511.20347: (4/τ) σ(τ (r − 1)) A."""

    def terms(rows: Rows) -> torch.Tensor:
        tau = torch.full_like(rows.advantages, tau_negative).masked_fill(rows.advantages > 0, tau_positive)
        return 4 / tau * torch.sigmoid(tau * (rows.ratios - 1)) * rows.advantages

    return terms


def dppo_tv(divergence: float, most: float) -> Terms:
    """DPPO's Binary-TV variant, arXiv 2602.04879, with a truncated weight."""

    def terms(rows: Rows) -> torch.Tensor:
        moved, advantage = sg(rows.pi_BT.exp() - rows.mu_BT.exp()), rows.advantages
        gone = ((advantage > 0) & (moved > divergence)) | ((advantage < 0) & (moved < -divergence))
        return torch.where(gone, 0.0, truncated(most)(rows))

    return terms


def topr(rows: Rows) -> torch.Tensor:
    """TOPR, arXiv 2503.14286: A log π of good responses, sg(min(ρ, 1)) A log π of bad ones."""
    weight = torch.where(rows.advantages < 0, sg(rows.products).clamp(max=1), 1.0)
    return weight * rows.advantages * rows.pi_BT


def token_mean(terms_BT: torch.Tensor, mask_BT: torch.Tensor, _: int) -> torch.Tensor:
    """DAPO, arXiv 2503.14476, eq. 8: over all tokens of the batch."""
    return torch.where(mask_BT, terms_BT, 0.0).sum() / mask_BT.sum()


def sequence_mean(terms_BT: torch.Tensor, mask_BT: torch.Tensor, _: int) -> torch.Tensor:
    """GRPO, arXiv 2402.03300, eq. 3: over the tokens of a response, then over responses that have one."""
    found_B = mask_BT.any(1)
    sums_B, lengths_B = torch.where(mask_BT, terms_BT, 0.0).sum(1), mask_BT.sum(1)
    return (sums_B[found_B] / lengths_B[found_B]).mean()


def constant(terms_BT: torch.Tensor, mask_BT: torch.Tensor, most_tokens: int) -> torch.Tensor:
    """Dr. GRPO, arXiv 2503.20783: sums of responses over the longest length there may be, then over all responses."""
    return (torch.where(mask_BT, terms_BT, 0.0).sum(1) / most_tokens).mean()


def prompt_mean(terms_BT: torch.Tensor, mask_BT: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """ScaleRL, arXiv 2510.13786: over the tokens of a prompt's responses, then over prompts that have one."""
    means = [
        terms_BT[groups_B == group][mask_BT[groups_B == group]].mean()
        for group in groups_B.unique()
        if mask_BT[groups_B == group].any()
    ]
    return torch.stack(means).mean()


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant}
