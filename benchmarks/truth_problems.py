"""Twelve problems whose exact posterior is known in closed form or from long chains: network, prior, likelihood, data and inputs.

| problem | network | prior std of a weight | likelihood | data |
| --- | --- | --- | --- | --- |
| gap | 1-32-1 tanh | 4 / sqrt(fan-in) | Gaussian, variance 0.01 | 60 points in two clusters on a cosine (the demonstration's) |
| heteroscedastic | 1-20-2 tanh | 2 / sqrt(fan-in) | Gaussian, log variance by the network | 80 points, noise grows with x |
| extrapolation | 1-32-1 tanh | 4 / sqrt(fan-in) | Gaussian, variance 0.01 | 40 points on [-1, 1], predicted on [-3, 3] |
| small_noise | 1-20-1 tanh | 3 / sqrt(fan-in) | Gaussian, variance 0.0004 | 24 points on a sine |
| yacht, boston, energy, concrete | D-20-1 tanh | 2 / sqrt(fan-in) | Gaussian, variance `UCI_NOISE` | split 0, scaled, `UCI_ROWS` |
| moons | 2-32-2 tanh | 4 / sqrt(fan-in) | categorical | 200 points of two half circles (the demonstration's) |
| digits | 3x3 convolution to 4 channels, tanh, linear | 2 / sqrt(fan-in) | categorical | 150 digits 0 to 4 of MNIST, 7 x 7 pixels |
| process | 100 fixed random cosines, linear | 1 | Gaussian, variance 0.01 | 40 points on a sine; a Gaussian process, closed form |
| linear | linear | 1 | Gaussian, variance 0.1 | 20 points of 5 features; closed form |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.datasets import images, toy, uci
from bayesify.datasets.toy import linear_posterior
from bayesify.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from bayesify.priors import Gaussian as GaussianPrior
from bayesify.priors import Neal, Prior
from bayesify.running.generators import own_generators

UCI_NOISE = {"yacht": 0.01, "boston": 0.1, "energy": 0.01, "concrete": 0.06}
"""Noise variance in units of the target's variance, about the squared error of networks on test rows."""
UCI_ROWS = {"concrete": 200}
"""Number of training rows. With all 927 of concrete, each chain stays in its own mode: R-hat is 1.4 after 2,700 trajectories."""
DIGITS, DIGIT_ROWS = 5, 150
INSIDE_ROWS, OUTSIDE_ROWS = 80, 40


class Cosines(nn.Module):
    """Fixed random features sqrt(2 / M) cos(w x + b), whose inner products tend to a squared exponential kernel.

    Args:
        num_features: Number of features M.
        lengthscale: Lengthscale of the kernel.
    """

    def __init__(self, num_features: int, lengthscale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("frequency", torch.randn(1, num_features, generator=generator) / lengthscale)
        self.register_buffer("phase", 2 * math.pi * torch.rand(num_features, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1] to [B, M]."""
        frequency, phase = self.get_buffer("frequency"), self.get_buffer("phase")
        return math.sqrt(2 / len(phase)) * torch.cos(x @ frequency + phase)


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        name: Name of the problem.
        make: Function that makes the network, with weights from torch's global generator.
        prior: p(weights).
        likelihood: p(y | outputs), with nothing to learn.
        x: Inputs of the training data, [N, ...].
        y: Targets of the inputs.
        inputs: Inputs at which functions are compared, [I, ...].
        inside: Mask of the inputs that lie within the data, [I].
        features: Function from inputs to the features of a linear model with prior standard deviations 1. Such a problem has a
            closed form.
    """

    name: str
    make: Callable[[], nn.Module]
    prior: Prior
    likelihood: Likelihood
    x: Tensor
    y: Tensor
    inputs: Tensor
    inside: Tensor
    features: Callable[[Tensor], Tensor] | None = field(default=None)

    def network(self, seed: int) -> nn.Module:
        """An untrained network; equal seeds give equal networks."""
        with own_generators(seed=seed):
            return self.make()

    @property
    def is_classification(self) -> bool:
        """Whether targets are classes."""
        return isinstance(self.likelihood, Categorical)

    def exact(self, num_draws: int) -> Tensor:
        """Independent draws of the functions at the inputs from the closed form, [S, I, 1]."""
        assert self.features is not None
        assert isinstance(self.likelihood, Gaussian)
        noise = float(self.likelihood.noise)
        found = linear_posterior(self.features(self.x), self.y, 1.0, noise)
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(num_draws, len(found.mean), generator=generator, dtype=torch.float64)
        weights = found.mean + normal @ torch.linalg.cholesky(found.covariance).T
        return (weights @ self.features(self.inputs).double().T).unsqueeze(-1).float()


def _perceptron(num_inputs: int, hidden: int, num_outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(num_inputs, hidden), nn.Tanh(), nn.Linear(hidden, num_outputs))


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _uniform(count: int, low: float, high: float, seed: int) -> Tensor:
    return low + (high - low) * torch.rand(count, 1, generator=torch.Generator().manual_seed(seed))


def _grid(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, INSIDE_ROWS + OUTSIDE_ROWS)[:, None]


def _gap() -> Problem:
    data = toy.cosine(num_data=60, seed=0)
    grid = _grid(-1.6, 1.6)
    inside = ((grid > -1) & (grid < -0.7) | (grid > 0.5) & (grid < 1))[:, 0]
    noise = Gaussian(data.noise, learn=False)
    return Problem("gap", _perceptron(1, 32, 1), Neal(4.0), noise, data.x, data.y, grid, inside)


def _heteroscedastic() -> Problem:
    x, grid = _uniform(80, -1.5, 1.5, seed=1), _grid(-2.5, 2.5)
    y = torch.sin(2 * x) + (0.05 + 0.15 * (x + 1.5)) * _normal(80, 1, seed=2)
    inside = (grid.abs() < 1.5)[:, 0]
    return Problem("heteroscedastic", _perceptron(1, 20, 2), Neal(2.0), HeteroscedasticGaussian(), x, y, grid, inside)


def _extrapolation() -> Problem:
    x, grid = _uniform(40, -1.0, 1.0, seed=3), _grid(-3.0, 3.0)
    y = x + 0.5 * torch.sin(4 * x) + 0.1 * _normal(40, 1, seed=4)
    inside = (grid.abs() < 1)[:, 0]
    return Problem("extrapolation", _perceptron(1, 32, 1), Neal(4.0), Gaussian(0.01, learn=False), x, y, grid, inside)


def _small_noise() -> Problem:
    x, grid = _uniform(24, -1.5, 1.5, seed=5), _grid(-2.2, 2.2)
    y = torch.sin(2 * x) + 0.02 * _normal(24, 1, seed=6)
    inside = (grid.abs() < 1.5)[:, 0]
    return Problem("small_noise", _perceptron(1, 20, 1), Neal(3.0), Gaussian(4e-4, learn=False), x, y, grid, inside)


def _table(name: str) -> Problem:
    table = uci.load(name)
    split = table.splits[0]
    rows, targets = torch.from_numpy(table.X).float(), torch.from_numpy(table.y).float()
    train, test = rows[split.train], rows[split.test]
    center, spread = train.mean(0), train.std(0).clamp_min(1e-6)
    x, asked = (train - center) / spread, ((test - center) / spread)[:INSIDE_ROWS]
    known = targets[split.train]
    y = (known - known.mean()) / known.std()
    x, y = x[: UCI_ROWS.get(name)], y[: UCI_ROWS.get(name)]
    outside = 3 * _normal(OUTSIDE_ROWS, x.shape[1], seed=7)
    inside = torch.arange(len(asked) + OUTSIDE_ROWS) < len(asked)
    noise = Gaussian(UCI_NOISE[name], learn=False)
    inputs = torch.cat((asked, outside))
    return Problem(name, _perceptron(x.shape[1], 20, 1), Neal(2.0), noise, x, y, inputs, inside)


def _moons() -> Problem:
    data = toy.two_moons(seed=0)
    grid = data.grid(14)
    inside = torch.cdist(grid, data.x).min(1).values < 0.4
    return Problem("moons", _perceptron(2, 32, 2), Neal(4.0), Categorical(), data.x, data.y, grid, inside)


def _digits() -> Problem:
    data = images.load("mnist")
    rows, labels = (
        torch.from_numpy(data.train_images[:2000]).float() / 255,
        torch.from_numpy(data.train_labels[:2000]).long(),
    )
    rows = (F.avg_pool2d(rows, 4) - 0.13) / 0.25
    known, unknown = rows[labels < DIGITS], rows[labels >= DIGITS]
    y = labels[labels < DIGITS][:DIGIT_ROWS]
    inputs = torch.cat((known[DIGIT_ROWS : DIGIT_ROWS + INSIDE_ROWS], unknown[:OUTSIDE_ROWS]))
    inside = torch.arange(len(inputs)) < INSIDE_ROWS

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(100, DIGITS))

    return Problem("digits", make, Neal(2.0), Categorical(), known[:DIGIT_ROWS], y, inputs, inside)


def _process() -> Problem:
    x, grid = _uniform(40, -1.0, 1.0, seed=8), _grid(-2.0, 2.0)
    y = torch.sin(3 * x) + 0.1 * _normal(40, 1, seed=9)
    inside = (grid.abs() < 1)[:, 0]

    def make() -> nn.Module:
        return nn.Sequential(Cosines(100, 0.5), nn.Linear(100, 1, bias=False))

    noise = Gaussian(0.01, learn=False)
    return Problem("process", make, GaussianPrior(1.0), noise, x, y, grid, inside, features=Cosines(100, 0.5))


def _linear() -> Problem:
    data = toy.linear(num_data=20, num_features=5, seed=0)
    near, far = _normal(INSIDE_ROWS, 5, seed=10), 3 * _normal(OUTSIDE_ROWS, 5, seed=11)
    inside = torch.arange(INSIDE_ROWS + OUTSIDE_ROWS) < INSIDE_ROWS
    noise, inputs = Gaussian(data.noise, learn=False), torch.cat((near, far))

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 1, bias=False))

    return Problem("linear", make, GaussianPrior(1.0), noise, data.x, data.y, inputs, inside, features=lambda x: x)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "gap": _gap,
    "heteroscedastic": _heteroscedastic,
    "extrapolation": _extrapolation,
    "small_noise": _small_noise,
    "yacht": lambda: _table("yacht"),
    "boston": lambda: _table("boston"),
    "energy": lambda: _table("energy"),
    "concrete": lambda: _table("concrete"),
    "moons": _moons,
    "digits": _digits,
    "process": _process,
    "linear": _linear,
}
"""The problems by name."""
