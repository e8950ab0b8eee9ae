"""Inducing weights: a posterior smaller than the network."""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, NonNegative, Positive, checked
from bayesify.maths.constraints import raw_positive
from bayesify.maths.matheron import Factors, conditional_draw, conditional_mean, factorize
from bayesify.maths.value_checks import transforming
from bayesify.posteriors.common import starts
from bayesify.posteriors.common.base import DrawRequest, Posterior
from bayesify.posteriors.inducing_weights.augmentation import (
    FAMILIES,
    Augmentation,
    InducingMatrix,
    network_start,
    random_start,
)
from bayesify.posteriors.inducing_weights.noise import NoiseShapes, draw_by_kernels, kernels_draw
from bayesify.priors import PriorDraw
from bayesify.weights.catalog import Layer


def _layers(block: list[tuple[Layer, ...]]) -> Iterator[Layer]:
    return chain.from_iterable(block)


class InducingWeights(Posterior):
    r"""A posterior in which a small matrix U of inducing weights determines the distribution of each layer's weights (Ritter et
    al. 2021; FFG-U, FCG-U, Ensemble-U).

    The prior $p(W) = \mathcal{N}(0, \sigma^2 I)$ over a layer's `[W b]` is augmented with a matrix U of size `rows x cols`. This
    does not change the marginal prior of W (eq. 5). Given U, W has the prior's conditional distribution up to a scale, $q(W | U)
    = \mathcal{N}(\mu_{W|U}, \lambda^2 \Sigma_{W|U})$ (eq. 7), and the posterior learns q(U). Draws come from the extended
    Matheron rule (eq. 11, see `maths.matheron`). Layers of equal size are drawn together. The KL of the joint over (W, U) has a
    closed form (eq. 9):

    $$ \mathrm{KL} = \sum_l R(\lambda_l) + \mathrm{KL}(q(U_l) \| p(U_l)), \qquad
       R(\lambda) = d_{out} d_{in} (\tfrac12 \lambda^2 - \log \lambda - \tfrac12) $$

    For a diagonal q(U), a layer stores `rows d_out + cols d_in + rows + cols + 1 + 2 rows cols` numbers, where d_in counts
    the bias. For an ensemble the last term is `members rows cols`. If `fit_to_layer` is false, U keeps its full size in
    layers that are smaller than U.

    Stored parameters, each with a leading axis over layers of equal size: `z_row`, `z_col`, `raw_d_row`, `raw_d_col`
    (softplus), `raw_lambda` (softplus, or a scaled sigmoid if `max_lambda` is given), and the parameters of q(U).

    Args:
        rows: Number of rows of U, which belong to the layer's outputs.
        cols: Number of columns of U, which belong to the layer's inputs.
        q: Family of q(U): `"diagonal"`, `"matrix"` (matrix normal), `"full"`, or `"ensemble"` (whose KL is left out).
        members: Number of members of an ensemble.
        max_lambda: Upper bound on $\lambda$. If this bound is 0, W given U is a point estimate, and the KL has no term R.
        max_std: Upper bound on the standard deviations of a diagonal q(U). If this bound is 0, U is a point estimate, and $-\log
            p(U)$ replaces the KL of U.
        whiten: Whether to store U so that its prior is standard normal (appendix H).
        init: How the initial values of Z and U are chosen. With `"network"`, the mean of W given U starts at the best
            approximation of rank `min(rows, cols)` to the network's `[W b]`. With `"random"`, the start follows appendix J. The
            default is `"network"`; with `shared`, it is `"random"`.
        fit_to_layer: Whether to reduce `rows` and `cols` to the size of a layer that is smaller than U. The default is true; with
            `shared`, it is false. The paper does not reduce `rows` and `cols`.
        function_space_kl: Whether to weight R by $\beta_l = \min(1, N / d_{in})$ (eq. 45), where N is the `num_data` given to
            `elbo`.
        shared: Sizes (rows, cols) of one global inducing matrix on which the U of every layer depends. This matrix
            correlates the layers (appendix H). The option requires `whiten=True` and the same number of columns of U in every
            layer.
        init_std: Standard deviation of U's stored entries before training, in units of the prior's standard deviation. By
            default, the noise of U and the noise of W given U are chosen so that W starts with a standard deviation of a tenth of
            the root mean square of the layer's weights, or less in layers before a BatchNorm layer.
        init_lambda: Value of $\lambda$ before training, at most half of `max_lambda`. For the default see `init_std`.
        balanced: Whether kernels may have a balanced matrix. The paper's matrix of a kernel `(c_out, c_in, k_1, k_2)` is `c_out x
            c_in k_1 k_2`, and the balanced matrix is `c_out k_1 x c_in k_2`. Each kernel has the one of the two for which
            Z, D and q(U) have fewer numbers. With the same U, a balanced matrix usually approximates a trained kernel worse, so U
            should be larger. A convolution with a bias has the paper's matrix, unless the bias has another posterior. A 1-d
            convolution has it, too. On a GPU, balanced matrices are drawn by fast kernels only if the network has the memory
            format `torch.channels_last`.

    Raises:
        ValueError: If a size is below 1, if an upper bound is negative, if a name is unknown, if `shared` contradicts another
            argument, or if `balanced` and `function_space_kl` are both true.
    """

    name = "inducing"
    title, paper = "Inducing weights", "Ritter et al. 2021"
    cost = "M (d_out + d_in) + 2 M^2 per layer"
    aliases = ("inducing_weights", "ffg-u")
    prior_means = False
    correlated_priors = True

    @checked
    def __init__(
        self,
        rows: Count = 64,
        cols: Count = 64,
        q: Literal["diagonal", "matrix", "full", "ensemble"] = "diagonal",
        members: Count = 5,
        max_lambda: NonNegative | None = None,
        max_std: NonNegative | None = None,
        whiten: bool = True,
        init: Literal["random", "network"] | None = None,
        fit_to_layer: bool | None = None,
        function_space_kl: bool = False,
        shared: tuple[Count, Count] | None = None,
        init_std: Positive | None = None,
        init_lambda: Positive | None = None,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        if max_std is not None and q != "diagonal":
            raise ValueError(
                f"InducingWeights: max_std= applies only to q='diagonal', not to q={q!r}; leave max_std= out"
            )
        if balanced and function_space_kl:
            raise ValueError(
                "InducingWeights: function_space_kl= needs matrices with one column per input, but balanced=True changes "
                "them; use balanced=False"
            )
        if shared is not None:
            if len(shared) != 2:
                raise ValueError(f"InducingWeights: shared={shared} is not a pair of sizes; give (rows, cols)")
            if not whiten:
                raise ValueError("InducingWeights: shared= does not work with whiten=False; use whiten=True")
            if fit_to_layer:
                raise ValueError(
                    "InducingWeights: shared= needs the same number of columns in every layer, but fit_to_layer=True "
                    "changes it; use fit_to_layer=False"
                )
            if init == "network":
                raise ValueError("InducingWeights: shared= does not work with init='network'; use init='random'")
        self.rows, self.cols, self.q, self.members = rows, cols, q, members
        self.max_lambda, self.max_std, self.whiten = max_lambda, max_std, whiten
        self.init = init or ("network" if shared is None else "random")
        self.fit_to_layer, self.function_space_kl = fit_to_layer, function_space_kl
        self.shared = None if shared is None else (int(shared[0]), int(shared[1]))
        self.init_std, self.init_lambda, self.balanced = init_std, init_lambda, balanced
        self.shares_statistics = self.starts_at_network = self.init == "network"
        self.num_members = members if q == "ensemble" else 1
        self.capturable = q != "ensemble" and not function_space_kl

    # -- making ----------------------------------------------------------------------------------------------------

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Make the parameters. A block contains the layers whose U has the same size. Within a block, a group contains the layers
        of the same size."""
        if self.balanced:
            self.layers = tuple(map(self._balanced, self.layers))
        blocks: dict[tuple[int, int], dict[tuple[int, int], list[Layer]]] = {}
        for layer in self.layers:
            groups = blocks.setdefault(self._inducing_size(layer), {})
            groups.setdefault((layer.rows, layer.cols), []).append(layer)
        self.blocks = [[tuple(group) for group in groups.values()] for groups in blocks.values()]
        self.augmentations = nn.ModuleList()
        self.inducing = nn.ModuleList()
        for block in self.blocks:
            begun: list[list[Tensor]] = []
            for group in block:
                parts = zip(*(self._start(layer, values) for layer in group), strict=True)
                begun.append([torch.stack(part) for part in parts])
            z_row, z_col, means = map(list, zip(*begun, strict=True))
            spreads = [self._spread_start(layer, values) for layer in _layers(block)]
            self.augmentations.append(Augmentation(z_row, z_col, self.max_lambda, self._lambdas(spreads)))
            if self.shared is None:
                self.inducing.append(self._family(torch.cat(means), spreads))
        if self.init_std is None and not self.whiten:
            for family, factors in zip(self._families(), self.factors(), strict=True):
                family.unwhiten(factors)
        if self.shared is not None:
            tall = len(self.layers) * self.rows
            rows, cols, mean = random_start(*self.shared, tall, self.cols, values[self.weights[0].name])
            lambdas = self._lambdas([starts.RELATIVE_STD])
            self.augmentations.append(Augmentation([rows[None]], [cols[None]], self.max_lambda, lambdas))
            self.inducing.append(self._family(mean[None], [starts.RELATIVE_STD]))

    def _balanced(self, layer: Layer) -> Layer:
        """The layer with the balanced matrix of its kernel, if Z, D and q(U) then have fewer numbers."""
        weight, *others = layer.weights
        if others or weight.kind != "matrix" or len(weight.shape) < 4:
            return layer

        def numbers(one: Layer) -> int:
            rows, cols = self._inducing_size(one)
            family = self._family(torch.empty(1, rows, cols, device="meta"), [starts.RELATIVE_STD])
            return rows * (one.rows + 1) + cols * (one.cols + 1) + sum(value.numel() for value in family.parameters())

        return min(layer, Layer(layer.name, (replace(weight, balanced=True),)), key=numbers)

    def _inducing_size(self, layer: Layer) -> tuple[int, int]:
        if self._fits_layers:
            return min(self.rows, layer.rows), min(self.cols, layer.cols)
        return self.rows, self.cols

    @property
    def _fits_layers(self) -> bool:
        return self.shared is None if self.fit_to_layer is None else self.fit_to_layer

    def _spread_start(self, layer: Layer, values: Mapping[str, Tensor]) -> float:
        """Default initial standard deviation of W, in units of the prior's standard deviation."""
        if self.init == "network":
            size = self.relative_std(layer) * starts.root_mean_square(layer, values)
            return size / self._prior().size(layer.weights[0].name)
        m_r, m_c = self._inducing_size(layer)
        return starts.RELATIVE_STD * math.sqrt(min(1.0, m_r / layer.rows) * min(1.0, m_c / layer.cols))

    def _lambdas(self, spreads: list[float]) -> list[float]:
        return spreads if self.init_lambda is None else [self.init_lambda] * len(spreads)

    def _family(self, mean: Tensor, spreads: list[float]) -> InducingMatrix:
        members = starts.RELATIVE_STD if (self.q, self.init) == ("ensemble", "random") else None  # appendix J
        start = self.init_std or members
        stds = spreads if start is None else [start] * len(spreads)
        more: dict[str, Any] = {"diagonal": {"max_std": self.max_std}, "ensemble": {"members": self.members}}
        return FAMILIES[self.q](mean, self.whiten, stds, **more.get(self.q, {}))

    def _start(self, layer: Layer, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Z_r [M_r, d_out], Z_c [M_c, d_in] and the mean of U [M_r, M_c] for one layer."""
        m_r, m_c = self._inducing_size(layer)
        if self.init == "random":
            return random_start(m_r, m_c, layer.rows, layer.cols, values[layer.weights[0].name])
        white = {weight.name: self._prior().whiten(weight.name, values[weight.name]) for weight in layer.weights}
        return network_start(m_r, m_c, layer.to_matrix(white), self.whiten)

    def _augmented(self) -> list[Augmentation]:
        return list(self.augmentations)  # type: ignore[arg-type]

    def _families(self) -> list[InducingMatrix]:
        return list(self.inducing)  # type: ignore[arg-type]

    # -- drawing ---------------------------------------------------------------------------------------------------

    def factors(self, *, stack: bool = False) -> list[Factors]:
        """Factors of every block. If gradients are off, the factors are cached until the parameters change."""
        return self.cached("factors", lambda: factorize([part.augmented() for part in self._augmented()], stack=stack))

    def draw(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor]:
        """Draw all layers by the extended Matheron rule. One call draws the noise of the whole network."""
        families, augmented, draws = self._families(), self._augmented(), request.num_draws
        like, counted = augmented[0].raw_d_row, request.num_data if self.function_space_kl else None
        factors, scales, kl = self.cached(("draw", counted), lambda: self._shared_by_draws(draws, counted))
        kernels = request.noise.by_kernel(like) and self.draws_by_kernels(request)
        seed = request.noise.seed(like.device) if kernels else None
        shapes = NoiseShapes(families, factors if self.max_lambda != 0 else [], self.cols, request, like)
        own, matheron = shapes.draw(request, like, self.blocks, seed)
        chosen = request.choose(self.members, like.device) if self.q == "ensemble" else None
        u = [family.draw(part, chosen) for family, part in zip(families, own, strict=True)]
        if self.shared is not None:
            top = conditional_draw(factors[-1], u[0], scales[-1], like.new_ones(1), matheron[-1])
            u = [self._split_shared(top[0][0])]
        # The factors and the noise of a shared matrix come last and belong to no block.
        whitened = [family.whitened(part, factor) for family, part, factor in zip(families, u, factors, strict=False)]
        sigmas = [self._sigma(block, request.prior, like) for block in self.blocks]
        given = list(zip(factors, whitened, scales, sigmas, matheron, strict=False))
        low = self._low_precision(request, like)
        weights: MutableMapping[str, Tensor]
        if seed is not None:
            weights = draw_by_kernels(self, request, self.blocks, given, shapes, seed, low is not None)
        else:
            weights = {}
            for block, each in zip(self.blocks, given, strict=True):
                groups = conditional_draw(*each, low)
                self._unpack(block, chain.from_iterable(map(Tensor.unbind, groups)), request.prior, weights)
            if request.prior.factor:
                weights = {name: request.prior.color(name, value) for name, value in weights.items()}
        return weights, kl

    def _shared_by_draws(self, draws: int, counted: int | None) -> tuple[list[Factors], list[Tensor | None], Tensor]:
        """The part of a draw that depends on the parameters alone: the factors and lambda of every block, and the KL."""
        alone = draws == 1 and self.shared is None and self.max_lambda != 0
        factors = self.factors(stack=alone and torch.is_grad_enabled() and not transforming())
        return factors, [part.scale() for part in self._augmented()], self._kl(factors, counted)

    def draws_by_kernels(self, request: DrawRequest) -> bool:
        """Whether kernels draw W and generate the noise that has the size of W."""
        return self.shared is None and self.max_lambda != 0 and kernels_draw(self, request, max(self.rows, self.cols))

    def _low_precision(self, request: DrawRequest, like: Tensor) -> torch.dtype | None:
        """A fast dtype that rounds no more than the network does: the dtype of the network's weights or, in training, the dtype
        of autocast."""
        if transforming() or not like.is_cuda or like.dtype != torch.float32:
            return None
        if torch.is_grad_enabled():
            return request.autocast if request.autocast == torch.bfloat16 else None
        kinds = {request.dtype(weight.name) for weight in self.weights}
        return None if len(kinds) > 1 or torch.float32 in kinds else kinds.pop()

    def _split_shared(self, tall: Tensor) -> Tensor:
        """Split one tall matrix into the matrices U of all layers: [S, L M_r, M_c] -> [L, S, M_r, M_c]."""
        found: Tensor = tall.unflatten(-2, (-1, self.rows)).movedim(-3, 0)
        return found

    def _sigma(self, block: list[tuple[Layer, ...]], prior: PriorDraw, like: Tensor) -> Tensor:
        """Prior standard deviation of each layer's first weight, [L] or [L, S]."""
        first = [prior.std[layer.weights[0].name] for layer in _layers(block)]
        if not any(map(torch.is_tensor, first)):
            key = ("sigma", tuple(first), like.device, like.dtype)
            return self.results.constant(self, key, lambda: torch.tensor(first, dtype=like.dtype, device=like.device))
        found = [torch.as_tensor(std, dtype=like.dtype, device=like.device) for std in first]
        return torch.stack(torch.broadcast_tensors(*found))

    @staticmethod
    def _unpack(
        block: list[tuple[Layer, ...]],
        matrices: Iterable[Tensor],
        prior: PriorDraw,
        into: MutableMapping[str, Tensor],
        power: int = 1,
    ) -> None:
        """Split matrices in units of the first weight's prior scale into weights. Weights with another scale are rescaled."""
        for layer, matrix in zip(_layers(block), matrices, strict=True):
            first = prior.std[layer.weights[0].name]
            for index, (name, value) in enumerate(layer.from_matrix(matrix).items()):
                std = prior.std[name]
                if index and std is not first and not (isinstance(std, float) and std == first):
                    ratio = torch.as_tensor(std / first, dtype=value.dtype, device=value.device) ** power
                    value = value * ratio.reshape(ratio.shape + (1,) * (value.ndim - 1))
                into[name] = value

    # -- bound and moments -----------------------------------------------------------------------------------------

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL of the joint over (W, U) in nats; see the class."""
        return self.cached("kl", lambda: self._kl(self.factors(), None))

    def _kl(self, factors: list[Factors], counted: int | None) -> Tensor:
        own = factors if self.shared is None else factors[-1:]
        parts: list[Any] = [family.kl(factor) for family, factor in zip(self._families(), own, strict=True)]
        for index, part in enumerate(self._augmented() if self.max_lambda != 0 else []):
            parts.append(part.conditional_kl(counted if index < len(self.blocks) else None))
        return torch.stack(parts).sum()

    def mean(self) -> dict[str, Tensor]:
        """E[W] = sigma A_r^T E[U] A_c, with the prior's sigma. If the prior draws sigma, the mean of sigma is used."""
        families, factors = self._families(), self.factors()
        means = [family.mean().unsqueeze(1) for family in families]  # of the stored U, [L, 1, M_r, M_c] each
        if self.shared is not None:
            means = [self._split_shared(conditional_mean(factors[-1], means[0])[0][0])]
        result: dict[str, Tensor] = {}
        for block, family, u, factor in zip(self.blocks, families, means, factors, strict=False):
            sigma = self._sigma(block, self._prior(), u)
            groups = conditional_draw(factor, family.whitened(u, factor), None, sigma, ())
            self._unpack(block, [matrix for group in groups for matrix in group[:, 0]], self._prior(), result)
        return {name: self._prior().color(name, value.unsqueeze(0))[0] for name, value in result.items()}

    def variance(self) -> dict[str, Tensor]:
        """Variance of each entry of W under q(W), in closed form. U is integrated out, and so is sigma if the prior
        draws it.

        Raises:
            ValueError: If the prior correlates the positions of a kernel.
        """
        if len(self._prior().factor):
            raise ValueError(
                "InducingWeights: variances have no closed form if the prior correlates the positions of a "
                "kernel; estimate them from draws"
            )
        factors = self.factors()
        result: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            factor, scale = factors[index], self._augmented()[index].scale()
            sigma = self._sigma(block, self._prior(), factor.row_rest)
            rows, cols = ([reach for group in side for reach in group] for side in (factor.row_reach, factor.col_reach))
            spreads = []
            for member, (row, col) in enumerate(zip(rows, cols, strict=True)):
                spread = self._spread(index, factors, row, col, member)
                if scale is not None:
                    kept = torch.outer(row.square().sum(0), col.square().sum(0))
                    spread = spread + scale[member].square() * (1 - kept).clamp_min(0)
                spreads.append(spread * sigma[member].reshape(-1)[0].square())
            self._unpack(block, spreads, self._prior(), result, power=2)
        if len(self._prior().std_variance):
            mean, stds, variances = self.mean(), self._prior().std, self._prior().std_variance
            for name, value in result.items():
                std = torch.as_tensor(stds[name])
                result[name] = value + variances[name] / std.square() * (value + mean[name].square())
        return result

    def inducing_covariance(self) -> dict[str, Tensor]:
        """Covariance of the stored U under q(U), by layer. With `shared`, only the shared matrix is included.

        Returns:
            Matrices [M_r M_c, M_r M_c], with the entries of U in row-major order.

        Raises:
            ValueError: If q is an ensemble, which is a mixture of points.
        """
        if self.shared is not None:
            return {"shared": self._families()[0].covariance()[0]}
        result: dict[str, Tensor] = {}
        for block, family in zip(self.blocks, self._families(), strict=True):
            names = [layer.name for layer in _layers(block)]
            result |= dict(zip(names, family.covariance().unbind(0), strict=True))
        return result

    def _spread(self, block: int, factors: list[Factors], row: Tensor, col: Tensor, member: int) -> Tensor:
        """The part of the variance of W / sigma that comes from U, for one layer, [d_out, d_in]. `row` and `col` map U to W."""
        if self.shared is None:
            if not self.whiten:
                row = torch.linalg.solve_triangular(factors[block].row_tril[member].mT, row, upper=True)
                col = torch.linalg.solve_triangular(factors[block].col_tril[member].mT, col, upper=True)
            return self._families()[block].reached_variance(row, col, member)
        top, scale = factors[-1], self._augmented()[-1].scale()
        above_row = top.row_reach[0][0][:, member * self.rows : (member + 1) * self.rows] @ row
        above_col = top.col_reach[0][0] @ col
        spread = self._families()[0].reached_variance(above_row, above_col, 0)
        if scale is not None:
            whole = torch.outer(row.square().sum(0), col.square().sum(0))
            known = torch.outer(above_row.square().sum(0), above_col.square().sum(0))
            spread = spread + scale.square() * (whole - known).clamp_min(0)
        return spread

    def _prior(self) -> PriorDraw:
        if self.bound_prior is None:
            raise ValueError(
                "InducingWeights: this posterior has no prior, but the scale of W depends on the prior; call bayesianize "
                "to set a prior"
            )
        return self.bound_prior

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set lambda to 1 and q(U) to p(U)."""
        if self.max_lambda is not None and self.max_lambda <= 1:
            raise ValueError(
                "InducingWeights: q cannot be set to the prior, because lambda would have to be 1, but "
                f"max_lambda={self.max_lambda} keeps lambda below 1; give max_lambda= a larger value"
            )
        factors = self.factors()
        for family, factor in zip(self._families(), factors if self.shared is None else factors[-1:], strict=True):
            family.set_to_prior(factor)
        for part in self._augmented():
            assert part.raw_lambda is not None
            part.raw_lambda.fill_(raw_positive(1.0, self.max_lambda))

    def prune(self, keep: float) -> None:
        """Keep the entries of Z with the largest absolute values. Every layer keeps the same fraction."""
        for part in self._augmented()[: len(self.blocks)]:
            part.prune(keep)

    def count_by_weight(self) -> dict[str, int | None]:
        """Number of trainable scalars of each layer, by the name of the layer's first weight. Parameters that all layers share
        are left out."""
        counts: dict[str, int | None] = {}
        for index, block in enumerate(self.blocks):
            part, layers = self._augmented()[index], sum(map(len, block))
            small = [part.raw_d_row, part.raw_d_col, *([part.raw_lambda] if part.raw_lambda is not None else [])]
            small += list(self._families()[index].parameters()) if self.shared is None else []
            each = sum(parameter.numel() for parameter in small) // layers
            for group, rows, cols in zip(block, part.z_row.values(), part.z_col.values(), strict=True):
                for layer in group:
                    counts |= {weight.name: None for weight in layer.weights}
                    counts[layer.weights[0].name] = each + (rows.numel() + cols.numel()) // len(group)
        return counts

    def remarks(self) -> dict[str, str]:
        """A remark for each layer that is smaller than U: the number of parameters that `fit_to_layer=True` would save."""
        result: dict[str, str] = {}
        for layer in self.layers:
            rows, cols = min(self.rows, layer.rows), min(self.cols, layer.cols)
            if self._fits_layers or self.shared is not None or (rows, cols) == (self.rows, self.cols):
                continue
            numbers = self.members if self.q == "ensemble" else 2
            saved = (self.rows - rows) * (layer.rows + 1) + (self.cols - cols) * (layer.cols + 1)
            saved += numbers * (self.rows * self.cols - rows * cols) if self.q in ("diagonal", "ensemble") else 0
            more = "" if self.q in ("diagonal", "ensemble") else " and more in q(U)"
            result[layer.weights[0].name] = f"smaller than U: fit_to_layer=True would save {saved:,} parameters{more}"
        return result
