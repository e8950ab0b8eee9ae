"""Two-cluster regression (section 4.1, appendix J.1): five posteriors and the No-U-Turn sampler, in six panels.

    python -m bayesify_papers.inducing_weights.regression [--published] [--seeds 5] [--out DIR] [--smoke]

Data, network, sizes of U and number of members are the paper's. The prior standard deviation is 4 / sqrt(d_in), where d_in does
not count the bias; most of the authors' code counts it, and so does `--count-bias`. Training is shorter: 1,500 steps with 8 draws
each, at a learning rate that falls from 1e-2 along a cosine. `--published` uses the paper's schedule: 20,000 steps with 32 draws at
1e-3. For FCG-U and Ensemble-U, this rate falls to a tenth halfway. Lambda is capped as in the paper's image experiments. The paper
names no cap for the regression; `--no-caps` removes it. Each training run is stored when it ends, and the same command with the
same folder resumes.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork, RegressionPredictive, bayesianize, fit, metrics
from bayesify.baselines import nuts
from bayesify.datasets import toy
from bayesify.likelihoods import Gaussian
from bayesify.posteriors import FullCovariance, InducingWeights, MeanField, Posterior
from bayesify.priors import Neal
from bayesify.training import ModelStack, Steps
from bayesify.training.random_streams import derive_seed
from bayesify.weights.catalog import Weight
from bayesify_papers.inducing_weights import rows
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.batches import MemoryBatches
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show

HIDDEN_UNITS, NUM_INDUCING, NUM_MEMBERS, PRIOR_SCALE = 50, 25, 8, 4.0
"""Number of hidden tanh units, larger side of U (25 x 2 and 1 x 25), number of members of Ensemble-U, and prior standard deviation
times the root of d_in."""


@dataclass(frozen=True)
class Training:
    """Schedule of a training run, and numbers of draws.

    Args:
        steps: Number of Adam steps on all data.
        learning_rate: Initial learning rate.
        num_draws: Number of draws per step.
        cosine: Whether the learning rate falls along a cosine. Otherwise it is constant, except that `DECAYED_SYSTEMS` have a
            tenth of it in the second half.
        caps: Whether to cap lambda.
        count_bias: Whether the fan-in in the prior counts the bias.
        prediction_draws: Number of draws for testing and figures.
        chain: Number of draws of the No-U-Turn sampler to keep, and number of warm-up steps.
        thin: Number of steps per kept draw.
        device: Device for training. Predictions are made on the CPU.
    """

    steps: int = 1500
    learning_rate: float = 0.01
    num_draws: int = 8
    cosine: bool = True
    caps: bool = True
    count_bias: bool = False
    prediction_draws: int = 256
    chain: int = 250
    thin: int = 1
    device: str = "cpu"


PUBLISHED_TRAINING = Training(steps=20_000, learning_rate=1e-3, num_draws=32, cosine=False)
"""The paper's schedule (appendix J.1)."""

SMOKE = Training(steps=5, num_draws=2, prediction_draws=8, chain=4)


Outcome = dict[str, Any]
"""Scores of one system and one seed: `system`; `seed` (of the initial values and the training; all seeds share the data); `nll`
(mean over test points in the clusters, in nats); `rmse` of the predictive mean at these points; `gap_ratio` (mean epistemic std in
the gap, divided by its mean at the training inputs); `seconds` of training, divided equally among seeds that train together."""


def _inducing(q: Literal["diagonal", "full", "ensemble"], max_lambda: float) -> Callable[[bool], Posterior]:
    start: dict[str, Any] = {"init": "random", "init_lambda": 1e-4, "fit_to_layer": True}
    start |= {"rows": NUM_INDUCING, "cols": NUM_INDUCING, "members": NUM_MEMBERS}
    start |= {} if q == "ensemble" else {"init_std": 1e-3}
    return lambda caps: InducingWeights(q=q, max_lambda=max_lambda if caps else None, **start)


SYSTEMS: dict[str, Callable[[bool], Posterior]] = {
    "FFG-W": lambda caps: MeanField(init_std=1e-2),
    "FCG-W": lambda caps: FullCovariance(init_std=1e-2),
    "FFG-U": _inducing("diagonal", 0.03),
    "FCG-U": _inducing("full", 0.03),
    "Ensemble-U": _inducing("ensemble", 0.1),
}
"""Posteriors by the paper's names, with the caps on lambda of appendix J.2."""

DECAYED_SYSTEMS = ("FCG-U", "Ensemble-U")
"""Systems whose learning rate falls to a tenth halfway in the paper."""

REFERENCE_SYSTEM = "NUTS"


class NealWithBias(Neal):
    """Neal's prior with a fan-in that counts the bias."""

    def std_of(self, weight: Weight) -> float:
        """`scale / sqrt(fan_in + 1)`."""
        return self.scale / math.sqrt((weight.fan_in or 0) + 1)


def make(system: str, seed: int, caps: bool = True, count_bias: bool = False) -> BayesianNetwork:
    """The untrained network of a system; `caps` and `count_bias` as in `Training`."""
    prior = NealWithBias(PRIOR_SCALE) if count_bias else Neal(PRIOR_SCALE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, HIDDEN_UNITS), nn.Tanh(), nn.Linear(HIDDEN_UNITS, 1))
        return bayesianize(net, SYSTEMS[system](caps), likelihood=Gaussian(noise=0.01, learn=False), prior=prior)


def train(system: str, data: toy.Regression, training: Training, seeds: Sequence[int]) -> list[BayesianNetwork]:
    """Trained networks of a system, on the CPU. An epoch has at most 100 steps.

    The networks train at once. On a CPU, each has the same random numbers as if it were trained alone.
    """
    own = [derive_seed(seed, "draws", 0) for seed in seeds] if training.device == "cpu" else None
    stack = ModelStack([make(system, seed, training.caps, training.count_bias) for seed in seeds], seeds=own).to(
        training.device
    )
    x, y = data.x.to(training.device), data.y.to(training.device)
    epoch = math.gcd(training.steps, 100)

    def scheduler(adam: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if training.cosine:
            return torch.optim.lr_scheduler.CosineAnnealingLR(adam, training.steps)
        return torch.optim.lr_scheduler.StepLR(adam, training.steps // 2, 0.1 if system in DECAYED_SYSTEMS else 1.0)

    fit(
        stack,
        MemoryBatches(x, y, len(x), passes=epoch),
        num_data=len(x),
        epochs=training.steps // epoch,
        learning_rate=training.learning_rate,
        scheduler=scheduler,
        steps=Steps(scheduler="step"),
        num_draws=training.num_draws,
        seed=seeds[0],
        progress=False,
    )
    return stack.cpu().unstack()


Predict = Callable[[Tensor], RegressionPredictive]


def predictors(system: str, data: toy.Regression, training: Training, seeds: Sequence[int]) -> list[Predict]:
    """Prediction functions of a system that is trained with each seed (or of the chain). Each uses the same draws for every x."""
    if system == REFERENCE_SYSTEM:
        (seed,) = seeds
        bnn = make("FFG-W", seed, count_bias=training.count_bias)
        chain, thin = training.chain, training.thin
        draws = nuts(bnn, data.x, data.y, num_draws=chain, num_warmup=chain * thin, thin=thin, seed=seed)
        assert bnn.likelihood is not None
        likelihood = bnn.likelihood
        return [lambda x: cast(RegressionPredictive, likelihood.predictive(draws.outputs((x,), {})))]

    def predict(trained: BayesianNetwork, seed: int, x: Tensor) -> RegressionPredictive:
        generator = torch.Generator().manual_seed(seed)
        return cast(RegressionPredictive, trained.predict(x, training.prediction_draws, generator=generator))

    networks = zip(train(system, data, training, seeds), seeds, strict=True)
    return [partial(predict, trained, seed) for trained, seed in networks]


def judge(system: str, seed: int, predict: Predict, data: toy.Regression, seconds: float) -> Outcome:
    """Scores of a trained system."""
    scores = metrics.evaluate(predict(data.x_test), data.y_test)
    assert data.gap is not None
    inside = data.grid[(data.grid[:, 0] > data.gap[0]) & (data.grid[:, 0] < data.gap[1])]
    gap, at_data = (float(predict(x).epistemic.sqrt().mean()) for x in (inside, data.x))
    numbers = {"nll": scores["nll"], "rmse": scores["rmse"], "gap_ratio": gap / at_data, "seconds": seconds}
    return {"system": system, "seed": seed, **numbers}


def figure(panels: dict[str, Predict], data: toy.Regression, path: Path) -> None:
    """One panel per system: predictive mean, one to three standard deviations, data and ground truth (figure 2)."""
    lines = 2 if len(panels) > 3 else 1
    columns, x = -(-len(panels) // lines), data.grid[:, 0].numpy()
    with figures.panels(path, lines, columns, (9.6, 5.2), sharex=True, sharey=True) as axes:
        for place, (system, predict) in zip(axes, panels.items(), strict=False):
            made = predict(data.grid)
            mean, std = made.mean[:, 0].numpy(), made.std[:, 0].numpy()
            for width in (3, 2, 1):
                place.fill_between(
                    x, mean - width * std, mean + width * std, color=figures.BAND_COLOR, alpha=0.25, linewidth=0
                )
            place.plot(x, mean, color=figures.MEAN_COLOR, linewidth=1.6)
            place.plot(x, data.truth[:, 0].numpy(), color="black", linewidth=1.0)
            place.plot(data.x[:, 0], data.y[:, 0], "o", color=figures.DATA_COLOR, markersize=2.0, markeredgewidth=0)
            place.set(title=system, xlim=(x[0], x[-1]), ylim=(-3, 3))


def run(
    systems: Sequence[str], seeds: int, training: Training, folder: Path, facts: dict[str, object] | None = None
) -> list[Outcome]:
    """Train, score and plot.

    Args:
        systems: Names of `SYSTEMS`, or `REFERENCE_SYSTEM`, whose chain runs for the first seed only.
        folder: Folder for `regression.json`, from which a run resumes, and for the figure of the first seed (if matplotlib is
            installed and all systems were trained in this run).
    """
    data, path = toy.cosine(), folder / "regression.json"
    content = records.begin_run(path, {"training": asdict(training)}, facts, outcomes=[])
    outcomes: list[Outcome] = content["outcomes"]
    done = {(outcome["system"], outcome["seed"]) for outcome in outcomes}
    panels: dict[str, Predict] = {}
    for system in systems:
        missing = [seed for seed in range(1 if system == REFERENCE_SYSTEM else seeds) if (system, seed) not in done]
        if not missing:
            continue
        clock = time.process_time if training.device == "cpu" else time.perf_counter
        start = clock()
        found = predictors(system, data, training, missing)
        seconds = (clock() - start) / len(missing)
        panels[system] = found[0]
        for seed, predict in zip(missing, found, strict=True):
            latest = judge(system, seed, predict, data, seconds)
            outcomes.append(latest)
            print(f"{system} seed {seed}: nll {latest['nll']:.3f}, std gap/data {latest['gap_ratio']:.2f}", flush=True)
        records.write(path, content)
    if figures.HAS_MATPLOTLIB and len(panels) == len(systems):
        figure(panels, data, folder / "regression")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    known = [*SYSTEMS, REFERENCE_SYSTEM]
    program = Program(__doc__, __spec__, "regression", small=True).choice("systems", known)
    program.option(seeds=5, published=False, caps=True, count_bias=False, device="cpu")
    program.add_argument(
        "--steps", type=int, help="number of steps; default: 1,500, or the paper's number with --published"
    )
    program.add_argument(
        "--num-draws", type=int, help="number of draws per step; default: 8, or the paper's number with --published"
    )
    chosen = program.read(arguments)
    systems = list(chosen.systems)
    if REFERENCE_SYSTEM in systems and find_spec("pyro") is None:
        print("NUTS is left out because pyro-ppl is not installed; pip install pyro-ppl")
        systems.remove(REFERENCE_SYSTEM)
    usual = PUBLISHED_TRAINING if chosen.published else Training()
    given = {name: value for name in ("steps", "num_draws") if (value := getattr(chosen, name)) is not None}
    given |= {name: getattr(chosen, name) for name in ("caps", "count_bias", "device")}
    training = SMOKE if chosen.smoke else replace(usual, **given)
    run(systems, 1 if chosen.smoke else chosen.seeds, training, chosen.out, chosen.facts)
    title = "Two-cluster cosine; the paper shows figures and no numbers (noise alone: nll -0.88, rmse 0.1)."
    print(show(rows.regression(chosen.out), title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
