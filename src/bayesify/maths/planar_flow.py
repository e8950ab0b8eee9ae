"""Planar flows: chains of residual layers with one unit each, and their log-determinants."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

IDENTITY_PRODUCT = math.log(math.e - 1)
"""Value of w . u at which the constrained u has no component along w. A layer whose u is a multiple of w is then the identity."""


MARGIN_IN_ROUNDINGS = 32
"""Distance of the constrained product from -1, in rounding errors of w . u."""


def slope(u: Tensor, w: Tensor) -> Tensor:
    r"""The product $w \cdot \hat u$ of an invertible layer. It is larger than -1 by a margin that exceeds rounding
    errors.

    $$ w \cdot \hat u = \epsilon + (1 - \epsilon)\, \text{softplus}(w \cdot u) - 1, \qquad
       \epsilon = 32\, \text{eps}\, (1 + |u| |w|) \le \tfrac12 $$

    For $w \cdot u$ far below 0, softplus rounds to 0; without the margin $\epsilon$, the product would then be -1, and the layer
    would not be invertible. For u and w [..., D], the result is [..., 1].
    """
    size = torch.linalg.vector_norm(u, dim=-1, keepdim=True) * torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    least = (MARGIN_IN_ROUNDINGS * torch.finfo(u.dtype).eps * (1 + size)).clamp_max(0.5)
    found: Tensor = least + (1 - least) * F.softplus((w * u).sum(-1, keepdim=True)) - 1
    return found


def invertible(u: Tensor, w: Tensor) -> Tensor:
    r"""Change u to $\hat u$, so that the planar layer is invertible. `slope` computes $w \cdot \hat u > -1$.

    $$ \hat u = u + (w \cdot \hat u - w \cdot u)\, w / |w|^2 $$
    """
    product = (w * u).sum(-1, keepdim=True)
    return u + (slope(u, w) - product) * w / w.square().sum(-1, keepdim=True)


def planar(z: Tensor, u: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""One planar layer and the log-determinant of its Jacobian (Rezende & Mohamed 2015; equations 13 and 14 of Rossi et al.
    2020).

    $$ f(z) = z + \hat u \tanh(w \cdot z + b), \qquad
       \log |\det f'| = \log (1 + w \cdot \hat u\, \tanh'(w \cdot z + b)) $$

    The vectors z, w, f(z) and the unconstrained u (see `invertible`) are [..., D]; b and the log-determinant are [...].
    """
    activation = ((w * z).sum(-1) + b).tanh()
    log_det = (slope(u, w).squeeze(-1) * (1 - activation.square())).log1p()
    return z + invertible(u, w) * activation.unsqueeze(-1), log_det
