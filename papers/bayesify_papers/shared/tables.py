"""Tables in plain text, for terminals and logs alike."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Columns aligned by spaces. The first column is aligned left, the others right.

    Args:
        header: Names of the columns.
        rows: Cells of each row, as many as the header has.
        title: Line above the table.
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
    """A number with `digits` digits after the point; a dash for `None`."""
    return "-" if value is None else f"{value:.{digits}f}"


def brief(value: float | None) -> str:
    """A number with about four significant digits; a dash for `None`."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def with_spread(value: float | None, spread: float | None) -> str:
    """A number followed by its spread in parentheses."""
    return brief(value) + ("" if spread is None or value is None else f" ({brief(spread)})")
