"""Bridges to other libraries: Lightning, transformers, peft, torchmetrics, ArviZ, ONNX, BoTorch.

Each library is imported when one of its names is first used. If it is not installed, the error names the extra to install.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "BayesianModule": "lightning",
    "PredictiveScores": "lightning",
    "BayesianTrainer": "transformers",
    "bayesianize_head": "transformers",
    "bayesianize_lora": "lora",
    "Generation": "generation",
    "generate": "generation",
    "Accuracy": "torchmetrics",
    "BrierScore": "torchmetrics",
    "CRPS": "torchmetrics",
    "CalibrationError": "torchmetrics",
    "Coverage": "torchmetrics",
    "IntervalWidth": "torchmetrics",
    "NLL": "torchmetrics",
    "RMSE": "torchmetrics",
    "collection": "torchmetrics",
    "to_inference_data": "arviz",
    "Exported": "onnx",
    "export_onnx": "onnx",
    "BoTorchModel": "botorch",
}
"""The module that defines each name."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bayesify.adapters' has no attribute {name!r}")
    return getattr(import_module(f"bayesify.adapters.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
