"""Sampled linearized Laplace over all weights compared with the last layer, Kronecker factors and a subnetwork.

python -m benchmarks.sampled_laplace --out DIR --trained DIR2    # ResNet-18 on CIFAR-10, from the folder in BAYESIFY_DATA
python -m benchmarks.sampled_laplace --out DIR --made            # ResNet-50, 1,000 classes, synthetic images: seconds and memory
python -m benchmarks.sampled_laplace --out DIR --small           # all of it in a small setting on a CPU

`--weights FILE` takes the network from a file of `torch.save`. `--seconds` is the time of the conjugate gradients of the draws.

DIR2 is a folder of `bayesify_papers.inducing_weights.classification`, which gives the deterministic network of the seed. Without it
the network is trained. An interrupted run continues with the same command. Results are written when all cells of DIR are finished.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from bayesify_papers.inducing_weights.systems import SYSTEMS, Recipe, train
from bayesify_papers.shared.image_problems import ImageProblem
from bayesify_papers.shared.sources import SYNTHETIC, Source, unit_pixels
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, metrics, models, subnetwork
from bayesify.laplace import Sampled
from bayesify.laplace.sampled import SampledCovariance
from benchmarks.runs import Row, cell, parser
from benchmarks.timing import clock, record

RECIPE = Recipe(
    epochs=60,
    batch=256,
    depth=2,
    width=64,
    augment=True,
    cutout=16,
    schedule="one_cycle",
    learning_rate=5e-3,
    precision="bf16",
)
ITERATIONS = 20
"""Largest number of conjugate-gradient steps for each draw."""
SMALL_RECIPE = Recipe(epochs=2, batch=50, depth=1, width=4)
GROUP, NUM_GROUPS = 10, 2000
"""Number of images whose labels are predicted jointly, drawn from two test images (Osband et al. 2022), and number of groups."""


class Timed:
    """Batches in a fixed order. A file sums the seconds between the starts of passes over several slices."""

    def __init__(self, x: Tensor, y: Tensor, batch: int, path: Path) -> None:
        self._batches = list(zip(x.split(batch), y.split(batch), strict=True))
        self._path, self._last = path, time.perf_counter()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._batches
        now = time.perf_counter()
        self._path.write_text(str(self.seconds() + now - self._last))
        self._last = now

    def seconds(self) -> float:
        """Seconds so far."""
        return float(self._path.read_text()) if self._path.exists() else 0.0


def joint_nll(log_probs: Tensor, y: Tensor) -> float:
    """Mean over groups of -log p(labels of the group), from log probabilities [S, N, C] of draws."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(len(y), (NUM_GROUPS, 2), generator=generator)
    index = pairs.gather(1, torch.randint(2, (NUM_GROUPS, GROUP), generator=generator)).to(y.device)  # [G, 10]
    each = log_probs.gather(2, y.expand(len(log_probs), -1).unsqueeze(2)).squeeze(2)  # [S, N]
    return float(-(each[:, index].sum(2).logsumexp(0) - torch.tensor(float(len(each))).log()).mean())


def scores(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> dict[str, float]:
    """Scores from outputs of draws, [S, B, C] for a batch."""
    log_probs = torch.cat([predict(part) for part in x.split(500)], dim=1).log_softmax(-1)
    made = likelihoods.Categorical().predictive(bayesify.predictive.base.Outputs(kept=log_probs))
    found = metrics.evaluate(made, y)
    return {**{key: found[key] for key in ("accuracy", "nll", "ece", "brier")}, "joint_nll": joint_nll(log_probs, y)}


def trained_network(options: Any, problem: ImageProblem) -> nn.Module:
    """The network of a weights file, the deterministic network of a folder, or a network that is trained now."""
    if options.weights and Path(options.weights).exists():
        return read_weights(Path(options.weights)).to(problem.device).eval()
    recipe, folder = SMALL_RECIPE if options.small else RECIPE, Path(options.trained or options.out)
    about = folder / "run.json"
    if options.trained and about.exists():
        known = {field.name for field in fields(Recipe)}
        recipe = Recipe(
            **{key: value for key, value in json.loads(about.read_text())["settings"].items() if key in known}
        )
    if options.epochs:
        recipe = replace(recipe, epochs=options.epochs)
    network, _ = train(
        SYSTEMS["deterministic"], recipe, problem, options.seed, folder / f"point-{options.seed}.safetensors"
    )
    return network.mean_network().eval()


def read_weights(path: Path) -> nn.Module:
    """Our ResNet-18 from a file of `torch.save`: a module, its state, or a dictionary with the state."""
    found = torch.load(path, map_location="cpu", weights_only=False)
    if isinstance(found, nn.Module):
        return found
    for key in ("state_dict", "network", "model", "weights"):
        found = found[key] if isinstance(found.get(key), dict) else found
    state = {name.removeprefix("module.").removeprefix("network."): value for name, value in found.items()}
    net = models.resnet18("cifar", 10)
    net.load_state_dict(state)
    return net


@torch.no_grad()
def scaling(net: nn.Module, problem: ImageProblem, source: Source) -> Callable[[Any, Any], Tensor]:
    """The scaling of pixels with which a network classifies training images best. It is not stored with the weights."""
    mean, std = ((torch.tensor(v).view(3, 1, 1)) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))

    def usual(images: Any, device: Any) -> Tensor:
        return ((unit_pixels(images, "cpu") - mean) / std).to(device)

    choices = [problem.scale, unit_pixels, usual]
    few = source.images().train_images[:1000]
    right = [float((net(one(few, problem.device)).argmax(1) == problem.y[:1000]).float().mean()) for one in choices]
    print("accuracy on training images under three scalings", right, flush=True)
    return choices[max(range(3), key=right.__getitem__)]


def draw_options(options: Any, out: Path) -> Sampled:
    """Options of the draws. The speed of pushes sets the number of examples that fit into the seconds, for all slices."""
    kept = out / "examples.txt"
    if not kept.exists():
        pushed = json.loads((out / "kronecker.json").read_text())["predict_500_s"]
        each = 2.6 * pushed / 500 * (ITERATIONS + 2)  # an iteration pushes all draws forward and pulls them back
        kept.write_text(str(100 if options.small else min(max(int(options.seconds / each), 2000), 20_000)))
    examples = int(kept.read_text())
    return Sampled(num_draws=options.draws, at_once=options.draws, iterations=ITERATIONS, examples=examples)


def cifar(options: Any, out: Path, end: float) -> dict[str, Row | None]:
    """Rows of all methods on CIFAR-10, or on synthetic images."""
    source = Source(SYNTHETIC, num_train=300) if options.small else Source("cifar10")
    problem = ImageProblem(source, options.device)
    net = trained_network(options, problem)
    scale = problem.scale if options.small else scaling(net, problem, source)
    train_x = scale(source.images().train_images, problem.device)
    x = scale(source.scored()["test"], problem.device)
    y = problem.test_labels.to(problem.device)
    memory = "1GiB" if options.small else options.memory
    batch = 100 if options.small else options.batch

    def made(name: str, **settings: Any) -> Row:
        torch.cuda.reset_peak_memory_stats() if x.is_cuda else None
        batches = Timed(train_x, problem.y, batch, out / f"{name}.seconds")
        laplace = bayesify.Laplace(net, likelihoods.Categorical(), memory=memory, **settings)
        if settings.get("covariance") not in ("full", "kronecker"):
            took = clock(lambda: laplace.fit(batches, checkpoint=out / f"{name}.draws"))
            took = max(took, batches.seconds())
        else:
            took = clock(lambda: laplace.fit(batches))
        laplace.predict(x[:500], options.draws, method="linearized_mc")  # the first call selects kernels
        predict_s = clock(lambda: laplace.predict(x[:500], options.draws, method="linearized_mc").outputs)

        def outputs(part: Tensor) -> Tensor:
            generator = torch.Generator(x.device).manual_seed(options.seed)
            return laplace.predict(part, options.draws, method="linearized_mc", generator=generator).outputs

        found: Row = {**scores(outputs, x, y), "about": repr(laplace), "fit_s": took, "predict_500_s": predict_s}
        if x.is_cuda:
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if laplace.covariance == "sampled":
            found |= unnarrowed(laplace, outputs)
        return found

    def unnarrowed(laplace: bayesify.Laplace, outputs: Callable[[Tensor], Tensor]) -> Row:
        """The row without the narrowing by training rows."""
        posterior = laplace.fitted()[1]
        assert isinstance(posterior, SampledCovariance)
        laplace.temperature = 1 / posterior.narrowed
        return {f"evidence_alone_{key}": value for key, value in scores(outputs, x, y).items()}

    size = 100 if options.small else 2000
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "last_layer": lambda: {"subset": "last_layer", "covariance": "full"},
        "kronecker": lambda: {"subset": "all", "covariance": "kronecker", "num_samples": 2},
        "sampled": lambda: {"covariance": draw_options(options, out)},
        "subnetwork": lambda: {
            "subset": subnetwork.largest_variance(size, num_examples=500),
            "covariance": "full",
            "num_samples": 2,
        },
    }
    with torch.no_grad():
        rows = {"network": cell(out / "network.json", lambda: scores(lambda part: net(part).unsqueeze(0), x, y), end)}
    return rows | {
        name: cell(out / f"{name}.json", lambda n=name, s=s: made(n, **s()), end)  # type: ignore[misc]
        for name, s in runs.items()
    }


class Held:
    """Batches on the CPU. They record the peak GPU memory between batches, which excludes activations, and its place."""

    def __init__(self, x: Tensor, y: Tensor, batch: int) -> None:
        self._batches = list(zip(x.split(batch), y.split(batch), strict=True))
        self.bytes, self.place = 0, ""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for item in self._batches:
            if torch.cuda.is_available() and torch.cuda.memory_allocated() > self.bytes:
                self.bytes = torch.cuda.memory_allocated()
                self.place = " < ".join(frame.name for frame in reversed(traceback.extract_stack()[-9:-1]))
            yield item


def made_images(options: Any, out: Path, end: float) -> dict[str, Row | None]:
    """Seconds and memory with 1,000 classes: memory of the draws in copies of the network, and total peak memory."""
    classes, size, count = (20, 32, 16) if options.small else (1000, 224, 256)
    torch.manual_seed(0)
    net = models.resnet18("cifar", classes, width=4) if options.small else models.resnet50("imagenet", classes)
    net = net.to(options.device).eval()
    x, y = torch.randn(count, 3, size, size), torch.randint(classes, (count,))
    with torch.no_grad():  # features must differ between examples, as in a trained network
        for module in net.train().modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        net(x[:64].to(options.device))
        net.eval()
    one = sum(parameter.numel() * 4 for parameter in net.parameters())
    sampled = Sampled(num_draws=4, iterations=5 if options.small else ITERATIONS, at_once=1)

    def row() -> Row:
        batches = Held(x, y, 32)
        with torch.no_grad():
            forward = min(clock(lambda: [net(part.to(options.device)) for part in x.split(32)]) for _ in range(3))
        on_gpu = torch.cuda.is_available()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        laplace = bayesify.Laplace(net, likelihoods.Categorical(), covariance=sampled, memory=options.memory)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        took = clock(lambda: laplace.fit(batches))
        found: Row = {"classes": classes, "images": count, "network_mib": one / 2**20, "pass_s": forward, "fit_s": took}
        found |= {"fit_passes": took / forward, "about": repr(laplace), "draws": sampled.num_draws}
        if on_gpu:
            found |= {"held_copies": (batches.bytes - before) / one, "held_in": batches.place}
            found["peak_copies_with_activations"] = (torch.cuda.max_memory_allocated() - before) / one
        few = x[: min(64, count)].to(options.device)
        found["predict_s"] = min(clock(lambda: laplace.predict(few).probs) for _ in range(2))
        return found

    return {"made": cell(out / "made.json", row, end)}


def main() -> None:
    defaults = {"out": "sampled_laplace", "trained": "", "weights": "", "made": False, "seed": 0, "draws": 8}
    steps = {"seconds": 70.0, "epochs": 0, "batch": 512}
    given = parser(__doc__, "small", "limit", **defaults, **steps, memory="48GiB", device="cuda")
    options = given.parse_args()
    if options.small:
        options.device, options.memory, options.draws = "cpu", "1GiB", 4
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    end = time.time() + options.limit
    rows = {} if options.made else cifar(options, out, end)
    if options.made or options.small:
        rows |= made_images(options, out, end)
    name = f"sampled_laplace{'_made' if options.made else ''}_{'cpu' if options.small else 'gpu'}"
    if all(rows.values()):
        record(name, rows, digits=4)


if __name__ == "__main__":
    main()
