"""Links and default prior precisions of Laplace on trained classifiers, without tuning, compared with the plain network.

    python -m benchmarks.laplace_defaults --data FOLDER [--device cuda] [--seeds 3] [--workers 4]

Networks are trained by Adam on Fashion-MNIST and on scikit-learn's digits. The folder holds `fashion_mnist.npz` and `mnist.npz`.
Out-of-distribution inputs are the digits of MNIST, and noise for scikit-learn's digits. `mc_1000` is the expectation over 1,000
independent joint draws of the outputs, which the links approximate. `marginal_probit` is the extended probit with the logits' own
variances.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify import Laplace, likelihoods, metrics, subnetwork
from bayesify.likelihoods import Categorical
from bayesify.predictive.base import Outputs
from bayesify.predictive.gaussian import OutputGaussian

from .runs import many, parser
from .timing import record

LINKS = ("mc", "probit", "bridge")
Data = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Training inputs and labels, test inputs and labels, out-of-distribution inputs."""


def fashion(folder: Path, count: int) -> Data:
    """Fashion-MNIST, its first training images, 5,000 test images, and 2,000 digits."""
    own, other = (np.load(folder / f"{name}.npz") for name in ("fashion_mnist", "mnist"))

    def scaled(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).float().reshape(-1, 1, 28, 28) / 255

    labels = [torch.from_numpy(own[key].astype(np.int64)) for key in ("train_labels", "test_labels")]
    return (
        scaled(own["train_images"][:count]),
        labels[0][:count],
        scaled(own["test_images"][:5000]),
        labels[1][:5000],
        scaled(other["test_images"][:2000]),
    )


def digits(_: Path) -> Data:
    """scikit-learn's digits, 1,000 for training, and noise."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.from_numpy(found.images).float().unsqueeze(1) / 16, torch.from_numpy(found.target).long()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    return x[:1000], y[:1000], x[1000:], y[1000:], torch.rand(500, 1, 8, 8, generator=generator)


def hidden_layer_cnn() -> nn.Module:
    body = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10))


def pooled_cnn() -> nn.Module:
    body = [nn.Conv2d(1, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU()]
    body += [nn.MaxPool2d(2), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(192, 10))


def mlp() -> nn.Module:
    body = [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(100, 10))


def digits_cnn() -> nn.Module:
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(128, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Path], Data], int]] = {
    "fashion_cnn_hidden": (hidden_layer_cnn, lambda folder: fashion(folder, 8000), 8),
    "fashion_cnn_pooled": (pooled_cnn, lambda folder: fashion(folder, 6000), 15),
    "fashion_mlp": (mlp, lambda folder: fashion(folder, 10000), 10),
    "digits_cnn": (digits_cnn, digits, 60),
}
FORMS: dict[str, dict[str, Any]] = {
    "last_layer": {"subset": "last_layer"},
    "kronecker": {"covariance": "kronecker"},
    "diagonal": {"covariance": "diagonal"},
    "largest_variance_1000": {"subset": subnetwork.largest_variance(1000)},
    "largest_swag_variance_1000": {"subset": subnetwork.largest_swag_variance(1000, epochs=10)},
    "random_1000": {"subset": subnetwork.random(1000)},
}


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Module:
    optimizer, generator = torch.optim.Adam(net.parameters(), lr=1e-3), torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
    return net.eval()


def scores(inside: Any, outside: Any, y: Tensor) -> dict[str, float]:
    """Scores of predictions on test data and on out-of-distribution inputs."""
    found = metrics.evaluate(inside, y)
    chosen = {key: found[key] for key in ("accuracy", "nll", "ece")}
    chosen["auroc_entropy"] = metrics.ood(inside, outside)["auroc_entropy"]
    chosen["mutual_information"] = float(inside.mutual_information.mean())
    chosen["mutual_information_outside"] = float(outside.mutual_information.mean())
    return {key: round(value, 5) for key, value in chosen.items()}


def expectation(mean: Tensor, covariance: Tensor, draws: int = 1000) -> Any:
    """The mixture over joint draws of the outputs."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    generator = torch.Generator(mean.device).manual_seed(0)
    noise = torch.randn(draws, *mean.shape, 1, generator=generator, dtype=torch.float64, device=mean.device)
    return Categorical().predictive(Outputs(kept=mean + (root @ noise).squeeze(-1)))


def marginal_probit(mean: Tensor, covariance: Tensor) -> Any:
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return Categorical().predictive(Outputs(kept=(mean * (1 + math.pi / 8 * variance).rsqrt()).unsqueeze(0)))


@torch.no_grad()
def moments(laplace: Laplace, x: Tensor) -> tuple[Tensor, Tensor]:
    parts = [(laplace.network(rows), laplace.output_covariance(rows)) for rows in x.split(500)]
    return torch.cat([mean for mean, _ in parts]), torch.cat([spread for _, spread in parts])


def measure(name: str, folder: Path, seed: int, device: str) -> dict[str, Any]:
    """All forms, both precisions and all links on one trained network."""
    make, load, epochs = NETWORKS[name]
    torch.manual_seed(seed)
    net = make().to(device)
    x, y, x_test, y_test, x_outside = (part.to(device) for part in load(folder))
    train(net, x, y, epochs, seed)
    with torch.no_grad():
        plain = [Categorical().predictive(Outputs(kept=net(rows).unsqueeze(0))) for rows in (x_test, x_outside)]
    found: dict[str, Any] = {"network": scores(plain[0], plain[1], y_test)}
    loader = list(zip(x.split(250), y.split(250), strict=True))
    for form, options in FORMS.items():
        for prior in ("default", "neal", "one"):
            laplace = Laplace(net, likelihoods.Categorical(), memory="8GiB", **options, **_precision(prior, net)).fit(
                loader
            )
            inside, outside = moments(laplace, x_test), moments(laplace, x_outside)
            cell = {
                link: scores(
                    *(Categorical().closed_form(OutputGaussian(*part, seed=0), link) for part in (inside, outside)),
                    y_test,
                )
                for link in LINKS
            }
            for key, rule in (("mc_1000", expectation), ("marginal_probit", marginal_probit)):
                cell[key] = scores(rule(*inside), rule(*outside), y_test)
            found[f"{form}, prior {prior}"] = cell
            print(name, seed, form, prior, {key: value["nll"] for key, value in cell.items()}, flush=True)
    return found


def _precision(prior: str, net: nn.Module) -> dict[str, Any]:
    if prior == "default":
        return {}
    if prior == "one":
        return {"prior_precision": 1.0}
    return {"prior_precision": Laplace(net, likelihoods.Categorical()).prior_precision}


def main() -> None:
    options = parser(__doc__, "device", "workers", seeds=3, name="laplace_defaults")
    options.add_argument("--data", type=Path, required=True, help="folder of fashion_mnist.npz and mnist.npz")
    options.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    given = options.parse_args()
    jobs = [(name, given.data, seed, given.device) for name in given.networks for seed in range(given.seeds)]
    found = many(measure, jobs, given.workers)
    record(given.name, {f"{name}, seed {seed}": row for (name, _, seed, _), row in zip(jobs, found, strict=True)})


if __name__ == "__main__":
    main()
