"""Many perceptrons that train as one, by products of stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.conversion import bayesianize
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Ensemble
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.priors import Neal


class Members(nn.Module, Trainable):
    r"""R networks of linear layers that train together at point estimates: a trainable whose objective is the sum of theirs.

    $$ \sum_r \Bigl( \sum_n \log p_r(y_{rn} | f_r(x_{rn})) + \log p(w_r) \Bigr), \qquad
       p(w) = \mathcal{N}(0, \text{scale}^2 / \text{fan-in}) $$

    What `ModelStack` does for any models, without `vmap`: a step of small networks takes half of the time. Networks share
    a likelihood, of which there may be several kinds, as models of a `ModelStack` do not; `unstack` gives ordinary models back.
    Matrices are stored [R, inputs, outputs], because products with a transposed right factor are several times slower on some
    processors, and all numbers of a network in one row of `values` [R, P]: of small networks a step's cost is the number of its
    operations. Dropout takes its masks from one pool of random numbers at random places. The constant of $\log p(w)$ is left out.

    Args:
        nets: All alike: `nn.Linear`, activation and `nn.Dropout` in turn, the last linear; they are not changed.
        likelihoods: G of them, each of R / G networks in order; they are trained with the networks.
        prior_scale: Of the prior.
        largest_batch: Rows of each network in a step, at most.
    """

    def __init__(
        self, nets: Sequence[nn.Sequential], likelihoods: Sequence[Likelihood], prior_scale: float, largest_batch: int
    ) -> None:
        super().__init__()
        layers = [[layer for layer in net if isinstance(layer, nn.Linear)] for net in nets]
        self._sizes = [(layer.in_features, layer.out_features) for layer in layers[0]]
        own = [[part for layer in net for part in (layer.weight.T.reshape(-1), layer.bias)] for net in layers]
        self.values = nn.Parameter(torch.stack([torch.cat(parts) for parts in own]).detach())
        self.likelihoods = nn.ModuleList(likelihoods)
        self._first, self._prior = (nets[0],), Neal(prior_scale)  # in a tuple: no submodule
        self._activations = [layer for layer in nets[0] if not isinstance(layer, (nn.Linear, nn.Dropout))]
        self._dropout = max((layer.p for layer in nets[0] if isinstance(layer, nn.Dropout)), default=0.0)
        self._half_precisions = torch.cat(
            [self.values.new_full(((d_in + 1) * d_out,), 0.5 * d_in / prior_scale**2) for d_in, d_out in self._sizes]
        )
        widest = max((d_out for _, d_out in self._sizes[:-1]), default=0)
        size = 2 * len(nets) * largest_batch * widest if self._dropout else 0
        self._masks = (torch.rand(size) >= self._dropout).to(self.values) / (1 - self._dropout)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def training_draws(self) -> int:
        """1."""
        return 1

    def config(self) -> dict[str, Any]:
        """Sizes of the layers, and the likelihoods."""
        return {
            "sizes": self._sizes,
            "likelihoods": [likelihood.config() for likelihood in self.likelihoods],  # type: ignore[operator]
        }

    def layers(self, values: Tensor) -> list[Tensor]:
        """Matrix [R, inputs, outputs] and biases [R, 1, outputs] of each layer in turn, views of [R, P] values."""
        parts = values.split([size for d_in, d_out in self._sizes for size in (d_in * d_out, d_out)], dim=1)
        widths = [width for pair in self._sizes for width in (pair[0], 1)]
        return [part.unflatten(1, (width, -1)) for part, width in zip(parts, widths, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [R, B, O] of rows [R, B, D], which get no gradients."""
        found: Tensor = (
            _Perceptrons.apply(x, self.values, self) if torch.is_grad_enabled() else self.run(x, self.values)
        )
        return found

    def run(self, x: Tensor, layers: Tensor | list[Tensor]) -> Tensor:
        """`forward` with given values, or layers."""
        parts = self.layers(layers) if isinstance(layers, Tensor) else layers
        last = len(self._sizes) - 1
        for index in range(last + 1):
            x = _Affine.apply(x, parts[2 * index], parts[2 * index + 1])
            if index < last:
                x = self._activations[index](x)
                if self.training and self._dropout:
                    place = int(torch.randint(len(self._masks) - x.numel() + 1, ()))
                    x = x * self._masks[place : place + x.numel()].view(x.shape)
        return x

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of each network's objective, [R, 1] each, for rows [R, B, D]; dropout takes torch's generator."""
        data = self._mean(batch, "training_density") * num_data
        penalty = self.values.square() @ self._half_precisions
        return data.unsqueeze(1), penalty.unsqueeze(1)

    def held_out_scores(self, batch: Batch) -> Tensor:
        """Mean `Likelihood.held_out_score` of each network over its rows, [R]."""
        return self._mean(batch, "held_out_score")

    def _mean(self, batch: Batch, summand: str) -> Tensor:
        outputs, found = self(batch.x), []
        size = len(self) // len(self.likelihoods)
        for likelihood, own, y in zip(self.likelihoods, outputs.split(size), batch.y.split(size), strict=True):
            needed = own[..., : likelihood.outputs_per_target * y.shape[-1]] if y.ndim == own.ndim else own
            density = getattr(likelihood, summand)(needed, y)
            found.append(density.flatten(2).sum(-1) if density.ndim > 2 else density)
        values = torch.cat(found)  # [R, B]
        return values.mean(1) if batch.weights is None else (values * batch.weights).mean(1)

    @torch.no_grad()
    def unstack(self, group: int = 0) -> BayesianNetwork:
        """The networks of one likelihood, as they are now, as the members of one network under `Ensemble`."""
        count = len(self) // len(self.likelihoods)
        likelihood: Any = self.likelihoods[group]
        joined = bayesianize(self._first[0], Ensemble(count), likelihood=likelihood, prior=self._prior)
        assert isinstance(joined.posterior, Ensemble)
        step, parts = 3 if self._dropout else 2, self.layers(self.values[group * count : (group + 1) * count])
        for index, (weight, bias) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            joined.posterior.value[f"{step * index}.weight"].copy_(weight.transpose(1, 2))
            joined.posterior.value[f"{step * index}.bias"].copy_(bias[:, 0])
        return joined.eval()


class _Perceptrons(torch.autograd.Function):
    """`Members.run` as one operation of the weights, whose gradients are gathered once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, members: Members) -> Tensor:
        ctx.layers = [part.detach().requires_grad_() for part in members.layers(values)]
        with torch.enable_grad():
            ctx.outputs = members.run(x, ctx.layers)
        found: Tensor = ctx.outputs.detach()
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        own = torch.autograd.grad(ctx.outputs, ctx.layers, grads[0])
        return None, torch.cat([part.flatten(1) for part in own], dim=1), None


class _Affine(torch.autograd.Function):
    """x W + b for R stacked matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        own = torch.bmm(grad, weight.transpose(1, 2).contiguous()) if ctx.needs_input_grad[0] else None
        return own, torch.bmm(x.transpose(1, 2), grad), grad.sum(1, keepdim=True)
