"""`bayesify fit` turns a table into a model in a folder, and `bayesify predict` turns new rows into predictions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayesify.serving.fitting import fit_table
    from bayesify.serving.folder import ModelFolder
    from bayesify.serving.predicting import predict_table
    from bayesify.serving.updating import update_table

HOMES = {"ModelFolder": "folder", "fit_table": "fitting", "predict_table": "predicting", "update_table": "updating"}
__all__ = ["ModelFolder", "fit_table", "predict_table", "update_table"]


def __getattr__(name: str) -> Any:
    # Load on demand, because the command line imports this package to show its help.
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bayesify.serving.{HOMES[name]}"), name)
