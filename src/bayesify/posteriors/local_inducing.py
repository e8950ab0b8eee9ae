"""Local inducing points: Bayesian linear regression in every layer, on the layer's own inducing inputs."""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.maths.gamma import widened
from bayesify.maths.gaussian import UNIT_ENTROPY
from bayesify.maths.regression import Regression, RegressionFactors
from bayesify.posteriors.common.base import DrawRequest, Posterior, by_layer
from bayesify.posteriors.global_inducing.likelihood import (
    NEGLIGIBLE_LOG_PRECISION,
    NETWORK_PRECISION,
    HalfPrecision,
    PriorScale,
    typical_scale,
)
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer, Weight
from bayesify.weights.named_parameters import NamedParameters


class LocalInducing(Posterior):
    r"""Bayesian linear regression in every layer, on learned inputs and outputs of this layer (Ober & Aitchison 2021; li).

    $$ q(W_l) = \prod_r \mathcal{N}(w_r;\, \Sigma Z_l^\top \Lambda_l v_r,\, \Sigma), \qquad
       \Sigma = ((T T^\top)^{-1} + Z_l^\top \Lambda_l Z_l)^{-1} $$

    The vectors $w_r$ are the rows of `[W b]`, and their prior is $\mathcal{N}(0, T T^\top)$. This is eq. 11 with inducing inputs
    $Z_l$ of the layer itself instead of propagated inputs. Layers are independent and q is Gaussian, so the moments and the KL
    have a closed form given the prior. An inducing input is one row that the layer's matrix multiplies, with a 1 for the bias.
    For a convolution, the row is a patch. Every kind of weight is supported.

    Stored parameters of each layer: `points_value` (Z), `pseudo_outputs` (V) and `log_precision` (the diagonal of $\log
    \Lambda$).

    Shapes:
        points_value: [M, d_in]; pseudo_outputs: [M, d_out]; log_precision: [M].

    Args:
        points: Number of inducing points M in every layer.
        precision: Initial diagonal of the precision $\Lambda$. The default is 1; with `init="network"`, it is
            `NETWORK_PRECISION`.
        kl_form: `"closed"` for the closed form, or `"sampled"` for $\log q - \log p$ at the draw.
        init: Initial pseudo-outputs V. With `"random"`, V is standard normal. With `"network"`, V contains the network's own
            outputs for the inducing inputs, $V_l = Z_l [W_l\ b_l]^\top$. If there are at least as many points as columns of
            `[W b]`, the mean of q is then initially close to the network's weights.

    Raises:
        ValueError: If an argument is out of range.
    """

    name = "local_inducing"
    title, paper = "Local inducing", "Ober & Aitchison 2021"
    cost = "M (d_out + d_in + 1) per layer"
    aliases = ("li",)
    small_options = {"points": 60, "precision": 3000.0, "init": "network"}
    slow = True
    prior_means = False
    prior_scale = 1.0  # far from inducing points, draws come from the prior, so a wide prior would give large outputs
    correlated_priors = True

    @checked
    def __init__(
        self,
        points: Count,
        precision: Positive | None = None,
        kl_form: Literal["closed", "sampled"] = "closed",
        init: Literal["random", "network"] = "random",
    ) -> None:
        super().__init__()
        self.points, self.precision, self.kl_form, self.init = points, precision, kl_form, init
        self.shares_statistics = self.starts_at_network = init == "network"

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Start with standard normal inducing inputs, and with the pseudo-outputs that `init` selects."""
        like = next(iter(values.values()))
        log_precision = math.log(self.precision or (NETWORK_PRECISION if self.init == "network" else 1.0))
        inputs, outputs, logs = {}, {}, {}
        for layer in self.layers:
            inputs[layer.name] = like.new_empty(self.points, layer.cols - self._has_ones(layer)).normal_()
            outputs[layer.name] = like.new_empty(self.points, layer.rows).normal_()
            if self.init == "network":
                outputs[layer.name] = self._design(layer, inputs[layer.name]) @ layer.to_matrix(values).detach().mT
            logs[layer.name] = like.new_full((self.points,), log_precision)
        self.points_value, self.pseudo_outputs = NamedParameters(inputs), NamedParameters(outputs)
        self.log_precision = NamedParameters(logs)

    @staticmethod
    def _has_ones(layer: Layer) -> bool:
        """Whether `[W b]` has a weight and a bias, so that inputs need a 1 for the last column."""
        return len(layer.weights) > 1 and layer.weights[-1].is_bias

    def _design(self, layer: Layer, points: Tensor) -> Tensor:
        """Inducing inputs, with a column of ones for the bias, [M, D]."""
        return torch.cat((points, points.new_ones(self.points, 1)), -1) if self._has_ones(layer) else points

    def problem(self, layer: Layer, scale: PriorScale) -> RegressionFactors:
        """One layer's regression for the whitened rows of `[W b]`, in float64, for each draw of the prior: [*S, 1, D, R]."""
        mix = HalfPrecision(log_diagonal=widened(self.log_precision[layer.name]))
        design, outputs = self._design(layer, self.points_value[layer.name]), mix(self.pseudo_outputs[layer.name])
        design = scale.pull(layer, mix(design).unsqueeze(0))  # A T, [*S, 1, M, D]
        what = f"LocalInducing: the precision of layer {layer.name or '(the network)'}"
        return RegressionFactors(design.mT @ design, design.mT @ outputs, what)

    def regression(self, layer: Layer, scale: PriorScale) -> Regression:
        """The posterior over the whitened rows of one layer's `[W b]`."""
        return self.problem(layer, scale).solve()

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Draw each layer's weights from the posterior of its regression."""
        noise = request.normals([layer.numel for layer in self.layers], next(self.parameters()))
        scale = PriorScale(request.prior, self.layers, request.num_draws).aligned()
        weights: dict[str, Tensor] = {}
        kls: list[Tensor] = []
        for layer, part in zip(self.layers, noise, strict=True):
            eps = part.view(request.num_draws, 1, layer.cols, layer.rows)
            rows, kl, _ = self.problem(layer, scale).draw(eps, self.kl_form)  # a failed draw has a KL of NaN
            kls.append(kl)
            weights.update(layer.from_matrix(scale.push(layer, rows.mT).squeeze(-3).to(eps.dtype)))
        return weights, self._stored(sum(kls[1:], kls[0]))

    def _stored(self, value: Tensor) -> Tensor:
        return value.to(next(self.parameters()).dtype)

    def _each(self, use: Callable[[Layer, Regression, PriorScale], Tensor]) -> dict[str, Tensor]:
        """Apply `use` to each layer, and split the results, [rows, cols], into weights by name. If the prior draws its scales,
        the means of these scales are used."""
        scale = typical_scale(self)
        return by_layer(self.layers, lambda layer: self._stored(use(layer, self.regression(layer, scale), scale)))

    def mean(self) -> dict[str, Tensor]:
        """The means of the regression. If the prior draws its scales, the means of these scales are used."""
        return self._each(lambda layer, found, scale: scale.push(layer, found.mean.mT).squeeze(0))

    def variance(self) -> dict[str, Tensor]:
        """The diagonal of Sigma, which is the same for every row. If the prior draws its scales, the means of these scales are
        used."""

        def spread(layer: Layer, found: Regression, scale: PriorScale) -> Tensor:
            return scale.push(layer, found.root).square().sum(-2).expand(layer.rows, -1)

        return self._each(spread)

    def covariance(self, layer: Layer) -> Tensor:
        """Sigma of one layer, [D, D]: the covariance of each row of `[W b]`."""
        scale = typical_scale(self)
        root = scale.push(layer, self.regression(layer, scale).root).squeeze(0)
        return self._stored(root.mT @ root)

    def spatial_covariance(self, weight: Weight, variance: Tensor, positions: int) -> Tensor:
        """Sum of the diagonal blocks of Sigma, one block per input channel, times the number of rows of `[W b]`."""
        layer = next(layer for layer in self.layers if weight in layer.weights)
        blocks = self.covariance(layer)[: weight.matrix_shape[1], : weight.matrix_shape[1]]
        blocks = blocks.unflatten(0, (-1, positions)).unflatten(-1, (-1, positions))  # [c, K, c, K]
        found: Tensor = layer.rows * blocks.diagonal(dim1=0, dim2=2).sum(-1)
        return found

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL in closed form: a scalar, or [S] for S draws of the prior."""
        scale = PriorScale(prior, self.layers, 1 if prior.fixed else _draws(prior)).aligned()
        parts = [self.regression(layer, scale).closed_kl() for layer in self.layers]
        return self._stored(sum(parts[1:], parts[0]))

    def entropy(self) -> Tensor:
        """`rows log det(2 pi e Sigma) / 2`, summed over layers."""
        scale = typical_scale(self)
        total = widened(next(self.parameters()).new_zeros(()))
        for layer in self.layers:
            roots = torch.linalg.slogdet(scale.push(layer, self.regression(layer, scale).root).squeeze(0))[1]
            total = total + layer.rows * (roots + layer.cols * UNIT_ENTROPY)
        return self._stored(total)

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set the pseudo-outputs to 0 and their precision almost to 0."""
        for name in self.pseudo_outputs:
            self.pseudo_outputs[name].zero_()
            self.log_precision[name].fill_(NEGLIGIBLE_LOG_PRECISION)


def _draws(prior: PriorDraw) -> int:
    tensors = [value for value in (*prior.std.values(), *prior.factor.values()) if isinstance(value, Tensor)]
    return max(tensor.shape[0] for tensor in tensors)
