"""A cubic with a gap between the data: factorized, local and global inducing posteriors against HMC (section 3.1, figure 1).

    python -m bayesify_papers.global_inducing.cubic --out DIR [--seeds 5] [--steps 5000] [--smoke]

The network has two hidden layers of 50 ReLU units under Neal's prior and 100 inducing inputs. The data are 40 points of $x^3$ with
noise of standard deviation 3, standardized; the noise variance is known. Each seed makes its own data. Adam's learning rate falls
from 0.02 to 0 along half a cosine, and the factor on the KL rises from 0.1 to 1 in the first fifth of the steps. There are two
references. HMC has two chains per seed and runs all seeds at once. NUTS has one chain, runs the seeds one after the other, needs
Pyro and takes many times as long. Both start at random networks. The score is the function's standard deviation in the middle of
the gap. The figure is drawn if matplotlib is installed. Seeds whose results are in the folder are not run again.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify import bayesianize
from bayesify.baselines import nuts
from bayesify.datasets import toy
from bayesify.likelihoods import Gaussian
from bayesify.models import mlp
from bayesify.posteriors import MeanField
from bayesify.priors import Neal
from bayesify_papers.global_inducing import hmc, rows
from bayesify_papers.global_inducing.networks import Design, stack
from bayesify_papers.global_inducing.stacked_training import Schedule, bounds, train
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.tables import number

METHODS = ("fac", "li", "gi")
WIDTH, NUM_POINTS, NUM_DRAWS = 50, 100, 500
SCHEDULE = Schedule(steps=5000, learning_rate=2e-2)
NUTS_SETTINGS = {"num_warmup": 150, "num_draws": 150, "max_tree_depth": 7}
"""Settings of NUTS."""

HMC_SETTINGS = {"num_warmup": 150, "num_draws": 150, "leapfrogs": 100}
NUM_CHAINS = 2
"""Number of HMC chains for each seed."""

MIN_GAP_RATIOS = {"NUTS": 0.5, "HMC": 0.5, "fac": 1.5}
"""Required ratios of gi's standard deviation in the gap to the other methods'."""


def problem(seed: int) -> toy.Regression:
    """Data of one seed, standardized."""
    return toy.cubic(seed=seed).standardized()


def points(data: toy.Regression) -> Tensor:
    """Inputs at which functions are scored and drawn: the middle of the gap, the training inputs, and the grid."""
    assert data.gap is not None
    return torch.cat((torch.tensor([[sum(data.gap) / 2]]), data.x, data.grid))


def describe(outputs: Tensor, data: toy.Regression) -> dict[str, Any]:
    """Scores and curves from functions at `points`, [S, points]."""
    mean, std = outputs.mean(0), outputs.std(0)
    count = len(data.x)
    return {
        "gap_std": float(std[0]),
        "data_std": float(std[1 : count + 1].mean()),
        "train_rmse": float((mean[1 : count + 1] - data.y[:, 0]).square().mean().sqrt()),
        "mean": [round(value, 4) for value in mean[count + 1 :].tolist()],
        "std": [round(value, 4) for value in std[count + 1 :].tolist()],
    }


def variational(
    method: str, seeds: Sequence[int], schedule: Schedule, num_draws: int = NUM_DRAWS
) -> dict[int, dict[str, Any]]:
    """Train one posterior on the data of all seeds at once.

    Args:
        method: One of `METHODS`.
        seeds: Seeds of the data.
    """
    problems = [problem(seed) for seed in seeds]
    x, y = torch.stack([data.x for data in problems]), torch.stack([data.y for data in problems])
    design = Design((1, WIDTH, WIDTH, 1), (method,) * 3, "neal", NUM_POINTS)
    networks = stack(design, x, y, [data.noise for data in problems], learn_noise=False)
    outcome = train(networks, x, y, schedule, label=method)
    found = bounds(networks, x, y, num_draws)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        outputs = [
            model.draw(num_draws, generator=generator)(points(data))[..., 0]  # [S, points]
            for model, data in zip(networks.unstack(), problems, strict=True)
        ]
    return {
        seed: {
            "elbo": float(found[index]),
            "skipped_steps": outcome.skipped_steps[index],
            **describe(outputs[index], data),
        }
        for index, (seed, data) in enumerate(zip(seeds, problems, strict=True))
    }


def reference(seeds: Sequence[int], trajectories: Mapping[str, int]) -> dict[int, dict[str, Any]]:
    """HMC on the data of all seeds at once, with the agreement of its chains (`hmc.shrink_factor` in the middle of the gap)."""
    problems = [problem(seed) for seed in seeds]
    x, y, inputs = (
        torch.stack(part).double().repeat_interleave(NUM_CHAINS, 0)
        for part in (
            [data.x for data in problems],
            [data.y for data in problems],
            [points(data) for data in problems],
        )
    )
    noise = torch.tensor([data.noise for data in problems]).repeat_interleave(NUM_CHAINS)
    posterior = hmc.Posterior((1, WIDTH, WIDTH, 1), x, y, noise)

    def report(step: int, sizes: Tensor, density: Tensor) -> None:
        print(f"HMC: proposal {step}, step sizes {float(sizes.min()):.4f} to {float(sizes.max()):.4f}", flush=True)

    drawn = hmc.sample(posterior, report=report, **trajectories)
    outputs = torch.stack(
        [posterior.outputs(position, inputs)[..., 0] for position in drawn]
    )  # [draws, R chains, points]
    found = {}
    for index, (seed, data) in enumerate(zip(seeds, problems, strict=True)):
        own = outputs[:, index * NUM_CHAINS : (index + 1) * NUM_CHAINS]
        agreement = {"shrink_factor": hmc.shrink_factor(own[..., 0]), "gap_std_by_chain": own[..., 0].std(0).tolist()}
        found[seed] = {**describe(own.flatten(0, 1).float(), data), **agreement}
    return found


def no_u_turn(seed: int, chain: Mapping[str, Any]) -> dict[str, Any]:
    """NUTS on the data of one seed."""
    data = problem(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = mlp([1, WIDTH, WIDTH, 1])
    likelihood = Gaussian(noise=data.noise, learn=False)
    bnn = bayesianize(net, MeanField(), likelihood=likelihood, prior=Neal())
    draws = nuts(bnn, data.x, data.y, seed=seed, **chain)
    with torch.no_grad():
        outputs = draws(points(data))[..., 0]
    half = len(outputs) // 2
    return {
        **describe(outputs, data),
        "gap_mean_by_half": [float(part[:, 0].mean()) for part in (outputs[:half], outputs[half:])],
        "gap_std_by_half": [float(part[:, 0].std()) for part in (outputs[:half], outputs[half:])],
    }


def requirement(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Lines of text: whether every seed meets the required ratios."""
    lines = []
    for other, least in MIN_GAP_RATIOS.items():
        common = [seed for seed in found.get("gi", {}) if seed in found.get(other, {})]
        ratios = [found["gi"][seed]["gap_std"] / max(found[other][seed]["gap_std"], 1e-12) for seed in common]
        if ratios:
            verdict = "met by" if min(ratios) >= least else "NOT met by"
            shown = ", ".join(number(ratio, 2) for ratio in ratios)
            lines.append(f"gi / {other} in the gap, at least {least:g}: {verdict} all {len(ratios)} seeds ({shown})")
    return lines


def draw(found: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path, seed: int = 0) -> None:
    """One panel for each method: mean and one standard deviation, as in figure 1."""
    methods = [method for method in found if str(seed) in found[method]]
    data = problem(seed)
    grid = data.grid[:, 0].numpy()
    with figures.panels(path, 1, len(methods), (4 * len(methods), 3.5), kinds=("png",), sharey=True) as axes:
        for axis, method in zip(axes, methods, strict=True):
            mean, std = (torch.tensor(found[method][str(seed)][key]).numpy() for key in ("mean", "std"))
            axis.fill_between(grid, mean - std, mean + std, color=figures.BAND_COLOR, alpha=0.3, linewidth=0)
            axis.plot(grid, mean, color=figures.MEAN_COLOR, linewidth=1.2)
            axis.plot(grid, data.truth[:, 0].numpy(), color="black", linewidth=0.8, linestyle="--")
            axis.plot(data.x[:, 0].numpy(), data.y[:, 0].numpy(), ".", color=figures.DATA_COLOR, markersize=4)
            axis.set(title=method, xlim=(float(grid.min()), float(grid.max())), ylim=(-4, 4))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "global-inducing-cubic", smoke="one seed and few steps, seconds", small=True)
    chosen = program.choice("methods", (*METHODS, "HMC", "NUTS")).option(seeds=5, steps=SCHEDULE.steps).read(arguments)
    steps, seeds, draws, chain, trajectories = chosen.steps, chosen.seeds, NUM_DRAWS, NUTS_SETTINGS, HMC_SETTINGS
    if chosen.smoke:
        steps, seeds, draws, chain = 4, 1, 20, {"num_warmup": 2, "num_draws": 4, "max_tree_depth": 2}
        trajectories = {"num_warmup": 2, "num_draws": 3, "leapfrogs": 4}
    schedule = Schedule(steps=steps, learning_rate=SCHEDULE.learning_rate)
    path = chosen.out / "results.json"
    settings = {"schedule": asdict(schedule), "draws": draws, "nuts": chain}
    settings |= {"hmc": {**trajectories, "chains": NUM_CHAINS}}
    content = records.begin_run(path, {"settings": settings}, chosen.facts, scores={})
    found: dict[str, dict[str, Any]] = content["scores"]
    for method in chosen.methods:
        missing = [seed for seed in range(seeds) if str(seed) not in found.get(method, {})]
        for group in [[seed] for seed in missing] if method == "NUTS" else [missing]:
            if not group:
                continue
            if method == "NUTS":
                made = {group[0]: no_u_turn(group[0], chain)}
            else:
                made = (
                    reference(group, trajectories) if method == "HMC" else variational(method, group, schedule, draws)
                )
            found.setdefault(method, {}).update({str(seed): scores for seed, scores in made.items()})
            records.write(path, content)
            print(f"{method}: done for seeds {group}", flush=True)
    if figures.HAS_MATPLOTLIB:
        draw(found, chosen.out / "cubic")
    print(show(rows.cubic(chosen.out), "Standard deviation of the function, standardized targets."))
    print("\n".join(requirement(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
