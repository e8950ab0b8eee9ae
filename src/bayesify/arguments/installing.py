"""Import of optional packages, and advice on how to install them."""

import re
import shlex
import warnings
from importlib import import_module, metadata
from typing import Any


def load(module: str, *, extra: str, owner: str) -> Any:
    """Import a module of an optional package. `extra` is the extra of bayesify that installs the package; `owner` is
    the caller's name in messages.

    Warnings of the package during the import are hidden, because the caller can do nothing about them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(module)
    except ImportError as error:
        raise ImportError(f"{owner}: {module.partition('.')[0]} is not installed; {how_to_install(extra)}") from error


def how_to_install(extra: str) -> str:
    """A pip command that installs the missing packages of an extra, for an error message.

    The command names the packages and their versions instead of `bayesify[extra]`. It therefore also works if bayesify was
    installed from a wheel, a checkout or a copy of the source. If all packages are installed and the import still failed, the
    command names all packages, so that pip replaces outdated versions.
    """
    packages = _packages(extra)
    if not packages:
        return f"install bayesify with its extra {extra!r}, as its README says"
    missing = [requirement for name, requirement in packages.items() if not any(metadata.distributions(name=name))]
    command = " ".join(map(shlex.quote, missing or packages.values()))
    return f"pip install {command} (bayesify's extra {extra!r})"


def _packages(extra: str) -> dict[str, str]:
    """Requirements of an extra, keyed by package name; empty if bayesify has no installation metadata."""
    try:
        requirements = metadata.requires("bayesify") or []
    except metadata.PackageNotFoundError:
        return {}
    of_extra = [
        text.partition(";")[0].strip() for text in requirements if re.search(rf"extra == ['\"]{extra}['\"]", text)
    ]
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0]: text for text in of_extra}
