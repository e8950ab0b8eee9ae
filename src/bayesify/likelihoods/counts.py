"""Counts whose variance equals or exceeds their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, checked
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.counts import NEGATIVE_BINOMIAL, POISSON


class Poisson(NumberLikelihood):
    r"""Counts: $p(y | f) = \lambda^y e^{-\lambda} / y!$ with $\lambda = \exp f$, where f is clipped to [-20, 20].

    The Fisher matrix is $\operatorname{diag}(\lambda)$. Targets are whole numbers of at least 0 and have the outputs'
    shape; a last axis of length 1 may be missing from the targets or from the outputs. For counts whose variance
    exceeds their mean, as is usual, use `NegativeBinomial`.
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


class NegativeBinomial(NumberLikelihood):
    r"""Counts with mean $\mu = \exp f$ (f clipped to [-20, 20]) and variance $\mu + \alpha \mu^2$ with dispersion $\alpha$.

    $$ p(y | f) = \frac{\Gamma(y + r)}{\Gamma(r)\, y!} \Bigl(\frac{r}{r + \mu}\Bigr)^r \Bigl(\frac{\mu}{r + \mu}\Bigr)^y,
       \qquad r = 1 / \alpha $$   (NB2 of Cameron & Trivedi 1986)

    This is a Poisson distribution whose rate has a gamma distribution. The limit $\alpha \to 0$ is the Poisson
    distribution. Either the dispersion is one number (or one number per output), or the network predicts it for each
    example. If the network predicts it, the network's last axis holds O logarithms of means and O logarithms of
    dispersions, clipped to [-12, 8]. The Fisher matrix is $\operatorname{diag}(\mu / (1 + \alpha \mu))$; it has no
    closed form if the network predicts the dispersion. Targets are whole numbers of at least 0, [B, O]. The dispersion
    is the softplus of `raw_dispersion`.

    Args:
        dispersion: Initial $\alpha$: a number for all outputs, a sequence with one number per output, or `None` if the
            network predicts it.
        learn: Whether to train the dispersion.

    Raises:
        ValueError: If a dispersion is not positive and finite.
    """

    name = "negative_binomial"
    family = NEGATIVE_BINOMIAL
    parts = "a logarithm of the mean"

    @checked
    def __init__(self, dispersion: Positive | Sequence[Positive] | Tensor | None = 0.5, learn: bool = True) -> None:
        super().__init__()
        self._dispersion = None if dispersion is None else self._store("dispersion", dispersion, learn)
        self._learn = learn
        if dispersion is None:
            self.outputs_per_target, self.parts = 2, "a logarithm of the mean and a logarithm of the dispersion"
            self.no_curvature = (
                "likelihoods.NegativeBinomial: the Fisher matrix has no closed form if the network predicts the "
                "dispersion; give a dispersion, such as NegativeBinomial(0.5), or use a method without curvature, such as "
                "'ensemble' or 'mean_field'"
            )

    @property
    def dispersion(self) -> Tensor | None:
        r"""The dispersion $\alpha$, a scalar or [O]; `None` if the network predicts it."""
        return None if self._dispersion is None else self._stored("dispersion")

    def numbers(self) -> dict[str, Tensor]:
        """The dispersion."""
        return {} if self.dispersion is None else {"dispersion": self.dispersion}

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Logarithms of the means, and dispersions."""
        if numbers:
            return outputs.clamp(-20, 20), numbers["dispersion"].to(outputs)
        log_mean, log_dispersion = outputs.chunk(2, dim=-1)
        return log_mean.clamp(-20, 20), log_dispersion.clamp(-12, 8).exp()

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(mu / (1 + alpha mu))`.

        Raises:
            TypeError: If the network predicts the dispersion.
        """
        if self.no_curvature is not None:
            raise TypeError(self.no_curvature)
        log_mean, dispersion = self.components(outputs)
        mean = log_mean.exp()
        return torch.diag_embed(mean / (1 + dispersion * mean))
