"""Text for a terminal: names from files say what they are and do nothing."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain(text: object) -> str:
    """Text in which what a terminal obeys or hides, such as escapes and marks of direction, is written as `\\x1b` and the like."""
    shown = (sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in str(text))
    return "".join(shown)


def say(console: Console, text: object, **options: Any) -> None:
    """Print a sentence as it is: no markup, no colored numbers, no obeyed characters; options are `Console.print`'s."""
    console.print(plain(text), markup=False, highlight=False, **options)
