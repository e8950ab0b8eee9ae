"""A lock between processes, which the operating system releases when its holder ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]


class InUse(OSError):
    """Raised if another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file during the `with` block, and remove the file afterwards. The folder of the file must exist.

    The operating system releases the lock when its process ends, even if the process is killed. A file that a killed process left
    behind locks nothing. If another process or thread holds the lock, `InUse` is raised and names the process.
    """
    if fcntl is None:
        yield
        return
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 100).decode(errors="replace").strip()
            os.close(handle)
            raise InUse(f"it is in use by {holder if holder.isprintable() and holder else 'another process'}") from None
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                break
        except FileNotFoundError:
            pass  # the holder removed the file after this process opened it
        os.close(handle)
    try:
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
