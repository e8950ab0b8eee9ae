"""Parameters of a ResNet-50 for CIFAR-10 under each posterior (the paper's tables 9 and 10), counted, not computed.

python -m bayesify_papers.inducing_weights.parameters [--sizes 16 32 64 128 256]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bayesify import bayesianize, count_parameters, prune
from bayesify.models import resnet50
from bayesify.posteriors import InducingWeights, MeanField, Posterior
from bayesify_papers.shared import records
from bayesify_papers.shared.program import Program
from bayesify_papers.shared.published import published
from bayesify_papers.shared.tables import table

PAPER = published("inducing_weights")
SIZES = tuple(int(size) for size in PAPER["parameters"]["ffg_u"])


def count(posterior: Posterior | None, keep: float = 1.0) -> int:
    """Trainable scalars of the network under a posterior, or of the network itself.

    Args:
        posterior: Over all weights but those of normalization layers; `None` for the plain network.
        keep: Share of what can be pruned that is kept.
    """
    net = resnet50()
    if posterior is None:
        return count_parameters(net)
    bnn = bayesianize(net, posterior)
    return count_parameters(prune(bnn, keep) if keep < 1 else bnn)


def rows(sizes: Sequence[int]) -> list[tuple[str, int, int]]:
    """System, our count, published count.

    Args:
        sizes: M of the inducing weights, among those that the paper has.

    Raises:
        ValueError: If the paper has no number for a size.
    """
    if unknown := [size for size in sizes if size not in SIZES]:
        raise ValueError(f"parameters: M={unknown[0]} is not published; give some of {', '.join(map(str, SIZES))}")
    paper = PAPER["parameters"]
    found = [
        ("Deterministic", count(None), paper["deterministic"]),
        ("FFG-W", count(MeanField()), paper["ffg_w"]),
    ]
    for size in sizes:
        found.append(
            (f"FFG-U, M={size}", count(InducingWeights(size, size, fit_to_layer=False)), paper["ffg_u"][str(size)])
        )
        ensemble = InducingWeights(size, size, q="ensemble", members=5, fit_to_layer=False)
        found.append((f"Ensemble-U, M={size}", count(ensemble), paper["ensemble_u"][str(size)]))
    for keep, theirs in PAPER["pruned_parameters"].items() if 64 in sizes else ():
        ours = count(InducingWeights(64, 64, fit_to_layer=False), float(keep))
        found.append((f"FFG-U, M=64, {float(keep):.0%} of Z", ours, theirs))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 1 if a count differs."""
    program = Program(__doc__, __spec__, "parameters", smoke="the smallest size only").option(sizes=SIZES)
    chosen = program.read(arguments)
    found = rows(chosen.sizes[:1] if chosen.smoke else chosen.sizes)
    records.write(chosen.out / "parameters.json", {**chosen.facts, "rows": found})
    whole = PAPER["parameters"]["deterministic"]
    cells = [[name, f"{ours:,}", f"{theirs:,}", f"{100 * ours / whole:.2f}"] for name, ours, theirs in found]
    print(table(["system", "ours", "paper", "% of deterministic"], cells, "Parameters of a ResNet-50 for CIFAR-10."))
    return 0 if all(ours == theirs for _, ours, theirs in found) else 1


if __name__ == "__main__":
    sys.exit(main())
