"""Where data files lie, and how a missing one is downloaded."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "BAYESIFY_DATA"
"""The environment variable that names the folder of the data files."""

CACHE = "BAYESIFY_CACHE"
"""The environment variable that names the folder for downloads."""

CHUNK = 1 << 20
SECONDS = 60
"""Bytes that are read at a time, and how long a server may be silent."""


def cache_folder() -> Path:
    """The folder for downloads: `BAYESIFY_CACHE`, else `bayesify` in the user's cache folder."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bayesify"


def obtain(
    owner: str,
    file: str,
    folder: str | Path | None = None,
    make: Callable[[Path], Mapping[str, np.ndarray]] | None = None,
) -> Path:
    """The path of a data file: in a folder, in the cache, or downloaded into the cache.

    Args:
        owner: Who asks, for messages.
        file: Name of the file, with its folder below the data folder.
        folder: The only place to look if given; else the folder that `BAYESIFY_DATA` names, then the cache.
        make: Downloads: from a folder for what it fetches to the arrays of the file. Left out, nothing is downloaded.

    Raises:
        FileNotFoundError: If the file is nowhere and cannot be downloaded, with the reason.
        ValueError: If what came is not what was expected.
    """
    if folder is not None:
        path = Path(folder) / file
        if not path.is_file():
            raise FileNotFoundError(f"{owner}: {path} does not exist; put {file} there or set {VARIABLE} to its folder")
        return path
    named = os.environ.get(VARIABLE)
    cache = cache_folder()
    for place in ([Path(named)] if named else []) + [cache]:
        if (place / file).is_file():
            return place / file
    looked = f"{VARIABLE} ({named})" if named else f"{VARIABLE} (not set)"
    remedy = f"set {VARIABLE} to a folder that holds {file}"
    if make is None:
        raise FileNotFoundError(
            f"{owner}: {file} is neither in {looked} nor in {cache}; {remedy}, or allow the download"
        )
    path = cache / file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = cache / "downloads" / Path(file).stem
        write_arrays(path, make(work))
    except OSError as error:
        if path.is_file():  # another process was quicker and has cleared its downloads away
            return path
        raise FileNotFoundError(
            f"{owner}: {file} is neither in {looked} nor in {cache}, and it could not be downloaded: {error}; {remedy}, or "
            f"connect to the network and give {CACHE} a folder that can be written"
        ) from error
    _remove(work)
    return path


def fetch(sources: Sequence[str], path: Path, *, sha256: str | None = None, progress: bool = True) -> Path:
    """Download a file, so that the path holds nothing or the whole file; one that is there already is kept.

    Args:
        sources: Addresses of the same file, tried in order: `https://`, `http://` or `file://`.
        path: Where it goes; its folder is made.
        sha256: Of the file, in hexadecimal digits; not compared if left out.
        progress: Whether to show a bar on a terminal.

    Raises:
        OSError: If no address answers, with what each said.
        ValueError: If the last file that came has another checksum.
    """
    if path.is_file() and (sha256 is None or checksum(path) == sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    wrong: str | None = None
    for source in sources:
        handle, partial = tempfile.mkstemp(prefix=path.name + ".", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                found = _copy(source, stream, path.name, progress)
            if sha256 is None or found == sha256:
                os.replace(partial, path)
                return path
            wrong = f"{source} has sha256 {found}, not {sha256}; the file has changed or was damaged on its way"
        except (OSError, ValueError) as error:
            said.append(f"{source}: {getattr(error, 'reason', None) or error}")
        finally:
            Path(partial).unlink(missing_ok=True)
    if wrong is not None:
        raise ValueError(wrong)
    raise OSError("; ".join(said) or f"no address for {path.name}")


def _copy(source: str, stream: Any, title: str, progress: bool) -> str:
    """Copy what an address holds into a stream, and give its sha256."""
    digest = hashlib.sha256()
    request = urllib.request.Request(source, headers={"User-Agent": "bayesify"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer, _Bar(title, answer, progress) as bar:
        expected, got = answer.headers.get("Content-Length"), 0
        while chunk := answer.read(CHUNK):
            stream.write(chunk)
            digest.update(chunk)
            got += len(chunk)
            bar.advance(len(chunk))
    if expected is not None and got != int(expected):
        raise OSError(f"the connection ended after {got} of {expected} bytes")
    return digest.hexdigest()


class _Bar:
    """A progress bar on a terminal; nothing elsewhere, or without `rich`."""

    def __init__(self, title: str, answer: Any, show: bool) -> None:
        self._bar: Any = None
        if not (show and sys.stderr.isatty()):
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        length = answer.headers.get("Content-Length")
        self._task = self._bar.add_task(title, total=int(length) if length else None)

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def checksum(path: Path) -> str:
    """sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(array: np.ndarray) -> str:
    """sha256 of an array's entries in C order, in hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an `.npz`, replacing the file at once."""
    handle, partial = tempfile.mkstemp(prefix=path.name + ".", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Delete a folder of downloads that are no longer needed; other processes may be doing the same."""
    with suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()
