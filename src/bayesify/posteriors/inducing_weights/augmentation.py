"""Weight matrices augmented with inducing matrices: the parameters and their initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive, raw_positives
from bayesify.maths.gaussian import standard_kl
from bayesify.maths.largest_entries import largest
from bayesify.maths.matheron import Augmented
from bayesify.maths.positive_definite import leading_singular
from bayesify.weights.named_parameters import NamedParameters

INIT_D = 1e-3


class Augmentation(nn.Module):
    r"""The parameters $Z_r, Z_c, D_r, D_c, \lambda$ of L matrices. All inducing matrices that augment these L matrices have the
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
        r"""$\lambda$ of each matrix, [L], or `None` for 0."""
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
    r"""Z and U whose conditional mean is the best approximation of rank min(M_r, M_c) to a whitened matrix.

    The singular value decomposition `[W b] / sigma = P S Q^T` is truncated to rank min(M_r, M_c). Z_r = P^T and Z_c = Q^T have
    orthonormal rows, so Psi is $(1 + D^2) I$. Then $U = (1 + D^2)^2 S$ gives the truncated matrix as the exact mean for any D. If
    U is whitened, $U = (1 + D^2) S$ gives this mean. If Z has more than min(M_r, M_c) rows, the further rows are random and
    orthogonal to the first rows. The further rows multiply zeros in U. They therefore change nothing at the start, but they can
    learn. For a matrix of zeros, such as the matrix of a fresh adapter, all rows are random, because no direction is better than
    another.
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
