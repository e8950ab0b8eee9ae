"""A subnetwork of a ResNet-18 on the CPU: time and peak memory to choose, to fit and to predict."""

from __future__ import annotations

import argparse
import resource
import time

import torch

from bayesify import Laplace, likelihoods, models, subnetwork

from .timing import record


def peak() -> float:
    """Largest memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1000, help="weights of the subnetwork")
    parser.add_argument("--examples", type=int, default=64, help="images that choose and fit it")
    parser.add_argument("--predictions", type=int, default=100)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    net = models.resnet18(variant="cifar", num_classes=10).eval()
    data = [(torch.randn(chosen.examples, 3, 32, 32), torch.randint(10, (chosen.examples,)))]
    before = peak()
    start = time.perf_counter()
    laplace = Laplace(net, likelihoods.Categorical(), subnetwork.largest_variance(chosen.size)).fit(data)
    fitted = time.perf_counter() - start
    start = time.perf_counter()
    probs = laplace.predict(torch.randn(chosen.predictions, 3, 32, 32)).probs
    predicted = time.perf_counter() - start
    assert probs.shape == (chosen.predictions, 10)
    record(
        "laplace_cpu",
        {
            "choose_and_fit_seconds": round(fitted, 1),
            "predict_seconds": round(predicted, 1),
            "peak_gib": round(peak(), 2),
            "before_gib": round(before, 2),
        },
        unit=f"a subnetwork of {chosen.size} weights of ResNet-18 from {chosen.examples} images, {chosen.predictions} predictions",
    )


if __name__ == "__main__":
    main()
