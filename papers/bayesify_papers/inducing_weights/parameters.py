"""Parameters of a ResNet-50 for CIFAR-10 under each posterior, counted in the network (the paper's tables 9 and 10).

python -m bayesify_papers.inducing_weights.parameters [--sizes 16 32 64 128 256]
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache

from torch import nn

from bayesify import bayesianize, count_parameters, prune
from bayesify.models import resnet50
from bayesify.posteriors import InducingWeights, MeanField, Posterior
from bayesify_papers.inducing_weights.rows import parameters as read_rows
from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.published import published
from bayesify_papers.shared.rows import show

PAPER = published("inducing_weights")
INDUCING_SIZES = (16, 32, 64, 128, 256)
"""Values of M in table 9."""

KEPT_SHARES = {"FFG-W": (1.0, 0.5, 0.1, 0.01, 0.001), "FFG-U": (1.0, 0.75, 0.5, 0.25)}
"""Shares of kept entries in table 10."""

MAX_COUNT_DIFFERENCE = 20
"""Largest accepted difference of a count. The paper prunes no bias of FFG-W: 10 means and 10 standard deviations."""


@cache
def _network() -> nn.Module:
    return resnet50()


def count(posterior: Posterior | None, keep: float = 1.0) -> int:
    """Number of trainable scalars of the network under a posterior, or of the plain network.

    Args:
        posterior: Posterior of all weights except those of normalization layers; `None` for the plain network.
        keep: Share of the prunable entries that is kept.
    """
    net = _network()
    if posterior is None:
        return count_parameters(net)
    bnn = bayesianize(net, posterior)
    return count_parameters(prune(bnn, keep) if keep < 1 else bnn)


def rows(sizes: Sequence[int]) -> list[tuple[str, str, int, int]]:
    """Key of the published table (`sizes` or `pruned_sizes`), system, our count, published count.

    Args:
        sizes: Values of M of the inducing weights, among the paper's.

    Raises:
        ValueError: If the paper has no number for a size.
    """
    if unknown := [size for size in sizes if size not in INDUCING_SIZES]:
        raise ValueError(
            f"parameters: the paper has no number for M={unknown[0]}; choose from {', '.join(map(str, INDUCING_SIZES))}"
        )
    counts = {"sizes": {"Deterministic": count(None)}}
    for size in sizes:
        counts["sizes"][f"FFG-U, M={size}"] = count(InducingWeights(size, size, fit_to_layer=False, init="random"))
        ensemble = InducingWeights(size, size, q="ensemble", members=5, fit_to_layer=False, init="random")
        counts["sizes"][f"Ensemble-U, M={size}"] = count(ensemble)
    if 64 in sizes:
        made: dict[str, Callable[[], Posterior]] = {
            "FFG-W": MeanField,
            "FFG-U": lambda: InducingWeights(64, 64, fit_to_layer=False, init="random"),
        }
        counts["pruned_sizes"] = {
            f"{system}, {100 * keep:g} %": count(made[system](), keep)
            for system in KEPT_SHARES
            for keep in KEPT_SHARES[system]
        }
    return [
        (key, system, ours, PAPER[key]["parameters"][system])
        for key, own in counts.items()
        for system, ours in own.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit status, which is 1 if a count differs."""
    program = Program(__doc__, __spec__, "parameters", smoke="the smallest size only").option(sizes=INDUCING_SIZES)
    chosen = program.read(arguments)
    found = rows(chosen.sizes[:1] if chosen.smoke else chosen.sizes)
    records.write(chosen.out / "parameters.json", {**chosen.facts, "rows": found})
    print(
        show(
            read_rows(chosen.out), "Parameters of a ResNet-50 for CIFAR-10, and percent of the deterministic network's."
        )
    )
    return 0 if all(abs(ours - theirs) <= MAX_COUNT_DIFFERENCE for _, _, ours, theirs in found) else 1


if __name__ == "__main__":
    sys.exit(main())
