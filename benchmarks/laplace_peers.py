"""Laplace by its one documented line, compared with laplace-torch after its own tuning by the marginal likelihood.

    python -m benchmarks.laplace_peers [--networks ...] [--seeds 0 1 2 3 4] [--workers 1] [--limit 500] [--choosing]

Ours is `Laplace(net, likelihood).fit(loader)` with default arguments. laplace-torch runs in two forms, all weights with a full
covariance and its default (last layer, Kronecker factors). For regression, prior precision and noise maximize its
`log_marginal_likelihood` by Adam, as its regression example does. For classes, `optimize_prior_precision(method="marglik")` chooses
the prior precision, and predictions use its default link, the probit.

The five networks of `REPORTED` chose no setting. Settings were chosen on the networks of `CHOOSING` (`--choosing`), which have
other data, sizes and activations. Data are simulated or come with scikit-learn. Each network and seed is a file in `--folder`.
After `--limit` seconds no new cell starts, and the results cover the finished cells of the folder. A difference is ours minus
theirs in the NLL of test rows, in nats per row, with the standard error of its mean over seeds.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods

from .runs import Row, cell, many, parser
from .timing import record, rounded
from .wider_networks import Residual

NUM_TUNING_STEPS = 200
"""Number of Adam steps for laplace-torch's prior precision and noise in a regression."""


@dataclass(frozen=True)
class Problem:
    """A network and its data.

    Args:
        net: A function that makes the network.
        data: A function from a generator to all rows.
        num_train: Number of training rows; all others are test rows.
        epochs: Number of epochs of Adam in batches of 64.
        rate: Learning rate.
        decay: Weight decay.
    """

    net: Callable[[], nn.Module]
    data: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    num_train: int
    epochs: int
    rate: float = 5e-3
    decay: float = 0.0

    def trained(self, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The trained network, training rows and test rows. Inputs and regression targets are standardized."""
        generator = torch.Generator().manual_seed(1000 + seed)
        x, y = self.data(generator)
        order = torch.randperm(len(x), generator=generator)
        x, y = standardized(x[order], self.num_train), y[order]
        y = standardized(y, self.num_train) if y.is_floating_point() else y
        torch.manual_seed(seed)
        net = self.net()
        optimizer = torch.optim.Adam(net.parameters(), lr=self.rate, weight_decay=self.decay)
        loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
        train = x[: self.num_train], y[: self.num_train]
        for _ in range(self.epochs):
            for index in torch.randperm(self.num_train, generator=generator).split(64):
                optimizer.zero_grad()
                loss(net(train[0][index]), train[1][index]).backward()
                optimizer.step()
        return net.eval(), train, (x[self.num_train :], y[self.num_train :])


def standardized(values: Tensor, count: int) -> Tensor:
    """Columns with mean 0 and standard deviation 1 over the first rows."""
    return (values - values[:count].mean(0)) / values[:count].std(0).clamp_min(1e-6)


def table(name: str, **options: Any) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Rows of a function of `sklearn.datasets`; those that simulate get a seed."""

    def load(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        import sklearn.datasets

        if name.startswith("make_"):
            options["random_state"] = int(torch.randint(2**31, (), generator=generator))
            x, y = getattr(sklearn.datasets, name)(**options)
        else:
            x, y = getattr(sklearn.datasets, name)(return_X_y=True)
        target = torch.from_numpy(y)
        return torch.from_numpy(x).float(), target.float().unsqueeze(
            -1
        ) if target.is_floating_point() else target.long()

    return load


def arm(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions [N, 2] of the hand of an arm with three joints, seen with noise, from their angles [N, 3]."""
    angles = torch.rand(2600, 3, generator=generator) * math.pi - math.pi / 2
    total = angles.cumsum(1)
    hand = torch.stack([total.cos().sum(1), total.sin().sum(1)], 1)
    return angles, hand + 0.1 * torch.randn(hand.shape, generator=generator)


def wave(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy points on a wave, [N, 1]."""
    x = 4 * torch.rand(1120, 1, generator=generator) - 2
    return x, torch.sin(3 * x) + 0.3 * x + 0.2 * torch.randn(x.shape, generator=generator)


def products(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two outputs of products of five inputs with noise."""
    x = torch.randn(1800, 5, generator=generator)
    y = torch.stack([x[:, 0] * x[:, 1], (x[:, 2] + x[:, 3]).tanh() + 0.5 * x[:, 4]], 1)
    return x, y + 0.4 * torch.randn(y.shape, generator=generator)


def waves_and_line(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy targets: the sine of the product of two inputs, plus a third input. Two further inputs have no effect."""
    x = torch.randn(2300, 5, generator=generator)
    return x, torch.sin(x[:, :1] * x[:, 1:2]) + x[:, 2:3] + 0.2 * torch.randn(2300, 1, generator=generator)


def mlp(*sizes: int, activation: type[nn.Module]) -> Callable[[], nn.Module]:
    """Linear layers with an activation between them."""

    def make() -> nn.Module:
        parts = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), activation())]
        return nn.Sequential(*parts[:-1])

    return make


def residual_net() -> nn.Module:
    block = Residual(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    return nn.Sequential(nn.Linear(4, 16), block, nn.LayerNorm(16), nn.Linear(16, 1))


def three_classes(flipped: float) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Rows of three classes, each with two clusters, and a share of random labels."""
    kinds = {"n_features": 6, "n_informative": 4, "n_redundant": 0, "n_classes": 3, "n_clusters_per_class": 2}
    return table("make_classification", n_samples=1600, flip_y=flipped, **kinds)


REPORTED = {
    "diabetes_mlp": Problem(mlp(10, 30, 1, activation=nn.Tanh), table("load_diabetes"), 300, 150, 5e-3),
    "friedman2_residual": Problem(residual_net, table("make_friedman2", n_samples=2400, noise=100.0), 400, 100, 3e-3),
    "arm_mlp": Problem(mlp(3, 24, 24, 2, activation=nn.SiLU), arm, 600, 150, 5e-3),
    "breast_cancer_mlp": Problem(mlp(30, 16, 2, activation=nn.ReLU), table("load_breast_cancer"), 300, 60, 5e-3),
    "clusters_mlp": Problem(
        mlp(8, 24, 16, 4, activation=nn.SiLU),
        table("make_classification", n_samples=2500, n_features=8, n_informative=6, n_classes=4, flip_y=0.05),
        500,
        60,
        3e-3,
    ),
}
CHOOSING = {
    "wave_mlp": Problem(mlp(1, 20, 20, 1, activation=nn.Tanh), wave, 120, 600, 5e-3),
    "friedman3_mlp": Problem(
        mlp(4, 40, 1, activation=nn.ReLU), table("make_friedman3", n_samples=2300, noise=0.1), 300, 200, 5e-3
    ),
    "friedman1_mlp": Problem(
        mlp(10, 24, 16, 1, activation=nn.GELU), table("make_friedman1", n_samples=2500, noise=1.0), 500, 100, 3e-3
    ),
    "products_mlp": Problem(mlp(5, 32, 2, activation=nn.ReLU), products, 800, 100, 5e-3, 1e-4),
    "waves_and_line_short": Problem(mlp(5, 64, 1, activation=nn.GELU), waves_and_line, 800, 30, 5e-3),
    "waves_and_line_long": Problem(mlp(5, 64, 1, activation=nn.GELU), waves_and_line, 800, 200, 5e-3),
    "friedman1_short": Problem(
        mlp(10, 48, 48, 1, activation=nn.ReLU), table("make_friedman1", n_samples=2000, noise=1.0), 400, 15, 1e-3
    ),
    "friedman1_memorized": Problem(
        mlp(10, 48, 32, 1, activation=nn.ReLU), table("make_friedman1", n_samples=2000, noise=1.0), 400, 200, 3e-3
    ),
    "wine_mlp": Problem(mlp(13, 16, 3, activation=nn.Tanh), table("load_wine"), 90, 60, 5e-3),
    "moons_mlp": Problem(
        mlp(2, 24, 24, 2, activation=nn.ReLU), table("make_moons", n_samples=2200, noise=0.3), 200, 150, 5e-3
    ),
    "iris_mlp": Problem(mlp(4, 12, 12, 3, activation=nn.ReLU), table("load_iris"), 75, 80, 5e-3),
    "three_classes_memorized": Problem(mlp(6, 32, 3, activation=nn.Tanh), three_classes(0.1), 300, 200, 5e-3),
    "three_classes_short": Problem(mlp(6, 32, 3, activation=nn.ReLU), three_classes(0.02), 400, 15, 5e-3),
}


def regression_scores(mean: Tensor, variance: Tensor, y: Tensor) -> Row:
    """NLL of rows under independent Gaussians, and the share of targets in intervals of 90 %."""
    nll = 0.5 * (torch.log(2 * math.pi * variance) + (y - mean).square() / variance).sum(1).mean()
    inside = (y - mean).abs() <= 1.6448536 * variance.sqrt()
    return {"nll": float(nll), "coverage_90": float(inside.float().mean())}


def class_scores(probs: Tensor, y: Tensor) -> Row:
    """NLL and accuracy of class probabilities."""
    chosen = probs.gather(1, y.unsqueeze(1)).squeeze(1)
    return {"nll": float(-chosen.log().mean()), "accuracy": float((probs.argmax(1) == y).float().mean())}


def ours(net: nn.Module, loader: Any, x: Tensor, y: Tensor) -> Row:
    """The one documented line."""
    if y.is_floating_point():
        laplace = bayesify.Laplace(net, likelihoods.Gaussian()).fit(loader)
        found = laplace.predict(x)
        facts = {"noise": float(laplace.likelihood.noise)}  # type: ignore[arg-type]
        return regression_scores(found.mean, found.variance, y) | facts  # type: ignore[attr-defined]
    laplace = bayesify.Laplace(net, likelihoods.Categorical()).fit(loader)
    return class_scores(laplace.predict(x).probs, y)  # type: ignore[attr-defined]


def theirs(net: nn.Module, loader: Any, x: Tensor, y: Tensor, extent: str, structure: str) -> Row:
    """laplace-torch after its tuning."""
    from laplace import Laplace

    task = "regression" if y.is_floating_point() else "classification"
    made: Any = Laplace(net, task, subset_of_weights=extent, hessian_structure=structure)
    made.fit(loader)
    if task == "classification":
        made.optimize_prior_precision(method="marglik")
        return class_scores(made(x).detach(), y)
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    for _ in range(NUM_TUNING_STEPS):
        optimizer.zero_grad()
        (-made.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()
    mean, variance = made(x)
    diagonal = variance.detach().diagonal(dim1=-2, dim2=-1)
    noise = float(made.sigma_noise) ** 2
    return regression_scores(mean.detach(), diagonal + noise, y) | {"noise": noise, "prior": float(log_prior.exp())}


def measure(name: str, seed: int) -> Row:
    """Scores of the network itself, ours and theirs on one network and seed."""
    warnings.simplefilter("ignore")
    net, train, (x, y) = (REPORTED | CHOOSING)[name].trained(seed)
    loader = DataLoader(TensorDataset(*train), batch_size=100)
    with torch.no_grad():
        if y.is_floating_point():
            variance = (net(train[0]) - train[1]).square().mean(0).expand_as(y)
            found: Row = {"network": regression_scores(net(x), variance, y)}
        else:
            found = {"network": class_scores(net(x).softmax(1), y)}
    found["ours"] = ours(net, loader, x, y)
    for extent, structure in (("all", "full"), ("last_layer", "kron")):
        torch.manual_seed(seed)
        found[f"laplace-torch, {extent}, {structure}"] = theirs(net, loader, x, y, extent, structure)
    return dict(rounded(found, 5))


def stored(name: str, seed: int, folder: Path, end: float) -> Row | None:
    """Result of `measure`, from its file if there is one."""
    return cell(folder / f"{name}-{seed}.json", lambda: measure(name, seed), end)


def compare(rows: list[Row]) -> Row:
    """Mean scores over seeds, and ours minus theirs with its standard error."""
    keys = {key: list(row) for key, row in rows[0].items()}
    found: Row = {
        key: {name: statistics.fmean(row[key][name] for row in rows) for name in names} for key, names in keys.items()
    }
    for key in keys:
        if key.startswith("laplace-torch"):
            found[key] |= difference([row["ours"]["nll"] - row[key]["nll"] for row in rows])
    return found | {"seeds": len(rows)}


def difference(values: list[float]) -> Row:
    """A mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"ours_minus_theirs": statistics.fmean(values), "standard_error": error}


def main() -> None:
    options = parser(__doc__, "workers", "limit", seeds=(0, 1, 2, 3, 4), folder=Path("build/laplace_peers"))
    options.add_argument("--choosing", action="store_true", help="run the networks on which settings were chosen")
    options.add_argument("--networks", nargs="+", default=None, choices=[*REPORTED, *CHOOSING])
    given = options.parse_args()
    names = given.networks or list(CHOOSING if given.choosing else REPORTED)
    end = time.time() + given.limit
    jobs = [(name, seed, given.folder, end) for seed in given.seeds for name in names]
    rows = {job[:2]: row for job, row in zip(jobs, many(stored, jobs, given.workers), strict=True) if row is not None}
    figures: dict[str, Any] = {}
    for name in names:
        own = [row for (other, _), row in rows.items() if other == name]
        if own:
            figures[name] = compare(own)
    strongest: list[float] = []  # against the form of theirs with the lowest mean on each network
    for name, found in figures.items():
        best = min((key for key in found if key.startswith("laplace-torch")), key=lambda key: found[key]["nll"])
        found["strongest"] = best
        strongest += [row["ours"]["nll"] - row[best]["nll"] for (other, _), row in rows.items() if other == name]
    figures["all networks, strongest form of each"] = difference(strongest)
    record("laplace_peers_choosing" if given.choosing else "laplace_peers", figures, digits=4, unit="nats per row")


if __name__ == "__main__":
    main()
