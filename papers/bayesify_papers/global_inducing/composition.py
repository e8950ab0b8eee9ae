"""The cubic with a gap: bounds by the number of inducing points, and each layer's contribution to the uncertainty.

    python -m bayesify_papers.global_inducing.composition --out DIR [--seeds 5] [--steps 2000] [--smoke]

The paper has both in its appendices I and J. We did not have these, so the measures are ours. Data, network and schedule are those
of `cubic`. Deep Gaussian processes of two layers have the same noise and inducing points.

Bounds are of global inducing points with several numbers M. The measures of layers, for each posterior, are:

- `shares`: variance of a layer's values over draws, as a share of their variance over inputs and draws; 0 for a certain layer.
- `mixing_costs`: loss of expected log-likelihood, in nats per example, if the layers above a boundary come from another draw than
  the layers below it. It is 0 in expectation if the posterior is independent across the boundary. It is large if layers compensate
  for each other's draws, as Ustyuzhaninov et al. 2020 require of compositional uncertainty.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork
from bayesify.deep_gp import DeepGP
from bayesify.likelihoods import Gaussian
from bayesify.training import ModelStack
from bayesify_papers.global_inducing import cubic, rows
from bayesify_papers.global_inducing.networks import Design, stack
from bayesify_papers.global_inducing.stacked_training import Schedule, bounds, train
from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show

POINTS = (2, 5, 10, 20, 40, 100)
"""Numbers of inducing points."""

PROCESSES = {"dgp-gi": "global", "dgp-dsvi": "local"}
METHODS = (*(f"gi-{count}" for count in POINTS), "fac", "li", *PROCESSES)
"""Posteriors of the network (`gi` with each number of inducing points), and deep Gaussian processes."""

NUM_POINTS = 40
"""Number of inducing points of `li` and of the processes; as many as data points."""


def make(method: str, x: Tensor, y: Tensor, noise: Sequence[float]) -> ModelStack:
    """A model before training for each data set.

    Args:
        method: One of `METHODS`.
        x: Training inputs, [R, N, 1].
        y: Training targets, [R, N, 1].
        noise: Noise variance of each data set.
    """
    if method in PROCESSES:
        kind: Any = PROCESSES[method]
        likelihoods = [Gaussian(noise=one, learn=False) for one in noise]
        options: dict[str, Any] = {"depth": 2, "inducing": kind, "num_inducing": min(NUM_POINTS, x.shape[1])}
        parts = enumerate(zip(x, y, likelihoods, strict=True))
        return ModelStack([DeepGP(*data, likelihood=own, seed=at, **options) for at, (*data, own) in parts])
    kind, _, count = method.partition("-")
    design = Design((1, cubic.WIDTH, cubic.WIDTH, 1), (kind,) * 3, "neal", int(count or NUM_POINTS))
    return stack(design, x, y, noise, learn_noise=False)


def layer_values(net: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> list[Tensor]:
    """Outputs of each linear layer of a chain under draws of the weights, before the activation, [S, B, units] each."""
    values, found = x.unsqueeze(0), []
    for name, module in net.named_children():
        if isinstance(module, nn.Linear):
            values = values @ weights[f"{name}.weight"].mT + weights[f"{name}.bias"].unsqueeze(1)
            found.append(values)
        else:
            values = module(values)
    return found


def uncertain_share(values: Tensor) -> float:
    """Variance over draws as a share of the variance over draws and inputs, of values [S, B, units]."""
    within = values.var(0, correction=0).mean(0).sum()
    return float(within / values.flatten(0, 1).var(0, correction=0).sum())


def expected_log_likelihood(mean: Tensor, variance: Tensor | float, y: Tensor, noise: float) -> float:
    """Expected log-likelihood per example of targets [B, 1] under Gaussian values with moments [S, B, 1]."""
    squares = (mean - y).square() + variance
    return float(-0.5 * (squares.mean() / noise + math.log(2 * math.pi * noise)))


def network_layers(model: BayesianNetwork, x: Tensor, y: Tensor, noise: float, num_draws: int) -> dict[str, Any]:
    """Shares and mixing costs of a network."""
    weights = model.draw(num_draws, generator=torch.Generator().manual_seed(0)).weights
    net = model.mean_network()
    values = layer_values(net, weights, x)
    whole = expected_log_likelihood(values[-1], 0.0, y, noise)
    layers = [name for name, module in net.named_children() if isinstance(module, nn.Linear)]
    costs = []
    for boundary in range(1, len(layers)):
        above = layers[boundary:]
        mixed = {name: part.roll(1, 0) if name.partition(".")[0] in above else part for name, part in weights.items()}
        costs.append(whole - expected_log_likelihood(layer_values(net, mixed, x)[-1], 0.0, y, noise))
    return {"shares": [uncertain_share(one) for one in values], "mixing_costs": costs}


def process_layers(model: DeepGP, x: Tensor, y: Tensor, noise: float, num_draws: int) -> dict[str, Any]:
    """Shares and mixing cost of a deep Gaussian process of two layers. The noise at the inputs is the same in both pairings."""
    parts, _ = model.conditionals(num_draws, torch.Generator().manual_seed(0))

    def moments(last: Any) -> tuple[Tensor, Tensor]:
        return model.propagate([parts[0], last], x, num_draws, torch.Generator().manual_seed(1))

    rolled = {
        name: value.roll(1, 0) if len(value := getattr(parts[1], name)) == num_draws else value
        for name in ("inputs", "weights", "reduction")
    }
    mean, variance = moments(parts[1])
    whole, apart = (
        expected_log_likelihood(*made, y, noise) for made in ((mean, variance), moments(replace(parts[1], **rolled)))
    )
    hidden, spread = parts[0].moments(x.unsqueeze(0))
    hidden = hidden + parts[0].layer.skip(x.unsqueeze(0))
    generator = torch.Generator().manual_seed(2)
    shares = []
    for middle, width in ((hidden, spread), (mean, variance)):
        middle = middle.expand(num_draws, -1, -1)
        shares.append(uncertain_share(middle + width.sqrt() * torch.randn(middle.shape, generator=generator)))
    return {"shares": shares, "mixing_costs": [whole - apart]}


def run(method: str, seeds: Sequence[int], schedule: Schedule, num_draws: int) -> dict[str, dict[str, Any]]:
    """Train one posterior on the data of all seeds at once and return scores by seed."""
    problems = [cubic.problem(seed) for seed in seeds]
    x, y = torch.stack([data.x for data in problems]), torch.stack([data.y for data in problems])
    models = make(method, x, y, [data.noise for data in problems])
    outcome = train(models, x, y, schedule, label=method)
    found, scores = bounds(models, x, y, num_draws), {}
    with torch.no_grad():
        for at, (seed, model) in enumerate(zip(seeds, models.unstack(), strict=True)):
            data, inside = problems[at], (x[at], y[at], problems[at].noise, num_draws)
            own = process_layers(model, *inside) if method in PROCESSES else network_layers(model, *inside)
            prediction: Any = model.predict(cubic.points(data), num_draws, generator=torch.Generator().manual_seed(0))
            gap = float(prediction.epistemic[0].sqrt())
            scores[str(seed)] = {"elbo": float(found[at]), "gap_std": gap, **own, **outcome.facts()}
            scores[str(seed)]["skipped_steps"] = outcome.skipped_steps[at]
    return scores


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(
        __doc__, __spec__, "global-inducing-composition", smoke="one seed and few steps, seconds", small=True
    )
    chosen = program.choice("methods", METHODS).option(seeds=5, steps=2000).read(arguments)
    steps, seeds, draws = (4, 1, 20) if chosen.smoke else (chosen.steps, chosen.seeds, cubic.NUM_DRAWS)
    schedule = Schedule(steps=steps, learning_rate=cubic.SCHEDULE.learning_rate)
    path, settings = chosen.out / "results.json", {"schedule": asdict(schedule), "draws": draws}
    content = records.begin_run(path, {"settings": settings}, chosen.facts, scores={})
    found: dict[str, dict[str, Any]] = content["scores"]
    for method in chosen.methods:
        missing = [seed for seed in range(seeds) if str(seed) not in found.get(method, {})]
        if missing:
            found.setdefault(method, {}).update(run(method, missing, schedule, draws))
            records.write(path, content)
    print(show(rows.composition(chosen.out), "Bounds in nats per data set; mixing costs in nats per example."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
