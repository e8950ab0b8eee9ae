"""Amounts that are often exactly zero: an atom at 0 and a log-normal distribution above 0."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.maths.gamma import widened
from bayesify.predictive.families.base import Family, in_order, solve_quantile
from bayesify.predictive.families.gaussian import gaussian_log_density, normal_cdf, normal_quantile


class HurdleFamily(Family):
    r"""$Y = 0$ with probability $\pi$, otherwise $\log Y \sim \mathcal{N}(\mu, v)$. The parameters are $\mu$, v, and the logit of
    $\pi$."""

    least = 0.0

    def check_targets(self, y: Tensor) -> None:
        super().check_targets(y)
        if bool((y < 0).any()):
            raise ValueError(
                f"targets hold {y[y < 0][0].item()}, but amounts are at least 0; use likelihoods.StudentT() or "
                "likelihoods.HeteroscedasticGaussian() for numbers that can be negative"
            )

    def moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean $(1 - \pi) M$ and variance $(1 - \pi) M^2 (e^v - 1 + \pi)$, where $M = e^{\mu + v / 2}$."""
        location, variance, logit = parameters
        positive, amount = torch.sigmoid(-logit), (location + 0.5 * variance).exp()
        return positive * amount, positive * amount.square() * (torch.expm1(variance) + torch.sigmoid(logit))

    def log_density(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$\log \pi$ at 0, $\log (1 - \pi) + \log \mathcal{N}(\log y; \mu, v) - \log y$ above 0, and minus infinity below 0."""
        location, variance, logit = parameters
        log = torch.where(y > 0, y, 1.0).log()
        above = F.logsigmoid(-logit) + gaussian_log_density(log, location, variance) - log
        return torch.where(y > 0, above, torch.where(y == 0, F.logsigmoid(logit), -math.inf))

    def cdf(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$\pi + (1 - \pi) \Phi((\log y - \mu) / \sqrt v)$ for $y \ge 0$."""
        return torch.where(y < 0, 0.0, torch.sigmoid(parameters[2]) + self._above(y, *parameters))

    def below(self, y: Tensor, *parameters: Tensor) -> Tensor:
        return torch.where(y <= 0, 0.0, self.cdf(y, *parameters))

    @staticmethod
    def _above(y: Tensor, *parameters: Tensor) -> Tensor:
        """P(0 < Y <= y)."""
        location, variance, logit = parameters
        scores = (torch.where(y > 0, y, 1.0).log() - location) / variance.sqrt()
        return torch.where(y > 0, torch.sigmoid(-logit) * normal_cdf(scores), 0.0)

    def quantiles(self, levels: Sequence[float], *parameters: Tensor) -> Tensor:
        r"""Quantiles of the mixture, [Q, B, O].

        Let $\bar\pi$ be the mean probability of 0. Given $Y > 0$, log Y is a mixture of Gaussians with weights
        $(1 - \pi_s) / \sum_t (1 - \pi_t)$. The quantile at a level $q > \bar\pi$ is the exponential of this mixture's quantile at
        the level $(q - \bar\pi) / (1 - \bar\pi)$. The mixture's quantile lies between the quantiles of its components.
        """
        location, variance, logit = torch.broadcast_tensors(*(widened(part) for part in parameters))
        std, positive = variance.sqrt(), torch.sigmoid(-logit)
        share, zero = positive / positive.sum(0), torch.sigmoid(logit).mean(0)
        rest = (location.new_tensor(levels).view(-1, 1, 1) - zero) / positive.mean(0)
        inside = torch.where(rest > 0, rest, 0.5).clamp(1e-300, 1 - 2**-53)  # not used at 0
        parts = location.unsqueeze(0) + std.unsqueeze(0) * torch.special.ndtri(inside).unsqueeze(1)  # [Q, S, B, O]
        found = parts[:, 0]
        if len(location) > 1:

            def cdf(log: Tensor) -> Tensor:
                return (share * normal_cdf((log.unsqueeze(1) - location) / std)).sum(1)

            def density(log: Tensor) -> Tensor:
                return (share * gaussian_log_density(log.unsqueeze(1), location, variance).exp()).sum(1)

            found = solve_quantile(
                cdf, density, inside, parts.amin(1), parts.amax(1), parts.mean(1), std.amin(0).expand_as(found)
            )
        return torch.where(rest > 0, found.exp(), 0.0).to(parameters[0].dtype)

    def mean_distance(self, y: Tensor, *parameters: Tensor) -> Tensor:
        r"""$\pi y + (1 - \pi) (y (2 \Phi(a) - 1) + M (1 - 2 \Phi(a - \sqrt v)))$, where $a = (\log y - \mu) / \sqrt v$."""
        location, variance, logit = parameters
        std, amount = variance.sqrt(), (location + 0.5 * variance).exp()
        a = (torch.where(y > 0, y, 1.0).log() - location) / std
        above = torch.where(y > 0, y * (2 * normal_cdf(a) - 1) + amount * (1 - 2 * normal_cdf(a - std)), amount - y)
        return torch.sigmoid(logit) * y.abs() + torch.sigmoid(-logit) * above

    def places(self, *parameters: Tensor) -> Tensor:
        location, std = torch.broadcast_tensors(parameters[0], parameters[1].sqrt())
        above = [(location + normal_quantile(level) * std).exp() for level in self.node_levels()]
        return torch.cat((torch.zeros_like(location[:1]), in_order(above)))

    def scale_variance(self, factor: float | Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        raise TypeError(
            "this prediction has a positive probability at 0, so its variance cannot be scaled separately; calibrate "
            "its intervals with bayesify.conformal"
        )


HURDLE = HurdleFamily()
