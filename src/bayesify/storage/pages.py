"""A page on disk, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_page(path: Path, text: str) -> Path:
    """Write a page atomically: a reader sees the old file or the new one, never half of it.

    Args:
        path: The file; its folder is made if there is none.
        text: The page.

    Returns:
        The absolute path.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
