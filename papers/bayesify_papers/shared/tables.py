"""Tables in plain text, for terminals and logs alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bayesify_papers.shared.scores import standard_error


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Columns aligned by spaces, the first to the left and the others to the right.

    Args:
        header: Names of the columns.
        rows: Cells; every row has as many as the header.
        title: A line above.
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(([title] if title else []) + text)


def number(value: float | None, digits: int = 3) -> str:
    """A number with a number of digits after the point; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """The mean of several runs with its standard error in brackets; a dash for no run."""
    return f"{statistics.fmean(values):.{digits}f} ({number(standard_error(values), digits)})" if values else "-"
