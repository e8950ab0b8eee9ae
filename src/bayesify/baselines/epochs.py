"""Passes over a loader that any baseline trains by: seeded, with a progress bar, stored after each epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bayesify.storage import tensor_files
from bayesify.training.batches import Batch, BatchReader, check_repeatable, count_batches, parse_batch
from bayesify.training.history import History
from bayesify.training.progress import ProgressBar
from bayesify.training.random_streams import DataStream, derive_seed, seeded_globals

Step = Callable[[Batch, torch.Generator, float], dict[str, float]]
"""From a batch, the epoch's random numbers and the share of the run that is done to numbers of the step, `nll` among them."""


def run_epochs(
    owner: str,
    step: Step,
    loader: Iterable[Any],
    *,
    epochs: int,
    device: torch.device,
    get_state: Callable[[], Any],
    set_state: Callable[[Any], None],
    after_epoch: Callable[[], dict[str, float]] | None = None,
    seed: int | None = None,
    read_batch: BatchReader | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> History:
    """Run a step over every batch of a loader, epoch by epoch.

    Every epoch draws its random numbers from streams of its own, so that a run that continues from a checkpoint gives the
    result of one that was not interrupted. torch's, NumPy's and Python's global generators are left as they were.

    Args:
        owner: Whose training it is, for messages and for the checkpoint.
        step: What is done with a batch.
        loader: Iterable of batches that starts anew each epoch; see `bayesify.training.batches.parse_batch`.
        epochs: Passes over the data.
        device: Where batches go.
        get_state: All that the steps change, as nested data with tensors.
        set_state: Its inverse.
        after_epoch: Called after each epoch; returns further numbers of it.
        seed: Of everything random; taken from torch's global generator if left out.
        read_batch: A function from what the loader yields to inputs and targets.
        checkpoint: File in which the run is stored after each epoch; a run whose file exists continues.
        progress: Whether to show a progress bar on the terminal.

    Returns:
        One row per epoch: `epoch`, the means of what the steps return, what `after_epoch` returns, and `seconds`.

    Raises:
        ValueError: If `epochs` is below 1, the loader yields nothing, or the checkpoint is of another run.
        TypeError: If the loader cannot be iterated again.
    """
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise ValueError(f"{owner}: epochs={epochs}; give an integer of at least 1")
    check_repeatable(loader)
    path = Path(checkpoint) if checkpoint is not None else None
    history = History()
    if path is not None and path.exists():
        seed, rows, state = _read(owner, path, seed, epochs)
        set_state(state)
        history.extend(rows)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    batches = count_batches(loader)
    with ProgressBar(progress, epochs, batches) as bar:
        for epoch in range(len(history) + 1, epochs + 1):
            row = _epoch(owner, step, loader, epoch, epochs, batches, seed, device, read_batch, bar)
            if after_epoch is not None:
                row |= after_epoch()
            history.append({"kl": float("nan"), **row})
            bar.epoch(history[-1])
            if path is not None:
                _write(owner, path, seed, list(history), get_state())
    return history


def _epoch(
    owner: str,
    step: Step,
    loader: Iterable[Any],
    epoch: int,
    epochs: int,
    batches: int | None,
    seed: int,
    device: torch.device,
    reader: BatchReader | None,
    bar: ProgressBar,
) -> dict[str, Any]:
    start, totals, examples, index = time.perf_counter(), {}, 0, 0
    totals = dict[str, float]()
    stream = DataStream(derive_seed(seed, owner, "data", epoch))
    generator = torch.Generator().manual_seed(derive_seed(seed, owner, "draws", epoch))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(seeded_globals(derive_seed(seed, owner, "globals", epoch)))
        torch.manual_seed(derive_seed(seed, owner, "network", epoch))
        for index, item in enumerate(stream.iterate(loader), 1):
            try:
                data = parse_batch(item, reader).to(device)
                share = (epoch - 1 + (index - 1) / batches if batches else epoch - 1) / epochs
                numbers = step(data, generator, share)
            except (ValueError, TypeError) as error:
                raise type(error)(f"epoch {epoch}, batch {index}: {error}") from error
            for key, value in numbers.items():
                totals[key] = totals.get(key, 0.0) + len(data) * value
            examples += len(data)
            bar.step(epoch, index, numbers["nll"], numbers.get("kl", float("nan")))
    if index == 0:
        raise ValueError(f"{owner}: the loader yields no batch; give a loader over at least one example")
    means = {key: value / examples for key, value in totals.items()}
    return {"epoch": epoch, **means, "seconds": time.perf_counter() - start}


def _write(owner: str, path: Path, seed: int, rows: list[dict[str, Any]], state: Any) -> None:
    packed, tensors = tensor_files.pack(state)
    tensor_files.write(path, "baseline", {"owner": owner, "seed": seed, "rows": rows, "state": packed}, tensors)


def _read(owner: str, path: Path, seed: int | None, epochs: int) -> tuple[int, list[dict[str, Any]], Any]:
    header, tensors = tensor_files.read(path, "baseline")
    if header["owner"] != owner:
        raise ValueError(f"{path}: holds a run of {header['owner']}, not of {owner}; give another path")
    if seed is not None and seed != header["seed"]:
        raise ValueError(f"{path}: holds a run with seed {header['seed']}, not {seed}; give another path")
    if len(header["rows"]) > epochs:
        raise ValueError(f"{path}: holds {len(header['rows'])} epochs, more than epochs={epochs}; give another path")
    return header["seed"], header["rows"], tensor_files.unpack(header["state"], tensors)
