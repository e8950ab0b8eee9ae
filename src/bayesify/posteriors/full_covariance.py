"""One dense Gaussian per layer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Positive, checked
from bayesify.maths.constraints import positive, raw_positive, relative_tril, strict_tril
from bayesify.maths.gaussian import UNIT_ENTROPY
from bayesify.posteriors.common.base import DrawRequest, Posterior, fixed_stds
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer, Weight
from bayesify.weights.named_parameters import NamedParameters

MAX_LAYER_WEIGHTS = 20_000
"""Largest number of scalars in one layer for a dense covariance. At 20,000 scalars the covariance takes 1.6 GB in float32."""


class FullCovariance(Posterior):
    r"""One dense Gaussian per layer, over its weight and bias together (FCG-W).

    $$ q(w_l) = \mathcal{N}(m_l, L_l L_l^\top) $$

    where $w_l$ consists of a layer's weight followed by its bias, each in row-major order. Layers are independent of each other.
    The stored parameter `mean_value` is unconstrained and starts at the network's weights. Softplus maps `raw_diagonal` to the
    diagonal of each factor. `lower` is unconstrained and contains, row by row, the entries below each factor's diagonal, each
    divided by the diagonal entry of its row ($L_{ij} = L_{ii}\,\text{lower}_{ij}$). A step of the optimizer therefore changes a
    row in proportion to its diagonal entry, regardless of the number of entries in the row. A layer with P weights needs
    P + P (P + 1) / 2 numbers.

    Args:
        init_std: Initial value of the diagonal entries of each layer's Cholesky factor. The default is a tenth of the root mean
            square of the layer's weights, or less if the layer comes before a BatchNorm layer.

    Raises:
        ValueError: If `init_std` is not positive, or if a layer has more than 20,000 weights.
    """

    name = "full_covariance"
    title, paper = "Full covariance", "Barber & Bishop 1998"
    cost = "P + P (P + 1) / 2 per layer"
    aliases = ("fcg-w",)
    correlated_priors = True

    @checked
    def __init__(self, init_std: Positive | None = None) -> None:
        super().__init__()
        self.init_std = init_std

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start means at the network's weights, and covariances at multiples of the identity."""
        for layer in self.layers:
            if layer.numel > MAX_LAYER_WEIGHTS:
                raise ValueError(
                    f"FullCovariance: layer {layer.name} has {layer.numel} weights, so its covariance takes "
                    f"{4 * layer.numel**2 / 2**30:.1f} GiB; select smaller layers, or use MatrixNormal or KTied for this layer"
                )
        flat = {layer.name: _flatten(layer, values) for layer in self.layers}
        self.mean_value = NamedParameters({name: mean.clone() for name, mean in flat.items()})
        self.lower = NamedParameters(
            {name: mean.new_zeros(mean.numel() * (mean.numel() - 1) // 2) for name, mean in flat.items()}
        )
        raws = {layer.name: raw_positive(self.start_std(layer, values)) for layer in self.layers}
        self.raw_diagonal = NamedParameters({name: torch.full_like(flat[name], raw) for name, raw in raws.items()})

    def scale_tril(self, layer: str) -> Tensor:
        """Cholesky factor of one layer's covariance: [P, P]."""
        return relative_tril(self.lower[layer], self.raw_diagonal[layer])

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """`m + L noise`, layer by layer."""
        noise = request.normals([layer.numel for layer in self.layers], self.mean_value[self.layers[0].name])
        weights, variance = dict[str, Tensor](), dict[str, Tensor]()
        for layer, eps in zip(self.layers, noise, strict=True):
            diagonal, lower = self._factor(layer)  # L = diag(s) (I + N), so L is never formed
            flat = self.mean_value[layer.name] + diagonal * (eps + eps @ lower.T)  # [S, P]
            weights.update(_unflatten(layer, flat))
            variance.update(_unflatten(layer, _row_squares(diagonal, lower)))
        moments = self.second_moments(request.prior, variance)
        return weights, request.prior.cross_entropy(moments, self.sizes()) - self.entropy()

    def _factor(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """The two parts of L = diag(s) (I + N): the diagonal s, [P], and the lower part N, [P, P]."""
        diagonal = positive(self.raw_diagonal[layer.name])
        return diagonal, strict_tril(self.lower[layer.name], len(diagonal))

    def mean(self) -> dict[str, Tensor]:
        """m."""
        return self._by_name(lambda layer: self.mean_value[layer.name])

    def variance(self) -> dict[str, Tensor]:
        """Diagonal of L L^T."""
        return self._by_name(lambda layer: _row_squares(*self._factor(layer)))

    def _by_name(self, flat: Callable[[Layer], Tensor]) -> dict[str, Tensor]:
        return {name: value for layer in self.layers for name, value in _unflatten(layer, flat(layer)).items()}

    def spatial_covariance(self, weight: Weight, variance: Tensor, positions: int) -> Tensor:
        """Sum, over filters, of the diagonal blocks of L L^T."""
        layer = next(layer for layer in self.layers if weight in layer.weights)
        start = sum(other.numel for other in layer.weights[: layer.weights.index(weight)])
        rows = self.scale_tril(layer.name)[start : start + weight.numel].unflatten(0, (-1, positions))  # [F, K, P]
        return torch.einsum("fip,fjp->ij", rows, rows)

    def entropy(self) -> Tensor:
        """`log det L + P log(2 pi e) / 2`, summed over layers."""
        return torch.as_tensor(sum((positive(raw).log() + UNIT_ENTROPY).sum() for raw in self.raw_diagonal.values()))

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set means to 0, and each covariance to the prior's diagonal covariance."""
        stds = fixed_stds(self, prior)
        for layer in self.layers:
            self.mean_value[layer.name].zero_()
            self.lower[layer.name].zero_()
            raw = [torch.full((weight.numel,), raw_positive(stds[weight.name])) for weight in layer.weights]
            self.raw_diagonal[layer.name].copy_(torch.cat(raw))


def _row_squares(diagonal: Tensor, lower: Tensor) -> Tensor:
    """Diagonal of L L^T, computed from the parts of L: [P]."""
    return diagonal.square() * (1 + lower.square().sum(-1))


def _flatten(layer: Layer, values: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([values[weight.name].flatten() for weight in layer.weights])


def _unflatten(layer: Layer, flat: Tensor) -> dict[str, Tensor]:
    parts = flat.split([weight.numel for weight in layer.weights], dim=-1)
    return {
        weight.name: part.reshape((*flat.shape[:-1], *weight.shape))
        for weight, part in zip(layer.weights, parts, strict=True)
    }
