"""Every method with its default arguments on trained networks, compared with the network, temperature scaling and an ensemble.

    python -m benchmarks.defaults [--device cuda] [--workers 4] [--networks ...] [--seeds 0 1 2] [--methods ...]
    python -m benchmarks.defaults --stored --methods laplace_last_layer
    python -m benchmarks.defaults --seeds 10 11 --variants prior=neal1 prior=neal4 prior=neal4,std=0.03 --name default_trials

A network is trained by Adam, at a rate that falls along half a cosine, until more epochs change little (`--networks mlp@40` trains
it for 40 epochs). Each method then has at most three epochs, through the public interface as a user would write it. Fashion-MNIST
and its out-of-distribution images, MNIST and notMNIST, come from the folder in BAYESIFY_DATA. scikit-learn's digits need no folder;
their out-of-distribution images are the same digits with shuffled pixels. `strided_cnn` and `mlp_6000` are networks that a user
trained on fewer images; the suite's table leaves them out.

Each network, seed and method is a file in `--folder`, so that an interrupted run can resume. After `--limit` seconds no new cell
starts. Complete results become `benchmarks/results/defaults.json`; with `--stored`, this file keeps its other rows. A seed sets the
training images, the network's initial weights and the order of batches.

Defaults were chosen with seeds from 10 on, by `--variants`. A variant is a list of settings, separated by commas:

    prior=        one of `PRIORS`
    std=          initial standard deviations, as a share of the layer's root mean square
    rate=constant, epochs=
    factor=       factor on Laplace's default precision of each layer
    flat=         share of this precision below which a weight's curvature counts as zero
    swag=         learning rate of SWAG
    statistics=   batch statistics of `bayesianize`
    scratch=      epochs of a fresh network that replaces the trained one

If batch statistics follow the draws, `nll_own_batch` is the NLL of draws that are normalized by 500 test images at a time.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Laplace, posteriors, priors, subnetwork
from bayesify.baselines import SWAG, TemperatureScaling
from bayesify.datasets import images
from bayesify.laplace import prior_precision
from bayesify.laplace import subnetwork as selectors
from bayesify.likelihoods import Categorical
from bayesify.posteriors.common import starts
from bayesify.predictive.base import Outputs

from . import runs
from .laplace_defaults import digits_cnn, hidden_layer_cnn, mlp, scores
from .timing import record, synchronize

BATCH_SIZE = 64
NUM_EPOCHS = 3
"""Number of epochs of a method after the network's training."""
FIRST_TUNING_SEED = 10
"""First seed with which defaults were chosen. Results are reported for smaller seeds."""


@dataclass(frozen=True)
class Run:
    """Arguments of a method in addition to network and data: a seed, and a variant's changes to the defaults."""

    seed: int
    epochs: int = NUM_EPOCHS
    prior: Any = None
    scheduler: str | None = None
    learning_rate: float | None = None
    """Learning rate of SWAG; its own default if `None`."""
    batch_statistics: str = "auto"
    own_epochs: int = 0
    """Number of epochs of the plain network."""
    validates: bool = False
    """Whether `fit` gets the held-out rows as `validation=`."""
    findings: list[str] = field(default_factory=list)
    """Codes of the findings of `fit`."""


@dataclass(frozen=True)
class Data:
    """Images [N, 1, H, W] and labels for training, for a temperature and for the test; and out-of-distribution images."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: dict[str, Tensor]
    """Out-of-distribution images by kind, equally many of each."""
    batch: int = BATCH_SIZE
    """Number of examples per step."""
    likelihood: Callable[[], Any] = Categorical

    def loader(self, batch: int | None = None) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*self.train), batch_size=batch or self.batch, shuffle=True)


class Patches(nn.Module):
    """A small transformer with patches of 7 x 7 pixels as tokens, two layers, and the mean over tokens."""

    def __init__(self, side: int = 28, patch: int = 7, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = nn.functional.unfold(x, self.patch, stride=self.patch).mT
        return self.head(self.body(self.embed(tokens) + self.position).mean(1))


class Rows(nn.Module):
    """A GRU over the rows of an image, several at a time."""

    def __init__(self, side: int = 28, together: int = 2, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.steps = side // together
        self.body = nn.GRU(side * together, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.reshape(len(x), self.steps, -1))[0][:, -1])


def strided_cnn() -> nn.Module:
    body = [nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10))


def digits_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def normalized_cnn() -> nn.Module:
    """Convolution, BatchNorm and ReLU three times, and global pooling."""
    body: list[nn.Module] = []
    for c_in, c_out, end in ((1, 16, nn.MaxPool2d(2)), (16, 32, nn.MaxPool2d(2)), (32, 64, nn.AdaptiveAvgPool2d(1))):
        body += [nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU(), end]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))


OUTSIDE_SETS = {"digits": "mnist", "letters": "notmnist"}
"""Out-of-distribution sets. Digits are darker than clothes and letters brighter, so one set alone would measure brightness."""


@cache
def fashion(seed: int, count: int = 10_000, batch: int = BATCH_SIZE) -> Data:
    """Training images of a seed, 2,000 for a temperature, 5,000 for the test, 1,000 out-of-distribution images of each kind."""
    own = images.load("fashion_mnist")

    def scaled(values: Any) -> Tensor:
        return torch.from_numpy(values).float() / 255

    order = torch.randperm(len(own.train_labels), generator=torch.Generator().manual_seed(seed)).numpy()
    parts = [(own.train_images[rows], own.train_labels[rows]) for rows in (order[:count], order[count:][:2000])]
    parts.append((own.test_images[:5000], own.test_labels[:5000]))
    tensors = [(scaled(x), torch.from_numpy(y).long()) for x, y in parts]
    outside = {kind: scaled(images.load(name).test_images[:1000]) for kind, name in OUTSIDE_SETS.items()}
    return Data(tensors[0], tensors[1], tensors[2], outside, batch)


def few_fashion(seed: int) -> Data:
    """6,000 training images in steps of 100."""
    return fashion(seed, 6000, 100)


def digits(seed: int) -> Data:
    """scikit-learn's digits: 1,000 for training, 100 for a temperature, 697 test images and those with shuffled pixels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.from_numpy(found.images).float().unsqueeze(1) / 16, torch.from_numpy(found.target).long()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    shuffled = x[1100:].flatten(1)[:, torch.randperm(64, generator=generator)].view(-1, 1, 8, 8)
    return Data((x[:1000], y[:1000]), (x[1000:1100], y[1000:1100]), (x[1100:], y[1100:]), {"shuffled": shuffled})


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Data], int]] = {
    "cnn": (hidden_layer_cnn, fashion, 30),
    "mlp": (mlp, fashion, 22),
    "transformer": (Patches, fashion, 12),
    "gru": (Rows, fashion, 45),
    "normalized_cnn": (normalized_cnn, fashion, 20),
    "strided_cnn": (strided_cnn, few_fashion, 20),
    "mlp_6000": (mlp, few_fashion, 20),
    "digits_cnn": (digits_cnn, digits, 150),
    "digits_mlp": (digits_mlp, digits, 150),
    "digits_transformer": (lambda: Patches(8, 2), digits, 150),
    "digits_gru": (lambda: Rows(8, 1), digits, 150),
}
"""Network, data and epochs of Adam by name."""


def _laplace(**options: Any) -> Callable[..., Any]:
    return lambda net, data, run: Laplace(net, data.likelihood(), **options).fit(data.loader(500))


def bayesian(net: nn.Module, posterior: Any, data: Data, run: Run) -> Any:
    return bayesify.bayesianize(
        net, posterior, likelihood=data.likelihood(), prior=run.prior, batch_statistics=run.batch_statistics
    )


def _fit(model: Any, data: Data, run: Run, epochs: int | None = None) -> Any:
    options = {"epochs": epochs or run.epochs, "seed": run.seed, "scheduler": run.scheduler, "progress": False}
    if run.validates:
        options["validation"] = [data.held_out]
    run.findings.extend(bayesify.fit(model, data.loader(), **options).findings.codes)
    return model


def _variational(make: Callable[[], Any]) -> Callable[..., Any]:
    return lambda net, data, run: _fit(bayesian(net, make(), data, run), data, run)


def _function_space(net: nn.Module, data: Data, run: Run) -> Any:
    return _fit(bayesify.FunctionSpaceVI(bayesian(net, posteriors.MeanField(), data, run)), data, run)


def _swag(net: nn.Module, data: Data, run: Run) -> Any:
    options = {"prior": run.prior, "seed": run.seed, "progress": False}
    model = SWAG(net, data.likelihood()).fit(data.loader(), run.epochs, run.learning_rate, **options)
    run.findings.extend(model.history.findings.codes)
    if not any(isinstance(module, nn.BatchNorm2d) for module in net.modules()):
        return model
    draws = model.draw(32, loader=data.loader(500))  # each draw has its own batch statistics
    return SimpleNamespace(predict=partial(model.predict, draws=draws))


def _temperature(net: nn.Module, data: Data, run: Run) -> Any:
    return TemperatureScaling(net, data.likelihood()).fit([data.held_out])


def _ensemble(net: nn.Module, data: Data, run: Run) -> Any:
    """An ensemble with as many epochs as the network had. All members but the first start at random."""
    return _fit(bayesian(net, posteriors.Ensemble(), data, run), data, run, run.own_epochs)


REFERENCE_METHODS: dict[str, Callable[..., Any]] = {"temperature": _temperature, "ensemble": _ensemble}
"""Methods for comparison, in addition to the plain network."""
METHODS: dict[str, Callable[..., Any]] = {
    "laplace_last_layer": _laplace(subset="last_layer"),
    "laplace_kronecker": _laplace(covariance="kronecker"),
    "laplace_diagonal": _laplace(covariance="diagonal"),
    "subnetwork_variance": _laplace(subset=subnetwork.largest_variance(1000)),
    "subnetwork_swag": _laplace(subset=subnetwork.largest_swag_variance(1000)),
    "mean_field": _variational(lambda: posteriors.MeanField()),
    "k_tied": _variational(lambda: posteriors.KTied()),
    "matrix_normal": _variational(lambda: posteriors.MatrixNormal()),
    "rank_one": _variational(lambda: posteriors.RankOne()),
    "inducing": _variational(lambda: posteriors.InducingWeights(init="network")),
    "walsh_hadamard": _variational(lambda: posteriors.WalshHadamard(init="residual")),
    "dropout": _variational(lambda: posteriors.Dropout()),
    "point": _variational(lambda: posteriors.Point()),
    "swag": _swag,
    "function_space": _function_space,
}
"""Methods with default arguments, except sizes and initial values that a user must choose. `point` has only a prior."""
PRIORS: dict[str, Callable[[], Any]] = {
    "standard": priors.Standard,
    **{f"neal{scale}": partial(priors.Neal, float(scale)) for scale in (1, 2, 4, 8, 16, 32)},
}
"""Priors to try, by name."""


def named(name: str) -> tuple[str, int]:
    """A network's name and its epochs of Adam, from `mlp` or `mlp@40`."""
    network, _, epochs = name.partition("@")
    return network, int(epochs or NETWORKS[network][2])


def trained(name: str, seed: int, folder: Path, device: str) -> tuple[nn.Module, Data, dict[str, Any]]:
    """The network of a seed (trained once, then read from its file), its data, and the plain network's scores."""
    network, epochs = named(name)
    make, load, _ = NETWORKS[network]
    data = load(seed)
    torch.manual_seed(seed)
    net = make().to(device)
    path, scored = folder / f"{name}-{seed}.pt", folder / f"{name}-{seed}-network.json"

    def plain() -> runs.Row:
        start = time.perf_counter()
        own = plain_network(net, data, seed, epochs)

        @torch.no_grad()
        def predict(x: Tensor) -> Any:
            return Categorical().predictive(Outputs(kept=own(x).unsqueeze(0)))

        torch.save(own.state_dict(), path)
        return _row(name, seed, "network", scored_by(predict, data, device), time.perf_counter() - start)

    row = runs.cell(scored, plain)
    net.load_state_dict(torch.load(path, map_location=device))
    return net.eval(), data, row


def plain_network(net: nn.Module, data: Data, seed: int, epochs: int) -> nn.Module:
    """A network trained by maximum likelihood: a point estimate without a prior."""
    bnn = bayesify.bayesianize(net, posteriors.Point(), likelihood=data.likelihood())
    bayesify.fit(bnn, data.loader(), epochs=epochs, seed=seed, kl_weight=0.0, progress=False)
    return bnn.mean_network().eval()


def scored_by(predict: Callable[[Tensor], Any], data: Data, device: str) -> dict[str, float]:
    """Scores on test images and on out-of-distribution images, by kind and as means over kinds."""
    inside = predict(data.test[0].to(device))
    kinds = {kind: scores(inside, predict(x.to(device)), data.test[1].to(device)) for kind, x in data.outside.items()}
    found: dict[str, float] = next(iter(kinds.values())).copy()
    for key in ("auroc_entropy", "mutual_information_outside"):
        found[key] = round(fmean(part[key] for part in kinds.values()), 5)
        found |= {f"{key}_{kind}": part[key] for kind, part in kinds.items() if len(kinds) > 1}
    return found


@torch.no_grad()
def own_batches(model: Any, data: Data, device: str) -> dict[str, float]:
    """The NLL of draws that are normalized by test images, if the network's batch statistics are averages over draws."""
    if not isinstance(model, bayesify.BayesianNetwork) or model.frozen_statistics:
        return {}
    if model.num_distinct_draws or not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return {}
    model = copy.deepcopy(model).train()
    draws = model.draw(32, generator=torch.Generator(device).manual_seed(0)).detach()
    x, y = (part.to(device).split(500) for part in data.test)
    outputs = torch.cat([draws(part) for part in x], 1)  # [S, B, O]
    prediction = Categorical().predictive(Outputs(kept=outputs))
    return {"nll_own_batch": round(-float(prediction.log_prob(torch.cat(y)).mean()), 5)}


def _row(name: str, seed: int, method: str, found: dict[str, float], seconds: float) -> dict[str, Any]:
    return {"network": name, "seed": seed, "method": method, **found, "seconds": round(seconds, 2)}


Job = tuple[str, int, str, str, Path, str]
"""Network, seed, method, variant, folder, device."""


def _named(method: str, variant: str) -> str:
    return ",".join((method, variant)) if variant else method


def cell(job: Job) -> Path:
    """The file of a result."""
    name, seed, method, variant, folder, _ = job
    return folder / f"{name}-{seed}-{_named(method, variant)}.json"


def measure(job: Job) -> dict[str, Any]:
    """One method on one network. An error is also a result."""
    name, seed, method, variant, folder, device = job
    net, data, _ = trained(name, seed, folder, device)
    torch.manual_seed(seed)
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(), _variant(variant, seed, name) as run:
            warnings.simplefilter("ignore")
            if "scratch" in variant:
                net = NETWORKS[named(name)[0]][0]().to(device)
            model = (METHODS | REFERENCE_METHODS)[method](net, data, run)
            synchronize()
            fitted = time.perf_counter() - started
            row: dict[str, Any] = scored_by(model.predict, data, device) | own_batches(model, data, device)
        row["training"] = round(fitted, 2)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}"}
    synchronize()
    return _row(name, seed, _named(method, variant), row, time.perf_counter() - started)


@contextmanager
def _variant(variant: str, seed: int, name: str) -> Iterator[Run]:
    """A variant's changes to the defaults, active while the method runs."""
    told = dict(part.split("=") for part in variant.split(",") if part)
    run = Run(seed, own_epochs=named(name)[1])
    if "prior" in told:
        run = replace(run, prior=PRIORS[told["prior"]]())
    run = replace(run, scheduler=told.get("rate"), epochs=int(told.get("epochs", NUM_EPOCHS)))
    run = replace(run, learning_rate=float(told["swag"]) if "swag" in told else None)
    run = replace(run, batch_statistics=told.get("statistics", "auto"), epochs=int(told.get("scratch", run.epochs)))
    std, factor = (starts.RELATIVE_STD, starts.NORMALIZED_RELATIVE_STD), prior_precision.FACTOR_PER_LAYER
    starts.RELATIVE_STD, starts.NORMALIZED_RELATIVE_STD = (float(told.get("std", share)) for share in std)
    narrowed = selectors.MIN_CURVATURE_RATIO
    selectors.MIN_CURVATURE_RATIO = float(told.get("flat", narrowed))
    prior_precision.FACTOR_PER_LAYER = float(told.get("factor", factor))
    try:
        yield run
    finally:
        starts.RELATIVE_STD, starts.NORMALIZED_RELATIVE_STD = std
        selectors.MIN_CURVATURE_RATIO = narrowed
        prior_precision.FACTOR_PER_LAYER = factor


def begun(job: Job, end: float) -> dict[str, Any] | None:
    """Result of `measure`, or the plain network's scores, from the file if there is one; `None` if the time is over."""
    name, seed, method, _, folder, device = job
    if method == "network" and (time.time() < end or cell(job).exists()):
        return trained(name, seed, folder, device)[2]
    return runs.cell(cell(job), lambda: measure(job), end)


def by_name(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows as figures of a results file, by network, seed and method."""
    ordered = sorted(rows, key=lambda row: (list(NETWORKS).index(named(row["network"])[0]), row["seed"]))
    return {f"{row['network']}, seed {row['seed']}, {row['method']}": row for row in ordered}


def main() -> None:
    which = {"networks": list(NETWORKS), "seeds": [0, 1, 2], "variants": [""], "name": "defaults", "stored": False}
    options = runs.parser(__doc__, "device", "workers", "limit", folder=Path("build/defaults"), **which)
    options.add_argument(
        "--methods", nargs="+", default=[*REFERENCE_METHODS, *METHODS], choices=[*REFERENCE_METHODS, *METHODS]
    )
    given = options.parse_args()
    place = (given.folder, given.device)
    plain: list[Job] = [(name, seed, "network", "", *place) for seed in given.seeds for name in given.networks]
    rest: list[Job] = [
        (name, seed, method, variant, *place)
        for method in given.methods
        for variant in given.variants
        for name, seed, *_ in plain
    ]
    end, rows = time.time() + given.limit, []
    for part in (plain, rest):
        rows += runs.many(begun, [(job, end) for job in part], given.workers)
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        raise SystemExit(f"only {len(found)} of {len(rows)} results were finished in time; run the command again")
    record(given.name, by_name(found), keep=given.stored)


if __name__ == "__main__":
    main()
