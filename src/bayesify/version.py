"""The version of bayesify. No other file contains it."""

__version__ = "0.2.0"
