"""Tables: reading files, detecting the kinds of columns, and converting columns to a network's inputs and targets."""

from bayesify.tables.columns import Features, read_features
from bayesify.tables.errors import InputError
from bayesify.tables.files import Reading, read_table
from bayesify.tables.preparation import Preparation
from bayesify.tables.targets import Target, find_column, read_target

__all__ = [
    "Features",
    "InputError",
    "Preparation",
    "Reading",
    "Target",
    "find_column",
    "read_features",
    "read_table",
    "read_target",
]
