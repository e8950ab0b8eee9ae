"""Stored exact answers to the demonstration's problems, and the distances of methods from these answers.

The contents of `exact.npz` come from long chains of microcanonical sampling, with the network, prior and likelihood of the
demonstration and with seed 0. `python -m benchmarks.truth_demo` makes the file again.
"""

from pathlib import Path

import numpy as np
import torch

from bayesify.demo.run import Outcome, ToyProblem
from bayesify.methods import Method

EXACT_PATH = Path(__file__).with_name("exact.npz")
SEED = 0
"""Seed of the data whose answers are stored."""
METHOD = Method("exact", "Exact posterior", "long Markov chains", "")
DISTANCE_WORDS = ((0.25, "nearly exact"), (0.5, "close"), (1.0, "rough"), (float("inf"), "far off"))
"""Upper limits of distances, and a word for each. The unit is a standard deviation of the exact curve, or a probability of 0.1."""


def exact_outcomes(seed: int) -> dict[str, Outcome]:
    """The exact answer to each problem by name; empty for a seed without stored answers."""
    if seed != SEED or not EXACT_PATH.exists():
        return {}
    found = {problem: Outcome(METHOD, problem) for problem in ("regression", "classification")}
    with np.load(EXACT_PATH) as stored:
        for name in stored.files:
            problem, part, key = name.split(".")
            if part == "figure":
                found[problem].figure[key] = torch.from_numpy(stored[name].astype(np.float32))
            else:
                found[problem].scores[key] = float(stored[name])
    return found


def distance(outcome: Outcome, exact: Outcome, problem: ToyProblem) -> str:
    r"""A sentence that says how far an outcome is from the exact outcome.

    For a regression, the distance is the mean of $\sqrt{(\mu - \mu_*)^2 + (\sigma - \sigma_*)^2}$ over the grid. The square root
    is the 2-Wasserstein distance between Gaussians with the means and epistemic standard deviations of the two outcomes. For a
    classification, the distance is the mean absolute difference between the two outcomes' probabilities.
    """
    ours, right = outcome.figure, exact.figure
    if outcome.problem == "classification":
        off = float((ours["probs"] - right["probs"]).abs().mean())
        words = f"probabilities differ from the exact probabilities by {100 * off:.0f} points on average"
        return f"{_word(10 * off)}: {words}"
    differences = [ours[name] - right[name] for name in ("mean", "epistemic_std")]
    off = float(torch.stack(differences).norm(dim=0).mean())
    low, high = getattr(problem.data, "gap", None) or (0.0, 0.0)
    inside = (problem.grid[:, 0] > low) & (problem.grid[:, 0] < high)
    ratio = float(ours["epistemic_std"][inside].mean() / right["epistemic_std"][inside].mean())
    word = _word(off / float(right["epistemic_std"].mean()))
    return f"{word}: on average {off:.2f} from the exact curve; the band in the gap is {ratio:.1f} times as wide as the exact band"


def _word(size: float) -> str:
    return next(word for limit, word in DISTANCE_WORDS if size < limit)
