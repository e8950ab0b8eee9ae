"""Locations of data files, and the download of missing files."""

import hashlib
import os
import shutil
import tomllib
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bayesify.running.progress import Display
from bayesify.storage.atomic import write_atomically

DATA_VARIABLE = "BAYESIFY_DATA"
"""The environment variable that names the folder of the data files."""

CACHE_VARIABLE = "BAYESIFY_CACHE"
"""The environment variable that names the folder for downloads."""

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60
"""Number of bytes that are read at a time, and seconds to wait for a server."""

MAX_BYTES = 1 << 30
"""Maximum size of a download, and of a file's unpacked arrays. The largest set, SVHN, has 310 million bytes."""

SOURCES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())
"""The public homes, sizes and checksums of all data sets."""

Arrays = dict[str, np.ndarray]
Check = Callable[[Mapping[str, np.ndarray]], None]
"""Function that raises `ValueError` if arrays do not belong to a data set."""


def cache_folder() -> Path:
    """The folder for downloads: `BAYESIFY_CACHE`, or `bayesify` in the user's cache folder."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayesify"


def obtain(
    owner: str,
    file: str,
    folder: str | Path | None = None,
    make: Callable[[Path], Arrays] | None = None,
    check: Check | None = None,
) -> tuple[Path, Arrays]:
    """Return a data file's path and arrays. The file is in a folder or the cache, or it is downloaded into the cache.

    Args:
        owner: Name of the caller, for messages.
        file: Path of the file relative to the data folder.
        folder: Folder of the file. If given, only this folder is searched, and its file is not verified. By default, the
            folder that `BAYESIFY_DATA` names is searched first, and then the cache.
        make: Function that downloads files into a given folder and returns the arrays. By default nothing is downloaded.
        check: Function that checks arrays that do not come from `folder`. Cached files that fail the check are downloaded again.

    Raises:
        FileNotFoundError: If the file is in none of the folders and cannot be downloaded; the message gives the reason.
        ValueError: If the arrays are not the expected arrays; a wrong download is not kept.
    """
    if folder is not None:
        path = Path(folder) / file
        if not path.is_file():
            raise FileNotFoundError(
                f"{owner}: {path} does not exist; put {file} there, or omit folder= and set {DATA_VARIABLE} to a folder with {file}"
            )
        return path, _read(owner, path)
    named, cache = os.environ.get(DATA_VARIABLE), cache_folder()
    if named and (Path(named) / file).is_file():
        return Path(named) / file, _read(owner, Path(named) / file, check)
    path = cache / file
    if path.is_file():
        try:
            return path, _read(owner, path, check)
        except ValueError:
            if make is None:
                raise
            path.unlink(missing_ok=True)
    absent = f"{owner}: {file} is neither in {DATA_VARIABLE} ({named or 'not set'}) nor in {cache}"
    remedy = f"set {DATA_VARIABLE} to a folder that holds {file}"
    if make is None:
        raise FileNotFoundError(f"{absent}; {remedy}, or allow the download")
    work = cache / "downloads" / Path(file).stem
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = _download(work, make, check)
        write_arrays(path, arrays)
    except OSError as error:
        if path.is_file():  # another process was faster and has removed its downloads
            return path, _read(owner, path, check)
        raise FileNotFoundError(
            f"{absent}, and could not be downloaded ({error}); {remedy}, or connect to the network and set {CACHE_VARIABLE} to a "
            "writable folder"
        ) from error
    shutil.rmtree(work, ignore_errors=True)
    return path, arrays


def _download(work: Path, make: Callable[[Path], Arrays], check: Check | None) -> Arrays:
    """Download files with `make`, and check the arrays. Files that fail the check are removed; the download is repeated once if
    files of an earlier attempt may be the cause."""
    resumed = work.is_dir()
    try:
        arrays = make(work)
        if check is not None:
            check(arrays)
    except ValueError as error:
        shutil.rmtree(work, ignore_errors=True)
        if resumed:
            return _download(work, make, check)
        raise ValueError(f"{error}; the download was removed, so call again to retry") from error
    return arrays


def _read(owner: str, path: Path, check: Check | None = None) -> Arrays:
    """The arrays of an `.npz`. Raises `ValueError` if the file is not an `.npz`, is too large, or fails the check."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"the file has {size:,} bytes when unpacked, more than the limit of {MAX_BYTES:,}")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored}
        if check is not None:
            check(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{owner}: {path}: {error}; the file is damaged or is a different file; replace it or delete it"
        ) from error
    return arrays


def fetch(
    sources: Sequence[str],
    path: Path,
    *,
    sha256: str | None = None,
    check: Callable[[Path], object] | None = None,
    progress: bool = True,
) -> Path:
    """Download a file. After an error, no partial file remains. An existing file that passes the checks is kept.

    Args:
        sources: Addresses of the same file, tried in order: `https://`, `http://` or `file://`.
        path: Path to write; its folder is created.
        sha256: Checksum of the file, in hexadecimal digits; by default it is not compared.
        check: Function that raises `ValueError` for a wrong file, such as a page that asks for a password.
        progress: Whether to show a bar on a terminal.

    Raises:
        OSError: If no address works; the message gives the error of each address.
        ValueError: If the last downloaded file fails the checks; it is not kept.
    """
    with suppress(OSError, ValueError):
        _check_file(path, sha256, check)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    wrong: str | None = None
    for source in sources:
        try:
            with write_atomically(path) as temporary:
                with temporary.open("xb") as stream:
                    _copy(source, stream, path.name, progress)
                _check_file(temporary, sha256, check)
            return path
        except ValueError as error:
            wrong = f"{source} {error}"
        except OSError as error:
            said.append(f"{source}: {getattr(error, 'reason', None) or error}")
    path.unlink(missing_ok=True)
    if wrong is not None:
        raise ValueError(wrong)
    raise OSError("; ".join(said) or f"no address for {path.name}")


def _check_file(path: Path, sha256: str | None, check: Callable[[Path], object] | None) -> None:
    """Raise `ValueError` for a wrong file, and `OSError` if there is no file."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 is not None and found != sha256:
        raise ValueError(
            f"gave a file whose sha256 is {found} instead of {sha256}; the file has changed, or was damaged in transit"
        )
    if check is not None:
        try:
            check(path)
        except ValueError as error:
            raise ValueError(f"returned the wrong file: {error}") from error


def _copy(source: str, stream: BinaryIO, title: str, progress: bool) -> None:
    """Copy the content of an address into a stream. Raises `OSError` if the content is incomplete or larger than any data set."""
    request = urllib.request.Request(source, headers={"User-Agent": "bayesify"})
    with ExitStack() as stack:
        answer = stack.enter_context(urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))
        length, got = answer.headers.get("Content-Length"), 0
        expected, columns = int(length) if length else None, ("{task.description}", "bar", "bytes", "left")
        bar = stack.enter_context(Display(*columns, show=progress, total=expected, transient=False, description=title))
        while chunk := answer.read(CHUNK_BYTES):
            stream.write(chunk)
            got += len(chunk)
            bar.update(advance=len(chunk))
            if got > MAX_BYTES:
                raise OSError(f"the download has more than {MAX_BYTES:,} bytes, but no data set is that large")
    if expected is not None and got != expected:
        raise OSError(f"the connection ended after {got} of {expected} bytes, so the file is incomplete")


def digest(array: np.ndarray) -> str:
    """sha256 of an array's entries in C order, in hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an `.npz`, replacing the file atomically."""
    with write_atomically(path) as temporary, temporary.open("xb") as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
