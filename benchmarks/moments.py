"""One pass of means and variances compared with 256 and 1,000 draws, on networks of the suite of defaults.

    python -m benchmarks.moments [--device cuda] [--networks cnn mlp] [--seeds 0 1 2]    # distances and scores
    python -m benchmarks.moments --times                                                 # on this machine's processor, one thread

Networks and posteriors are trained as in `benchmarks.defaults`, with its data (BAYESIFY_DATA) and its folder of trained networks.
Each result is a line in `--rows` and is not repeated. The committed results keep rows that were not run again. Distances are means
over examples of half the sum of absolute differences between probabilities. Times are processor times divided by the time of a pass
of the mean network with its softmax, for batches of 500 and of 1. The draws of `draws_16` are fresh.
"""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesify
from bayesify.metrics import evaluate
from tools import markdown

from . import defaults
from .runs import add_row, parser, read_rows
from .timing import RESULTS, ratios, record, revision

METHODS = ("mean_field", "k_tied")
NETWORKS = ("cnn", "mlp", "transformer")
CELLS = list(itertools.product(NETWORKS, range(3), METHODS))
NUM_IMAGES, NUM_OUTSIDE = 1000, 50


def trained(network: str, seed: int, method: str, folder: Path, device: str) -> tuple[Any, defaults.Data]:
    """The posterior (trained once, then read from its file) and its data."""
    net, data, _ = defaults.trained(network, seed, folder, device)
    path = folder / f"{network}-{seed}-{method}.safetensors"
    if not path.exists():
        torch.manual_seed(seed)
        bayesify.save(defaults.METHODS[method](net, data, defaults.Run(seed)), path)
    return bayesify.load(path, net).to(device), data


def measure(network: str, seed: int, method: str, folder: Path, device: str, images: int) -> dict[str, Any]:
    """Scores of each way to predict, distances to 1,000 draws, and mutual information, also on out-of-distribution images."""
    bnn, data = trained(network, seed, method, folder, device)
    x, y = (part[:images].to(device) for part in data.test)
    outside = torch.cat([part[:NUM_OUTSIDE] for part in data.outside.values()]).to(device)
    generator = torch.Generator().manual_seed(seed)
    many, few = (bnn.draw(count, generator=generator).detach() for count in (1000, 256))
    row: dict[str, Any] = {"network": network, "seed": seed, "method": method, "images": len(x), "revision": revision()}
    options = {"draws_1000": {"draws": many}, "draws_256": {"draws": few}, "moments": {"method": "moments"}}
    places = {"inside": x, "outside": outside}
    ways = {name: {place: bnn.predict(part, **how) for place, part in places.items()} for name, how in options.items()}
    truth = ways["draws_1000"]
    for name, found in ways.items():
        scores = evaluate(found["inside"], y)
        row[name] = {key: round(scores[key], 5) for key in ("accuracy", "nll", "ece")}
        for place, prediction in found.items():
            row[name][f"distance {place}"] = round(distance(prediction.probs, truth[place].probs), 5)
            row[name][f"mutual information {place}"] = round(float(prediction.mutual_information.mean()), 5)
    with torch.no_grad():
        row["mean_network"] = {
            "distance inside": round(distance(bnn.mean_network()(x).softmax(-1), truth["inside"].probs), 5)
        }
    inside, other = (ways[name]["inside"].mutual_information for name in ("moments", "draws_1000"))
    row["correlation of mutual information"] = round(float(torch.corrcoef(torch.stack((inside, other)))[0, 1]), 4)
    return row


def distance(probs: Tensor, others: Tensor) -> float:
    return float(0.5 * (probs - others).abs().sum(-1).mean())


def times(network: str, seed: int, method: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Time of a prediction on the CPU, in passes of the mean network."""
    bnn, data = trained(network, seed, method, folder, "cpu")
    mean, found = bnn.mean_network().eval(), {}
    for count in (500, 1):
        x = data.test[0][:count]

        @torch.no_grad()
        def plain(x: Tensor = x) -> Tensor:
            return mean(x).softmax(-1)

        ways = [lambda x=x: bnn.predict(x, method="moments").probs, lambda x=x: bnn.predict(x, 16).probs]
        of_moments, of_draws = ratios(plain, *ways, seconds=seconds, timer=time.process_time)
        found[f"batch {count}"] = {"moments": round(of_moments, 2), "draws_16": round(of_draws, 2)}
    return {"network": network, "seed": seed, "method": method, **found}


def table(figures: dict[str, Any]) -> str:
    """The guide's table: means over seeds, in Markdown."""
    rows, lines = list(figures.values()), []
    for network, method in dict.fromkeys((row["network"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["network"], row["method"]) == (network, method)]

        def mean(way: str, key: str, mine: list[dict[str, Any]] = mine) -> str:
            return f"{statistics.fmean(row[way][key] for row in mine):.4f}"

        cells = [", ".join(mean(way, key) for way in ("draws_256", "moments")) for key in ("nll", "ece")]
        cells.append(", ".join(mean(way, "distance inside") for way in ("draws_256", "moments", "mean_network")))
        cells.append(", ".join(mean(way, "mutual information inside") for way in ("draws_1000", "moments")))
        lines.append([f"{network}, {method.replace('_', ' ')}", *cells])
    head = ["", "NLL: 256 draws, one pass", "ECE: 256 draws, one pass"]
    head += ["distance to 1,000 draws: 256 draws, one pass, mean network", "mutual information: 1,000 draws, one pass"]
    return markdown.table(head, lines)


def times_table(by_machine: dict[str, dict[str, Any]]) -> str:
    """The guide's second table in Markdown: times in passes of the mean network, by kind of processor."""
    lines = []
    for network in NETWORKS:
        cells = []
        for rows in (figures[network] for figures in by_machine.values()):
            many, one = rows["batch 500"], rows["batch 1"]
            cells.append(", ".join(f"{many[way]:.1f} ({one[way]:.0f})" for way in ("moments", "draws_16")))
        lines.append([network, *cells])
    return markdown.table(["batch of 500 (of 1)", *(f"{name}: one pass, 16 draws" for name in by_machine)], lines)


def main() -> None:
    files = {"folder": Path("build/defaults"), "rows": Path("build/moments.jsonl")}
    shared = ("device", "part", "seconds", "no_summary")
    options = parser(__doc__, *shared, seeds=[0, 1, 2], images=NUM_IMAGES, times=False, **files)
    options.add_argument("--networks", nargs="+", default=NETWORKS, choices=list(defaults.NETWORKS))
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.times:
        torch.set_num_threads(1)
        found = [times(name, 0, "mean_field", given.folder, given.seconds) for name in given.networks]
        for row in found:
            print(json.dumps(row), flush=True)
        if not given.no_summary:
            record("moments_cpu", {row["network"]: row for row in found})
        return
    cells = list(itertools.product(given.networks, given.seeds, given.methods))
    first, parts = given.part
    for cell in cells[first::parts]:
        if cell not in stored(given.rows):
            row = measure(*cell, given.folder, given.device, given.images)
            add_row(given.rows, row)
            print(json.dumps(row), flush=True)
    if not given.no_summary:
        rows = json.loads((RESULTS / "moments.json").read_text())["figures"]  # rows of other cells stay
        rows |= {"{}, seed {}, {}".format(*cell): row for cell, row in stored(given.rows).items() if cell in cells}
        kept = {key: rows[key] for cell in CELLS if (key := "{}, seed {}, {}".format(*cell)) in rows}
        note = "Command, hardware and revision of the last run; rows that it did not run were kept."
        record("moments", kept, note=note)


def stored(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    return {(row["network"], row["seed"], row["method"]): row for row in read_rows(path)}


if __name__ == "__main__":
    main()
