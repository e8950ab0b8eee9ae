"""The tables of the guides, from the stored results; run it after a benchmark to bring the pages up to date."""

import json
from pathlib import Path
from typing import Any

from benchmarks import active_learning, bayesian_optimization, lora, moments, onnx_sampling
from benchmarks.timing import RESULTS

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def figures(name: str) -> dict[str, Any]:
    """What a benchmark measured."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    return found


def tables() -> dict[str, list[str]]:
    """Tables in Markdown by page."""
    return {
        "active-learning.md": [active_learning.table(figures("active_learning"))],
        "bayesian-optimization.md": [bayesian_optimization.table(figures("bayesian_optimization"))],
        "lora.md": [lora.table(figures("lora")), lora.cost_table(figures("lora_gpu"))],
        "one-pass.md": [
            moments.table(figures("moments")),
            moments.times_table({"ARM": figures("moments_cpu"), "x86-64": figures("x86_64/moments_cpu")}),
        ],
        "small-device.md": [
            onnx_sampling.table(figures("x86_64/onnx_sampling_cpu")),
            onnx_sampling.int8_table(figures("onnx_int8")),
        ],
    }


def renewed(page: str, table: str) -> str:
    """The page with a table in the place of that with the same first line."""
    lines, (title, *_) = page.splitlines(), table.splitlines()
    start = lines.index(title)
    end = next(place for place in range(start, len(lines)) if not lines[place].startswith("|"))
    return "\n".join([*lines[:start], table, *lines[end:], ""])


def main() -> None:
    """Write the pages."""
    for name, found in tables().items():
        page = (GUIDES / name).read_text()
        for table in found:
            page = renewed(page, table)
        (GUIDES / name).write_text(page)


if __name__ == "__main__":
    main()
