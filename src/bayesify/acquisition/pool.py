"""Active learning over a pool: train, choose examples, ask for their labels, repeat. A killed run can be resumed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.acquisition.scores import batch_bald
from bayesify.arguments.checks import Count, CountOrZero, Seed, checked, shown
from bayesify.predictor import Drawable, Predictor
from bayesify.storage import tensor_files
from bayesify.storage.atomic import remove_leftovers

Train = Callable[[Tensor, Tensor, int], Predictor]
"""Function that takes inputs, labels and a seed and returns a trained model."""
Choose = Callable[[Predictor, Tensor, int, torch.Generator], Tensor]
"""Function that takes a model, inputs, a number of examples and a generator and returns the indices of the chosen examples."""


@dataclass(frozen=True)
class PoolRun:
    """Result of a run over a pool.

    Args:
        model: Model trained on all labels.
        indices: Indices of the labeled examples, in the order in which their labels were requested.
        labels: Labels of the examples in `indices`, in the same order.
        rounds: One dict per training run; its entry `"labels"` is the number of labels, and its other entries are the scores that
            `evaluate` returned.
    """

    model: Predictor
    indices: Tensor
    labels: Tensor
    rounds: list[dict[str, float]]

    def labels_to_reach(self, name: str, value: float) -> int | None:
        """The smallest number of labels at which the score called `name` was at least `value`; `None` if it never was.

        Raises:
            ValueError: If `evaluate` returned no score called `name`.
        """
        known = self.rounds[0] if self.rounds else {}
        if name not in known:
            raise ValueError(
                f"labels_to_reach: there is no score {name!r} (the scores are: {', '.join(known)}); name one of "
                "these scores, or compute others with label_pool(evaluate=...)"
            )
        return next((int(entry["labels"]) for entry in self.rounds if entry[name] >= value), None)


@checked
def label_pool(
    train: Train,
    ask: Callable[[Tensor], Tensor],
    x: Tensor,
    choose: Choose,
    *,
    start: Sequence[CountOrZero],
    size: Count,
    rounds: CountOrZero,
    evaluate: Callable[[Predictor], Mapping[str, float]] | None = None,
    path: str | Path | None = None,
    seed: Seed = 0,
) -> PoolRun:
    """Label a pool in rounds: train on the known labels, choose more examples, and ask for their labels.

    Labels are stored as soon as `ask` returns them. A repeated call with the same `path` continues from the stored labels, so no
    label is requested twice. If `train` and `choose` are deterministic given a seed, an interruption does not change the result.

    Args:
        train: Function of inputs, labels and a seed that returns a trained model. Equal arguments must give equal models.
        ask: Function that takes indices in the pool and returns a tensor of labels, with one row per index.
        x: Inputs of the pool, [N, ...].
        choose: `by_score(bald)`, `by_batch_bald()`, `at_random`, or your own function. The function takes the model, the
            unlabeled inputs, the number of examples to choose and a generator. It returns indices into the unlabeled inputs.
        start: Indices of the examples that are labeled first.
        size: Number of labels per round; the last round has fewer if the pool runs out.
        rounds: Number of rounds after the examples in `start` have been labeled.
        evaluate: Function that takes a model and returns scores, which are stored with each round.
        path: File in which the run is stored.
        seed: Seed of the training runs and choices.

    Raises:
        ValueError: If indices are out of range or repeated, or if the file is damaged or belongs to another run.
        OSError: If the file cannot be read or written.
    """
    first = torch.tensor(list(start), dtype=torch.int64)
    _check_indices("start= holds", first, len(x))
    run = _StoredRun(path, {"seed": seed, "size": size, "start": first.tolist(), "pool": len(x)})
    if not run.read():
        run.add(first, _answers(ask, first))
    while True:
        done = -(-(len(run.indices) - len(first)) // size)
        model = train(x[run.indices], run.labels, seed + done)
        if not isinstance(model, Predictor):
            returned = f"the function train= returned {shown(model)}"
            raise TypeError(f"label_pool: {returned}; return a predictor, such as a BayesianNetwork")
        if len(run.rounds) == done:
            run.rounds.append({"labels": len(run.indices), **_scores(model, evaluate)})
        rest = torch.ones(len(x), dtype=torch.bool).index_fill(0, run.indices, False).nonzero().squeeze(1)
        if done >= rounds or not len(rest):
            run.write()
            return PoolRun(model, run.indices, run.labels, run.rounds)
        new = choose(model, x[rest], min(size, len(rest)), torch.Generator().manual_seed(seed + done))
        _check_indices("the function choose= returned", new, len(rest))
        chosen = rest[new.cpu()]
        run.add(chosen, _answers(ask, chosen))


class _StoredRun:
    """Labels and rounds so far, stored in a file if a path is given. A run with the same settings continues from the file."""

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self.indices, self.labels = torch.empty(0, dtype=torch.int64), torch.empty(0)
        self.rounds: list[dict[str, float]] = []

    def read(self) -> bool:
        if self._path is None:
            return False
        if not Path(self._path).exists():
            remove_leftovers(self._path)
            return False
        header, tensors = tensor_files.read(self._path, "pool")
        different = [key for key, value in self._settings.items() if header["settings"].get(key) != value]
        if different:
            raise ValueError(
                f"{self._path}: the file belongs to a run with a different {different[0]}; give another path, or delete the file"
            )
        self.indices, self.labels, self.rounds = tensors["indices"], tensors["labels"], header["rounds"]
        return True

    def add(self, indices: Tensor, labels: Tensor) -> None:
        self.labels = torch.cat((self.labels, labels)) if len(self.indices) else labels
        self.indices = torch.cat((self.indices, indices))
        self.write()

    def write(self) -> None:
        if self._path is not None:
            tensors = {"indices": self.indices, "labels": self.labels}
            tensor_files.write(self._path, "pool", {"settings": self._settings, "rounds": self.rounds}, tensors)


def _scores(model: Predictor, evaluate: Callable[[Predictor], Mapping[str, float]] | None) -> dict[str, float]:
    scores = {} if evaluate is None else evaluate(model)
    if not isinstance(scores, Mapping):
        raise TypeError(f"label_pool: the function evaluate= returned {shown(scores)}; return a dict of numbers")
    return {key: float(value) for key, value in scores.items()}


def _check_indices(source: str, indices: Tensor, count: int) -> None:
    if not isinstance(indices, Tensor):
        raise TypeError(f"label_pool: {source} {shown(indices)}; give a tensor of indices")
    inside = len(indices) and bool(((indices >= 0) & (indices < count)).all())
    if indices.ndim != 1 or not inside or len(indices.unique()) != len(indices):
        raise ValueError(f"label_pool: {source} {indices.tolist()}; give distinct indices from 0 to {count - 1}")


def _answers(ask: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
    labels = ask(indices)
    if not isinstance(labels, Tensor) or labels.shape[:1] != indices.shape:
        raise ValueError(
            f"label_pool: the function ask= returned {shown(labels)} for {len(indices)} examples; return a tensor "
            "with one label per example"
        )
    return labels.cpu()


@checked
def by_score(score: Callable[[Any], Tensor], **options: Any) -> Choose:
    """Choose the examples with the highest scores.

    Args:
        score: Function that takes a prediction and returns scores [B], such as `bald`, `epistemic` or
            `lambda predictive: predictive.entropy`.
        options: Options of `predict`, such as `num_draws`.
    """

    def choose(model: Predictor, x: Tensor, size: int, generator: torch.Generator) -> Tensor:
        return score(model.predict(x, **{"generator": generator, **options})).topk(size).indices

    return choose


@checked
def by_batch_bald(num_draws: Count = 64, **options: Any) -> Choose:
    """Choose by `batch_bald`.

    Args:
        num_draws: Number of draws S.
        options: Options of `batch_bald`.
    """

    def choose(model: Predictor, x: Tensor, size: int, generator: torch.Generator) -> Tensor:
        if not isinstance(model, Drawable):
            raise TypeError(f"by_batch_bald: {type(model).__name__} has no draws, which batch_bald needs; use by_score")
        with torch.no_grad():
            draws = model.prediction_draws(num_draws, generator=generator)
        given = {"likelihood": model.likelihood, "output": model.output, "generator": generator, **options}
        return batch_bald(draws, x, size, **given)[0]

    return choose


def at_random(model: Predictor, x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Choose examples at random, as a baseline for the other choices."""
    return torch.randperm(len(x), generator=generator)[:size]
