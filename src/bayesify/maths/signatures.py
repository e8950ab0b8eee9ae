"""Signatures of hand-written gradients, looked up once."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

Function = TypeVar("Function", bound=type[Any])


def known_signature(function: Function) -> Function:
    """Keep the signature of an autograd function's `forward`: torch inspects it at each call, which costs more than small work."""
    function.forward.__signature__ = inspect.signature(function.forward)
    return function
