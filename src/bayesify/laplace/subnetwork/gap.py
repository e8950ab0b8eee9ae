"""Distance between the posteriors of a subnetwork and of the whole network."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.arguments.checks import checked
from bayesify.laplace.subnetwork.selectors import as_mask
from bayesify.maths.eigen import stable_eigh
from bayesify.maths.gamma import widened


@checked
def posterior_gap(covariance: Tensor, mask: Tensor) -> Tensor:
    r"""Squared 2-Wasserstein distance between $\mathcal{N}(m, \Sigma)$ and $\mathcal{N}(m, M \odot \Sigma)$, the posterior gap.

    $$ \operatorname{tr}\Sigma + \operatorname{tr}(M \odot \Sigma) - 2 \operatorname{tr}\,(\Sigma\,(M \odot \Sigma))^{1/2} $$

    This is equation 12 of Daxberger et al. (2021), with $M = m m^\top$ for a mask m. The last trace is the sum of the square
    roots of the eigenvalues of $\Sigma\,(M \odot \Sigma)$. These eigenvalues equal the eigenvalues of the symmetric $R^\top
    \Sigma R$ with $R R^\top = M \odot \Sigma$.

    Args:
        covariance: $\Sigma$, [P, P].
        mask: Mask m, which is true for the weights of the subnetwork, [P].

    Returns:
        A scalar. It is 0 for a mask that is true everywhere.

    Raises:
        ValueError: If the shapes do not fit together, or if the matrix is not a covariance.
    """
    covariance, chosen = torch.as_tensor(covariance), as_mask(mask).reshape(-1)
    covariance = covariance if covariance.is_floating_point() else covariance.double()
    dtype = covariance.dtype
    if covariance.ndim != 2 or covariance.shape != (chosen.numel(), chosen.numel()):
        raise ValueError(
            f"posterior_gap: the covariance has shape {tuple(covariance.shape)}, and the mask has {chosen.numel()} "
            "entries; give [P, P] and [P]"
        )
    scale = covariance.abs().amax()
    symmetric = bool(torch.isfinite(scale)) and bool((covariance - covariance.T).abs().amax() <= 1e-4 * scale)
    if not symmetric or bool((covariance.diagonal() < 0).any()):
        raise ValueError(
            "posterior_gap: the covariance is not finite, is not symmetric, or has a negative variance; give a "
            "covariance matrix"
        )
    covariance = widened(covariance)
    least = stable_eigh(0.5 * (covariance + covariance.T), "posterior_gap: the covariance")[0].amin()
    if bool(least < -1e-4 * scale):
        raise ValueError(
            f"posterior_gap: the covariance has the eigenvalue {float(least):.3g}; give a positive definite matrix"
        )
    inside = covariance[chosen][:, chosen]
    values, vectors = stable_eigh(inside, "posterior_gap: the covariance")
    root = vectors * values.clamp_min(0).sqrt()  # inside = root root^T
    middle = root.T @ inside @ root
    roots = stable_eigh(0.5 * (middle + middle.T), "posterior_gap: the product")[0].clamp_min(0).sqrt()
    return (covariance.diagonal().sum() + inside.diagonal().sum() - 2 * roots.sum()).to(dtype)
