"""Storage: models and runs as files that hold tensors and plain data, never code; every file is written whole or not at all."""

from bayesify.storage.atomic import write_atomically, write_file
from bayesify.storage.save_load import load, save

__all__ = ["load", "save", "write_atomically", "write_file"]
