"""Many perceptrons that train as one, by products of stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.likelihoods import Likelihood
from bayesify.predictor import Phase, Trainable
from bayesify.training.batches import Batch


class Members(nn.Module, Trainable):
    r"""R networks of linear layers that train together at point estimates: a trainable whose objective is the sum of theirs.

    $$ \sum_r \Bigl( \sum_n \log p_r(y_{rn} | f_r(x_{rn})) + \log p(w_r) \Bigr), \qquad
       p(w) = \mathcal{N}(0, \text{scale}^2 / \text{fan-in}) $$

    What `ModelStack` does for any network, without `vmap`: a step of small networks takes a third of the time. Matrices are
    stored [R, inputs, outputs], because products with a transposed right factor are several times slower on some processors.
    Dropout takes its masks from one pool of random numbers at random places. The constant of $\log p(w)$ is left out.

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
        self.weights = nn.ParameterList(
            torch.stack([layer.weight.detach().T for layer in column]) for column in zip(*layers, strict=True)
        )
        self.biases = nn.ParameterList(
            torch.stack([layer.bias.detach() for layer in column]).unsqueeze(1) for column in zip(*layers, strict=True)
        )
        self.likelihoods = nn.ModuleList(likelihoods)
        others = [layer for layer in nets[0] if not isinstance(layer, (nn.Linear, nn.Dropout))]
        self._activations = others
        self._dropout = max((layer.p for layer in nets[0] if isinstance(layer, nn.Dropout)), default=0.0)
        self._precisions = [weight.shape[1] / prior_scale**2 for weight in self.weights]
        widest = max((weight.shape[2] for weight in self.weights[:-1]), default=0)
        size = 2 * len(nets) * largest_batch * widest if self._dropout else 0
        self._masks = (torch.rand(size) >= self._dropout).to(self.weights[0].dtype) / (1 - self._dropout)

    def __len__(self) -> int:
        return len(self.weights[0])

    @property
    def training_draws(self) -> int:
        """1."""
        return 1

    def config(self) -> dict[str, Any]:
        """Sizes of the layers, and the likelihoods."""
        return {
            "shapes": [tuple(weight.shape) for weight in self.weights],
            "likelihoods": [likelihood.config() for likelihood in self.likelihoods],  # type: ignore[operator]
        }

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [R, B, O] of rows [R, B, D]."""
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = _Affine.apply(x, weight, bias)
            if index < last:
                x = self._activations[index](x)
                if self.training and self._dropout:
                    place = int(torch.randint(len(self._masks) - x.numel() + 1, ()))
                    x = x * self._masks[place : place + x.numel()].view(x.shape)
        return x

    def terms(
        self,
        batch: Batch,
        *,
        phase: Phase = "variational",
        num_data: int,
        num_draws: int = 1,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of each network's objective in nats of its whole dataset, [R, 1] each; see `Trainable.terms`.

        Args:
            batch: Rows [R, B, D] of each network, targets [R, B, ...] and weights [R, B].
            phase: There is one.
            num_data: N.
            num_draws: 1.
            generator: Not used: dropout has torch's, which `fit` seeds.
        """
        data = self._mean(batch, "training_density") * num_data
        squares = zip(self._precisions, self.weights, self.biases, strict=True)
        penalty = sum(
            (0.5 * precision) * (weight.square().sum((1, 2)) + bias.square().sum((1, 2)))
            for precision, weight, bias in squares
        )
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

    def network_weights(self, first: int, count: int) -> dict[str, Tensor]:
        """Weights of some networks by the names that an `nn.Sequential` gives them, each [count, *shape]."""
        found, step = {}, 3 if self._dropout else 2
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            found[f"{step * index}.weight"] = weight.detach()[first : first + count].transpose(1, 2)
            found[f"{step * index}.bias"] = bias.detach()[first : first + count, 0]
        return found


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
