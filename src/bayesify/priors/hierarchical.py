"""Priors with random scales, one per layer, or with a random correlation of the positions of each kernel."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import strict_tril
from bayesify.maths.gamma import bartlett, bartlett_mean, draw_gamma, gamma_kl, inverse_root_moments, wishart_kl
from bayesify.maths.noise import Randomness
from bayesify.maths.positive_definite import inverse_from_factor
from bayesify.priors.base import NEGLIGIBLE_LOG_VALUE, Prior, PriorDraw, kernel_positions
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
    weights of the layer. If the weights are as large as expected under Neal's prior, the initial $q(s_l)$ is the exact posterior,
    $\mathrm{Gamma}(2 + \tfrac{P_l}{2}, 2 + \tfrac{\text{fan\_in}}{2} \lVert w \rVert^2)$.

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
        r"""Shape $2 + \alpha$ of q(s), [L]."""
        return SHAPE + self.log_alpha.exp()

    @property
    def rate(self) -> Tensor:
        r"""Rate $2 + \beta$ of q(s), [L]."""
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
        """For each weight, its layer's column of a tensor [S, L], times a power of the weight's standard deviation under Neal's
        prior: [S]."""
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


class SpatialInverseWishart(Prior):
    r"""A prior that correlates the positions of a kernel, equally in all filters (Ober & Aitchison 2021, eq. 19; SpatialIWPrior).

    $$ p(w_f | L) = \mathcal{N}(0, L^{-1} / \text{fan\_in}), \qquad p(L) = \mathcal{W}^{-1}((K + 1) I, K + 1), \qquad
       q(L) = \mathcal{W}^{-1}((K + 1) I + \Psi, K + 1 + \nu) $$

    for each filter $w_f$. A filter consists of the K weights that connect one input channel to one output channel. K, which the
    paper calls $N_{l-1}$, is the number of the kernel's positions. $L^{-1}$ is Wishart with mean I, so on average this prior
    equals Neal's prior. Weights that are not kernels, including biases, have Neal's prior. The KL of q(L) has a closed form (see
    `wishart_kl`), and draws use Bartlett's method.

    A posterior can use this prior if the posterior's second moments over a kernel's positions are known, or if the
    posterior is built on the prior. `bayesianize` rejects other posteriors.

    The parameters are `log_nu`, `log_diagonal` (logarithms of d) and `lower` (entries of N, row by row), where
    $\Psi = B B^\top$ with $B = \operatorname{diag}(d)(I + N)$ lower triangular. Kernels with the same K are stored together, in
    the order of the network. $\nu$ starts at the number of filters and $\Psi$ at $\nu I$. At these values, the mean of $L^{-1}$
    under q(L) is I, and q(L) is as wide as the posterior after $\nu$ observed filters.

    Shapes:
        log_nu: [G], for the G kernels with K positions; log_diagonal: [G, K]; lower: [G, K (K - 1) / 2].
    """

    name = "spatial_inverse_wishart"

    def build(self) -> None:
        """Make one q(L) per kernel."""
        self.groups: dict[int, list[str]] = {}
        for name, weight in self.weights.items():
            size = kernel_positions(weight)
            if size is not None:
                self.groups.setdefault(size, []).append(name)
        nu, diagonal, lower = {}, {}, {}
        for size, names in self.groups.items():
            start = torch.tensor([math.log(max(1, self.weights[name].numel // size)) for name in names])
            nu[str(size)] = nn.Parameter(start)
            diagonal[str(size)] = nn.Parameter((0.5 * start)[:, None].repeat(1, size))
            lower[str(size)] = nn.Parameter(torch.zeros(len(names), size * (size - 1) // 2))
        self.log_nu, self.log_diagonal, self.lower = (nn.ParameterDict(part) for part in (nu, diagonal, lower))

    def std_of(self, weight: Weight) -> float:
        """Prior standard deviation of a weight, `1 / sqrt(fan_in)`; for a kernel, this is the value for L = I."""
        return 1 / math.sqrt(weight.fan_in or 1)

    def dof(self, size: int) -> Tensor:
        r"""Degrees of freedom $K + 1 + \nu$ of the kernels with K positions, [G]."""
        found: Tensor = size + 1 + self.log_nu[str(size)].exp()
        return found

    def scale_matrix(self, size: int) -> Tensor:
        r"""Scale matrices $(K + 1) I + \Psi$ of the kernels with K positions, [G, K, K]."""
        packed, log_diagonal = self.lower[str(size)], self.log_diagonal[str(size)]
        eye = torch.eye(size, dtype=packed.dtype, device=packed.device)
        root = log_diagonal.exp().unsqueeze(-1) * (eye + strict_tril(packed, size))
        found: Tensor = (size + 1) * eye + root @ root.mT
        return found

    def draw(self, num_draws: int, generator: Randomness = None) -> PriorDraw:
        """For each kernel, S draws from q(L), each stored as a factor of $L^{-1}$."""
        return self._with(lambda dof, size: bartlett(dof, size, num_draws, generator))

    def typical(self) -> PriorDraw:
        """For each kernel, the mean under q(L) of the factor of $L^{-1}$."""
        return self._with(lambda dof, size: bartlett_mean(dof, size).unsqueeze(0))

    def _with(self, make: Callable[[Tensor, int], Tensor]) -> PriorDraw:
        """The prior with the matrices A of `bartlett`, [S, G, K, K], that `make` returns for the kernels with K positions."""
        factors: dict[str, Tensor] = {}
        for size, names in self.groups.items():
            made = self._root(size) @ make(self.dof(size), size)
            factors.update(zip(names, made.unbind(1), strict=True))
        stds = {name: self.std_of(weight) for name, weight in self.weights.items()}
        return PriorDraw(stds, self.kl(), factors)

    def kl(self) -> Tensor | float:
        """KL(q(L) || p(L)) in nats, summed over kernels; 0 for a network without convolutions."""
        parts = [wishart_kl(self.scale_matrix(size), self.dof(size), size + 1, size + 1).sum() for size in self.groups]
        return torch.stack(parts).sum() if parts else 0.0

    def _root(self, size: int) -> Tensor:
        r"""Lower triangular T, [G, K, K], such that $T T^\top$ is the inverse of `scale_matrix`."""
        inverse = inverse_from_factor(torch.linalg.cholesky_ex(self.scale_matrix(size))[0])
        found: Tensor = torch.linalg.cholesky_ex(inverse)[0]
        return found

    @torch.no_grad()
    def set_to_prior(self) -> None:
        """Set q(L) to p(L)."""
        for part in (self.log_nu, self.log_diagonal):
            for value in part.values():
                value.fill_(NEGLIGIBLE_LOG_VALUE)
        for value in self.lower.values():
            value.zero_()
