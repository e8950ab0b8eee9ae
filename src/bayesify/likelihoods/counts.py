"""Counts: with the variance of their mean, or with more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, checked
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.counts import NEGATIVE_BINOMIAL, POISSON


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


class NegativeBinomial(NumberLikelihood):
    r"""Counts with mean $\mu = \exp f$ (f cut to [-20, 20]) and variance $\mu + \alpha \mu^2$, $\alpha$ the dispersion.

    $$ p(y | f) = \frac{\Gamma(y + r)}{\Gamma(r)\, y!} \Bigl(\frac{r}{r + \mu}\Bigr)^r \Bigl(\frac{\mu}{r + \mu}\Bigr)^y,
       \qquad r = 1 / \alpha $$   (NB2 of Cameron & Trivedi 1986)

    A Poisson distribution whose rate has a gamma distribution; $\alpha \to 0$ is the Poisson distribution. The dispersion is one
    number (or one per output), or comes from the network for each example: its last axis then holds O logarithms of means and O of
    dispersions, the latter cut to [-12, 8]. Fisher: $\operatorname{diag}(\mu / (1 + \alpha \mu))$; none in closed form where the
    network says the dispersion. Targets are whole numbers of at least 0, [B, O]. Stored: `raw_dispersion` through softplus.

    Args:
        dispersion: Starting $\alpha$: a number is shared by all outputs, a sequence gives one per output; `None`: from the network.
        learn: Whether it is trained.

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
            self.outputs_per_target, self.parts = 2, "a logarithm of the mean and one of the dispersion"
            self.no_curvature = (
                "likelihoods.NegativeBinomial: no closed form of the Fisher matrix is known where the network says the "
                "dispersion; give a dispersion, NegativeBinomial(0.5), or use a method without curvature, such as 'ensemble' or "
                "'mean_field'"
            )

    @property
    def dispersion(self) -> Tensor | None:
        r"""$\alpha$, a scalar or [O]; `None` where it comes from the network."""
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
            TypeError: If the dispersion comes from the network.
        """
        if self.no_curvature is not None:
            raise TypeError(self.no_curvature)
        log_mean, dispersion = self.components(outputs)
        mean = log_mean.exp()
        return torch.diag_embed(mean / (1 + dispersion * mean))
