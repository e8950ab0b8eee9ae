"""Data: small problems made from a seed."""

from bayesify.datasets import toy

__all__ = ["toy"]
