"""Published numbers of the papers, from `published.toml` in each paper's folder."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

Score = tuple[float, float]
"""Mean and standard deviation."""


class Published(dict[str, Any]):
    """Tables of a paper by name, as in its file. Lists become tuples; keys are strings."""

    def find(self, *keys: object) -> Any:
        """The entry under nested keys, or `None` if there is none. Numbers among the keys are written as in the file."""
        found: Any = self
        for key in keys:
            if not isinstance(found, dict):
                return None
            found = found.get(f"{key:g}" if isinstance(key, float) else str(key))
        return found


@cache
def published(paper: str) -> Published:
    """Published numbers of one paper.

    Args:
        paper: Name of the paper's folder, such as `"subnetwork"`.
    """
    text = resources.files(f"bayesify_papers.{paper}").joinpath("published.toml").read_text("utf-8")
    return Published({key: _frozen(value) for key, value in tomllib.loads(text).items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(entry) for key, entry in value.items()}
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list) else value
