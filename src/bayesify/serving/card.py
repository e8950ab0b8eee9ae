"""The page about a model: what it predicts, how well, from what, and what it is not for."""

from __future__ import annotations

from bayesify.serving.about import About, Column
from bayesify.tables.written_numbers import shown, significant

MAX_TEXTS = 5
"""Texts of a column that the page names."""
WORDS = {
    "crps": "CRPS, the mean error of the whole predicted distribution, in the target's unit",
    "log_loss": "log-loss, in nats per row",
    "rmse": "root of the mean squared error, in the target's unit",
    "accuracy": "share of rows with the right class",
}
"""What scores are; see `words_of` for those of a level."""
WORDS_OF_LEVEL = {
    "coverage": "share of rows inside their {} % interval",
    "width": "mean width of the {} % intervals, in the target's unit",
    "sets": "share of rows whose class is among the fewest that reach {} %",
    "size": "mean number of these classes at {} %",
}


LIKELIHOODS = {
    "heteroscedastic_gaussian": "normal noise that depends on the row",
    "student_t": "noise with heavy tails (Student's t) that depends on the row",
    "categorical": "probabilities of classes",
    "poisson": "counts (Poisson)",
    "negative_binomial": "counts (negative binomial)",
}
TRANSFORMS = {
    "log": "the logarithm of the target",
    "log1p": "the logarithm of 1 + the target",
    "sqrt": "the square root of the target",
}
"""What the default method chose, in words."""


def words_of(score: str) -> str:
    """What a score is, in words."""
    kind, _, level = score.rpartition("_")
    return WORDS_OF_LEVEL[kind].format(level) if kind in WORDS_OF_LEVEL else WORDS.get(score, score.replace("_", " "))


def render_card(about: About) -> str:
    """The page in Markdown."""
    target = about.target_column
    lines = [
        f"# {_text(about.target)}, predicted from {_text(about.table)}",
        "",
        f"A {about.task} by bayesify {about.version}: {_method(about)}. Trained on {about.num_rows:,} rows "
        f"(fingerprint `{about.fingerprint}`), seed {about.seed}.",
        "",
        f"The target {_holds(target)}.",
        "",
        "## How well",
        "",
        f"On {about.scored_on}:",
        "",
        "| score | |",
        "| --- | --- |",
        *(f"| {words_of(name)} | {significant(value)} |" for name, value in about.scores.items()),
        "",
        "## Columns",
        "",
        "| column | kind | holds | missing cells |",
        "| --- | --- | --- | --- |",
        *(
            f"| {_text(column.name)} | {column.kind} | {_range(column)} | {column.num_missing or ''} |"
            for column in about.columns
        ),
        "",
        *(f"- {_text(note)}" for note in about.remarks),
        "",
        "## What it is not for",
        "",
        "- Rows unlike those above: beyond the ranges, with texts that are not among them, from another place or time. Predictions "
        "mark such rows as `unusual`; the rest are not proven usual.",
        "- Effects: it says what goes together in these rows, not what happens if a column is changed.",
        "- Intervals hold their share of rows like the training rows on average, not for every group of them.",
        "- Decisions about people without somebody who answers for them.",
        "",
        "## Use",
        "",
        "    bayesify predict THIS_FOLDER new.csv",
        "",
        f"`new.csv` needs the columns above, not {_text(about.target)}. Nothing in this folder is a program.",
        "",
    ]
    return "\n".join(lines)


def _method(about: About) -> str:
    choices = about.choices
    if choices.get("method") != "auto":
        return f"method {choices.get('method')}"
    likelihood, transform = str(choices.get("likelihood", "")), str(choices.get("transform", "none"))
    noise = LIKELIHOODS.get(likelihood, f"{likelihood.replace('_', ' ')} likelihood")
    of = f" for {TRANSFORMS.get(transform, transform)}" if transform != "none" else ""
    return f"an ensemble of {choices.get('members')} networks, each trained without rows that say when to stop; {noise}{of}"


def _holds(column: Column) -> str:
    if column.kind == "text":
        texts = ", ".join(_text(text) for text in column.texts)
        more = ", ..." if column.num_different > len(column.texts) else ""
        return f"has {column.num_different} classes: {texts}{more}"
    return f"lies between {shown(column.low)} and {shown(column.high)}"


def _range(column: Column) -> str:
    if column.kind == "text":
        texts = ", ".join(_text(text) for text in column.texts[:MAX_TEXTS])
        return f"{column.num_different} texts: {texts}{', ...' if column.num_different > MAX_TEXTS else ''}"
    return "nothing" if column.low is None else f"{shown(column.low)} to {shown(column.high)}"


def _text(text: str) -> str:
    """A name or cell as plain text of Markdown, on one line."""
    flat = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]()#+!|<>~" else sign for sign in flat)
