"""Files that are whole or not there."""

from __future__ import annotations

import errno
import glob
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """A temporary path beside a file, which takes the file's place at the end of the `with` block.

    A reader sees the old file or the whole new one, also after a crash: the new file and its name are flushed to disk. After an
    error the old file stays and nothing is left behind. The temporary name is this thread's own, so that several can write to one
    path: one of the whole files stays.

    Args:
        path: The file; its folder exists.

    Raises:
        ValueError: If it does not, or the path is a folder.
        OSError: If it cannot be written, as on a full disk, with the path and what may help.
    """
    path = check_file(path)
    temporary = path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in DISK_ERRORS:  # such as a broken connection to where the content comes from
            raise
        raise OSError(
            error.errno,
            f"{path}: cannot be written ({error.strerror or error}); free space on its disk, make its folder writable, or give "
            "another path",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name has to reach the disk as well
        finally:
            os.close(folder)


def check_file(path: str | Path) -> Path:
    """A path that a file can be written to.

    Raises:
        ValueError: If it is a folder, or its folder does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the path of a file, such as model.safetensors")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
    return path


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


def remove_leftovers(path: str | Path) -> None:
    """Remove what killed processes of this machine left of unfinished writes to a path; those that still run keep theirs."""
    path = Path(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        host, _, process = leftover.name[len(path.name) + 2 : -len(".tmp")].rpartition("-")[0].rpartition("-")
        if host == _host() and process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)


def _host() -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in socket.gethostname())


def _runs(process: int) -> bool:
    """Whether a process of this machine exists; yes where that cannot be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
