"""Negative log-likelihoods of last-layer Laplace with default arguments and of laplace-torch on the same trained networks.

    python -m benchmarks.laplace_links [--networks digits_cnn cnn] [--seeds 0 1 2] [--workers 4] [--limit 300] [--folder ...]

Each network and seed is a file in `--folder`. After `--limit` seconds no new cell starts, and the results cover the finished cells.
The benchmark needs laplace-torch (`make bench-peers` makes an environment with it). laplace-torch is fitted over the last layer
with a full covariance and three prior precisions: its default, the choice of its evidence, and ours. It predicts by each of its
links. `their_best` is the lowest of these scores on the test images of one seed, a choice that needs the test images. For a
network it is the score of the link and precision with the lowest mean over seeds. `mc_of_the_same` is the mean over 1,000 draws of
our own posterior's outputs, which the default approximates. The networks come from `benchmarks.defaults` and its folder. The
default was chosen on other networks. Seeds 0 to 2 had been seen under the former default; seeds 3 to 5 were run once, after the
choice.
"""

import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from bayesify import Laplace, likelihoods
from bayesify.laplace.prior_precision import precision_of

from .defaults import trained
from .laplace_defaults import expectation, moments
from .runs import Row, cell, many, parser
from .timing import record, rounded

NUM_ROWS = 5000
"""Largest number of test images."""
LINKS = ("mc", "probit", "bridge", "bridge_norm")


def measure(name: str, seed: int, folder: Path) -> Row:
    """Negative log-likelihoods of test images."""
    from laplace import Laplace as theirs

    warnings.simplefilter("ignore")
    net, data, _ = trained(name, seed, folder, "cpu")
    x, y = (part[:NUM_ROWS] for part in data.test)
    loader = DataLoader(TensorDataset(*data.train), batch_size=500)
    ours = Laplace(net, likelihoods.Categorical(), subset="last_layer").fit(loader)
    with torch.no_grad():
        found = {"network": float(torch.nn.functional.cross_entropy(net(x), y))}
    found["ours"] = -float(ours.predict(x).log_prob(y).mean())
    found["mc_of_the_same"] = -float(expectation(*moments(ours, x)).log_prob(y).mean())
    assert ours.subset is not None
    precision = precision_of(ours.prior_precision, next(iter(ours.subset.names)))
    torch.manual_seed(seed)
    peer: Any = theirs(net, "classification", subset_of_weights="last_layer", hessian_structure="full")
    peer.fit(loader)
    for prior in ("default", "ours", "evidence"):
        if prior == "ours":
            peer.prior_precision = precision
        if prior == "evidence":
            peer.prior_precision = 1.0
            peer.optimize_prior_precision(method="marglik")
        for link in LINKS:
            parts = [peer(rows, link_approx=link, n_samples=1000).detach() for rows in x.split(500)]
            probs = torch.cat(parts).gather(1, y[:, None]).squeeze(1)
            found[f"laplace-torch, {prior}, {link}"] = -float(probs.log().mean())
    return rounded(found, 5)


def stored(name: str, seed: int, folder: Path, end: float) -> Row | None:
    """Result of `measure`, from its file if there is one."""
    return cell(folder / f"{name}-{seed}-links.json", lambda: measure(name, seed, folder), end)


def compared(row: dict[str, float]) -> dict[str, float]:
    """A row with its differences."""
    best = min(value for key, value in row.items() if key.startswith("laplace-torch"))
    less = {"ours_less_their_best": row["ours"] - best, "ours_less_mc_of_the_same": row["ours"] - row["mc_of_the_same"]}
    return {**row, "their_best": best, **{key: round(value, 5) for key, value in less.items()}}


def main() -> None:
    which = {"networks": ("cnn", "mlp", "transformer", "gru", "digits_cnn"), "seeds": (0, 1, 2)}
    given = parser(__doc__, "workers", "limit", folder=Path("build/defaults"), **which).parse_args()
    end = time.time() + given.limit
    jobs = [(name, seed, given.folder, end) for seed in given.seeds for name in given.networks]
    found = zip(jobs, many(stored, jobs, given.workers), strict=True)
    rows = {job: row for job, row in found if row is not None}
    figures = {}
    for name in given.networks:
        own = [row for job, row in rows.items() if job[0] == name]
        if own:
            figures[name] = compared({key: round(fmean(row[key] for row in own), 5) for key in own[0]})
    figures |= {f"{name}, seed {seed}": compared(row) for (name, seed, *_), row in rows.items()}
    record("laplace_links", figures, unit="nats per example", aim={"ours_less_their_best": 0.005})


if __name__ == "__main__":
    main()
