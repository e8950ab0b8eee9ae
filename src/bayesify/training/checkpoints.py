"""Checkpoint of a training run: everything that is needed to continue the run to a bit-identical result."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesify.arguments.checks import checked
from bayesify.maths.value_checks import find_not_finite
from bayesify.running.generators import own_generators
from bayesify.storage import tensor_files
from bayesify.training.arguments import Position
from bayesify.training.random_streams import loader_generators_kept, seeded_globals
from bayesify.version import __version__

FINGERPRINT_ROWS = 8
"""Number of rows in the fingerprint, including the first and the last row."""
OPTIONAL_ENTRIES = {"batch_size", "learning_rate", "betas", "momentum", "weight_decay"}  # see `describe`


@checked
@dataclass(frozen=True)
class Checkpoint:
    """The state of a run of `fit` between two steps.

    Args:
        settings: Settings, which must be the same in a continued run.
        data: Fingerprints of the data; see `data_fingerprint`.
        position: Epoch, batch and running sums.
        history: Rows of the finished epochs.
        model: State of the model; see `model_state`.
        best: State of the model at the best epoch so far, or `None`.
        steps: State of the optimizer, the scheduler and a method's own update.
        draws: States of the generators that draw the weights, one for each process.
        network: States of the global generators, one for each process.
        observed: Observations for the findings; see `Watch`.
        shuffles: State of the loader's own generators at the start of the epoch.
    """

    settings: dict[str, Any]
    data: list[str]
    position: dict[str, Any]
    history: list[dict[str, Any]]
    model: dict[str, Any]
    best: dict[str, Any] | None
    steps: dict[str, Any]
    draws: list[Tensor]
    network: list[Tensor]
    observed: dict[str, Any]
    shuffles: list[Tensor]

    def write(self, path: Path) -> None:
        """Write the checkpoint atomically, unless `steps` holds a non-finite number. The caller must check for non-finite
        parameters."""
        state = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        packed, tensors = tensor_files.pack(state, "run")
        name = find_not_finite((name, tensor) for name, tensor in tensors.items() if name.startswith("run.steps."))
        if name is not None:
            raise ValueError(
                f"{path}: {name} is not finite and was not stored; lower the learning rate, or clip gradients"
            )
        header = {"library_version": __version__, "run": packed}
        tensor_files.write(path, "checkpoint", header, tensors)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a checkpoint from a file.

        Raises:
            ValueError: If the file is truncated or altered, is not a checkpoint, has another version, or contains non-finite
                numbers.
        """
        header, tensors = tensor_files.read(path, "checkpoint")
        with altered(path):
            state = dict(tensor_files.unpack(header.get("run", {}), tensors))
        expected = {entry.name for entry in fields(Checkpoint)}
        if state.keys() != expected:
            odd = ", ".join(sorted(map(str, state.keys() ^ expected)))
            raise ValueError(
                f"{path}: the checkpoint was written by bayesify {header.get('library_version')}, and version "
                f"{__version__} cannot read it ({odd}); continue with the version that wrote it, or start again with "
                "Checkpointing(path, resume=False)"
            )
        with altered(path):
            return cls(**state)

    def check_fits(self, path: Path, settings: dict[str, Any], data: list[str], module: nn.Module, epochs: int) -> None:
        """Raise `ValueError` if this checkpoint belongs to another network, has other settings, or cannot be continued.

        `settings` and `data` describe the run that would continue this checkpoint, and `epochs` includes the MAP phase. Entries
        in `OPTIONAL_ENTRIES` are compared only if both runs have them.
        """
        with altered(path):
            position = self.place()
            ours, theirs = _shapes(model_state(module)), _shapes(self.model)
        if ours != theirs:
            place = next(name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name))
            raise ValueError(
                f"{path}: the checkpoint belongs to another network ({place} is {theirs.get(place, 'missing')} in the "
                f"checkpoint and {ours.get(place, 'missing')} in this network); give another path, or overwrite the "
                "file with Checkpointing(path, resume=False)"
            )
        for key in dict.fromkeys((*self.settings, *settings)):
            if (key in settings) != (key in self.settings) and key.split(" ")[0] in OPTIONAL_ENTRIES:
                continue
            before, now = self.settings.get(key), settings.get(key)
            if before != now:
                raise ValueError(
                    f"{path}: the checkpoint was written with {key[:100]}={repr(before)[:200]}, but this run has "
                    f"{repr(now)[:200]}; use the same value, or Checkpointing(path, resume=False) to start again"
                )
        # Differences in fewer than half of the rows count as corrections of the same data.
        if len(self.data) == len(data) > 0 and 2 * sum(map(str.__ne__, self.data, data)) >= len(data):
            raise ValueError(
                f"{path}: the checkpoint belongs to a run on different data (some rows differ); give the same data, "
                "or Checkpointing(path, resume=False) to start again"
            )
        stored = [(name, self.model[name]) for name, _ in module.named_parameters()]
        name = find_not_finite(stored + list(tensor_files.pack(self.steps, "the state of the optimizer")[1].items()))
        if name is not None:
            raise ValueError(
                f"{path}: {name} is not finite; use an earlier copy of the file, or start again with "
                "Checkpointing(path, resume=False)"
            )
        if position.epoch + (position.batches > 0) > epochs:
            part = " and part of the next" if position.batches else ""
            raise ValueError(
                f"{path}: the checkpoint holds {position.epoch} epochs{part}, but this run has {epochs} (epochs= and "
                "map_epochs= together); give at least as many epochs, or start again with Checkpointing(path, "
                "resume=False)"
            )

    def place(self) -> Position:
        """Position in the run. Impossible entries raise an error, because an edited file can have a valid checksum."""
        if self.position.keys() != Position.__dataclass_fields__.keys() or len(self.position["sums"]) != 5:
            raise ValueError("the checkpoint does not say as expected how far the run had come")
        if self.position["best"] is not None:
            float(self.position["best"])
        return Position(**self.position)


@contextmanager
def altered(path: Path | None) -> Iterator[None]:
    """Turn any error in reading a checkpoint into an error that says that the checkpoint was altered."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise ValueError(
            f"{path}: the checkpoint was altered ({reason[:200]}); restore the file from an intact copy, or start "
            "again with Checkpointing(path, resume=False)"
        ) from error


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise `ValueError` if the state belongs to another optimizer, because the next step would fail."""
    ours, theirs = optimizer.state_dict()["param_groups"], state["param_groups"]
    if [group["params"] for group in ours] != [group["params"] for group in theirs]:
        raise ValueError("the optimizer's parameter groups differ from those in the checkpoint")
    for mine, other in zip(ours, theirs, strict=True):
        for key in mine.keys() | (other.keys() - {"initial_lr"}):
            if key not in mine or key not in other or _kind(mine[key]) != _kind(other[key]):
                raise ValueError(
                    f"{key} is {other.get(key)!r} in the checkpoint's optimizer, but {mine.get(key)!r} in this run"
                )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    types = {
        index: tuple(sorted((key, type(value).__name__) for key, value in entry.items()))
        for index, entry in state["state"].items()
    }
    kinds = [{types[index] for index in group["params"] if index in types} for group in ours]
    if max(map(len, kinds)) > 1 or not state["state"].keys() <= set(range(len(parameters))):
        raise ValueError("the optimizer's state in the checkpoint has different entries for different parameters")
    for index, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape not in (torch.Size(), parameters[index].shape):
                raise ValueError(
                    f"{key!r} in the checkpoint's optimizer has shape {tuple(value.shape)}, but its parameter has shape "
                    f"{tuple(parameters[index].shape)}"
                )


def _kind(value: Any) -> Any:
    """The type of an optimizer's setting, for comparisons. All numbers have one type, and flags and `None` have another."""
    if value is None or isinstance(value, bool):
        return bool
    if isinstance(value, (list, tuple)):
        return [_kind(entry) for entry in value]
    return float if isinstance(value, (int, float, Tensor)) else type(value)


def _shapes(model: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in model.items()
    }


def model_state(module: nn.Module) -> dict[str, Any]:
    """A module's `state_dict`, with the non-persistent buffers."""
    state = dict(module.state_dict())
    for name, buffer in module.named_buffers():
        state.setdefault(name, buffer.detach())
    return state


@torch.no_grad()
def set_model_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Inverse of `model_state`."""
    known = set(module.state_dict())
    module.load_state_dict({name: value for name, value in state.items() if name in known})
    for name, buffer in module.named_buffers():
        if name not in known:
            buffer.copy_(state[name])


# -- fingerprints: a few rows that show whether a continued run was given other data of the same size ------------------


def data_fingerprint(loader: Any) -> list[str]:
    """Short hashes of a few rows from a loader's data.

    A row is an entry of the dataset or, for a list of batches, a batch. If the data cannot be indexed, the first batch is the
    only row. The global generators and the loader's generators are restored. The fingerprint is empty if the rows differ when
    they are read twice, for example because random transforms have their own generators.
    """
    rows: Any = loader if isinstance(loader, Sequence) else getattr(loader, "dataset", None)
    indexed = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")

    def look(place: int) -> Any:
        return rows[place] if indexed else next(iter(loader))

    try:
        last, parts = (len(rows) - 1 if indexed else 0), FINGERPRINT_ROWS - 1
        places = sorted({round(place * last / parts) for place in range(FINGERPRINT_ROWS)})
        first, second = ([_seen(loader, look, place) for place in places] for _ in range(2))
    except Exception:  # training will report problems of the data, with epoch and batch
        return []
    return first if first == second else []


def _seen(loader: Any, look: Callable[[int], Any], place: int) -> str:
    with loader_generators_kept(loader), own_generators(), seeded_globals(0):
        torch.manual_seed(0)
        found = look(place)
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(found):
        digest.update(_bytes(leaf))
    return digest.hexdigest()[:16]


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous()
        content: bytes = leaf.reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype} {tuple(leaf.shape)}".encode() + content
    if isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "tobytes"):
        return bytes(leaf.tobytes())
    return repr(leaf).encode() if isinstance(leaf, (bool, int, float, str, bytes)) else type(leaf).__name__.encode()
