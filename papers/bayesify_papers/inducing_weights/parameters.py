"""Parameters of a ResNet-50 for CIFAR-10 under each posterior (the paper's tables 9 and 10), counted, not computed.

python -m bayesify_papers.inducing_weights.parameters [--sizes 16 32 64 128 256]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bayesify.models import resnet50
from bayesify.network import bayesianize
from bayesify.posteriors import InducingWeights, MeanField
from bayesify.posteriors.base import Posterior
from bayesify.training.pruning import prune
from bayesify.weights.catalog import count_parameters
from bayesify_papers import records
from bayesify_papers.inducing_weights import published
from bayesify_papers.tables import table


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
    for size in sizes:
        if size not in published.RESNET50_PARAMETERS["ffg_u"]:
            known = ", ".join(str(known) for known in published.RESNET50_PARAMETERS["ffg_u"])
            raise ValueError(f"parameters: M={size} is not published; give some of {known}")
    found = [
        ("Deterministic", count(None), published.RESNET50_DETERMINISTIC),
        ("FFG-W", count(MeanField()), published.RESNET50_FFG_W),
    ]
    for size in sizes:
        paper = published.RESNET50_PARAMETERS
        found.append((f"FFG-U, M={size}", count(InducingWeights(size, size)), paper["ffg_u"][size]))
        ensemble = InducingWeights(size, size, q="ensemble", members=5)
        found.append((f"Ensemble-U, M={size}", count(ensemble), paper["ensemble_u"][size]))
    for keep, paper_count in published.RESNET50_PRUNED.items():
        if 64 in sizes:
            found.append((f"FFG-U, M=64, {keep:.0%} of Z", count(InducingWeights(64, 64), keep), paper_count))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 1 if a count differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(published.RESNET50_PARAMETERS["ffg_u"]))
    parser.add_argument("--out", type=Path, help="folder that gets parameters.json")
    parser.add_argument("--smoke", action="store_true", help="the smallest size only")
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser.parse_args(given)
    found = rows(chosen.sizes[:1] if chosen.smoke else chosen.sizes)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        facts = records.facts("bayesify_papers.inducing_weights.parameters", given)
        records.write(chosen.out / "parameters.json", {**facts, "rows": found})
    whole = published.RESNET50_DETERMINISTIC
    cells = [[name, f"{ours:,}", f"{theirs:,}", f"{100 * ours / whole:.2f}"] for name, ours, theirs in found]
    print(table(["system", "ours", "paper", "% of deterministic"], cells, "Parameters of a ResNet-50 for CIFAR-10."))
    return 0 if all(ours == theirs for _, ours, theirs in found) else 1


if __name__ == "__main__":
    sys.exit(main())
