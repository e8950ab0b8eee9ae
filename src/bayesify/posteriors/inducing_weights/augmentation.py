"""Weight matrices augmented with inducing matrices: parameters, initial values, and distributions q(U) over U."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive, raw_positives, raw_softplus, tril
from bayesify.maths.gaussian import standard_kl
from bayesify.maths.matheron import Augmented, Factors
from bayesify.maths.positive_definite import leading_singular
from bayesify.weights.named_parameters import NamedParameters, largest

INIT_D = 1e-3


class Augmentation(nn.Module):
    r"""The parameters $Z_r, Z_c, D_r, D_c, \lambda$ for L weight matrices. All L weight matrices have inducing matrices of the
    same size.

    The given $Z_r$ [G, M_r, d_out] and $Z_c$ [G, M_c, d_in] are the initial values of each group of equal-sized matrices. Each
    $\lambda$ starts at `start`, but at most at half of `max_lambda`. With a `max_lambda` of 0, W given U is a point estimate.
    """

    def __init__(
        self, z_row: Sequence[Tensor], z_col: Sequence[Tensor], max_lambda: float | None, start: Sequence[float]
    ) -> None:
        super().__init__()
        self.max_lambda = max_lambda
        self.z_row = NamedParameters({str(index): z for index, z in enumerate(z_row)})
        self.z_col = NamedParameters({str(index): z for index, z in enumerate(z_col)})
        count, like = sum(z.shape[0] for z in z_row), z_row[0]
        self.raw_d_row = nn.Parameter(like.new_full((count, like.shape[1]), raw_positive(INIT_D)))
        self.raw_d_col = nn.Parameter(like.new_full((count, z_col[0].shape[1]), raw_positive(INIT_D)))
        self.raw_lambda: nn.Parameter | None = None
        if max_lambda != 0:
            self.raw_lambda = nn.Parameter(raw_positives(below_cap(start, max_lambda), like, max_lambda))
        shapes = [(r.shape[-1], c.shape[-1]) for r, c in zip(z_row, z_col, strict=True) for _ in range(r.shape[0])]
        self.shapes = shapes
        self.sizes: Tensor
        self.register_buffer("sizes", like.new_tensor([d_out * d_in for d_out, d_in in shapes]), persistent=False)

    def scale(self) -> Tensor | None:
        r"""$\lambda$ of each matrix, [L], or `None` if $\lambda$ is 0."""
        return None if self.raw_lambda is None else positive(self.raw_lambda, self.max_lambda)

    def augmented(self) -> Augmented:
        """The current values of Z and D."""
        rows, cols = self.z_row.dense_values(), self.z_col.dense_values()
        return Augmented(rows, cols, positive(self.raw_d_row), positive(self.raw_d_col))

    @torch.no_grad()
    def prune(self, keep: float) -> None:
        """Keep the largest entries of each Z separately, so that every layer stays connected to its inducing weights."""
        for side in (self.z_row, self.z_col):
            for name in side:
                masks, dense = side.mask(name), side.dense(name).abs()
                chosen = [
                    largest({"": z}, {"": None if masks is None else masks[index]}, keep)[""]
                    for index, z in enumerate(dense)
                ]
                side.prune(name, torch.stack(chosen))

    def conditional_kl(self, num_data: int | None = None) -> Tensor | float:
        r"""$\sum_l \beta_l R(\lambda_l)$ with R as in eq. 8; 0 if $\lambda$ is 0.

        With N examples, $\beta_l = \min(1, N / d_{in})$ (eq. 45). By default $\beta_l$ is 1.
        """
        scale = self.scale()
        if scale is None:
            return 0.0
        sizes = self.sizes
        if num_data is not None:
            sizes = sizes * sizes.new_tensor([min(1.0, num_data / d_in) for _, d_in in self.shapes])
        return standard_kl(scale, counts=sizes)


def below_cap(starts: Sequence[float], cap: float | None) -> list[float]:
    """Reduce initial values to at most half of their upper bound."""
    return [start if cap is None else min(start, 0.5 * cap) for start in starts]


def random_start(m_r: int, m_c: int, d_out: int, d_in: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The initial values of appendix J: entries of Z are drawn from N(0, 1/M), and entries of U's mean from N(0, 1)."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=like.dtype, device=like.device)

    return normal(m_r, d_out) / math.sqrt(m_r), normal(m_c, d_in) / math.sqrt(m_c), normal(m_r, m_c)


def network_start(m_r: int, m_c: int, matrix: Tensor, whiten: bool) -> tuple[Tensor, Tensor, Tensor]:
    r"""Z and U for which the conditional mean given U is the best approximation of rank min(M_r, M_c) to a whitened matrix.

    The singular value decomposition `[W b] / sigma = P S Q^T` is truncated to rank min(M_r, M_c). Z_r = P^T and Z_c = Q^T have
    orthonormal rows, so Psi is $(1 + D^2) I$. For any D, the conditional mean is then exactly the truncated matrix if
    $U = (1 + D^2)^2 S$. If U is whitened, the same holds for $U = (1 + D^2) S$. If Z has more rows than the truncated
    decomposition has singular values, the further rows are random and orthogonal to the first rows. The further rows multiply
    zeros in U. They therefore change nothing at the start, but they can learn. For a matrix of zeros, such as the matrix of a
    fresh adapter, all rows are random, because no direction is better than another.
    """
    basis = matrix if matrix.any() else torch.randn_like(matrix)
    rank = min(m_r, m_c, *matrix.shape)
    p, s, qt = leading_singular(basis.double(), rank)
    s = s if matrix.any() else torch.zeros_like(s)

    def rows(basis: Tensor, count: int) -> Tensor:
        extra = torch.randn(count - rank, basis.shape[1], dtype=basis.dtype, device=basis.device) / math.sqrt(count)
        return torch.cat([basis, extra - extra @ basis.mT @ basis])

    z_row, z_col = rows(p.mT, m_r), rows(qt, m_c)
    factor = 1 + INIT_D**2
    u = torch.zeros(m_r, m_c, dtype=matrix.dtype, device=matrix.device)
    u.diagonal()[:rank] = s.to(matrix) * (factor if whiten else factor**2)
    return z_row.to(matrix), z_col.to(matrix), u


HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


class InducingMatrix(nn.Module):
    r"""A distribution q(U) over G matrices U of size M_r x M_c, and its KL to p(U).

    If U is stored whitened, $p(U) = \mathcal{MN}(0, I, I)$. Otherwise $p(U) = \mathcal{MN}(0, \Psi_r, \Psi_c)$, and a draw is
    whitened by $L_r^{-1} U L_c^{-\top}$ before use.
    """

    name: ClassVar[str]
    location: nn.Parameter

    def __init__(self, mean: Tensor, whiten: bool) -> None:
        super().__init__()
        self.whiten = whiten
        self.count, self.rows, self.cols = mean.shape

    def whitened(self, u: Tensor, factors: Factors) -> Tensor:
        r"""$L_r^{-1} U L_c^{-\top}$ for U [G, S, M_r, M_c], or U itself if it is stored whitened."""
        if self.whiten:
            return u
        left = torch.linalg.solve_triangular(factors.row_tril.unsqueeze(1), u, upper=False)
        found: Tensor = torch.linalg.solve_triangular(factors.col_tril.unsqueeze(1), left.mT, upper=False).mT
        return found

    def prior_log_det(self, factors: Factors) -> Tensor | float:
        r"""$\log\lvert\Psi_c \otimes \Psi_r\rvert$ summed over matrices; 0 if whitened."""
        if self.whiten:
            return 0.0
        return 2 * (self.cols * _log_diagonal(factors.row_tril) + self.rows * _log_diagonal(factors.col_tril))

    @abstractmethod
    def unwhiten(self, factors: Factors) -> None:
        r"""Replace the deviations $U - m$ from the mean by $L_r (U - m) L_c^\top$, in place, so that they have the
        prior's correlations.

        With the same initial standard deviation, an unwhitened U then has the same spread as a whitened U.
        """

    def mean(self) -> Tensor:
        """E[U] in the form in which U is stored, [G, M_r, M_c]."""
        return self.location

    def noise_shape(self) -> tuple[int, ...]:
        """Shape of the standard normal noise for one draw of one matrix."""
        return (self.rows, self.cols)

    @abstractmethod
    def draw(self, noise: Tensor, members: Tensor | None) -> Tensor:
        """Draws of U in the form in which U is stored, [G, S, M_r, M_c].

        The noise is standard normal, [G, S, *noise_shape()]. In a mixture, `members` contains the index of the member for each
        draw, [S].
        """

    @abstractmethod
    def kl(self, factors: Factors) -> Tensor:
        """KL(q(U) || p(U)), summed over matrices: a scalar."""

    @abstractmethod
    def reached_variance(self, row: Tensor, col: Tensor, index: int) -> Tensor:
        r"""Variance of each entry of $R^\top U_i C$, [d_out, d_in], for R = `row` [M_r, d_out] and C = `col` [M_c, d_in]."""

    def covariance(self) -> Tensor:
        """Covariance of the stored entries of U in row-major order, [G, M_r M_c, M_r M_c]. Raises `ValueError` for a mixture."""
        raise ValueError(
            f"InducingWeights: q={self.name!r} is a mixture of points, so no covariance matrix describes it; use its "
            "members, or q='diagonal', 'matrix' or 'full'"
        )

    def set_to_prior(self, factors: Factors) -> None:
        """Make q(U) equal to the prior, in place. Raise `ValueError` if the family does not contain the prior."""
        raise ValueError(
            f"InducingWeights: q={self.name!r} cannot be set to the prior; use q='matrix' or q='full', or use q='diagonal' "
            "together with whiten=True"
        )

    @torch.no_grad()
    def _standardize(self, factors: Factors, lower: list[nn.Parameter], raw_diagonals: list[nn.Parameter]) -> None:
        for value in (self.location, *lower):
            value.zero_()
        for raw in raw_diagonals:
            raw.fill_(raw_positive(1.0))
        if not self.whiten:
            self.unwhiten(factors)


class DiagonalMatrix(InducingMatrix):
    r"""Independent Gaussians (FFG-U): $q(U) = \mathcal{N}(m, \operatorname{diag}(s^2))$.

    Stored parameters: `location` (the means m, unconstrained) and `raw_std`. Softplus maps `raw_std` to s. If `max_std` is given,
    a scaled sigmoid replaces softplus. With `max_std=0`, U is a point estimate and its KL is $-\log p(m)$.
    """

    name = "diagonal"

    def __init__(self, mean: Tensor, whiten: bool, init_std: Sequence[float], max_std: float | None = None) -> None:
        super().__init__(mean, whiten)
        self.max_std = max_std
        self.location = nn.Parameter(mean)
        self.raw_std: nn.Parameter | None = None
        if max_std != 0:
            raw = raw_positives(below_cap(init_std, max_std), mean, max_std)
            self.raw_std = nn.Parameter(raw[:, None, None].expand_as(mean).clone())

    def std(self) -> Tensor | None:
        """Standard deviations s, or `None` for a point estimate."""
        return None if self.raw_std is None else positive(self.raw_std, self.max_std)

    def draw(self, noise: Tensor, members: Tensor | None) -> Tensor:
        std = self.std()
        mean = self.location.unsqueeze(1)
        if std is None:
            return mean.expand(-1, noise.shape[1], -1, -1)
        return torch.addcmul(mean, std.unsqueeze(1), noise)

    def kl(self, factors: Factors) -> Tensor:
        std = self.std()
        if self.whiten and std is not None:
            return standard_kl(std, self.location)
        mean = self.whitened(self.location.unsqueeze(1), factors)
        square = mean.square().sum() + self.prior_log_det(factors)
        if std is None:
            return 0.5 * square + self.location.numel() * HALF_LOG_TAU
        trace = std.square() * _inverse_diagonals(factors)
        return 0.5 * (trace.sum() + square - std.numel()) - std.log().sum()

    def reached_variance(self, row: Tensor, col: Tensor, index: int) -> Tensor:
        std = self.std()
        if std is None:
            return row.new_zeros(row.shape[-1], col.shape[-1])
        return row.square().mT @ std[index].square() @ col.square()

    @torch.no_grad()
    def unwhiten(self, factors: Factors) -> None:
        """Multiply the variance of each entry by the entry's prior variance given all other entries, because a diagonal q(U) has
        no correlations."""
        if self.raw_std is not None:
            std = positive(self.raw_std, self.max_std) * _inverse_diagonals(factors).rsqrt()
            cap = self.max_std
            self.raw_std.copy_(raw_softplus(std) if cap is None else torch.logit(std / cap, 1e-6).clamp_max(0.0))

    def covariance(self) -> Tensor:
        std = self.std()
        return torch.diag_embed((self.location * 0 if std is None else std.square()).flatten(1))

    @torch.no_grad()
    def set_to_prior(self, factors: Factors) -> None:
        """Set means to 0 and standard deviations to 1. U must be whitened, and `max_std` must allow 1."""
        if not self.whiten:
            raise ValueError(
                "InducingWeights: a diagonal q(U) that is not whitened cannot be set to the prior; use whiten=True or "
                "q='matrix'"
            )
        if self.raw_std is None or (self.max_std is not None and self.max_std <= 1):
            raise ValueError(
                "InducingWeights: q(U) cannot be set to the prior, because the prior's std is 1 and "
                f"max_std={self.max_std} keeps the std of q(U) below 1; give max_std= a larger value"
            )
        self.location.zero_()
        self.raw_std.fill_(raw_positive(1.0, self.max_std))


class MatrixNormalMatrix(InducingMatrix):
    r"""Matrix normal: $U = m + T_r E T_c^\top$ with lower triangular $T_r$, $T_c$."""

    name = "matrix"

    def __init__(self, mean: Tensor, whiten: bool, init_std: Sequence[float]) -> None:
        super().__init__(mean, whiten)
        self.location = nn.Parameter(mean)
        raw = raw_positives([math.sqrt(std) for std in init_std], mean)[:, None]
        self.row_lower = nn.Parameter(mean.new_zeros(self.count, self.rows * (self.rows - 1) // 2))
        self.row_raw_diagonal = nn.Parameter(raw.repeat(1, self.rows))
        self.col_lower = nn.Parameter(mean.new_zeros(self.count, self.cols * (self.cols - 1) // 2))
        self.col_raw_diagonal = nn.Parameter(raw.repeat(1, self.cols))

    def trils(self) -> tuple[Tensor, Tensor]:
        """Factors T_r [G, M_r, M_r] and T_c [G, M_c, M_c]."""
        return tril(self.row_lower, self.row_raw_diagonal), tril(self.col_lower, self.col_raw_diagonal)

    def draw(self, noise: Tensor, members: Tensor | None) -> Tensor:
        rows, cols = self.trils()
        return self.location.unsqueeze(1) + rows.unsqueeze(1) @ noise @ cols.unsqueeze(1).mT

    def kl(self, factors: Factors) -> Tensor:
        rows, cols = self.trils()
        if not self.whiten:
            rows = torch.linalg.solve_triangular(factors.row_tril, rows, upper=False)
            cols = torch.linalg.solve_triangular(factors.col_tril, cols, upper=False)
        trace = (rows.square().sum((-2, -1)) * cols.square().sum((-2, -1))).sum()
        square = self.whitened(self.location.unsqueeze(1), factors).square().sum()
        log_det = self.cols * _log_diagonal(rows) + self.rows * _log_diagonal(cols)
        return 0.5 * (trace + square - self.location.numel()) - log_det

    def reached_variance(self, row: Tensor, col: Tensor, index: int) -> Tensor:
        rows, cols = self.trils()
        return torch.outer((row.mT @ rows[index]).square().sum(-1), (col.mT @ cols[index]).square().sum(-1))

    @torch.no_grad()
    def unwhiten(self, factors: Factors) -> None:
        rows, cols = self.trils()
        _pack(factors.row_tril @ rows, self.row_lower, self.row_raw_diagonal)
        _pack(factors.col_tril @ cols, self.col_lower, self.col_raw_diagonal)

    def covariance(self) -> Tensor:
        rows, cols = (factor @ factor.mT for factor in self.trils())
        return torch.einsum("gab,gcd->gacbd", rows, cols).flatten(3).flatten(1, 2)

    def set_to_prior(self, factors: Factors) -> None:
        self._standardize(factors, [self.row_lower, self.col_lower], [self.row_raw_diagonal, self.col_raw_diagonal])


class FullMatrix(InducingMatrix):
    r"""One dense Gaussian over the entries of U in row-major order (FCG-U): $q(\operatorname{vec} U) = \mathcal{N}(m, T T^\top)$.
    Raises `ValueError` if U has more than 2,048 entries. For a larger U, the factor T alone would take at least 8 MiB per
    matrix."""

    name = "full"

    def __init__(self, mean: Tensor, whiten: bool, init_std: Sequence[float]) -> None:
        super().__init__(mean, whiten)
        size = self.rows * self.cols
        if size > 2048:
            numbers = size * (size + 1) // 2
            raise ValueError(
                f"InducingWeights: q='full' over {self.rows} x {self.cols} inducing weights needs {numbers:,} "
                "numbers per layer; choose rows= and cols= so that their product is at most 2048, or use q='matrix'"
            )
        self.location = nn.Parameter(mean)
        self.lower = nn.Parameter(mean.new_zeros(self.count, size * (size - 1) // 2))
        self.raw_diagonal = nn.Parameter(raw_positives(init_std, mean)[:, None].repeat(1, size))

    def scale_tril(self) -> Tensor:
        """Factor T: [G, M_r M_c, M_r M_c]."""
        return tril(self.lower, self.raw_diagonal)

    def noise_shape(self) -> tuple[int, ...]:
        return (self.rows * self.cols,)

    def draw(self, noise: Tensor, members: Tensor | None) -> Tensor:
        flat = self.location.flatten(1).unsqueeze(1) + noise @ self.scale_tril().mT
        found: Tensor = flat.unflatten(-1, (self.rows, self.cols))
        return found

    def kl(self, factors: Factors) -> Tensor:
        factor = self.scale_tril()
        columns = factor.mT.unflatten(-1, (self.rows, self.cols))  # [G, P, M_r, M_c]: each column of T as a matrix
        trace = self.whitened(columns, factors).square().sum()
        square = self.whitened(self.location.unsqueeze(1), factors).square().sum()
        return 0.5 * (trace + square - self.location.numel() + self.prior_log_det(factors)) - _log_diagonal(factor)

    def reached_variance(self, row: Tensor, col: Tensor, index: int) -> Tensor:
        """The effect of each column of T on W, squared and summed over the columns. Only a few columns are computed at a time."""
        columns = self.scale_tril()[index].mT.unflatten(-1, (self.rows, self.cols))
        total = row.new_zeros(row.shape[-1], col.shape[-1])
        for part in columns.split(16):
            total = total + (row.mT @ part @ col).square().sum(0)
        return total

    @torch.no_grad()
    def unwhiten(self, factors: Factors) -> None:
        prior = [torch.kron(rows, cols) for rows, cols in zip(factors.row_tril, factors.col_tril, strict=True)]
        _pack(torch.stack(prior) @ self.scale_tril(), self.lower, self.raw_diagonal)

    def covariance(self) -> Tensor:
        factor = self.scale_tril()
        return factor @ factor.mT

    def set_to_prior(self, factors: Factors) -> None:
        self._standardize(factors, [self.lower], [self.raw_diagonal])


class EnsembleMatrix(InducingMatrix):
    r"""A mixture of points (Ensemble-U): $q(U) = \frac1K \sum_k \delta(U - U^{(k)})$. Its KL is left out, as in deep
    ensembles.

    Each member starts at the mean plus noise. Each member has its own noise, and the noise averages to 0 over members.
    """

    name = "ensemble"

    def __init__(self, mean: Tensor, whiten: bool, init_std: Sequence[float], members: int) -> None:
        super().__init__(mean, whiten)
        self.members = members
        noise = torch.randn(members, *mean.shape, dtype=mean.dtype, device=mean.device)
        std = math.sqrt(members / max(1, members - 1)) * mean.new_tensor(init_std)
        self.value = nn.Parameter(mean + std[:, None, None] * (noise - noise.mean(0)))

    def mean(self) -> Tensor:
        return self.value.mean(0)

    @torch.no_grad()
    def unwhiten(self, factors: Factors) -> None:
        apart = self.value - self.mean()
        self.value.copy_(self.mean() + factors.row_tril @ apart @ factors.col_tril.mT)

    def noise_shape(self) -> tuple[int, ...]:
        return (0,)

    def draw(self, noise: Tensor, members: Tensor | None) -> Tensor:
        """The chosen members. All layers of a draw use the same member."""
        return self.value[members].transpose(0, 1)

    def kl(self, factors: Factors) -> Tensor:
        return self.value.new_zeros(())

    def reached_variance(self, row: Tensor, col: Tensor, index: int) -> Tensor:
        return (row.mT @ self.value[:, index] @ col).var(0, unbiased=False)


def _inverse_diagonals(factors: Factors) -> Tensor:
    r"""Diagonals of $(\Psi_r \otimes \Psi_c)^{-1}$, [G, M_r, M_c]."""
    sides = []
    for tril_factor in (factors.row_tril, factors.col_tril):
        eye = torch.eye(tril_factor.shape[-1], dtype=tril_factor.dtype, device=tril_factor.device)
        sides.append(torch.linalg.solve_triangular(tril_factor, eye, upper=False).square().sum(-2))
    found: Tensor = sides[0].unsqueeze(-1) * sides[1].unsqueeze(-2)
    return found


def _log_diagonal(tril_factor: Tensor) -> Tensor:
    return tril_factor.diagonal(dim1=-2, dim2=-1).log().sum()


def _pack(factor: Tensor, lower: Tensor, raw_diagonal: Tensor) -> None:
    """Store a triangular factor [G, n, n] in its packed parameters, in place."""
    n = factor.shape[-1]
    rows, cols = torch.tril_indices(n, n, -1, device=factor.device)
    lower.copy_(factor[:, rows, cols])
    raw_diagonal.copy_(raw_softplus(factor.diagonal(dim1=-2, dim2=-1)))


FAMILIES: dict[str, Callable[..., InducingMatrix]] = {
    family.name: family for family in (DiagonalMatrix, MatrixNormalMatrix, FullMatrix, EnsembleMatrix)
}
"""Families of q(U) by name. Each takes initial means [G, M_r, M_c] and one initial standard deviation per matrix."""
