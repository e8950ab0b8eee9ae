r"""Distance of arbitrary matrices from the nearest Walsh-Hadamard matrix (appendix B, equations 6 and 7, figure 2).

    python -m bayesify_papers.walsh_hadamard.approximability [--sizes 2 4 8 ...] [--out DIR] [--smoke]

The matrices have entries uniform in (-1, 1). The distance is the smallest root mean square of the entries of the difference over
all $s_1$, g and $s_2$ that alternating least squares finds from several random starts. The matrix of zeros is a candidate, so the
distance never exceeds the root mean square of the matrix itself, about 0.577; the table has both. The program first checks that
$\operatorname{vec} W = L Q g$, with L diagonal and orthonormal columns of Q, for random $s_1$, g and $s_2$.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.maths.walsh_hadamard import geometry, materialize, nearest
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.walsh_hadamard.rows import approximability as read_rows

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
MAX_ROTATION_SIZE = 64
"""Largest D for which Q, a matrix of D^2 x D numbers, is materialized."""

NUM_REPETITIONS = 20
"""Number of matrices of each size, as in the paper."""


@dataclass(frozen=True)
class Search:
    """Effort of the search for the nearest matrix."""

    starts: int = 10
    steps: int = 300


SMOKE = Search(starts=2, steps=10)


def distances(matrices: Tensor, search: Search, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""The smallest value found of $\frac1D \lVert \Gamma - S_1 H G H S_2 \rVert_F$ (eq. 7).

    Args:
        matrices: $\Gamma$, [R, D, D].
        generator: Source of randomness of the starts.

    Returns:
        The smallest distance of each matrix, and its mean distance over starts, [R] each.
    """
    found = []
    for _ in range(search.starts):
        left, g, right = nearest(matrices, search.steps, generator)
        found.append((matrices - materialize(left, g, right)).square().mean((-1, -2)).sqrt())
    ends = torch.stack(found)
    return ends.min(0).values, ends.mean(0)


def run(sizes: Sequence[int], repetitions: int, search: Search, seed: int = 0) -> list[dict[str, Any]]:
    """Distances, one row per size. The matrices of a size do not depend on the other sizes.

    Raises:
        ValueError: If a size is not a power of two.
    """
    for size in sizes:
        if size < 1 or size & (size - 1):
            raise ValueError(f"approximability: size {size} is not a power of two; choose from {SIZES}")
    rows = []
    for size in sizes:
        generator = torch.Generator().manual_seed(seed + size)
        matrices = 2 * torch.rand(repetitions, size, size, generator=generator, dtype=torch.float64) - 1
        start = time.process_time()
        least, mean = distances(matrices, search, generator)
        zero = matrices.square().mean((-1, -2)).sqrt()
        rows.append(
            {
                "size": size,
                "distances": [round(value, 6) for value in least.tolist()],
                "median": statistics.median(least.tolist()),
                "median_of_one_start": statistics.median(mean.tolist()),
                "zero_matrix": statistics.median(zero.tolist()),
                "seconds": round(time.process_time() - start, 1),
            }
        )
        print(f"D = {size}: median {rows[-1]['median']:.4f}, {rows[-1]['seconds']} s", flush=True)
    return rows


def check_geometry(sizes: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """By size, the largest entries of vec W - L Q g and of Q^T Q - I (eq. 6) for random s1, g and s2 in float64."""
    rows = []
    for size in sizes:
        generator = torch.Generator().manual_seed(seed + size)
        left, g, right = torch.randn(3, size, generator=generator, dtype=torch.float64)
        stretch, rotation = geometry(left, right)
        apart = materialize(left, g, right).T.flatten() - stretch * (rotation @ g)
        rows.append(
            {
                "size": size,
                "from_product": apart.abs().max().item(),
                "from_orthonormal": (rotation.T @ rotation - torch.eye(size, dtype=g.dtype)).abs().max().item(),
            }
        )
    return rows


def figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot a dot for each matrix, the medians, and the distance of the matrix of zeros (figure 2)."""
    with figures.panels(path, 1, 1, (5.2, 3.4)) as (place,):
        sizes = [row["size"] for row in rows]
        for row in rows:
            values = row["distances"]
            place.plot(
                [row["size"]] * len(values), values, "o", color=figures.DATA_COLOR, markersize=2.5, markeredgewidth=0
            )
        place.plot(sizes, [row["median"] for row in rows], "-", color="black", label="median")
        place.plot(sizes, [row["zero_matrix"] for row in rows], "--", color=figures.BAND_COLOR, label="matrix of zeros")
        place.set_xscale("log", base=2)
        place.set(xlabel="D", ylabel="RMSE of the entries", ylim=(0, None))
        place.legend(frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment from the command line."""
    program = Program(__doc__, __spec__, "approximability", smoke="small matrices and a short search")
    chosen = program.option(sizes=SIZES, starts=Search().starts).read(arguments)
    search = SMOKE if chosen.smoke else Search(starts=chosen.starts)
    sizes, repetitions = ((2, 4, 8), 3) if chosen.smoke else (tuple(chosen.sizes), NUM_REPETITIONS)
    turned = check_geometry([size for size in sizes if size <= MAX_ROTATION_SIZE])
    records.write(chosen.out / "geometry.json", {**chosen.facts, "rows": turned})
    rows = run(sizes, repetitions, search)
    records.write(chosen.out / "approximability.json", {**chosen.facts, "search": asdict(search), "rows": rows})
    if figures.HAS_MATPLOTLIB:
        figure(rows, chosen.out / "approximability")
    title = "Distance of uniform random matrices from the nearest Walsh-Hadamard matrix (eq. 7). The paper's figure: bounded in D."
    print(show(read_rows(chosen.out), title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
