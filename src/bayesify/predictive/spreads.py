"""Covariances over the outputs of many rows in several forms, with the operations that predictions need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from bayesify.maths.eigen import stable_eigh


class Spread(ABC):
    """A covariance over K outputs for each of N rows, such as the positions of examples."""

    num_noise: int
    """Count of standard normal numbers for one draw of a row."""
    is_joint = False
    """Whether shared noise moves all positions of an example with their true joint distribution."""

    @abstractmethod
    def __len__(self) -> int:
        """N, the number of rows."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> Spread:
        """The spread of some rows."""

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonals of the covariances: [N, K]."""

    @abstractmethod
    def row_means(self) -> Tensor:
        r"""The mean of each row of the covariances, $C 1 / K$: [N, K]."""

    @abstractmethod
    def move(self, noise: Tensor) -> Tensor:
        """Deviations from the mean, [S, N, K], from standard normal noise [S, N, n], or [S, 1, n] if all rows share it."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The covariances as matrices: [N, K, K]."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The covariances times a factor."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of several spreads of this kind."""


class DenseSpread(Spread):
    """A matrix for each row, [N, K, K]."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices
        self.num_noise = matrices.shape[-1]

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, rows: slice) -> DenseSpread:
        return DenseSpread(self._matrices[rows])

    def variances(self) -> Tensor:
        """The diagonals of the matrices."""
        return self._matrices.diagonal(dim1=-2, dim2=-1)

    def row_means(self) -> Tensor:
        """The means of the matrices' rows."""
        return self._matrices.mean(-1)

    def move(self, noise: Tensor) -> Tensor:
        """Deviations by the symmetric root, which is the same on every machine."""
        values, vectors = stable_eigh(self._matrices, "Predictive: the covariance of the outputs")
        root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
        return (noise.transpose(0, 1) @ root).transpose(0, 1)

    def dense(self) -> Tensor:
        """The matrices."""
        return self._matrices

    def scaled(self, factor: float) -> DenseSpread:
        """Entries times the factor."""
        return DenseSpread(factor * self._matrices)

    @classmethod
    def joined(cls, parts: Sequence[DenseSpread]) -> DenseSpread:
        """All matrices."""
        return cls(torch.cat([part._matrices for part in parts]))


class SharedBasis(Spread):
    r"""$C_n = U \operatorname{diag}(v_n) U^\top$ with the same eigenvectors for all rows, so that no row needs a decomposition.

    Args:
        variances: v, [N, K].
        basis: U, [K, K]; the identity by default.
    """

    def __init__(self, variances: Tensor, basis: Tensor | None = None) -> None:
        self._values, self._basis = variances.clamp_min(0), basis
        self.num_noise = variances.shape[-1]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: slice) -> SharedBasis:
        return SharedBasis(self._values[rows], self._basis)

    def variances(self) -> Tensor:
        """The variances times the squared eigenvectors."""
        return self._values if self._basis is None else self._values @ self._basis.square().T

    def row_means(self) -> Tensor:
        """Products with the eigenvectors' means."""
        if self._basis is None:
            return self._values / self.num_noise
        return (self._values * self._basis.mean(0)) @ self._basis.T

    def move(self, noise: Tensor) -> Tensor:
        """Deviations by the symmetric root, which is the same on every machine."""
        root = self._values.sqrt()
        return noise * root if self._basis is None else ((noise @ self._basis) * root) @ self._basis.T

    def dense(self) -> Tensor:
        """One product for each row."""
        if self._basis is None:
            return torch.diag_embed(self._values)
        return (self._basis * self._values.unsqueeze(-2)) @ self._basis.T

    def scaled(self, factor: float) -> SharedBasis:
        """Variances times the factor."""
        return SharedBasis(factor * self._values, self._basis)

    @classmethod
    def joined(cls, parts: Sequence[SharedBasis]) -> SharedBasis:
        """All variances in the basis of the first part. All parts must have the same basis."""
        return cls(torch.cat([part._values for part in parts]), parts[0]._basis)


class LowRank(Spread):
    r"""$C_n = R_n R_n^\top$, the covariance of draws.

    Args:
        roots: R, [N, K, n]. Column j belongs to the same draw at all positions of an example.
    """

    is_joint = True

    def __init__(self, roots: Tensor) -> None:
        self._roots = roots
        self.num_noise = roots.shape[-1]

    def __len__(self) -> int:
        return len(self._roots)

    def __getitem__(self, rows: slice) -> LowRank:
        return LowRank(self._roots[rows])

    def variances(self) -> Tensor:
        """Sums of squares."""
        return self._roots.square().sum(-1)

    def row_means(self) -> Tensor:
        """Products with the columns' means."""
        return (self._roots @ self._roots.mean(-2).unsqueeze(-1)).squeeze(-1)

    def move(self, noise: Tensor) -> Tensor:
        """The noise times R."""
        return (noise.transpose(0, 1) @ self._roots.mT).transpose(0, 1)

    def dense(self) -> Tensor:
        """One product for each row."""
        return self._roots @ self._roots.mT

    def scaled(self, factor: float) -> LowRank:
        """The roots times the square root of the factor."""
        return LowRank(math.sqrt(factor) * self._roots)

    @classmethod
    def joined(cls, parts: Sequence[LowRank]) -> LowRank:
        """All roots."""
        return cls(torch.cat([part._roots for part in parts]))
