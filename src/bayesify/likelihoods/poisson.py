"""Counts with the variance of their mean."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.counts import POISSON


class Poisson(NumberLikelihood):
    r"""Counts: $p(y | f) = \lambda^y e^{-\lambda} / y!$ with $\lambda = \exp f$, f cut to [-20, 20].

    Fisher: $\operatorname{diag}(\lambda)$. Targets are whole numbers of at least 0, in the outputs' shape; a single output column
    may be missing on either side. Counts that vary more than their mean, as most do, have a `NegativeBinomial`.
    """

    name = "poisson"
    family = POISSON
    parts = "a logarithm of the mean"

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Logarithms of the means."""
        return (outputs.clamp(-20, 20),)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(lambda)`."""
        return torch.diag_embed(self.components(outputs)[0].exp())
