"""Storage of models and runs in files of tensors and plain data, without code. Files are written completely or not at all."""

from bayesify.storage.atomic import write_atomically, write_file
from bayesify.storage.save_load import load, save

__all__ = ["load", "save", "write_atomically", "write_file"]
