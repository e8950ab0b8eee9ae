"""Figures and scores of the methods' pages: every method on the two problems of the demonstration.

python tools/method_figures.py --seeds 3     # scores to docs/methods/scores, figures of seed 0 to docs/methods/figures

Stored runs are not repeated. At the end, the program writes the table in docs/experiments/toy-problems.md from all runs.
"""

import argparse
import base64
import json
from pathlib import Path
from typing import Any

import bayesify
from bayesify.demo import run
from bayesify.demo.figures import bands, entropy_map
from bayesify.methods import METHODS

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "methods" / "figures"
SCORES = ROOT / "docs" / "methods" / "scores" / "methods.jsonl"
PAGE = ROOT / "docs" / "experiments" / "toy-problems.md"
CHAIN_STEPS = 60
"""Number of steps of the chain, and number of its warm-up steps. With the other methods' number of steps, a chain takes
minutes."""
KINDS = ("regression", "classification")
START, END = "<!-- results -->", "<!-- end of results -->"


def main() -> None:
    """Run the missing methods and seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    options = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    SCORES.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["method"], row["problem"], row["seed"]) for row in rows()}
    for seed in range(options.seeds):
        for name in options.methods:
            for problem in run.problems(seed):
                if (name, problem.name, seed) in done:
                    continue
                epochs = CHAIN_STEPS if METHODS[name].is_chain else run.EPOCHS
                outcome = run.run(METHODS[name], problem, seed=seed, epochs=epochs, budget=None)
                print(name, problem.name, seed, f"{outcome.seconds:.1f} s", outcome.note, flush=True)
                if outcome.failed:
                    continue
                if seed == 0:
                    _draw(problem, outcome, name)
                row = {
                    "method": name,
                    "problem": problem.name,
                    "seed": seed,
                    "seconds": round(outcome.seconds, 2),
                    "num_parameters": outcome.num_parameters,
                    **{key: float(f"{value:.5g}") for key, value in outcome.scores.items()},
                    "version": bayesify.__version__,
                }
                with SCORES.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(f"{text.split(START)[0]}{START}\n\n{table()}\n\n{END}{text.split(END)[1]}")


def rows() -> list[dict[str, Any]]:
    """Stored results."""
    return [json.loads(line) for line in SCORES.read_text().splitlines()] if SCORES.exists() else []


def table() -> str:
    """Table with a line per method: means over the seeds that every method has."""
    stored = rows()
    seeds = {name: {row["seed"] for row in stored if row["method"] == name} for name in METHODS}
    shared = set.intersection(*(found for found in seeds.values() if found))
    stored = [row for row in stored if row["seed"] in shared]
    lines = [
        "| method | seeds | curve: NLL | RMSE | gap / data | coverage of 90 % | moons: NLL | accuracy % | ECE % | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, method in sorted(METHODS.items()):  # the order of registration depends on the order of imports
        curve, moons = ([row for row in stored if (row["method"], row["problem"]) == (name, kind)] for kind in KINDS)
        if not curve or not moons:
            continue
        ratios = [row["std_gap"] / row["std_data"] for row in curve if row["std_data"] > 0]
        cells = [
            f"[{method.title}](../methods/{name.replace('_', '-')}.md)",
            str(min(len(curve), len(moons))),
            f"{_mean(curve, 'nll'):.2f}",
            f"{_mean(curve, 'rmse'):.3f}",
            f"{sum(ratios) / len(ratios):.1f}" if ratios else "-",
            f"{_mean(curve, 'coverage_90'):.2f}",
            f"{_mean(moons, 'nll'):.3f}",
            f"{100 * _mean(moons, 'accuracy'):.1f}",
            f"{100 * _mean(moons, 'ece'):.1f}",
            f"{_mean(curve, 'seconds') + _mean(moons, 'seconds'):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(found: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in found) / len(found)


def _draw(problem: run.ToyProblem, outcome: run.Outcome, name: str) -> None:
    kind, draw = ("svg", bands) if problem.name == "regression" else ("png", entropy_map)
    data = base64.b64decode(draw(problem.data, outcome).partition("base64,")[2])
    (FIGURES / f"{name.replace('_', '-')}-{problem.name}.{kind}").write_bytes(data)


if __name__ == "__main__":
    main()
