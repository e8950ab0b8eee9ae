"""Stacks of fully connected networks of one shape. Each layer has its own kind of posterior."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesify import BayesianNetwork, bayesianize
from bayesify.likelihoods import Gaussian
from bayesify.posteriors import GlobalInducing, LocalInducing, MeanField
from bayesify.priors import Neal, Scale, Standard
from bayesify.training import ModelStack

KINDS = ("fac", "li", "gi", "rand")
"""Kinds of posterior: factorized, local inducing points, global inducing points, and draws from the prior."""

PRIORS = {"neal": Neal, "standard": Standard, "scale": Scale}
STARTS = ("random", "network")
FILLED_PRECISION = 0.01
"""Initial precision of the last layer's pseudo-outputs at inducing inputs that are not data."""


@dataclass(frozen=True)
class Design:
    """Shape, priors and posteriors that all networks of a stack share.

    Args:
        sizes: Number of inputs, number of units in each hidden layer, and number of outputs.
        kinds: Each layer's kind of posterior, from `KINDS`: the same for all layers, or `"gi"` in the last layer after `"fac"` or
            `"rand"` layers.
        prior: A key of `PRIORS`.
        points: Number M of inducing inputs in every layer of kind `"li"`.
        bias: Whether layers have a bias.
        linear: Whether to omit the ReLU between layers.
        hidden_precision: Initial precision of the pseudo-outputs of all layers but the last.
        start_std: Initial standard deviations of factorized layers, as a share of `1 / sqrt(fan_in)`.
        start: Initial pseudo-outputs of hidden layers of kind `"gi"`: `"random"` for standard normal numbers, or `"network"` for
            the outputs of a network drawn from Neal's prior at the inducing inputs.

    Raises:
        ValueError: If a kind, prior or start is unknown, if the number of kinds differs from the number of layers, or if the
            mixture of kinds is not supported.
    """

    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    prior: str = "neal"
    points: int = 100
    bias: bool = True
    linear: bool = False
    hidden_precision: float = 0.1
    start_std: float = 0.1
    start: str = "random"

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.sizes) - 1 or not self.kinds:
            raise ValueError(
                f"Design: {len(self.kinds)} kinds for {len(self.sizes) - 1} layers; give one kind per layer"
            )
        for key, values, known in (
            ("kinds", self.kinds, KINDS),
            ("prior", (self.prior,), tuple(PRIORS)),
            ("start", (self.start,), STARTS),
        ):
            for value in values:
                if value not in known:
                    raise ValueError(f"Design: {key}={value!r}; give one of {', '.join(known)}")
        below, last = {*self.kinds[:-1]}, self.kinds[-1]
        if last == "rand" or not (below <= {last} or (last == "gi" and below in ({"fac"}, {"rand"}))):
            raise ValueError(
                f"Design: kinds={self.kinds}; give one kind for all layers, or gi after layers of fac or rand"
            )


def stack(
    design: Design, x: Tensor, y: Tensor, noise: float | Sequence[float] = 0.1, learn_noise: bool = True, seed: int = 0
) -> ModelStack:
    """One network for each of R data sets.

    Args:
        x: Training inputs, [R, N, inputs].
        y: Training targets, [R, N, outputs].
        noise: Noise variance, one for all data sets or one for each.
    """
    noises = [noise] * len(x) if isinstance(noise, float) else noise
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ModelStack([make(design, *given, learn_noise) for given in zip(x, y, noises, strict=True)])


def make(design: Design, x: Tensor, y: Tensor, noise: float, learn_noise: bool = True) -> BayesianNetwork:
    """One network with Gaussian noise before training.

    Global inducing inputs start at training inputs. The last layer's V starts at their targets with the precision of the noise
    (times N / M if there are more data than inducing inputs). If there are fewer data than inducing inputs, the other inputs and
    targets start at standard normal numbers, with the precision `FILLED_PRECISION`. The V of hidden layers start as
    `design.start` says. With standard normal numbers and a small precision, this start is close to the exact last layer given
    hidden layers from the prior. Local inducing inputs and their V start at standard normal numbers, except that the last layer's
    V starts at 0 with the precision of the noise. Means of factorized layers start at draws from Neal's prior.

    Args:
        design: Shape, prior and posteriors of the network.
        x: Training inputs, [N, inputs].
        y: Training targets, [N, outputs].
    """
    layers = [nn.Linear(*sizes, bias=design.bias) for sizes in pairwise(design.sizes)]
    parts: list[nn.Module] = []
    for layer in layers:
        for value in layer.parameters():
            nn.init.normal_(value, std=layer.in_features**-0.5)
        parts += [layer] if design.linear or layer is layers[-1] else [layer, nn.ReLU()]
    net, last = nn.Sequential(*parts), str(len(parts) - 1)
    below, count = design.kinds[0], min(len(x), design.points)
    known = max(1.0, len(x) / design.points) / noise
    factorized = MeanField(local_reparameterization=set(design.kinds) == {"fac"})
    posterior: object = factorized
    if below == "li":
        posterior = LocalInducing(design.points, design.hidden_precision)
    elif "gi" in design.kinds:
        rows = torch.randperm(len(x))[:count]
        inputs = torch.cat((x[rows], torch.randn(design.points - count, x.shape[-1])))
        targets = torch.cat((y[rows], torch.randn(design.points - count, y.shape[-1])))
        posterior = GlobalInducing(
            inputs,
            targets,
            design.hidden_precision,
            learned="last" if below == "rand" else "all",
            init="network" if below == "gi" and design.start == "network" else "random",
        )
        posterior = {last: posterior, "*": factorized} if below == "fac" else posterior
    likelihood = Gaussian(noise=noise, learn=learn_noise)
    made = bayesianize(net, posterior, likelihood=likelihood, prior=PRIORS[design.prior]())
    with torch.no_grad():
        for name, value in made.named_parameters():
            if ".raw_std." in name:
                fan_in = net.get_parameter(name.rpartition(".")[2].partition("/")[0] + ".weight").shape[1]
                value.fill_(math.log(design.start_std / math.sqrt(fan_in)))
            elif name.endswith(f"log_precision.{last}"):
                value.fill_(math.log(known))
                value[design.points if below == "li" else count :] = math.log(FILLED_PRECISION)
            elif below == "li" and name.endswith(f"pseudo_outputs.{last}"):
                value.zero_()
    return made
