"""KL divergences between Gaussians over function values, and the capture of these divergences as CUDA graphs."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.maths.autograd_functions import Found, with_gradients
from bayesify.maths.positive_definite import checked_cholesky
from bayesify.maths.value_checks import should_check
from bayesify.running.cuda_graphs import Captured, Captures, side_stream, watch_waits

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
            "give fewer context inputs, context inputs that differ more, a larger jitter=, or covariance='diagonal'"
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
            f"function_kl is {float(kl.detach())}, because a variance of the linearized network is 0 or not finite "
            "at a context input (for example, for an all-zero input to a network without biases, or for collapsed "
            "standard deviations); change the context, or give init_std= a larger value"
        )


Part = Callable[[Any, Sequence[Tensor]], Tensor]


class DivergenceCapture:
    """Calls a scalar function of inputs and tensors through a CUDA graph if possible. Gradients are computed for the tensors but
    not for the inputs.

    The graph holds the value and the gradient in its own memory, and results are copied out. The graph may therefore be replayed
    before the backward pass of an earlier replay has run. A function that waits for the device, for example because a size
    depends on values, is called without a graph. A new graph is captured if buffers or frozen parameters move in memory, or if a
    module changes its mode.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.captures: Captures[Captured[Found]] = Captures(limit=1)

    def __call__(self, part: Part, inputs: Any, given: Sequence[Tensor]) -> Tensor:
        """`part(inputs, given)`, differentiable with respect to `given` but not to the inputs."""
        leaves = pytree.tree_leaves(inputs)
        if not self._suits(leaves, given):
            return part(inputs, given)
        state = self._describe((*leaves, *given))
        captured = self.captures.find("divergence", state, lambda: _capture(part, inputs, given))
        if captured is None:
            return part(inputs, given)

        def replay(given: Sequence[Tensor], wanted: Sequence[int]) -> Found:
            value, slopes = captured.replay([*leaves, *given])
            return value.clone(), {place: slope.clone() for place, slope in slopes.items()}

        return with_gradients(replay, *given)

    def _suits(self, leaves: Sequence[Any], given: Sequence[Tensor]) -> bool:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if not all(isinstance(leaf, Tensor) and leaf.is_cuda and not leaf.requires_grad for leaf in leaves):
            return False
        return all(tensor.is_cuda for tensor in given) and not torch.cuda.is_current_stream_capturing()

    def _describe(self, tensors: Sequence[Tensor]) -> Any:
        kept = [*self.module.buffers(), *(one for one in self.module.parameters() if not one.requires_grad)]
        return (
            tuple((one.shape, one.dtype, one.device, one.requires_grad) for one in tensors),
            tuple(one.data_ptr() for one in kept),
            tuple(part.training for part in self.module.modules()),
        )


def _capture(part: Part, inputs: Any, given: Sequence[Tensor]) -> Captured[Found]:
    """Capture a function. Functions that wait for the device are detected and refused before the capture, because a
    failed capture corrupts the states of random generators."""
    leaves, form = pytree.tree_flatten(inputs)
    own_leaves = [leaf.clone() for leaf in leaves]
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    places = [place for place, tensor in enumerate(own) if tensor.requires_grad]

    def run() -> Found:
        value = part(pytree.tree_unflatten(own_leaves, form), own)
        found = torch.autograd.grad(value, [own[place] for place in places], allow_unused=True)
        return value.detach(), {place: slope for place, slope in zip(places, found, strict=True) if slope is not None}

    with side_stream():
        run()
        with watch_waits() as waits:
            run()
    if waits:
        raise RuntimeError(f"the function cannot be captured, because it waits for the GPU: {waits[0]}")
    return Captured(run, [*own_leaves, *own])
