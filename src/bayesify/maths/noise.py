"""Sources of random numbers: fast on the CPU, reproducible on any number of cores, and separate for each model in a stack."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.maths.autograd_functions import Function, leading_axes
from bayesify.maths.fused_draws import has_kernel, kernel_normals


class NoiseSource:
    """Source of the random numbers of a draw: a torch generator. Subclasses can take the numbers from elsewhere.

    Args:
        generator: Generator on any device; the global generator by default.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def generators(self) -> list[torch.Generator]:
        """The torch generators behind the numbers, except the global generator."""
        return [] if self.generator is None else [self.generator]

    def normal(self, count: int, like: Tensor) -> Tensor:
        """Standard normal numbers, [count], with the dtype and device of a tensor.

        Numbers on the CPU come from `normal_numbers`, which uses all cores; torch's own function uses only one. Numbers
        for a GPU also come from `normal_numbers` if the generator is on the CPU. Other numbers on a GPU with Triton
        come from `kernel_normals`. In all these cases the torch generator gives the seed, so the same generator gives
        the same numbers on any number of cores. In all other cases, torch itself generates the numbers.
        """
        if self.by_kernel(like):
            return kernel_normals(count, self.seed(like.device))
        where = self._where(like.device)
        fast = where.type == "cpu" and like.dtype in (torch.float32, torch.float64) and count >= 2**10
        if not fast or torch.compiler.is_compiling():
            return torch.randn(count, dtype=like.dtype, device=where, generator=self.generator).to(like.device)
        seed = int(torch.randint(2**63 - 1, (), generator=self.generator))
        kind = np.float32 if like.dtype == torch.float32 else np.float64
        return torch.from_numpy(normal_numbers(count, kind, seed)).to(like.device)

    def by_kernel(self, like: Tensor) -> bool:
        """Whether normal numbers for a tensor come from `kernel_normals`. Other kernels can then compute the same
        numbers where they need them."""
        if not like.is_cuda or torch.compiler.is_compiling():
            return False
        return has_kernel(like) and self._where(like.device).type == "cuda"

    def seed(self, device: torch.device) -> Tensor:
        """Seed from the generator, [1]. It stays on the device and is new in each replay of a CUDA graph."""
        return torch.randint(2**63 - 1, (1,), generator=self.generator, device=self._where(device)).to(device)

    def uniform(self, count: int, device: torch.device) -> Tensor:
        """Uniform numbers in [0, 1); shape [count]."""
        return torch.rand(count, generator=self.generator, device=self._where(device)).to(device)

    def permutation(self, count: int, device: torch.device) -> Tensor:
        """The integers below `count` in random order, [count]."""
        return torch.randperm(count, generator=self.generator, device=self._where(device)).to(device)

    def gamma(self, shape: Tensor) -> Tensor:
        r"""Draws of $\mathrm{Gamma}(\text{shape}, 1)$, differentiable with respect to the shape; see `draw_gamma`."""
        return torch._standard_gamma(shape.to(self._where(shape.device)), generator=self.generator).to(shape.device)

    def _where(self, device: torch.device) -> torch.device:
        return self.generator.device if self.generator is not None else device


class SeededNoise(NoiseSource):
    """Source of standard normal numbers that are computed from an existing seed of shape [1]."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(None)
        self.value = value

    def seed(self, device: torch.device) -> Tensor:
        return self.value


Randomness = torch.Generator | NoiseSource | None
"""Argument type for sources of random numbers: a generator, a source, or `None` for torch's global generator."""


class StackedNoise(NoiseSource):
    """Noise for R models under `vmap`: each model gets the numbers that its own source would give it alone.

    If a single source is given instead of one per model, it generates all numbers in one call, in order of models. `index` is the
    index of the model, which is a scalar under `vmap`.
    """

    def __init__(self, sources: Sequence[NoiseSource] | NoiseSource, index: Tensor) -> None:
        super().__init__(None)
        self.sources, self.index = sources, index

    def generators(self) -> list[torch.Generator]:
        sources = [self.sources] if isinstance(self.sources, NoiseSource) else self.sources
        return [generator for source in sources for generator in source.generators()]

    def by_kernel(self, like: Tensor) -> bool:
        source = self.sources if isinstance(self.sources, NoiseSource) else self.sources[0]
        return source.by_kernel(like)

    def normal(self, count: int, like: Tensor) -> Tensor:
        return self._each(lambda source, many: source.normal(many * count, like).view(many, count))

    def uniform(self, count: int, device: torch.device) -> Tensor:
        return self._each(lambda source, many: source.uniform(many * count, device).view(many, count))

    def permutation(self, count: int, device: torch.device) -> Tensor:
        return self._each(lambda source, many: torch.stack([source.permutation(count, device) for _ in range(many)]))

    def gamma(self, shape: Tensor) -> Tensor:
        return self._each(lambda source, many, shapes: source.gamma(shapes), shape)

    def _each(self, make: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        made: Tensor = _PerModel.apply(self.index, self.sources, make, *arguments)
        return made


class _PerModel(Function):
    """Function of the source and tensors of one model; under `vmap`, it is evaluated for all models at once."""

    @staticmethod
    def forward(index: Tensor, sources: Any, make: Any, *arguments: Tensor) -> Tensor:
        raise RuntimeError("StackedNoise was used outside vmap, but it works only inside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, index: Tensor, sources: Any, make: Any, *arguments: Tensor) -> tuple[Tensor, int]:
        rows = leading_axes(info, in_dims[3:], arguments)
        if isinstance(sources, NoiseSource):
            return make(sources, info.batch_size, *rows), 0
        parts = [make(source, 1, *(row[at : at + 1] for row in rows)) for at, source in enumerate(sources)]
        return torch.cat(parts), 0


def choose_members(num_members: int, num_draws: int, generator: Randomness, device: torch.device) -> Tensor:
    """For each draw of a mixture, the index of its member, in random order: [S]. The numbers of draws per member differ by at
    most one.

    Every index is uniformly distributed over the members, as with independent choices. If `num_draws` equals
    `num_members`, however, each member occurs once, which removes the Monte Carlo error of the choice.
    """
    source = source_of(generator)
    order = [source.permutation(num_members, device) for _ in range(-(-num_draws // num_members))]
    return torch.cat(order)[:num_draws]


def standard_normal(count: int, like: Tensor, generator: Randomness = None) -> Tensor:
    """Standard normal numbers, [count], with the dtype and device of a tensor; see `NoiseSource.normal`."""
    return source_of(generator).normal(count, like)


def source_of(generator: Randomness) -> NoiseSource:
    """The given source, or a source that draws from the given generator."""
    return generator if isinstance(generator, NoiseSource) else NoiseSource(generator)


NUMBERS_PER_STREAM = 2**17
"""Count of numbers per stream, made in one call. The call takes half a millisecond, so the cost of creating the stream is small.
With shorter streams, threads wait for Python's lock (two x86-64 cores: 24 ms instead of 14 ms for four million numbers)."""


def normal_numbers(count: int, kind: Any, seed: int) -> Any:
    r"""Standard normal numbers, [count]; a seed gives the same numbers on any number of cores.

    The numbers are generated in blocks; block b has its own stream, `SFC64` seeded with (seed, b). In float32, each number is
    computed from a random 32-bit signed integer i: $x = \operatorname{sign}(i)\, \Phi^{-1}(1 - |i| / 2^{32})$. $\Phi^{-1}$ is
    approximated by a piecewise linear function with 128 segments per power of two of |i|; it is accurate to $10^{-5}$ up to 6.2
    standard deviations. In float64, the numbers come from NumPy's ziggurat method.
    """
    numbers: Any = np.empty(count, dtype=kind)
    blocks = range(-(-count // NUMBERS_PER_STREAM))
    workers = min(torch.get_num_threads(), len(blocks))

    def fill(block: int) -> None:
        stream = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, block))))
        out = numbers[block * NUMBERS_PER_STREAM : (block + 1) * NUMBERS_PER_STREAM]
        if numbers.dtype == np.float32:
            _by_table(stream, out)
        else:
            stream.standard_normal(out=out, dtype=numbers.dtype)

    if workers > 1:
        list(_pool(workers, os.getpid()).map(fill, blocks))
    else:
        for block in blocks:
            fill(block)
    return numbers


def _by_table(stream: Any, out: Any) -> None:
    """Fill an array with normal numbers made from the bits of a stream."""
    starts, slopes = _table()
    # This call releases Python's lock.
    bits = stream.integers(2**64 - 1, size=(len(out) + 1) // 2, dtype=np.uint64, endpoint=True)
    scaled = bits.view(np.int32)[: len(out)].astype(np.float32)
    # The sign, the exponent and the first seven mantissa bits are the upper half of a float32 number.
    place = scaled.view(np.uint16)[1 if np.little_endian else 0 :: 2].astype(np.intp)
    slopes.take(place, out=out, mode="clip")
    np.multiply(out, scaled, out=out)
    starts.take(place, out=scaled, mode="clip")
    np.add(out, scaled, out=out)


@lru_cache(maxsize=1)
def _table() -> tuple[Any, Any]:
    """Intercepts and slopes of the segments of a piecewise linear quantile function, [2^16] each. The index of an integer's
    segment is the upper 16 bits, including the sign bit, of the integer's float32 representation."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    exponent = (upper >> 23) & 0xFF
    used = (exponent >= 127) & (exponent <= 158)  # 1 to 2^32; 0 occurs once in 2^32 numbers and is treated as 1
    low = np.where(used, upper, 0x3F800000 | (upper & 0x80000000)).astype(np.uint32)
    left = low.view(np.float32).astype(np.float64)
    right = (low + 2**16).view(np.float32).astype(np.float64)
    middle = (left + right) / 2
    slope = np.where(used, (_quantile(right) - _quantile(left)) / (right - left), 0.0)
    # The chord is shifted by two thirds of its error in the middle, which gives it the mean of the function on the piece.
    sag = (_quantile(left) + _quantile(right)) / 2 - _quantile(middle)
    start = _quantile(left) - slope * left - np.where(used, sag * 2 / 3, 0.0)
    return start.astype(np.float32), slope.astype(np.float32)


def _quantile(integer: Any) -> Any:
    tail = torch.from_numpy(np.clip(np.abs(integer) / 2**32, 2.0**-33, 0.5))
    return np.copysign(-torch.special.ndtri(tail).numpy(), integer)


@lru_cache(maxsize=4)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:
    """Pool of threads that fill blocks. A forked process gets its own pool, because threads do not survive a fork."""
    return ThreadPoolExecutor(workers, thread_name_prefix="bayesify-noise")
