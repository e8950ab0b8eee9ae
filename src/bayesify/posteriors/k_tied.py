"""Mean-field Gaussians with low-rank standard deviations."""

import math
from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.maths.constraints import positive, raw_positive
from bayesify.maths.fused_draws import DrawPlan
from bayesify.maths.gaussian import UNIT_ENTROPY
from bayesify.maths.philox import TILE
from bayesify.maths.tied_draws import TiedPlan
from bayesify.posteriors.common.base import DrawRequest, Posterior, by_layer, fixed_stds
from bayesify.posteriors.common.gpu_draws import draw_by_kernels, kernels_suit
from bayesify.priors import PriorDraw
from bayesify.weights.layout import strides_of
from bayesify.weights.named_parameters import NamedParameters, first_parameter


class KTied(Posterior):
    r"""Independent Gaussians whose standard deviations form a low-rank matrix (Swiatkowski et al. 2020; k-tied FFG-W).

    $$ q([W\,b]_{ij}) = \mathcal{N}\bigl(M_{ij}, (\textstyle\sum_k u_{ik} v_{jk})^2\bigr) $$

    The stored parameter `mean_value` is unconstrained and starts at the network's weights. Softplus maps `raw_row` [rows, rank]
    and `raw_col` [cols, rank] to u and v. A k-tied posterior stores about half as many numbers as a mean-field posterior. If the
    rank is above 1, the initial factors differ by 10 %, because equal factors would stay equal.

    Args:
        rank: Rank k of each layer's matrix of standard deviations.
        init_std: Standard deviations before training. The default is a tenth of the root mean square of the layer's weights, or
            less if the layer comes before a BatchNorm layer.

    Raises:
        ValueError: If `rank` is below 1 or `init_std` is not positive.
    """

    name = "k_tied"
    title, paper = "k-tied", "Swiatkowski et al. 2020"
    cost = "P + k (d_out + d_in) per layer"
    capturable = True
    correlated_priors = True
    independent = True

    @checked
    def __init__(self, rank: Count = 2, init_std: Positive | None = None) -> None:
        super().__init__()
        self.rank, self.init_std = rank, init_std

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Set the initial means to the network's weights, and the initial standard deviations to about `start_std`."""
        means = {layer.name: layer.to_matrix(values).contiguous().clone() for layer in self.layers}
        self.mean_value = NamedParameters(means)
        stds = {layer.name: self.start_std(layer, values) for layer in self.layers}

        def factor(name: str, axis: int) -> Tensor:
            raw = raw_positive(math.sqrt(stds[name] / self.rank))
            start = means[name].new_full((means[name].shape[axis], self.rank), raw)
            return start if self.rank == 1 else start + 0.1 * torch.randn_like(start)

        self.raw_row = NamedParameters({name: factor(name, 0) for name in means})
        self.raw_col = NamedParameters({name: factor(name, 1) for name in means})

    def std_matrix(self, layer: str) -> Tensor:
        """Standard deviations of one layer's `[W b]`: [rows, cols]."""
        return positive(self.raw_row[layer]) @ positive(self.raw_col[layer]).T

    def draw(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor]:
        """`M + (u v^T) * noise`."""
        if self.draws_fused(request) and (fused := self._draw_fused(request)) is not None:
            return fused
        like = self.mean_value[self.layers[0].name]
        tile = TILE if request.noise.by_kernel(like) else 1
        noise = request.normals([layer.numel for layer in self.layers], like, tile)
        stds = self._std_matrices()
        weights: dict[str, Tensor] = {}
        for layer, eps in zip(self.layers, noise, strict=True):
            eps = eps.view(-1, layer.rows, layer.cols)
            weights.update(layer.from_matrix(torch.addcmul(self.mean_value[layer.name], stds[layer.name], eps)))
        return weights, self._kl(request.prior, stds)

    def draws_fused(self, request: DrawRequest) -> bool:
        """See `Posterior`. All weights must have the same dtype, and each layer must have one weight and at most one bias."""

        def are_pairs() -> bool:
            of_one_type = len({request.dtype(weight.name) for weight in self.weights}) == 1
            return of_one_type and all(len(one.weights) <= 2 and not one.weights[0].transposed for one in self.layers)

        suits = kernels_suit(request, first_parameter(self.mean_value))
        return suits and self.results.constant(self, ("are_pairs", id(request.layout)), are_pairs)

    def _draw_fused(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor] | None:
        parts = [part.values() for part in (self.mean_value, self.raw_row, self.raw_col)]

        def make(stds: list[float]) -> DrawPlan | None:
            if not all(part.is_contiguous() for values in parts for part in values):
                return None
            rest = iter(stds)
            means, rows, cols = parts
            members = [layer.weights for layer in self.layers]
            outputs = [[strides_of(request.layout, each.name, each.shape) for each in pair] for pair in members]
            lookups = [pair[0].kind == "lookup" for pair in members]
            prior_stds = [[next(rest) for _ in pair] for pair in members]
            kind = (request.num_draws, request.antithetic, request.dtype(self.weights[0].name))
            return TiedPlan(means, rows, cols, outputs, lookups, prior_stds, *kind)

        names = self.results.constant(self, "names", lambda: [weight.name for weight in self.weights])
        return draw_by_kernels(self, request, names, [part for values in parts for part in values], make)

    def _std_matrices(self) -> dict[str, Tensor]:
        return {layer.name: self.std_matrix(layer.name) for layer in self.layers}

    def _kl(self, prior: PriorDraw, stds: Mapping[str, Tensor]) -> Tensor:
        """KL, computed from the standard deviations that a draw has already computed."""
        moments = self.second_moments(prior, by_layer(self.layers, lambda layer: stds[layer.name].square()))
        return prior.cross_entropy(moments, self.sizes()) - self._entropy(stds)

    def mean(self) -> dict[str, Tensor]:
        """M."""
        return by_layer(self.layers, lambda layer: self.mean_value[layer.name])

    def variance(self) -> dict[str, Tensor]:
        """Squared entries of u v^T."""
        return by_layer(self.layers, lambda layer: self.std_matrix(layer.name).square())

    def entropy(self) -> Tensor:
        """Sum of the entropies of the entries."""
        return self._entropy(self._std_matrices())

    def _entropy(self, stds: Mapping[str, Tensor]) -> Tensor:
        constant = sum(self.sizes().values()) * UNIT_ENTROPY
        return torch.stack([std.log().sum() for std in stds.values()]).sum() + constant

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set the means to 0, u to 1, and v to the prior's standard deviations divided by the rank."""
        stds = fixed_stds(self, prior)
        for layer in self.layers:
            self.mean_value[layer.name].zero_()
            self.raw_row[layer.name].fill_(raw_positive(1.0))
            raw = [
                torch.full((weight.matrix_shape[1], self.rank), raw_positive(stds[weight.name] / self.rank))
                for weight in layer.weights
            ]
            self.raw_col[layer.name].copy_(torch.cat(raw))
