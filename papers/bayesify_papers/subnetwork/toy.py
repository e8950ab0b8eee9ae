"""The 1-D regression of section 5.1 (figure 2): posteriors around one MAP estimate, one panel each.

    python -m bayesify_papers.subnetwork.toy [--dataset matern] [--seeds 3] [--out DIR] [--smoke]

Network, prior precision and sizes are the paper's: two hidden layers of 50 ReLU units, a prior precision of 3 on each of the 2,600
weights without biases, and subnetworks of 50, 3 and 1 % of the weights. The last layer has the marginal of the full posterior
(appendix C.1). The paper's data are two clusters from an unnamed set of the paper on depth uncertainty. `matern` is that paper's
set with two clusters, in the folder of the data; `cosine` is synthetic. Subnetworks are chosen as in the paper's text (the largest
1 / (H + lambda)), as in its authors' code for images (the largest variance over iterates of SGD), and at random.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify import Laplace, RegressionPredictive, subnetwork
from bayesify.baselines import SWAG
from bayesify.datasets import toy
from bayesify.datasets.download import obtain
from bayesify.laplace.covariances import DiagonalCovariance
from bayesify.likelihoods import Gaussian
from bayesify.predictive.base import Outputs
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.batches import MemoryBatches
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.subnetwork import map_regression, rows

HIDDEN_LAYERS, WIDTH, PRIOR_PRECISION = 2, 50, 3.0
SUBNETWORK_SHARES = (0.5, 0.03, 0.01)
SWAG_EPOCHS, SWAG_RATE, SWAG_BATCH, SWAG_DECAY = 256, 1e-2, 20, 3e-4
"""Number of iterates, learning rate and weight decay of the authors' code. Its batch of 1,024 would contain all of these points."""

RECIPE = map_regression.Recipe(epochs=20_000, patience=None)
SMOKE = map_regression.Recipe(epochs=20, patience=None)


@dataclass(frozen=True)
class Data:
    """Data points, and inputs for plots.

    Args:
        name: Name of the set.
        x: Inputs, [N, 1].
        y: Targets, [N, 1].
        grid: Evenly spaced inputs, [G, 1].
        gap: Ends of the interval between the clusters.
    """

    name: str
    x: Tensor
    y: Tensor
    grid: Tensor
    gap: tuple[float, float]


def load(name: str, folder: str | Path | None = None) -> Data:
    """`"matern"`, from the folder of the data, or `"cosine"`, both standardized.

    Raises:
        FileNotFoundError: If the folder has no `toy/matern_1d.npz`.
    """
    if name == "cosine":
        made = toy.cosine().standardized()
        assert made.gap is not None
        return Data(name, made.x, made.y, made.grid, made.gap)
    _, stored = obtain("toy", "toy/matern_1d.npz", folder)
    x, y = torch.from_numpy(stored["x"]).float(), torch.from_numpy(stored["y"]).float()
    ordered = x[:, 0].sort().values
    place = int(ordered.diff().argmax())
    grid = torch.linspace(float(ordered[0]) - 1.2, float(ordered[-1]) + 1.2, 240)[:, None]
    return Data(name, x, y, grid, (float(ordered[place]), float(ordered[place + 1])))


Predict = Callable[[Tensor], RegressionPredictive]


Outcome = dict[str, Any]
"""Results of one posterior and one seed: `system`; `seed` (of the network, its training and the random subnetwork); `num_weights`
with a variance; and the mean epistemic standard deviation `at_data` (the training inputs), `in_gap` (between the clusters) and
`outside` (beyond the data)."""


def systems(num_weights: int, seed: int, curvature: Tensor, moved: Tensor) -> dict[str, dict[str, Any]]:
    """Arguments of `Laplace` for each posterior, by title. The number in parentheses counts weights.

    Args:
        num_weights: Number of all weights.
        seed: Seed of the random subnetworks.
        curvature: Diagonal of the curvature, [num_weights]. If it is 0, the data do not inform the weight, which then has the
            prior's variance, the largest possible. The paper's rule takes such weights first, although most of them belong to
            units that are never active. The rows of live weights leave them out.
        moved: Variance of each weight over iterates of SGD, [num_weights].
    """
    made: dict[str, dict[str, Any]] = {
        f"Diagonal ({num_weights})": {"covariance": "diagonal"},
        f"Last layer ({WIDTH})": {"subset": "last_layer", "marginal": True},
        f"Full ({num_weights})": {},
    }
    flat, moving = curvature.masked_fill(curvature == 0, math.inf).argsort(), moved.argsort(descending=True)
    rules: dict[str, Callable[[int], Any]] = {
        "Largest variance": lambda size: subnetwork.largest_variance(size, skip_flat=False),
        "Live weights": lambda size: subnetwork.from_indices(flat[:size]),
        "SWAG variance": lambda size: subnetwork.from_indices(moving[:size]),
        "Random": lambda size: subnetwork.random(size, seed=seed),
    }
    for rule, choose in rules.items():
        for share in SUBNETWORK_SHARES:
            size = math.ceil(share * num_weights)
            size = min(int((curvature > 0).sum()), size) if rule == "Live weights" else size
            made[f"{rule} {share:.0%} ({size})"] = {"subset": choose(size)}
    return made


def predictors(data: Data, recipe: map_regression.Recipe, seed: int) -> dict[str, Predict]:
    """Train the network and return the prediction function of each posterior around it."""
    net = map_regression.make(1, HIDDEN_LAYERS, WIDTH, seed)
    likelihood = map_regression.train(net, data.x, data.y, recipe, seed=seed)
    num_weights = map_regression.freeze_biases(net)
    made: dict[str, Predict] = {"MAP (0)": _point(net, likelihood)}
    diagonal = Laplace(net, likelihood, covariance="diagonal", prior_precision=1.0).fit([(data.x, data.y)]).posterior
    assert isinstance(diagonal, DiagonalCovariance)
    swag = SWAG(net, likelihood, rank=0).fit(
        MemoryBatches(data.x, data.y, min(SWAG_BATCH, len(data.x))),
        min(SWAG_EPOCHS, recipe.epochs),
        SWAG_RATE,
        weight_decay=SWAG_DECAY,
        seed=seed,
        progress=False,
    )
    moved = torch.cat([variance.flatten() for variance in swag.variance().values()])
    for title, options in systems(num_weights, seed, diagonal.curvature, moved).items():
        laplace = Laplace(net, likelihood, prior_precision=PRIOR_PRECISION, **options).fit([(data.x, data.y)])
        made[title] = laplace.predict  # type: ignore[assignment]
    return made


def _point(net: nn.Module, likelihood: Gaussian) -> Predict:
    def predict(x: Tensor) -> RegressionPredictive:
        with torch.no_grad():
            return likelihood.predictive(Outputs(kept=net(x).unsqueeze(0)))

    return predict


def judge(title: str, seed: int, predict: Predict, data: Data) -> Outcome:
    """Spread of a posterior's functions at the data and away from the data."""
    x, (low, high) = data.grid[:, 0], data.gap
    gap = data.grid[(x > low) & (x < high)]
    outside = data.grid[(x < data.x.min()) | (x > data.x.max())]
    spread = [float(predict(place).epistemic.clamp_min(0).sqrt().mean()) for place in (data.x, gap, outside)]
    name, _, rest = title.rpartition(" (")
    numbers = dict(zip(("at_data", "in_gap", "outside"), spread, strict=True))
    return {"system": name, "seed": seed, "num_weights": int(rest[:-1]), **numbers}


def figure(panels: dict[str, Predict], data: Data, path: Path) -> None:
    """One panel per posterior: mean, and one epistemic and one total standard deviation around it (figure 2)."""
    columns = 5
    lines = -(-len(panels) // columns)
    x, y = data.grid[:, 0].numpy(), data.y[:, 0].numpy()
    reach = 1.2 * float(np.abs(y).max()) + 0.5
    with figures.panels(path, lines, columns, (2.9 * columns, 2.4 * lines), sharex=True, sharey=True) as axes:
        for place, (title, predict) in zip(axes, panels.items(), strict=False):
            made = predict(data.grid)
            mean, total = made.mean[:, 0].numpy(), made.std[:, 0].numpy()
            epistemic = made.epistemic[:, 0].clamp_min(0).sqrt().numpy()
            place.fill_between(x, mean - total, mean + total, color=figures.BAND_COLOR, alpha=0.25, linewidth=0)
            place.fill_between(x, mean - epistemic, mean + epistemic, color=figures.BAND_COLOR, alpha=0.35, linewidth=0)
            place.plot(x, mean, color=figures.MEAN_COLOR, linewidth=1.6)
            place.plot(data.x[:, 0].numpy(), y, "o", color=figures.DATA_COLOR, markersize=1.6, markeredgewidth=0)
            place.set_title(title, fontsize=10)
            place.set(xlim=(x[0], x[-1]), ylim=(-reach, reach))
        for place in axes[len(panels) :]:
            place.set_axis_off()
        for place in axes[max(0, len(panels) - columns) : len(panels)]:  # the lowest panel of each column
            place.tick_params(labelbottom=True)


def run(data: Data, seeds: int, recipe: map_regression.Recipe, folder: Path, facts: dict[str, Any]) -> list[Outcome]:
    """Train, score and plot. Seeds in `toy.json` are not run again.

    Args:
        recipe: Recipe of the MAP estimate.
        folder: Folder for `toy.json` and, if matplotlib is installed, the figure of the first seed.

    Raises:
        ValueError: If `toy.json` has other settings.
    """
    path = folder / "toy.json"
    content: dict[str, Any] = {"dataset": data.name, "settings": asdict(recipe), "prior_precision": PRIOR_PRECISION}
    content = records.begin_run(path, content, facts, outcomes=[])
    outcomes: list[Outcome] = content["outcomes"]
    for seed in range(seeds):
        if any(outcome["seed"] == seed for outcome in outcomes):
            continue
        panels = predictors(data, recipe, seed)
        outcomes += [judge(title, seed, predict, data) for title, predict in panels.items()]
        records.write(path, content)
        print(f"seed {seed}: {len(panels)} posteriors", flush=True)
        if seed == 0 and figures.HAS_MATPLOTLIB:
            figure(panels, data, folder / "toy")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "subnetwork-toy", smoke="a few steps of everything", small=True)
    chosen = program.choice("dataset", ("matern", "cosine"), "cosine").option("data", seeds=3).read(arguments)
    data = load(chosen.dataset, chosen.data)
    seeds, recipe = (1, SMOKE) if chosen.smoke else (chosen.seeds, RECIPE)
    run(data, seeds, recipe, chosen.out, chosen.facts)
    print(show(rows.toy(chosen.out), "Epistemic standard deviations; the paper shows figure 2 and no numbers."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
