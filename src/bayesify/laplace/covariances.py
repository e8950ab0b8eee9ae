"""Gaussians over chosen weights: a curvature, a prior precision, and what prediction asks of them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.jacobians import Gradients
from bayesify.jacobians.rules import fold_product, layer_factors
from bayesify.laplace.curvature import KroneckerBlock, has_factors
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

    Attributes:
        factor: c, 1 before `rescaled`.
    """

    def __init__(self, subset: Subset, prior: Tensor) -> None:
        self.subset, self.prior, self.factor = subset, prior, 1.0

    @property
    def curved(self) -> Subset:
        """The weights that the curvature is of."""
        return self.subset

    @property
    def held(self) -> int:
        """Jacobian entries that are held at a time for each function value."""
        return max(self.subset.count(name) for name in self.subset.names)

    def rescaled(self, factor: float) -> Self:
        """The same curvature under another factor on the prior precisions; eigenvectors are kept where they were computed."""
        other = copy.copy(self)
        other.factor = factor
        vars(other).pop("_factor", None)
        return other

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
    """A dense covariance, from H, [S, S]; see `WeightCovariance`."""

    def __init__(self, subset: Subset, curvature: Tensor, prior: Tensor) -> None:
        super().__init__(subset, prior)
        self.curvature = curvature

    @property
    def held(self) -> int:
        """All of them."""
        return len(self.prior)

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
            return white @ white.mT.contiguous()  # a transposed view in batched products is several times slower on ARM
        if len(self.prior) > EIGEN_LIMIT:
            return torch.stack([self.rescaled(factor).of_rows(rows) for factor in factors])
        values, basis = self._eigen
        turned = (rows @ basis).movedim(1, 0)
        columns = turned.mT.contiguous()
        return torch.stack([(turned / (values + factor)) @ columns for factor in factors])

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
    r"""$[(H + c\delta)^{-1}]_{SS}$: the part over a subset of the covariance over all weights (Daxberger et al. 2021, eq. 11)."""

    def __init__(self, subset: Subset, whole: FullCovariance) -> None:
        super().__init__(subset, whole.prior)
        self.whole, self.factor = whole, whole.factor
        self._index = torch.searchsorted(whole.subset.flat(), subset.flat()).to(whole.prior.device)

    @property
    def curved(self) -> Subset:
        """All of them."""
        return self.whole.subset

    @property
    def held(self) -> int:
        """Those of all weights."""
        return len(self.prior)

    def rescaled(self, factor: float) -> Self:
        """Of the whole covariance, rescaled."""
        return type(self)(self.subset, self.whole.rescaled(factor))

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


class KroneckerCovariance(WeightCovariance):
    r"""$(A \otimes G + c\,\delta_l I)^{-1}$ for each linear map, independent weights for everything else.

    Args:
        subset: The weights; whole ones under a linear map.
        blocks: A and G of each linear map.
        diagonal: Diagonals of the curvature of the other weights by name.
        prior: [S], one value per linear map.

    Raises:
        ValueError: If the prior's precision differs within a linear map.
    """

    def __init__(
        self, subset: Subset, blocks: list[KroneckerBlock], diagonal: dict[str, Tensor], prior: Tensor
    ) -> None:
        super().__init__(subset, prior)
        self.blocks, self.diagonal, self._prior_of = blocks, diagonal, subset.split(prior)
        self._precisions: list[Tensor] = []
        for block in blocks:
            values = torch.cat([self._prior_of[weight.name] for weight in block.layer.weights])
            if not bool((values == values[0]).all()):
                raise ValueError(
                    f"Laplace: the prior precision differs within {block.layer.name}; a Kronecker-factored layer needs one value"
                )
            self._precisions.append(values[0])

    @cached_property
    def _eigen(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each block the products of eigenvalues [d_out, d_in], and the eigenvectors of G and of A."""
        found = []
        for block in self.blocks:
            what = f"Laplace: the Kronecker factor of {block.layer.name}'s"
            in_values, in_vectors = stable_eigh(block.inputs, f"{what} inputs")
            out_values, out_vectors = stable_eigh(block.slopes, f"{what} outputs")
            found.append((out_values.clamp_min(0)[:, None] * in_values.clamp_min(0), out_vectors, in_vectors))
        return found

    def _spread(self, part: int | str, factor: float | None = None) -> Tensor:
        """Variances of a weight [n] by its name, or in the eigenbasis of a block [d_out, d_in] by its place."""
        factor = self.factor if factor is None else factor
        if isinstance(part, str):
            return 1 / (self.diagonal[part] + factor * self._prior_of[part])
        return 1 / (self._eigen[part][0] + factor * self._precisions[part])

    def _rows(self, gradients: Gradients) -> Iterator[tuple[int | str, Tensor | tuple[Tensor, Tensor]]]:
        """Gradients by each independent weight, and by each block in its eigenbasis: [B, K, n].

        A block with one position per example has two factors in their place: inputs [B, d_in] and gradients [K, B, d_out].
        """
        for name in self.diagonal:
            yield name, self.subset.gradients(gradients, name).detach().movedim(1, 0)
        for index, (_, out_vectors, in_vectors) in enumerate(self._eigen):
            layer = self.blocks[index].layer
            if not has_factors(layer, gradients):  # it did not see all examples
                each = {weight.name: gradients.dense(weight.name).detach() for weight in layer.weights}
                turned = out_vectors.T @ layer.to_matrix(each).to(out_vectors) @ in_vectors
                yield index, turned.movedim(1, 0).flatten(2)
                continue
            calls = [layer_factors(*call, layer) for call in gradients.calls(layer.weights[0].name)]
            moved = [(a @ in_vectors, g @ out_vectors) for a, g in calls]
            if len(moved) == 1 and moved[0][0].shape[1] == 1:
                yield index, (moved[0][0][:, 0], moved[0][1][:, :, 0])
            else:
                turned = torch.stack([fold_product(g.movedim(2, -1), a) for a, g in moved]).sum(0)
                yield index, turned.movedim(1, 0).flatten(2)

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Weight by weight and layer by layer, so that no Jacobian over all weights is held."""
        chosen = factors or [self.factor]
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(len(chosen), batch, vectors, vectors)
        for part, rows in self._rows(gradients):
            columns: Any = None if isinstance(rows, tuple) else rows.mT.contiguous()
            for place, factor in enumerate(chosen):
                spread = self._spread(part, factor)
                if isinstance(rows, tuple):
                    a, g = rows
                    total[place] += torch.einsum("kbo,lbo,bo->bkl", g, g, a.square() @ spread.T)
                else:
                    total[place] += (rows * spread.reshape(-1)) @ columns
        return total[0] if factors is None else total

    def joint(self, gradients: Gradients) -> Tensor:
        """Weight by weight and layer by layer."""
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(batch * vectors, batch * vectors)
        for part, rows in self._rows(gradients):
            if isinstance(rows, tuple):
                a, g = rows
                rows = fold_product(g.unsqueeze(-1), a.unsqueeze(1)).movedim(1, 0).flatten(2)
            flat = rows.flatten(0, 1)
            total += (flat * self._spread(part).reshape(-1)) @ flat.T
        return total

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Noise in each eigenbasis, turned back."""
        noise = self.subset.split(self.noise(num_draws, len(self.prior), generator=generator))
        found = {name: noise[name] * self._spread(name).sqrt() for name in self.diagonal}
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            start = torch.cat([noise[weight.name] for weight in block.layer.weights], dim=-1)
            start = start.reshape(num_draws, block.layer.rows, block.layer.cols)
            matrix = out_vectors @ (start * self._spread(index).sqrt()) @ in_vectors.T
            found |= {name: value.reshape(num_draws, -1) for name, value in block.layer.from_matrix(matrix).items()}
        return torch.cat([found[name] for name in self.subset.names], dim=-1)

    def dense(self) -> Tensor:
        """All blocks in one matrix, in the subset's order."""
        total = self.prior.new_zeros(len(self.prior), len(self.prior))
        places = self.subset.split(torch.arange(len(self.prior), device=self.prior.device))
        for name in self.diagonal:
            total[places[name], places[name]] = self._spread(name)
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            basis = torch.kron(out_vectors, in_vectors)  # rows of [W b], row-major
            rows = [places[weight.name].reshape(block.layer.rows, -1) for weight in block.layer.weights]
            order = torch.cat(rows, dim=1).reshape(-1)
            total[order[:, None], order] = (basis * self._spread(index).reshape(-1)) @ basis.T
        return total

    def variances(self) -> Tensor:
        """Of independent weights, and for a block squares of the eigenvectors times the spreads."""
        found = {name: self._spread(name) for name in self.diagonal}
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            matrix = out_vectors.square() @ self._spread(index) @ in_vectors.square().T
            found |= {name: value.reshape(-1) for name, value in block.layer.from_matrix(matrix).items()}
        return torch.cat([found[name] for name in self.subset.names])

    def log_det_ratio(self) -> Tensor:
        """Sums of logarithms of diagonals and of products of eigenvalues."""
        parts = [(curvature, self._prior_of[name]) for name, curvature in self.diagonal.items()]
        parts += [(eigen[0], precision) for eigen, precision in zip(self._eigen, self._precisions, strict=True)]
        return torch.stack([(curvature / (self.factor * prior)).log1p().sum() for curvature, prior in parts]).sum()

    def tensors(self) -> dict[str, Tensor]:
        """A and G by layer, diagonals by weight."""
        found = {f"diagonal/{name}": value for name, value in self.diagonal.items()}
        for block in self.blocks:
            found[f"inputs/{block.layer.name}"] = block.inputs
            found[f"slopes/{block.layer.name}"] = block.slopes
        return found


class DiagonalCovariance(KroneckerCovariance):
    """Independent weights, from the diagonal of H, [S]: no linear map has factors; see `WeightCovariance`."""

    def __init__(self, subset: Subset, curvature: Tensor, prior: Tensor) -> None:
        super().__init__(subset, [], subset.split(curvature), prior)
        self.curvature = curvature

    def tensors(self) -> dict[str, Tensor]:
        """h."""
        return {"curvature": self.curvature}
