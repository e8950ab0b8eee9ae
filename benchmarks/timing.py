"""Ratios of times measured in one run, and the record of where and how they were measured."""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify

RESULTS = Path(__file__).parent / "results"
MACHINE = "aarch64" if platform.machine() in ("aarch64", "arm64") else platform.machine()


def folder_of(results: Path, name: str, machine: str) -> Path:
    """Folder of the results. Processors other than ARM have a subfolder with their name, so that both results are kept."""
    return results / machine if name.endswith("_cpu") and machine != "aarch64" else results


def ratios(
    baseline: Callable[[], Any],
    *candidates: Callable[[], Any],
    seconds: float = 4.0,
    timer: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median over rounds of each candidate's time as a ratio to the baseline's in the same round.

    Rounds alternate between all functions, so that a slow moment of the machine affects all equally.
    """
    for _ in range(3):
        for function in (baseline, *candidates):
            function()
    found: list[list[float]] = [[] for _ in candidates]
    rounds, start = 0, time.perf_counter()
    while rounds < 5 or time.perf_counter() - start < seconds:
        base = clock(baseline, timer)
        for index, candidate in enumerate(candidates):
            found[index].append(clock(candidate, timer) / base)
        rounds += 1
    return [statistics.median(values) for values in found]


def clock(function: Callable[[], Any], timer: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, including the device's work. With `time.process_time`, only this process counts."""
    synchronize()
    start = timer()
    function()
    synchronize()
    return timer() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def adam_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A function that does one training step of a module by Adam."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return run


def elbo_step(bnn: bayesify.BayesianNetwork, x: Any, y: Tensor, num_data: int = 60_000) -> Callable[[], None]:
    """A function that does one variational step of a network by Adam."""
    return adam_step(bnn, lambda: -bnn.elbo(x, y, num_data=num_data) / num_data)


def passes(net: nn.Module, x: Tensor, count: int) -> Callable[[], None]:
    """A function that does `count` passes of a plain network."""

    @torch.no_grad()
    def run() -> None:
        for _ in range(count):
            net(x)

    return run


def small_cnn() -> nn.Module:
    """Two convolutions and a linear layer, for images [1, 28, 28]."""
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 49, 10))


def rounded(figures: Any, digits: int) -> Any:
    """Figures rounded to a number of digits after the point, also inside dictionaries."""
    if isinstance(figures, dict):
        return {key: rounded(value, digits) for key, value in figures.items()}
    return round(figures, digits) if isinstance(figures, float) else figures


def record(
    name: str, figures: dict[str, Any], *, keep: bool = False, digits: int = 15, quiet: bool = False, **facts: Any
) -> Path:
    """Write figures as JSON with date, hardware, versions and command.

    Args:
        name: Name of the file.
        figures: Figures by name.
        keep: Whether to keep other stored figures, for runs of only some rows. The file then lists these rows.
        digits: Number of digits after the point.
        quiet: Whether to print nothing, for a run that stores its results after each part.
        facts: Further facts about the run.
    """
    figures = rounded(figures, digits)
    entry = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": {
            "bayesify": bayesify.__version__,
            "revision": revision(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **facts,
        "figures": figures,
    }
    path = folder_of(RESULTS, name, MACHINE) / f"{name}.json"
    if keep and path.exists():
        entry = merged(json.loads(path.read_text()), entry)
    write(path, entry)
    for key, value in () if quiet else figures.items():
        print(f"{name}: {key} = {value}", flush=True)
    return path


def merged(before: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """A stored entry with the figures of a later run of some rows and a record of that run, without its intermediate entries."""
    facts = ("date", "command", "hardware", "versions")
    run = {key: entry[key] for key in facts if key in entry} | {"rows": sorted(entry["figures"])}
    others = [one for one in before.get("later_runs", []) if not set(one["rows"]) <= set(run["rows"])]
    return {**before, "later_runs": [*others, run], "figures": {**before["figures"], **entry["figures"]}}


def write(path: Path, entry: dict[str, Any]) -> None:
    """Write an entry, each innermost dictionary on one line."""
    path.parent.mkdir(exist_ok=True)
    innermost = re.compile(r"\{[^{}]*\}")
    path.write_text(innermost.sub(lambda part: " ".join(part[0].split()), json.dumps(entry, indent=2)) + "\n")


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else "benchmarks.run"


def revision() -> str | None:
    """The commit, with `-dirty` if files differ. BAYESIFY_REVISION gives the commit of a copy without history."""
    if "BAYESIFY_REVISION" in os.environ:
        return os.environ["BAYESIFY_REVISION"]
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        found = subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def revisions(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Number of rows by the revision with which they were measured."""
    return dict(Counter(str(row.get("revision")) for row in rows))


def hardware() -> dict[str, Any]:
    """Processor, threads and GPU of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu(), "threads": torch.get_num_threads(), "gpu": gpu}


def _cpu() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name"))
    except (OSError, StopIteration, subprocess.CalledProcessError):
        return platform.processor()
