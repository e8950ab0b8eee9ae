"""What is amiss with a training or a prediction: findings, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Args:
        code: `"not_converged"`, `"scales_still"`, `"scales_wide"`, `"no_uncertainty"`, `"kl_dwarfs"`,
            `"worse_than_start"`, `"learned_little"`, `"members_apart"`, `"search_at_edge"`, `"starts_elsewhere"`,
            `"coverage_off"` or `"probabilities_as_logits"`.
        sentence: What was seen, with its numbers.
        remedy: What to do about it.
    """

    code: str
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}"


class Findings(list[Finding]):
    """Findings of a training, in plain words when printed; empty where there is nothing to say.

    Args:
        found: The findings.
        scope: What they are about, said where there are none.
    """

    def __init__(self, found: Iterable[Finding] = (), scope: str = "") -> None:
        super().__init__(found)
        self.scope = scope

    @property
    def codes(self) -> list[str]:
        """The code of each."""
        return [finding.code for finding in self]

    def __repr__(self) -> str:
        return "\n".join(f"{finding.code}: {finding}" for finding in self) or f"nothing to report{self.scope}"

    __str__ = __repr__


def joined(parts: Iterable[list[Finding]]) -> Findings:
    """All findings, one of each code."""
    found = {finding.code: finding for part in parts for finding in part}
    return Findings(found.values())
