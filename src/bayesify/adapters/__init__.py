"""Bridges to other libraries: Lightning, transformers, peft, torchmetrics, ArviZ, ONNX, BoTorch.

Each library is imported when one of its adapters is first used. If it is not installed, the error names the extra to install.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "lightning": ("BayesianModule", "PredictiveScores"),
    "transformers": ("BayesianTrainer", "bayesianize_head"),
    "lora": ("bayesianize_lora",),
    "generation": ("Generation", "generate"),
    "torchmetrics": (
        *("Accuracy", "BrierScore", "CRPS", "CalibrationError", "Coverage", "IntervalWidth", "NLL", "RMSE"),
        "collection",
    ),
    "arviz": ("to_inference_data",),
    "onnx": ("Exported", "export_onnx"),
    "botorch": ("BoTorchModel",),
}
"""Public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bayesify.adapters' has no attribute {name!r}")
    return getattr(import_module(f"bayesify.adapters.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
