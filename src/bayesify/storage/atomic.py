"""Files that are whole or not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """A temporary path beside a file, which takes the file's place at the end of the `with` block.

    A reader sees the old file or the whole new one, also after a crash: the new file and its name are flushed to disk. After an
    error the old file stays and nothing is left behind.

    Args:
        path: The file; its folder exists.

    Raises:
        OSError: If it cannot be written, as on a full disk.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name has to reach the disk as well
        finally:
            os.close(folder)


def write_file(path: str | Path, content: str | bytes) -> Path:
    """Write a text in UTF-8, or bytes, atomically (`write_atomically`); the folder is made if there is none.

    Returns:
        The absolute path.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
