"""All code that depends on the version of torch."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules (torch 2.6 has no function for this)."""
    hooks = nn.modules.module
    return bool(
        hooks._global_forward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_backward_pre_hooks
        or hooks._global_backward_hooks
    )


def cpu_float32_precisions() -> list[str]:
    """The settings that say to which precision float32 products on the CPU may be rounded.

    `"none"` and `"ieee"` keep all digits. Before version 2.9, torch has one setting for all matrix products; later versions have
    a setting per library and operation.
    """
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return ["ieee" if torch.get_float32_matmul_precision() == "highest" else torch.get_float32_matmul_precision()]
    return [value.fp32_precision for value in (backends, backends.mkldnn.matmul, backends.mkldnn.conv)]


def structure_key(structure: Any) -> Hashable:
    """A structure from `tree_flatten`, in a form that can be part of a dictionary's key.

    In torch 2.6, structures contain lists and cannot be hashed, so their text is used instead.
    """
    try:
        hash(structure)
    except TypeError:
        return str(structure)
    found: Hashable = structure
    return found
