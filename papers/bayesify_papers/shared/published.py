"""Numbers that the papers published: `published.toml` in each paper's folder."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

Score = tuple[float, float]
"""Mean and standard deviation."""


class Published(dict[str, Any]):
    """The tables of a paper by name, as its file has them: lists are tuples, keys are texts."""

    def find(self, *keys: object) -> Any:
        """The entry under keys, one inside the other; numbers are written as the file has them. `None` if there is none."""
        found: Any = self
        for key in keys:
            if not isinstance(found, dict):
                return None
            found = found.get(f"{key:g}" if isinstance(key, float) else str(key))
        return found


@cache
def published(paper: str) -> Published:
    """What a paper published.

    Args:
        paper: Name of its folder, such as `"subnetwork"`.
    """
    text = resources.files(f"bayesify_papers.{paper}").joinpath("published.toml").read_text("utf-8")
    return Published({key: _frozen(value) for key, value in tomllib.loads(text).items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value
