"""Fully connected networks of one shape side by side, each layer under a posterior of its own kind, all trained as one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive
from bayesify.maths.gamma import draw_gamma, gamma_kl
from bayesify.maths.noise import standard_normal
from bayesify.maths.positive_definite import inverse_and_log_det

KINDS = ("fac", "li", "gi", "rand")
"""Factorized; local and global inducing points; drawn from the prior."""

PRIORS = ("neal", "standard", "scale")
STARTS = ("random", "network")


@dataclass(frozen=True)
class Design:
    """Shape, priors and posteriors that all networks of a stack have in common.

    Args:
        sizes: Inputs, hidden units of each layer, outputs.
        kinds: The posterior of each layer, one of `KINDS`.
        prior: One of `PRIORS`; see `bayesify.priors`.
        points: M, inducing inputs, in every layer of kind `"li"`.
        bias: Whether layers have one.
        linear: Without ReLU between layers.
        hidden_precision: Where the precision of pseudo-outputs starts in layers that are not the last.
        start_std: Where standard deviations of factorized layers start, as a share of `1 / sqrt(fan_in)`.
        start: Where pseudo-outputs of hidden layers of kind `"gi"` start: `"random"`, standard normal numbers, or `"network"`,
            what a network drawn from Neal's prior makes of the inducing inputs.

    Raises:
        ValueError: If a kind or prior is unknown, or there is not one kind for each layer.
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
                f"Design: {len(self.kinds)} kinds for {len(self.sizes) - 1} layers; give one for each layer, and one layer"
            )
        for key, values, known in (
            ("kinds", self.kinds, KINDS),
            ("prior", (self.prior,), PRIORS),
            ("start", (self.start,), STARTS),
        ):
            for value in values:
                if value not in known:
                    raise ValueError(f"Design: {key}={value!r}; give one of {', '.join(known)}")

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Columns of `[W b]` and outputs of each layer."""
        return [(below + self.bias, above) for below, above in zip(self.sizes[:-1], self.sizes[1:], strict=True)]


class StackedDraw(NamedTuple):
    """Weights `[W b]^T` of each layer, [R, S, columns, outputs], and the KL of each draw, [R, S]."""

    weights: list[Tensor]
    kl: Tensor


class StackedNetworks(nn.Module):
    r"""R networks with Gaussian noise, whose posteriors are those of `MeanField`, `LocalInducing` and `GlobalInducing`.

    A layer of kind `"gi"` is drawn without a factor of its covariance: with $\tilde A = \Lambda^{1/2} A T$ for the rows that
    the layer sees of the inducing inputs and standard normal $E_1$, $E_2$,

    $$ W = T (I + \tilde A^\top \tilde A)^{-1} \bigl( \tilde A^\top (\Lambda^{1/2} V + E_2) + E_1 \bigr) $$

    has the mean and covariance of eq. 11. Regressions are computed in float64, data pass the networks in float32.

    Global inducing inputs start at training inputs, V of the last layer at their targets with the precision of the noise (times
    N / M where there are more data than inducing inputs), V of hidden layers as the design says: with standard normal numbers
    and a small precision the start is close to the exact last layer given hidden layers from the prior. Local inducing inputs
    and their V start at standard normal numbers, V of the last layer at 0 with the same precision. Means of factorized layers start
    at draws from Neal's prior.

    Args:
        design: What the networks have in common.
        x: Training inputs, [R, N, inputs].
        y: Training targets, [R, N, outputs].
        noise: Variance of the noise.
        learn_noise: Whether it is trained, one for each network.
        seed: Of all starting values.
    """

    def __init__(
        self, design: Design, x: Tensor, y: Tensor, noise: float = 0.1, learn_noise: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        self.design, self.replicas = design, len(x)
        generator = torch.Generator().manual_seed(seed)
        raw = torch.full((len(x),), raw_positive(noise))
        self.raw_noise = nn.Parameter(raw, requires_grad=learn_noise)
        self.start = nn.ParameterDict()
        self._seen: Tensor | None = None
        for layer, ((cols, outputs), kind) in enumerate(zip(design.layers, design.kinds, strict=True)):
            last = layer == len(design.kinds) - 1
            self._start_layer(layer, kind, cols, outputs, last, x, y, noise, generator)
        if design.prior == "scale":
            halves = torch.tensor([math.log(cols * outputs / 2) for cols, outputs in design.layers])
            self.log_alpha = nn.Parameter(halves.repeat(len(x), 1))
            self.log_beta = nn.Parameter(halves.repeat(len(x), 1))

    def _start_layer(
        self,
        layer: int,
        kind: str,
        cols: int,
        outputs: int,
        last: bool,
        x: Tensor,
        y: Tensor,
        noise: float,
        generator: torch.Generator,
    ) -> None:
        count, points = len(x), self.design.points
        made = self.start

        def normal(*size: int) -> Tensor:
            return torch.randn(count, *size, generator=generator)

        if kind == "fac":
            made[f"mean_{layer}"] = normal(cols, outputs) / math.sqrt(cols - self.design.bias)
            made[f"log_std_{layer}"] = torch.full(
                (count, cols, outputs), math.log(self.design.start_std / math.sqrt(cols - self.design.bias))
            )
        elif kind == "li":
            made[f"inputs_{layer}"] = normal(points, cols - self.design.bias)
        elif kind == "gi" and "inputs" not in made:
            self._rows = rows = _first_rows(x, points, generator)
            made["inputs"] = normal(points, x.shape[-1])
            made["inputs"].data[:, : rows.shape[1]] = x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
        if kind in ("li", "gi"):
            precision = self.design.hidden_precision
            outcome, logs = normal(points, outputs), torch.full((count, points), math.log(precision))
            known = math.log(max(1.0, x.shape[1] / points) / noise)
            if kind == "li" and last:
                outcome, logs = torch.zeros_like(outcome), torch.full_like(logs, known)
            elif last:
                rows = self._rows
                outcome[:, : rows.shape[1]] = y.gather(1, rows[..., None].expand(-1, -1, outputs))
                logs[:, : rows.shape[1]], logs[:, rows.shape[1] :] = known, math.log(0.01)
            elif kind == "gi" and self.design.start == "network":
                seen = F.pad(
                    made["inputs"].data if self._seen is None else self._seen, (0, int(self.design.bias)), value=1.0
                )
                outcome = seen @ (normal(cols, outputs) / math.sqrt(cols - self.design.bias))
                self._seen = outcome if self.design.linear else outcome.relu()
            made[f"outputs_{layer}"], made[f"log_precision_{layer}"] = outcome, logs

    @property
    def noise(self) -> Tensor:
        """Noise variance of each network, [R]."""
        return positive(self.raw_noise)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def scales(self, num_draws: int, generator: torch.Generator | None) -> tuple[list[Tensor], Tensor]:
        """Prior standard deviation of each layer, [R, S, 1, 1], and KL of the prior's own posterior, [R, 1]."""
        like = self.raw_noise
        fixed = [1.0 if self.design.prior == "standard" else 1 / math.sqrt(size) for size in self.design.sizes[:-1]]
        if self.design.prior != "scale":
            return [like.new_full((1, 1, 1, 1), std) for std in fixed], like.new_zeros(1, 1)
        shape, rate = 2 + self.log_alpha.exp(), 2 + self.log_beta.exp()  # [R, L]
        roots = (draw_gamma(shape, num_draws, generator) / rate).rsqrt()  # [S, R, L]
        kl = gamma_kl(shape, rate, 2.0, 2.0).sum(-1, keepdim=True)
        return [roots[..., index].mT[..., None, None] * std for index, std in enumerate(fixed)], kl

    def draw(self, num_draws: int = 1, generator: torch.Generator | None = None) -> StackedDraw:
        """S draws of every network."""
        stds, kl = self.scales(num_draws, generator)
        weights: list[Tensor] = []
        below: Tensor | None = self.start["inputs"].double().unsqueeze(1) if "inputs" in self.start else None
        total = kl.double()
        for layer, (kind, (cols, outputs)) in enumerate(zip(self.design.kinds, self.design.layers, strict=True)):
            shape = (self.replicas, num_draws, cols, outputs)
            if kind in ("fac", "rand"):
                noise = standard_normal(math.prod(shape), self.raw_noise, generator).view(shape)
                drawn = stds[layer] * noise if kind == "rand" else self._factorized(layer, noise)
                total = total if kind == "rand" else total + self._factorized_kl(layer, stds[layer])
            else:
                seen = below if kind == "gi" else self.start[f"inputs_{layer}"].double().unsqueeze(1)
                assert seen is not None
                drawn, layer_kl = self._regressed(layer, self._with_ones(seen), stds[layer].double(), shape, generator)
                total = total + layer_kl
            if below is not None:
                below = self._with_ones(below) @ drawn.double()
                below = below if self.design.linear else below.relu()
            weights.append(drawn.float())
        return StackedDraw(weights, total.expand(self.replicas, num_draws))

    def _with_ones(self, features: Tensor) -> Tensor:
        return F.pad(features, (0, 1), value=1.0) if self.design.bias else features

    def _factorized(self, layer: int, noise: Tensor) -> Tensor:
        return torch.addcmul(
            self.start[f"mean_{layer}"].unsqueeze(1), self.start[f"log_std_{layer}"].exp().unsqueeze(1), noise
        )

    def _factorized_kl(self, layer: int, std: Tensor) -> Tensor:
        """[R, S] or [R, 1]."""
        mean, log_std = self.start[f"mean_{layer}"], self.start[f"log_std_{layer}"]
        squares = (mean.square() + (2 * log_std).exp()).sum((-1, -2))[:, None]  # [R, 1]
        size, std = mean[0].numel(), std[..., 0, 0]
        return (size * (std.log() - 0.5) - log_std.sum((-1, -2))[:, None] + squares / (2 * std.square())).double()

    def _regressed(
        self, layer: int, seen: Tensor, std: Tensor, shape: tuple[int, ...], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Weights and KL of a layer with pseudo-outputs, given what it sees of inducing inputs, [R, S or 1, M, D]."""
        root = (0.5 * self.start[f"log_precision_{layer}"].double()).exp()[:, None, :, None]
        targets = root * self.start[f"outputs_{layer}"].double().unsqueeze(1)  # [R, 1, M, O]
        design = root * std * seen  # [R, S or 1, M, D]
        cols, outputs = shape[-2:]
        gram = design.mT @ design + torch.eye(cols, dtype=design.dtype, device=design.device)
        inverse, log_det = inverse_and_log_det(gram, f"the precision of layer {layer}")
        sizes = (math.prod(shape), math.prod(shape) // cols * design.shape[-2])
        first, second = standard_normal(sum(sizes), design, generator).split(sizes)
        noise = design.mT @ second.view(*shape[:2], -1, outputs) + first.view(shape)
        mean = inverse @ (design.mT @ targets)
        trace = inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
        kl = 0.5 * outputs * (trace - cols + log_det) + 0.5 * mean.square().sum((-1, -2))
        return std * (mean + inverse @ noise), kl

    # -- data ------------------------------------------------------------------------------------------------------

    def forward(self, weights: list[Tensor], x: Tensor) -> Tensor:
        """Outputs of every draw, [R, S, B, O], at inputs [R, B, inputs]."""
        values = x.unsqueeze(1)
        for layer, weight in enumerate(weights):
            values = values if layer == 0 or self.design.linear else values.relu()
            bias = weight[..., -1:, :] if self.design.bias else 0.0
            values = values @ (weight[..., :-1, :] if self.design.bias else weight) + bias
        return values

    def forward_locally(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Outputs [R, 1, B, O] of factorized layers with noise at each output of a layer (Kingma et al. 2015)."""
        values = x
        for layer in range(len(self.design.kinds)):
            values = values if layer == 0 or self.design.linear else values.relu()
            mean, variance = self.start[f"mean_{layer}"], (2 * self.start[f"log_std_{layer}"]).exp()
            seen = self._with_ones(values)
            spread = seen.square() @ variance
            noise = standard_normal(spread.numel(), spread, generator).view(spread.shape)
            values = seen @ mean + spread.clamp_min(1e-12).sqrt() * noise
        return values.unsqueeze(1)

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log p(y | f) of each example, [R, S, B], given outputs [R, S, B, O]."""
        noise = self.noise[:, None, None, None]
        return -0.5 * ((outputs - y.unsqueeze(1)).square() / noise + (2 * math.pi * noise).log()).sum(-1)

    def elbo(
        self,
        x: Tensor,
        y: Tensor,
        num_data: int,
        num_draws: int = 1,
        kl_weight: float | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Evidence lower bound of each network in nats, [R], from batches [R, B, ...].

        Where all layers are factorized, the data term has noise at the outputs of layers in place of the weights.
        """
        if set(self.design.kinds) == {"fac"} and num_draws == 1:
            stds, kl = self.scales(1, generator)
            for layer, std in enumerate(stds):
                kl = kl + self._factorized_kl(layer, std)
            outputs = self.forward_locally(x, generator)
        else:
            drawn = self.draw(num_draws, generator)
            outputs, kl = self.forward(drawn.weights, x), drawn.kl
        data = num_data / x.shape[1] * self.log_density(outputs, y).sum(-1)
        return (data - kl_weight * kl).mean(-1)


def _first_rows(x: Tensor, points: int, generator: torch.Generator) -> Tensor:
    """Numbers of at most so many random rows of each data set, [R, M]."""
    return torch.stack([torch.randperm(x.shape[1], generator=generator)[:points] for _ in range(len(x))])
