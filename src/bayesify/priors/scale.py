"""A prior with one scale per layer; each scale has its own Gamma posterior."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesify.maths.gamma import draw_gamma, gamma_kl, inverse_root_moments
from bayesify.maths.noise import Randomness
from bayesify.priors.base import NEGLIGIBLE_LOG_VALUE, Prior, PriorDraw
from bayesify.weights.catalog import Weight

SHAPE = 2.0
RATE = 2.0


class Scale(Prior):
    r"""Neal's prior with a random scale per layer (Ober & Aitchison 2021, eq. 16 to 18; ScalePrior).

    $$ p(w | s_l) = \mathcal{N}\Bigl(0, \frac{1}{s_l\,\text{fan\_in}}\Bigr), \qquad p(s_l) = \mathrm{Gamma}(2, 2), \qquad
       q(s_l) = \mathrm{Gamma}(2 + \alpha_l, 2 + \beta_l) $$

    where the two arguments of Gamma are shape and rate. The weight and the bias of a layer share $s_l$. Weights without
    a fan-in have variance $1 / s_l$. The KL in the bound is

    $$ \mathrm{KL} = \mathbb{E}_{q(s)} \mathrm{KL}(q(w) \| p(w | s)) + \mathrm{KL}(q(s) \| p(s)). $$

    The first term uses one reparameterized draw of s (see `draw_gamma`) for each of the S draws of the weights. The second term
    has a closed form. The KL also penalizes what is learned about the prior's scales, so the bounds of different models are
    comparable.

    The parameters are `log_alpha` and `log_beta`. Alpha and beta both start at $P_l / 2$, where $P_l$ is the number of
    weights of the layer. If the weights are as large as expected under Neal's prior, $q(s_l)$ is then the exact
    posterior, $\mathrm{Gamma}(2 + \tfrac{P_l}{2}, 2 + \tfrac{\text{fan\_in}}{2} \lVert w \rVert^2)$.

    Shapes:
        log_alpha, log_beta: [L], with layers in the order of their first weight.
    """

    name = "scale"
    log_alpha: nn.Parameter
    log_beta: nn.Parameter

    def build(self) -> None:
        """Make one q(s) per layer."""
        sizes: dict[str, int] = {}
        for weight in self.weights.values():
            sizes[weight.layer] = sizes.get(weight.layer, 0) + weight.numel
        self.layers = {layer: index for index, layer in enumerate(sizes)}
        start = torch.tensor([math.log(max(1, size) / 2) for size in sizes.values()])
        self.log_alpha, self.log_beta = nn.Parameter(start), nn.Parameter(start.clone())

    @property
    def shape(self) -> Tensor:
        r"""$2 + \alpha$, the shape of q(s), [L]."""
        return SHAPE + self.log_alpha.exp()

    @property
    def rate(self) -> Tensor:
        r"""$2 + \beta$, the rate of q(s), [L]."""
        return RATE + self.log_beta.exp()

    def std_of(self, weight: Weight) -> float:
        """`1 / sqrt(fan_in)`, at a scale of 1."""
        return 1 / math.sqrt(weight.fan_in or 1)

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        """Draw S scales per layer."""
        scale = draw_gamma(self.shape, num_draws, generator) / self.rate  # [S, L]
        return PriorDraw(self._by_weight(scale.rsqrt()), self.kl())

    def kl(self) -> Tensor:
        """KL(q(s) || p(s)) in nats, summed over layers."""
        return gamma_kl(self.shape, self.rate, SHAPE, RATE).sum()

    def typical(self) -> PriorDraw:
        """The mean of each standard deviation under q(s)."""
        mean, variance = inverse_root_moments(self.shape, self.rate)
        return PriorDraw(self._by_weight(mean[None]), self.kl(), std_variance=self._by_weight(variance[None], power=2))

    def _by_weight(self, roots: Tensor, power: int = 1) -> dict[str, Tensor]:
        """For each weight, the values of its layer from a tensor [S, L], times a power of the weight's standard deviation under
        Neal's prior: [S]."""
        columns = roots.unbind(-1)
        made: dict[tuple[str, float], Tensor] = {}
        for weight in self.weights.values():
            std = self.std_of(weight)
            if (weight.layer, std) not in made:
                made[weight.layer, std] = columns[self.layers[weight.layer]] * std**power
        return {name: made[weight.layer, self.std_of(weight)] for name, weight in self.weights.items()}

    @torch.no_grad()
    def set_to_prior(self) -> None:
        """Set q(s) to p(s)."""
        self.log_alpha.fill_(NEGLIGIBLE_LOG_VALUE)
        self.log_beta.fill_(NEGLIGIBLE_LOG_VALUE)
