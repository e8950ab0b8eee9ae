"""Normal numbers by a counter: against published words of the generator, in distribution, and as draws take them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from philox_reference import box_muller, philox, philox_normals
from scipy import stats
from tails import check_tails

from bayesify.maths import fused_draws
from bayesify.maths.noise import NoiseSource
from bayesify.maths.philox import TILE
from bayesify.posteriors.common.base import DrawRequest
from bayesify.posteriors.mean_field import like_layout
from bayesify.priors import PriorDraw

COUNT = 2**20


def words(low: int, high: int, seed: int) -> list[int]:
    found = philox(torch.tensor([low]), torch.tensor([high]), torch.tensor([seed]))
    return [int(word) for word in found]


def test_words_are_the_known_answer_of_random123() -> None:
    assert words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    reference = np.random.Philox(
        key=0
    )  # of 64-bit words: another member of the family, so only that ours differ by counter
    assert reference.state["buffer_pos"] == 4
    seen = {tuple(words(low, high, seed)) for low in (0, 1, 2**31) for high in (0, 1) for seed in (0, 1, 2**40 + 7)}
    assert len(seen) == 18


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return philox_normals(COUNT, torch.tensor([2**62 + 12345])).double().numpy()


def test_moments_and_tails(many: np.ndarray) -> None:
    variances = {1: 1, 2: 2, 3: 15, 4: 96}
    for power, expected in {1: 0, 2: 1, 3: 0, 4: 3}.items():
        error = (many**power).mean() - expected
        assert abs(error) < 4.5 * np.sqrt(variances[power] / COUNT), power
    check_tails(many, (1, 2, 3, 4, 4.5))
    assert stats.kstest(many, "norm").pvalue > 1e-4


def test_tails_to_six_sigma() -> None:
    """Of the words that lead beyond 4.5 sigma, which are one in 25,000; and as the stream has such a number."""
    most = int(2**32 * math.exp(-(4.5**2) / 2))
    generator = torch.Generator().manual_seed(0)
    radius = torch.randint(most, (2**20,), generator=generator)
    angle = torch.randint(2**32, (2**20,), generator=generator)
    for found in box_muller(radius, angle):
        check_tails(found.numpy(), (4.5, 4.8, 5, 5.5, 6), share=most / 2**32)
    beyond = philox_normals(3 * TILE, torch.tensor([2]))[5189]
    assert float(beyond) == pytest.approx(float.fromhex("0x1.474f4ep+2"), rel=2**-22)


def test_streams_of_neighboring_seeds_and_tiles_have_nothing_in_common() -> None:
    """No two tiles are equal, and no pair correlates beyond 6 standard errors: chance 7e-5 for 35,000 pairs."""
    tiles = torch.cat([philox_normals(33 * TILE, torch.tensor([2**62 + seed])).view(-1, TILE) for seed in range(8)])
    assert len({tile.numpy().tobytes() for tile in tiles}) == len(tiles)
    errors = (tiles.double() @ tiles.double().T / math.sqrt(TILE)).fill_diagonal_(0)
    assert float(errors.abs().max()) < 6


def test_numbers_and_streams_are_not_correlated(many: np.ndarray) -> None:
    other = philox_normals(COUNT, torch.tensor([2**62 + 12346])).double().numpy()
    for left, right in [(many[:-lag], many[lag:]) for lag in (1, 2, 3, 4, TILE)] + [(many, other)]:
        for power in (1, 2):
            spread = (many**power).var()
            error = ((left**power - (left**power).mean()) * right**power).mean()
            assert abs(error) < 4.5 * spread / np.sqrt(len(left))


def test_a_stream_begins_alike_whatever_its_length() -> None:
    seed = torch.tensor([99])
    longest = philox_normals(3 * TILE + 5, seed)
    for count in (1, 7, TILE, 2 * TILE + 1):
        assert torch.equal(philox_normals(count, seed), longest[:count])


class Counted(NoiseSource):
    """Numbers in order."""

    def normal(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """See `NoiseSource`."""
        return torch.arange(count, dtype=like.dtype)


@pytest.mark.parametrize("antithetic", [False, True])
def test_each_draw_of_a_weight_starts_a_tile(antithetic: bool) -> None:
    request = DrawRequest(num_draws=3, prior=PriorDraw({}), noise=Counted(), antithetic=antithetic)
    first, second = request.normals([5, TILE + 1], torch.zeros(1), TILE)
    halves = 2 if antithetic else 3
    assert first[:, 0].tolist() == ([0, 0, TILE] if antithetic else [0, TILE, 2 * TILE])
    assert second[0, 0] == halves * TILE
    assert second[-1, 0] == (halves + 2 * (halves - 1)) * TILE
    kernel = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    (noise,) = request.normals([kernel.numel()], torch.zeros(1), TILE)
    assert torch.equal(like_layout(noise, kernel).permute(0, 1, 3, 4, 2).reshape(3, -1), noise)


def test_noise_without_a_gpu_is_not_made_by_kernels() -> None:
    assert not fused_draws.has_kernel(torch.zeros(1))


def test_where_triton_cannot_compile_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(fused_draws, "kernel_normals", fail)
    monkeypatch.setattr(fused_draws, "find_spec", lambda name: name)
    with pytest.warns(UserWarning, match="no C compiler"):
        assert not fused_draws._kernels_run.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(fused_draws, "find_spec", lambda name: None)
    assert not fused_draws._kernels_run.__wrapped__(torch.device("cpu"))
