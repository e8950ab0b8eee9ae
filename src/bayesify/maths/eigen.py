"""Eigenvectors of symmetric matrices that survive rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_eigh(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    r"""Eigenvalues in ascending order and eigenvectors of symmetric matrices, $A = Q \Lambda Q^\top$, in the type of A.

    They are computed in float64, on the CPU where the device has no such type: in float32 some machines' LAPACK does not converge
    for curvatures of many zero rows.

    Args:
        matrix: A, [..., n, n].
        what: What it is, for errors.

    Returns:
        [..., n], and [..., n, n].

    Raises:
        ValueError: If it is not finite, or no eigenvectors are found.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{what} is not finite; look for NaN or infinity in the data and in the network's outputs")
    wide = (matrix.cpu() if matrix.device.type == "mps" else matrix).double()
    try:
        values, vectors = torch.linalg.eigh(wide)
    except torch.linalg.LinAlgError as error:
        size = matrix.shape[-1]
        raise ValueError(
            f"{what} ({size} x {size}) has no eigenvectors that could be computed; standardize the inputs, or leave out weights "
            "without curvature"
        ) from error
    return values.to(matrix), vectors.to(matrix)
