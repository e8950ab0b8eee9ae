"""Walsh-Hadamard variational inference: O(D) parameters and O(D log D) time for a layer of D x D weights."""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.maths.gaussian import draw_diagonals
from bayesify.maths.walsh_hadamard import dyadic, dyadic_values, nearest
from bayesify.posteriors.common import starts
from bayesify.posteriors.common.base import DrawRequest, Posterior, fixed_stds, repeat_draws
from bayesify.posteriors.mean_field import MeanField
from bayesify.posteriors.walsh_hadamard.blocks import Blocks, LocalWalshHadamardWeight, WalshHadamardWeight
from bayesify.posteriors.walsh_hadamard.families import FAMILIES, Diagonal
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer, Weight
from bayesify.weights.named_parameters import NamedParameters

MIN_SIZE_FOR_PRODUCTS = 256
"""Smallest block size for which a linear layer multiplies through its factors. With smaller blocks, it is faster to
materialize the weight."""

MAX_SIZE_TO_FORM = 1024
"""Largest block size for which a GPU materializes weights under autocast, because tensor cores are faster than transforms."""


@dataclass(frozen=True)
class _Part:
    """One weight of a group. It uses the blocks from `start` to `stop`.

    If the part is `fast`, linear layers never materialize the weight.
    """

    weight: Weight
    blocks: Blocks
    start: int
    stop: int
    linear: bool

    @property
    def fast(self) -> bool:
        return self.linear and self.blocks.along != "entries" and self.blocks.size >= MIN_SIZE_FOR_PRODUCTS


class WalshHadamard(Posterior):
    r"""Weight matrices with a random diagonal between two Walsh-Hadamard transforms (Rossi et al. 2020; WHVI).

    $$ W = S_1 H \operatorname{diag}(g) H S_2, \qquad q(g) = \mathcal{N}(\mu, \Sigma), \qquad
       p(g) = \mathcal{N}(0, D \sigma^2 I) $$

    H is the orthonormal transform of size D, where D is a power of two. $S_1$ and $S_2$ are learned diagonals without a prior.
    $\sigma$ is the prior standard deviation of the weight. If the entries of $S_1$ and $S_2$ are signs, an entry of W has the
    prior's variance. The KL of g has a closed form with D terms instead of $D^2$. Entry (i, j) of W is $s_{1i} s_{2j} c_{i \oplus
    j}$ with $c = D^{-1/2} H g$, so the randomness of W has D dimensions and W has no density over all matrices.

    A matrix of another shape is padded and split into a stack of blocks, each with its own parameters (see `Blocks`).
    For a layer with one output or one input, the matrix is one reshaped block. A convolution kernel is a matrix with a row for
    each output channel and a column for each pair of an input channel and a kernel position. Each draw materializes this matrix.
    Linear layers with blocks of size 256 or more multiply in O(D log D) without materializing W. Smaller layers materialize W,
    because this is faster for them. Biases and other vectors are independent Gaussians that start at the network's values.

    Stored parameters, for all blocks of the same size together: `left` ($s_1$), `right` ($s_2$), and the parameters of q(g),
    which are `mean_value`, `log_std` and others that depend on the family. A block with a diagonal q(g) has 4 D numbers.

    Args:
        covariance: Family of q(g): `"diagonal"`, `"full"` (a Cholesky factor), or `"flow"` (planar layers, whose KL is
            estimated from each draw).
        flow_length: Number of planar layers of a flow.
        init_std: Standard deviations of W before training. The default is a tenth of the root mean square of the weight, or less
            if its layer comes before a BatchNorm layer.
        init: How the initial value of W is chosen. With `"random"`, $S_1$, $S_2$ and $\mu$ are random signs times a scale. W
            is then a multiple of an orthogonal matrix and has the same root mean square as the network's own weight. With
            `"network"`, alternating least squares searches for the W nearest to the network's weight
            (`maths.walsh_hadamard.nearest`). This matrix is far from a trained weight, because D numbers cannot represent D x D
            weights. With `"residual"`, W is added to the weights of a trained network. These weights are stored but not trained
            further. $\mu$ then starts at 0, and $S_1$ and $S_2$ at random signs. With `"residual"`, the prior is therefore centered
            on a network that was trained on the data, and the posterior is no smaller than the network.
        local_reparameterization: Whether the training objective draws a separate g for each example in linear layers.
            In predictions, all examples always share g, because a draw must be a function of the input.

    Raises:
        ValueError: If a name is unknown, if `flow_length` is below 1, if `init_std` is not positive, or if a flow is
            combined with `local_reparameterization`.
    """

    name = "walsh_hadamard"
    title, paper = "Walsh-Hadamard", "Rossi et al. 2020"
    cost = "4 max(d_out, d_in) per layer"
    aliases = ("whvi",)
    prior_means = False

    keeping_init = "residual"

    @checked
    def __init__(
        self,
        covariance: Literal["diagonal", "full", "flow"] = "diagonal",
        flow_length: Count = 4,
        init_std: Positive | None = None,
        init: Literal["random", "network", "residual"] = "random",
        local_reparameterization: bool = False,
    ) -> None:
        super().__init__()
        if covariance == "flow" and local_reparameterization:
            raise ValueError(
                "WalshHadamard: covariance='flow' does not work with local_reparameterization=True, because the KL of a "
                "flow is computed for one draw of g, not for one draw per example; use covariance='diagonal' or 'full'"
            )
        self.covariance, self.flow_length, self.init_std = covariance, flow_length, init_std
        self.init, self.local_reparameterization = init, local_reparameterization
        self.shares_statistics, self.starts_at_network = init != "random", init == "residual"

    # -- making ----------------------------------------------------------------------------------------------------

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Group the blocks of all weights by size, and make the parameters."""
        groups: dict[int, list[_Part]] = {}
        rest: list[Layer] = []
        residual = self.init == "residual"
        for layer in self.layers:
            vectors = tuple(weight for weight in layer.weights if not _is_matrix(weight))
            rest += [Layer(layer.name, vectors)] if vectors else []
            for weight in layer.weights:
                if _is_matrix(weight):
                    blocks = Blocks.cover(*weight.matrix_shape)
                    linear = isinstance(modules[weight.name], nn.Linear) and not weight.aliases and not residual
                    parts = groups.setdefault(blocks.size, [])
                    start = parts[-1].stop if parts else 0
                    parts.append(_Part(weight, blocks, start, start + blocks.count, linear))
        self.groups = dict(sorted(groups.items()))
        self.vectors = None
        if rest:
            self.vectors = MeanField(init_std=self.init_std).bind(
                tuple(rest), values, modules, self.bound_prior, relative_stds=self.relative_stds
            )
        matrices = [weight.name for weight in self.weights if _is_matrix(weight)]
        self.base = NamedParameters({name: values[name].clone() for name in matrices if residual}, trainable=False)
        begun = {size: self._start(size, parts, values) for size, parts in self.groups.items()}
        self.left = NamedParameters({str(size): start[0] for size, start in begun.items()})
        self.right = NamedParameters({str(size): start[2] for size, start in begun.items()})
        more: dict[str, Any] = {"length": self.flow_length} if self.covariance == "flow" else {}
        self.g = nn.ModuleDict(
            {
                str(size): FAMILIES[self.covariance](start[1], start[3] * math.sqrt(size), **more)
                for size, start in begun.items()
            }
        )
        every = [part for parts in groups.values() for part in parts]
        self.capturable = not any(part.linear if self.local_reparameterization else part.fast for part in every)

    def _start(self, size: int, parts: list[_Part], values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Initial values of a group: $s_1$, E[g] and $s_2$, [K, D] each, and the standard deviation of W, [K, 1]."""
        found = []
        for part in parts:
            matrix = part.weight.to_matrix(values[part.weight.name])
            shape = (part.blocks.count, size)
            alone = Layer(part.weight.layer, (part.weight,))
            std = matrix.new_full((shape[0], 1), self.start_std(alone, values))
            if self.init == "network":
                found.append((*nearest(part.blocks.disassemble(matrix)), std))
                continue
            left, g, right = (
                2.0 * torch.randint(2, shape, device=matrix.device).to(matrix.dtype) - 1 for _ in range(3)
            )
            spread = 0.0 if self.init == "residual" else starts.root_mean_square(alone, values)
            found.append((left, spread * math.sqrt(size) * g, right, std))
        return tuple(torch.cat(factors) for factors in zip(*found, strict=True))

    def family(self, size: int) -> Diagonal:
        """q(g) of the blocks of one size."""
        return self.g[str(size)]  # type: ignore[return-value]

    def prior_std(self, size: int, prior: PriorDraw) -> Tensor:
        """Standard deviation of p(g) for each block of a group, [K, 1] or [S, K, 1]."""
        parts, like = self.groups[size], self.left[str(size)]
        stds = [prior.std[part.weight.name] for part in parts for _ in range(part.blocks.count)]
        if not any(isinstance(std, Tensor) for std in stds):
            key = ("prior", size, tuple(stds), like.dtype, like.device)
            scales = [float(std) * math.sqrt(size) for std in stds]
            return self.results.constant(
                self, key, lambda: torch.cat([like.new_full((1, 1), scale) for scale in scales])
            )
        columns = [torch.as_tensor(std, dtype=like.dtype, device=like.device) for std in stds]
        return math.sqrt(size) * torch.stack(torch.broadcast_tensors(*columns), dim=-1).unsqueeze(-1)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """Draw the vectors g, one for each block. One call draws all noise. Weights of large linear layers are returned as their
        factors; other weights are materialized."""
        weights: MutableMapping[str, Tensor] = {}
        kl: Any = 0.0
        if self.vectors is not None:
            weights, kl = self.vectors.draw(request)
        if self.groups:
            drawn, g_kl = self._draw_g(request)
            kl = kl + g_kl
            for size, g in zip(self.groups, drawn, strict=True):
                self._hand_out(size, g, request, weights)
        return self._around_base(weights), kl

    def _around_base(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights, sorted in the order of `sizes()`. With `init="residual"`, the network's own weights are added to W."""
        base = dict(self.base.items())
        return {name: weights[name] + base[name] if name in base else weights[name] for name in self.sizes()}

    def _draw_g(self, request: DrawRequest) -> tuple[list[Tensor], Tensor]:
        """Draws of g for every group, [S, K, D] each; and the KL of all groups together, which is a scalar or [S]."""
        families = [self.family(size) for size in self.groups]
        shapes = [family.mean_value.shape for family in families]
        flat = request.normals([shape.numel() for shape in shapes], families[0].mean_value)
        noise = [eps.view(request.num_draws, *shape) for eps, shape in zip(flat, shapes, strict=True)]
        stds = [self.prior_std(size, request.prior) for size in self.groups]
        if self.covariance == "diagonal" and all(std.ndim == 2 for std in stds):
            # Compute the KL in units of p(g), as one autograd node.
            means = [family.mean_value / std for family, std in zip(families, stds, strict=True)]
            logs = [family.log_std - std.log() for family, std in zip(families, stds, strict=True)]
            units, kl = draw_diagonals(means, logs, noise, [1.0] * len(stds))
            return [unit * std for unit, std in zip(units, stds, strict=True)], kl
        parts = [family.draw(eps, std) for family, eps, std in zip(families, noise, stds, strict=True)]
        return [g for g, _ in parts], sum((kl for _, kl in parts[1:]), parts[0][1])

    def _hand_out(self, size: int, g: Tensor, request: DrawRequest, into: MutableMapping[str, Tensor]) -> None:
        """Make the weights of a group from draws of g, [S, K, D], and put them into `into`."""
        left, right = self.left[str(size)], self.right[str(size)]
        local = request.local and self.local_reparameterization
        materialized: list[_Part] = []
        for part in self.groups[size]:
            chosen = slice(part.start, part.stop)
            if local and part.linear and part.weight.name not in self.materialized:
                family = self.family(size)
                factors = (left, family.mean_value, family.log_std.exp(), family.lower(), right)
                pieces = [repeat_draws(factor[chosen], request.num_draws) for factor in factors]
                static = (part.blocks, request.noise, part.weight.name)
                into[part.weight.name] = LocalWalshHadamardWeight.from_components(pieces, static)
            elif part.fast and not _forms_all(request, g):
                sides = [repeat_draws(side[chosen], request.num_draws) for side in (left, right)]
                into[part.weight.name] = WalshHadamardWeight(sides[0], g[:, chosen], sides[1], part.blocks)
            else:
                materialized.append(part)
        if materialized:
            self._materialize(materialized, dyadic_values(g), left, right, into)

    def _materialize(
        self, parts: list[_Part], c: Tensor, left: Tensor, right: Tensor, into: MutableMapping[str, Tensor]
    ) -> None:
        """Materialize weights from the D distinct numbers of each block, [..., K, D], which are draws, means or variances of $c =
        D^{-1/2} H g$. If the whole group is materialized, one call makes all its weights."""
        whole = parts[-1].stop - parts[0].start == sum(part.blocks.count for part in parts)
        for batch in [parts] if whole else [[part] for part in parts]:
            chosen = slice(batch[0].start, batch[-1].stop)
            blocks = dyadic(c[..., chosen, :]) * left[chosen].unsqueeze(-1) * right[chosen].unsqueeze(-2)
            pieces = blocks.split([part.blocks.count for part in batch], dim=-3)
            for part, piece in zip(batch, pieces, strict=True):
                into[part.weight.name] = part.weight.from_matrix(part.blocks.assemble(piece))

    # -- bound and moments -----------------------------------------------------------------------------------------

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL of all g, and of the biases and other vectors, in nats. For a flow, the KL is estimated from fixed draws."""
        total: Any = self.vectors.kl(prior) if self.vectors is not None else 0.0
        for size in self.groups:
            total = total + self.family(size).kl(self.prior_std(size, prior))
        return torch.as_tensor(total)

    def mean(self) -> dict[str, Tensor]:
        """E[W] = S_1 H diag(E[g]) H S_2. For a flow, the mean is estimated from fixed draws."""
        return self._moments("mean")

    def variance(self) -> dict[str, Tensor]:
        r"""$s_{1i}^2 s_{2j}^2 \operatorname{Var}(c_{i \oplus j})$ in closed form.

        For a flow, the variance is estimated from fixed draws.
        """
        return self._moments("variance")

    def _moments(self, which: Literal["mean", "variance"]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = getattr(self.vectors, which)() if self.vectors is not None else {}
        for size, parts in self.groups.items():
            family, left, right = self.family(size), self.left[str(size)], self.right[str(size)]
            if which == "mean":
                self._materialize(parts, dyadic_values(family.mean()), left, right, found)
            else:
                self._materialize(parts, family.reached_variance() / size, left.square(), right.square(), found)
        return self._around_base(found) if which == "mean" else {name: found[name] for name in self.sizes()}

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set q(g) to p(g), and replace the entries of S_1 and S_2 by their signs. Each entry of W then has the prior's
        mean and variance."""
        if len(self.base):
            raise ValueError(
                "WalshHadamard: q cannot be set to the prior with init='residual', because q is then centered on the "
                "network's weights; use init='network'"
            )
        fixed_stds(self, prior)
        if self.vectors is not None:
            self.vectors.set_to_prior(prior)
        for size in self.groups:
            self.family(size).set_to_prior(self.prior_std(size, prior))
            for side in (self.left[str(size)], self.right[str(size)]):
                side.copy_(torch.where(side < 0, -1.0, 1.0))

    def count_by_weight(self) -> dict[str, int | None]:
        """Number of trainable scalars by weight name."""
        counts = self.vectors.count_by_weight() if self.vectors is not None else {}
        for size, parts in self.groups.items():
            family = [*self.g[str(size)].parameters(), self.left[str(size)], self.right[str(size)]]
            each = sum(parameter.numel() // parameter.shape[0] for parameter in family if parameter.requires_grad)
            counts |= {part.weight.name: each * part.blocks.count for part in parts}
        return {name: counts[name] for name in self.sizes()}


def _forms_all(request: DrawRequest, g: Tensor) -> bool:
    """Whether a draw materializes all blocks of the same size at once. This is the case on a GPU with autocast, for blocks up to
    size `MAX_SIZE_TO_FORM`."""
    return request.autocast is not None and g.is_cuda and g.shape[-1] <= MAX_SIZE_TO_FORM


def _is_matrix(weight: Weight) -> bool:
    return len(weight.shape) >= 2
