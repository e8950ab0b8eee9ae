"""Normal numbers from raw bits: against the quantile function, in distribution, and on any number of threads."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tails import check_tails

from bayesify.maths import noise as numbers
from bayesify.maths.noise import normal_numbers

COUNT = 2**22
SEEDS = range(5, 13)
TABLE = "a38b966748eb2bf39d5bf17eb49367d6e226b78b299dd1a74ece4b37efb7606d"
KNOWN: dict[Any, dict[int, str]] = {
    np.float32: {
        0: "-0x1.014a6ap+1",
        1: "0x1.b5219p+0",
        2: "0x1.332828p+1",
        3: "-0x1.c3aa1p-3",
        numbers.NUMBERS_PER_STREAM - 1: "0x1.71c238p-2",
        numbers.NUMBERS_PER_STREAM: "0x1.7becbcp+0",
        2 * numbers.NUMBERS_PER_STREAM + 5: "0x1.4dec98p-1",
        297176: "0x1.2p-19",  # the smallest of the first three blocks
        302054: "-0x1.29929ep+2",  # the largest
    },
    np.float64: {
        0: "0x1.873bec01a2f07p-1",
        1: "0x1.61ede4ed593f9p+0",
        2: "0x1.9895dc0bcff7ap+0",
        3: "-0x1.62e6cdb599e0cp-2",
        10445: "0x1.48e4b7c17d534p+2",
        numbers.NUMBERS_PER_STREAM - 1: "-0x1.a9b2322b1ffa5p+0",
        numbers.NUMBERS_PER_STREAM: "0x1.4ee6f59cc52dep+0",
        2 * numbers.NUMBERS_PER_STREAM + 5: "-0x1.8cc22d75c9208p+0",
        311346: "0x1.f313b1cea2311p-21",
    },
}
"""Numbers of seed 7 by place, as they were on ARM."""


@pytest.fixture(scope="module")
def blocks() -> np.ndarray:
    """Of neighboring seeds: [8, 32, BLOCK]."""
    return np.stack([normal_numbers(COUNT, np.float32, seed).reshape(-1, numbers.NUMBERS_PER_STREAM) for seed in SEEDS])


@pytest.fixture(scope="module")
def many(blocks: np.ndarray) -> np.ndarray:
    return blocks[0].reshape(-1).astype(np.float64)


class GivenBits:
    """A stream of bits that are known."""

    def __init__(self, integers: np.ndarray) -> None:
        self.bits = np.ascontiguousarray(integers, dtype=np.int32).view(np.uint64)

    def integers(self, high: int, size: int, dtype: type, endpoint: bool) -> np.ndarray:
        found, self.bits = self.bits[:size], self.bits[size:]
        return found


def test_each_number_is_the_quantile_of_its_bits() -> None:
    small = np.arange(1, 4097)
    large = np.geomspace(4097, 2**31 - 1, 2**15).astype(np.int64)
    integers = np.concatenate([small, -small, large, -large, [-(2**31), 0]])
    found = np.empty(len(integers), np.float32)
    numbers._by_table(GivenBits(integers), found)
    # half an integer from 0: no number is infinite
    tail = np.maximum(np.abs(integers), 0.5) / 2**32
    exact = np.where(integers < 0, -1, 1) * stats.norm.isf(tail)
    assert np.abs(found - exact)[:-1].max() < 1e-5
    assert 6 < found[-1] < 6.4


def test_moments_and_tails(many: np.ndarray) -> None:
    variances = {1: 1, 2: 2, 3: 15, 4: 96, 6: 10395 - 225}
    for power, expected in {1: 0, 2: 1, 3: 0, 4: 3, 6: 15}.items():
        error = (many**power).mean() - expected
        assert abs(error) < 4.5 * np.sqrt(variances[power] / COUNT), power
    check_tails(many, (1, 2, 3, 4))
    assert stats.kstest(many[: 2**20], "norm").pvalue > 1e-4


def test_tails_to_five_sigma(blocks: np.ndarray) -> None:
    """Of 2^25 numbers 19 are expected beyond 5 sigma and 53 beyond 4.8: none, if they were cut there, would be one in 10^8."""
    check_tails(blocks, (4.5, 5))
    assert np.abs(blocks).max() > 5.2


def test_numbers_are_not_correlated(many: np.ndarray) -> None:
    for lag in (1, 2, 3, 4096, numbers.NUMBERS_PER_STREAM):
        assert abs((many[:-lag] * many[lag:]).mean()) < 4.5 / np.sqrt(COUNT - lag), lag


def test_streams_of_neighboring_seeds_and_blocks_have_nothing_in_common(blocks: np.ndarray) -> None:
    """256 blocks: no two are equal, no two numbers in a row come twice, and no pair correlates.

    Chance: 2^40 / 2 pairs of places, each of more than 55 bits; 32,640 pairs of blocks beyond 6 standard errors, 6e-5.
    """
    every = blocks.reshape(-1, numbers.NUMBERS_PER_STREAM)
    assert len({hashlib.sha256(block.tobytes()).digest() for block in every}) == len(every)
    begins = every[:, :4096]
    pairs = np.stack([np.ascontiguousarray(begins[:, at : 4094 + at]).view(np.uint64) for at in (0, 1)])
    assert np.unique(pairs).size == pairs.size
    wide = every[:, : 2**13].astype(np.float64)
    for power in (1, 2):
        values = wide**power - (power - 1)
        errors = values @ values.T / (power * np.sqrt(2**13))  # variances are 1 and 2
        assert np.abs(errors[~np.eye(len(errors), dtype=bool)]).max() < 6


def test_double_precision_has_streams_of_its_own_for_each_block() -> None:
    every = np.concatenate(
        [normal_numbers(18 * numbers.NUMBERS_PER_STREAM, np.float64, seed).reshape(18, -1) for seed in (5, 6)]
    )
    assert len({block[:64].tobytes() for block in every}) == len(every)
    check_tails(every, (1, 2, 3, 4, 4.5))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_number_of_threads_and_of_numbers_changes_nothing(kind: type) -> None:
    before = torch.get_num_threads()
    count = 3 * numbers.NUMBERS_PER_STREAM + 12_345
    try:
        torch.set_num_threads(1)
        alone = normal_numbers(count, kind, 1)
        torch.set_num_threads(3)
        together = normal_numbers(count, kind, 1)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(alone, together)
    few = normal_numbers(numbers.NUMBERS_PER_STREAM + 7, kind, 1)
    assert np.array_equal(few[: numbers.NUMBERS_PER_STREAM], alone[: numbers.NUMBERS_PER_STREAM])


def test_the_table_has_the_same_bits_on_all_machines() -> None:
    """It is rounded from double precision: quantiles that are off by 4 ulp change none of its bits."""
    starts, slopes = numbers._table()
    assert hashlib.sha256(starts.tobytes() + slopes.tobytes()).hexdigest() == TABLE


@pytest.mark.parametrize("kind", list(KNOWN))
def test_numbers_of_a_seed_are_within_two_ulp_of_those_of_another_machine(kind: type) -> None:
    found = normal_numbers(3 * numbers.NUMBERS_PER_STREAM, kind, 7)
    for place, text in KNOWN[kind].items():
        known = kind(float.fromhex(text))
        assert abs(found[place] - known) <= 2 * np.spacing(abs(known)), place
