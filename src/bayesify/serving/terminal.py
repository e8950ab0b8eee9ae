"""Parts that several commands share: safe printing, error exits, and common options."""

from importlib.util import find_spec
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from bayesify.arguments.installing import how_to_install

INTERRUPTED_EXIT_CODE = 130
"""Exit status after Ctrl-C, following the convention of shells."""
TaskName = Annotated[
    Literal["regression", "classification"] | None, typer.Option(help="Kind of target (default: detect it).")
]
Target = Annotated[str, typer.Option(help="The column to predict.")]
Ignore = Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")]
Sheet = Annotated[str, typer.Option(help="Sheet of a spreadsheet (default: the first that is not empty).")]
Encoding = Annotated[str, typer.Option(help="Encoding of a text file, such as latin-1 (default: detect it).")]
Missing = Annotated[str, typer.Option(help="Texts that stand for empty cells, separated by commas.")]


def plain(text: object) -> str:
    r"""The text, with control and hidden characters (such as direction marks) replaced by escapes such as `\x1b`."""
    shown = (sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in str(text))
    return "".join(shown)


def say(console: Console, text: object, **options: Any) -> None:
    """Print a sentence verbatim, without markup, colored numbers or control characters. `options` are passed to `Console.print`."""
    console.print(plain(text), markup=False, highlight=False, **options)


def refuse(message: str, code: int) -> NoReturn:
    """End a command with a message on the error stream and an exit status."""
    say(Console(stderr=True), message, soft_wrap=True)
    raise typer.Exit(code)


def need(command: str, *modules: str, extra: str) -> None:
    """End a command if packages that it needs are not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        refuse(f"bayesify {command} needs {', '.join(missing)}; {how_to_install(extra)}", 1)


def names_of(text: str) -> list[str]:
    """The comma-separated names in an option's text."""
    return [name.strip() for name in text.split(",") if name.strip()]
