"""The demonstration's table and page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayesify.demo import figures
from bayesify.demo.exact import distance, exact_outcomes
from bayesify.demo.run import HIDDEN_UNITS, PREDICTION_DRAWS, Outcome, ToyProblem
from bayesify.version import __version__

MISSING_TEXT = "–"


@dataclass(frozen=True)
class ReportRow:
    """One row of the report's table: a method and its results, as text."""

    title: str
    name: str  # name in code and on the command line
    paper: str  # source of the method
    cells: tuple[str, ...]  # one text per column of `COLUMNS`
    notes: tuple[str, ...]  # failures and early stops, if any


COLUMNS = (
    ("regression", "NLL", "nats"),
    ("regression", "90 %\ncover", "%"),
    ("regression", "std gap\n/ data", "ratio"),
    ("classification", "NLL", "nats"),
    ("classification", "accuracy", "%"),
    ("classification", "ECE", "%"),
    ("both", "time", "s"),
    ("both", "parameters", "1-D / moons"),
)
"""Problem, heading and unit of each column."""


def table(outcomes: Sequence[Outcome]) -> list[ReportRow]:
    """The outcomes as one row per method, in the order in which methods first appear."""
    rows = []
    for name in dict.fromkeys(outcome.method.name for outcome in outcomes):
        mine = {outcome.problem: outcome for outcome in outcomes if outcome.method.name == name}
        method = next(iter(mine.values())).method
        curve, moons = mine.get("regression"), mine.get("classification")
        cells = (
            _score(curve, "nll", "{:.2f}"),
            _score(curve, "coverage_90", "{:.0f}", 100),
            _gap_ratio(curve),
            _score(moons, "nll", "{:.3f}"),
            _score(moons, "accuracy", "{:.1f}", 100),
            _score(moons, "ece", "{:.1f}", 100),
            f"{sum(outcome.seconds for outcome in mine.values()):.1f}",
            " / ".join(_parameters(outcome) for outcome in (curve, moons)),
        )
        notes = tuple(
            f"{'failed on' if outcome.failed else 'on'} {PROBLEM_TITLES[outcome.problem]}: {outcome.note}"
            for outcome in mine.values()
            if outcome.note
        )
        rows.append(ReportRow(method.title, name, method.paper, cells, notes))
    return rows


COLUMN_PREFIXES = {"regression": "1-D: ", "classification": "Moons: ", "both": ""}
PROBLEM_TITLES = {"regression": "the 1-D problem", "classification": "two moons"}


def _score(outcome: Outcome | None, name: str, form: str, factor: float = 1.0) -> str:
    if outcome is None:
        return MISSING_TEXT
    return "failed" if outcome.failed else form.format(factor * outcome.scores[name])


def _gap_ratio(outcome: Outcome | None) -> str:
    if outcome is None or outcome.failed:
        return MISSING_TEXT
    data, gap = outcome.scores["std_data"], outcome.scores["std_gap"]
    return f"{gap / data:.1f}" if data > 1e-4 else MISSING_TEXT


def _parameters(outcome: Outcome | None) -> str:
    return MISSING_TEXT if outcome is None or outcome.num_parameters is None else f"{outcome.num_parameters:,}"


def render_demo(
    outcomes: Sequence[Outcome],
    problems: Sequence[ToyProblem],
    *,
    seed: int,
    command: str,
    unfinished: Sequence[str] = (),
    quick: bool = False,
) -> str:
    """The demonstration's page: self-contained HTML. It names the seed, the command that reproduces it, and unfinished methods."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("demo.html").read_text(encoding="utf-8"))
    by_problem = {problem.name: problem for problem in problems}
    columns = [(group, heading.replace("\n", " "), unit) for group, heading, unit in COLUMNS]
    draw: dict[str, Callable[..., str]] = {"regression": figures.bands, "classification": figures.entropy_map}
    panels: dict[str, list[tuple[Outcome, str, str]]] = {name: [] for name in draw}
    exact = exact_outcomes(seed)
    for outcome in (*exact.values(), *outcomes):
        if not outcome.failed:
            name = outcome.problem
            known = name in exact and outcome is not exact[name]
            told = distance(outcome, exact[name], by_problem[name]) if known else ""
            panels[name].append((outcome, draw[name](by_problem[name].data, outcome), told))
    return template.render(
        version=__version__,
        seed=seed,
        command=command,
        hidden=HIDDEN_UNITS,
        draws=PREDICTION_DRAWS,
        columns=columns,
        labels=[f"{COLUMN_PREFIXES[group]}{heading}, {unit}" for group, heading, unit in columns],
        rows=table(outcomes),
        unfinished=list(unfinished),
        quick=quick,
        has_exact=bool(exact),
        num_data={name: len(problem.data.x) for name, problem in by_problem.items()},
        bands=panels["regression"],
        maps=panels["classification"],
    )
