"""The version of bayesify. No other file contains the version."""

__version__ = "0.2.0"
