"""The exact answers of the demonstration, from chains of `benchmarks.truth` that go on for a while.

python -m benchmarks.truth_demo          # needs build/truth/gap-0.pt and moons-0.pt; writes src/bayesify/demo/exact.npz
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesify import metrics
from bayesify.demo import exact, run
from bayesify.predictive.base import Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from benchmarks.runs import parser
from benchmarks.truth import FOLDER, Part, functions_at
from benchmarks.truth_problems import PROBLEMS

NAMES = {"regression": "gap", "classification": "moons"}
DRAWS = 800


def outputs_of(name: str, inputs: Tensor, folder: Path, draws: int) -> Tensor:
    """Outputs [S, I, O] at other inputs than the stored, from chains that go on where they ended."""
    members = len(torch.load(folder / f"{name}-0.pt")["functions"])
    part = Part(PROBLEMS[name](), 0, folder, members)
    found: list[Tensor] = []
    while len(found) * members < draws:
        for _ in range(part.thin):
            part.sampler.advance()
        weights = part.sampler.position * part.sampler.scale
        found.append(functions_at(inputs, part.runner, part.shapes, weights))
    return torch.cat(found)


def main() -> None:
    """Write the file."""
    options = parser(__doc__, folder=FOLDER, draws=DRAWS).parse_args()
    torch.set_num_threads(1)
    stored: dict[str, np.ndarray] = {}
    for problem in run.problems(exact.SEED):
        data, grid = problem.data, problem.grid
        outputs = outputs_of(NAMES[problem.name], torch.cat((grid, data.x_test)), options.folder, options.draws)
        shown, judged = (
            problem.likelihood.predictive(Outputs(part)) for part in outputs.split([len(grid), len(data.x_test)], 1)
        )
        for key, value in metrics.evaluate(judged, data.y_test).items():
            stored[f"{problem.name}.score.{key}"] = np.float32(value)
        if isinstance(shown, RegressionPredictive):
            figure = {"mean": shown.mean[:, 0], "epistemic_std": shown.epistemic[:, 0].sqrt(), "std": shown.std[:, 0]}
        else:
            assert isinstance(shown, ClassificationPredictive)
            figure = {"probs": shown.probs[:, 1], "entropy": shown.entropy}
        stored |= {f"{problem.name}.figure.{key}": value.numpy().astype(np.float16) for key, value in figure.items()}
    np.savez_compressed(exact.PATH, **stored)
    print(exact.PATH, exact.PATH.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
