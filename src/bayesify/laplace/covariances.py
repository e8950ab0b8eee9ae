"""Gaussians over chosen weights: a curvature, a prior precision, and what prediction asks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from bayesify.jacobians import Gradients
from bayesify.laplace.subset import Subset
from bayesify.maths.cholesky import stable_cholesky
from bayesify.maths.eigen import stable_eigh
from bayesify.maths.gamma import widened

EIGEN_LIMIT = 8192
"""Largest subset whose full curvature is diagonalized to serve all prior precisions, in float64; above it, each one is factorized
in the network's type."""


class WeightCovariance(ABC):
    r"""$(H + c \operatorname{diag}\delta)^{-1}$ over a subset of S weights, for a factor c on the prior precisions $\delta$.

    Args:
        subset: The weights.
        prior: $\delta$, [S].
        factor: c.
    """

    def __init__(self, subset: Subset, prior: Tensor, factor: float = 1.0) -> None:
        self.subset = subset
        self.prior = prior
        self.factor = factor

    @property
    def held(self) -> int:
        """Jacobian entries that are held at a time for each function value."""
        return max(self.subset.count(name) for name in self.subset.names)

    @abstractmethod
    def rescaled(self, factor: float) -> WeightCovariance:
        """The same curvature under another factor on the prior precisions; nothing is computed again that need not be."""

    @abstractmethod
    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        r"""$J_b \Sigma J_b^\top$ for each example.

        Args:
            gradients: K vectors' gradients over B examples.
            factors: Values of c; the own one by default.

        Returns:
            [B, K, K], or [C, B, K, K] for C factors.
        """

    @abstractmethod
    def joint(self, gradients: Gradients) -> Tensor:
        r"""$J \Sigma J^\top$ over all examples and vectors, examples slowest: [B K, B K]."""

    @abstractmethod
    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Deviations from the mean: [n, S]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The covariance: [S, S]."""

    @abstractmethod
    def variances(self) -> Tensor:
        """Its diagonal: [S]."""

    @abstractmethod
    def log_det_ratio(self) -> Tensor:
        r"""$\log\det(H + c\delta) - \log\det(c\delta)$, a scalar."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be stored."""

    def noise(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Standard normal numbers on the covariance's device."""
        place = generator.device if generator is not None else self.prior.device
        return torch.randn(shape, generator=generator, dtype=self.prior.dtype, device=place).to(self.prior.device)


class FullCovariance(WeightCovariance):
    """A dense covariance; see `WeightCovariance`.

    Args:
        subset: The weights.
        curvature: H, [S, S].
        prior: [S].
        factor: c.
    """

    def __init__(self, subset: Subset, curvature: Tensor, prior: Tensor, factor: float = 1.0) -> None:
        super().__init__(subset, prior, factor)
        self.curvature = curvature

    @property
    def held(self) -> int:
        """All of them."""
        return len(self.prior)

    def rescaled(self, factor: float) -> FullCovariance:
        """Keeps the eigenvectors, if they were computed."""
        other = FullCovariance(self.subset, self.curvature, self.prior, factor)
        if "_eigen" in self.__dict__:
            other.__dict__["_eigen"] = self._eigen
        return other

    @cached_property
    def _factor(self) -> Tensor:
        """Lower Cholesky factor of the precision, computed in float64 up to `EIGEN_LIMIT` weights."""
        precision = self._widened(self.curvature).clone()
        precision.diagonal().add_(self.factor * self._widened(self.prior))
        factor = stable_cholesky(precision, f"Laplace: the posterior precision of {len(self.prior)} weights")
        return factor.to(self.curvature)

    def _widened(self, value: Tensor) -> Tensor:
        """In float64 where the subset is small enough, and its device has that type."""
        return value if len(self.prior) > EIGEN_LIMIT else widened(value)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        r"""Eigenvalues and $\delta^{-1/2} Q$ of $\delta^{-1/2} H \delta^{-1/2} = Q \Lambda Q^\top$."""
        root = self.prior.rsqrt()
        what = f"Laplace: the curvature of {len(self.prior)} weights"
        values, vectors = stable_eigh(root[:, None] * self.curvature * root, what)
        return values.clamp_min(0), root[:, None] * vectors

    def spectrum(self) -> Tensor:
        r"""Eigenvalues of $\delta^{-1/2} H \delta^{-1/2}$, [S]; with its eigenvectors they are kept for every factor."""
        return self._eigen[0]

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Triangular solves, or products with the eigenvectors for several factors."""
        return self.of_rows(self.subset.rows(gradients).detach(), factors)

    def of_rows(self, rows: Tensor, factors: list[float] | None = None) -> Tensor:
        """The same from Jacobian rows [K, B, S]."""
        if factors is None:
            white = self.whiten(rows).movedim(1, 0)  # [B, K, S]
            return white @ white.transpose(-1, -2)
        if len(self.prior) > EIGEN_LIMIT:
            return torch.stack([self.rescaled(factor).of_rows(rows) for factor in factors])
        values, basis = self._eigen
        turned = (rows @ basis).movedim(1, 0)
        return torch.stack([(turned / (values + factor)) @ turned.transpose(-1, -2) for factor in factors])

    def whiten(self, rows: Tensor) -> Tensor:
        """Rows times the inverse transposed factor: [..., S]."""
        flat = rows.reshape(-1, rows.shape[-1])
        return torch.linalg.solve_triangular(self._factor, flat.T, upper=False).T.reshape(rows.shape)

    def joint(self, gradients: Gradients) -> Tensor:
        """One product of whitened rows."""
        white = self.whiten(self.subset.rows(gradients).detach()).movedim(1, 0).flatten(0, 1)
        return white @ white.T

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Solves with the transposed factor."""
        noise = self.noise(num_draws, len(self.prior), generator=generator)
        return torch.linalg.solve_triangular(self._factor.T, noise.T, upper=True).T

    def dense(self) -> Tensor:
        """The inverse by the factor."""
        return torch.cholesky_inverse(self._widened(self._factor)).to(self._factor)

    def variances(self) -> Tensor:
        """The inverse's diagonal."""
        return self.dense().diagonal()

    def log_det_ratio(self) -> Tensor:
        """From the eigenvalues where they are known, else from the factor."""
        if "_eigen" in self.__dict__ or len(self.prior) <= 512:
            return (self._eigen[0] / self.factor).log1p().sum()
        factor, prior = self._widened(self._factor.diagonal()), self._widened(self.prior)
        return (2 * factor.log().sum() - (self.factor * prior).log().sum()).to(self.prior)

    def tensors(self) -> dict[str, Tensor]:
        """H; its two halves are equal, both are stored."""
        return {"curvature": self.curvature}


class MarginalCovariance(WeightCovariance):
    r"""$[(H + c\delta)^{-1}]_{SS}$: the part over a subset of the covariance over all weights (Daxberger et al. 2021, eq. 11).

    Args:
        subset: The S weights.
        whole: The covariance over all P weights.
    """

    def __init__(self, subset: Subset, whole: FullCovariance) -> None:
        super().__init__(subset, whole.prior, whole.factor)
        self.whole = whole
        self._index = torch.searchsorted(whole.subset.flat(), subset.flat()).to(whole.prior.device)

    @property
    def held(self) -> int:
        """Those of all weights."""
        return len(self.prior)

    def rescaled(self, factor: float) -> MarginalCovariance:
        """Of the whole covariance, rescaled."""
        return MarginalCovariance(self.subset, self.whole.rescaled(factor))

    def _padded(self, gradients: Gradients) -> Tensor:
        rows = self.subset.rows(gradients).detach()
        padded = rows.new_zeros(*rows.shape[:2], len(self.prior))
        padded[..., self._index] = rows
        return padded

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """With zeros for the weights that stay at their point estimates."""
        return self.whole.of_rows(self._padded(gradients), factors)

    def joint(self, gradients: Gradients) -> Tensor:
        """One product of whitened rows."""
        white = self.whole.whiten(self._padded(gradients)).movedim(1, 0).flatten(0, 1)
        return white @ white.T

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of all weights, of which the subset's are kept."""
        return self.whole.draw(num_draws, generator)[:, self._index]

    def dense(self) -> Tensor:
        """Rows and columns of the whole covariance."""
        return self.whole.dense()[self._index][:, self._index]

    def variances(self) -> Tensor:
        """Its diagonal."""
        return self.whole.variances()[self._index]

    def log_det_ratio(self) -> Tensor:
        """That of all weights: the evidence is the whole model's."""
        return self.whole.log_det_ratio()

    def tensors(self) -> dict[str, Tensor]:
        """The whole curvature."""
        return self.whole.tensors()


class DiagonalCovariance(WeightCovariance):
    """Independent weights; see `WeightCovariance`.

    Args:
        subset: The weights.
        curvature: The diagonal of H, [S].
        prior: [S].
        factor: c.
    """

    def __init__(self, subset: Subset, curvature: Tensor, prior: Tensor, factor: float = 1.0) -> None:
        super().__init__(subset, prior, factor)
        self.curvature = curvature

    def rescaled(self, factor: float) -> DiagonalCovariance:
        """Nothing to keep."""
        return DiagonalCovariance(self.subset, self.curvature, self.prior, factor)

    def variances(self) -> Tensor:
        """`1 / (h + c delta)`."""
        return 1 / (self.curvature + self.factor * self.prior)

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Weight by weight, so that no Jacobian over all weights is held."""
        scales = [self.rescaled(factor).variances() for factor in factors or [self.factor]]
        split = [self.subset.split(scale) for scale in scales]
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(len(scales), batch, vectors, vectors)
        for name in self.subset.names:
            rows = self.subset.gradients(gradients, name).detach().movedim(1, 0)  # [B, K, n]
            for place, scale in enumerate(split):
                total[place] += (rows * scale[name]) @ rows.transpose(-1, -2)
        return total[0] if factors is None else total

    def joint(self, gradients: Gradients) -> Tensor:
        """Weight by weight."""
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(batch * vectors, batch * vectors)
        for name, scale in self.subset.split(self.variances()).items():
            rows = self.subset.gradients(gradients, name).detach().movedim(1, 0).flatten(0, 1)
            total += (rows * scale) @ rows.T
        return total

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Scaled normal numbers."""
        return self.noise(num_draws, len(self.prior), generator=generator) * self.variances().sqrt()

    def dense(self) -> Tensor:
        """A diagonal matrix."""
        return torch.diag(self.variances())

    def log_det_ratio(self) -> Tensor:
        """A sum of logarithms."""
        return (self.curvature / (self.factor * self.prior)).log1p().sum()

    def tensors(self) -> dict[str, Tensor]:
        """h."""
        return {"curvature": self.curvature}
