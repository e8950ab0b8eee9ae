"""The engines that run jobs: processes of this machine, Dask and Ray.

Each engine implements `submit`, `wait` and `result`. Everything else is the same for all engines. Dask and Ray are not called
through joblib. joblib's backend for Dask (1.6) waits forever for a job whose worker died, and its backend for Ray returns no
result before all jobs are finished.
"""

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any, Self

from bayesify.arguments.installing import how_to_install
from bayesify.scale_out.workers import Finished, begin_worker

Call = Callable[..., Finished]
Run = Callable[[Call, Sequence[tuple[Any, ...]]], Iterator[Finished]]
"""Function that takes a call and the arguments of each job (its name first), and yields each result when it is available."""

PACKAGES_AND_EXTRAS = {"local": ("joblib", "scale"), "dask": ("distributed", "dask"), "ray": ("ray", "ray")}
"""The package that each engine needs, and the extra that installs it."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Engine(ABC):
    """Workers to which jobs can be submitted inside a `with` block. A cluster that the engine started stops at its end."""

    def __init__(self, workers: int | None, threads: int) -> None:
        self.workers, self.threads = workers, threads
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @abstractmethod
    def capacity(self) -> int:
        """Number of jobs that can run at once, at this moment."""

    @abstractmethod
    def submit(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Submit a job, and return its handle."""

    @abstractmethod
    def wait(self, handles: list[Any]) -> Any:
        """Wait until one of the jobs has ended, and return the handle of this job."""

    def result(self, handle: Any) -> Any:
        """The outcome of a job, a `Finished`. Raise an error if the job's worker died."""
        return handle.result()

    def cancel(self, handles: Iterable[Any]) -> None:
        """Cancel submitted jobs."""
        for handle in handles:
            handle.cancel()


def run_all(engine: Engine, call: Call, arguments: Sequence[tuple[Any, ...]]) -> Iterator[Finished]:
    """Run all jobs, and yield their results as they arrive. A job is submitted only when a worker is free, so a worker that dies
    loses no waiting job."""
    queue = deque(arguments)
    running: dict[Any, str] = {}
    try:
        while queue or running:
            while queue and len(running) < max(1, engine.capacity()):
                each = queue.popleft()
                running[engine.submit(call, each)] = each[0]
            handle = engine.wait(list(running))
            name = running.pop(handle)
            try:
                finished = engine.result(handle)
            except Exception as error:  # jobs catch their own errors, so this error comes from the engine
                first = str(error).strip().partition("\n")[0].partition(". ")[0]
                finished = Finished(name, reason=f"its worker died: {type(error).__name__}: {first}", lost=True)
            yield finished
    finally:
        engine.cancel(running)


class _Processes(Engine):
    """Engine that runs jobs in processes of this machine, with joblib's process pool loky.

    At the end, processes are asked to exit, which releases their resources. Only processes with an abandoned job are
    killed.
    """

    _abandoned = False

    def _executor(self) -> Any:
        """The current pool, or a new pool after a worker died."""
        from joblib.externals.loky import get_reusable_executor

        environment = dict.fromkeys(_THREAD_VARIABLES, str(self.threads))
        return get_reusable_executor(
            self.workers, timeout=600, env=environment, initializer=begin_worker, initargs=(os.getpid(),)
        )

    def capacity(self) -> int:
        return self.workers or usable_cores()

    def submit(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        return self._executor().submit(call, *arguments)

    def wait(self, handles: list[Any]) -> Any:
        return next(iter(futures.wait(handles, return_when="FIRST_COMPLETED").done))

    def cancel(self, handles: Iterable[Any]) -> None:
        """Cancel jobs that no process has begun; other jobs end with their processes when the engine is closed."""
        for handle in handles:
            self._abandoned |= not (handle.done() or handle.cancel())

    def __exit__(self, *error: Any) -> None:
        self._executor().shutdown(wait=True, kill_workers=self._abandoned)
        super().__exit__(*error)


class _Dask(Engine):
    """The cluster of the current Dask client or of the configured address; if there is none, processes of this machine."""

    def __enter__(self) -> Self:
        import dask
        from distributed import Client, LocalCluster, get_client

        try:
            self._client = get_client()
        except ValueError:
            cluster = dask.config.get("scheduler-address", None)
            if cluster is None:
                self._stack.enter_context(dask.config.set({"distributed.scheduler.allowed-failures": 0}))
                self._stack.enter_context(_quiet("distributed.nanny", "distributed.scheduler", "distributed.worker"))
                count = self.workers or usable_cores()
                cluster = LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None)
                self._stack.enter_context(cluster)
            self._client = self._stack.enter_context(Client(cluster))
        return self

    def capacity(self) -> int:
        return self.workers or sum(self._client.ncores().values())

    def submit(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        return self._client.submit(call, *arguments, pure=False)

    def wait(self, handles: list[Any]) -> Any:
        from distributed import wait

        return next(iter(wait(handles, return_when="FIRST_COMPLETED").done))


class _Ray(Engine):
    """The cluster to which Ray is connected, or the cluster of `RAY_ADDRESS`; if there is none, processes of this machine."""

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray

            if not ray.is_initialized():
                local: dict[str, Any] = {"num_cpus": self.workers or usable_cores(), "include_dashboard": False}
                own = {} if "RAY_ADDRESS" in os.environ else local
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
                self._stack.callback(ray.shutdown)
        self._ray = ray
        self._remote = ray.remote(_call).options(num_cpus=1, max_retries=0)
        return self

    def capacity(self) -> int:
        return self.workers or int(self._ray.cluster_resources().get("CPU", 1))

    def submit(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        return self._remote.remote(call, arguments)

    def wait(self, handles: list[Any]) -> Any:
        return self._ray.wait(handles, num_returns=1)[0][0]

    def result(self, handle: Any) -> Any:
        return self._ray.get(handle)

    def cancel(self, handles: Iterable[Any]) -> None:
        for handle in handles:
            self._ray.cancel(handle, force=True)


ENGINES: dict[str, type[Engine]] = {"local": _Processes, "dask": _Dask, "ray": _Ray}
"""Engines by name."""


@contextmanager
def open_engine(engine: str, workers: int | None, threads: int) -> Iterator[Run]:
    """Open an engine of `ENGINES`, and start it if necessary. At the end of the context, an engine that this function started is
    closed.

    If there is only one local worker, jobs run in this process. `threads` limits the threads of the libraries in a new
    local process.
    """
    if engine == "local" and (workers or usable_cores()) == 1:
        yield lambda call, arguments: (call(*each) for each in arguments)
        return
    package, extra = PACKAGES_AND_EXTRAS[engine]
    if find_spec(package) is None:
        advice = ", or use one worker" if engine == "local" else ""
        raise ImportError(f"engine {engine!r} needs {package}; {how_to_install(extra)}{advice}")
    with ENGINES[engine](workers, threads) as opened:
        yield lambda call, arguments: run_all(opened, call, arguments)


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _call(call: Call, arguments: tuple[Any, ...]) -> Finished:
    return call(*arguments)


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Silence messages of our own cluster about workers that it restarts."""
    before = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
