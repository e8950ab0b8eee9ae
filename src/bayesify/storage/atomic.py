"""Atomic writes: each file, or each group of files, is written completely or not at all."""

import errno
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the file's folder. After the `with` block, the temporary file replaces the file at `path`.

    A reader sees the old file or the complete new file, even after a crash, because the new file and its name are flushed to disk.
    After an error the old file stays and the temporary file is removed. Every call has its own temporary name, so several threads
    can write to one path. After all threads have finished, the complete file of one of them is at the path.

    Args:
        path: Path of the file; its folder must exist.

    Raises:
        ValueError: If the folder does not exist, or if the path is a folder, a device or a pipe.
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
def write_together(folder: Path, last: str) -> Iterator[Path]:
    """Yield a draft folder. At the end of the `with` block, its files move into `folder`, which is created; `last` moves last.

    All files are complete before the first of them moves. If an error is raised before the first file moves, the old files stay
    in place. Every call has its own draft, so several processes can write to one folder. A reader of `last` finds the old file or
    the complete new file. Other files in the folder are not touched. Raises `OSError` if a file cannot be written.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder / last)
    draft = _temporary(folder / last)
    try:
        draft.mkdir()
        yield draft
        for name in sorted(os.listdir(draft), key=last.__eq__):
            os.replace(draft / name, folder / name)
    except OSError as error:
        words = str(error.strerror or error).replace(f"{draft}{os.sep}", f"{folder}{os.sep}")
        raise OSError(error.errno, words) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if new:
            with suppress(OSError):  # not empty, because it holds the new files or files of another process
                folder.rmdir()
    with suppress(OSError):  # the new files are already in place
        _flush_names(folder)


def check_file(path: str | Path) -> Path:
    """The path, if a file can be written to it. Otherwise `ValueError` is raised."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: this path is a folder; give the path of a file, such as model.safetensors")
    if path.exists() and not path.is_file():
        what = "this path is a device or a pipe, which a file cannot replace"
        raise ValueError(f"{path}: {what}; give the path of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist; create it first")
    return path


def write_file(path: str | Path, content: str | bytes) -> Path:
    """Write bytes, or a string in UTF-8, with `write_atomically`. The folder is created if it does not exist.

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
