"""Standard normal numbers, fast on the CPU and the same for the same seed on any number of cores."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**17
"""Numbers that one stream makes: a millisecond of work, so that making the stream costs little beside it."""


def standard_normal(count: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard normal numbers of a tensor's type on its device.

    On the CPU, where torch makes them on one core (5e7 a second on the machine of `benchmarks/results`), they come from
    numpy's ziggurat (1.3e8) in blocks of their own streams, shared out over the cores; the torch generator gives
    the seed, so the same generator gives the same numbers whatever the number of cores. Elsewhere they are torch's own.

    Args:
        count: How many.
        like: Gives type and device.
        generator: Source of randomness, on any device; the global one if `None`.

    Returns:
        [count].
    """
    where = generator.device if generator is not None else like.device
    fast = where.type == "cpu" and like.dtype in (torch.float32, torch.float64) and count >= 2**10
    if not fast or torch.compiler.is_compiling():
        return torch.randn(count, dtype=like.dtype, device=where, generator=generator).to(like.device)
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    numbers: Any = np.empty(count, dtype=np.float32 if like.dtype == torch.float32 else np.float64)

    def fill(block: int) -> None:
        stream = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, block))))
        stream.standard_normal(out=numbers[block * BLOCK : (block + 1) * BLOCK], dtype=numbers.dtype)

    blocks = range(-(-count // BLOCK))
    workers = min(torch.get_num_threads(), len(blocks))
    if workers > 1:
        list(_pool(workers, os.getpid()).map(fill, blocks))
    else:
        for block in blocks:
            fill(block)
    return torch.from_numpy(numbers).to(like.device)


@lru_cache(maxsize=4)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Threads that fill blocks; a forked process gets its own, since threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="bayesify-noise")
