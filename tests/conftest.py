from __future__ import annotations

import copyreg
import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads do not survive a fork, and tests run in parallel anyway


def pytest_configure(config: pytest.Config) -> None:
    """Ignore torch's warning that a projected LSTM takes its slower path, which is no fault of a test.

    Torch is set up only in processes that run tests. The process that distributes tests to workers does not load torch.
    Ctrl-C works in tests even if the run was started with the signal ignored, as shells do for background jobs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("filterwarnings", "ignore:LSTM with projections is not supported with oneDNN")
    # Without this cache, copies of modules would search for each OrderedDict again, 3 % of the time of tests that copy networks.
    copyreg._slotnames = cache(copyreg._slotnames)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)
        # With an accelerator, it seeds the accelerator too. Without one, it would still record the call stack, 1 ms per call.
        if not torch.accelerator.is_available():
            torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
        torch.utils.data.TensorDataset.__getitems__ = (
            rows_at_once  # fetching rows one by one takes a third of the time of small steps
        )


def rows_at_once(dataset: Any, places: list[int]) -> list[Any]:
    """The rows of a batch, fetched at once if the data set allows it, otherwise one by one."""
    import torch

    if type(dataset) is not torch.utils.data.TensorDataset:
        return [dataset[place] for place in places]
    chosen = torch.tensor(places)
    return list(zip(*(tensor[chosen].unbind() for tensor in dataset.tensors), strict=True))


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Start every test from the same global seed, and restore the global generator after it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(autouse=True)
def settings_left_alone() -> Iterator[None]:
    """Assert that a test restores torch's settings, which would change the results of later tests in the process."""
    before = torch_settings()
    yield
    assert torch_settings() == before, "the test changed a setting of torch; set it back in a `finally`"


def torch_settings() -> dict[str, object]:
    """Settings of the process that change results."""
    import torch

    backends = torch.backends
    return {
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "short products": [
            part.fp32_precision in ("tf32", "bf16") for part in (backends, backends.cuda.matmul, backends.cudnn.conv)
        ]
        if hasattr(backends, "fp32_precision")
        else torch.get_float32_matmul_precision(),  # torch before 2.9
    }


@pytest.fixture
def add_method(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """A function that adds a method to the list for one test."""
    from bayesify.methods import METHODS

    def add(method: Any) -> Any:
        monkeypatch.setitem(METHODS, method.name, method)
        return method

    return add


@pytest.fixture
def one_round() -> Iterator[None]:
    """Estimate the noise by one training run instead of five to ten, for tests that compare results and do not judge them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bayesify.sklearn.settling.MAX_ROUNDS", 1)
        patch.setattr("bayesify.sklearn.settling.DOUBTFUL_LEVERAGE", 1.0)
        yield


@pytest.fixture
def few_kept_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `fit` keep only eight draws of networks with BatchNorm, because their statistics take longer than a test's few steps."""
    monkeypatch.setattr("bayesify.training.batch_statistics.DEFAULT_NUM_DRAWS", 8)


@pytest.fixture
def garbage_left_alone() -> Iterator[None]:
    """Disable garbage collection in tests that parse the package, because it takes longer than the parsing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def operators_looked_up_once() -> Iterator[None]:
    """Share the exporter's registry of operators between exports to ONNX, because making it takes a second per file."""
    registry = pytest.importorskip("torch.onnx._internal.exporter._registration").ONNXRegistry
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "from_torchlib", staticmethod(cache(registry.from_torchlib)))
        yield


def case_numbers(item: pytest.Item, seen: dict[Any, list[tuple[int, ...]]]) -> Iterator[int]:
    """Index of a case's value in each of its parametrizations. `seen` has the values of earlier cases."""
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0] if isinstance(marker.args[0], str) else ",".join(marker.args[0])
        value = tuple(id(item.callspec.params[name.strip()]) for name in names.split(","))  # type: ignore[attr-defined]
        known = seen.setdefault((item.parent, item.originalname, names), [])  # type: ignore[attr-defined]
        if value not in known:
            known.append(value)
        yield known.index(value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that a test is thinned by as slow. The rest still covers each value of each parameter.

    Exports to ONNX come first, so that one worker loads the exporter, which takes seconds.
    """
    seen: dict[Any, list[tuple[int, ...]]] = {}
    for item in items:
        thin = item.get_closest_marker("thin")
        if thin is not None and sum(case_numbers(item, seen)) % thin.args[0]:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: "operators_looked_up_once" not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze collected modules and tests, because searching them for garbage takes a fifth of the collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 20, 20)  # garbage collection at the usual rate takes 3 % of the tests' time
