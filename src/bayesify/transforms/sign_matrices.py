"""Hadamard matrices as tensors."""

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, checked

_MATRICES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


@checked
def hadamard_matrix(size: Count, like: Tensor) -> Tensor:
    r"""Sylvester's symmetric matrix H of signs, with $(-1)^{\text{popcount}(i \wedge j)}$ at row i and column j; $H H = D I$.

    H is [D, D] with entries 1 and -1, where D is `size`, a power of two. It has the type and the device of `like`. It is computed
    on the device, so this function works inside a compiled or captured function.
    """
    index = torch.arange(size, device=like.device)
    both = index.unsqueeze(-1) & index
    for shift in (16, 8, 4, 2, 1):
        if size > 1 << shift:
            both = both ^ (both >> shift)
    return (1 - 2 * (both & 1)).to(like.dtype)


def sign_matrix(size: int, like: Tensor) -> Tensor:
    """`hadamard_matrix`, cached by size, type and device.

    A matrix is not cached if it is made by a compiler, in a dispatch mode (such as fake tensors), or during the capture of a CUDA
    graph. Such a matrix is valid only within that compilation, mode or capture.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return hadamard_matrix(size, like)
    key = (size, like.dtype, like.device)
    known = _MATRICES.get(key)
    if known is not None:
        return known
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return hadamard_matrix(size, like)
    with torch.inference_mode(False), torch.no_grad():
        made = hadamard_matrix(size, torch.empty(0, dtype=like.dtype, device=like.device))
    _MATRICES[key] = made
    return made
