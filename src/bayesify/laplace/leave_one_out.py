r"""Choice of the noise and prior precision of a regression. Training rows are predicted as if they had been left out,
without fitting the network again.

The network is treated as a linear model, whitened by the prior and written in the eigenbasis of its curvature. In this basis, s
are the eigenvalues of $J^\top J$, w are the weights, and e are the residuals. A ridge regression with penalty t has the leverages
$h_n(t) = J_n (J^\top J + t I)^{-1} J_n^\top$. A posterior with noise $\sigma^2$ and factor c on the prior precisions has $t = c
\sigma^2$.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.likelihoods import Likelihood

MIN_RELATIVE_PENALTY, MAX_RELATIVE_PENALTY, PENALTIES_PER_DECADE = 1e-6, 1e2, 8
"""Range of penalties, relative to the largest eigenvalue. Below this range, eigenvalues of a float32 curvature are
rounding errors."""
MAX_DENSITY_LOSS = 2.0
"""Largest allowed difference, in nats summed over rows, between the density of a factor and the best density. The default
factor is kept if it is within this limit."""
MIN_LEFT_SHARE = 1e-4
"""Lower bound on 1 - h of a row. It is a few times the rounding error of h in float32."""
MAX_JOINT_OUTPUTS = 32
"""Largest number of outputs of a row that are left out together. If there are more outputs, each output is left out
separately, because leaving out whole rows would need an eigendecomposition of every row for each penalty. Separate
outputs give wrong results if outputs are correlated."""
NUM_LEFT_OUT_ROWS = 1000
"""Number of training rows of a classifier that are left out, one at a time."""


@dataclass(frozen=True)
class LinearModel:
    """The linearized network in the eigenbasis of its curvature."""

    spectrum: Tensor  # eigenvalues s, [S], for a noise variance of 1
    weights: Tensor  # w, [S]
    gradient: Tensor  # J^T e, [S]
    squared_error: float

    def penalties(self) -> list[float]:
        """The penalties to try, in ascending order."""
        largest = max(float(self.spectrum.max()), torch.finfo(torch.float64).tiny)
        decades = math.log10(MAX_RELATIVE_PENALTY / MIN_RELATIVE_PENALTY)
        count = round(decades * PENALTIES_PER_DECADE) + 1
        return [largest * MIN_RELATIVE_PENALTY * 10 ** (step / PENALTIES_PER_DECADE) for step in range(count)]

    def squared_error_at(self, penalty: float) -> float:
        r"""Squared error of the ridge regression, $e^\top e + 2 d^\top J^\top e + d^\top J^\top J d$.

        $d = (t w - J^\top e) / (s + t)$ is the difference between the network's weights and the weights of the ridge
        regression.
        """
        distance = (penalty * self.weights - self.gradient) / (self.spectrum + penalty)
        change = 2 * self.gradient @ distance + self.spectrum @ distance.square()
        return max(0.0, self.squared_error + float(change))

    def training_penalty(self) -> tuple[float, float]:
        """The penalty of the ridge regression that has the same squared error as the network.

        The penalty measures how far training went. For a linear model that was trained to convergence, it equals the
        weight decay. If training stopped early, it is larger. The second result is the squared error of the ridge
        regression divided by the squared error of the network. This ratio is above 1 if the network fits its rows more closely
        than the ridge regression with any penalty in `penalties`.
        """
        low, *_, high = (math.log(penalty) for penalty in self.penalties())
        at_end = self.squared_error_at(math.exp(low))
        if at_end >= self.squared_error:
            return math.exp(low), at_end / max(self.squared_error, torch.finfo(torch.float64).tiny)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.squared_error_at(math.exp(middle)) < self.squared_error
            low, high = (middle, high) if below else (low, middle)
        return math.exp(low), 1.0


@dataclass
class LeftOutRows:
    r"""Sums over training rows, from which `choose` computes the noise variance and the factor on the prior precisions. Each row
    is predicted as if it had been left out with all its O outputs.

    A row with weight w counts as w rows, of which one is left out; w must therefore be at least 1. Let $H_n(t)$ [O, O] be the
    leverages of row n. If the row is left out, the network's residual is $(I - H_n(t^*))^{-1} e_n$ with the penalty $t^*$ of
    `training_penalty`. Without row n, the posterior's covariance of $y_n$ is $\sigma^2 (I - H_n(t))^{-1}$. The residual and the
    covariance are exact for a linear model. Let $r_n$ be the residual of row n if this row is left out. The noise variance for a
    penalty t is $\sigma^2(t) = \operatorname{mean} r_n^\top (I - H_n(t)) r_n / O$. Twice the negative log density of the rows is,
    up to a constant,

    $$ N O \log \sigma^2(t) - \sum_n \log \det (I - H_n(t)). $$
    """

    penalties: list[float]  # the C values of t, in ascending order

    def __post_init__(self) -> None:
        self.sums = torch.zeros(2, len(self.penalties), dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)

    def add(self, residuals: Tensor, training_leverages: Tensor, leverages: Iterable[Tensor], counts: Tensor) -> None:
        """Add n rows to the sums. The arguments are the residuals [n, O], the leverages $H(t^*)$ [n, O, O], the leverages $H(t)$
        [n, O, O] for each penalty, and how often each row counts [n]."""
        left, vectors = _left(training_leverages)
        residuals = _turned(vectors, _turned(vectors.mT, residuals.double()) / left)  # [n, O]
        for place, one in enumerate(leverages):
            left, vectors = _left(one)
            squares = left * _turned(vectors.mT, residuals).square()
            self.sums[:, place] += torch.stack([counts @ squares.sum(1), counts @ left.log().sum(1)]).cpu()
        self.count += counts.sum().cpu() * residuals.shape[1]

    def choose(self, *, moves: bool) -> tuple[float, float]:
        """The noise variance and the factor on the prior precisions.

        If `moves` is true, the factor is the one nearest to 1 for which the log density of the left-out rows is within
        `MAX_DENSITY_LOSS` of the best. Otherwise it is 1.
        """
        count = float(self.count)
        noises = (self.sums[0] / count).clamp_min(torch.finfo(torch.float64).tiny)
        losses = 0.5 * (count * noises.log() - self.sums[1])
        logs = torch.tensor(self.penalties, dtype=torch.float64).log() - noises.log()  # logs of the factors, ascending
        allowed = losses <= losses.min() + MAX_DENSITY_LOSS if moves else torch.ones_like(losses, dtype=torch.bool)
        place = int(torch.where(allowed, logs.abs(), math.inf).argmin())
        if moves and not self._surrounds_default(logs, allowed, place):
            return float(noises[place]), float(logs[place].exp())
        return self._noise_of_default(logs, noises), 1.0

    @staticmethod
    def _surrounds_default(logs: Tensor, allowed: Tensor, place: int) -> bool:
        """Whether the factor 1 lies between two neighboring factors whose log densities are both within `MAX_DENSITY_LOSS` of the
        best."""
        other = place + (1 if logs[place] < 0 else -1)
        return 0 <= other < len(logs) and bool(allowed[other]) and float(logs[place] * logs[other]) <= 0

    @staticmethod
    def _noise_of_default(logs: Tensor, noises: Tensor) -> float:
        """The noise at the factor 1, interpolated between penalties. Outside the range of penalties, it is the noise at
        the nearest penalty."""
        right = int(torch.searchsorted(logs, torch.zeros((), dtype=logs.dtype)))
        if right in (0, len(logs)):
            return float(noises[min(right, len(logs) - 1)])
        low, high = logs[right - 1], logs[right]
        share = -low / (high - low).clamp_min(torch.finfo(torch.float64).tiny)
        return float(torch.lerp(noises[right - 1].log(), noises[right].log(), share).exp())


def _left(leverages: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [n, O] of I - H, raised to at least `MIN_LEFT_SHARE`, and eigenvectors [n, O, O]."""
    if leverages.shape[-1] == 1:
        values, vectors = leverages.squeeze(2).double(), torch.ones_like(leverages, dtype=torch.float64)
    else:
        values, vectors = torch.linalg.eigh(leverages.double())
    return (1 - values).clamp_min(MIN_LEFT_SHARE), vectors


def _turned(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Products of matrices [n, O, O] with vectors [n, O]."""
    return (matrices @ vectors.unsqueeze(2)).squeeze(2)


def leave_out(
    likelihood: Likelihood, outputs: Tensor, y: Tensor, spreads: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Means and covariances of each row's outputs, to first order, as if this row had been left out.

    Let g be the gradient of a row's log-likelihood with respect to the row's outputs, H the Fisher matrix of these
    outputs, and C the covariance of the outputs under the posterior of all rows. If the row is left out, its outputs
    change by $-C (I - H C)^{-1} g$ and have the covariance $C (I - H C)^{-1}$. The change and the covariance are exact for a
    linear model with Gaussian noise.

    `spreads` contains covariances C of the outputs, [B, O, O] each. The first covariance belongs to the training penalty and
    gives the change of the outputs. For each of the other covariances, the function yields the means [B, O] and the covariances
    [B, O, O] without the row.
    """
    with torch.enable_grad():
        leaf = outputs.detach().double().requires_grad_()
        score = torch.autograd.grad(likelihood.log_prob(leaf, y, has_draws=False).sum(), leaf)[0]
    fisher = likelihood.fisher(outputs.detach().double())
    eye = (1 + MIN_LEFT_SHARE) * torch.eye(outputs.shape[1], dtype=torch.float64, device=outputs.device)

    def without(spread: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve(eye - spread.double() @ fisher, spread.double())  # (I - C H)^-1 C
        return found

    mean = outputs.double() - (without(spreads[0]) @ score.unsqueeze(-1)).squeeze(-1)
    for spread in spreads[1:]:
        found = without(spread)
        yield mean.to(outputs), (0.5 * (found + found.mT)).to(outputs)


def nearest_good(factors: Sequence[float], densities: Sequence[float], default: float) -> float:
    """The factor nearest to a default, among all factors whose density is within `MAX_DENSITY_LOSS` of the largest
    density."""
    good = [factor for factor, own in zip(factors, densities, strict=True) if own >= max(densities) - MAX_DENSITY_LOSS]
    return min(good, key=lambda factor: abs(math.log(factor / default)))
