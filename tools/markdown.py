"""Tables of Markdown, and pages with parts that programs write."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table from the cells of its header and of its rows."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def replaced(text: str, start: str, end: str, body: str) -> str:
    """A page with what lies between two marks replaced."""
    before, rest = text.split(start)
    return f"{before}{start}\n\n{body}\n\n{end}{rest.split(end, 1)[1]}"
