"""Normal numbers from raw bits: against the quantile function, in distribution, and on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify.maths import normal_numbers as numbers
from bayesify.maths.normal_numbers import normal_numbers

COUNT = 2**22


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return normal_numbers(COUNT, np.float32, 5).astype(np.float64)


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
    for sigma in (1, 2, 3, 4, 5):
        expected = 2 * stats.norm.sf(sigma) * COUNT
        assert abs((np.abs(many) > sigma).sum() - expected) < 4.5 * np.sqrt(expected) + 1, sigma
    assert stats.kstest(many[: 2**20], "norm").pvalue > 1e-4


def test_numbers_and_streams_are_not_correlated(many: np.ndarray) -> None:
    for lag in (1, 2, 3, 4096, numbers.BLOCK):
        assert abs((many[:-lag] * many[lag:]).mean()) < 4.5 / np.sqrt(COUNT - lag), lag
    other = normal_numbers(COUNT, np.float32, 6)
    assert abs((many * other).mean()) < 4.5 / np.sqrt(COUNT)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_number_of_threads_and_of_numbers_changes_nothing(kind: type) -> None:
    before = torch.get_num_threads()
    count = 3 * numbers.BLOCK + 12_345
    try:
        torch.set_num_threads(1)
        alone = normal_numbers(count, kind, 1)
        torch.set_num_threads(3)
        together = normal_numbers(count, kind, 1)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(alone, together)
    few = normal_numbers(numbers.BLOCK + 7, kind, 1)
    assert np.array_equal(few[: numbers.BLOCK], alone[: numbers.BLOCK])


def test_the_first_numbers_of_a_seed_are_these() -> None:
    """The stream is one on all machines; the table may differ in its last bit."""
    found = normal_numbers(5, np.float32, 7)
    assert found == pytest.approx([-2.0100834, 1.7075434, 2.399663, -0.22053921, 0.6909616], rel=3e-7)
