"""The fast path of a `ModelStack`: R perceptrons with point estimates run together as products of stacked matrices."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.network import BayesianNetwork
from bayesify.posteriors.point import Point
from bayesify.running.generators import own_generators

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Names of a module's hook dicts. Products of stacked matrices would not call these hooks."""
Slope = Callable[[Tensor], Sequence[Tensor | None]]
"""Backward pass of a layer: from the gradient of its outputs to the gradients of its inputs, bias and weight."""
SLOPES: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {nn.SiLU: torch.ops.aten.silu_backward.default}
"""Backward pass of each activation. It takes the gradient of the outputs and the inputs, and returns the gradient of
the inputs. Autograd differentiates other activations."""


class Perceptrons:
    r"""R networks of linear layers, activations and dropout, whose weights are point estimates; they run without
    `vmap`.

    The outputs equal the networks' own outputs, and the penalty of each network is $-\log p(w_r)$. For small networks, the
    number of operations determines the time of a step. All gradients therefore come from one autograd operation, and
    the gradient of the penalty is computed for all parameters of a network as one row. On some processors, products
    with a transposed right factor are several times slower, so matrices are transposed first. On a CPU, dropout masks
    are slices of a fixed pool at random offsets, because drawing new masks costs more than the rest of the step.

    The networks have the same architecture; see `of`. `names` maps the name of each weight or bias in the plain network to its
    name in a model, in the order of the layers. The modes (train or eval) of the given layers are used.
    """

    def __init__(self, models: Sequence[BayesianNetwork], names: dict[str, str], layers: Sequence[nn.Module]) -> None:
        self.names, self.layers = list(names.values()), list(layers)
        self._dropouts = [part for part in layers if isinstance(part, nn.Dropout)]
        sizes = models[0].posterior.sizes()
        self.sizes = [sizes[name] for name in names]
        scales = [model.prior.draw(1).std for model in models]
        stds = torch.tensor([[float(own[name]) for name in names] for own in scales], dtype=torch.float64)  # [R, W]
        counts = torch.tensor(self.sizes)
        log_volumes = 0.5 * (counts * (2 * math.pi * stds.square()).log()).sum(1)  # [R]
        each = stds if bool((stds != stds[0]).any()) else stds[:1]
        self._prior = each.pow(-2).repeat_interleave(counts, dim=1), log_volumes
        self._masks: dict[float, Tensor] = {}

    @classmethod
    def of(cls, models: Sequence[nn.Module], first: nn.Module) -> Self | None:
        """The fast path for models of one architecture, or `None` if there is none. `first` is a copy of the first model."""
        if type(first) is not BayesianNetwork or len(first.posteriors) != 1 or type(first.posterior) is not Point:
            return None
        network, used = first.network, first.posterior.sizes()
        linear = [(path, part) for path, part in network.named_children() if type(part) is nn.Linear]
        names = [f"{path}.{leaf}" for path, _ in linear for leaf in ("weight", "bias")]
        if type(network) is not nn.Sequential or set(used) != set(names) or any(True for _ in network.parameters()):
            return None
        hooked = any(vars(part)[name] for part in network.modules() for name in HOOKS)
        if first.output is not None or not first.layout.is_plain or hooked:
            return None
        networks = [model for model in models if isinstance(model, BayesianNetwork) and model.prior.draw(1).fixed]
        if len(networks) < len(models):
            return None
        like = first.posterior.value.values()[0]
        width = 0
        with own_generators(), torch.no_grad():
            for part in network:
                if type(part) is nn.Linear:
                    width = part.out_features
                elif type(part) is not nn.Dropout and not _acts_on_rows(part, width, like):
                    return None
        paths = {id(value): path for path, value in first.named_parameters()}
        return cls(networks, {name: paths[id(first.posterior.value[name])] for name in names}, list(network))

    def take(self, x: Tensor, num_draws: int, first: Tensor) -> bool:
        """Whether the fast path supports rows [R, B, D], given the first weight [R, O, D]. Dropout allows only a single draw."""
        fits = x.ndim == 3 and (x.shape[0], x.shape[2]) == (first.shape[0], first.shape[2])
        alike = x.dtype == first.dtype and x.device == first.device and not x.requires_grad
        if not fits or not alike or torch.is_autocast_enabled(x.device.type):
            return False
        return num_draws == 1 or not any(part.training and part.p > 0 for part in self._dropouts)

    def run(self, x: Tensor, values: Sequence[Tensor], slopes: list[Slope] | None = None) -> Tensor:
        """Outputs [R, B, O] for rows [R, B, D], given weight [R, O, D] and bias [R, O] of each linear layer in order.

        If `slopes` is given, the backward pass of each layer is appended to it.
        """
        place = 0
        for part in self.layers:
            slope: Slope | None = None
            if isinstance(part, nn.Linear):
                weight, bias = values[place : place + 2]
                slope = partial(_slope_of_linear, x, weight if place else None)
                x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT.contiguous())
                place += 2
            elif not isinstance(part, nn.Dropout):
                x, slope = _activate(part, x) if slopes is not None else (part(x), None)
            elif part.training and part.p > 0:
                mask = self._mask(part.p, x)
                x, slope = x * mask, lambda grad, mask=mask: (grad * mask,)
            if slopes is not None and slope is not None:
                slopes.append(slope)
        return x

    def prior(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Prior precision of each parameter, [R, P] or [1, P], and the penalty [R] that each network would have if its weights
        were 0."""
        precisions, constants = self._prior
        if precisions.dtype != like.dtype or precisions.device != like.device:
            self._prior = precisions.to(like), constants.to(like)
        return self._prior

    def _mask(self, rate: float, like: Tensor) -> Tensor:
        if like.is_cuda:
            return F.dropout(torch.ones_like(like), rate)
        pool = self._masks.get(rate)
        if pool is None or len(pool) < 2 * like.numel():
            numbers = torch.rand(2 * like.numel(), generator=torch.Generator().manual_seed(0))
            pool = self._masks[rate] = (numbers >= rate).to(like) / (1 - rate)
        place = int(torch.randint(len(pool) - like.numel() + 1, ()))
        return pool[place : place + like.numel()].view(like.shape)


def _acts_on_rows(part: nn.Module, width: int, like: Tensor) -> bool:
    """Whether a module without parameters gives a row [D] the same result in a batch [B, D] and in stacked batches [R, B, D]."""
    if any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
        return False
    x = torch.linspace(-3, 3, 12 * width, dtype=like.dtype, device=like.device).sin().view(3, 4, width)
    found = part(x)
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return False
    return torch.allclose(found, torch.stack([part(row) for row in x]))


def _slope_of_linear(x: Tensor, weight: Tensor | None, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """See `Slope`. If `weight` is `None`, the inputs get no gradient."""
    return None if weight is None else torch.bmm(grad, weight), grad.sum(1), torch.bmm(grad.mT, x)


def _activate(part: nn.Module, x: Tensor) -> tuple[Tensor, Slope]:
    known = SLOPES.get(type(part))
    if known is not None and not getattr(part, "inplace", False):
        return part(x), lambda grad: (known(grad, x),)
    with torch.enable_grad():
        inputs = x.detach().requires_grad_()
        outputs = part(inputs.clone())  # a clone, because the activation may work in place
    return outputs.detach(), lambda grad: torch.autograd.grad(outputs, inputs, grad)


class _Run(torch.autograd.Function):
    """One operation that computes the outputs and the penalty [R] of each network, and all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, networks: Perceptrons, *values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.sizes, ctx.layers = networks.sizes, []
        precisions, constants = networks.prior(values[0])
        outputs = networks.run(x, values, ctx.layers)
        flat = torch.cat([value.flatten(1) for value in values], dim=1)  # [R, P]
        ctx.slopes = flat * precisions
        return outputs, torch.add(constants, (flat * ctx.slopes).sum(1), alpha=0.5)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found, grad = list[Tensor](), grads[0]
        for slope in reversed(ctx.layers):
            grad, *own = slope(grad)
            found += own
            if grad is None:  # no layer before has parameters
                break
        found.reverse()
        slopes = (ctx.slopes * grads[1].unsqueeze(1)).split(ctx.sizes, dim=1)
        slopes = [slope.view_as(grad) if grad.ndim > 2 else slope for slope, grad in zip(slopes, found, strict=True)]
        torch._foreach_add_(found, slopes)
        return None, None, *found


run_all: Callable[..., tuple[Tensor, Tensor]] = _Run.apply
"""Outputs [R, B, O] and the penalty [R] of each network, from rows [R, B, D], `Perceptrons` and the values of `Perceptrons.run`.
The rows get no gradients."""
