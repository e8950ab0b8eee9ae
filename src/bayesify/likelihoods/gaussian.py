"""Gaussian noise: of one variance for all examples, or of a variance that the network says for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, Share, checked
from bayesify.likelihoods.base import NumberLikelihood, reweighted
from bayesify.maths.gamma import as_float
from bayesify.predictive.families.gaussian import GAUSSIAN, gaussian_log_density
from bayesify.predictive.gaussian import GaussianRegressionPredictive, Link, OutputGaussian
from bayesify.predictive.regression import RegressionPredictive, with_variance


class Gaussian(NumberLikelihood):
    r"""Homoscedastic noise: $p(y | f) = \mathcal{N}(y; f, \text{noise})$, independent over outputs.

    Fisher: $I / \text{noise}$. Targets have the outputs' shape; a single output column may be missing on either side.
    Stored: `raw_noise` through softplus, a parameter if learned.

    Args:
        noise: Starting variance: a number is shared by all outputs, a sequence gives one per output.
        learn: Whether the variance is trained.

    Raises:
        ValueError: If a variance is not positive and finite.
    """

    name = "gaussian"
    family = GAUSSIAN
    integrates_gaussians = True
    raw_noise: Tensor

    @checked
    def __init__(self, noise: Positive | Sequence[Positive] | Tensor = 0.1, learn: bool = True) -> None:
        super().__init__()
        self._noise, self._learn = self._store("noise", noise, learn), learn

    @property
    def noise(self) -> Tensor:
        """Noise variance: a scalar, or [O]."""
        return self._stored("noise")

    def numbers(self) -> dict[str, Tensor]:
        """The variance."""
        return {"variance": self.noise}

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Means and the variance."""
        return with_variance(outputs, **numbers)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        """Exact: $\\mathcal{N}(y; f, C + \\text{noise})$."""
        noise = self.noise.detach().to(outputs.mean).expand(outputs.mean.shape).clone()
        return GaussianRegressionPredictive(outputs, outputs.mean, outputs.variance, noise, correlated=True)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`I / noise`."""
        precision = (1 / self.noise).to(as_float(outputs)).expand(outputs.shape)
        return torch.diag_embed(precision)


class HeteroscedasticGaussian(NumberLikelihood):
    r"""Noise that depends on the input: the network's last axis holds O means, then O log-variances.

    $p(y | f) = \mathcal{N}(y; f_{\mu}, \exp f_v)$ with $f_v$ cut to [-20, 20]. Fisher in $(\mu, f_v)$:
    $\operatorname{diag}(\exp(-f_v), 1/2)$. Targets are [B, O].

    Under the likelihood itself rows with little noise rule the training, and where a network is not yet right they never let it
    become right for the others. So `objective` has the log-likelihood's values, but an example's gradients times
    $(v / \bar v)^\beta$ ($\beta$-NLL, Seitzer et al. 2022): with $\beta = 1$ means are trained as by squared errors, with 0 as by
    the likelihood. $\bar v$, which keeps the weight of data against the prior, is one learned variance, that of the residuals. On
    4,000 diamonds' prices the mean's error was 642 by squared errors, 1,505 with $\beta = 0$ and 622 with 0.5.

    Args:
        beta: $\beta$.
    """

    name = "heteroscedastic_gaussian"
    family = GAUSSIAN
    integrates_gaussians = True
    outputs_per_target = 2
    parts = "a mean and a log-variance"

    @checked
    def __init__(self, beta: Share = 0.5) -> None:
        super().__init__()
        self._beta = beta
        if beta:
            self._store("noise", 1.0, True)

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Means and variances."""
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance.clamp(-20, 20).exp()

    def training_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The log-density with weighted gradients."""
        mean, variance = self.components(outputs)
        density = gaussian_log_density(y, mean, variance)
        if not self._beta:
            return density
        shared = self._stored("noise").to(mean)
        beside = gaussian_log_density(y, mean.detach(), shared)
        return reweighted(density, (variance / shared) ** self._beta, beside)

    def held_out_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the CRPS, which one row with a variance far too small does not decide, as it does the likelihood."""
        mean, variance = self.components(outputs)
        return 0.5 * self.family.mean_distance(mean, mean, 2 * variance) - self.family.mean_distance(y, mean, variance)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        r"""A Gaussian whose noise is its expectation under the Gaussian over log-variances, $\exp(f_v + C_{vv} / 2)$."""
        (mean, log_noise), (variance, spread) = outputs.mean.chunk(2, dim=-1), outputs.variance.chunk(2, dim=-1)
        noise = (log_noise.clamp(-20, 20) + 0.5 * spread).clamp_max(20).exp()
        return GaussianRegressionPredictive(outputs, mean, variance, noise, correlated=False)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(1 / v, 1 / 2)`."""
        _, variance = self.components(outputs)
        return torch.diag_embed(torch.cat((1 / variance, torch.full_like(variance, 0.5)), dim=-1))
