"""The No-U-Turn sampler on the smallest problems of `benchmarks.truth`: an independent check of their references, and its cost.

    python -m benchmarks.truth_nuts sample --problem gap --seconds 480     # chains of one problem on one core, in build/truth
    python -m benchmarks.truth_nuts compare                                # with the chains of `benchmarks.truth`: truth_nuts.json

Both samplers start from the same kind of trained members and have the same densities, gradients and units of weights.
"""

import json
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.convergence import effective_sample_size
from bayesify.running.generators import own_generators
from benchmarks.runs import parser
from benchmarks.timing import record, rounded
from benchmarks.truth import FOLDER, SKIPPED_SHARE, STORED_DRAWS, Part, compared, diagnose, functions_at, joined
from benchmarks.truth_distances import distances, floors
from benchmarks.truth_problems import PROBLEMS, Problem

SMALLEST_PROBLEMS = ("linear", "small_noise", "heteroscedastic", "gap", "extrapolation")
"""Problems of at most 97 weights."""
CHAINS, WARMUP, MAX_TREE_DEPTH = 3, 300, 8
SECONDS_BETWEEN_FILES = 30.0


class _Density(torch.autograd.Function):
    """-log p(z, y) with a known gradient."""

    @staticmethod
    def forward(ctx: Any, position: Tensor, slope: Any, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        value, gradient = slope(position.to(dtype)[None])
        ctx.save_for_backward(gradient[0].to(position))
        return -value[0].to(position)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return -above * gradient, None, None


def sample(problem: Problem, seconds: float, folder: Path, chains: int = CHAINS, warmup: int = WARMUP) -> None:
    """Run chains in turn for a number of seconds, and store them every half minute."""
    infer: Any = import_module("pyro.infer")
    end, told, start = time.monotonic() + seconds, time.monotonic(), time.process_time()
    part = Part(problem, 100, folder, members=chains, warmup=0)
    sampler = part.sampler
    kernels, states = [], []
    with own_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for position in sampler.position.double():
            kernel = infer.NUTS(
                potential_fn=lambda given: _Density.apply(given["z"], sampler.slope, sampler.scale.dtype),
                max_tree_depth=MAX_TREE_DEPTH,
            )
            kernel.initial_params = {"z": position}
            kernel.setup(warmup)
            kernels.append(kernel)
            states.append({"z": position})
        functions: list[Tensor] = []
        rounds = 0
        while time.monotonic() < end:
            states = [kernel.sample(state) for kernel, state in zip(kernels, states, strict=True)]
            rounds += 1
            if rounds > warmup:
                weights = torch.stack([state["z"] for state in states]).to(sampler.scale) * sampler.scale
                functions.append(functions_at(problem.inputs, part.runner, part.shapes, weights))
            if functions and time.monotonic() - told > SECONDS_BETWEEN_FILES:
                told = time.monotonic()
                _write(folder, problem, functions, time.process_time() - start)
    if functions:
        _write(folder, problem, functions, time.process_time() - start)
    print(problem.name, len(functions), "rounds after the warm-up", flush=True)


def _write(folder: Path, problem: Problem, functions: list[Tensor], seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"nuts-{problem.name}.pt"
    torch.save({"functions": torch.stack(functions, 1), "seconds": seconds}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def compare(folder: Path, name: str) -> dict[str, Any]:
    """Distances between the two samplers' draws and between two halves of the No-U-Turn chains, with noise floors and speeds.

    The halves are the earlier and the later draws. The speed is the number of effective draws per second of each sampler.
    """
    problem, stored = PROBLEMS[name](), torch.load(folder / f"nuts-{name}.pt")
    theirs = stored["functions"][:, int(SKIPPED_SHARE * stored["functions"].shape[1]) :]
    functions, densities, told = joined(name, folder)
    made = diagnose(problem, theirs, theirs.flatten(2).mean(2), {"seconds": stored["seconds"]})
    early_late = theirs.chunk(2, dim=1)
    truth = _some(functions, STORED_DRAWS)
    held_out, wanted = truth.chunk(2)
    speeds = {
        "nuts": _effective(problem, theirs) / stored["seconds"],
        "microcanonical": _effective(problem, functions) / told["seconds"],
    }
    return {
        "problem": name,
        "distances": rounded(distances(problem, _some(theirs, STORED_DRAWS // 2), wanted, held_out), 5),
        "floors": rounded(floors(problem, truth), 5),
        "nuts_halves": rounded(
            distances(problem, *(_some(part, STORED_DRAWS // 2) for part in early_late), held_out), 5
        ),
        "nuts": {key: made[key] for key in ("chains", "kept", "r_hat", "effective_draws", "seconds")},
        "microcanonical": diagnose(problem, functions, densities, told),
        "effective_draws_per_second": rounded(speeds, 4),
        "times_faster": round(speeds["microcanonical"] / speeds["nuts"], 2),
    }


def _some(functions: Tensor, count: int) -> Tensor:
    """`count` draws [S, I, O] of chains [C, T, I, O], spread over all chains, in random order."""
    flat = functions.flatten(0, 1)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    return flat[order[:count]]


def _effective(problem: Problem, functions: Tensor) -> float:
    """Median number of effective draws of the functions over the inputs."""
    return float(effective_sample_size(compared(problem, functions).flatten(2)).median())


def main(arguments: list[str] | None = None) -> None:
    """The commands of the module's docstring."""
    given = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)
    if given[:1] == ["sample"]:
        made = parser(__doc__, problem="gap", seconds=480.0, folder=FOLDER, chains=CHAINS, warmup=WARMUP)
        options = made.parse_args(given[1:])
        sample(PROBLEMS[options.problem](), options.seconds, options.folder, options.chains, options.warmup)
    elif given[:1] == ["compare"]:
        options = parser(__doc__, folder=FOLDER, problems=list(SMALLEST_PROBLEMS)).parse_args(given[1:])
        rows = [compare(options.folder, name) for name in options.problems]
        print(json.dumps(rows, indent=1))
        record("truth_nuts", {}, rows=rows, quiet=True)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
