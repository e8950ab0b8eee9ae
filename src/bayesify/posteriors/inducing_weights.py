"""Inducing weights: a posterior smaller than the network."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive
from bayesify.maths.matheron import Factors, conditional_draw, conditional_mean, factorize, noise_shapes
from bayesify.posteriors.base import DrawRequest, Posterior, check_count
from bayesify.posteriors.inducing_matrix import FAMILIES, InducingMatrix, gathered, make_inducing_matrix
from bayesify.posteriors.mixture import choose_members
from bayesify.priors import PriorDraw
from bayesify.weights import Layer

INIT_D = 1e-3
INIT_LAMBDA = 1e-4
INIT_STD = 1e-3

_CACHE: weakref.WeakKeyDictionary[InducingWeights, tuple[Any, list[Factors]]] = weakref.WeakKeyDictionary()


class Augmentation(nn.Module):
    r"""G matrices of one size, each augmented with an inducing matrix: the parameters $Z_r, Z_c, D_r, D_c, \lambda$.

    Args:
        z_row: Starting $Z_r$, [G, M_r, d_out].
        z_col: Starting $Z_c$, [G, M_c, d_in].
        max_lambda: Cap on $\lambda$; 0 makes W given U a point estimate, without a parameter.
    """

    def __init__(self, z_row: Tensor, z_col: Tensor, max_lambda: float | None) -> None:
        super().__init__()
        self.max_lambda = max_lambda
        self.z_row = nn.Parameter(z_row)
        self.z_col = nn.Parameter(z_col)
        raw = raw_positive(INIT_D)
        self.raw_d_row = nn.Parameter(z_row.new_full(z_row.shape[:2], raw))
        self.raw_d_col = nn.Parameter(z_col.new_full(z_col.shape[:2], raw))
        self.raw_lambda: nn.Parameter | None = None
        if max_lambda != 0:
            start = INIT_LAMBDA if max_lambda is None else min(INIT_LAMBDA, 0.5 * max_lambda)
            self.raw_lambda = nn.Parameter(z_row.new_full(z_row.shape[:1], raw_positive(start, max_lambda)))

    def scale(self) -> Tensor | None:
        r"""$\lambda$ of each matrix, [G], or `None` for 0."""
        return None if self.raw_lambda is None else positive(self.raw_lambda, self.max_lambda)

    def sides(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `factorize` takes."""
        return self.z_row, self.z_col, positive(self.raw_d_row), positive(self.raw_d_col)

    def conditional_kl(self, betas: Tensor | float = 1.0) -> Tensor | float:
        r"""$\sum_g \beta_g R(\lambda_g)$ with R as in eq. 8; left out, 0, where $\lambda$ is."""
        scale = self.scale()
        if scale is None:
            return 0.0
        size = self.z_row.shape[-1] * self.z_col.shape[-1]
        return (betas * (0.5 * scale.square() - scale.log() - 0.5)).sum() * size


class InducingWeights(Posterior):
    r"""Each layer's weights given a small matrix of inducing weights U (Ritter et al. 2021; FFG-U, FCG-U, Ensemble-U).

    The prior $p(W) = \mathcal{N}(0, \sigma^2 I)$ over a layer's `[W b]` is augmented with U of `rows x cols`
    without changing its marginal (eq. 5). The posterior keeps the prior's conditional up to a scale,
    $q(W | U) = \mathcal{N}(\mu_{W|U}, \lambda^2 \Sigma_{W|U})$ (eq. 7), and puts its parameters into q(U). Draws
    come from the extended Matheron rule (eq. 11, see `maths.matheron`); layers of equal size are drawn together.
    The KL is that of the joint over (W, U), closed form (eq. 9):

    $$ \mathrm{KL} = \sum_l R(\lambda_l) + \mathrm{KL}(q(U_l) \| p(U_l)), \qquad
       R(\lambda) = d_{out} d_{in} (\tfrac12 \lambda^2 - \log \lambda - \tfrac12) $$

    A layer stores `rows d_out + cols d_in + rows + cols + 1 + 2 rows cols` numbers for a diagonal q(U), its bias
    counted in d_in, and `members rows cols` in place of the last term for an ensemble. Layers smaller than U keep
    its full size unless `fit_to_layer`.

    Stored, with a leading axis over layers of equal size: `z_row`, `z_col`, `raw_d_row`, `raw_d_col` (softplus),
    `raw_lambda` (softplus, or a scaled sigmoid under a cap), and the parameters of q(U).

    Args:
        rows: Rows of U, the outputs' side.
        cols: Columns of U, the inputs' side.
        q: Family of q(U): `"diagonal"`, `"matrix"` (matrix normal), `"full"`, or `"ensemble"` (its KL is left out).
        members: Members of an ensemble.
        max_lambda: Cap on $\lambda$. 0 makes W given U a point estimate; R is left out then.
        max_std: Cap on the standard deviations of a diagonal q(U). 0 makes U a point estimate, with $-\log p(U)$
            for its KL.
        whiten: Store U so that its prior is standard normal (appendix H).
        init: `"random"` (appendix J), or `"network"`: the conditional mean starts at the best approximation of the
            network's `[W b]` of rank `min(rows, cols)`.
        fit_to_layer: Cut rows and cols to the layer's own size.
        function_space_kl: Weight R by $\beta_l = \min(1, N / d_{in})$ (eq. 45), N the `num_data` given to `elbo`.
        shared: Sizes of one global inducing matrix that all layers' U depend on, which correlates layers (appendix
            H); needs `whiten` and equal columns in every layer.

    Raises:
        ValueError: If a size is below 1, a cap is negative, a name is unknown, or `shared` does not fit.
    """

    name = "inducing"

    def __init__(
        self,
        rows: int = 64,
        cols: int = 64,
        q: Literal["diagonal", "matrix", "full", "ensemble"] = "diagonal",
        members: int = 5,
        max_lambda: float | None = None,
        max_std: float | None = None,
        whiten: bool = True,
        init: Literal["random", "network"] = "random",
        fit_to_layer: bool = False,
        function_space_kl: bool = False,
        shared: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        check_count("InducingWeights", rows=rows, cols=cols, members=members)
        for key, cap in (("max_lambda", max_lambda), ("max_std", max_std)):
            if cap is not None and not (cap >= 0 and math.isfinite(cap)):
                raise ValueError(f"InducingWeights: {key}={cap}; give a number of at least 0, or None for no cap")
        if q not in FAMILIES:
            raise ValueError(f"InducingWeights: q={q!r}; give one of {', '.join(FAMILIES)}")
        if max_std is not None and q != "diagonal":
            raise ValueError(f"InducingWeights: max_std caps a diagonal q(U), not q={q!r}; leave it out")
        if init not in ("random", "network"):
            raise ValueError(f"InducingWeights: init={init!r}; give 'random' or 'network'")
        if shared is not None:
            if len(shared) != 2:
                raise ValueError(f"InducingWeights: shared={shared}; give two sizes, (rows, cols)")
            check_count("InducingWeights", shared_rows=shared[0], shared_cols=shared[1])
            if not whiten:
                raise ValueError("InducingWeights: shared inducing weights need whiten=True")
            if fit_to_layer:
                raise ValueError("InducingWeights: shared needs the same cols in every layer; use fit_to_layer=False")
            if init == "network":
                raise ValueError("InducingWeights: shared starts at random; use init='random'")
        self.rows, self.cols, self.q, self.members = rows, cols, q, members
        self.max_lambda, self.max_std, self.whiten, self.init = max_lambda, max_std, whiten, init
        self.fit_to_layer, self.function_space_kl = fit_to_layer, function_space_kl
        self.shared = None if shared is None else (int(shared[0]), int(shared[1]))
        self.training_draws = 1

    # -- making ----------------------------------------------------------------------------------------------------

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Group layers of equal size and start their parameters."""
        grouped: dict[tuple[int, int], list[Layer]] = {}
        for layer in self.layers:
            grouped.setdefault((layer.rows, layer.cols), []).append(layer)
        self.groups: list[tuple[Layer, ...]] = [tuple(layers) for layers in grouped.values()]
        self.augmentations = nn.ModuleList()
        self.inducing = nn.ModuleList()
        for layers in self.groups:
            starts = [self._start(layer, layer.to_matrix(values)) for layer in layers]
            z_row, z_col, mean = (torch.stack(part) for part in zip(*starts, strict=True))
            self.augmentations.append(Augmentation(z_row, z_col, self.max_lambda))
            if self.shared is None:
                self.inducing.append(self._family(mean))
        if self.shared is not None:
            like = values[self.weights[0].name]
            total = sum(len(layers) for layers in self.groups) * self.rows
            z_row, z_col, mean = _random_start(*self.shared, total, self.cols, like)
            self.augmentations.append(Augmentation(z_row[None], z_col[None], self.max_lambda))
            self.inducing.append(self._family(mean[None]))

    def _family(self, mean: Tensor) -> InducingMatrix:
        return make_inducing_matrix(
            self.q, mean, whiten=self.whiten, init_std=INIT_STD, max_std=self.max_std, members=self.members
        )

    def _start(self, layer: Layer, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Z_r [M_r, d_out], Z_c [M_c, d_in] and the mean of U [M_r, M_c] for one layer."""
        d_out, d_in = matrix.shape
        m_r, m_c = (min(self.rows, d_out), min(self.cols, d_in)) if self.fit_to_layer else (self.rows, self.cols)
        if self.init == "random":
            return _random_start(m_r, m_c, d_out, d_in, matrix)
        sigma = self._sigma((layer,), self._prior(), matrix)
        if sigma.shape[1] != 1:
            raise ValueError(
                "InducingWeights: init='network' needs a fixed prior, such as Neal(); this one draws its scale"
            )
        return _network_start(m_r, m_c, matrix / sigma[0, 0], self.whiten)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _augmented(self) -> list[Augmentation]:
        return list(self.augmentations)  # type: ignore[arg-type]

    def _families(self) -> list[InducingMatrix]:
        return list(self.inducing)  # type: ignore[arg-type]

    def factors(self) -> list[Factors]:
        """Factors of every group, computed once per state of the parameters where no gradient is needed."""
        if torch.is_grad_enabled():
            return factorize([part.sides() for part in self._augmented()])
        state = tuple((id(value), value._version, value.data_ptr()) for value in self.augmentations.parameters())
        known = _CACHE.get(self)
        if known is None or known[0] != state:
            known = (state, factorize([part.sides() for part in self._augmented()]))
            _CACHE[self] = known
        return known[1]

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """All layers by the extended Matheron rule, with the noise of the whole network in one call."""
        factors = self.factors()
        augmented, families, draws = self._augmented(), self._families(), request.num_draws
        shapes: list[tuple[int, ...]] = []
        for family in families:
            shapes.append((family.count, draws, *family.noise_shape()))
        for part, factor in zip(augmented, factors, strict=True):
            shapes += noise_shapes(factor, draws) if part.raw_lambda is not None else []
        like = augmented[0].z_row
        flat = request.normals([math.prod(shape) // draws for shape in shapes], like)
        noise = iter(
            gathered(part, shape[0], shape[2:], request.antithetic) for part, shape in zip(flat, shapes, strict=True)
        )
        chosen = choose_members(self.members, draws, request.generator, like.device) if self.q == "ensemble" else None
        u = [family.draw(next(noise), chosen) for family in families]
        matheron = {
            index: [next(noise) for _ in range(3)] if part.raw_lambda is not None else []
            for index, part in enumerate(augmented)
        }
        if self.shared is not None:
            stacked = conditional_draw(factors[-1], u[0], augmented[-1].scale(), matheron[len(augmented) - 1])
            u = self._unstack(stacked[0])
        weights: dict[str, Tensor] = {}
        for index, layers in enumerate(self.groups):
            whitened = families[index].whitened(u[index], factors[index]) if self.shared is None else u[index]
            matrices = conditional_draw(factors[index], whitened, augmented[index].scale(), matheron[index])
            self._unpack(layers, self._scaled(layers, matrices, request.prior), weights)
        return weights, self._kl(request.prior, factors, request.num_data)

    def _unstack(self, stacked: Tensor) -> list[Tensor]:
        """All layers' U out of one tall matrix: [S, L M_r, M_c] -> [G, S, M_r, M_c] for each group."""
        split = stacked.unflatten(-2, (-1, self.rows)).movedim(-3, 0)  # [L, S, M_r, M_c]
        return list(split.split([len(layers) for layers in self.groups]))

    def _sigma(self, layers: tuple[Layer, ...], prior: PriorDraw, like: Tensor) -> Tensor:
        """Prior standard deviation of each column: [G, 1 or S, 1, 1 or cols]."""
        rows = []
        for layer in layers:
            stds = [
                torch.as_tensor(prior.std[weight.name], dtype=like.dtype, device=like.device)
                for weight in layer.weights
            ]
            if all(std.ndim == 0 and bool(std == stds[0]) for std in stds):
                rows.append(stds[0].view(1, 1, 1))
                continue
            columns = [
                std.reshape(-1, 1, 1).expand(-1, 1, weight.matrix_shape[1])
                for std, weight in zip(stds, layer.weights, strict=True)
            ]
            draws = max(column.shape[0] for column in columns)
            rows.append(torch.cat([column.expand(draws, -1, -1) for column in columns], dim=-1))
        return torch.stack([row.expand(torch.broadcast_shapes(*(row.shape for row in rows))) for row in rows])

    def _scaled(self, layers: tuple[Layer, ...], matrices: Tensor, prior: PriorDraw) -> Tensor:
        sigma = self._sigma(layers, prior, matrices)
        return matrices * sigma if torch.is_grad_enabled() else matrices.mul_(sigma)

    @staticmethod
    def _unpack(layers: tuple[Layer, ...], matrices: Tensor, into: dict[str, Tensor]) -> None:
        for layer, matrix in zip(layers, matrices.unbind(0), strict=True):
            into.update(layer.from_matrix(matrix))

    # -- bound and moments -----------------------------------------------------------------------------------------

    def kl(self, prior: PriorDraw) -> Tensor:
        """KL of the joint over (W, U) in nats; see the class."""
        return self._kl(prior, self.factors(), None)

    def _kl(self, prior: PriorDraw, factors: list[Factors], num_data: int | None) -> Tensor:
        total: Any = 0.0
        for family, factor in zip(self._families(), factors if self.shared is None else factors[-1:], strict=True):
            total = total + family.kl(factor)
        for part in self._augmented():
            beta = 1.0
            if self.function_space_kl and num_data is not None:
                beta = min(1.0, num_data / part.z_col.shape[-1])
            total = total + part.conditional_kl(beta)
        return torch.as_tensor(total)

    def _mean_u(self, factors: list[Factors]) -> list[Tensor]:
        """Whitened E[U] of every group, [G, 1, M_r, M_c]."""
        families = self._families()
        if self.shared is not None:
            return self._unstack(conditional_mean(factors[-1], families[0].mean().unsqueeze(1))[0])
        return [
            family.whitened(family.mean().unsqueeze(1), factor)
            for family, factor in zip(families, factors, strict=True)
        ]

    def mean(self) -> dict[str, Tensor]:
        """E[W] = sigma A_r^T E[U] A_c, with sigma of the prior given to `bayesianize`."""
        factors = self.factors()
        result: dict[str, Tensor] = {}
        for layers, u, factor in zip(self.groups, self._mean_u(factors), factors, strict=False):
            matrices = conditional_mean(factor, u) * self._sigma(layers, self._prior(), u)
            self._unpack(layers, matrices[:, 0], result)
        return result

    def variance(self) -> dict[str, Tensor]:
        """Variance of each entry of W under q(W), U integrated out, in closed form."""
        factors = self.factors()
        spread_u = self._shared_variance(factors) if self.shared is not None else None
        result: dict[str, Tensor] = {}
        for index, (layers, part) in enumerate(zip(self.groups, self._augmented(), strict=False)):
            factor = factors[index]
            if spread_u is not None:
                spread = spread_u[index]
            else:
                family = self._families()[index]
                row, col = factor.row_reach, factor.col_reach
                if not self.whiten:
                    row = torch.linalg.solve_triangular(factor.row_tril.mT, row, upper=True)
                    col = torch.linalg.solve_triangular(factor.col_tril.mT, col, upper=True)
                spread = family.reached_variance(row, col)
            scale = part.scale()
            if scale is not None:
                kept = factor.row_reach.square().sum(-2).unsqueeze(-1) * factor.col_reach.square().sum(-2).unsqueeze(-2)
                spread = spread + scale.square()[:, None, None] * (1 - kept).clamp_min(0)
            sigma = self._sigma(layers, self._prior(), spread)
            self._unpack(layers, (spread.unsqueeze(1) * sigma.square())[:, 0], result)
        return result

    def _shared_variance(self, factors: list[Factors]) -> list[Tensor]:
        """Variance that the layers' U pass on to W where they depend on one global matrix."""
        top, family, scale = factors[-1], self._families()[0], self._augmented()[-1].scale()
        result, start = [], 0
        for layers, factor in zip(self.groups, factors, strict=False):
            parts = []
            for index in range(len(layers)):
                reach = top.row_reach[:, :, start : start + self.rows]  # [1, R, M_r]
                row = reach @ factor.row_reach[index]  # [1, R, d_out]
                col = top.col_reach @ factor.col_reach[index]  # [1, C, d_in]
                spread = family.reached_variance(row, col)
                if scale is not None:
                    whole = factor.row_reach[index].square().sum(0)[:, None] * factor.col_reach[index].square().sum(0)
                    known = row.square().sum(-2)[0][:, None] * col.square().sum(-2)[0]
                    spread = spread + scale.square() * (whole - known).clamp_min(0)
                parts.append(spread[0])
                start += self.rows
            result.append(torch.stack(parts))
        return result

    def _prior(self) -> PriorDraw:
        if self.bound_prior is None:
            raise ValueError(
                "InducingWeights: W's scale is the prior's; make the posterior by bayesianize, which binds one"
            )
        return self.bound_prior

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """lambda to 1, q(U) to p(U)."""
        if self.max_lambda is not None and self.max_lambda <= 1:
            raise ValueError(f"InducingWeights: max_lambda={self.max_lambda} keeps lambda from 1; raise the cap")
        factors = self.factors()
        for family, factor in zip(self._families(), factors if self.shared is None else factors[-1:], strict=True):
            family.set_to_prior(factor)
        for part in self._augmented():
            assert part.raw_lambda is not None
            part.raw_lambda.fill_(raw_positive(1.0, self.max_lambda))

    def count_by_weight(self) -> dict[str, int | None]:
        """Trainable scalars by layer, counted with its first weight; what is shared by all layers is left out."""
        counts: dict[str, int | None] = {}
        for index, layers in enumerate(self.groups):
            modules = [self.augmentations[index]] + ([self.inducing[index]] if self.shared is None else [])
            numbers = sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad)
            for layer in layers:
                counts |= {weight.name: None for weight in layer.weights}
                counts[layer.weights[0].name] = numbers // len(layers)
        return counts


def _random_start(m_r: int, m_c: int, d_out: int, d_in: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Appendix J: entries of Z from N(0, 1/M), of U's mean from N(0, 1)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=like.dtype, device=like.device)

    return normal(m_r, d_out) / math.sqrt(m_r), normal(m_c, d_in) / math.sqrt(m_c), normal(m_r, m_c)


def _network_start(m_r: int, m_c: int, matrix: Tensor, whiten: bool) -> tuple[Tensor, Tensor, Tensor]:
    r"""Z and U whose conditional mean is the best approximation of a matrix, over sigma, by one of rank min(M_r, M_c).

    With `[W b] / sigma = P S Q^T` cut to that rank, Z_r = P^T and Z_c = Q^T have orthonormal rows, so Psi is
    $(1 + D^2) I$ and $U = (1 + D^2)^2 S$ ($(1 + D^2) S$ if whitened) gives the mean exactly for any D. Rows of Z beyond the
    rank are random in the orthogonal complement, where there is one, and meet zeros in U: they change nothing at the
    start and can learn.
    """
    p, s, qt = torch.linalg.svd(matrix.double(), full_matrices=False)
    rank = min(m_r, m_c, s.shape[0])

    def rows(basis: Tensor, count: int) -> Tensor:
        extra = torch.randn(count - rank, basis.shape[1], dtype=basis.dtype, device=basis.device) / math.sqrt(count)
        return torch.cat([basis, extra - extra @ basis.mT @ basis])

    z_row, z_col = rows(p[:, :rank].mT, m_r), rows(qt[:rank], m_c)
    factor = 1 + INIT_D**2
    u = torch.zeros(m_r, m_c, dtype=matrix.dtype, device=matrix.device)
    u.diagonal()[:rank] = s[:rank].to(matrix) * (factor if whiten else factor**2)
    return z_row.to(matrix), z_col.to(matrix), u
