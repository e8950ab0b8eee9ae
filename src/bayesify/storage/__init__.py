"""Storage of models and runs in files that contain tensors and plain data, but no code. Every file is written completely or not
at all."""

from bayesify.storage.atomic import write_atomically, write_file
from bayesify.storage.save_load import load, save

__all__ = ["load", "save", "write_atomically", "write_file"]
