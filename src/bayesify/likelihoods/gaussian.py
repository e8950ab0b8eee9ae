"""Gaussian noise, with one variance for all examples or with a variance that the network predicts for each example."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesify.arguments.checks import Positive, Share, checked
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.maths.constraints import raw_positive
from bayesify.maths.gamma import as_float
from bayesify.predictive.families.gaussian import GAUSSIAN
from bayesify.predictive.gaussian import GaussianRegressionPredictive, Link, OutputGaussian
from bayesify.predictive.regression import RegressionPredictive

START_NOISE = 0.1
"""Noise variance until `fit` finds a value."""


class Gaussian(NumberLikelihood):
    r"""Homoscedastic noise: $p(y | f) = \mathcal{N}(y; f, \text{noise})$, independent over outputs.

    The Fisher matrix is $I / \text{noise}$. Targets have the outputs' shape; a last axis of length 1 may be missing
    from the targets or from the outputs. The noise is the softplus of `raw_noise`, which is a parameter if the noise is
    learned.

    Args:
        noise: Initial variance: a number for all outputs, or a sequence with one variance per output. By default, `fit` finds one
            variance from the residuals of the network during training (see `training.noise.LearnedNoise`). `Laplace.fit` finds it
            from the residuals of the trained network. Before `fit`, and in other training loops, the variance is 0.1.
        learn: Whether to train the variance.

    Raises:
        ValueError: If a variance is not positive and finite.
    """

    name = "gaussian"
    family = GAUSSIAN
    integrates_gaussians = True
    raw_noise: Tensor

    @checked
    def __init__(self, noise: Positive | Sequence[Positive] | Tensor | None = None, learn: bool = True) -> None:
        super().__init__()
        start = self._store("noise", START_NOISE if noise is None else noise, learn)
        self._noise, self._learn = None if noise is None else start, learn

    @property
    def noise(self) -> Tensor:
        """Noise variance: a scalar or [O], differentiable with respect to `raw_noise`; `noise.tolist()` gives plain numbers."""
        return self._stored("noise")

    @property
    def is_learned_by_fit(self) -> bool:
        """Whether `fit` and `Laplace.fit` find the variance, because it is learned and no initial value was given."""
        return self._noise is None and self._learn

    @property
    def is_settled(self) -> bool:
        """Whether the variance was passed to the constructor, or has been found, trained or loaded."""
        untouched = torch.tensor(raw_positive(START_NOISE), dtype=self.raw_noise.dtype)
        return not self.is_learned_by_fit or not torch.equal(self.raw_noise.detach().cpu(), untouched)

    @torch.no_grad()
    def set_noise(self, variance: float) -> None:
        """Set the variance of all outputs."""
        self.raw_noise.fill_(raw_positive(variance))

    def numbers(self) -> dict[str, Tensor]:
        return {"variance": self.noise}

    @staticmethod
    def split(outputs: Tensor, **numbers: Tensor) -> tuple[Tensor, ...]:
        """Means and the variance."""
        return outputs, numbers["variance"].to(outputs)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        r"""The exact predictive $\mathcal{N}(y; f, C + \text{noise})$."""
        noise = self.noise.detach().to(outputs.mean).expand(outputs.mean.shape).clone()
        return GaussianRegressionPredictive(outputs, outputs.mean, outputs.variance, noise, correlated=True)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`I / noise`."""
        precision = (1 / self.noise).to(as_float(outputs)).expand(outputs.shape)
        return torch.diag_embed(precision)


class HeteroscedasticGaussian(NumberLikelihood):
    r"""Noise that depends on the input: the network's last axis holds O means, then O log-variances.

    $p(y | f) = \mathcal{N}(y; f_{\mu}, \exp f_v)$ with $f_v$ clipped to [-20, 20]. The Fisher matrix in $(\mu, f_v)$ is
    $\operatorname{diag}(\exp(-f_v), 1/2)$. Targets are [B, O].

    With the plain likelihood, rows with little noise dominate training and can keep the network from fitting the other
    rows. `objective` therefore has the log-likelihood's values, but multiplies an example's gradients by
    $(v / \bar v)^\beta$ ($\beta$-NLL, Seitzer et al. 2022). With $\beta = 1$ the means are trained as with squared
    errors, and with $\beta = 0$ as with the plain likelihood. $\bar v$ is one learned number, the variance of the residuals.
    The division by $\bar v$ keeps the weight of the data relative to the prior about the same as with the plain likelihood. On
    the prices of 4,000 diamonds, the error of the mean was 642 after training with squared errors, 1,505 with $\beta = 0$ and 622
    with $\beta = 0.5$.

    Args:
        beta: Exponent $\beta$ of the gradients' weights.
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

    def held_out_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the CRPS. A single row whose variance is far too small would dominate the likelihood, but not the CRPS."""
        mean, variance = self.components(outputs)
        return 0.5 * self.family.mean_distance(mean, mean, 2 * variance) - self.family.mean_distance(y, mean, variance)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> RegressionPredictive:
        r"""A Gaussian predictive with the expected noise variance $\exp(f_v + C_{vv} / 2)$ of a Gaussian log-variance."""
        (mean, log_noise), (variance, spread) = outputs.mean.chunk(2, dim=-1), outputs.variance.chunk(2, dim=-1)
        noise = (log_noise.clamp(-20, 20) + 0.5 * spread).clamp_max(20).exp()
        return GaussianRegressionPredictive(outputs, mean, variance, noise, correlated=False)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(1 / v, 1 / 2)`."""
        _, variance = self.components(outputs)
        return torch.diag_embed(torch.cat((1 / variance, torch.full_like(variance, 0.5)), dim=-1))
