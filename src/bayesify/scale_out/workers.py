"""The execution of a job inside a worker."""

import json
import os
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bayesify.running.generators import own_generators
from bayesify.running.modes import torch_threads
from bayesify.scale_out.result_files import write_result
from bayesify.training.random_streams import seeded_globals

Function = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Finished:
    """The outcome of a job: a result, or the reason for its failure. `lost` says whether the job's worker died."""

    name: str
    result: dict[str, Any] | None = None
    reason: str | None = None
    lost: bool = False


def work(function: Function, folder: str, threads: int, name: str, job: Any, plain: Any) -> Finished:
    """Run `job`, and write its result if the folder exists on this machine. `plain` is the job as JSON data.

    If a machine of a cluster does not share the folder, the result is only returned.
    """
    here, seed = Path(folder), zlib.crc32(name.encode())
    generators = own_generators(range(torch.cuda.device_count()), seed=seed)
    limits = import_module("threadpoolctl").threadpool_limits if find_spec("threadpoolctl") else nullcontext
    libraries = limits(threads)  # of NumPy's and SciPy's matrix products
    try:
        with torch_threads(threads), libraries, generators, seeded_globals(seed):
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
