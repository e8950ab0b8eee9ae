"""Findings: problems of a training run or of a prediction, each with a remedy."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One problem of a training run or of a prediction.

    Args:
        code: `"not_converged"`, `"scales_still"`, `"scales_wide"`, `"no_uncertainty"`, `"kl_dwarfs"`,
            `"worse_than_start"`, `"learned_little"`, `"members_apart"`, `"search_at_edge"`, `"starts_elsewhere"`,
            `"coverage_off"`, `"less_calibrated"`, `"probabilities_as_logits"` or `"labels_as_numbers"`.
        sentence: The observation as a sentence, with the measured numbers.
        remedy: Advice on how to solve the problem.
    """

    code: str
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}"


class Findings(list[Finding]):
    """The findings of a training run, which print as sentences. The list is empty if there are no problems.

    Args:
        found: The findings.
        scope: Text that says what was checked; it is printed if there are no findings.
    """

    def __init__(self, found: Iterable[Finding] = (), scope: str = "") -> None:
        super().__init__(found)
        self.scope = scope

    @property
    def codes(self) -> list[str]:
        """The code of each finding."""
        return [finding.code for finding in self]

    def __repr__(self) -> str:
        return "\n".join(f"{finding.code}: {finding}" for finding in self) or f"nothing to report{self.scope}"

    __str__ = __repr__


def joined(parts: Iterable[list[Finding]]) -> Findings:
    """Merge several lists of findings into one list that has one finding per code."""
    found = {finding.code: finding for part in parts for finding in part}
    return Findings(found.values())
