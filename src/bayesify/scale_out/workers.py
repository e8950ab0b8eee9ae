"""The execution of a job inside a worker."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayesify.running.generators import own_generators
from bayesify.scale_out.result_files import write_result

Function = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Finished:
    """The outcome of a job: a result, or the reason for its failure. `lost` says whether its worker died."""

    name: str
    result: dict[str, Any] | None = None
    reason: str | None = None
    lost: bool = False


def work(function: Function, folder: str, threads: int, name: str, job: Any, plain: Any) -> Finished:
    """Run one job (`plain` is the job as JSON data), and write its result if the folder exists on this machine.

    If a machine of a cluster does not share the folder, the result is only returned.
    """
    here = Path(folder)
    try:
        with _settled(threads, zlib.crc32(name.encode())):
            result = function(job)
        if not isinstance(result, dict):
            raise TypeError(
                f"{getattr(function, '__qualname__', function)} returned {type(result).__name__}; return a dictionary"
            )
        result = json.loads(json.dumps(result))
    except Exception:
        return Finished(name, reason=traceback.format_exc())
    if (here / "jobs").is_dir():
        with suppress(OSError):  # the caller also writes the result, and reports errors
            write_result(here, name, plain, result)
    return Finished(name, result)


def begin_worker(parent: int) -> None:
    """Prepare a new process as a worker.

    The worker ends within a second or two of its parent, even if the parent was killed. Otherwise a leftover worker would
    continue its job next to the worker of a later call. tqdm's progress bars get a thread lock instead of a process lock, because
    Python would report the process lock as leaked when the worker is killed. Ctrl-C at a terminal reaches every process there, so
    workers ignore it and leave the decision to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ImportError):
        import_module("tqdm").tqdm.set_lock(threading.RLock())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _settled(threads: int, seed: int) -> Iterator[None]:
    """Set threads and seeds inside the block, and restore them afterwards."""
    before = torch.get_num_threads(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.set_num_threads(threads)
    try:
        with own_generators(range(torch.cuda.device_count())), _bounded_libraries(threads):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002  (for jobs that draw without their own generator)
            yield
    finally:
        torch.set_num_threads(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002


@contextmanager
def _bounded_libraries(threads: int) -> Iterator[None]:
    """Limit NumPy's and SciPy's matrix products to `threads` threads, if threadpoolctl is installed."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        yield
        return
    with threadpool_limits(threads):
        yield
