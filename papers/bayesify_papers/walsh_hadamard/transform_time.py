"""Time of the fast Walsh-Hadamard transform compared with the dense product (appendix D.5, figure 8).

    python -m bayesify_papers.walsh_hadamard.transform_time [--measure] [--out DIR] [--smoke]

Without `--measure` the program prints the ratios that `python -m benchmarks.hadamard` wrote to benchmarks/results. With `--measure`
it measures on this machine: by number of features D at batch 512, and by batch at D = 512, on the GPU if there is one.
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bayesify.transforms import hadamard
from bayesify_papers.shared import figures, records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.rows import show
from bayesify_papers.shared.tables import number, table
from bayesify_papers.walsh_hadamard.rows import transform_time as read_rows

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (32, 64, 128, 256, 512, 1024)
FIXED_BATCH_SIZE, FIXED_SIZE = 512, 512
BENCHMARK_FOLDER = Path("benchmarks") / "results"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Results of the transform's benchmark on CPU and GPU, by file name.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("hadamard_*.json"))}
    if not found:
        raise FileNotFoundError(
            f"transform_time: no hadamard_*.json in {folder}; make one with python -m benchmarks.hadamard, or give --measure"
        )
    return found


def summarize_benchmarks(found: dict[str, dict[str, Any]]) -> str:
    """A table with the ratios of transform to dense product. It has a line for each size and machine."""
    lines = []
    for content in found.values():
        hardware = content["hardware"]
        machine = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread{'s' * (hardware['threads'] > 1)}"
        for key, value in content["figures"].items():
            match = re.fullmatch(r"transform_(\d+)_over_dense", key)
            if match is not None:
                lines.append([match[1], number(value, 4), number(1 / value, 1), machine])
    title = (
        "Time of the transform divided by the time of the dense product, batch 512. The paper shows a figure without numbers: on "
        "its CPU both take equal time near 512 to 1024 features, on its GPU the transform is always faster."
    )
    return table(["D", "ratio", "times faster", "machine"], lines, title)


def measure(sizes: Sequence[int], batches: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Median milliseconds of transform and product: rows for sizes at `FIXED_BATCH_SIZE` and for batches at `FIXED_SIZE`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for kind, size, batch in [("features", size, FIXED_BATCH_SIZE) for size in sizes] + [
        ("batch", FIXED_SIZE, b) for b in batches
    ]:
        x, dense = torch.randn(batch, size, device=device), torch.randn(size, size, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "dense": lambda x=x, dense=dense: x @ dense,  # type: ignore[misc]
            "transform": lambda x=x: hadamard(x),  # type: ignore[misc]
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        with torch.no_grad():
            for call in calls.values():
                call()
            start = time.perf_counter()
            while len(times["dense"]) < 5 or time.perf_counter() - start < seconds:
                for name, call in calls.items():  # alternate, so that a slow moment affects both
                    times[name].append(_milliseconds(call))
        row = {name: statistics.median(values) for name, values in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["transform"], times["dense"], strict=True))
        rows.append({"by": kind, "size": size, "batch": batch, **row, "ratio": ratio, "rounds": len(times["dense"])})
    return rows


def _milliseconds(call: Callable[[], Any]) -> float:
    """Milliseconds of one call. With one thread, processor time excludes other programs; otherwise it is wall-clock time."""
    alone = not torch.cuda.is_available() and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = clock()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e3 * (clock() - start)


def figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the time by features on the left and by batch on the right (figure 8)."""
    with figures.panels(path, 1, 2, (8.0, 3.2)) as axes:
        kinds = (("features", "size", "features D"), ("batch", "batch", "batch"))
        for place, (kind, key, label) in zip(axes, kinds, strict=True):
            own = [row for row in rows if row["by"] == kind]
            for name, color in (("dense", figures.BAND_COLOR), ("transform", figures.DATA_COLOR)):
                place.loglog([row[key] for row in own], [row[name] for row in own], "o-", color=color, label=name)
            place.set(xlabel=label, ylabel="milliseconds")
            place.legend(frameon=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or measure, store and draw."""
    program = Program(__doc__, __spec__, "transform_time", smoke="measure two sizes and two batches, five times each")
    program.add_argument("--measure", action="store_true", help="measure here instead of reading the benchmark's files")
    program.add_argument("--benchmarks", type=Path, default=BENCHMARK_FOLDER, help="folder of the benchmark's files")
    chosen = program.option(seconds=3.0).read(arguments)
    if not (chosen.measure or chosen.smoke):
        print(summarize_benchmarks(read(chosen.benchmarks)))
        return 0
    rows = measure((64, 128), (32, 64), 0.0) if chosen.smoke else measure(SIZES, BATCH_SIZES, chosen.seconds)
    records.write(chosen.out / "transform_time.json", {**chosen.facts, "rows": rows})
    if figures.HAS_MATPLOTLIB:
        figure(rows, chosen.out / "transform_time")
    print(
        show(
            read_rows(chosen.out),
            "Time of the transform divided by the time of the dense product. The paper shows a figure without numbers.",
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
