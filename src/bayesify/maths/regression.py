"""Bayesian linear regression with whitened weights: the posterior (computed from two matrices), its draws, and its KL to the
prior."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function, leading_axes
from bayesify.maths.gamma import widened
from bayesify.maths.value_checks import should_check, transforming


@dataclass(frozen=True)
class Regression:
    r"""Posterior over whitened weights $\tilde W$ of G independent regressions with R outputs each.

    $$ q(\tilde w_r) = \mathcal{N}(\tilde m_r, (I + B)^{-1}), \qquad I + B = L L^\top, \qquad
       \tilde m = (I + B)^{-1} T^\top A^\top \Lambda V $$

    Here $w = T \tilde w$ has the prior covariance $T T^\top$, and $B = T^\top A^\top \Lambda A\, T$ (Ober & Aitchison 2021,
    equation 11). All eigenvalues of $I + B$ are at least 1, whatever the prior's scale, so the factorization is stable. All
    values, including draws, are in float64 if the device supports it.
    """

    mean: Tensor  # posterior mean, [*batch, G, D, R]
    root: Tensor  # L^-1, [*batch, G, D, D]
    log_det: Tensor  # log det L, summed over the G regressions, [*batch]
    failed: Tensor  # nonzero if a factorization failed, [*batch, G]; the other fields are then meaningless

    def draw(self, noise: Tensor) -> Tensor:
        r"""A draw $\tilde W = \tilde m + L^{-\top} \epsilon$ for standard normal noise $\epsilon$, [*batch, G, D, R]."""
        return self.mean + self.root.mT @ noise.to(self.mean.dtype)

    def closed_kl(self) -> Tensor:
        r"""KL to the prior $\mathcal{N}(0, I)$ in nats, summed over all axes except the batch.

        $$ \frac{R}{2} [\operatorname{tr}(I + B)^{-1} - D G] + R \log \det L + \tfrac12 \lVert \tilde m \rVert^2 $$
        """
        outputs, size = self.mean.shape[-1], self.mean.shape[-2] * self.mean.shape[-3]
        trace = self.root.square().sum((-1, -2, -3))
        return outputs * (0.5 * (trace - size) + self.log_det) + 0.5 * self.mean.square().sum((-1, -2, -3))

    def sampled_kl(self, noise: Tensor, drawn: Tensor) -> Tensor:
        r"""$\log q(\tilde W) - \log p(\tilde W)$ at a draw, in nats, summed over all axes except the batch."""
        outputs = self.mean.shape[-1]
        return outputs * self.log_det + 0.5 * (drawn.square() - noise.square()).sum((-1, -2, -3))


@dataclass(frozen=True)
class RegressionFactors:
    r"""The two matrices that determine G regressions. The regressions are solved in float64 if the device supports it.

    In float32, rounding loses the prior's term I in $I + B$ if $\lVert B \rVert$ exceeds about $10^4$. In float64, the term I is
    preserved for norms up to $10^{12}$. The term I is also preserved if a larger norm comes only from the units of B's columns.

    `careful` is a name for $I + B$ in warnings and errors, or `None`. If `careful` is given, a matrix that is not finite raises
    an error. A matrix that rounding has made indefinite is replaced by the nearest matrix whose eigenvalues are all 1 or larger.
    After this replacement, no posterior variance exceeds the prior's variance. If `careful` is `None`, failures are only marked
    in `failed`.
    """

    gram: Tensor  # B, [*batch, G, D, D]
    cross: Tensor  # C = T^T A^T Lambda V, [*batch, G, D, R]
    careful: str | None = None

    def _wide(self) -> tuple[Tensor, Tensor, Tensor]:
        gram, cross = widened(self.gram), widened(self.cross)
        return gram, cross, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)

    def solve(self) -> Regression:
        """The posterior."""
        gram, cross, eye = self._wide()
        precision = gram + eye
        if self.careful is not None and should_check(gram) and not bool(torch.isfinite(precision).all()):
            size = gram.shape[-1]
            raise ValueError(
                f"{self.careful} ({size} x {size}) is not finite; lower the learning rate, start from a smaller precision, and "
                "check the earlier layers' outputs at the inducing inputs for infinity"
            )
        root, logs, failed = _InverseFactor.apply(precision, eye, self.careful)
        failed = failed + torch.isfinite(logs).logical_not()  # a factorization does not report infinity
        if self.careful is not None and not should_check(logs):
            logs = torch.where(failed > 0, torch.nan, logs)
        return Regression(root.mT @ (root @ cross), root, logs.sum(-1), failed)

    def draw(self, noise: Tensor, kl_form: str) -> tuple[Tensor, Tensor, Tensor]:
        r"""A draw, its KL and `failed`. If the form of the KL is `"closed"`, a hand-written gradient needs half as many
        operations as autograd.

        $$ \tilde W = K^\top (K\, C + \epsilon), \qquad K = L^{-1} $$

        The noise is [*batch, G, D, R], and the form of the KL is `"closed"` or `"sampled"`.
        """
        if kl_form == "closed" and self.careful is None and not transforming():
            gram, cross, eye = self._wide()
            drawn, kl, failed, _, _ = _Drawn.apply(gram, cross, noise.to(gram.dtype), eye)
            return drawn, kl, failed
        found = self.solve()
        drawn = found.draw(noise)
        return drawn, found.closed_kl() if kl_form == "closed" else found.sampled_kl(noise, drawn), found.failed


def _floored_factor(precision: Tensor) -> Tensor:
    """Lower factor of the nearest symmetric matrix whose eigenvalues are at least 1, computed without a Cholesky factorization."""
    values, vectors = torch.linalg.eigh(precision)
    upper = torch.linalg.qr(values.clamp_min(1).sqrt().unsqueeze(-1) * vectors.mT).R
    found: Tensor = (upper * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-1)).mT
    return found


class _InverseFactor(Function):
    r"""The inverse $K = L^{-1}$ and $\log\det L$, where $P = L L^\top$; the gradient takes three products.

    Let $\Phi$ take the lower triangle of a matrix and halve its diagonal. Then $dL = L\, \Phi(K\, dP\, K^\top)$, and
    therefore $dK = -\Phi(K\, dP\, K^\top) K$.
    """

    @staticmethod
    def forward(precision: Tensor, eye: Tensor, careful: str | None) -> tuple[Tensor, Tensor, Tensor]:
        tril, failed = torch.linalg.cholesky_ex(precision)
        if careful is not None and should_check(failed) and bool(failed.any()):
            tril = torch.where((failed > 0)[..., None, None], _floored_factor(precision), tril)
            failed = torch.zeros_like(failed)
            largest = float(precision.diagonal(dim1=-2, dim2=-1).max())
            warnings.warn(
                f"{careful}: its largest entry is {largest:.2g} times the prior precision, too much for float64, so variances "
                "are limited to the prior's variance; standardize the inputs, or start from a smaller precision",
                stacklevel=2,
            )
        root = torch.linalg.solve_triangular(tril, eye.expand(tril.shape), upper=False)
        return root, tril.diagonal(dim1=-2, dim2=-1).log().sum(-1), failed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[0], inputs[1])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], precision: Tensor, eye: Tensor, careful: str | None) -> Any:
        (rows,) = leading_axes(info, in_dims[:1], [precision])
        return _InverseFactor.apply(rows, eye, careful), (0, 0, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        root, eye = ctx.saved_tensors
        lower = (grads[0] @ root.mT).tril() * (1 - 0.5 * eye)
        middle = 0.5 * (eye * grads[1][..., None, None] - lower - lower.mT)
        return root.mT @ middle @ root, None, None


class _Drawn(Function):
    r"""A draw $\tilde W$, the closed KL, a flag for failed factorizations, K, and $\tilde m = K^\top K C$.

    With $\bar m = \bar W + \bar{\mathrm{KL}}\, \tilde m$, the gradient with respect to C is $\bar C = K^\top K \bar m$. The
    gradient with respect to $P$ is
    $K^\top \tfrac12 [R\, \bar{\mathrm{KL}}\, I - \Phi(\bar K K^\top) - \Phi(\bar K K^\top)^\top] K - \tfrac12 (\bar C \tilde m^\top
    + \tilde m \bar C^\top)$ with $\bar K = \epsilon \bar W^\top + R\, \bar{\mathrm{KL}}\, K$; see `_InverseFactor`.
    """

    @staticmethod
    def forward(gram: Tensor, cross: Tensor, noise: Tensor, eye: Tensor) -> tuple[Tensor, ...]:
        tril, failed = torch.linalg.cholesky_ex(gram + eye)
        root = torch.linalg.solve_triangular(tril, eye.expand(tril.shape), upper=False)
        outputs = cross.shape[-1]
        half = root @ cross
        mean, drawn = (root.mT @ torch.cat((half, half + noise), -1)).split(outputs, -1)
        norms = (torch.linalg.vector_norm(value, dim=(-1, -2)) for value in (root, mean))
        trace, squares = (norm.square() for norm in norms)  # [*batch, G]
        logs = (root.diagonal(dim1=-2, dim2=-1).log() + 0.5).sum(-1)
        kl = (0.5 * (outputs * trace + squares) - outputs * logs).sum(-1)
        return drawn, kl, failed, root, mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], output[3], output[4])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        cross, noise, eye, root, mean = ctx.saved_tensors
        by_drawn = torch.zeros_like(mean) if grads[0] is None else grads[0]
        by_kl = mean.new_zeros(()) if grads[1] is None else grads[1][..., None, None, None]
        weight = cross.shape[-1] * by_kl
        by_mean = by_drawn + by_kl * mean
        by_noise = root @ by_drawn
        by_factor = noise @ by_noise.mT + weight * (root @ root.mT)  # gradient with respect to K, times K^T
        if grads[3] is not None or grads[4] is not None:  # for second derivatives
            by_factor = by_factor if grads[3] is None else by_factor + grads[3] @ root.mT
            by_mean = by_mean if grads[4] is None else by_mean + grads[4]
        by_cross = root.mT @ (root @ by_mean)
        lower = by_factor.tril() * (1 - 0.5 * eye)
        outer = by_cross @ mean.mT
        middle = root.mT @ (weight * eye - lower - lower.mT) @ root
        return 0.5 * (middle - outer - outer.mT), by_cross, by_noise, None
