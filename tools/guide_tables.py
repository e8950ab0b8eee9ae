"""The tables of docs/experiments/guides.md, made from the stored results. Run this program after a benchmark."""

import json
from pathlib import Path
from typing import Any

from benchmarks import active_learning, bayesian_optimization, lora, moments, onnx_sampling
from benchmarks.timing import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "experiments" / "guides.md"


def figures(name: str) -> dict[str, Any]:
    """The stored figures of a benchmark."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return found


def tables() -> list[str]:
    """The tables of the page in Markdown."""
    return [
        moments.table(figures("moments")),
        moments.times_table({"ARM": figures("moments_cpu"), "x86-64": figures("x86_64/moments_cpu")}),
        lora.table(figures("lora")),
        lora.cost_table(figures("lora_gpu")),
        onnx_sampling.table(figures("x86_64/onnx_sampling_cpu")),
        onnx_sampling.int8_table(figures("onnx_int8")),
        bayesian_optimization.table(figures("bayesian_optimization")),
        active_learning.table(figures("active_learning")),
    ]


def renewed(page: str, table: str) -> str:
    """The page in which a table replaces the table with the same first line."""
    lines, (title, *_) = page.splitlines(), table.splitlines()
    start = lines.index(title)
    end = next(place for place in range(start, len(lines)) if not lines[place].startswith("|"))
    return "\n".join([*lines[:start], table, *lines[end:], ""])


def main() -> None:
    """Write the page."""
    page = PAGE.read_text()
    for table in tables():
        page = renewed(page, table)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
