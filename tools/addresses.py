"""Hook of mkdocs that gives the site its own address and the address of the repository.

Both are set in one place, `[project.urls]` of pyproject.toml, which PyPI also shows:

    [project.urls]
    Documentation = "https://..."
    Repository = "https://..."

Until they are set, the site has no link to the repository.
"""

import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def addresses(project: dict[str, Any]) -> dict[str, str]:
    """Settings of mkdocs from the project's table."""
    urls = project.get("urls", {})
    keys = {"site_url": "Documentation", "repo_url": "Repository"}
    return {setting: urls[name] for setting, name in keys.items() if name in urls}


def on_config(config: Any) -> Any:
    """Add the addresses that are set."""
    config.update(addresses(tomllib.loads(PROJECT.read_text())["project"]))
    return config
