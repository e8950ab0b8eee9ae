"""Bayesian linear regression in whitened weights: the posterior given two matrices, draws, and its divergence from the prior."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regression:
    r"""The posterior over whitened weights $\tilde W$ of G independent regressions with R outputs each.

    $$ q(\tilde w_r) = \mathcal{N}(\tilde m_r, (I + B)^{-1}), \qquad I + B = L L^\top, \qquad
       \tilde m = (I + B)^{-1} T^\top A^\top \Lambda V $$

    where $w = T \tilde w$ has the prior's covariance $T T^\top$ and $B = T^\top A^\top \Lambda A\, T$ (Ober & Aitchison 2021,
    eq. 11). All eigenvalues of $I + B$ are at least 1, so the factorization does not depend on the prior's scale.

    Args:
        mean: $\tilde m$, [*batch, G, D, R].
        root: $L^{-1}$, [*batch, G, D, D].
        log_det: $\log \det L$, summed over the G regressions, [*batch].
        failed: Nonzero where a factorization failed, [*batch, G]; the other fields mean nothing then.
    """

    mean: Tensor
    root: Tensor
    log_det: Tensor
    failed: Tensor

    def draw(self, noise: Tensor) -> Tensor:
        r"""$\tilde W = \tilde m + L^{-\top} \epsilon$.

        Args:
            noise: $\epsilon$, standard normal, [*batch, G, D, R].
        """
        return self.mean + self.root.mT @ noise

    def variance(self) -> Tensor:
        r"""Diagonal of $(I + B)^{-1}$, [*batch, G, D]: the same for each of the R outputs."""
        return self.root.square().sum(-2)

    def covariance(self) -> Tensor:
        r"""$(I + B)^{-1}$, [*batch, G, D, D]."""
        return self.root.mT @ self.root

    def closed_kl(self) -> Tensor:
        r"""KL to the prior $\mathcal{N}(0, I)$ in nats, summed over everything but the batch.

        $$ \frac{R}{2} [\operatorname{tr}(I + B)^{-1} - D G] + R \log \det L + \tfrac12 \lVert \tilde m \rVert^2 $$
        """
        outputs, size = self.mean.shape[-1], self.mean.shape[-2] * self.mean.shape[-3]
        trace = self.root.square().sum((-1, -2, -3))
        return outputs * (0.5 * (trace - size) + self.log_det) + 0.5 * self.mean.square().sum((-1, -2, -3))

    def sampled_kl(self, noise: Tensor, drawn: Tensor) -> Tensor:
        r"""$\log q(\tilde W) - \log p(\tilde W)$ at a draw, in nats, summed over everything but the batch.

        Args:
            noise: The $\epsilon$ of the draw.
            drawn: $\tilde W$.
        """
        outputs = self.mean.shape[-1]
        return outputs * self.log_det + 0.5 * (drawn.square() - noise.square()).sum((-1, -2, -3))


def regress(gram: Tensor, cross: Tensor, factorize: Callable[[Tensor], Tensor] | None = None) -> Regression:
    r"""Solve G regressions from the two matrices that they depend on.

    Args:
        gram: B, [*batch, G, D, D].
        cross: $T^\top A^\top \Lambda V$, [*batch, G, D, R].
        factorize: Makes the Cholesky factor of $I + B$, or raises; without it, a failure is noted in the result.
    """
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    if factorize is None:
        root, logs, failed = _InverseFactor.apply(gram + eye, eye)
        failed = failed + torch.isfinite(logs).logical_not()  # infinity goes through a factorization unnoticed
    else:
        tril = factorize(gram + eye)
        failed = torch.zeros(gram.shape[:-2], dtype=torch.int32, device=gram.device)
        root = torch.linalg.solve_triangular(tril, eye.expand(tril.shape), upper=False)
        logs = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return Regression(root.mT @ (root @ cross), root, logs.sum(-1), failed)


class _InverseFactor(torch.autograd.Function):
    r"""$K = L^{-1}$ and $\log\det L$ of $P = L L^\top$, with a gradient of three products.

    From $dL = L\, \Phi(K\, dP\, K^\top)$, with $\Phi$ the lower triangle and half of the diagonal, follows
    $dK = -\Phi(K\, dP\, K^\top) K$.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(precision: Tensor, eye: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tril, failed = torch.linalg.cholesky_ex(precision)
        root = torch.linalg.solve_triangular(tril, eye.expand(tril.shape), upper=False)
        return root, tril.diagonal(dim1=-2, dim2=-1).log().sum(-1), failed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        root, eye = ctx.saved_tensors
        lower = (grads[0] @ root.mT).tril() * (1 - 0.5 * eye)
        middle = 0.5 * (eye * grads[1][..., None, None] - lower - lower.mT)
        return root.mT @ middle @ root, None
