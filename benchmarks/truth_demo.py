"""The exact answers of the demonstration, from continued chains of `benchmarks.truth`.

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
from benchmarks.truth import FOLDER, Part, functions_at, joined
from benchmarks.truth_problems import PROBLEMS

CURVE_DRAWS, MAP_ROUNDS, MAP_THIN = 2000, 25, 16
"""Number of stored draws of the curve; for two moons, number of rounds of the chains and number of trajectories between
rounds."""


def curves_at(inputs: Tensor, folder: Path) -> Tensor:
    """Draws [S, I, 1] of the curve, linearly interpolated between the inputs of its problem."""
    functions, _, _ = joined("gap", folder)
    known, flat = PROBLEMS["gap"]().inputs[:, 0].numpy(), functions.flatten(0, 1)[..., 0]
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[:CURVE_DRAWS]
    drawn = [np.interp(inputs[:, 0].numpy(), known, one) for one in flat[order].numpy()]
    return torch.from_numpy(np.stack(drawn)).float().unsqueeze(-1)


def logits_at(inputs: Tensor, folder: Path) -> Tensor:
    """Draws [S, I, 2] of two moons at inputs that are not stored, from chains that continue where they ended."""
    part = Part(PROBLEMS["moons"](), 0, folder, len(torch.load(folder / "moons-0.pt")["functions"]))
    found: list[Tensor] = []
    for _ in range(MAP_ROUNDS):
        for _ in range(MAP_THIN):
            part.sampler.advance()
        weights = part.sampler.position * part.sampler.scale
        found.append(functions_at(inputs, part.runner, part.shapes, weights))
    return torch.cat(found)


def main() -> None:
    """Write the file."""
    options = parser(__doc__, folder=FOLDER).parse_args()
    torch.set_num_threads(1)
    stored: dict[str, np.ndarray] = {}
    for problem in run.problems(exact.SEED):
        data, grid = problem.data, problem.grid
        draw = curves_at if problem.name == "regression" else logits_at
        outputs = draw(torch.cat((grid, data.x_test)), options.folder)
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
    np.savez_compressed(exact.EXACT_PATH, **stored)
    print(exact.EXACT_PATH, exact.EXACT_PATH.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
