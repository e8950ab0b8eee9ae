"""Amounts that are often exactly zero, such as claims, rain or spending."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.hurdle import HURDLE


class Hurdle(NumberLikelihood):
    r"""Amounts with an atom at zero: $P(Y = 0) = \pi$, and $\log Y \sim \mathcal{N}(f, v)$ for amounts above zero.

    $$ \log p(y | f) = [y = 0] \log \pi + [y > 0] \bigl(\log (1 - \pi) + \log \mathcal{N}(\log y; f, v) - \log y\bigr) $$

    This is a hurdle model (Cragg 1971; Duan et al. 1983 for log-normal amounts): the network predicts separately whether there is
    an amount and how large it is. The network's last axis holds O locations f (clipped to [-20, 20]), O values $\log v$
    (clipped to [-12, 2]), and O logits of $\pi$ (clipped to [-20, 20]). With $\log v \le 2$ the mean is at most 40
    times the median amount. For a larger spread, data cannot determine the mean. The Fisher matrix in these three
    outputs is $\operatorname{diag}((1 - \pi) / v, (1 - \pi) / 2, \pi (1 - \pi))$. Targets are [B, O] and at least 0.
    Scale the targets so that amounts are around 1.
    """

    name = "hurdle"
    family = HURDLE
    parts = "a location, a log-variance and a logit of the probability of zero"
    outputs_per_target = 3

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Locations and variances of the logarithms, and logits of the probability of zero."""
        location, log_variance, logit = outputs.chunk(3, dim=-1)
        return location.clamp(-20, 20), log_variance.clamp(-12, 2).exp(), logit.clamp(-20, 20)

    def fisher(self, outputs: Tensor) -> Tensor:
        r"""$\operatorname{diag}((1 - \pi) / v, (1 - \pi) / 2, \pi (1 - \pi))$."""
        _, variance, logit = self.components(outputs)
        positive = torch.sigmoid(-logit)
        entries = (positive / variance, 0.5 * positive, positive * torch.sigmoid(logit))
        return torch.diag_embed(torch.cat(entries, dim=-1))
