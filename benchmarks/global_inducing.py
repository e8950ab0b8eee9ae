"""What a training step with global inducing points costs next to a mean-field step on as many images."""

from __future__ import annotations

import argparse

import torch

import bayesify
from bayesify import likelihoods, models, posteriors

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring")
    parser.add_argument("--threads", type=int, default=1, help="of the processor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dry", action="store_true", help="print the figures, and write no file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = figures(given.seconds, given.device)
    if given.dry:
        print(found)
        return
    name = "global_inducing_gpu" if given.device.startswith("cuda") else "global_inducing_cpu"
    record(name, found, points=POINTS, batch=BATCH, baseline="mean-field step on 132 images")


if __name__ == "__main__":
    main()
