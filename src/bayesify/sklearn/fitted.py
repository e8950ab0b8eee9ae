"""The result of the recipe: one object with everything that predictions need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.arguments.plain import Plain
from bayesify.predictive.base import Predictive
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictor import Predictor
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.empty_cells import EmptyCells
from bayesify.sklearn.later_rows import LaterRows
from bayesify.sklearn.networks import NetworkShape
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.training import Settled
from bayesify.sklearn.units import TRANSFORMS, TargetUnits
from bayesify.sklearn.unusual import MAX_KEPT_ROWS, Neighbors
from bayesify.storage.serializers import STORED_CLASSES, stored_name
from bayesify.tables.encoding import Encoding
from bayesify.training.random_streams import derive_seed
from bayesify.weights.module_state import below, prefixed


@dataclass(frozen=True)
class FitReport(Plain):
    """Out-of-fold results of the default method.

    Args:
        score: CRPS in the targets' unit; for classes, log-loss. Each row is predicted by the only network of the ensemble that
            has not seen the row. The score is `None` for named methods.
        tried: Score of each likelihood and transform in a short trial on fewer rows.
        out_of_fold: Scores of out-of-fold predictions; see `Scores.means`. Each fold is predicted by the only network of the
            ensemble that has not seen the fold. The predictions for each fold are then recalibrated on the other folds. The
            mapping is empty if there are several targets.
        steps: For each member, the step at which it predicted its held-out rows best.
        notes: Sentences that say which likelihoods failed on held-out rows, which rows get wider intervals, and which temperature
            the class probabilities have.
        categories: Encoding of text columns with many levels: `"levels"` or `"means"`, or empty if there are no such
            columns. It is `"nothing"` if no column is used, because one distribution for all rows predicts better.
    """

    score: float | None = None
    tried: Mapping[str, float] = field(default_factory=dict)
    out_of_fold: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    categories: str = ""


@dataclass(frozen=True)
class HeldOut:
    """Predictions of rows that the predicting model has not seen.

    Args:
        values: Targets, or indices of classes, [N].
        mean: Predicted means, [N]; empty for classes.
        lower: Lower ends of the 90 % intervals, [N]; empty for classes.
        upper: Upper ends of the 90 % intervals, [N]; empty for classes.
        centrality: For each target, the level of the smallest central interval that contains it, [N]; empty for classes.
        probs: Probabilities of the classes, [N, C]; empty for a regression.
    """

    values: np.ndarray
    mean: np.ndarray = field(default_factory=lambda: np.empty(0))
    lower: np.ndarray = field(default_factory=lambda: np.empty(0))
    upper: np.ndarray = field(default_factory=lambda: np.empty(0))
    centrality: np.ndarray = field(default_factory=lambda: np.empty(0))
    probs: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))

    @classmethod
    def of_numbers(cls, predictive: RegressionPredictive, values: np.ndarray) -> Self:
        """Make the object from the predictive [N, 1] and the targets [N] of N held-out rows."""
        y = torch.from_numpy(np.asarray(values, dtype=np.float64))[:, None]
        parts = (predictive.mean, *predictive.interval(0.9), predictive.centrality(y))
        return cls(values, *(part.detach().double().numpy()[:, 0] for part in parts))

    @classmethod
    def joined(cls, parts: Sequence[HeldOut]) -> Self:
        """Concatenate several `HeldOut` objects."""
        return cls(*(np.concatenate(each) for each in zip(*(vars(part).values() for part in parts), strict=True)))

    def __getitem__(self, rows: np.ndarray) -> HeldOut:
        return HeldOut(*(part[rows] if len(part) else part for part in vars(self).values()))


@dataclass(frozen=True)
class FittedTable:
    """A method fitted to a table.

    Args:
        method: Name of the method.
        likelihood: Name of the likelihood.
        model: Trained model. It takes encoded inputs and predicts in the units of training.
        encoding: Encoding from numbers to the network's inputs.
        units: Conversion from the units of training to the targets' units; `None` for classes.
        network: Shape of the network; `None` for the user's own network.
        seed: Seed of everything random.
        report: Out-of-fold results.
        columns: Rules that turn a data frame into numbers; `None` if the training data were numbers.
        classes: Labels, sorted; `None` for a regression.
        flat: Whether targets were [N] instead of [N, O].
        neighbors: Training rows with which `unusual_share` compares other rows.
        later: Factors that widen the distributions of rows after the training period, if rows have a time.
        empty: Factors that widen the distributions of rows with empty cells.
        settled: Models from which `partial_fit` continues, if the noise was estimated. The first model has seen all rows; each of
            the others has not seen the rows of one fold. Files do not store them.
        kept: Training rows that are kept for `partial_fit`; not stored in files.
        held_out: Out-of-fold predictions of the default method for the training rows, in the rows' order; not stored in files.
    """

    method: str
    likelihood: str
    model: Predictor
    encoding: Encoding
    units: TargetUnits | None
    network: NetworkShape | None
    seed: int
    report: FitReport = field(default_factory=FitReport)
    columns: Columns | None = None
    classes: np.ndarray | None = None
    flat: bool = True
    neighbors: Neighbors | None = None
    later: LaterRows | None = None
    empty: EmptyCells = field(default_factory=EmptyCells)
    settled: tuple[Settled, ...] = ()
    kept: Rows | None = None
    held_out: HeldOut | None = None

    def encode(self, inputs: np.ndarray) -> Tensor:
        """The network's inputs [N, E] for rows of numbers [N, D]."""
        return as_inputs(self.encoding, inputs)

    def predict_scaled(self, inputs: np.ndarray, num_draws: int) -> Predictive:
        """The predictive for rows of numbers [N, D], in the units of training."""
        return predict_scaled(self.model, self.encode(inputs), num_draws, self.seed)

    def predict(self, inputs: np.ndarray, num_draws: int) -> Predictive:
        """The predictive for rows of numbers [N, D], in the targets' units."""
        return self.in_units(self.predict_scaled(inputs, num_draws), inputs)

    def in_units(self, scaled: Predictive, inputs: np.ndarray) -> Predictive:
        """Convert the predictive for rows of numbers [N, D] from the units of training to the targets' units."""
        if self.units is None:
            return scaled
        assert isinstance(scaled, RegressionPredictive)
        parts = [self.empty(inputs), None if self.later is None else self.later(inputs)]
        found = [part for part in parts if part is not None]
        return self.units.predictive(scaled, torch.cat(found, 1).amax(1, keepdim=True) if found else None)

    def unusual_share(self, inputs: np.ndarray, num_draws: int) -> np.ndarray:
        """For each row, the share [N] of training rows that are at least as unusual as this row; see `Neighbors`."""
        assert self.neighbors is not None
        return self.neighbors.share_beyond(inputs, spread(self.predict_scaled(inputs, num_draws)))

    def with_rows(self, rows: Rows, num_draws: int, memory_rows: int) -> FittedTable:
        """A copy that keeps training rows: some for `unusual_share`, and up to `memory_rows` for `partial_fit`."""
        seed = derive_seed(self.seed, "rows", len(rows), rows.num_data)
        part = rows.thinned(MAX_KEPT_ROWS, derive_seed(self.seed, "neighbors")).x
        neighbors = Neighbors.of(part, spread(self.predict_scaled(part, num_draws)))
        return replace(self, neighbors=neighbors, kept=rows.thinned(memory_rows, seed) if memory_rows else None)

    # -- files -----------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Everything except tensors, as plain data."""
        parts = {key: getattr(self, key) for key in ("encoding", "units", "network", "report", "later", "empty")}
        labels = None if self.classes is None else {"labels": self.classes.tolist(), "kind": self.classes.dtype.str}
        return {
            **{key: getattr(self, key) for key in ("method", "likelihood", "seed", "flat")},
            **{key: None if part is None else part.config() for key, part in parts.items()},
            "columns": None if self.columns is None else self.columns.config(),
            "classes": labels,
            "type": stored_name(self.model),
            "model": self.model.config(),
        }

    def state(self) -> dict[str, Tensor]:
        """Tensors of the model and of the training rows with which `unusual_share` compares other rows."""
        return prefixed(model=self.model.state(), neighbors=vars(self.neighbors))

    @classmethod
    def restore(cls, config: Mapping[str, Any], state: dict[str, Tensor]) -> Self:
        """A fitted table from `config` and `state`."""
        network, units, classes = NetworkShape.restore(config["network"]), config["units"], config["classes"]
        encoding = Encoding.restore(config["encoding"])
        if units is not None and units["transform"] not in TRANSFORMS:
            raise ValueError(f"the file names the transform {units['transform']!r}, which is unknown")
        net = network.make(0)
        model = STORED_CLASSES[config["type"]].restore(net, config["model"], below("model", state))
        if isinstance(model, nn.Module):
            model.eval()
        if not isinstance(model, Predictor):
            raise ValueError(f"the file contains a {config['type']}, which is not a predictor")
        return cls(
            str(config["method"]),
            str(config["likelihood"]),
            model,
            encoding,
            None if units is None else TargetUnits.restore(units),
            network,
            int(config["seed"]),
            FitReport.restore(config["report"]),
            None if config["columns"] is None else Columns.restore(config["columns"]),
            None if classes is None else np.array(classes["labels"], dtype=np.dtype(classes["kind"])),
            bool(config["flat"]),
            Neighbors(**below("neighbors", state)),
            None if config.get("later") is None else LaterRows.restore(config["later"]),
            EmptyCells.restore(config.get("empty", {})),
        )


def as_inputs(encoding: Encoding, inputs: np.ndarray) -> Tensor:
    """Inputs of a network, [N, E], in float64. In float32, the last digits of a prediction would depend on the row's place in
    the batch."""
    return torch.from_numpy(encoding(inputs))


def predict_scaled(model: Predictor, x: Tensor, num_draws: int, seed: int) -> Predictive:
    """A model's predictive for encoded inputs [B, E], in the units of training. All rows use the same draws."""
    if model.num_distinct_draws is not None:
        num_draws = min(num_draws, model.num_distinct_draws)
    return model.predict(x, num_draws, generator=torch.Generator().manual_seed(derive_seed(seed, "draws")))


def spread(predictive: Predictive) -> Tensor:
    """Epistemic uncertainty of each row, [N], in the units of training."""
    if isinstance(predictive, RegressionPredictive):
        return predictive.epistemic.sum(-1)
    assert isinstance(predictive, ClassificationPredictive)
    return predictive.mutual_information
