"""Several forms of covariances over the outputs of many rows, with the operations that predictions need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from bayesify.maths.positive_definite import stable_eigh


class Spread(ABC):
    """A covariance over K outputs for each of N rows, stored as one tensor [N, ..., n]. Rows may be the positions of examples."""

    is_joint = False
    """Whether all positions of an example get their true joint distribution if they share the noise."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @property
    def num_noise(self) -> int:
        """Number n of standard normal numbers that one draw of a row needs."""
        return self._rows.shape[-1]

    def _like(self, rows: Tensor) -> Self:
        """The same kind of spread with other rows."""
        return type(self)(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> Self:
        return self._like(self._rows[rows])

    def scaled(self, factor: float) -> Self:
        """The spread with all covariances multiplied by a factor."""
        return self._like(factor * self._rows)

    @staticmethod
    def joined(parts: Sequence[Spread]) -> Spread:
        """Concatenate the rows of several spreads of one kind. Spreads with a basis must have the same basis."""
        return parts[0]._like(torch.cat([part._rows for part in parts]))

    @abstractmethod
    def variances(self) -> Tensor:
        """The diagonals of the covariances: [N, K]."""

    @abstractmethod
    def row_means(self) -> Tensor:
        r"""For each covariance matrix C, the means of the rows of C, $C 1 / K$: [N, K]."""

    @abstractmethod
    def move(self, noise: Tensor) -> Tensor:
        """Turn standard normal noise into deviations from the mean, [S, N, K]. The noise is [S, N, n], or [S, 1, n] if all rows
        share it."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The covariances as matrices: [N, K, K]."""


class DenseSpread(Spread):
    """A matrix for each row, [N, K, K]."""

    def variances(self) -> Tensor:
        """The diagonals of the matrices."""
        return self._rows.diagonal(dim1=-2, dim2=-1)

    def row_means(self) -> Tensor:
        """The means of the matrices' rows."""
        return self._rows.mean(-1)

    def move(self, noise: Tensor) -> Tensor:
        """Deviations, computed with the symmetric root of the covariance. This root is the same on every machine."""
        values, vectors = stable_eigh(self._rows, "Predictive: the covariance of the outputs")
        root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
        return (noise.transpose(0, 1) @ root).transpose(0, 1)

    def dense(self) -> Tensor:
        """The matrices."""
        return self._rows


class SharedBasis(Spread):
    r"""Covariances $C_n = U \operatorname{diag}(v_n) U^\top$ with the same eigenvectors for all rows. No row needs its own
    decomposition.

    Args:
        variances: v, [N, K].
        basis: Eigenvectors U, [K, K]; the identity by default.
    """

    def __init__(self, variances: Tensor, basis: Tensor | None = None) -> None:
        super().__init__(variances.clamp_min(0))
        self._basis = basis

    def _like(self, rows: Tensor) -> Self:
        return type(self)(rows, self._basis)

    def variances(self) -> Tensor:
        """The variances times the squared eigenvectors."""
        return self._rows if self._basis is None else self._rows @ self._basis.square().T

    def row_means(self) -> Tensor:
        """The means of the rows of each covariance matrix, computed as products with the eigenvectors' means."""
        if self._basis is None:
            return self._rows / self.num_noise
        return (self._rows * self._basis.mean(0)) @ self._basis.T

    def move(self, noise: Tensor) -> Tensor:
        """Deviations, computed with the symmetric root of the covariance. This root is the same on every machine."""
        root = self._rows.sqrt()
        return noise * root if self._basis is None else ((noise @ self._basis) * root) @ self._basis.T

    def dense(self) -> Tensor:
        """The covariance matrices, computed with one matrix product each."""
        if self._basis is None:
            return torch.diag_embed(self._rows)
        return (self._basis * self._rows.unsqueeze(-2)) @ self._basis.T


class LowRank(Spread):
    r"""Covariances $C_n = R_n R_n^\top$ that were estimated from draws; the roots R are [N, K, n].

    Column j of R belongs to the same draw at all positions of an example.
    """

    is_joint = True

    def scaled(self, factor: float) -> Self:
        """The roots times the square root of the factor."""
        return self._like(math.sqrt(factor) * self._rows)

    def variances(self) -> Tensor:
        """The diagonals of the covariances, as sums of squares."""
        return self._rows.square().sum(-1)

    def row_means(self) -> Tensor:
        """The means of the rows of each covariance matrix, computed as products of R with the means of its columns."""
        return (self._rows @ self._rows.mean(-2).unsqueeze(-1)).squeeze(-1)

    def move(self, noise: Tensor) -> Tensor:
        """The noise times R."""
        return (noise.transpose(0, 1) @ self._rows.mT).transpose(0, 1)

    def dense(self) -> Tensor:
        """The covariance matrices, computed with one matrix product each."""
        return self._rows @ self._rows.mT
