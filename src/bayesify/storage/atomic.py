"""Atomic writes: each file, or each group of files, is written completely or not at all."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
NEXT_FOLDER = "next"
"""Name, after a dot, of the subfolder whose files take precedence over files of the same names in its parent."""
MAX_ATTEMPTS = 200
"""Number of attempts of a writer or reader while other processes write to the same folder."""

T = TypeVar("T")


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the file's folder. At the end of the `with` block, the temporary file replaces the file.

    A reader sees the old file or the complete new file, even after a crash, because the new file and its name are flushed to disk.
    After an error the old file stays and the temporary file is removed. Every call has its own temporary name, so several threads
    can write to one path. In the end, one of the complete files is at this path.

    Args:
        path: Path of the file; its folder must exist.

    Raises:
        ValueError: If the folder does not exist, or the path is a folder, a device or a pipe.
        OSError: If the file cannot be written, for example on a full disk; the message names the path and remedies.
    """
    path = check_file(path)
    temporary = _temporary(path)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in DISK_ERRORS:  # raised inside the `with` block, such as a broken connection
            raise
        raise OSError(
            error.errno,
            f"{path}: the file cannot be written ({error.strerror or error}); free space on its disk, make its folder "
            "writable, or give another path",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    _flush_names(path.parent)


@contextmanager
def write_together(folder: Path) -> Iterator[Path]:
    """Yield a draft folder. At the end of the `with` block, either all or none of its files move into `folder`.

    The draft is renamed to `.next` inside the folder. This single rename commits the write. The files of `.next` then move into
    the folder, one by one. `read_together` reads a file from `.next` as long as it is there. It therefore finds all old files or
    all new files, even after a crash between two moves. If an error is raised, the old files are in place; otherwise the new
    files are in place. Several writers need no lock. Each writer first moves the files that another writer has committed into the
    folder. In the end, the folder contains the files of the last writer. Other files in the folder are not touched.

    The scheme needs atomic renames, which local file systems and NFS have. If an open file cannot be replaced, as on Windows,
    the new file stays in `.next` until the next write.

    The folder is created if it does not exist. Raises `OSError` if a file cannot be written, for example on a full
    disk.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder / NEXT_FOLDER)
    draft = _temporary(folder / NEXT_FOLDER)
    try:
        draft.mkdir()
        yield draft
        _flush_names(draft)
        _decide(draft, folder)
    except OSError as error:
        words = str(error.strerror or error).replace(f"{draft}{os.sep}", f"{folder}{os.sep}")
        raise OSError(error.errno, words) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if new:
            with suppress(OSError):  # not empty, because it holds the new files or files of another process
                folder.rmdir()
    with suppress(OSError):  # the rename has already committed the new files
        _move_up(folder)
        _flush_names(folder)


def _decide(draft: Path, folder: Path) -> None:
    """Rename a draft to `.next`. If a `.next` exists already, first move its files into the folder."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            _move_up(folder)
            os.rename(draft, folder / f".{NEXT_FOLDER}")
            return
        except OSError:
            if attempt == MAX_ATTEMPTS - 1 or not (folder / f".{NEXT_FOLDER}").is_dir():
                raise
            time.sleep(0.001 * attempt)  # another writer was faster


def _move_up(folder: Path) -> None:
    """Move all files of `.next` to their places; several processes may do so at the same time."""
    decided = folder / f".{NEXT_FOLDER}"
    with suppress(FileNotFoundError):
        for name in os.listdir(decided):
            with suppress(FileNotFoundError):  # moved by another process
                os.replace(decided / name, folder / name)
        with suppress(OSError):  # removed or filled by another process
            decided.rmdir()


def read_together(folder: Path, names: Sequence[str], read: Callable[..., T]) -> T:
    """Call `read` for files that `write_together` wrote, and return its result. All these files come from the same write.

    `read` takes one path per name. It is called again if a writer changed the files in the meantime. Raises `OSError`
    if other processes never stop writing. Errors of `read` are raised too.
    """
    for _ in range(MAX_ATTEMPTS):
        before = _found(folder, names)
        try:
            result = read(*(path for path, _ in before))
        except Exception:  # libraries raise various errors for a missing file, such as safetensors' RuntimeError
            if _found(folder, names) == before:
                raise
        else:
            if _found(folder, names) == before:
                return result
    raise OSError(errno.EBUSY, f"{folder}: other processes keep writing to it; stop them, or use a copy of the folder")


def _found(folder: Path, names: Sequence[str]) -> list[tuple[Path, tuple[int, ...]]]:
    """The path of each file, and numbers that change when the file is replaced."""
    found: list[tuple[Path, tuple[int, ...]]] = []
    for name in names:
        for path in (folder / f".{NEXT_FOLDER}" / name, folder / name):
            with suppress(OSError):
                about = path.stat()
                found.append((path, (about.st_ino, about.st_mtime_ns, about.st_size)))
                break
        else:
            found.append((folder / name, ()))
    return found


def check_file(path: str | Path) -> Path:
    """Check that a file can be written to a path, and return the path. Raises `ValueError` if the path is a folder, a device or a
    pipe, or its folder does not exist."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: this path is a folder; give the path of a file, such as model.safetensors")
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path}: this path is a device or a pipe, which a file cannot replace; give the path of a file"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")
    return path


def write_file(path: str | Path, content: str | bytes) -> Path:
    """Write a string in UTF-8, or bytes, atomically (`write_atomically`). The folder is created if it does not exist.

    Returns:
        The absolute path.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def remove_leftovers(path: str | Path) -> None:
    """Remove temporary files that killed processes of this machine left next to a path; running processes keep their files."""
    path = Path(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        host, _, process = leftover.name[len(path.name) + 2 : -len(".tmp")].rpartition("-")[0].rpartition("-")
        if host == _host() and process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A unique temporary path in the same folder, in the form that `remove_leftovers` recognizes."""
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def _flush_names(folder: Path) -> None:
    """Wait until new names in a folder have reached the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _host() -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in socket.gethostname())


def _runs(process: int) -> bool:
    """Whether a process exists on this machine; true if this cannot be determined."""
    try:
        if os.name == "posix":
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
