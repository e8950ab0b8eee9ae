"""Cost of a training step with global inducing points compared with a mean-field step on equally many images.

On a GPU, it also measures the seconds of an epoch of `fit` on 50,000 images of CIFAR-10's size, captured, in bfloat16 and float32.
"""

import math
from collections.abc import Callable

import torch

import bayesify
from bayesify import likelihoods, models, posteriors, priors

from .runs import parser
from .timing import elbo_step, ratios, record

POINTS, BATCH, SIDE, CLASSES = 100, 32, 28, 10


def step(posterior: posteriors.Posterior, images: int, device: str) -> Callable[[], None]:
    """A function that does one training step of the 32-channel residual network."""
    net = models.narrow_resnet(CLASSES, in_channels=1).to(device)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())
    x, y = torch.randn(images, 1, SIDE, SIDE, device=device), torch.randint(CLASSES, (images,), device=device)
    return elbo_step(bnn, x, y)


def figures(seconds: float, device: str) -> dict[str, float]:
    """Ratios to a mean-field step on 132 images, which is the number of inducing images and batch images together."""
    torch.manual_seed(0)
    inducing = posteriors.GlobalInducing(torch.randn(POINTS, 1, SIDE, SIDE), torch.randint(CLASSES, (POINTS,)))
    found = ratios(
        step(posteriors.MeanField(), POINTS + BATCH, device),
        step(inducing, BATCH, device),
        step(posteriors.MeanField(), BATCH, device),
        step(posteriors.LocalInducing(POINTS), BATCH, device),
        seconds=seconds,
    )
    names = ("global_inducing_step", "mean_field_step_without_inducing_images", "local_inducing_step")
    return dict(zip(names, found, strict=True))


def epochs(device: str) -> dict[str, float]:
    """Seconds of an epoch of 100 steps, the smallest of several measurements.

    The 32-channel network has no convolution biases, 500 inducing images and batches of 500 random images.
    """
    found = {}
    for precision in ("bf16", "float32"):
        torch.manual_seed(0)
        x = torch.randn(5000, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        y = torch.randint(CLASSES, (5000,), device=device)
        net = models.narrow_resnet(CLASSES)
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.bias = None
        inducing = posteriors.GlobalInducing(x[:500].cpu(), y[:500].cpu(), precision=math.exp(-4), last_precision=1.0)
        prior = priors.SpatialInverseWishart()
        bnn = bayesify.bayesianize(net, inducing, likelihood=likelihoods.Categorical(), prior=prior).to(device)
        batches = list(zip(x.split(500), y.split(500), strict=True))
        options = {"precision": precision, "num_draws": 1, "seed": 0, "progress": False}
        history = bayesify.fit(bnn, batches, num_data=5000, epochs=8, learning_rate=1e-2, **options)
        found[f"epoch_{precision}_s"] = 10 * min(history.column("seconds"))
        found[f"bound_{precision}"] = history[-1]["elbo"] / 5000
    return found


def main() -> None:
    given = parser(__doc__, "device", seconds=60.0, threads=1).parse_args()
    torch.set_num_threads(given.threads)
    if given.device.startswith("cuda"):
        record("global_inducing_gpu", epochs(given.device), digits=4, points=500, batch=500)
        return
    about = {"points": POINTS, "batch": BATCH, "baseline": "mean-field step on 132 images"}
    record("global_inducing_cpu", figures(given.seconds, given.device), digits=3, **about)


if __name__ == "__main__":
    main()
