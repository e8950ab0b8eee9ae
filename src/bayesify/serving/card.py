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


FIGURES = {
    "regression": "The truth against the predicted mean, and the share of rows inside intervals against their level",
    "classification": "The share of right classes against the stated confidence",
}
"""What the figures show, for readers who do not see them."""
LIKELIHOODS = {
    "heteroscedastic_gaussian": "normal noise that depends on the row",
    "student_t": "noise with heavy tails (Student's t) that depends on the row",
    "categorical": "probabilities of classes",
    "poisson": "counts (Poisson)",
    "negative_binomial": "counts (negative binomial)",
    "hurdle": "a probability of zero, and amounts above it (log-normal)",
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


def render_card(about: About, figure: str = "") -> str:
    """The page in Markdown.

    Args:
        about: The facts.
        figure: Name of the file with figures; empty for none.
    """
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
        *([f"![{FIGURES[about.task]}]({figure})", ""] if figure else []),
        *_groups(about),
        *_confusion(about),
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
        "- Intervals hold their share of rows like the training rows on average, not for every group of them: see above.",
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


def _groups(about: About) -> list[str]:
    """How well groups of rows are predicted."""
    if not about.groups:
        return []
    size = "mean width" if about.task == "regression" else "right class"
    inside = "inside their 90 % interval" if about.task == "regression" else "class in their 90 % set"
    rows = (
        f"| {_text(group.name)} | {group.num_rows:,} | {100 * group.coverage:.0f} ± {100 * group.error:.0f} % | "
        f"{significant(group.size) if about.task == 'regression' else f'{100 * group.size:.0f} %'} |"
        for group in about.groups
    )
    told = f"On {about.groups_on}; ± is one standard error. Far from 90 %, intervals are too narrow or too wide for a group."
    return [
        "## By group",
        "",
        told,
        "",
        f"| group | rows | {inside} | {size} |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _confusion(about: About) -> list[str]:
    """Rows of each class by the class that is predicted for them."""
    if not about.confusion:
        return []
    labels = [_text(label) for label in about.target_column.texts]
    heading = [
        f"| true class | {' | '.join(f'predicted {label}' for label in labels)} |",
        "| --- " * (len(labels) + 1) + "|",
    ]
    rows = (
        f"| {label} | {' | '.join(f'{count:,}' for count in own)} |"
        for label, own in zip(labels, about.confusion, strict=True)
    )
    return ["## Class by class", "", f"Rows, of {about.groups_on}.", "", *heading, *rows, ""]


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
