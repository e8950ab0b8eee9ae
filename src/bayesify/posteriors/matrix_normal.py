"""Matrix normal posteriors, one per layer."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Positive, checked
from bayesify.maths.constraints import positive, raw_positive, relative_tril
from bayesify.maths.gaussian import UNIT_ENTROPY
from bayesify.posteriors.common.base import DrawRequest, Posterior, by_layer, fixed_stds
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer, Weight
from bayesify.weights.named_parameters import NamedParameters


class MatrixNormal(Posterior):
    r"""A matrix normal over `[W b]` of each layer (Louizos & Welling 2016; Matrix-normal-W).

    $$ q([W\,b]) = \mathcal{MN}(M, L_r L_r^\top, L_c L_c^\top), \qquad [W\,b] = M + L_r E L_c^\top $$

    so that $\operatorname{Cov}(\operatorname{vec} W) = L_c L_c^\top \otimes L_r L_r^\top$. Stored parameters:
    `mean_value` (unconstrained), the diagonals of the factors (mapped through softplus), and the strictly lower parts
    divided by the diagonals (unconstrained, row by row). The lower parts
    start at 0, and training makes all their entries nonzero. Without the division, the many lower entries of a wide layer would
    together outgrow the diagonal. A layer needs `rows cols + rows (rows + 1) / 2 + cols (cols + 1) / 2` numbers.

    Args:
        init_std: Standard deviations before training. The default is a tenth of the root mean square of the layer's weights, or
            less if the layer comes before a BatchNorm layer.

    Raises:
        ValueError: If `init_std` is not positive.
    """

    name = "matrix_normal"
    title, paper = "Matrix normal", "Louizos & Welling 2016"
    cost = "P + (d_out^2 + d_in^2) / 2 per layer"
    correlated_priors = True

    @checked
    def __init__(self, init_std: Positive | None = None) -> None:
        super().__init__()
        self.init_std = init_std

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start the means at the network's weights, and both factors as diagonal matrices."""
        means = {layer.name: layer.to_matrix(values).contiguous().clone() for layer in self.layers}
        self.mean_value = NamedParameters(means)
        raws = {layer.name: raw_positive(math.sqrt(self.start_std(layer, values))) for layer in self.layers}

        def factor(axis: int) -> tuple[NamedParameters, NamedParameters]:
            sizes = {name: mean.shape[axis] for name, mean in means.items()}
            lower = {name: means[name].new_zeros(size * (size - 1) // 2) for name, size in sizes.items()}
            diagonal = {name: means[name].new_full((size,), raws[name]) for name, size in sizes.items()}
            return NamedParameters(lower), NamedParameters(diagonal)

        self.row_lower, self.row_raw_diagonal = factor(0)
        self.col_lower, self.col_raw_diagonal = factor(1)

    def scale_trils(self, layer: str) -> tuple[Tensor, Tensor]:
        """L_r [rows, rows] and L_c [cols, cols] of one layer."""
        rows = relative_tril(self.row_lower[layer], self.row_raw_diagonal[layer])
        cols = relative_tril(self.col_lower[layer], self.col_raw_diagonal[layer])
        return rows, cols

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """`M + L_r E L_c^T`, layer by layer."""
        noise = request.normals([layer.numel for layer in self.layers], self.mean_value[self.layers[0].name])
        weights: dict[str, Tensor] = {}
        for layer, eps in zip(self.layers, noise, strict=True):
            rows, cols = self.scale_trils(layer.name)
            matrix = self.mean_value[layer.name] + rows @ eps.view(-1, layer.rows, layer.cols) @ cols.T
            weights.update(layer.from_matrix(matrix))
        return weights, self.kl(request.prior)

    def mean(self) -> dict[str, Tensor]:
        """M."""
        return by_layer(self.layers, lambda layer: self.mean_value[layer.name])

    def variance(self) -> dict[str, Tensor]:
        """Outer product of the diagonals of the two covariances."""

        def variances(layer: Layer) -> Tensor:
            rows, cols = self.scale_trils(layer.name)
            return torch.outer(rows.square().sum(-1), cols.square().sum(-1))

        return by_layer(self.layers, variances)

    def spatial_covariance(self, weight: Weight, variance: Tensor, positions: int) -> Tensor:
        """The trace of the row covariance, times the diagonal blocks of the column covariance summed over filters."""
        layer = next(layer for layer in self.layers if weight in layer.weights)
        start = sum(other.matrix_shape[1] for other in layer.weights[: layer.weights.index(weight)])
        rows, cols = self.scale_trils(layer.name)
        filters = cols[start : start + weight.matrix_shape[1]].unflatten(0, (-1, positions))  # [F, K, cols]
        return rows.square().sum() * torch.einsum("fip,fjp->ij", filters, filters)

    def entropy(self) -> Tensor:
        """`cols log det L_r + rows log det L_c + rows cols log(2 pi e) / 2`, summed over layers."""
        total: Tensor | float = 0.0
        for layer in self.layers:
            rows = positive(self.row_raw_diagonal[layer.name]).log().sum()
            cols = positive(self.col_raw_diagonal[layer.name]).log().sum()
            total = total + layer.cols * rows + layer.rows * cols + layer.numel * UNIT_ENTROPY
        return torch.as_tensor(total)

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set the means to 0, the row factor to the identity, and the column factor to the prior's standard deviations."""
        stds = fixed_stds(self, prior)
        for layer in self.layers:
            self.mean_value[layer.name].zero_()
            self.row_lower[layer.name].zero_()
            self.col_lower[layer.name].zero_()
            self.row_raw_diagonal[layer.name].fill_(raw_positive(1.0))
            raw = [torch.full((weight.matrix_shape[1],), raw_positive(stds[weight.name])) for weight in layer.weights]
            self.col_raw_diagonal[layer.name].copy_(torch.cat(raw))
