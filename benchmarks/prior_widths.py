"""Choice of the width of the default prior: methods with a prior over weights, under `Neal` of four widths.

    python -m benchmarks.prior_widths [--device cuda] [--workers 8] [--limit 300] [--decide]

The networks are the suite's and two others (`benchmarks.defaults`), with seeds that no reported result uses. Cells are files in
`--folder`, as in the suite. No cell starts that would probably end after `--limit` seconds. Finished cells become
`benchmarks/results/default_prior_widths.json`. Once they are complete, the width that the rule chooses is written to the folder's
`chosen`. With `--decide`, it is written as soon as all pairs after 3 epochs are complete and the time is over. Then only the
finished pairs after 30 epochs count; their order was fixed before the run.

The rule was written before the run. A pair is a method on a network after 3 epochs, or one of two methods after 30 epochs. Its
scores are means over the seeds. A pair can keep the six bounds of the suite; an error keeps none. A difference of up to two bounds
counts as no difference.

1. A width is rejected if the suite's own networks, after 3 epochs, keep in total over two bounds fewer than under `Neal(4)`.
2. Among the other widths, those remain whose number of kept bounds, over all pairs, is at most two below the largest.
3. Among these, the width with the lowest mean, over all pairs, of the NLL minus the plain network's is chosen.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tools.defaults_page import BOUNDS, Row, means, missed

from .defaults import FIRST_TUNING_SEED, Job, begun, by_name, cell
from .runs import many, parser
from .timing import record

CURRENT_WIDTH = 4
WIDTHS = (CURRENT_WIDTH, 8, 16, 32)
SEEDS = (FIRST_TUNING_SEED, FIRST_TUNING_SEED + 1)
OUTSIDE_NETWORKS, SUITE_NETWORKS = ("strided_cnn", "mlp_6000"), ("cnn", "mlp", "gru", "transformer")
METHODS = ("mean_field", "dropout", "k_tied", "matrix_normal", "rank_one", "inducing", "walsh_hadamard")
"""Methods with a prior over weights by default, which SWAG and function space do not have."""
LONG_METHODS = METHODS[:2]
"""Methods that are also run for 30 epochs, in which wide priors have time to overfit."""
LONG_SUFFIX = ",epochs=30"
MAX_EQUAL_BOUNDS = 2
"""Largest difference in kept bounds between two widths that count as equal."""

Pair = tuple[str, str, str]
"""Network, method, and the variant's settings other than the width."""


def pairs() -> list[Pair]:
    """Pairs in the order of the run, so that an interrupted run leaves whole pairs. Networks of the suite and others alternate."""
    networks = ("strided_cnn", "cnn", "mlp_6000", "mlp", "gru", "transformer")
    short = [(network, method, "") for network in networks for method in METHODS]
    return short + [(network, method, LONG_SUFFIX) for network in networks for method in LONG_METHODS]


def variant(width: int, more: str) -> str:
    return f"prior=neal{width}{more}"


def jobs(folder: Path, device: str) -> tuple[list[Job], list[Job]]:
    """Jobs of the plain networks, the longest first, and jobs of all cells."""
    networks = ("gru", "transformer", "cnn", *OUTSIDE_NETWORKS, "mlp")
    plain: list[Job] = [(name, seed, "network", "", folder, device) for name in networks for seed in SEEDS]
    cells: list[Job] = [
        (network, seed, method, variant(width, more), folder, device)
        for network, method, more in pairs()
        for width in WIDTHS
        for seed in SEEDS
    ]
    return plain, cells


def judged(rows: Sequence[Row]) -> dict[Pair, dict[int, Row]]:
    """Scores by pair and width, for pairs with all widths and seeds."""
    found, counts = means(rows), [(row["network"], row["method"]) for row in rows]
    complete = {}
    for network, method, more in pairs():
        keys = {width: (network, f"{method},{variant(width, more)}") for width in WIDTHS}
        if all(counts.count(key) == len(SEEDS) for key in keys.values()):
            complete[network, method, more] = {width: found[key] for width, key in keys.items()}
    return complete


def kept(row: Row) -> int:
    """Number of bounds that a pair keeps."""
    return 0 if "error" in row else len(BOUNDS) - len(missed(row))


def totals(found: dict[Pair, dict[int, Row]]) -> dict[int, dict[str, float]]:
    """Totals by width: kept bounds, kept bounds of the suite's networks after 3 epochs, and NLL minus the plain network's."""
    sums: dict[int, dict[str, float]] = {}
    fine = [pair for pair, rows in found.items() if not any("error" in row for row in rows.values())]
    for width in WIDTHS:
        gains = [found[pair][width]["nll"] - found[pair][width]["plain"]["nll"] for pair in fine]
        suite = [
            kept(rows[width]) for (network, _, more), rows in found.items() if network in SUITE_NETWORKS and not more
        ]
        total = sum(kept(rows[width]) for rows in found.values())
        sums[width] = {"kept": total, "suite": sum(suite), "nll": fmean(gains or [0.0])}
    return sums


def choose(sums: dict[int, dict[str, float]]) -> int:
    """The width that the rule above chooses."""
    able = {
        width: row for width, row in sums.items() if row["suite"] >= sums[CURRENT_WIDTH]["suite"] - MAX_EQUAL_BOUNDS
    }
    most = max(row["kept"] for row in able.values())
    best = {width: row["nll"] for width, row in able.items() if row["kept"] >= most - MAX_EQUAL_BOUNDS}
    return min(best, key=lambda width: best[width])


def _begin(job: Job, end: float) -> dict[str, Any] | None:
    """A cell, or `None` if it would end too late. Processes that share a GPU must not be killed at work."""
    told, expected = job[3], 0.0
    short = cell((*job[:3], told.removesuffix(LONG_SUFFIX), *job[4:]))
    if told.endswith(LONG_SUFFIX) and short.exists():
        expected = 10 * json.loads(short.read_text()).get("training", 0.0)
    return begun(job, end - expected)


def main() -> None:
    folder = Path("build/prior_widths")
    given = parser(__doc__, "device", "workers", "limit", decide=False, folder=folder).parse_args()
    end = time.time() + given.limit
    rows: list[dict[str, Any]] = []
    for part in jobs(given.folder, given.device):
        rows += [row for row in many(_begin, [(job, end) for job in part], given.workers) if row is not None]
    found = judged(rows)
    sums = totals(found)
    record(
        "default_prior_widths", by_name(rows), pairs=len(found), totals={f"Neal({w})": row for w, row in sums.items()}
    )
    print(f"{len(found)} of {len(pairs())} pairs are complete; {sums}")
    if len(found) == len(pairs()) or (given.decide and all(pair in found for pair in pairs() if not pair[2])):
        (given.folder / "chosen").write_text(f"{choose(sums)}\n")
        print(f"chosen: Neal({choose(sums)})")


if __name__ == "__main__":
    main()
