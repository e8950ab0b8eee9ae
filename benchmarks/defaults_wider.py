"""Every method with its default arguments on six networks that played no part in the choice of defaults.

    python -m benchmarks.defaults_wider [--workers 4] [--networks ...] [--seeds 0 1 2] [--methods ...] [--limit 500]

The three regressions are an MLP on Friedman's first function, a convolution that predicts the frequency of a noisy wave, and
residual blocks with LayerNorm on a surface with interactions. Each has 1,000 training and 2,000 test rows. Each trained network is
used three times, with targets in units of 0.01, 1 and 100; its last layer is multiplied by the unit. The three classifiers are
residual blocks with GroupNorm on scikit-learn's digits, a segmentation of discs and squares, and a GRU over sequences of 4 to 20
steps. Data are synthetic or come with scikit-learn. Methods, epochs and interface are those of `benchmarks.defaults`.

A classifier must keep the bounds of `benchmarks.defaults`, except that its ECE may rise by 0.01 if the network's own ECE exceeds
0.04. Bounds on out-of-distribution images apply only to the digits and to methods with uncertainty of the weights. The NLL of a
segmentation is per pixel. A regression must keep an RMSE of at most 1.05 times the network's, an NLL of at most 0.02 above the
network's, and 85 to 95 % of the test targets in intervals of 90 %. `told` lists the codes of `fit`'s findings.
"""

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bayesify import metrics, posteriors
from bayesify.likelihoods import Categorical, Gaussian

from . import defaults, runs
from .timing import record

UNITS = (0.01, 1.0, 100.0)
"""Units of the regression targets."""
NUM_TEST = 2000
"""Number of test rows of a regression."""
MAX_ECE_RISE = 0.01
"""Allowed rise of the ECE if the network's own ECE exceeds 0.04. On 1,000 test rows, two similar networks differ by as much."""
POINT_METHODS = ("temperature", "point")
"""Methods without uncertainty of the weights. Bounds on uncertainty do not apply to them."""


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


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], defaults.Data], int]] = {
    "friedman_mlp": (friedman_mlp, friedman, 60),
    "wave_cnn": (wave_cnn, waves, 60),
    "residual_mlp": (residual_mlp, surface, 40),
    "group_norm_cnn": (group_norm_cnn, defaults.digits, 30),
    "segmenter": (segmenter, shapes, 30),
    "variable_gru": (partial(VariableLengths, 1, 24, 4), processes, 60),
}
"""Network, data and epochs of Adam by name. The first three are regressions."""
METHODS = {**defaults.REFERENCE_METHODS, **defaults.METHODS}


def in_unit(net: nn.Sequential, data: defaults.Data, unit: float) -> defaults.Data:
    """The data with targets in another unit. The network's last layer is rescaled to match."""
    with torch.no_grad():
        for parameter in net[-1].parameters():
            parameter.mul_(unit)
    train, held_out, test = ((x, unit * y) for x, y in (data.train, data.held_out, data.test))
    return defaults.Data(train, held_out, test, data.outside, data.batch, data.likelihood)


def scored(predict: Callable[[Tensor], Any], data: defaults.Data) -> dict[str, float]:
    """Scores on test data: the suite's scores for classes; for numbers, scores in the unit of the targets."""
    if data.likelihood is not Gaussian:
        row = defaults.scored_by(predict, data, "cpu")
        return row | {"nll": round(row["nll"] / data.test[1][0].numel(), 5)}
    inside, (far,) = predict(data.test[0]), data.outside.values()
    found = metrics.evaluate(inside, data.test[1])
    row = {key: round(found[key], 5) for key in ("nll", "rmse", "coverage_50", "coverage_90")}
    spread = [float(part.epistemic.mean()) for part in (inside, predict(far))]
    return row | {"epistemic_std": spread[0] ** 0.5, "epistemic_std_far": spread[1] ** 0.5}


def measure(name: str, seed: int, method: str, unit: float, folder: Path) -> runs.Row:
    """One method on one network. An error is also a result."""
    make, load, epochs = NETWORKS[name]
    data = load(seed)
    torch.manual_seed(seed)
    net = make()
    path = folder / f"{name}-{seed}.pt"
    if not path.exists():
        plain = defaults.plain_network(net, data, seed, epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(plain.state_dict(), path)
    net.load_state_dict(torch.load(path))
    net.eval()
    if data.likelihood is Gaussian:
        data = in_unit(net, data, unit)  # type: ignore[arg-type]
    run, start = defaults.Run(seed, own_epochs=epochs), time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = scored(_fitted(net, method, data, run).predict, data)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}"}
    told = sorted(set(run.findings))
    return {"network": name, "seed": seed, "method": method, "unit": unit, **row, "told": told,
            "seconds": round(time.perf_counter() - start, 2)}  # fmt: skip


def _fitted(net: nn.Module, method: str, data: defaults.Data, run: defaults.Run) -> Any:
    """The method's predictor. The plain network is a point estimate at its own weights with the noise of its residuals."""
    if method != "network":
        return METHODS[method](net, data, run)
    bnn = defaults.bayesian(net, posteriors.Point(), data, run)
    if data.likelihood is Gaussian:
        with torch.no_grad():
            bnn.likelihood = Gaussian(float((net(data.train[0]) - data.train[1]).square().mean()))
    return bnn


def stored(name: str, seed: int, method: str, unit: float, folder: Path, end: float) -> runs.Row | None:
    """Result of `measure`, from its file if there is one."""
    path = folder / f"{name}-{seed}-{method}-{unit:g}.json"
    return runs.cell(path, lambda: measure(name, seed, method, unit, folder), end)


def misses(row: runs.Row, plain: runs.Row) -> list[str]:
    """Names of the bounds that a method misses compared with the plain network."""
    if "error" in row:
        return ["error"]
    if "rmse" in row:
        found = ["RMSE"] * (row["rmse"] > 1.05 * plain["rmse"]) + ["NLL"] * (row["nll"] > plain["nll"] + 0.02)
        return found + ["coverage"] * (not 0.85 <= row["coverage_90"] <= 0.95)
    found = ["accuracy"] * (row["accuracy"] < plain["accuracy"] - 0.01)
    found += ["NLL"] * (row["nll"] > plain["nll"] + 0.02) + ["ECE"] * (
        row["ece"] > max(0.04, plain["ece"] + MAX_ECE_RISE)
    )
    if row["network"] != "group_norm_cnn":
        return found
    if row["method"] not in POINT_METHODS:
        known = row["mutual_information"] > 0.001 and row["mutual_information_outside"] > 2 * row["mutual_information"]
        found += ["strangers"] * (not known)
    return found + ["AUROC"] * (row["auroc_entropy"] < plain["auroc_entropy"] - 0.01)


def main() -> None:
    which = {"networks": list(NETWORKS), "seeds": [0, 1, 2], "name": "defaults_wider"}
    options = runs.parser(__doc__, "workers", "limit", folder=Path("build/defaults_wider"), **which)
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    given = options.parse_args()
    end = time.time() + given.limit
    units = {name: UNITS if NETWORKS[name][1] in (friedman, waves, surface) else (1.0,) for name in given.networks}
    jobs = [
        (name, seed, method, unit, given.folder, end)
        for method in ["network", *given.methods]
        for name in given.networks
        if not (method == "temperature" and len(units[name]) > 1)
        for seed in given.seeds
        for unit in units[name]
    ]
    rows = [row for row in runs.many(stored, jobs, given.workers) if row is not None]
    if len(rows) < len(jobs):
        raise SystemExit(f"only {len(rows)} of {len(jobs)} results were finished in time; run the command again")
    plain = {(row["network"], row["seed"], row["unit"]): row for row in rows if row["method"] == "network"}
    figures = {}
    for row in rows:
        key = (row["network"], row["seed"], row["unit"])
        figures[f"{row['network']}, unit {row['unit']:g}, seed {row['seed']}, {row['method']}"] = {
            **row,
            "misses": [] if row["method"] == "network" else misses(row, plain[key]),
        }
    record(given.name, figures, digits=5)


if __name__ == "__main__":
    main()
