"""Counts whose variance is at least their mean, and amounts that are often exactly zero, such as claims or rain."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, checked
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.counts import NEGATIVE_BINOMIAL, POISSON
from bayesify.predictive.families.hurdle import HURDLE


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
    r"""Counts with mean $\mu = \exp f$ and variance $\mu + \alpha \mu^2$, where $\alpha$ is the dispersion and f is clipped to
    [-20, 20].

    $$ p(y | f) = \frac{\Gamma(y + r)}{\Gamma(r)\, y!} \Bigl(\frac{r}{r + \mu}\Bigr)^r \Bigl(\frac{\mu}{r + \mu}\Bigr)^y,
       \qquad r = 1 / \alpha $$   (NB2 of Cameron & Trivedi 1986)

    This is a Poisson distribution whose rate has a gamma distribution. The limit $\alpha \to 0$ is the Poisson
    distribution. The dispersion is one number, or one number per output, unless the network predicts it for each example. If the
    network predicts the dispersion, the network's last axis holds O logarithms of means, then O logarithms of dispersions, which
    are clipped to [-12, 8]. The Fisher matrix is $\operatorname{diag}(\mu / (1 + \alpha \mu))$; it has no closed form if the
    network predicts it. Targets are whole numbers of at least 0, [B, O]. The dispersion is the softplus of `raw_dispersion`.

    Args:
        dispersion: Initial $\alpha$: a number for all outputs, one number per output, or `None` if the network predicts it.
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
