"""What a training step with global inducing points costs next to a mean-field step on as many images.

On a GPU: seconds of an epoch of 50,000 images of CIFAR-10's size through `fit`, captured, in bfloat16 and in float32.
"""

from __future__ import annotations

import argparse
import math

import torch

import bayesify
from bayesify import likelihoods, models, posteriors, priors

from .timing import adam_step, ratios, record

POINTS, BATCH, SIDE, CLASSES, NUM_DATA = 100, 32, 28, 10, 60_000


def step(posterior: posteriors.Posterior, images: int, device: str) -> object:
    """A function that does one training step of the 32-channel residual network."""
    net = models.narrow_resnet(CLASSES, in_channels=1).to(device)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())
    x, y = torch.randn(images, 1, SIDE, SIDE, device=device), torch.randint(CLASSES, (images,), device=device)
    return adam_step(bnn, lambda: -bnn.elbo(x, y, num_data=NUM_DATA) / NUM_DATA)


def figures(seconds: float, device: str) -> dict[str, float]:
    """Ratios to a mean-field step on 132 images: the inducing images and the batch, since that many pass through the net."""
    torch.manual_seed(0)
    inducing = posteriors.GlobalInducing(torch.randn(POINTS, 1, SIDE, SIDE), torch.randint(CLASSES, (POINTS,)))
    every, few, last = ratios(
        step(posteriors.MeanField(), POINTS + BATCH, device),  # type: ignore[arg-type]
        step(inducing, BATCH, device),  # type: ignore[arg-type]
        step(posteriors.MeanField(), BATCH, device),  # type: ignore[arg-type]
        step(posteriors.LocalInducing(POINTS), BATCH, device),  # type: ignore[arg-type]
        seconds=seconds,
    )
    return {
        "global_inducing_step": round(every, 3),
        "mean_field_step_without_inducing_images": round(few, 3),
        "local_inducing_step": round(last, 3),
    }


def epochs(device: str) -> dict[str, float]:
    """Seconds of an epoch of 100 steps, the least of several: the 32-channel network without convolution biases, 500 inducing
    images, batches of 500 random images."""
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
        history = bayesify.fit(bnn, batches, num_data=5000, epochs=8, learning_rate=1e-2, **options)  # type: ignore[arg-type]
        found[f"epoch_{precision}_s"] = round(10 * min(history.column("seconds")), 3)
        found[f"bound_{precision}"] = round(history[-1]["elbo"] / 5000, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring")
    parser.add_argument("--threads", type=int, default=1, help="of the processor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dry", action="store_true", help="print the figures, and write no file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    on_gpu = given.device.startswith("cuda")
    found = epochs(given.device) if on_gpu else figures(given.seconds, given.device)
    if given.dry:
        print(found)
        return
    if on_gpu:
        record("global_inducing_gpu", found, points=500, batch=500)
    else:
        record("global_inducing_cpu", found, points=POINTS, batch=BATCH, baseline="mean-field step on 132 images")


if __name__ == "__main__":
    main()
