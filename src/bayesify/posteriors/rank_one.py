"""Rank-one multiplicative noise on shared weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.maths.constraints import positive, raw_positive
from bayesify.posteriors.common.base import DrawRequest, Posterior, by_layer
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer
from bayesify.weights.named_parameters import NamedParameters


class RankOne(Posterior):
    r"""Shared weights times random rank-one factors (Dusenberry et al. 2020; rank-1 BNN).

    $$ [W\,b] = \bar W \circ r s^\top, \qquad q(r, s) = \frac1K \sum_k \mathcal{N}(r; m^r_k, \operatorname{diag}) \,
       \mathcal{N}(s; m^s_k, \operatorname{diag}), \qquad p(r) = p(s) = \mathcal{N}(1, \text{factor\_prior\_std}^2) $$

    $\bar W$ is a point estimate. The distribution of W has no density in the space of all matrices. `kl` is therefore $-\log
    p(\bar W)$ plus the mean, over components, of the KL of the factors. By convexity, the mean KL over components is at least the
    KL of the mixture, so the objective remains a lower bound. The stored parameter `value` is unconstrained and starts at the
    network's weights. `row_mean` and `col_mean` are unconstrained and start at 1. If there are several components, their means
    initially differ by 10 %, or by 3 % in networks with BatchNorm. `row_raw_std` and `col_raw_std` are mapped through softplus.

    The noise of a matrix consists of two vectors, so writing the weights dominates the cost of a draw. A GPU therefore
    needs no special kernel. Repeated draws are captured as CUDA graphs (`posteriors/common/gpu_draws.py`).

    Shapes:
        value: [rows, cols]; row_mean, row_raw_std: [K, rows]; col_mean, col_raw_std: [K, cols].

    Args:
        components: Number of components K.
        init_std: Standard deviation of the factors before training. The means of the factors are initially close to 1. The
            default is 0.1, or 0.03 in networks with BatchNorm. `fit` lowers the default if the default would make a trained
            network much worse.
        factor_prior_std: Prior standard deviation of the factors.

    Raises:
        ValueError: If `components` is below 1 or a standard deviation is not positive.
    """

    name = "rank_one"
    title, paper = "Rank-one", "Dusenberry et al. 2020"
    cost = "P + 2 K (d_out + d_in) per layer"
    is_point = True
    capturable = True
    correlated_priors = True

    @checked
    def __init__(
        self, components: Count = 4, init_std: Positive | None = None, factor_prior_std: Positive = 0.1
    ) -> None:
        super().__init__()
        self.components, self.init_std, self.factor_prior_std = components, init_std, factor_prior_std
        self.training_draws = self.num_members = components
        self.starts_wide = init_std is None

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Set the initial shared weights to the network's weights, and the initial means of the factors to about 1."""
        shared = {layer.name: layer.to_matrix(values).contiguous().clone() for layer in self.layers}
        self.value = NamedParameters(shared)
        stds = {layer.name: self.relative_std(layer) for layer in self.layers}
        raws = {name: raw_positive(self.init_std or std) for name, std in stds.items()}
        spread = 1.0 if self.components > 1 else 0.0

        def factor(axis: int) -> tuple[NamedParameters, NamedParameters]:
            ones = {name: value.new_ones(self.components, value.shape[axis]) for name, value in shared.items()}
            means = {name: one + spread * stds[name] * torch.randn_like(one) for name, one in ones.items()}
            return NamedParameters(means), NamedParameters({name: raws[name] * one for name, one in ones.items()})

        self.row_mean, self.row_raw_std = factor(0)
        self.col_mean, self.col_raw_std = factor(1)

    def bind_network(self, buffers: Mapping[str, Tensor], posteriors: Sequence[Posterior]) -> None:
        """Draws are not captured if another mixture may need the same component."""
        if self.components > 1 and any(part.num_members > 1 for part in posteriors if part is not self):
            self.capturable = False

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Draw the factors, and multiply the shared weights by them. Every component is drawn equally often."""
        like = self.value[self.layers[0].name]
        chosen = request.choose(self.components, like.device)
        noise = iter(request.normals([size for layer in self.layers for size in (layer.rows, layer.cols)], like))
        weights: dict[str, Tensor] = {}
        for layer in self.layers:
            row = self.row_mean[layer.name][chosen] + positive(self.row_raw_std[layer.name])[chosen] * next(noise)
            col = self.col_mean[layer.name][chosen] + positive(self.col_raw_std[layer.name])[chosen] * next(noise)
            weights.update(layer.from_matrix(self.value[layer.name] * row[:, :, None] * col[:, None, :]))
        return weights, self.kl(request.prior)

    def mean(self) -> dict[str, Tensor]:
        """Shared weights times the mean, over components, of the product of the factors' means."""
        return by_layer(self.layers, lambda layer: self.value[layer.name] * self._mean_factor(layer.name))

    def _mean_factor(self, layer: str) -> Tensor:
        return self.row_mean[layer].mT @ self.col_mean[layer] / self.components

    def variance(self) -> dict[str, Tensor]:
        """Second moment (computed from the second moments of the factors) minus the squared mean."""

        def variances(layer: Layer) -> Tensor:
            name = layer.name
            row_square = self.row_mean[name].square() + positive(self.row_raw_std[name]).square()
            col_square = self.col_mean[name].square() + positive(self.col_raw_std[name]).square()
            square = row_square.mT @ col_square / self.components
            return self.value[name].square() * (square - self._mean_factor(name).square())

        return by_layer(self.layers, variances)

    def kl(self, prior: PriorDraw) -> Tensor:
        """`-log p` of the shared weights, plus the mean over components of the factors' KL."""
        moments: dict[str, Tensor] = {}
        factors: Tensor | float = 0.0
        for layer in self.layers:
            for name, value in layer.from_matrix(self.value[layer.name]).items():
                moments[name] = prior.second_moments(name, value)
            for means, raws in ((self.row_mean, self.row_raw_std), (self.col_mean, self.col_raw_std)):
                mean, std = means[layer.name], positive(raws[layer.name])
                factors = factors + _factor_kl(mean, std, self.factor_prior_std) / self.components
        return prior.cross_entropy(moments, self.sizes()) + factors


def _factor_kl(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """KL(N(mean, std^2) || N(1, prior_std^2)), summed."""
    ratio = std / prior_std
    return (0.5 * (ratio.square() + ((mean - 1) / prior_std).square() - 1) - ratio.log()).sum()
