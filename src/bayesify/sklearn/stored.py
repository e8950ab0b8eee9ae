"""Estimators on disk: parameters, preparation of the columns, units and the trained model, as plain data and tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from bayesify.datasets.scaling import Standardization
from bayesify.predictor import Serializable
from bayesify.sklearn.columns import Columns
from bayesify.sklearn.recipe import Fitted
from bayesify.sklearn.rows import Rows
from bayesify.sklearn.unusual import Neighbors
from bayesify.storage.serializers import STORED, stored_name
from bayesify.tables.encoding import Encoding
from bayesify.weights.module_state import below, with_prefix


class StoredEstimator(BaseEstimator, Serializable):
    """What `bayesify.save` and `load` need of an estimator. Training rows are not in the file, but for the scaled inputs that
    `unusual` compares with, so that `partial_fit` cannot go on from it."""

    n_features_in_: int
    method_: str
    model_: Any
    _seed: int
    _num_inputs: int
    _columns: Columns | None
    _encoding: Encoding
    _x_units: Standardization
    _fitted: Fitted | None
    _neighbors: Neighbors
    _kept: Rows | None

    @abstractmethod
    def _make_network(self) -> nn.Module:
        """The network before training."""

    @abstractmethod
    def _task_config(self) -> dict[str, Any]:
        """What the task adds to `config`."""

    @abstractmethod
    def _restore_task(self, config: Mapping[str, Any]) -> None:
        """Take back what `_task_config` gave."""

    def config(self) -> dict[str, Any]:
        """Everything but tensors of the model.

        Raises:
            ValueError: If the network is the user's own.
        """
        check_is_fitted(self, "model_")
        owner, parameters = type(self).__name__, self.get_params(deep=False)
        if parameters.pop("network") is not None:
            raise ValueError(
                f"save: {owner} with a network of your own, whose code is in no file; store its model_ instead"
            )
        seed = parameters["random_state"]
        parameters["random_state"] = int(seed) if isinstance(seed, (int, np.integer)) else None
        names = getattr(self, "feature_names_in_", None)
        return {
            "parameters": {key: _plain(value) for key, value in parameters.items()},
            "seed": self._seed,
            "method": self.method_,
            "num_features": self.n_features_in_,
            "num_inputs": self._num_inputs,
            "names": None if names is None else [str(name) for name in names],
            "columns": None if self._columns is None else self._columns.config(),
            "encoding": None if self._fitted is None else self._encoding.config(),
            "x_units": None if self._fitted is not None else self._x_units.config(),
            "fitted": None if self._fitted is None else self._fitted.config(),
            "task": self._task_config(),
            "type": stored_name(self.model_),
            "model": self.model_.config(),
        }

    def state(self) -> dict[str, Tensor]:
        """Tensors of the model, and the rows that `unusual` compares with."""
        return with_prefix("model", self.model_.state()) | with_prefix("neighbors", vars(self._neighbors))

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """From `config` and `state`; no network is needed."""
        made = cls(**config["parameters"])
        made._seed, made.method_, made._kept = int(config["seed"]), str(config["method"]), None
        made.n_features_in_, made._num_inputs = int(config["num_features"]), int(config["num_inputs"])
        if config["names"] is not None:
            made.feature_names_in_ = np.array(config["names"], dtype=object)
        made._columns = None if config["columns"] is None else Columns.restore(config["columns"])
        made._restore_task(config["task"])
        tensors, made._neighbors = below("model", state), Neighbors(**below("neighbors", state))
        made._fitted = None
        if config["fitted"] is None:
            made._x_units = Standardization.restore(config["x_units"])
            made.model_ = STORED[config["type"]].restore(made._make_network(), config["model"], tensors)
        else:
            made._encoding = Encoding.restore(config["encoding"])
            made._fitted = Fitted.restore(config["fitted"], made._encoding.num_inputs, config["model"], tensors)
            made.model_ = made._fitted.model
        return made


def _plain(value: Any) -> Any:
    """A parameter as plain data."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
