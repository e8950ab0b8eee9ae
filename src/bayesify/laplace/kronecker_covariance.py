"""Gaussians over whole layers by Kronecker factors."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from bayesify.jacobians import Gradients
from bayesify.jacobians.rules import fold_product
from bayesify.laplace.covariances import WeightCovariance
from bayesify.laplace.curvature import KroneckerBlock, has_factors, layer_factors
from bayesify.laplace.subset import Subset
from bayesify.maths.eigen import stable_eigh


class KroneckerCovariance(WeightCovariance):
    r"""$(A \otimes G + c\,\delta_l I)^{-1}$ for each linear map, independent weights for everything else.

    Args:
        subset: The weights; whole ones.
        blocks: A and G of each linear map.
        diagonal: Diagonals of the curvature of the other weights by name.
        prior: [S], one value per linear map.
        factor: c.

    Raises:
        ValueError: If the prior's precision differs within a linear map.
    """

    def __init__(
        self,
        subset: Subset,
        blocks: list[KroneckerBlock],
        diagonal: dict[str, Tensor],
        prior: Tensor,
        factor: float = 1.0,
    ) -> None:
        super().__init__(subset, prior, factor)
        self.blocks = blocks
        self.diagonal = diagonal
        by_name = subset.split(prior)
        self._precision: dict[str, Tensor] = {}
        for block in blocks:
            values = torch.cat([by_name[weight.name] for weight in block.layer.weights])
            if not bool((values == values[0]).all()):
                raise ValueError(
                    f"Laplace: the prior precision differs within {block.layer.name}; a Kronecker-factored layer needs one value"
                )
            self._precision[block.layer.name] = values[0]
        self._prior_of = by_name

    def rescaled(self, factor: float) -> KroneckerCovariance:
        """Keeps the eigenvectors."""
        other = KroneckerCovariance(self.subset, self.blocks, self.diagonal, self.prior, factor)
        if "_eigen" in self.__dict__:
            other.__dict__["_eigen"] = self._eigen
        return other

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

    def _spread(self, place: int, factor: float) -> Tensor:
        """Variances in the block's eigenbasis: [d_out, d_in]."""
        return 1 / (self._eigen[place][0] + factor * self._precision[self.blocks[place].layer.name])

    def outputs(self, gradients: Gradients, factors: list[float] | None = None) -> Tensor:
        """Layer by layer, in each layer's eigenbasis."""
        chosen = factors or [self.factor]
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(len(chosen), batch, vectors, vectors)
        for name, curvature in self.diagonal.items():
            rows = self.subset.gradients(gradients, name).detach().movedim(1, 0)
            for place, factor in enumerate(chosen):
                total[place] += (rows / (curvature + factor * self._prior_of[name])) @ rows.transpose(-1, -2)
        for index in range(len(self.blocks)):
            _, out_vectors, in_vectors = self._eigen[index]
            factors_of = self._factors(index, gradients)
            if factors_of is not None and len(factors_of) == 1 and factors_of[0][0].shape[1] == 1:
                a, g = factors_of[0][0][:, 0] @ in_vectors, factors_of[0][1][:, :, 0] @ out_vectors
                for place, factor in enumerate(chosen):
                    inner = a.square() @ self._spread(index, factor).T  # [B, d_out]
                    total[place] += torch.einsum("kbo,lbo,bo->bkl", g, g, inner)
                continue
            turned = self._turned(index, factors_of, gradients)
            rows = turned.movedim(1, 0).flatten(2)  # [B, K, d_out d_in]
            for place, factor in enumerate(chosen):
                total[place] += (rows * self._spread(index, factor).reshape(-1)) @ rows.transpose(-1, -2)
        return total[0] if factors is None else total

    def _factors(self, index: int, gradients: Gradients) -> list[tuple[Tensor, Tensor]] | None:
        """Inputs and gradients of each call of a block's layer; nothing where it did not see all examples."""
        layer = self.blocks[index].layer
        if not has_factors(layer, gradients):
            return None
        return [layer_factors(*call, layer) for call in gradients.calls(layer.weights[0].name)]

    def _turned(self, index: int, factors_of: list[tuple[Tensor, Tensor]] | None, gradients: Gradients) -> Tensor:
        """Gradients by a block's matrix in its eigenbasis: [K, B, d_out, d_in]."""
        _, out_vectors, in_vectors = self._eigen[index]
        if factors_of is None:
            layer = self.blocks[index].layer
            dense = layer.to_matrix({weight.name: gradients.dense(weight.name).detach() for weight in layer.weights})
            return out_vectors.T @ dense.to(out_vectors) @ in_vectors
        return torch.stack([fold_product((g @ out_vectors).movedim(2, -1), a @ in_vectors) for a, g in factors_of]).sum(
            0
        )

    def joint(self, gradients: Gradients) -> Tensor:
        """Layer by layer."""
        vectors, batch = gradients.shape
        total = self.prior.new_zeros(batch * vectors, batch * vectors)
        for name, curvature in self.diagonal.items():
            rows = self.subset.gradients(gradients, name).detach().movedim(1, 0).flatten(0, 1)
            total += (rows / (curvature + self.factor * self._prior_of[name])) @ rows.T
        for index in range(len(self.blocks)):
            turned = self._turned(index, self._factors(index, gradients), gradients)
            rows = turned.movedim(1, 0).flatten(0, 1).flatten(1)
            total += (rows * self._spread(index, self.factor).reshape(-1)) @ rows.T
        return total

    def draw(self, num_draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Noise in each eigenbasis, turned back."""
        noise = self.subset.split(self.noise(num_draws, len(self.prior), generator=generator))
        found: dict[str, Tensor] = {}
        for name, curvature in self.diagonal.items():
            found[name] = noise[name] * (curvature + self.factor * self._prior_of[name]).rsqrt()
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            layer = block.layer
            start = torch.cat([noise[weight.name] for weight in layer.weights], dim=-1).reshape(
                num_draws, layer.rows, layer.cols
            )
            matrix = out_vectors @ (start * self._spread(index, self.factor).sqrt()) @ in_vectors.T
            found |= {name: value.reshape(num_draws, -1) for name, value in layer.from_matrix(matrix).items()}
        return torch.cat([found[name] for name in self.subset.names], dim=-1)

    def dense(self) -> Tensor:
        """All blocks in one matrix, in the subset's order."""
        total = self.prior.new_zeros(len(self.prior), len(self.prior))
        places = self.subset.split(torch.arange(len(self.prior), device=self.prior.device))
        for name, curvature in self.diagonal.items():
            total[places[name], places[name]] = 1 / (curvature + self.factor * self._prior_of[name])
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            layer = block.layer
            basis = torch.kron(out_vectors, in_vectors)  # rows of [W b], row-major
            block_dense = (basis * self._spread(index, self.factor).reshape(-1)) @ basis.T
            order = torch.cat([places[weight.name].reshape(layer.rows, -1) for weight in layer.weights], dim=1).reshape(
                -1
            )
            total[order[:, None], order] = block_dense
        return total

    def variances(self) -> Tensor:
        """Squares of the eigenvectors times the spreads."""
        found = {
            name: 1 / (curvature + self.factor * self._prior_of[name]) for name, curvature in self.diagonal.items()
        }
        for index, block in enumerate(self.blocks):
            _, out_vectors, in_vectors = self._eigen[index]
            matrix = out_vectors.square() @ self._spread(index, self.factor) @ in_vectors.square().T
            found |= {name: value.reshape(-1) for name, value in block.layer.from_matrix(matrix).items()}
        return torch.cat([found[name] for name in self.subset.names])

    def log_det_ratio(self) -> Tensor:
        """Sums of logarithms of products of eigenvalues."""
        total = self.prior.new_zeros(())
        for name, curvature in self.diagonal.items():
            total = total + (curvature / (self.factor * self._prior_of[name])).log1p().sum()
        for index, block in enumerate(self.blocks):
            total = total + (self._eigen[index][0] / (self.factor * self._precision[block.layer.name])).log1p().sum()
        return total

    def tensors(self) -> dict[str, Tensor]:
        """A and G by layer, diagonals by weight."""
        found = {f"diagonal/{name}": value for name, value in self.diagonal.items()}
        for block in self.blocks:
            found[f"inputs/{block.layer.name}"] = block.inputs
            found[f"slopes/{block.layer.name}"] = block.slopes
        return found
