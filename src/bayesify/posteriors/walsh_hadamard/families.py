"""Families of distributions q(g) over the diagonals g of all Walsh-Hadamard blocks of the same size."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import strict_tril
from bayesify.maths.planar_flow import IDENTITY_PRODUCT, invertible, planar
from bayesify.transforms import hadamard

MAX_FULL_SIZE = 4096
"""Largest block size for a full covariance. At this size, the factor of the covariance alone has 8 million numbers."""
NUM_FLOW_DRAWS = 1024
"""Number of fixed draws from which the moments and the KL of a flow are computed if no draw is given."""


class Diagonal(nn.Module):
    r"""$q(g) = \mathcal{N}(\mu, \operatorname{diag}(s^2))$ for each of K blocks of size D.

    Stored parameters: `mean_value` (the means) and `log_std` (the logarithms of s), both unconstrained, [K, D].
    """

    name: ClassVar[str] = "diagonal"

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.mean_value = nn.Parameter(mean)
        self.log_std = nn.Parameter(std.log().expand_as(mean).clone())

    def draw(self, noise: Tensor, prior_std: Tensor) -> tuple[Tensor, Tensor]:
        """Draws of g, computed from standard normal noise, and the KL summed over blocks. The draws are [S, K, D], and the KL is
        a scalar or [S].

        The prior standard deviation of g is [K, 1] or [S, K, 1].
        """
        std = self.log_std.exp()
        mixed, growth = self.mix(noise)
        return torch.addcmul(self.mean_value, std, mixed), self._kl(prior_std, std.square() * growth)

    def mix(self, noise: Tensor) -> tuple[Tensor, Tensor | float]:
        r"""The noise $\epsilon + N \epsilon$ before it is scaled and shifted, and the variance of each of its entries."""
        return noise, 1.0

    def lower(self) -> Tensor:
        r"""Matrix N in $g = \mu + s \circ (\epsilon + N \epsilon)$, [K, D, D]; [K, 0, 0] if the family has no N."""
        return self.mean_value.new_empty(self.mean_value.shape[0], 0, 0)

    def variance(self) -> Tensor:
        """Variance of each entry of g, [K, D]."""
        return (2 * self.log_std).exp()

    def kl(self, prior_std: Tensor) -> Tensor:
        r"""$\mathrm{KL}(q(g) \| \mathcal{N}(0, \text{prior\_std}^2))$ in nats, summed over blocks: a scalar, or [S]."""
        return self._kl(prior_std, self.variance())

    def _kl(self, prior_std: Tensor, variance: Tensor) -> Tensor:
        ratio = (self.mean_value.square() + variance) / prior_std.square()
        return (0.5 * (ratio - 1) + prior_std.log() - self.log_std).sum((-1, -2))

    def mean(self) -> Tensor:
        """E[g], [K, D]."""
        return self.mean_value

    def reached_variance(self) -> Tensor:
        """Variance of the entries of H g, [K, D]."""
        return self.variance().mean(-1, keepdim=True).expand_as(self.mean_value)

    @torch.no_grad()
    def set_to_prior(self, prior_std: Tensor) -> None:
        """Set q(g) to p(g). `prior_std` is the standard deviation of p(g), [K, 1]."""
        self.mean_value.zero_()
        self.log_std.copy_(prior_std.log().expand_as(self.log_std))


class Full(Diagonal):
    r"""$q(g) = \mathcal{N}(\mu, L L^\top)$ with $L = \operatorname{diag}(s) (I + N)$ and N strictly lower triangular.

    Additional parameter: `lower_value`, the entries of N row by row, [K, D (D - 1) / 2]. Because row i of N is multiplied by
    $s_i$, a step of the optimizer changes a row of L in proportion to its diagonal entry.
    """

    name = "full"

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__(mean, std)
        count, size = mean.shape
        if size > MAX_FULL_SIZE:
            raise ValueError(
                f"WalshHadamard: covariance='full' for a block of size {size} needs {size * (size - 1) // 2:,} numbers, "
                "which is too many; use 'diagonal' or 'flow' for this layer"
            )
        self.lower_value = nn.Parameter(mean.new_zeros(count, size * (size - 1) // 2))

    def lower(self) -> Tensor:
        return strict_tril(self.lower_value, self.mean_value.shape[-1])

    def mix(self, noise: Tensor) -> tuple[Tensor, Tensor | float]:
        """(I + N) times the noise, [S, K, D], and its variances, which are 1 plus the sum of squares in each row of N, [K, D]."""
        lower = self.lower()
        return noise + (noise.movedim(0, 1) @ lower.mT).movedim(1, 0), 1 + lower.square().sum(-1)

    def factor(self) -> Tensor:
        """The factor L, [K, D, D]."""
        return self.log_std.exp().unsqueeze(-1) * (torch.eye(self.log_std.shape[-1]).to(self.log_std) + self.lower())

    def variance(self) -> Tensor:
        return (2 * self.log_std).exp() * (1 + self.lower().square().sum(-1))

    def reached_variance(self) -> Tensor:
        """Diagonal of H L L^T H."""
        return hadamard(self.factor().mT).square().sum(-2)

    @torch.no_grad()
    def set_to_prior(self, prior_std: Tensor) -> None:
        super().set_to_prior(prior_std)
        self.lower_value.zero_()


class Flow(Diagonal):
    r"""A diagonal Gaussian that planar layers transform (eq. 13), with one chain of layers per block.

    $$ g = f_F \circ \dots \circ f_1 (z), \quad z \sim \mathcal{N}(\mu, \operatorname{diag}(s^2)), \qquad
       \log q(g) = \log q(z) - \sum_f \log |\det f'| $$

    The KL of a draw is estimated by $\log q(g) - \log p(g)$. `kl`, `mean` and `reached_variance`, which take no draw as an
    argument, use 1024 fixed draws. Only the effect of the planar layers on the moments is estimated; the mean and variance of z
    are exact. Initially, the chain of planar layers is close to the identity.

    Additional parameters: `u` and `w`, [K, F, D] each, and `b`, [K, F].
    """

    name = "flow"

    def __init__(self, mean: Tensor, std: Tensor, length: int = 1) -> None:
        super().__init__(mean, std)
        count, size = mean.shape
        w = torch.randn(count, length, size, dtype=mean.dtype, device=mean.device) / math.sqrt(size)
        self.w = nn.Parameter(w)
        self.u = nn.Parameter(IDENTITY_PRODUCT * w / w.square().sum(-1, keepdim=True) + 1e-3 * torch.randn_like(w))
        self.b = nn.Parameter(mean.new_zeros(count, length))

    def push(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Push z [S, K, D] through all layers. Returns g, and the sum of the log-determinants, [S, K]."""
        total = z.new_zeros(z.shape[:-1])
        for u, w, b in zip(self.u.unbind(1), self.w.unbind(1), self.b.unbind(1), strict=True):
            z, log_det = planar(z, u, w, b)
            total = total + log_det
        return z, total

    def draw(self, noise: Tensor, prior_std: Tensor) -> tuple[Tensor, Tensor]:
        """Draws of g, and `log q - log p` of each draw, [S]."""
        g, log_det = self.push(torch.addcmul(self.mean_value, self.log_std.exp(), noise))
        ratio = (g / prior_std).square() - noise.square()
        terms = 0.5 * ratio + prior_std.log() - self.log_std  # log q(z) - log p(g) of each entry
        return g, terms.sum((-1, -2)) - log_det.sum(-1)

    def kl(self, prior_std: Tensor) -> Tensor:
        """KL estimated from fixed draws: a scalar, or [S] if the prior's scale has S values."""
        if prior_std.ndim == 2:
            return self.draw(self._noise(), prior_std)[1].mean()
        return torch.stack([self.kl(std) for std in prior_std])

    def mean(self) -> Tensor:
        """E[g], estimated from fixed draws. Only the effect of the flow is estimated; the Gaussian before the flow contributes
        exactly."""
        return self.mean_value + self._moved()[1].mean(0)

    def reached_variance(self) -> Tensor:
        """Variance of the entries of H g, estimated from fixed draws. Only the effect of the flow is estimated."""
        start, moved = (hadamard(part) for part in self._moved())
        mean = moved.mean(0)
        return super().reached_variance() + (2 * start * (moved - mean) + (moved - mean).square()).mean(0)

    def _moved(self) -> tuple[Tensor, Tensor]:
        """For each fixed draw, z - E[z] and the change that the flow makes to z, [n, K, D] each."""
        centered = self.log_std.exp() * self._noise()
        z = self.mean_value + centered
        return centered, self.push(z)[0] - z

    def _noise(self) -> Tensor:
        """Noise in antithetic pairs, which is the same in every call."""
        like = self.mean_value
        fixed = torch.Generator().manual_seed(0)
        half = torch.randn(NUM_FLOW_DRAWS // 2, *like.shape, generator=fixed, dtype=torch.float64)
        return torch.cat([half, -half]).to(like)

    @torch.no_grad()
    def set_to_prior(self, prior_std: Tensor) -> None:
        """Set the distribution of z to p(g), and every planar layer to the identity."""
        super().set_to_prior(prior_std)
        self.u.copy_(IDENTITY_PRODUCT * self.w / self.w.square().sum(-1, keepdim=True))
        self.u.sub_(invertible(self.u, self.w))  # remove the rounding error


FAMILIES: dict[str, type[Diagonal]] = {family.name: family for family in (Diagonal, Full, Flow)}
"""Families of q(g) by name."""
