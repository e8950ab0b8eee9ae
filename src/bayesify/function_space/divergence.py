"""KL divergences between Gaussians over function values, with jitter for singular covariances."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from bayesify.maths.positive_definite import checked_cholesky
from bayesify.maths.value_checks import should_check

RELATIVE_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Share of the mean variance that is added to a covariance without full rank, by type."""


def diagonal_kl(mean: Tensor, variance: Tensor, prior_mean: Tensor, prior_variance: Tensor) -> Tensor:
    r"""KL between Gaussians with independent entries, summed over all entries, in nats.

    $$ \sum \tfrac12 \log\frac{S_0}{T} + \frac{T + (f - \mu_0)^2}{2 S_0} - \tfrac12 $$

    This is the intended meaning of line 5 of the paper's algorithm 1. The printed formula is not a divergence.
    """
    spread = variance / prior_variance
    return 0.5 * (spread - spread.log() + (mean - prior_mean).square() / prior_variance - 1).sum()


def dense_kl(
    mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, jitter: float | None = None
) -> Tensor:
    r"""KL between Gaussians with dense covariances, summed over leading axes, in nats.

    The KL is finite only if q's covariance has full rank. If a covariance is numerically singular, a share of the mean
    variance is added to its diagonal. The same share is used for both covariances, and the function warns once. If `jitter` is
    given, this share of the mean variance is always added. If a covariance has no Cholesky factor even with jitter, a
    `ValueError` is raised. Means are [..., n], and covariances are [..., n, n].
    """
    if jitter is None and bool(_has_full_rank(covariance) & _has_full_rank(prior_covariance)):
        factor, prior_factor = torch.linalg.cholesky(covariance), torch.linalg.cholesky(prior_covariance)
    else:
        share = RELATIVE_JITTER.get(covariance.dtype, 1e-5) if jitter is None else jitter
        if jitter is None:
            warnings.warn(
                f"function_kl: a covariance of {mean.shape[-1]} function values does not have full rank, so {share:g} of the "
                "mean variance is added to the diagonals of the posterior's and the prior's covariances; to avoid this, give "
                "jitter=, context inputs that differ more, or covariance='diagonal'",
                stacklevel=4,
            )
        factor = _factorize(covariance, share, "the linearized network's")
        prior_factor = _factorize(prior_covariance, share, "the prior's")
    scaled: Tensor = torch.linalg.solve_triangular(prior_factor, factor, upper=False)
    shift: Tensor = torch.linalg.solve_triangular(prior_factor, (mean - prior_mean).unsqueeze(-1), upper=False)
    log_det = _log_diagonal(prior_factor) - _log_diagonal(factor)
    return 0.5 * (scaled.square().sum() + shift.square().sum() - mean.numel()) + log_det.sum()


def _log_diagonal(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@torch.no_grad()
def _has_full_rank(covariance: Tensor) -> Tensor:
    """Whether all Cholesky pivots are above the rounding error."""
    factor, failed = checked_cholesky(covariance)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    size = covariance.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    floor = 10 * covariance.shape[-1] * torch.finfo(covariance.dtype).eps * size
    return ~failed.any() & (pivots > floor).all()


def _factorize(covariance: Tensor, jitter: float, whose: str) -> Tensor:
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    added = jitter * diagonal.mean(-1, keepdim=True).expand(diagonal.shape)
    factor, failed = checked_cholesky(covariance + torch.diag_embed(added))
    if bool(failed.any()):
        raise ValueError(
            f"function_kl: {whose} covariance at the context inputs has no Cholesky factor with jitter={jitter:g}; "
            "give fewer context inputs, context inputs that differ more, a larger jitter, or covariance='diagonal'"
        )
    return factor


def gaussian_kl(
    kind: str, ours: tuple[Tensor, Tensor], prior: tuple[Tensor, Tensor], num_weights: int, jitter: float | None
) -> Tensor:
    """KL between Gaussians over function values, a scalar in nats.

    Both Gaussians are given by their mean, [B, O], and their variance or covariance; see `FunctionSpaceVI`. If there are
    more function values than weights, q's covariance is singular, and a `ValueError` is raised unless there is a jitter.
    """
    (mean, found), (prior_mean, prior_found) = ours, prior
    if kind == "diagonal":
        return diagonal_kl(mean, found, prior_mean, prior_found)
    if found.shape[-1] > num_weights and jitter is None:
        raise ValueError(
            f"FunctionSpaceVI: the covariance of {found.shape[-1]} function values has no inverse, because there are only "
            f"{num_weights} weights; give fewer context inputs, covariance='diagonal', or a positive jitter"
        )
    if kind == "full":
        return dense_kl(mean.T, found, prior_mean.T, prior_found, jitter)
    return dense_kl(mean.flatten(), found, prior_mean.flatten(), prior_found, jitter)


def check_kl(kl: Tensor) -> None:
    """Raise `ValueError` if the KL is not finite. During the capture of a CUDA graph nothing is checked, because values cannot be
    read."""
    if should_check(kl) and not bool(torch.isfinite(kl)):
        raise ValueError(
            f"function_kl is {float(kl.detach())}, because a variance of the linearized network is 0 or not finite at a context "
            "input (for example, for an all-zero input to a network without biases, or for collapsed standard deviations); "
            "change the context, or raise init_std"
        )
