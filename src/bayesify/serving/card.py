"""The model card, which says what the model predicts, how well, from which columns, and what the model is not for."""

from bayesify.serving.about import About, Column
from bayesify.tables.written_numbers import shown, significant

MAX_TEXTS = 5
"""Maximum number of texts that the page lists for a column."""
METRIC_WORDS = {
    "crps": "CRPS, the absolute error of the whole predicted distribution, in the target's unit (lower is better)",
    "log_loss": "log-loss, the mean of -ln(probability given to the true class); 0 is perfect (lower is better)",
    "rmse": "typical error (root mean squared error), in the target's unit (lower is better)",
    "accuracy": "share of rows whose predicted class is right",
}
"""Descriptions of scores; `WORDS_OF_LEVEL` describes the scores that depend on a level."""
WORDS_OF_LEVEL = {
    "coverage": "share of rows whose true value is inside their {} % interval",
    "width": "mean width of the {} % intervals, in the target's unit",
    "sets": "share of rows whose true class is in their {0} % set, the fewest classes whose probabilities add up to {0} %",
    "size": "mean number of classes in the {} % sets",
}


EXPLANATIONS = {
    "regression": "The 90 % interval of a row is the range that should contain the row's true value with probability 90 %, so "
    "about 0.90 of all rows should be inside.",
    "classification": "The 90 % set of a row is the shortest list of its most probable classes whose probabilities add up to "
    "90 %, so the set should contain the true class for at least about 0.90 of all rows.",
}
"""Explanation of intervals and sets, shown once above the scores."""
FIGURES = {
    "regression": "Left: true values against predicted means. Right: share of rows inside their intervals against the stated level",
    "classification": "Share of right classes against the stated confidence",
}
"""Alternative text of the figures."""
LIKELIHOODS = {
    "heteroscedastic_gaussian": "normally distributed noise whose size depends on the row",
    "student_t": "noise with heavy tails (Student's t) whose size depends on the row",
    "categorical": "a probability for each class",
    "poisson": "a Poisson distribution of counts",
    "negative_binomial": "a negative binomial distribution of counts",
    "quantiles": "quantiles that assume no shape of the distribution",
    "hurdle": "a probability of zero and a log-normal distribution of amounts above zero",
}
TRANSFORMS = {
    "log": "the logarithm of the target",
    "log1p": "the logarithm of 1 + the target",
    "sqrt": "the square root of the target",
}
"""Descriptions of the default method's choices."""


def words_of(score: str) -> str:
    """The description of a score."""
    kind, _, level = score.rpartition("_")
    if kind in WORDS_OF_LEVEL:
        return WORDS_OF_LEVEL[kind].format(level)
    return METRIC_WORDS.get(score, score.replace("_", " "))


def render_card(about: About, figure: str = "") -> str:
    """The model card in Markdown. `figure` is the name of a file with figures, or empty if there is none."""
    target = about.target_column
    lines = [
        f"# {_text(about.target)}, predicted from {_text(about.table)}",
        "",
        f"A {about.task} model by bayesify {about.version}: {_method(about)}. It was trained on {about.num_rows:,} rows "
        f"(fingerprint `{about.fingerprint}`) with the random seed {about.seed}.",
        "",
        f"The target {_holds(target)}.",
        "",
        "## How well it predicts",
        "",
        f"Measured on {about.scored_on}. {EXPLANATIONS[about.task]}",
        "",
        "| score | value |",
        "| --- | --- |",
        *(f"| {words_of(name)} | {significant(value)} |" for name, value in about.scores.items()),
        "",
        *([f"![{FIGURES[about.task]}]({figure})", ""] if figure else []),
        *_groups(about),
        *_confusion(about),
        "## Columns",
        "",
        "| column | kind | holds | empty cells |",
        "| --- | --- | --- | --- |",
        *(
            f"| {_text(column.name)} | {column.kind} | {_range(column)} | {column.num_missing or ''} |"
            for column in about.columns
        ),
        "",
        *(f"- {_text(note)}" for note in about.remarks),
        "",
        "## What the model is not for",
        "",
        "- Rows unlike the training rows: rows with values outside the ranges above or with texts that are not listed, "
        "or rows from another place or time. Predictions mark such rows as `unusual`, but a row without this mark may "
        "still be unusual.",
        "- Cause and effect: the model knows which values occur together, but not what happens if you change a value.",
        "- Guarantees for each group: intervals contain their share of rows on average over rows like the training rows, "
        "but not necessarily in every group.",
        "- Decisions about people without a person who is accountable for them.",
        "",
        "## Use",
        "",
        "    bayesify predict THIS_FOLDER new.csv",
        "",
        f"`new.csv` needs the columns above but not {_text(about.target)}. This folder contains no programs.",
        "",
    ]
    return "\n".join(lines)


def _groups(about: About) -> list[str]:
    if not about.groups:
        return []
    numbers = about.task == "regression"
    size, inside, low, high = "mean width", "inside their 90 % interval", "intervals are too narrow", "wide"
    if not numbers:
        size, inside = "share with the right class", "with the true class in their 90 % set"
        low, high = "sets are too small", "large"
    rows = (
        f"| {_text(group.name)} | {group.num_rows:,} | {100 * group.coverage:.0f} ± {100 * group.error:.0f} % | "
        f"{significant(group.size) if numbers else f'{100 * group.size:.0f} %'} |"
        for group in about.groups
    )
    told = (
        f"Measured on {about.groups_on}. The number after ± is one standard error: chance alone often moves the share by "
        f"this much. If the share in a group is far below 90 %, its {low}; far above 90 %, they are too {high}."
    )
    heading = [f"| group | rows | {inside} | {size} |", "| --- | --- | --- | --- |"]
    return ["## By group", "", told, "", *heading, *rows, ""]


def _confusion(about: About) -> list[str]:
    if not about.confusion:
        return []
    labels = [_text(label) for label in about.target_column.texts]
    predicted = " | ".join(f"predicted {label}" for label in labels)
    heading = [f"| true class | {predicted} |", "| --- " * (len(labels) + 1) + "|"]
    rows = (
        f"| {label} | {' | '.join(f'{count:,}' for count in own)} |"
        for label, own in zip(labels, about.confusion, strict=True)
    )
    return ["## Class by class", "", f"Number of rows, counted on {about.groups_on}.", "", *heading, *rows, ""]


def _method(about: About) -> str:
    choices = about.choices
    if choices.get("method") != "auto":
        return f"method {choices.get('method')}"
    likelihood, transform = str(choices.get("likelihood", "")), str(choices.get("transform", "none"))
    noise = LIKELIHOODS.get(likelihood, f"a {likelihood.replace('_', ' ')} likelihood")
    of = f" for {TRANSFORMS.get(transform, transform)}" if transform != "none" else ""
    kind, why = "network", ""
    if not choices.get("hidden", True) and choices.get("categories") != "nothing":
        kind, why = "linear model", ", because they predicted held-out rows better than networks"
    return (
        f"an ensemble of {choices.get('members')} {kind}s{why}, whose predictions are averaged,{of} with {noise}; each {kind} "
        "held out some rows to decide when to stop training"
    )


def _holds(column: Column) -> str:
    if column.kind == "text":
        texts = ", ".join(_text(text) for text in column.texts)
        more = ", ..." if column.num_different > len(column.texts) else ""
        return f"has {column.num_different} classes: {texts}{more}"
    return f"lies between {shown(column.low)} and {shown(column.high)}"


def _range(column: Column) -> str:
    if column.kind == "text":
        texts = ", ".join(_text(text) for text in column.texts[:MAX_TEXTS])
        return f"{column.num_different} different texts: {texts}{', ...' if column.num_different > MAX_TEXTS else ''}"
    return "no values" if column.low is None else f"{shown(column.low)} to {shown(column.high)}"


def _text(text: str) -> str:
    """A name or cell as plain Markdown text on one line."""
    flat = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]()#+!|<>~" else sign for sign in flat)
