"""The recommended method of a comparison, trained on all rows and stored in a folder for `bayesify predict`."""

import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path

from bayesify.compare.compared_table import ComparedTable
from bayesify.compare.contestants import BASELINES, PORTFOLIO, RIVALS
from bayesify.compare.models import FAILURES
from bayesify.compare.question import Question
from bayesify.compare.summary import MethodRow, Summary
from bayesify.compare.verdict import PLURAL_NAMES, Verdict, capital, why_picked, words_of
from bayesify.serving.fitting import Scored, fit_table
from bayesify.sklearn.scores import LEVELS
from bayesify.tables.files import STDIN
from bayesify.tables.written_numbers import significant

MODEL_FOLDER = "model"
"""Name of the model's folder inside the folder of the comparison."""


@dataclass(frozen=True)
class Winner:
    """The recommended method after training on all rows."""

    method: str  # name of the method for `bayesify fit`
    folder: str  # folder of the model inside the folder of the comparison; empty if training failed
    words: str  # sentences that give the reason for this method


def train_winner(question: Question, table: ComparedTable, summary: Summary, verdict: Verdict, folder: Path) -> Winner:
    """Train the recommended network on all rows, as `bayesify fit` does, and store it with its scores from the comparison."""
    name, row, words = verdict.network, summary.row(verdict.network or ""), _reason(verdict, summary)
    assert name is not None
    assert row is not None
    assert table.frame is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            notes = [f"bayesify compare: {verdict.headline} {words}", *table.notes, *table.cautions]
            made = fit_table(
                table.frame,
                table.target,
                name=table.name,
                notes=notes,
                method=name,
                task=table.task,
                seed=question.seed,
                scored=_scored(row, summary),
                missing=tuple(question.reading.missing),
            )
        made.write(folder / MODEL_FOLDER)
    except FAILURES as error:
        return Winner(name, "", f"{words} It could not be trained on all rows: {error}")
    return Winner(name, MODEL_FOLDER, words)


def _scored(row: MethodRow, summary: Summary) -> Scored:
    """A method's scores in the comparison, under the score names of a stored model."""
    regression = summary.task == "regression"
    kinds = {"coverage": "coverage", "width": "width"} if regression else {"coverage": "sets", "width": "size"}
    names = {"rmse": "rmse", "crps": "crps"} if regression else {"accuracy": "accuracy", "nll": "log_loss"}
    names |= {f"{key}_{100 * level:.0f}": f"{own}_{100 * level:.0f}" for level in LEVELS for key, own in kinds.items()}
    rows = summary.results[row.name, row.splits[0]]["rows"]
    count = f"{len(row.splits)} split{'s' * (len(row.splits) > 1)}"
    where = f"the test rows of {count} of a comparison, predicted by models that were each trained on {rows['fit']:,} other rows"
    return Scored({own: float(row.means[key] or 0.0) for key, own in names.items()}, where)


def _reason(verdict: Verdict, summary: Summary) -> str:
    pick, kept = summary.row(verdict.pick), summary.row(verdict.network or "")
    assert pick is not None
    assert kept is not None
    own = words_of(kept)
    if verdict.certainty == "nothing":
        return f"The model is {own}, but it does not predict clearly better than a constant guess: do not rely on it."
    if pick.name in RIVALS:
        be = "they are" if pick.name in PLURAL_NAMES else "it is"
        close = " These splits cannot distinguish the two." if kept.leads and pick.leads else ""
        return (
            f"{capital(pick)} cannot be stored, because {be} not one of bayesify's networks. The stored model is "
            f"bayesify's best method here, {own}, with {_error(kept)} ({words_of(pick)}: {_error(pick)}).{close}"
        )
    if verdict.certainty == "tie":
        tied = sum(row.name != "constant" for row in summary.leading)
        return f"{tied} methods are tied; the model is {own}, {why_picked(kept, summary)}."
    return f"The model is {own}{', chosen by a single split' if verdict.certainty == 'untested' else ''}."


def _error(row: MethodRow) -> str:
    if row.means.get("rmse") is not None:
        return f"a typical error of {significant(row.means['rmse'] or 0.0)}"
    return f"{100 * (row.means['accuracy'] or 0.0):.1f} % right predictions"


def commands(winner: Winner, summary: Summary, table: ComparedTable, question: Question, folder: Path) -> list[str]:
    """Suggested next commands: one predicts with the model, and one trains another method on the same table."""
    others = [row.name for row in summary.ranked if row.name not in (*RIVALS, *BASELINES, winner.method)]
    other = (others or [name for name in (*PORTFOLIO[1:], *PORTFOLIO[:1]) if name != winner.method])[0]
    data = "table.csv" if question.data == STDIN else question.data
    ignored = dict.fromkeys((*question.ignore, *([question.group] if question.group else [])))
    options = {
        "--target": table.target,
        "--method": other,
        "--task": question.task or "",
        "--ignore": ",".join(ignored),
        "--sheet": question.reading.sheet,
        "--encoding": question.reading.encoding,
        "--missing": ",".join(question.reading.missing),
        "--out": f"{table.name}-{other}",
    }
    fit = " ".join(f"{key} {shlex.quote(value)}" for key, value in options.items() if value)
    found = [f"bayesify fit {shlex.quote(data)} {fit}"]
    if winner.folder:
        model = shlex.quote(str(folder / winner.folder))
        found.insert(0, f"bayesify predict {model} new.csv --out predictions.csv")
    return found
