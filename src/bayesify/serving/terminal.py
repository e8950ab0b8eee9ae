"""What all commands say and take: text that does nothing to a terminal, refusals, and options that several share."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
TaskName = Annotated[Literal["regression", "classification"] | None, typer.Option(help="If it is not to be detected.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
Ignore = Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")]
Sheet = Annotated[str, typer.Option(help="Of a spreadsheet (default: the first that holds anything).")]
Encoding = Annotated[str, typer.Option(help="Of a text file, such as latin-1 (default: detected).")]
Missing = Annotated[str, typer.Option(help="Texts that stand for empty cells, separated by commas.")]


def plain(text: object) -> str:
    """Text in which what a terminal obeys or hides, such as escapes and marks of direction, is written as `\\x1b` and the like."""
    shown = (sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in str(text))
    return "".join(shown)


def say(console: Console, text: object, **options: Any) -> None:
    """Print a sentence as it is: no markup, no colored numbers, no obeyed characters; options are `Console.print`'s."""
    console.print(plain(text), markup=False, highlight=False, **options)


def refuse(message: str, code: int) -> NoReturn:
    """End a command with a sentence on the error stream and an exit status."""
    say(Console(stderr=True), message, soft_wrap=True)
    raise typer.Exit(code)


def need(command: str, *modules: str, extra: str = "all") -> None:
    """End a command that needs packages which are not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        refuse(f"bayesify {command} needs {', '.join(missing)}; pip install 'bayesify[{extra}]'", 1)


def names_of(text: str) -> list[str]:
    """What an option lists, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
