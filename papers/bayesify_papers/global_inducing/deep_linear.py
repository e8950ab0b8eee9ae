"""Deep linear networks: bounds by depth and width, compared with the evidence (section 3.2, figure 2).

    python -m bayesify_papers.global_inducing.deep_linear --out DIR [--widths 5 50] [--depths 1 2 4 10] [--steps 2000]

The data are 1000 examples of a linear model with 5 standard normal inputs, weights of variance 1/5 and noise of variance 0.1. The
networks have no biases and no activations, Neal's prior and the true noise variance. So the evidence under the true model is an
upper bound for all of them (in expectation over data). The posteriors are factorized, local inducing, global inducing (100
points), and global inducing in the last layer alone, over layers from the prior (rand-gi) or factorized layers (fac-gi). Because
networks are linear, the data enter as 5 rows with the same likelihood up to a constant.

Every posterior has the same schedule: Adam with a learning rate that falls from 0.01 to 0 along half a cosine, one draw per step,
and the whole KL throughout. (When the KL's factor rose from 0.01, a factorized network of ten layers of 50 units ended 13,000 nats
lower.) Hidden layers of gi start close to the prior, or, in networks of fewer than 20 units, close to one network drawn from the
prior. Certain hidden weights do not help wide networks, but narrow networks need them. (Compared with the start at the prior, the
start at a network was 196 nats lower at width 50 and depth 10 after 500 steps, and 1,656 nats higher at width 5 and depth 4 after
1,000 steps.) `gi-continued` trains rand-gi first and then continues as gi with a tenth of the learning rate. Because gi with a
precision of 0 in the hidden layers is rand-gi, its best bound is no lower. Bounds in the folder that have at least `--draws` draws
are kept, and several commands may share a folder.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.datasets import toy
from bayesify.training import ModelStack
from bayesify_papers.global_inducing import networks, rows
from bayesify_papers.global_inducing.networks import Design
from bayesify_papers.global_inducing.stacked_training import Schedule, bound_parts, train
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.scores import standard_error

CONTINUED_METHOD = "gi-continued"
METHODS = ("fac", "li", "gi", "rand-gi", "fac-gi", CONTINUED_METHOD)
NUM_INPUTS, NUM_EXAMPLES, NOISE_VARIANCE, NUM_POINTS, NUM_DRAWS = 5, 1000, 0.1, 100, 1000
WIDTHS, DEPTHS = (5, 50, 250), tuple(range(1, 11))
SCHEDULE = Schedule(steps=2000, warmup=0.0, clip=1e4)
MIN_WIDTH_FOR_PRIOR_START = 20
"""Width from which the hidden layers of gi start at the prior."""
MIN_LOSS_RATIO = 20
"""From depth 1 to depth 10, fac must lose at least this multiple of gi's loss."""


def kinds(method: str, depth: int) -> tuple[str, ...]:
    """The posterior of each layer."""
    below, _, last = method.removesuffix("-continued").partition("-")
    return (below,) * (depth - 1) + (last or below,)


def hidden_start(method: str, width: int) -> dict[str, Any]:
    """Initial precision and values of the pseudo-outputs of hidden layers."""
    if method == "gi" and width < MIN_WIDTH_FOR_PRIOR_START:
        return {"hidden_precision": 10.0, "start": "network"}
    return {"hidden_precision": {"gi": 1e-4, CONTINUED_METHOD: 1e-6, "li": 1.0}.get(method, 0.01), "start": "random"}


def compress(x: Tensor, y: Tensor, noise: float) -> tuple[Tensor, Tensor, float]:
    r"""D rows with the same likelihood of linear functions as N rows, and the difference of the log-likelihoods.

    With $X = Q R$, $\lVert y - X w \rVert^2 = \lVert Q^\top y - R w \rVert^2 + \lVert y - Q Q^\top y \rVert^2$.

    Args:
        x: Inputs X, [N, D].
        y: Targets, [N, 1].

    Returns:
        R, [D, D]; Q^T y, [D, 1]; and the log-likelihood of all data minus the log-likelihood of these rows.
    """
    basis, upper = torch.linalg.qr(x.double())
    targets = basis.mT @ y.double()
    rest = float((y.double() - basis @ targets).square().sum())
    constant = -0.5 * ((len(x) - len(upper)) * math.log(2 * math.pi * noise) + rest / noise)
    return upper.to(x), targets.to(y), constant


def fit(
    data: toy.Linear,
    method: str,
    width: int,
    depth: int,
    schedule: Schedule,
    num_draws: int = NUM_DRAWS,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """The bound of one network after training, in nats, and its standard error over draws.

    Args:
        method: One of `METHODS`.
        depth: Number of layers, including the last.
    """
    inputs, targets, constant = compress(data.x, data.y, data.noise)
    x, y = inputs[None].to(device), targets[None].to(device)
    stack, start = _stack(data, method, width, depth, seed, device)
    facts: dict[str, Any] = {}
    if method == CONTINUED_METHOD:
        before, _ = _stack(data, "rand-gi", width, depth, seed, device)
        facts["first_seconds"] = round(train(before, x, y, schedule, seed).seconds, 1)
        stack.load_state_dict(before.state_dict(), strict=False)
        schedule, start = replace(schedule, learning_rate=schedule.learning_rate / 10), {**start, "start": "rand-gi"}
    outcome = train(stack, x, y, schedule, seed)
    found = bound_parts(stack, x, y, num_draws, seed)[:, 0].tolist()
    bound = {"elbo": statistics.fmean(found) + constant, "error": standard_error(found), "draws": num_draws}
    return {**bound, **facts, **outcome.facts(), **start}


def _stack(
    data: toy.Linear, method: str, width: int, depth: int, seed: int, device: str
) -> tuple[ModelStack, dict[str, Any]]:
    """One network before training, and the start of its hidden layers."""
    sizes = (data.x.shape[1], *[width] * (depth - 1), 1)
    start = hidden_start(method, width)
    design = Design(sizes, kinds(method, depth), "neal", NUM_POINTS, bias=False, linear=True, **start)
    made = networks.stack(design, data.x[None], data.y[None], data.noise, learn_noise=False, seed=seed)
    return made.to(device), start


def requirement(found: Mapping[str, Mapping[str, float]], width: int = 50) -> str:
    """A line that says whether gi loses at most a twentieth of fac's loss; empty if training runs are missing."""
    first, last = DEPTHS[0], DEPTHS[-1]
    keys = {(method, depth): f"{method}-{width}-{depth}" for method in ("gi", "fac") for depth in (first, last)}
    if not all(key in found for key in keys.values()):
        return ""
    loss = {method: found[keys[method, first]]["elbo"] - found[keys[method, last]]["elbo"] for method in ("gi", "fac")}
    verdict = "met" if MIN_LOSS_RATIO * loss["gi"] <= loss["fac"] else "NOT met"
    return (
        f"width {width}, from depth {first} to {last}: gi loses {loss['gi']:.1f} nats, fac {loss['fac']:.1f}; "
        f"gi at most 1/{MIN_LOSS_RATIO} of fac: {verdict}"
    )


def draw(found: Mapping[str, Mapping[str, float]], evidence: float, path: Path) -> None:
    """Bounds against depth, one panel for each width."""
    parts = {key: key.rsplit("-", 2) for key in found}  # method, width, depth
    widths = sorted({int(width) for _, width, _ in parts.values()})
    with figures.panels(path, 1, len(widths), (4.5 * len(widths), 3.6), kinds=("png",), sharey=True) as axes:
        for axis, width in zip(axes, widths, strict=True):
            axis.axhline(evidence, color="black", linewidth=0.8, linestyle="--", label="evidence")
            for place, method in enumerate(METHODS):
                chosen = {int(at): key for key, (name, one, at) in parts.items() if (name, one) == (method, str(width))}
                heights = [found[chosen[depth]]["elbo"] for depth in sorted(chosen)]
                axis.plot(sorted(chosen), heights, ".-", label=method, linewidth=1, color=f"C{place}")
            axis.set(title=f"width {width}", xlabel="depth")
        axes[0].set_ylabel("ELBO, nats")
        axes[0].set_ylim(evidence - 800, evidence + 50)
        axes[-1].legend()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "global-inducing-deep-linear", smoke="two depths and few steps", small=True)
    program.choice("methods", METHODS)
    program.option(widths=WIDTHS, depths=DEPTHS, steps=SCHEDULE.steps, draws=NUM_DRAWS, device="cpu")
    chosen = program.read(arguments)
    widths, depths, steps = ([4], [1, 3], 3) if chosen.smoke else (chosen.widths, chosen.depths, chosen.steps)
    schedule = replace(SCHEDULE, steps=steps)
    path = chosen.out / "results.json"
    data = toy.linear(NUM_EXAMPLES, NUM_INPUTS, math.sqrt(1 / NUM_INPUTS), NOISE_VARIANCE)
    evidence = data.posterior.log_evidence
    facts = {**chosen.facts, "evidence": evidence}
    draws = 20 if chosen.smoke else chosen.draws

    def known() -> dict[str, Any]:
        """Results so far, including those of other commands that share the folder."""
        return records.begin_run(path, {"settings": asdict(schedule)}, facts, bounds={})

    found: dict[str, Any] = known()["bounds"]
    for width in widths:
        for depth in depths:
            for method in chosen.methods:
                key = f"{method}-{width}-{depth}"
                if key in found and found[key].get("draws", NUM_DRAWS) >= draws:
                    continue
                one = fit(data, method, width, depth, schedule, draws, chosen.device)
                content = known()
                found = content["bounds"]
                found[key] = one
                records.write(path, content)
                print(f"{method}, width {width}, depth {depth}: {found[key]}", flush=True)
    if figures.HAS_MATPLOTLIB:
        draw(found, evidence, chosen.out / "deep_linear")
    print(show(rows.deep_linear(chosen.out), "Bounds in nats."))
    print(requirement(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
