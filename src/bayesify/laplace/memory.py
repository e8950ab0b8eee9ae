"""Memory budgets as users write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(size: int | str) -> int:
    """A number of bytes from an integer or from text such as `"1GiB"` or `"500 MB"`.

    Raises:
        ValueError: If it is neither, or not positive.
    """
    text = str(size).strip()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text)
    if isinstance(size, bool) or match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise ValueError(f"memory={size!r}; give a positive number of bytes, or text such as '1GiB'")
    return int(float(match[1]) * UNITS[match[2].upper()])


def in_words(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
