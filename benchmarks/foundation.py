"""Cost of a draw, a prediction and a training step compared with a deterministic network, on the CPU."""

from functools import partial

import torch
import torch.nn.functional as F

import bayesify
from bayesify import models, posteriors

from .runs import parser
from .timing import adam_step, elbo_step, passes, ratios, record, small_cnn

WITHOUT_KERNELS = {"rank_one": posteriors.RankOne, "dropout": posteriors.Dropout}
"""Posteriors whose noise consists of vectors. Their draws are timed without the forward passes."""


def mlp_figures(seconds: float) -> dict[str, float]:
    net = models.mlp([784, 256, 256, 10])
    x, y = torch.randn(128, 784), torch.randint(0, 10, (128,))
    bnn, local = (
        bayesify.bayesianize(net, posteriors.MeanField(local_reparameterization=way), likelihood="categorical")
        for way in (False, True)
    )
    others = [bayesify.bayesianize(net, make(), likelihood="categorical").eval() for make in WITHOUT_KERNELS.values()]
    with torch.no_grad():
        draws = bnn.draw(16)
        ways = (lambda: draws(x), lambda: bnn.draw(16)(x), lambda: bnn.draw(16, antithetic=True)(x))
        existing, fresh, pairs = ratios(passes(net, x, 16), *ways, seconds=seconds)
        drawn = ratios(passes(net, x, 16), *(partial(other.draw, 16) for other in others), seconds=seconds)
    plain = adam_step(net, lambda: F.cross_entropy(net(x), y))
    weight_step, local_step = ratios(plain, elbo_step(bnn, x, y), elbo_step(local, x, y), seconds=seconds)
    return {
        "mlp_16_existing_draws": existing,
        "mlp_16_fresh_draws": fresh,
        "mlp_16_fresh_draws_antithetic": pairs,
        "mlp_mean_field_step": weight_step,
        "mlp_mean_field_step_local": local_step,
        **{f"mlp_16_draws_alone_{name}": ratio for name, ratio in zip(WITHOUT_KERNELS, drawn, strict=True)},
    }


@torch.no_grad()
def conv_figures(seconds: float) -> dict[str, float]:
    net, x = small_cnn(), torch.randn(64, 1, 28, 28)
    bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood="categorical")
    draws = bnn.draw(16)
    existing, fresh = ratios(passes(net, x, 16), lambda: draws(x), lambda: bnn.draw(16)(x), seconds=seconds)
    return {"conv_16_existing_draws": existing, "conv_16_fresh_draws": fresh}


def main() -> None:
    seconds = parser(__doc__, "seconds").parse_args().seconds
    torch.manual_seed(0)
    unit = "time as a ratio to the deterministic network: 16 passes for draws, one Adam step for steps"
    record("foundation_cpu", {**mlp_figures(seconds), **conv_figures(seconds)}, digits=3, unit=unit)


if __name__ == "__main__":
    main()
