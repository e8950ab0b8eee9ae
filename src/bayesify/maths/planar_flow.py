"""Planar flows: chains of residual layers with one unit each, and their log-determinants."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

STILL = math.log(math.e - 1)
"""The value of w . u at which the constrained u is 0 along w, and the layer the identity if u is a multiple of w."""


def invertible(u: Tensor, w: Tensor) -> Tensor:
    r"""The part of u that keeps a planar layer one to one: $w \cdot \hat u > -1$.

    $$ \hat u = u + (\text{softplus}(w \cdot u) - 1 - w \cdot u)\, w / |w|^2 $$

    Args:
        u: [..., D].
        w: [..., D].
    """
    product = (w * u).sum(-1, keepdim=True)
    return u + (F.softplus(product) - 1 - product) * w / w.square().sum(-1, keepdim=True)


def planar(z: Tensor, u: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""One planar layer and the log-determinant of its Jacobian (Rezende & Mohamed 2015; eqs. 13 and 14 of Rossi et al. 2020).

    $$ f(z) = z + \hat u \tanh(w \cdot z + b), \qquad
       \log |\det f'| = \log (1 + w \cdot \hat u\, \tanh'(w \cdot z + b)) $$

    Args:
        z: [..., D].
        u: Unconstrained; see `invertible`.
        w: [..., D].
        b: [...].

    Returns:
        f(z), [..., D], and the log-determinant, [...].
    """
    step = invertible(u, w)
    activation = ((w * z).sum(-1) + b).tanh()
    log_det = ((w * step).sum(-1) * (1 - activation.square())).log1p()
    return z + step * activation.unsqueeze(-1), log_det
