"""Checks of public arguments, and the error messages of these checks."""
