"""Gaussians over chosen weights, made from a curvature and a prior precision. Each Gaussian computes the covariance products that
predictions need."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from bayesify.jacobians import Gradients
from bayesify.jacobians.rules import LinearRule, fold_product, layer_factors
from bayesify.laplace.curvature import MAX_DIAGONALIZED_WEIGHTS, Structure, has_factors, layer_of, matrix_order
from bayesify.laplace.subnetwork import Subset
from bayesify.maths.gamma import widened
from bayesify.maths.positive_definite import stable_cholesky, stable_eigh
from bayesify.predictive.gaussian import DenseSpread, SharedBasis, Spread
from bayesify.running.memory import in_words
from bayesify.weights.catalog import Layer, Weight, group_layers

MIN_SKETCHED_WEIGHTS = 1024
"""Smallest number of weights whose curvature is tested for a low rank. The eigenvectors of fewer weights take a second."""
MAX_RELATIVE_REST = 0.25
"""An eigenvalue counts as 0 if it is at most this multiple of the machine precision, relative to the largest eigenvalue."""


class WeightCovariance(ABC):
    r"""The covariance $(H + c \operatorname{diag}\delta)^{-1}$ of a subset of S weights, where H is the curvature and c is a
    factor on the prior precisions $\delta$."""

    def __init__(self, subset: Subset, prior: Tensor) -> None:
        self.subset, self.prior = subset, prior
        self.curved = subset  # the weights that the curvature covers
        self.factor = 1.0  # c, which `rescaled` changes

    @abstractmethod
    def diagonalize(self) -> bool:
        """Diagonalize the curvature once for all factors on the prior precisions. Return `False` if the curvature is
        too large."""

    @property
    def held(self) -> int:
        """For each function value, the number of Jacobian entries that are in memory at the same time."""
        return max(self.subset.count(name) for name in self.subset.names)

    def rescaled(self, factor: float) -> Self:
        """A copy with another factor on the prior precisions. Eigenvectors that were already computed are used again."""
        other = copy.copy(self)
        other.factor = factor
        for name in ("_factor", "_whitening"):
            vars(other).pop(name, None)
        return other

    @abstractmethod
    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        r"""Covariances $J_b \Sigma J_b^\top$ for B examples, where $J_b$ has one row for each of K vectors: [B, K, K].

        If `factors` contains C values of c, they replace the object's own factor, and the result is [C, B, K, K].
        """

    def at_positions(self, a: Tensor, factors: list[float] | None = None) -> list[Spread]:
        """Covariances over the K outputs of the network's last layer, at all B T positions, for each factor.

        The subset must consist of the last layer's weights. The layer's inputs `a`, [B, T, D], have a column of ones for the
        bias.
        """
        rows = a.flatten(0, 1).unsqueeze(1)
        return [DenseSpread(found) for found in self.across_positions(rows, factors)]

    def across_positions(self, a: Tensor, factors: list[float] | None = None) -> Tensor:
        """Covariances over all positions and outputs of an example, [C, B, T K, T K] for C factors."""
        raise NotImplementedError(
            f"Laplace: {type(self).__name__} cannot compute covariances between positions from the inputs of a layer"
        )

    @property
    def layer(self) -> Layer:
        """The layer of the weights, if they belong to one layer."""
        found = layer_of(self.subset)
        assert found is not None
        return found

    @abstractmethod
    def joint(self, gradients: Gradients) -> Tensor:
        r"""$J \Sigma J^\top$ over all examples and vectors, [B K, B K], ordered by example and then by vector."""

    @abstractmethod
    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the deviation from the mean, [n, S]."""

    def directions(self, count: int, generator: torch.Generator) -> Tensor:
        """Deviations from the mean, [n, S], whose mean outer product approximates the covariance. By default these are
        `count` draws."""
        return self.draw(count, generator)

    @abstractmethod
    def dense(self) -> Tensor:
        """The covariance: [S, S]."""

    def variances(self) -> Tensor:
        """Diagonal of the covariance: [S]."""
        return self.dense().diagonal()

    @abstractmethod
    def log_det_ratio(self) -> Tensor:
        r"""$\log\det(H + c\delta) - \log\det(c\delta)$, a scalar."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors to store."""

    def noise(self, *shape: int, generator: torch.Generator | None = None) -> Tensor:
        """Standard normal numbers on the covariance's device."""
        place = generator.device if generator is not None else self.prior.device
        return torch.randn(shape, generator=generator, dtype=self.prior.dtype, device=place).to(self.prior.device)


class FullCovariance(WeightCovariance):
    """A dense covariance made from the curvature H [S, S]; see `WeightCovariance`.

    Attributes:
        rank: Upper bound R on the rank of H: the number of examples times the number of outputs; `None` if unknown.
    """

    def __init__(self, subset: Subset, curvature: Tensor, prior: Tensor) -> None:
        super().__init__(subset, prior)
        self.curvature = curvature
        self.rank: int | None = None

    @property
    def has_low_rank(self) -> bool:
        """Whether the known bound on the rank of H is low enough to compute its eigenvectors with `low_rank_eigh`."""
        return self.rank is not None and 2 * self.rank <= len(self.prior) and self.prior.device.type != "mps"

    @property
    def held(self) -> int:
        """The number of weights, because whole rows of the Jacobian are in memory."""
        return len(self.prior)

    @cached_property
    def _factor(self) -> Tensor:
        """Lower Cholesky factor of the precision. It is computed in float64 for at most `MAX_DIAGONALIZED_WEIGHTS` weights."""
        precision = self._widened(self.curvature).clone()
        precision.diagonal().add_(self.factor * self._widened(self.prior))
        factor = stable_cholesky(precision, f"Laplace: the posterior precision of {len(self.prior)} weights")
        return factor.to(self.curvature)

    def _widened(self, value: Tensor) -> Tensor:
        """The tensor, converted to float64 if the subset is small enough and the device supports it."""
        return value if len(self.prior) > MAX_DIAGONALIZED_WEIGHTS else widened(value)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        r"""Eigenvalues $\Lambda$, [R], and $B = \delta^{-1/2} Q$, [S, R], with $\delta^{-1/2} H \delta^{-1/2} = Q \Lambda Q^\top$.

        If H has a low rank, eigenvalues of 0 are left out, so that R is below S. Both tensors are then in float64.
        """
        root = self.prior.rsqrt()
        what = f"Laplace: the curvature of {len(self.prior)} weights"
        scaled = root[:, None] * self.curvature * root
        found = low_rank_eigh(scaled, self.rank if self.has_low_rank else None, what)
        values, vectors = stable_eigh(scaled, what) if found is None else found
        return values.clamp_min(0), root[:, None] * vectors

    def times(self, ratio: float) -> Self:
        """A copy with all curvatures multiplied by a ratio. Eigenvectors that were already computed are used again."""
        other = self.rescaled(self.factor)
        other.curvature = self.curvature * ratio
        vars(other).pop("_eigen_by_columns", None)
        if "_eigen" in vars(self):
            vars(other)["_eigen"] = ratio * self._eigen[0], self._eigen[1]
        return other

    def diagonalize(self) -> bool:
        """Whether there are at most `MAX_DIAGONALIZED_WEIGHTS` weights. If so, the eigendecomposition is computed."""
        return len(self.prior) <= MAX_DIAGONALIZED_WEIGHTS and self._eigen is not None

    def spectrum(self) -> Tensor:
        r"""Eigenvalues of $\delta^{-1/2} H \delta^{-1/2}$, [R]. Eigenvalues of 0 may be left out. The eigenvalues do not depend on
        the factor and are stored with the eigenvectors."""
        return self._eigen[0]

    def in_eigenbasis(self, gradient: Tensor) -> Tensor:
        r"""A gradient g with respect to the weights, in the basis of `spectrum`: $Q^\top \delta^{-1/2} g$, [R]."""
        return gradient.to(self._eigen[1]) @ self._eigen[1]

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        if factors is None:
            white = self._whitened(gradients)  # [B, K, S]
            return white @ white.mT.contiguous()  # batched products with transposed views are slow on ARM
        if not self.diagonalize():
            return torch.stack([self.rescaled(factor).outputs(gradients) for factor in factors])
        basis = self._eigen[1]
        rows = self._rows(gradients).to(basis)  # [K, B, S]; a product with a transposed view of it is 3 times as slow
        turned = (rows @ basis).movedim(1, 0)
        if not self._is_partial:
            return self._by_factor(turned, None, factors)
        scaled = (rows * self.prior.rsqrt()).movedim(1, 0)
        return self._by_factor(turned, scaled @ scaled.mT.contiguous(), factors)

    @property
    def _is_partial(self) -> bool:
        """Whether eigenvalues of 0 are left out."""
        return len(self._eigen[0]) < len(self.prior)

    def _by_factor(self, turned: Tensor, prior: Tensor | None, factors: list[float]) -> Tensor:
        r"""Covariances of the outputs for each factor c, [C, B, K, K].

        With the Jacobians $T = J B$ in the eigenbasis, [B, K, R], a covariance is $T (\Lambda + c)^{-1} T^\top$. If eigenvalues of
        0 are left out, it is $(P - T \Lambda (\Lambda + c)^{-1} T^\top) / c$ with the prior covariance $P = J \delta^{-1} J^\top$,
        [B, K, K]. The difference is taken in float64, because training rows have nearly all of P removed.
        """
        values, columns = self._eigen[0], turned.mT.contiguous()
        if prior is None:
            return torch.stack([(turned / (values + factor)) @ columns for factor in factors])
        found = [(prior - (turned * (values / (values + factor))) @ columns) / factor for factor in factors]
        return torch.stack(found).to(self.prior)

    @cached_property
    def _whitening(self) -> Tensor:
        """The inverse transposed Cholesky factor of the precision, [D, K, S]; the first two axes are the columns and rows of the
        last layer's `[W b]`."""
        eye = torch.eye(len(self.prior), dtype=self._factor.dtype, device=self._factor.device)
        inverse: Tensor = torch.linalg.solve_triangular(self._factor, eye, upper=False)
        return inverse.T[matrix_order(self.subset, self.layer).T.to(inverse.device)]

    @cached_property
    def _eigen_by_columns(self) -> Tensor:
        """The matrix B of `_eigen`, [D, K, R]; the first two axes are the columns and rows of the last layer's `[W b]`."""
        return self._eigen[1][matrix_order(self.subset, self.layer).T.to(self.prior.device)]

    def across_positions(self, a: Tensor, factors: list[float] | None = None) -> Tensor:
        if factors is not None and not self.diagonalize():
            return torch.cat([self.rescaled(factor).across_positions(a) for factor in factors])
        basis = self._whitening if factors is None else self._eigen_by_columns
        a = a.to(basis)
        turned = (a @ basis.flatten(1)).reshape(len(a), -1, basis.shape[-1])  # [B, T K, R]
        if factors is None:
            return (turned @ turned.mT.contiguous()).unsqueeze(0)
        if not self._is_partial:
            return self._by_factor(turned, None, factors)
        variances = 1 / self.prior[matrix_order(self.subset, self.layer).to(self.prior.device)].to(basis)  # [K, D]
        prior = torch.diag_embed(torch.einsum("btd,bsd,kd->btsk", a, a, variances)).transpose(2, 3)
        return self._by_factor(turned, prior.reshape(*turned.shape[:2], -1), factors)

    def _rows(self, gradients: Gradients) -> Tensor:
        """Gradients with respect to the weights that the curvature covers: [K, B, S]."""
        return self.subset.rows(gradients).detach()

    def _whitened(self, gradients: Gradients) -> Tensor:
        """Gradients times the inverse transposed Cholesky factor of the precision: [B, K, S]."""
        rows = self._rows(gradients)
        flat = rows.reshape(-1, rows.shape[-1])
        white: Tensor = torch.linalg.solve_triangular(self._factor, flat.T, upper=False)
        return white.T.reshape(rows.shape).movedim(1, 0)

    def joint(self, gradients: Gradients) -> Tensor:
        white = self._whitened(gradients).flatten(0, 1)
        return white @ white.T

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        noise = self.noise(num_draws, len(self.prior), generator=generator)
        drawn: Tensor = torch.linalg.solve_triangular(self._factor.T, noise.T, upper=True)
        return drawn.T

    def dense(self) -> Tensor:
        return torch.cholesky_inverse(self._widened(self._factor)).to(self._factor)

    def log_det_ratio(self) -> Tensor:
        if "_eigen" in self.__dict__ or len(self.prior) <= 512:
            return (self._eigen[0] / self.factor).log1p().sum().to(self.prior)
        factor, prior = self._widened(self._factor.diagonal()), self._widened(self.prior)
        return (2 * factor.log().sum() - (self.factor * prior).log().sum()).to(self.prior)

    def tensors(self) -> dict[str, Tensor]:
        return {"curvature": self.curvature}


def low_rank_eigh(matrix: Tensor, rank: int | None, what: str) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues [R] and eigenvectors [S, R], in float64, of a positive semidefinite matrix of low rank, in O(S^2 R) operations.

    Products with R random vectors span the range of the matrix (Halko et al. 2011). R is a known bound on the rank. If no bound
    is given, R is a quarter of S, and the result is `None` if the rank may be larger. The rank counts eigenvalues above the
    rounding error of the matrix. The curvature of a trained classifier often has a low rank, because confident predictions have
    almost no curvature.
    """
    size, spare = (len(matrix) // 4, len(matrix) // 40) if rank is None else (rank, 0)
    is_large = len(matrix) >= MIN_SKETCHED_WEIGHTS and matrix.device.type != "mps"
    if rank is None and not (is_large and bool(torch.isfinite(matrix).all())):
        return None
    wide, noise = widened(matrix), MAX_RELATIVE_REST * torch.finfo(matrix.dtype).eps
    generator = torch.Generator(matrix.device).manual_seed(0)
    if rank is None:  # the eigenvalues of a quarter of the weights are lower bounds, and take a sixtieth of the time
        part = torch.randperm(len(matrix), generator=generator, device=matrix.device)[:size]
        if torch.linalg.eigvalsh(wide[part][:, part])[spare] > noise * torch.linalg.matrix_norm(wide):
            return None
    probes = torch.randn(len(matrix), size, generator=generator, dtype=wide.dtype, device=matrix.device)
    span = torch.linalg.qr(wide @ probes).Q  # [S, R]
    values, turned = stable_eigh(span.T @ wide @ span, what)
    if rank is None and not values[spare] <= noise * values[-1]:
        return None
    return values, span @ turned


class MarginalCovariance(FullCovariance):
    r"""The covariance of a subset S: the block $[(H + c\delta)^{-1}]_{SS}$ of the covariance over all weights (Daxberger et al.
    2021, equation 11).

    The evidence is computed from the covariance over all weights, not only over the subset. The curvature H and the
    prior $\delta$ cover the weights `curved`, which include the subset.
    """

    def __init__(self, subset: Subset, curved: Subset, curvature: Tensor, prior: Tensor) -> None:
        super().__init__(subset, curvature, prior)
        self.curved = curved
        self._index = torch.searchsorted(curved.flat(), subset.flat()).to(prior.device)

    def _rows(self, gradients: Gradients) -> Tensor:
        rows = super()._rows(gradients)
        padded = rows.new_zeros(*rows.shape[:2], len(self.prior))  # other weights stay at their point estimates
        padded[..., self._index] = rows
        return padded

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        return super().draw(num_draws, generator)[:, self._index]

    def dense(self) -> Tensor:
        return super().dense()[self._index][:, self._index]


@dataclass(frozen=True)
class KroneckerBlock:
    r"""Curvature $A \otimes G$ of one layer's weights $[W\ b]$."""

    layer: Layer
    inputs: Tensor  # A, [d_in, d_in], including the bias column
    slopes: Tensor  # G, [d_out, d_out]
    prior: Tensor  # prior precision of the layer, a scalar

    def diagonalized(self) -> tuple[Tensor, Tensor, Tensor]:
        """Products [d_out, d_in] of each eigenvalue of G with each eigenvalue of A, and the eigenvectors of G and of A."""
        what = f"Laplace: the Kronecker factor of {self.layer.name}'s"
        in_values, in_vectors = stable_eigh(self.inputs, f"{what} inputs")
        out_values, out_vectors = stable_eigh(self.slopes, f"{what} outputs")
        return out_values.clamp_min(0)[:, None] * in_values.clamp_min(0), out_vectors, in_vectors


class KroneckerCovariance(WeightCovariance):
    r"""A covariance that is $(A \otimes G + c\,\delta_l I)^{-1}$ for each linear map and diagonal for all other weights.

    Weights of a linear map must be chosen as a whole and have the same prior precision; otherwise a `ValueError` is
    raised. See `kronecker_curvature` for the names in `curvature`.
    """

    def __init__(self, subset: Subset, curvature: Mapping[str, Tensor], prior: Tensor) -> None:
        super().__init__(subset, prior)
        self._prior_of = subset.split(prior)
        self.diagonal = {key: curvature[f"diagonal/{key}"] for key in subset.names if f"diagonal/{key}" in curvature}
        layers = group_layers(subset.weights[name] for name in subset.names)
        self.blocks = [
            KroneckerBlock(
                layer, curvature[f"inputs/{layer.name}"], curvature[f"slopes/{layer.name}"], self._precision(layer)
            )
            for layer in layers
            if f"inputs/{layer.name}" in curvature
        ]

    def _precision(self, layer: Layer) -> Tensor:
        values = torch.cat([self._prior_of[weight.name] for weight in layer.weights])
        if not bool((values == values[0]).all()):
            raise ValueError(
                f"Laplace: the prior precision differs within {layer.name}; give one precision for the whole layer"
            )
        return values[0]

    def diagonalize(self) -> bool:
        return self._eigen is not None

    @cached_property
    def _eigen(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [block.diagonalized() for block in self.blocks]

    def _spread(self, part: int | str, factor: float | None = None) -> Tensor:
        """If `part` names an independent weight: the variances [n] of the weight's entries. If `part` is the index of a block:
        the variances [d_out, d_in] in the block's eigenbasis."""
        factor = self.factor if factor is None else factor
        if isinstance(part, str):
            return 1 / (self.diagonal[part] + factor * self._prior_of[part])
        return 1 / (self._eigen[part][0] + factor * self.blocks[part].prior)

    def _rows(self, gradients: Gradients) -> Iterator[tuple[int | str, Tensor | tuple[Tensor, Tensor]]]:
        """Gradients [B, K, n] with respect to each independent weight, and with respect to each block in the block's eigenbasis.
        The gradients of a layer that is applied once per example come as two factors: inputs [B, d_in] and output gradients
        [K, B, d_out].
        """
        for name in self.diagonal:
            outer = self._outer(gradients, name)
            yield name, outer or self.subset.gradients(gradients, name).detach().movedim(1, 0)
        for index, (_, out_vectors, in_vectors) in enumerate(self._eigen):
            layer = self.blocks[index].layer
            if not has_factors(layer, gradients):  # the layer did not see all examples
                each = {weight.name: gradients.dense(weight.name).detach() for weight in layer.weights}
                turned = out_vectors.T @ layer.to_matrix(each).to(out_vectors) @ in_vectors
                yield index, turned.movedim(1, 0).flatten(2)
                continue
            calls = gradients.calls(layer.weights[0].name)
            factors = (layer_factors(use.rule, kept, g, layer) for use, kept, g in calls)
            moved = [(a @ in_vectors, g @ out_vectors) for a, g in factors]
            if len(moved) == 1 and moved[0][0].shape[1] == 1:
                yield index, (moved[0][0][:, 0], moved[0][1][:, :, 0])
            else:
                turned = torch.stack([fold_product(g.movedim(2, -1), a) for a, g in moved]).sum(0)
                yield index, turned.movedim(1, 0).flatten(2)

    def _outer(self, gradients: Gradients, name: str) -> tuple[Tensor, Tensor] | None:
        """Inputs [B, d_in] and output gradients [K, B, d_out] of a linear layer.

        The outer products of these inputs and output gradients are the gradients with respect to the whole weight. The result is
        `None` if `name` is not a whole weight matrix of a linear layer, or if this matrix has several uses or positions.
        """
        calls = gradients.calls(name)
        if self.subset.entries[name] is not None or len(gradients.uses(name)) != 1 or len(calls) != 1:
            return None
        use, kept, g = calls[0]
        if not isinstance(use.rule, LinearRule) or use.leaf != "weight" or kept.shape[1] != 1:
            return None
        a, slopes = use.rule.factors(kept.detach(), g.detach())
        return a[:, 0].to(self.prior), slopes[:, :, 0].to(self.prior)

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Covariances, summed weight by weight and layer by layer, so that the Jacobian over all weights is never in memory as a
        whole."""
        chosen = factors or [self.factor]
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(len(chosen), batch, vectors, vectors)
        for part, rows in self._rows(gradients):
            if isinstance(rows, tuple):
                a, g = rows
                for place, factor in enumerate(chosen):
                    spread = a.square() @ self._spread(part, factor).view(-1, a.shape[1]).T
                    total[place] += torch.einsum("kbo,lbo,bo->bkl", g, g, spread)
                continue
            columns = rows.mT.contiguous()
            for place, factor in enumerate(chosen):
                total[place] += (rows * self._spread(part, factor).reshape(-1)) @ columns
        return total[0] if factors is None else total

    def _last_layer(self, a: Tensor, factors: list[float] | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Three results: the inputs of the last layer in the eigenbasis of A, the eigenvectors of G, and, for each
        factor, the variances of `[W b]` in both eigenbases. For a layer of independent weights, the eigenbasis is the
        identity."""
        chosen = factors or [self.factor]
        if self.blocks:
            _, out_vectors, in_vectors = self._eigen[0]
            return a.to(in_vectors) @ in_vectors, out_vectors, [self._spread(0, factor) for factor in chosen]
        parts = self.layer.weights
        found = [{part.name: self._spread(part.name, factor).view(part.shape) for part in parts} for factor in chosen]
        return a.to(self.prior), None, [self.layer.to_matrix(one) for one in found]

    def at_positions(self, a: Tensor, factors: list[float] | None = None) -> list[Spread]:
        turned, basis, spreads = self._last_layer(a.flatten(0, 1), factors)
        squares = turned.square()
        return [SharedBasis(squares @ spread.T, basis) for spread in spreads]

    def across_positions(self, a: Tensor, factors: list[float] | None = None) -> Tensor:
        turned, basis, spreads = self._last_layer(a, factors)
        found = []
        for spread in spreads:
            inside = torch.einsum("btd,bsd,od->btso", turned, turned, spread)
            outer = torch.diag_embed(inside) if basis is None else (basis * inside.unsqueeze(-2)) @ basis.T
            found.append(outer.transpose(2, 3).reshape(len(a), turned.shape[1] * len(spread), -1))  # [B, T K, T K]
        return torch.stack(found)

    def joint(self, gradients: Gradients) -> Tensor:
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
        noise = self.subset.split(self.noise(num_draws, len(self.prior), generator=generator))
        found = {name: noise[name] * self._spread(name).sqrt() for name in self.diagonal}
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            start = torch.cat([noise[weight.name] for weight in block.layer.weights], dim=-1)
            start = start.reshape(num_draws, block.layer.rows, block.layer.cols)
            matrix = out_vectors @ (start * self._spread(index).sqrt()) @ in_vectors.T
            found |= {name: value.reshape(num_draws, -1) for name, value in block.layer.from_matrix(matrix).items()}
        return torch.cat([found[name] for name in self.subset.names], dim=-1)

    def keep_eigenvectors(self, device: torch.device) -> Self:
        """Replace the Kronecker factors by their eigenvectors, and return this object. The eigenvectors are computed on `device`.

        The object then takes half the memory that factors and eigenvectors together would take, but it cannot be saved. The
        eigenvectors are stored on the device of the factors. If the factors are on the CPU and `device` is a GPU, the
        eigenvectors are in pinned memory.
        """
        home = self.prior.device
        found = []
        for block in self.blocks:
            moved = replace(block, inputs=block.inputs.to(device), slopes=block.slopes.to(device))
            kept = [part.to(home) for part in moved.diagonalized()]
            found.append(tuple(part.pin_memory() for part in kept) if home != device else tuple(kept))
        self._eigen = found  # type: ignore[assignment]
        self.blocks = [replace(block, inputs=block.inputs[:0], slopes=block.slopes[:0]) for block in self.blocks]
        return self

    def times(self, vectors: Tensor, device: torch.device) -> Tensor:
        r"""Products $\Sigma v$, [n, S], for vectors [n, S] on any device, computed layer by layer on `device`."""
        here, parts = vectors.device, self.subset.split(vectors)
        found = {name: parts[name] * self._spread(name).to(here) for name in self.diagonal}
        for index, block in enumerate(self.blocks):
            products, out_vectors, in_vectors = (part.to(device, non_blocking=True) for part in self._eigen[index])
            each = {part.name: parts[part.name].unflatten(-1, part.shape).to(device) for part in block.layer.weights}
            spread = products.add(self.factor * block.prior).reciprocal_()
            turned = out_vectors.T @ block.layer.to_matrix(each) @ in_vectors * spread
            back = block.layer.from_matrix(out_vectors @ turned @ in_vectors.T)
            found |= {name: value.reshape(len(vectors), -1).to(here) for name, value in back.items()}
        return torch.cat([found[name] for name in self.subset.names], dim=-1)

    def dense(self) -> Tensor:
        total = self.prior.new_zeros(len(self.prior), len(self.prior))
        places = self.subset.split(torch.arange(len(self.prior), device=self.prior.device))
        for name in self.diagonal:
            total[places[name], places[name]] = self._spread(name)
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            basis = torch.kron(out_vectors, in_vectors)  # rows of [W b], row-major
            order = matrix_order(self.subset, block.layer).flatten().to(total.device)
            total[order[:, None], order] = (basis * self._spread(index).reshape(-1)) @ basis.T
        return total

    def variances(self) -> Tensor:
        found = {name: self._spread(name) for name in self.diagonal}
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            matrix = out_vectors.square() @ self._spread(index) @ in_vectors.square().T
            found |= {name: value.reshape(-1) for name, value in block.layer.from_matrix(matrix).items()}
        return torch.cat([found[name] for name in self.subset.names])

    def log_det_ratio(self) -> Tensor:
        parts = [(curvature, self._prior_of[name]) for name, curvature in self.diagonal.items()]
        parts += [(eigen[0], block.prior) for eigen, block in zip(self._eigen, self.blocks, strict=True)]
        return torch.stack([(curvature / (self.factor * prior)).log1p().sum() for curvature, prior in parts]).sum()

    def tensors(self) -> dict[str, Tensor]:
        """The factors A and G of each layer, and the diagonal curvature of the other weights."""
        found = {f"diagonal/{name}": value for name, value in self.diagonal.items()}
        for block in self.blocks:
            found[f"inputs/{block.layer.name}"] = block.inputs
            found[f"slopes/{block.layer.name}"] = block.slopes
        return found


class DiagonalCovariance(KroneckerCovariance):
    """A diagonal covariance, made from the diagonal [S] of the curvature H; see `WeightCovariance`."""

    def __init__(self, subset: Subset, curvature: Tensor, prior: Tensor) -> None:
        diagonals = {f"diagonal/{name}": value for name, value in subset.split(curvature).items()}
        super().__init__(subset, diagonals, prior)
        self.curvature = curvature

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal h."""
        return {"curvature": self.curvature}


def from_curvature(
    structure: Structure, subset: Subset, curvature: Mapping[str, Tensor], prior: Tensor
) -> WeightCovariance:
    """The Gaussian over a subset, made from the tensors of its curvature; see `CURVATURES` and the method `tensors`."""
    if structure == "kronecker":
        return KroneckerCovariance(subset, curvature, prior)
    kind = FullCovariance if structure == "full" else DiagonalCovariance
    return kind(subset, curvature["curvature"], prior)


def full_bytes(size: int, dtype: torch.dtype) -> int:
    """Memory that a full covariance over `size` weights takes: the curvature, its factor and one copy."""
    return 3 * size * size * torch.finfo(dtype).bits // 8


def largest_size(memory: int, dtype: torch.dtype) -> int:
    """Size of the largest subset whose full covariance fits into a budget of bytes."""
    return math.isqrt(memory * 8 // (3 * torch.finfo(dtype).bits))


def check_budget(
    structure: Structure, size: int, weights: Mapping[str, Weight], dtype: torch.dtype, memory: int
) -> None:
    """Raise `ValueError` if a covariance over `size` weights of a network does not fit into a budget of bytes."""
    if structure == "full" and full_bytes(size, dtype) > memory:
        largest = largest_size(memory, dtype)
        raise ValueError(
            f"Laplace: a full covariance over {size:,} weights takes {in_words(full_bytes(size, dtype))} (the matrix, its factor "
            f"and a copy), more than memory={in_words(memory)}; choose at most {largest:,} weights (for "
            f"example subset=bayesify.subnetwork.largest_variance({largest})), or raise memory=, or use covariance='diagonal'"
        )
    if structure == "kronecker" and size == sum(weight.numel for weight in weights.values()):
        layers = [layer for layer in group_layers(weights.values()) if layer.weights[0].kind == "matrix"]
        entries = sum(layer.rows**2 + layer.cols**2 for layer in layers)
        needed = 2 * entries * torch.finfo(dtype).bits // 8  # the factors and their eigenvectors
        if needed > memory:
            raise ValueError(
                f"Laplace: the Kronecker factors of {len(layers)} layers take {in_words(needed)}, more than "
                f"memory={in_words(memory)}; raise memory=, use covariance='diagonal', or choose a subset of the layers"
            )
