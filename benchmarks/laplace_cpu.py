"""A Laplace subnetwork of a ResNet-18 on the CPU: time and peak memory of selection, fit and prediction."""

import resource

import torch

from bayesify import Laplace, likelihoods, models, subnetwork

from .runs import parser
from .timing import clock, record


def peak() -> float:
    """Peak memory of this process so far in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    chosen = parser(__doc__, size=1000, examples=64, predictions=100).parse_args()
    torch.manual_seed(0)
    net = models.resnet18(variant="cifar", num_classes=10).eval()
    data = [(torch.randn(chosen.examples, 3, 32, 32), torch.randint(10, (chosen.examples,)))]
    before = peak()
    laplace = Laplace(net, likelihoods.Categorical(), subnetwork.largest_variance(chosen.size))
    x = torch.randn(chosen.predictions, 3, 32, 32)
    figures = {
        "choose_and_fit_seconds": clock(lambda: laplace.fit(data)),
        "predict_seconds": clock(lambda: laplace.predict(x).probs),
        "peak_gib": peak(),
        "before_gib": before,
    }
    what = f"a subnetwork of {chosen.size} weights of ResNet-18 from {chosen.examples} images, {chosen.predictions} predictions"
    record("laplace_cpu", figures, digits=2, unit=what)


if __name__ == "__main__":
    main()
