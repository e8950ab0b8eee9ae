"""Gaussian noise whose variance the network says for each example."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.families.gaussian import GAUSSIAN, GaussianFamily
from bayesify.predictive.gaussian import GaussianRegressionPredictive, Link, OutputGaussian
from bayesify.predictive.regression import RegressionPredictive


class HeteroscedasticGaussian(NumberLikelihood):
    r"""Noise that depends on the input: the network's last axis holds O means, then O log-variances.

    $p(y | f) = \mathcal{N}(y; f_{\mu}, \exp f_v)$ with $f_v$ cut to [-20, 20]. Fisher in $(\mu, f_v)$:
    $\operatorname{diag}(\exp(-f_v), 1/2)$. Targets are [B, O].
    """

    name = "heteroscedastic_gaussian"
    parts = "a mean and a log-variance"

    @property
    def outputs_per_target(self) -> int:
        """2."""
        return 2

    @property
    def family(self) -> GaussianFamily:
        """Gaussians."""
        return GAUSSIAN

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Means and variances."""
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance.clamp(-20, 20).exp()

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        r"""A Gaussian whose noise is its expectation under the Gaussian over log-variances, $\exp(f_v + C_{vv} / 2)$."""
        (mean, log_noise), (variance, spread) = outputs.mean.chunk(2, dim=-1), outputs.variance.chunk(2, dim=-1)
        noise = (log_noise.clamp(-20, 20) + 0.5 * spread).clamp_max(20).exp()
        return GaussianRegressionPredictive(outputs, mean, variance, noise, correlated=False)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(1 / v, 1 / 2)`."""
        _, variance = self.components(outputs)
        return torch.diag_embed(torch.cat((1 / variance, torch.full_like(variance, 0.5)), dim=-1))
