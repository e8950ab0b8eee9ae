"""Run times (the paper's figure 3), read from the file that the benchmark of the ResNets wrote.

python -m bayesify_papers.inducing_weights.run_time benchmarks/results/resnets_gpu.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.tables import number, table

COLUMNS = {
    "5_draws": "5 draws",
    "one_at_a_time": "1 draw",
    "existing_draws": "drawn before",
    "bf16/5_draws": "bf16, 5 draws",
    "bf16/one_at_a_time": "bf16, 1 draw",
    "training_step": "training step",
}
"""Figures of the benchmark and what the table calls them."""


def read(path: Path) -> dict[str, Any]:
    """What the benchmark wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not of that benchmark.
    """
    if not path.is_file():
        raise FileNotFoundError(f"run_time: {path} does not exist; make it with python -m benchmarks.resnets")
    content = records.read(path)
    if not isinstance(content.get("figures"), dict):
        raise ValueError(f"run_time: {path} holds no figures; give a file of python -m benchmarks.resnets")
    return content


def summarize(content: dict[str, Any]) -> str:
    """The table: times as ratios to a pass, or a step, of the deterministic network.

    Args:
        content: From `read`.
    """
    figures: dict[str, float] = content["figures"]
    lines = dict.fromkeys("/".join(name.split("/")[:2]) for name in figures)
    rows = [
        [line.replace("/", ", "), *(number(figures.get(f"{line}/{column}"), 2) for column in COLUMNS)] for line in lines
    ]
    where = content.get("hardware", {})
    title = (
        f"Time over the deterministic network's, per pass; {where.get('gpu') or where.get('cpu', 'unknown hardware')}, "
        f"batch {content.get('batch', '?')}, {content.get('date', 'no date')}. The paper has a figure without numbers (V100)."
    )
    return table(["network, posterior", *COLUMNS.values()], rows, title)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    program = Program(__doc__, __spec__, "run_time")
    program.add_argument("file", type=Path, nargs="?", default=Path("benchmarks") / "results" / "resnets_gpu.json")
    chosen = program.read(arguments)
    content = read(chosen.file)
    print(summarize(content))
    records.write(chosen.out / "run_time.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
