"""Files that are whole or not there, one by one or several together."""

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
NEXT = "next"
"""Name, after a dot, of the folder whose files count before those of the same names next to it."""
MAX_ATTEMPTS = 200
"""Attempts of a writer or reader while others write to the same folder."""

T = TypeVar("T")


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """A temporary path beside a file, which takes the file's place at the end of the `with` block.

    A reader sees the old file or the whole new one, also after a crash: the new file and its name are flushed to disk. After an
    error the old file stays and nothing is left behind. The temporary name is this thread's own, so that several can write to one
    path: one of the whole files stays.

    Args:
        path: The file; its folder exists.

    Raises:
        ValueError: If it does not, or the path is a folder, a device or a pipe.
        OSError: If it cannot be written, as on a full disk, with the path and what may help.
    """
    path = check_file(path)
    temporary = _temporary(path)
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
    _flush_names(path.parent)


@contextmanager
def write_together(folder: Path) -> Iterator[Path]:
    """A draft folder whose files take their places in a folder at the end of the `with` block, all of them or none.

    The draft is renamed to `.next` inside the folder. That one step decides; then the files of `.next` move up, one by one.
    `read_together` takes a file from `.next` as long as it is there, so that it finds all old files or all new ones, also after a
    crash between two moves. An error means that the old files are still there, and no error that the new ones are. Several
    writers need no lock: each first moves up what another one has decided, and the last one's files stay. Other files of the
    folder are left alone.

    This needs renames that are atomic, which local file systems and NFS have. Where a file that is open cannot be replaced, as on
    Windows, it stays in `.next` until the next write.

    Args:
        folder: The folder, which is made if there is none.

    Raises:
        OSError: If a file cannot be written, as on a full disk.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder / NEXT)
    draft = _temporary(folder / NEXT)
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
            with suppress(OSError):  # it holds the new files, or those of another process
                folder.rmdir()
    with suppress(OSError):  # the new files count already
        _move_up(folder)
        _flush_names(folder)


def _decide(draft: Path, folder: Path) -> None:
    """Rename a draft to `.next`, once the files of a `.next` that is there have moved up."""
    for attempt in range(MAX_ATTEMPTS):
        try:
            _move_up(folder)
            os.rename(draft, folder / f".{NEXT}")
            return
        except OSError:
            if attempt == MAX_ATTEMPTS - 1 or not (folder / f".{NEXT}").is_dir():
                raise
            time.sleep(0.001 * attempt)  # another writer was faster


def _move_up(folder: Path) -> None:
    """Move all files of `.next` to their places; several processes may do so at a time."""
    decided = folder / f".{NEXT}"
    with suppress(FileNotFoundError):
        for name in os.listdir(decided):
            with suppress(FileNotFoundError):  # moved by another process
                os.replace(decided / name, folder / name)
        with suppress(OSError):  # gone, or full again
            decided.rmdir()


def read_together(folder: Path, names: Sequence[str], read: Callable[..., T]) -> T:
    """What `read` makes of the paths of files that `write_together` wrote, all of one write.

    Args:
        folder: The folder.
        names: Names of the files.
        read: A function of one path per name, which is called again where a writer came in between.

    Raises:
        OSError: If other processes write all the time; and what `read` raises.
    """
    for _ in range(MAX_ATTEMPTS):
        before = _found(folder, names)
        try:
            result = read(*(path for path, _ in before))
        except Exception:  # whatever a library raises for a file that is gone, such as safetensors' RuntimeError
            if _found(folder, names) == before:
                raise
        else:
            if _found(folder, names) == before:
                return result
    raise OSError(errno.EBUSY, f"{folder}: other processes write to it all the time; stop them, or use a copy")


def _found(folder: Path, names: Sequence[str]) -> list[tuple[Path, tuple[int, ...]]]:
    """The path of each file, and numbers that differ once it is another file."""
    found: list[tuple[Path, tuple[int, ...]]] = []
    for name in names:
        for path in (folder / f".{NEXT}" / name, folder / name):
            with suppress(OSError):
                about = path.stat()
                found.append((path, (about.st_ino, about.st_mtime_ns, about.st_size)))
                break
        else:
            found.append((folder / name, ()))
    return found


def check_file(path: str | Path) -> Path:
    """A path that a file can be written to.

    Raises:
        ValueError: If it is a folder, a device or a pipe, or its folder does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the path of a file, such as model.safetensors")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is a device or a pipe, which a file cannot replace; give the path of a file")
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
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A name next to a path that nobody else uses, and that `remove_leftovers` knows."""
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
