"""The version of bayesify. No other file states it."""

__version__ = "0.2.0"
