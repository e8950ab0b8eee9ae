"""The README as PyPI shows it: links and pictures lead to the repository, once `[project.urls]` names it."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, repository: str) -> str:
    """Markdown whose relative links are addresses in the repository."""
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/main/", pictures)


class Readme(MetadataHookInterface):
    """Hook of the build that writes the long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        shown = absolute(text, repository.rstrip("/")) if repository else text
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
