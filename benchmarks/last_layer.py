"""Last-layer Laplace with many classes: time of fit and prediction in network passes; decompositions are timed separately.

python -m benchmarks.last_layer            # ResNet-50, 1,000 classes, 224 x 224, on a GPU
python -m benchmarks.last_layer --small    # ResNet-18, 300 classes, 64 x 64, 32 images, on a CPU
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models
from bayesify.laplace.covariances import from_curvature
from benchmarks.timing import clock, record

ROUNDS = 7


def best(*calls: Callable[[], Any]) -> list[float]:
    """Smallest time of each call in seconds; rounds alternate between the calls. On a CPU it is the time of this process."""
    timer = time.perf_counter if torch.cuda.is_available() else time.process_time
    for call in calls:
        call()
    rounds = [[clock(call, timer) for call in calls] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def decomposition(laplace: bayesify.Laplace) -> Callable[[], Any]:
    """A function that computes the eigendecompositions of `fit`."""
    subset, posterior = laplace.fitted()
    return lambda: from_curvature("kronecker", subset, posterior.tensors(), posterior.prior).diagonalize()


def theirs(net: nn.Module, batches: list[tuple[Tensor, Tensor]], x: Tensor) -> dict[str, float] | str:
    """Seconds of laplace-torch, or the reason why it did not run."""
    try:
        from laplace import Laplace
    except ImportError as error:
        return f"not installed: {error}"
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches, strict=True))), batch_size=len(batches[0][0])
    )
    try:
        made = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        took = clock(lambda: made.fit(loader))
        return {"fit_s": took, "predict_s": clock(lambda: made(x))}
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return str(error).splitlines()[0]


def problem(small: bool) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor, int]:
    """A network, batches to fit, images to predict, and the number of classes."""
    torch.manual_seed(0)
    device, classes = ("cpu", 300) if small else ("cuda", 1000)
    net = models.resnet18("imagenet", classes) if small else models.resnet50("imagenet", classes)
    size, count, batch = (64, 32, 32) if small else (224, 256, 64)
    x = torch.randn(count, 3, size, size, device=device)
    y = torch.randint(classes, (count,), device=device)
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    return net.to(device).eval(), batches, x[:batch], classes


@torch.no_grad()
def measure(net: nn.Module, batches: list[tuple[Tensor, Tensor]], x: Tensor, covariance: str) -> dict[str, float]:
    """Seconds and passes of one structure of the covariance."""

    def make() -> bayesify.Laplace:
        return bayesify.Laplace(net, likelihoods.Categorical(), subset="last_layer", covariance=covariance)  # type: ignore[arg-type]

    laplace = make().fit(batches)
    fresh = [
        make() for _ in range(ROUNDS + 1)
    ]  # each fit is the first call of its object; the network was copied before
    over_data, one, fitting, predicting = best(
        lambda: [net(images) for images, _ in batches],
        lambda: net(x),
        lambda: fresh.pop().fit(batches),
        lambda: laplace.predict(x).probs,
    )
    found = {"pass_over_data_s": over_data, "pass_s": one, "fit_s": fitting, "predict_s": predicting}
    found["predict_passes"] = predicting / one
    decomposing = best(decomposition(laplace))[0] if covariance == "kronecker" else 0.0
    found |= {"eigendecompositions_s": decomposing, "fit_passes": fitting / over_data}
    return found | {"fit_passes_without_eigendecompositions": (fitting - decomposing) / over_data}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="run a small problem on a CPU")
    small = parser.parse_args().small
    net, batches, x, classes = problem(small)
    figures: dict[str, Any] = {"classes": classes, "images": sum(len(y) for _, y in batches), "predicted": len(x)}
    name = f"last_layer_{'cpu' if small else 'gpu'}"
    for covariance in ("kronecker", "diagonal"):
        figures[covariance] = measure(net, batches, x, covariance)
        record(name, figures, digits=4, quiet=True)
        print(covariance, figures[covariance], flush=True)
    torch.manual_seed(0)
    figures["laplace-torch, kronecker"] = theirs(net, batches, x)
    record(name, figures, digits=4)


if __name__ == "__main__":
    main()
