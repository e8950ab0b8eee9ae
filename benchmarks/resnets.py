"""Cost of draws and training steps of Bayesian ResNets compared with the deterministic networks, on a GPU."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, models, posteriors

from .runs import parser
from .timing import adam_step, elbo_step, passes, ratios, record, rounded

POSTERIORS: dict[str, Callable[[], Any]] = {
    "inducing": lambda: posteriors.InducingWeights(rows=64, cols=64),
    "mean_field": lambda: posteriors.MeanField(),
}


def draw_calls(net: nn.Module, posterior: Any, x: Tensor, num_draws: int) -> list[Callable[[], Any]]:
    """Passes of the deterministic network; draws with their passes, together and one at a time; and passes of existing draws."""
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical()).eval()
    net.eval()

    def singly() -> None:
        for _ in range(num_draws):
            bnn.draw(1)(x)

    with torch.no_grad():
        existing = bnn.draw(num_draws)
    calls = (passes(net, x, num_draws), lambda: bnn.draw(num_draws)(x), singly, lambda: existing(x))
    return [torch.no_grad()(call) for call in calls]


def per_draw(net: nn.Module, posterior: Any, x: Tensor, num_draws: int, seconds: float) -> dict[str, float]:
    """Time of one draw and its forward pass, in deterministic forward passes."""
    together, alone, given = ratios(*draw_calls(net, posterior, x, num_draws), seconds=seconds)
    return {f"{num_draws}_draws": together, "one_at_a_time": alone, "existing_draws": given}


def training_step(net: nn.Module, posterior: Any, x: Tensor, y: Tensor, seconds: float) -> float:
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical()).train()
    plain = copy.deepcopy(net).train()
    base = adam_step(plain, lambda: F.cross_entropy(plain(x), y))
    return ratios(base, elbo_step(bnn, x, y, 50_000), seconds=seconds)[0]


def main() -> None:
    sizes = {"batch": 500, "step_batch": 128, "draws": 5}
    which = {"networks": ["resnet18", "resnet50"], "posteriors": list(POSTERIORS), "name": "resnets_gpu"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = parser(__doc__, "seconds", device=device, **sizes, **which).parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    figures: dict[str, float] = {}
    for network in options.networks:
        for kind in options.posteriors:
            make, found = POSTERIORS[kind], {}
            net = getattr(models, network)().to(options.device)
            x = torch.randn(options.batch, 3, 32, 32, device=options.device)
            found |= per_draw(net, make(), x, options.draws, options.seconds)
            if options.device == "cuda":
                half, images = (part.bfloat16().to(memory_format=torch.channels_last) for part in (net, x))
                drawn = per_draw(half, make(), images, options.draws, options.seconds)
                found |= {f"bf16/{key}": value for key, value in drawn.items()}
            if network == "resnet18":
                small = torch.randn(options.step_batch, 3, 32, 32, device=options.device)
                y = torch.randint(0, 10, (options.step_batch,), device=options.device)
                net = models.resnet18().to(options.device)
                found["training_step"] = training_step(net, make(), small, y, options.seconds)
            figures |= {f"{network}/{kind}/{key}": value for key, value in found.items()}
            print(network, kind, rounded(found, 3), flush=True)
            unit = (
                "time as a ratio to the deterministic network: a forward pass for draws, an Adam step for training_step"
            )
            about = {"unit": unit, "batch": options.batch, "step_batch": options.step_batch}
            record(options.name, figures, digits=3, quiet=True, **about)


if __name__ == "__main__":
    main()
