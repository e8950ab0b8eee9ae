"""Tables in Markdown, and pages with generated parts."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table from the cells of its header and of its rows."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def replaced(text: str, start: str, end: str, body: str) -> str:
    """A page in which the text between two marks is replaced."""
    before, rest = text.split(start)
    return f"{before}{start}\n\n{body}\n\n{end}{rest.split(end, 1)[1]}"
