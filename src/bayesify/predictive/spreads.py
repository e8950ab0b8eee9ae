"""Covariances over the outputs of many rows, in the forms that they come in, and what predictions need of them."""

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
    """Standard normal numbers that one draw of a row takes."""
    is_joint = False
    """Whether the same numbers move all positions of an example as they vary together."""

    @abstractmethod
    def __len__(self) -> int:
        """N."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> Spread:
        """That of some rows."""

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonals: [N, K]."""

    @abstractmethod
    def row_means(self) -> Tensor:
        r"""$C 1 / K$: [N, K]."""

    @abstractmethod
    def move(self, noise: Tensor) -> Tensor:
        """Deviations from the mean by standard normal numbers [S, N, n], or [S, 1, n] for the same in all rows: [S, N, K]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[N, K, K]."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The covariances times a factor."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of several of this kind."""


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
        """Entries."""
        return self._matrices.diagonal(dim1=-2, dim2=-1)

    def row_means(self) -> Tensor:
        """Sums."""
        return self._matrices.mean(-1)

    def move(self, noise: Tensor) -> Tensor:
        """By the symmetric root, which is the same on every machine."""
        values, vectors = stable_eigh(self._matrices, "Predictive: the covariance of the outputs")
        root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
        return (noise.transpose(0, 1) @ root).transpose(0, 1)

    def dense(self) -> Tensor:
        """As they are."""
        return self._matrices

    def scaled(self, factor: float) -> DenseSpread:
        """Entries times the factor."""
        return DenseSpread(factor * self._matrices)

    @classmethod
    def joined(cls, parts: Sequence[DenseSpread]) -> DenseSpread:
        """All matrices."""
        return cls(torch.cat([part._matrices for part in parts]))


class SharedBasis(Spread):
    r"""$C_n = U \operatorname{diag}(v_n) U^\top$ with the same eigenvectors for all rows: no row has to be decomposed.

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
        """Squares of the eigenvectors."""
        return self._values if self._basis is None else self._values @ self._basis.square().T

    def row_means(self) -> Tensor:
        """Products with the eigenvectors' means."""
        if self._basis is None:
            return self._values / self.num_noise
        return (self._values * self._basis.mean(0)) @ self._basis.T

    def move(self, noise: Tensor) -> Tensor:
        """By the symmetric root, which is the same on every machine."""
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
        """All variances in the basis of the first, which must be that of the others."""
        return cls(torch.cat([part._values for part in parts]), parts[0]._basis)


class LowRank(Spread):
    r"""$C_n = R_n R_n^\top$, as draws have it.

    Args:
        roots: R, [N, K, n]; column j of all positions of an example belongs together.
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
        """By R."""
        return (noise.transpose(0, 1) @ self._roots.mT).transpose(0, 1)

    def dense(self) -> Tensor:
        """One product for each row."""
        return self._roots @ self._roots.mT

    def scaled(self, factor: float) -> LowRank:
        """Roots times the root of the factor."""
        return LowRank(math.sqrt(factor) * self._roots)

    @classmethod
    def joined(cls, parts: Sequence[LowRank]) -> LowRank:
        """All roots."""
        return cls(torch.cat([part._roots for part in parts]))
