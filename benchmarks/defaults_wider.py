"""Every method with its default arguments on six networks that played no part in the choice of defaults.

    python -m benchmarks.defaults_wider [--device cuda] [--workers 4] [--networks ...] [--seeds 0 1 2] [--methods ...] [--limit 500]

`benchmarks.wider_networks` has the networks and their data; networks of `CHOOSING` may be named too. A trained regression network
is used three times, with targets in units of 0.01, 1 and 100; its last layer is multiplied by the unit. Methods, epochs and
interface are those of `benchmarks.defaults`.

A classifier must keep the bounds of `benchmarks.defaults`, except that its ECE may rise by 0.01 if the network's own ECE exceeds
0.04. Bounds on out-of-distribution images apply only to the digits and to methods with uncertainty of the weights. The NLL of a
segmentation is per pixel. A regression must keep an RMSE of at most 1.05 times the network's, an NLL of at most 0.02 above the
network's, and 85 to 95 % of the test targets in intervals of 90 %. `told` lists the codes of `fit`'s findings. With `--validates`,
`fit` gets the rows that are held out for a temperature as `validation=`.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import metrics, posteriors
from bayesify.likelihoods import Gaussian

from . import defaults, runs
from .timing import record
from .wider_networks import NETWORKS, REPORTED

UNITS = (0.01, 1.0, 100.0)
"""Units of the regression targets."""
MAX_ECE_RISE = 0.01
"""Allowed rise of the ECE if the network's own ECE exceeds 0.04. On 1,000 test rows, two similar networks differ by as much."""
POINT_METHODS = ("temperature", "point")
"""Methods without uncertainty of the weights. Bounds on uncertainty do not apply to them."""
WITH_STRANGERS = ("group_norm_cnn", "grating_cnn", "digits_mlp")
"""Networks with out-of-distribution images."""
METHODS = {**defaults.REFERENCE_METHODS, **defaults.METHODS}


def in_unit(net: nn.Sequential, data: defaults.Data, unit: float) -> defaults.Data:
    """The data with targets in another unit. The network's last layer is rescaled to match."""
    with torch.no_grad():
        for parameter in net[-1].parameters():
            parameter.mul_(unit)
    train, held_out, test = ((x, unit * y) for x, y in (data.train, data.held_out, data.test))
    return defaults.Data(train, held_out, test, data.outside, data.batch, data.likelihood)


def scored(predict: Callable[[Tensor], Any], data: defaults.Data, device: str = "cpu") -> dict[str, float]:
    """Scores on test data: the suite's scores for classes; for numbers, scores in the unit of the targets."""
    if data.likelihood is not Gaussian:
        row = defaults.scored_by(predict, data, device)
        return row | {"nll": round(row["nll"] / data.test[1][0].numel(), 5)}
    inside, (far,) = predict(data.test[0].to(device)), data.outside.values()
    found = metrics.evaluate(inside, data.test[1].to(device))
    row = {key: round(found[key], 5) for key in ("nll", "rmse", "coverage_50", "coverage_90")}
    spread = [float(part.epistemic.mean()) for part in (inside, predict(far.to(device)))]
    return row | {"epistemic_std": spread[0] ** 0.5, "epistemic_std_far": spread[1] ** 0.5}


def is_regression(name: str) -> bool:
    return NETWORKS[name][1](0).likelihood is Gaussian


def measure(
    name: str, seed: int, method: str, unit: float, folder: Path, validates: bool = False, device: str = "cpu"
) -> runs.Row:
    """One method on one network. An error is also a result."""
    make, load, epochs = NETWORKS[name]
    data = load(seed)
    torch.manual_seed(seed)
    net = make().to(device)
    path = folder / f"{name}-{seed}.pt"
    if not path.exists():
        plain = defaults.plain_network(net, data, seed, epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(plain.state_dict(), path)
    net.load_state_dict(torch.load(path, map_location=device))
    net.eval()
    if data.likelihood is Gaussian:
        data = in_unit(net, data, unit)  # type: ignore[arg-type]
    run, start = defaults.Run(seed, own_epochs=epochs, validates=validates), time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = scored(_fitted(net, method, data, run).predict, data, device)
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
            x, y = (part.to(next(net.parameters()).device) for part in data.train)
            bnn.likelihood = Gaussian(float((net(x) - y).square().mean())).to(x.device)
    return bnn


def stored(
    name: str, seed: int, method: str, unit: float, folder: Path, end: float, validates: bool, device: str
) -> runs.Row | None:
    """Result of `measure`, from its file if there is one."""
    path = folder / f"{name}-{seed}-{method}-{unit:g}{'-validated' if validates else ''}.json"
    return runs.cell(path, lambda: measure(name, seed, method, unit, folder, validates, device), end)


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
    if row["network"] not in WITH_STRANGERS:
        return found
    if row["method"] not in POINT_METHODS:
        known = row["mutual_information"] > 0.001 and row["mutual_information_outside"] > 2 * row["mutual_information"]
        found += ["strangers"] * (not known)
    return found + ["AUROC"] * (row["auroc_entropy"] < plain["auroc_entropy"] - 0.01)


def main() -> None:
    which = {
        "networks": list(REPORTED),
        "validates": False,
        "seeds": [0, 1, 2],
        "units": list(UNITS),
        "name": "defaults_wider",
    }
    options = runs.parser(__doc__, "device", "workers", "limit", folder=Path("build/defaults_wider"), **which)
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    given = options.parse_args()
    end = time.time() + given.limit
    units = {name: given.units if is_regression(name) else [1.0] for name in given.networks}
    jobs = [
        (name, seed, method, unit, given.folder, end, given.validates, given.device)
        for method in ["network", *given.methods]
        for name in given.networks
        if not (method == "temperature" and is_regression(name))
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
