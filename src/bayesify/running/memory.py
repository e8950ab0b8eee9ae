"""Memory budgets: how they are parsed, and how many rows of a batch fit into a budget."""

import re
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify.running.inputs_and_outputs import Args, Kwargs, WeightDict, batch_size, split_rows
from bayesify.running.runner import Runner

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MEMORY_BUDGET = 256 * 2**20
"""Default budget for the activations in one chunk of a prediction, in bytes."""
PROBED_ROWS = 4
"""Number of examples in the pass that measures memory."""


def parse_bytes(size: int | str) -> int:
    """A number of bytes from an integer or from text such as `"1GiB"`. Raises `ValueError` for anything else."""
    text = str(size).strip()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text)
    if isinstance(size, bool) or match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise ValueError(f"memory={size!r}; give a positive number of bytes, or text such as '1GiB'")
    return int(float(match[1]) * UNITS[match[2].upper()])


def in_words(size: int) -> str:
    """A number of bytes in readable form."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def warn_of_mixing(few: Tensor, piece: Tensor) -> None:
    """Warn if the outputs of the first rows depend on other rows, because splitting the batch then gives wrong results."""
    rows = min(len(few), len(piece))
    if rows == len(piece) == len(few) or few.shape[1:] != piece.shape[1:] or not few.is_floating_point():
        return
    tolerance = 0.1 if few.dtype in (torch.float16, torch.bfloat16) else 1e-2
    alone, beside = few[:rows].float(), piece[:rows].float()
    if bool((alone - beside).abs().max() > tolerance * (1 + beside.abs().max())):
        warnings.warn(
            "predict: the batch was split to stay within the memory budget, but the network's outputs for a row "
            "depend on the other rows or are random; give split_batch=False, or a larger memory=",
            stacklevel=2,
        )


@torch.no_grad()
def count_activation_bytes(
    runner: Runner, args: Args, kwargs: Kwargs, values: WeightDict | None = None
) -> tuple[float, Any]:
    """Number of bytes that one pass allocates per example, and the output of a few examples."""
    probe = min(batch_size(args, kwargs), PROBED_ROWS)
    few_args, few_kwargs = next(split_rows(args, kwargs, probe))
    try:
        with CountBytes() as counter:
            output = runner.call(values or {}, few_args, few_kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        runner.call(values or {}, args, kwargs)  # raises an error with a plain message if inputs do not fit the network
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"predict: the network accepts the whole batch of {batch_size(args, kwargs)} rows but not the first {probe} rows "
            f"({reason}); give split_batch=False, so that the batch is never split"
        ) from error
    return counter.bytes / probe, output


class CountBytes(TorchDispatchMode):
    """Dispatch mode that adds up the `bytes` of all tensors that operations return. `largest` is the maximum over operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this method, the first operation would make torch import its compiler, which takes seconds."""
        return False

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made, given = (
            {_place(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
            for tree in (output, (args, kwargs))
        )
        new = [leaf for place, leaf in made.items() if place not in given]  # a view allocates no memory
        size = sum(leaf.numel() * leaf.element_size() for leaf in new)
        self.bytes, self.largest = self.bytes + size, max(self.largest, size)
        return output


def _place(tensor: Tensor) -> int:
    """Address of a tensor's memory. A sparse tensor has none of its own, so it counts as another tensor each time."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)
