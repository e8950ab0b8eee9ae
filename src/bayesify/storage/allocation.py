"""A limit on memory allocation while restoring an object that a file describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SPARE_BYTES, SPARE_CALLS = 2**26, 20_000
"""Number of bytes of one operation, and number of operations, that are always allowed."""
ONE_CALL_BYTES_RATIO, ALL_CALLS_BYTES_RATIO = 8, 256
"""Allowed number of bytes of one operation, and of all operations together, as multiples of the file's and the network's bytes."""
CALLS_PER_NUMBER = 20
"""Allowed number of operations for each number in the file and the network."""


class AllocationLimit(TorchDispatchMode):
    """Raises `ValueError` before an operation whose result is far larger than the stored tensors justify.

    The operation first runs on the meta device, which allocates no memory, to find the size of its result.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler in the first operation, which takes seconds; nothing here is compiled.
        return False

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.at_once = SPARE_BYTES + ONE_CALL_BYTES_RATIO * size
        self.left = 8 * SPARE_BYTES + ALL_CALLS_BYTES_RATIO * size
        self.calls_left = SPARE_CALLS + CALLS_PER_NUMBER * sum(tensor.numel() for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = _allocated(func, args, kwargs)
        self.left -= size
        self.calls_left -= 1
        if size > self.at_once or self.left < 0 or self.calls_left < 0:
            raise ValueError("its configuration describes far more numbers than the file contains")
        return func(*args, **kwargs)


def _allocated(func: Any, args: Any, kwargs: Any) -> int:
    """Number of bytes of the new tensors that an operation returns; 0 if the size cannot be determined in advance."""
    schema = func._schema
    if all(entry.alias_info is not None for entry in schema.returns):
        return 0  # a view or an in-place operation
    args, kwargs = pytree.tree_map_only(
        Tensor,
        lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"),
        (args, dict(kwargs)),
    )
    if any(entry.name == "device" for entry in schema.arguments):
        kwargs["device"] = torch.device("meta")
    kwargs.pop("generator", None)
    try:
        made = func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return 0
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor))
