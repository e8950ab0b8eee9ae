"""Storage: models and runs as files that hold tensors and plain data, never code."""

from bayesify.storage.save_load import load, save

__all__ = ["load", "save"]
