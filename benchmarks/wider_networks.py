"""Networks and data of `benchmarks.defaults_wider`: six that chose no default (`REPORTED`), and six that chose some (`CHOOSING`).

The three reported regressions are an MLP on Friedman's first function, a convolution that predicts the frequency of a noisy wave,
and residual blocks with LayerNorm on a surface with interactions. Each has 1,000 training and 2,000 test rows. The three
classifiers are residual blocks with GroupNorm on scikit-learn's digits, a segmentation of discs and squares, and a GRU over
sequences of 4 to 20 steps.

Defaults were chosen on other networks, with seeds from 10 on: a CNN over bumps, an MLP over sines, residual blocks over a
polynomial, a CNN with GroupNorm over gratings, an MLP over digits, and a GRU over sequences of one length. Data are synthetic or
come with scikit-learn.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bayesify.likelihoods import Categorical, Gaussian

from . import defaults

NUM_TEST = 2000
"""Number of test rows of a regression."""


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class VariableLengths(nn.Module):
    """A GRU over packed sequences, [B, T, D + 1] -> [B, K]. The last feature is 1 at valid steps."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.body = nn.GRU(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        lengths = x[..., -1].sum(-1).long()
        packed = pack_padded_sequence(x[..., :-1], lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.body(packed)[1][-1])


def friedman_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def wave_cnn() -> nn.Module:
    body = [nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5, padding=2), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 1))


def residual_mlp() -> nn.Module:
    blocks = [Residual(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 64), *blocks, nn.LayerNorm(64), nn.Linear(64, 1))


def group_norm_cnn() -> nn.Module:
    blocks = []
    for _ in range(2):
        part = [nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
        blocks.append(Residual(*part, nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *blocks, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )


def segmenter() -> nn.Module:
    body = [nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU()]
    return nn.Sequential(*body, nn.Conv2d(16, 3, 1))


def _rows(seed: int, make: Callable[[int, torch.Generator], tuple[Tensor, Tensor]], far: float) -> defaults.Data:
    """1,000, 200 and 2,000 rows of a regression, and inputs outside the data, which are `far` times as large."""
    generator = torch.Generator().manual_seed(1000 + seed)
    parts = [make(count, generator) for count in (1000, 200, NUM_TEST)]
    return defaults.Data(parts[0], parts[1], parts[2], {"far": far * parts[2][0][:500]}, likelihood=Gaussian)


def friedman(seed: int) -> defaults.Data:
    def make(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(count, 10, generator=generator)
        y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        return 2 * x - 1, ((y + torch.randn(count, generator=generator) - 14.4) / 5).unsqueeze(-1)

    return _rows(seed, make, 3.0)


def waves(seed: int) -> defaults.Data:
    def make(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        frequency, phase = torch.rand(2, count, 1, generator=generator)
        times = torch.linspace(0, 2 * math.pi, 32)
        x = torch.sin((1 + 3 * frequency) * times + 2 * math.pi * phase)
        return (x + 0.4 * torch.randn(count, 32, generator=generator)).unsqueeze(1), (frequency - 0.5) / 0.29

    return _rows(seed, make, 3.0)


def surface(seed: int) -> defaults.Data:
    def make(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6, generator=generator)
        y = torch.sin(2 * x[:, 0] * x[:, 1]) + x[:, 2].abs() + x[:, 3].tanh() * x[:, 4] - 0.8
        return x, (y + 0.3 * torch.randn(count, generator=generator)).unsqueeze(-1)

    return _rows(seed, make, 3.0)


def shapes(seed: int) -> defaults.Data:
    """Noisy images of 16 x 16 pixels, [N, 1, 16, 16], with a disc or a square; labels of pixels, [N, 16, 16]."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def make(count: int) -> tuple[Tensor, Tensor]:
        center = 4 + 8 * torch.rand(2, count, 1, 1, generator=generator)
        size = 2 + 2 * torch.rand(count, 1, 1, generator=generator)
        square = torch.rand(count, 1, 1, generator=generator) < 0.5
        rows, columns = (
            torch.arange(16).view(shape) - part for shape, part in (((1, 16, 1), center[0]), ((1, 1, 16), center[1]))
        )
        inside = torch.where(square, torch.maximum(rows.abs(), columns.abs()) < size, rows**2 + columns**2 < size**2)
        labels = inside * (1 + square.long())
        return (inside + 0.5 * torch.randn(count, 16, 16, generator=generator)).unsqueeze(1), labels

    noise = {"noise": 1.5 * torch.randn(100, 1, 16, 16, generator=generator)}
    return defaults.Data(make(300), make(50), make(100), noise, 16, partial(Categorical, class_axis=1))


def processes(seed: int) -> defaults.Data:
    """Autoregressive sequences of 4 to 20 steps, [N, 20, 2]: the class is one of four coefficients."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def make(count: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        labels = torch.randint(4, (count,), generator=generator)
        coefficient = torch.tensor([-0.9, -0.3, 0.3, 0.9])[labels]
        noise, values = scale * torch.randn(20, count, generator=generator), [torch.zeros(count)]
        for step in noise:
            values.append(coefficient * values[-1] + step)
        there = torch.arange(20) < torch.randint(4, 21, (count, 1), generator=generator)
        return torch.stack([torch.stack(values[1:], 1) * there, there.float()], -1), labels

    return defaults.Data(make(600), make(100), make(1000), {"larger": make(300, 4.0)[0]})


def bumps_cnn() -> nn.Module:
    body = [nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(12, 24, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.MaxPool1d(2), nn.Flatten(), nn.Linear(144, 1))


def sines_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))


def polynomial_blocks() -> nn.Module:
    blocks = [Residual(nn.LayerNorm(48), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)) for _ in range(2)]
    return nn.Sequential(nn.Linear(5, 48), *blocks, nn.Linear(48, 1))


def grating_cnn() -> nn.Module:
    body: list[nn.Module] = [nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(6, 24), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(216, 4))


class LastState(nn.Module):
    """A GRU over sequences of one length, [B, T, D] -> [B, K], by its last state."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.body = nn.GRU(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[1][-1])


def bumps(seed: int) -> defaults.Data:
    """The width of a bump at a random place among noise, [N, 1, 24]."""

    def make(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        place, width = torch.rand(2, count, 1, generator=generator)
        x = torch.exp(-(((torch.arange(24) - 4 - 16 * place) / (1 + 3 * width)) ** 2))
        return (x + 0.15 * torch.randn(count, 24, generator=generator)).unsqueeze(1), (width - 0.5) / 0.29

    return _rows(seed, make, 3.0)


def sines(seed: int) -> defaults.Data:
    def make(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = 4 * torch.rand(count, 4, generator=generator) - 2
        y = torch.sin(2 * x[:, 0]) + torch.sin(x[:, 1] + x[:, 2]) + 0.5 * x[:, 3]
        return x, (y + 0.25 * torch.randn(count, generator=generator)).unsqueeze(-1)

    return _rows(seed, make, 3.0)


def polynomial(seed: int) -> defaults.Data:
    def make(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 5, generator=generator)
        y = x[:, 0] * x[:, 1] + 0.3 * x[:, 2] ** 3 - 0.5 * x[:, 3] ** 2 + x[:, 4]
        return x, ((y + 0.5 + 0.5 * torch.randn(count, generator=generator)) / 2).unsqueeze(-1)

    return _rows(seed, make, 3.0)


def gratings(seed: int) -> defaults.Data:
    """Noisy gratings of four orientations, [N, 1, 12, 12]; out of distribution are checkerboards."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")

    def make(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(4, (count,), generator=generator)
        angle = (labels * math.pi / 4).view(-1, 1, 1) + 0.2 * torch.randn(count, 1, 1, generator=generator)
        phase, frequency = torch.rand(2, count, 1, 1, generator=generator)
        wave = torch.sin((0.6 + 0.8 * frequency) * (angle.cos() * rows + angle.sin() * columns) + 6.3 * phase)
        return (wave + 0.8 * torch.randn(count, 12, 12, generator=generator)).unsqueeze(1), labels

    board = torch.sign(torch.sin(rows + 0.5) * torch.sin(columns + 0.5))
    outside = (board + 0.8 * torch.randn(400, 12, 12, generator=generator)).unsqueeze(1)
    return defaults.Data(make(800), make(150), make(1000), {"boards": outside})


def sequences(seed: int) -> defaults.Data:
    """Noisy sequences of 12 steps, [N, 12, 1]: the class is one of three periods."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def make(count: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        labels = torch.randint(3, (count,), generator=generator)
        speed = torch.tensor([0.5, 0.9, 1.3])[labels].view(-1, 1) + 0.1 * torch.randn(count, 1, generator=generator)
        wave = torch.sin(speed * torch.arange(12) + 6.3 * torch.rand(count, 1, generator=generator))
        return scale * (wave + 0.7 * torch.randn(count, 12, generator=generator)).unsqueeze(-1), labels

    return defaults.Data(make(800), make(150), make(1000), {"larger": make(300, 4.0)[0]})


Problem = tuple[Callable[[], nn.Module], Callable[[int], defaults.Data], int]
"""Network, data of a seed, and epochs of Adam."""
REPORTED: dict[str, Problem] = {
    "friedman_mlp": (friedman_mlp, friedman, 60),
    "wave_cnn": (wave_cnn, waves, 60),
    "residual_mlp": (residual_mlp, surface, 40),
    "group_norm_cnn": (group_norm_cnn, defaults.digits, 30),
    "segmenter": (segmenter, shapes, 30),
    "variable_gru": (partial(VariableLengths, 1, 24, 4), processes, 60),
}
CHOOSING: dict[str, Problem] = {
    "bumps_cnn": (bumps_cnn, bumps, 60),
    "sines_mlp": (sines_mlp, sines, 100),
    "polynomial_blocks": (polynomial_blocks, polynomial, 40),
    "grating_cnn": (grating_cnn, gratings, 30),
    "digits_mlp": (defaults.digits_mlp, defaults.digits, 60),
    "sequence_gru": (partial(LastState, 1, 24, 3), sequences, 60),
}
NETWORKS = REPORTED | CHOOSING
