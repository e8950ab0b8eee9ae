"""Last-layer Laplace with default arguments beside laplace-torch's on the same trained networks: negative log-likelihoods.

    python -m benchmarks.laplace_links [--networks digits_cnn cnn] [--seeds 0 1 2] [--folder build/defaults]

needs laplace-torch (`make bench-peers` makes an environment with it). Theirs is fitted over the last layer with a full covariance,
with its default prior precision and with the one that its evidence chooses, and predicts by each of its links; `best` is the
lowest of all of these on the test images, which nobody could have chosen without them. `mc_of_the_same` is the mean over 1,000
draws of our own posterior's outputs, which the default stands for. Networks are those of `benchmarks.defaults`, from its folder.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from bayesify import Laplace, likelihoods

from .defaults import trained
from .laplace_defaults import expectation, moments
from .timing import record

ROWS = 1500
"""Test images, at most."""
LINKS = ("mc", "probit", "bridge", "bridge_norm")


def measure(name: str, seed: int, folder: Path) -> dict[str, float]:
    """Negative log-likelihoods of test images."""
    path = folder / f"{name}-{seed}-links.json"
    if path.exists():
        return json.loads(path.read_text())
    from laplace import Laplace as theirs

    net, data, _ = trained(name, seed, folder, "cpu")
    x, y = (part[:ROWS] for part in data.test)
    loader = DataLoader(TensorDataset(*data.train), batch_size=500)
    ours = Laplace(net, likelihoods.Categorical(), subset="last_layer").fit(loader)
    with torch.no_grad():
        found = {"network": float(torch.nn.functional.cross_entropy(net(x), y))}
    found["ours"] = -float(ours.predict(x).log_prob(y).mean())
    found["mc_of_the_same"] = -float(expectation(*moments(ours, x)).log_prob(y).mean())
    for tuned in (False, True):
        torch.manual_seed(seed)
        peer: Any = theirs(net, "classification", subset_of_weights="last_layer", hessian_structure="full")
        peer.fit(loader)
        if tuned:
            peer.optimize_prior_precision(method="marglik")
        for link in LINKS:
            parts = [peer(rows, link_approx=link, n_samples=1000).detach() for rows in x.split(500)]
            probs = torch.cat(parts).gather(1, y[:, None]).squeeze(1)
            found[f"laplace-torch, {'evidence' if tuned else 'default'}, {link}"] = -float(probs.log().mean())
    peers = {key: value for key, value in found.items() if key.startswith("laplace-torch")}
    found["ours_less_their_best"] = found["ours"] - min(peers.values())
    found["ours_less_mc_of_the_same"] = found["ours"] - found["mc_of_the_same"]
    found = {key: round(value, 5) for key, value in found.items()}
    path.write_text(json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["digits_cnn", "cnn"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("build/defaults"), help="of trained networks")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    figures = {
        f"{name}, seed {seed}": measure(name, seed, given.folder) for name in given.networks for seed in given.seeds
    }
    record("laplace_links", figures, unit="nats per example", aim={"ours_less_their_best": 0.005})


if __name__ == "__main__":
    main()
