"""The command `bayesify`."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from bayesify.compare.command import compare
from bayesify.serving.command import fit, predict
from bayesify.serving.terminal import INTERRUPTED_EXIT_CODE, names_of, need, refuse, say

if TYPE_CHECKING:
    from bayesify.demo.run import Outcome, ToyProblem
    from bayesify.methods import Method


class _WithoutTypes:
    """Commands whose help shows no type for a switch such as `--quick`, because a switch takes no value."""

    def get_params(self, context: Any) -> list[Any]:
        """Options and arguments. Newer versions of typer would show the type of a switch as `<bool>`, so the type is hidden."""
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for option in found:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        return found


class _Command(_WithoutTypes, TyperCommand):
    pass


class _Group(_WithoutTypes, TyperGroup):
    pass


app = typer.Typer(
    name="bayesify",
    cls=_Group,
    help="Turn any PyTorch network into a Bayesian one. Start with: bayesify demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command in (compare, fit, predict):
    app.command(cls=_Command)(command)

REPORT_NAME = "report.html"
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of an output stream whose disk is full or has failed."""


def main() -> None:
    """Run the command line. The command ends quietly if the reader of its output (such as `head`) closes the pipe, and with a
    message if the disk is full."""
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, *FULL_ERRORS):
            raise
        with suppress(OSError):
            if error.errno != errno.EPIPE:
                print(f"bayesify: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
                continue
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for the flush when Python exits
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from bayesify.version import __version__

        print(__version__)
        raise typer.Exit


@app.command(cls=_Command)
def methods() -> None:
    """List every method: its name in code, its paper, how many parameters it stores, and whether it is ready."""
    from bayesify.methods import all_methods

    known = all_methods().values()

    listing = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("name", "method", "paper", "parameters", "status"):
        listing.add_column(heading, no_wrap=heading == "name")
    for method in known:
        status = method.status + (", slow" if method.slow else "")
        listing.add_row(method.name, method.title, method.paper, method.cost, status)
    own = ", ".join(f"{method.name}: {method.used_as}" for method in known if method.posterior is None)
    console = Console()
    console.print(listing)
    console.print(
        "\nparameters: the number of stored parameters for P weights; a layer has d_in inputs and d_out outputs; k, K "
        "and M are options of the method. slow: runs in the demo only with --all.\n"
        'Use a method by name: bayesify.bayesianize(net, "mean_field", ...). '
        f"These methods have functions or classes of their own below bayesify: {own}.",
        style="dim",
        highlight=False,
    )


@app.command(cls=_Command)
def demo(
    everything: Annotated[bool, typer.Option("--all", help="Also run slow methods, and lift the time budget.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Train briefly for a first look; the bands have not converged.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, networks, training and prediction.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report; it is created if it does not exist.")] = Path(
        "bayesify-demo"
    ),
    only: Annotated[
        str,
        typer.Option("--methods", help="Run only these methods: names from 'bayesify methods', separated by commas."),
    ] = "",
) -> None:
    """Fit the methods to two small problems and write an HTML report with all predictions side by side.

    The problems are a regression with a gap in its data, and the classification of two moons. The demo takes about a minute,
    because it leaves out slow methods. With --all, it runs every method. Each method has a time budget. A method that fails is
    listed with the reason. After Ctrl-C, the report contains the finished methods. The last line printed is the path of the report.
    """
    chosen = _choose(only, everything)
    path = _report_path(out)
    need("demo", "matplotlib", "jinja2", extra="report")
    from bayesify.demo.report import render_demo
    from bayesify.demo.run import EPOCHS, QUICK_EPOCHS, problems
    from bayesify.storage import write_file

    outcomes, interrupted = _run(chosen, seed=seed, epochs=QUICK_EPOCHS if quick else EPOCHS, limited=not everything)
    if not outcomes:
        refuse("Interrupted before a method was finished; no report was written.", INTERRUPTED_EXIT_CODE)
    finished = {outcome.method.name for outcome in outcomes if outcome.problem == "classification"}
    unfinished = [method.title for method in chosen if method.name not in finished]
    _print_table(outcomes)
    made: list[ToyProblem] = problems(seed)
    words = ["bayesify", "demo", "--seed", str(seed)]
    words += ["--all"] * everything + ["--quick"] * quick + (["--methods", only] if only.strip() else [])
    told: dict[str, Any] = {"seed": seed, "command": shlex.join(words), "unfinished": unfinished, "quick": quick}
    page = write_file(path, render_demo(outcomes, made, **told))
    print(page, flush=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    if all(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


@app.command(cls=_Command)
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Experiments: paper/experiment, a paper, or a pattern such as '*/uci'.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    status: Annotated[
        bool,
        typer.Option("--status", help="Show published results next to ours; for a single paper, show every number."),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Run every experiment of the five papers.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Use tiny synthetic data; each experiment takes seconds.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.")] = None,
    engine: Annotated[str, typer.Option(help="Engine that runs the experiments: local, dask or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of runs at a time (default: one per core).")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Run only these parts of the experiment, such as one dataset.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder of the datasets (default: the environment variable BAYESIFY_DATA).")
    ] = None,
    arguments: Annotated[
        str, typer.Option(help="Extra arguments for the experiment's own program, such as '--splits 2'.")
    ] = "",
) -> None:
    """Run experiments of the five papers and compare our numbers with the published numbers.

    Finished runs are not repeated. After Ctrl-C, the same command continues the interrupted runs. The file results.jsonl
    in the folder holds all results.
    """
    if find_spec("bayesify_papers") is None:
        needed = "the package of experiments; clone the repository and run pip install ./papers"
        refuse(f"bayesify reproduce needs {needed}", 1)
    from bayesify_papers.command import run_command

    code = run_command(
        names or [],
        show=show,
        status=status,
        everything=everything,
        smoke=smoke,
        out=out,
        engine=engine,
        workers=workers,
        only=part or [],
        data=data,
        arguments=arguments,
    )
    raise typer.Exit(code)


def _choose(only: str, everything: bool) -> list[Method]:
    from bayesify.demo.run import chosen_methods
    from bayesify.methods import get_method

    if not only.strip():
        return chosen_methods(everything)
    try:
        return list({method.name: method for method in map(get_method, names_of(only))}.values())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--methods") from error


def _report_path(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file; give a folder", param_hint="--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"{folder} cannot be created: {error.strerror}; give another folder", param_hint="--out"
        ) from error
    return folder / REPORT_NAME


def _run(chosen: list[Method], *, seed: int, epochs: int, limited: bool) -> tuple[list[Outcome], bool]:
    """Outcomes of the methods, and whether Ctrl-C interrupted them. Progress goes to the error stream."""
    from bayesify.demo.run import BUDGET_SECONDS, run_all
    from bayesify.running.progress import Display

    outcomes: list[Outcome] = []
    columns = ("{task.description:<34}", "bar", "count", "elapsed")
    with Display(*columns, total=len(chosen), description="methods") as progress:

        def tell(method: Method, problem: ToyProblem, share: float) -> None:
            half = 0.5 * (problem.name == "classification")
            done = chosen.index(method) + half + 0.5 * share
            progress.update(description=f"{method.title}: {problem.title}", completed=done)

        try:
            budget = BUDGET_SECONDS if limited else None
            for outcome in run_all(chosen, seed=seed, epochs=epochs, budget=budget, report=tell):
                outcomes.append(outcome)
        except KeyboardInterrupt:
            return outcomes, True
    return outcomes, False


def _print_table(outcomes: list[Outcome]) -> None:
    from bayesify.demo.report import COLUMNS, table

    groups = {"regression": "1-D", "classification": "moons", "both": ""}
    listing = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    listing.add_column("method", no_wrap=True)
    for group, heading, unit in COLUMNS:
        listing.add_column(f"{groups[group]}\n{heading}\n{unit}", justify="right", no_wrap=True)
    rows = table(outcomes)
    for row in rows:
        listing.add_row(row.title, *row.cells)
    console = Console()
    console.print(listing)
    for row in rows:
        for note in row.notes:
            say(console, f"{row.title} {note}", style="yellow")
