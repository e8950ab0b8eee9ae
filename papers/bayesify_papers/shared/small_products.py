"""Batched products of small matrices on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_products() -> Iterator[None]:
    """Torch's own batched products in place of oneDNN's, which take 1.2 ms for 20 of 64 x 13 x 50 on an ARM core, not 0.16."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
