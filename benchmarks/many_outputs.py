"""Laplace for a network with 1,000 classes: the last layer from its features, and a subnetwork by sampled vectors.

python -m benchmarks.many_outputs            # ResNet-50 at 224 on a GPU
python -m benchmarks.many_outputs --small    # a small ResNet-18 with 50 classes on a CPU
python -m benchmarks.many_outputs --peers    # the last layer only, compared with laplace-torch and curvlinops
"""

from typing import Any

import torch

import bayesify
from bayesify import likelihoods, models
from benchmarks.runs import parser
from benchmarks.timing import clock, record


def seconds(run) -> tuple[float, Any]:
    """Seconds of a call, including the device's work, and its result."""
    given = []
    took = clock(lambda: given.append(run()))
    return took, given[0]


class Told(dict):
    """Results that are printed and stored immediately, so that they survive an interruption."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__(classes=classes)
        self.name = name

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        print(key, value, flush=True)
        record(self.name, self, quiet=True)


def beside(results: Told, net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Time of other libraries for the last layer's factors on the same images, in the second call of each."""
    from curvlinops import KFACLinearOperator
    from laplace import Laplace as Theirs

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    last = list(net.fc.parameters())
    vector = torch.ones(sum(parameter.numel() for parameter in last), device=x.device)

    def factors(fisher: str, samples: int) -> None:
        loss = torch.nn.CrossEntropyLoss()
        settings = {"fisher_type": fisher, "mc_samples": samples, "check_deterministic": False}
        KFACLinearOperator(net, loss, last, list(loader), **settings) @ vector  # the factors are computed lazily

    def theirs() -> None:
        Theirs(net, "classification", subset_of_weights="last_layer", hessian_structure="kron").fit(loader)

    runs = {
        "curvlinops: one sampled label": lambda: factors("mc", 1),
        "laplace-torch: last layer, Kronecker": theirs,
        "curvlinops: exact": lambda: factors("type-2", 1),
    }
    for name, run in runs.items():
        results[f"{name}, 256 images"] = min(seconds(run)[0] for _ in range(2))


def main() -> None:
    options = parser(__doc__, "small", peers=False).parse_args()
    small = options.small
    device = "cpu" if small else "cuda"
    torch.manual_seed(0)
    if small:
        net, size, classes = models.resnet18("cifar", 50, width=8), 16, 50
    else:
        net, size, classes = models.resnet50("imagenet", 1000), 224, 1000
    net = net.to(device).eval()
    x = torch.randn(256, 3, size, size, device=device)
    with torch.no_grad():  # features must differ between examples, as in a trained network
        for module in net.train().modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        net(x[:64])
        net.eval()
        # Outputs are as certain as a trained network's: a few classes have half of the probability.
        centered = net(x[:64]) - net(x[:64]).mean(0)
        net.fc.weight.mul_(3 / centered.std())
        net.fc.bias.copy_(-net(x[:64]).mean(0))
        y = torch.cat([net(part).argmax(1) for part in x.split(64)])
    batches = [(x[i : i + 64], y[i : i + 64]) for i in range(0, 256, 64)]
    results = Told(f"many_outputs{'_peers' * options.peers}{'_cpu' if small else '_gpu'}", classes)

    def laplace(subset, covariance, data, memory="8GiB", **options):
        made = bayesify.Laplace(net, likelihoods.Categorical(), subset, covariance, memory=memory, **options)
        return made.fit(data)

    with torch.no_grad():
        results["forward pass, 256 images"] = min(seconds(lambda: [net(x) for x, _ in batches])[0] for _ in range(3))
    laplace("last_layer", "kronecker", batches[:1])  # the first call selects kernels
    for memory in ("1GiB", "8GiB"):
        results[f"last layer, Kronecker, 256 images, {memory}"], last = seconds(
            lambda memory=memory: laplace("last_layer", "kronecker", batches, memory)
        )
    if options.peers:
        beside(results, net, x, y)
        return
    results["its prediction of 64 images"], _ = seconds(lambda: last.predict(x[:64]).probs)
    for count in (4, 16, 20):
        results[f"1,000 weights, full, 64 images, {count} vectors"], _ = seconds(
            lambda count=count: laplace(
                bayesify.subnetwork.largest_variance(1000), "full", batches[:1], num_samples=count
            )
        )
    name = "layer4.1.conv1.weight"
    exact_seconds, exact = seconds(lambda: laplace([name], "diagonal", [(x[:16], y[:16])]))
    results[f"exact diagonal of {name}, 16 images"] = exact_seconds
    truth = exact.posterior.tensors()["curvature"].double()
    for count in (1, 4, 16, 20, 64):
        took, found = seconds(lambda count=count: laplace([name], "diagonal", [(x[:16], y[:16])], num_samples=count))
        ratio = found.posterior.tensors()["curvature"].double() / truth
        results[f"{count} vectors: seconds, sum, mean absolute error of an entry"] = [
            took,
            float(found.posterior.tensors()["curvature"].double().sum() / truth.sum()),
            float((ratio - 1).abs()[truth > truth.mean() / 10].mean()),
        ]


if __name__ == "__main__":
    main()
