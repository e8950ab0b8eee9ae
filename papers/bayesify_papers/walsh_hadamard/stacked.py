"""Many Bayesian networks of one shape with their parameters side by side, so that one step trains them all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.likelihoods import Categorical, Gaussian, Likelihood
from bayesify.maths.constraints import positive
from bayesify.maths.walsh_hadamard import exclusive_or
from bayesify.network import BayesianNetwork
from bayesify.posteriors import Dropout, MeanField, WalshHadamard
from bayesify.posteriors.base import Posterior
from bayesify.posteriors.walsh_hadamard.blocks import Blocks
from bayesify.transforms.sign_matrices import sign_matrix

Multiplied = tuple[Blocks, Tensor, Tensor, Tensor]
"""A matrix that is not formed: how blocks cover it, and $s_1$, g and $s_2$ with the axes that inputs have, [R, 1, K, D]."""


class Stack:
    r"""R networks of one shape, perceptrons under `WalshHadamard`, `MeanField` or `Dropout`, with stacked parameters.

    Training them apart costs R times the calls of one; their arithmetic is so small that side by side they cost
    little more than one. A step of 20 networks of table 2 (50 units, batches of 64; processor time of one ARM core) takes 6.1 ms;
    4.2 ms with the gradients written out, as they were before, and 16.3 ms as a `ModelStack`, more than twice as much.
    Parameters start as the networks' own and are put back by `hand_back`; the objective of each is that of
    `BayesianNetwork.elbo` with one draw. Priors may differ between the networks.

    Shapes:
        parameters["mean"], parameters["log_std"]: [R, P] for all P Gaussians; `log_std` is missing under `Dropout`.
        parameters["sides"]: [R, Q], $s_1$ and $s_2$ of all blocks.
        parameters["lower"]: [R, L], the packed factors N of all blocks where the covariance is full.
        parameters["points"]: [R, T], the weights that are under no posterior, where there are any.
        parameters["raw_noise"]: [R], where the likelihood has a variance that is learned.

    Args:
        networks: All made alike, with a `Gaussian` likelihood of one variance or a `Categorical` one.

    Raises:
        ValueError: If there is no network, a posterior, likelihood or layer is another one, or shapes differ.
    """

    def __init__(self, networks: Sequence[BayesianNetwork]) -> None:
        if not networks:
            raise ValueError("Stack: no networks; give at least one")
        self.networks = list(networks)
        first = networks[0]
        self.posterior, self.likelihood = first.posterior, _known_likelihood(first.likelihood)
        self.layers = _known_layers(first.network)
        self.parameters: dict[str, Tensor] = {}
        for key, own in _tensors(first).items():
            shapes = [tensor.shape for tensor in own]
            rows = []
            for network in networks:
                theirs = _tensors(network).get(key, [])
                if [tensor.shape for tensor in theirs] != shapes:
                    raise ValueError("Stack: the networks have different shapes; make them all alike")
                rows.append(torch.cat([tensor.detach().flatten() for tensor in theirs]))
            stacked = torch.stack(rows)
            self.parameters[key] = (stacked[:, 0] if key == "raw_noise" else stacked).requires_grad_()
        stds = torch.stack([_prior_stds(network) for network in networks]).to(self.parameters["mean"])  # [R, P]
        self.precisions = stds**-2
        self.log_prior_stds = stds.log().sum(-1)
        self.points: dict[str, tuple[int, int, torch.Size]] = {}
        for name, value in first.network.named_parameters():
            start = sum(stop - start for start, stop, _ in self.points.values())
            self.points[name] = (start, start + value.numel(), value.shape)
        self.ends = [0]
        for tensor in _tensors(first)["mean"]:
            self.ends.append(self.ends[-1] + tensor.numel())
        self.lower_blocks: list[tuple[int, int]] = []
        if isinstance(self.posterior, WalshHadamard) and "lower" in self.parameters:
            self.lower_blocks = [(size, pieces[-1].stop) for size, pieces in self.posterior.groups.items()]
        if isinstance(self.posterior, Dropout):
            self.masks = _masks(self.posterior)
            self.noise_size = sum(units for units in self.masks.values())
        else:
            self.noise_size = self.ends[-1]

    def __len__(self) -> int:
        return len(self.networks)

    @property
    def uniform(self) -> bool:
        """Whether noise is uniform on [0, 1), for `Dropout`; otherwise it is standard normal."""
        return isinstance(self.posterior, Dropout)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor | Multiplied], Tensor]:
        """One draw of each network's weights, and the KL of all.

        Args:
            noise: [R, `noise_size`], in the order in which the posterior itself asks for noise.

        Returns:
            Weights by name, [R, *shape] or unformed, and the KL summed over networks.
        """
        mean = self.parameters["mean"]
        if isinstance(self.posterior, Dropout):
            drawn, kl = mean, self._penalty(mean)
        elif "lower" in self.parameters:
            std = self.parameters["log_std"].exp()
            mixed, growth = self._mix(noise)
            drawn = torch.addcmul(mean, std, mixed)
            squares = (mean.square() + std.square() * growth) * self.precisions
            kl = 0.5 * (squares - 1).sum() - self.parameters["log_std"].sum() + self.log_prior_stds.sum()
        else:
            drawn, kl = _Draw.apply(mean, self.parameters["log_std"], noise, self.precisions)
            kl = kl + self.log_prior_stds.sum()
        parts = drawn.split([end - start for start, end in pairwise(self.ends)], dim=-1)
        weights: dict[str, Tensor | Multiplied] = {
            name: self.parameters["points"][:, start:stop].unflatten(-1, shape)
            for name, (start, stop, shape) in self.points.items()
        }
        if isinstance(self.posterior, Dropout):
            weights |= self._mask(parts, noise)
        elif isinstance(self.posterior, MeanField):
            weights |= dict(zip(self.posterior.mean_value, self._shaped(parts, self.posterior), strict=True))
        elif isinstance(self.posterior, WalshHadamard):
            weights |= self._build(self.posterior, list(parts))
        return weights, kl

    def _mix(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        r"""$\epsilon + N \epsilon$ and 1 plus the squared rows of N, [R, P] each; biases are as they were."""
        start = self.noise_size - sum(count * size for size, count in self.lower_blocks)
        mixed, growth, at = [noise[:, :start]], [torch.ones_like(noise[:, :start])], 0
        for size, count in self.lower_blocks:
            packed = size * (size - 1) // 2
            part = self.parameters["lower"][:, at : at + count * packed].unflatten(-1, (count, packed))
            flat = part.new_zeros(len(self), count, size * size)
            lower = flat.index_copy(-1, packed_places(size), part).unflatten(-1, (size, size))  # [R, K, D, D]
            own = noise[:, start : start + count * size].unflatten(-1, (count, size))
            mixed.append((own + (lower * own.unsqueeze(-2)).sum(-1)).flatten(1))
            growth.append((1 + lower.square().sum(-1)).flatten(1))
            at, start = at + count * packed, start + count * size
        return torch.cat(mixed, -1), torch.cat(growth, -1)

    def _shaped(self, parts: Sequence[Tensor], posterior: MeanField) -> list[Tensor]:
        return [
            part.unflatten(-1, value.shape) for part, value in zip(parts, posterior.mean_value.values(), strict=True)
        ]

    def _build(self, posterior: WalshHadamard, parts: list[Tensor]) -> dict[str, Tensor | Multiplied]:
        """Vectors as they are, matrices from their blocks."""
        weights: dict[str, Tensor | Multiplied] = {}
        if isinstance(posterior.vectors, MeanField):
            count = len(posterior.vectors.mean_value)
            weights.update(
                zip(posterior.vectors.mean_value, self._shaped(parts[:count], posterior.vectors), strict=True)
            )
            parts = parts[count:]
        start = 0
        for (size, pieces), flat in zip(posterior.groups.items(), parts, strict=True):
            number = flat.shape[-1]
            g, left, right = (
                value.unflatten(-1, (-1, size))
                for value in (flat, *self.parameters["sides"][:, start : start + 2 * number].split(number, dim=-1))
            )
            start += 2 * number
            for piece in pieces:
                whole = len(pieces) == 1
                factors = [factor if whole else factor[:, piece.start : piece.stop] for factor in (left, g, right)]
                if piece.fast:
                    a, b, c = (factor.unsqueeze(1) for factor in factors)
                    weights[piece.weight.name] = (piece.blocks, a, b, c)
                else:
                    weights[piece.weight.name] = piece.blocks.assemble(_Form.apply(*factors))
        return weights

    def _mask(self, parts: Sequence[Tensor], noise: Tensor) -> dict[str, Tensor | Multiplied]:
        assert isinstance(self.posterior, Dropout)
        rate = self.posterior.rate
        keep = (noise >= rate).to(noise.dtype) / (1 - rate)
        masks = dict(zip(self.masks, keep.split(list(self.masks.values()), dim=-1), strict=True))
        weights: dict[str, Tensor | Multiplied] = {}
        for (name, value), part in zip(self.posterior.value.items(), parts, strict=True):
            shaped = part.unflatten(-1, value.shape)
            weights[name] = shaped * masks[name].unsqueeze(-2) if name in masks else shaped
        return weights

    def _penalty(self, mean: Tensor) -> Tensor:
        r"""$-\mathbb{E}_q \log p$ under `Dropout`, of all networks; a masked weight has the square $m^2 / (1 - \text{rate})$."""
        assert isinstance(self.posterior, Dropout)
        scales = [
            mean.new_full((value.numel(),), 1 / (1 - self.posterior.rate) if name in self.masks else 1.0)
            for name, value in self.posterior.value.items()
        ]
        squares = (mean.square() * self.precisions * torch.cat(scales)).sum()
        return 0.5 * squares + self.log_prior_stds.sum() + 0.5 * math.log(2 * math.pi) * mean.numel()

    # -- objective -------------------------------------------------------------------------------------------------

    def outputs(self, x: Tensor, weights: dict[str, Tensor | Multiplied]) -> Tensor:
        """What the networks put out, each for its own inputs: [R, B, inputs] -> [R, B, O]."""
        for name, module in self.layers:
            if not isinstance(module, nn.Linear):
                x = module(x)
                continue
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            assert isinstance(bias, Tensor)
            if isinstance(weight, Tensor):
                x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
            else:
                x = weight[0].multiply(x, *weight[1:]) + bias.unsqueeze(1)
        return x

    def bound(self, x: Tensor, y: Tensor, noise: Tensor, num_data: int) -> Tensor:
        """The ELBO summed over networks, in nats, from one batch and one draw of each.

        Args:
            x: [R, B, inputs].
            y: [R, B, O], outputs beyond which are dropped, or labels [R, B].
            noise: See `draw`.
            num_data: N, the same for all.
        """
        weights, kl = self.draw(noise)
        outputs = self.outputs(x, weights)
        if isinstance(self.likelihood, Gaussian):
            raw = self.parameters.get("raw_noise")
            variance = self.likelihood.noise.expand(len(self)) if raw is None else positive(raw)
            squares = (outputs[..., : y.shape[-1]] - y).square().sum((-1, -2))
            count = y.shape[-1] * y.shape[-2]
            density = -0.5 * (squares / variance + count * (variance.log() + math.log(2 * math.pi))).sum()
        else:
            density = outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).sum()
        return num_data / x.shape[1] * density - kl

    @torch.no_grad()
    def hand_back(self) -> list[BayesianNetwork]:
        """The networks, with the parameters as they are now."""
        for index, network in enumerate(self.networks):
            for key, tensors in _tensors(network).items():
                row = self.parameters[key][index].reshape(-1)
                for tensor, part in zip(tensors, row.split([tensor.numel() for tensor in tensors]), strict=True):
                    tensor.copy_(part.view_as(tensor))
        return self.networks


class _Draw(torch.autograd.Function):
    """mean + std * noise, and the summed KL to zero-mean Gaussians less the sum of the log prior scales."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor, precisions: Tensor) -> tuple[Tensor, Tensor]:
        std = log_std.exp()
        pull, scaled = mean * precisions, std.square() * precisions
        kl = 0.5 * (torch.dot(mean.view(-1), pull.view(-1)) + scaled.sum() - mean.numel()) - log_std.sum()
        ctx.save_for_backward(std, noise, pull, scaled)
        return torch.addcmul(mean, std, noise), kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        std, noise, pull, scaled = ctx.saved_tensors
        through, of_kl = grads
        slope = (through * noise).mul_(std).addcmul_(scaled, of_kl).sub_(of_kl)
        return torch.addcmul(through, pull, of_kl), slope, None, None


class _Form(torch.autograd.Function):
    """Blocks from their diagonals, [R, K, D] each -> [R, K, D, D]: `maths.walsh_hadamard.form` in one node with few calls."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, g: Tensor, right: Tensor) -> Tensor:
        size = g.shape[-1]
        signs = sign_matrix(size, g) / size
        c = (g.reshape(-1, size) @ signs).index_select(-1, exclusive_or(size, g.device).view(-1))
        middle, outer = c.view(*g.shape, size), left.unsqueeze(-1) * right.unsqueeze(-2)
        ctx.save_for_backward(left, right, signs, middle, outer)
        return middle * outer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        left, right, signs, middle, outer = ctx.saved_tensors
        size = left.shape[-1]
        inner = grads[0] * middle
        of_left = (inner @ right.unsqueeze(-1)).squeeze(-1) if size > 64 else (inner * right.unsqueeze(-2)).sum(-1)
        of_right = (inner * left.unsqueeze(-1)).sum(-2)
        index = exclusive_or(size, left.device).expand_as(middle)
        of_c = (grads[0] * outer).gather(-1, index).sum(-2)
        return of_left, (of_c.view(-1, size) @ signs).view_as(left), of_right


def _tensors(network: BayesianNetwork) -> dict[str, list[Tensor]]:
    """Parameters of a network by their part in a stack, in the order in which the posterior asks for noise."""
    posterior = network.posterior
    found: dict[str, list[Tensor]] = {}
    if isinstance(posterior, WalshHadamard) and posterior.covariance != "flow":
        vectors = posterior.vectors
        families: list[Any] = [posterior.g[str(size)] for size in posterior.groups]
        found["mean"] = vectors.mean_value.values() if isinstance(vectors, MeanField) else []
        found["log_std"] = vectors.raw_std.values() if isinstance(vectors, MeanField) else []
        found["mean"] += [family.mean_value for family in families]
        found["log_std"] += [family.log_std for family in families]
        found["sides"] = [side[str(size)] for size in posterior.groups for side in (posterior.left, posterior.right)]
        if posterior.covariance == "full":
            found["lower"] = [family.lower_value for family in families]
    elif isinstance(posterior, MeanField) and posterior.max_std is None:
        found["mean"], found["log_std"] = posterior.mean_value.values(), posterior.raw_std.values()
    elif isinstance(posterior, Dropout):
        found["mean"] = posterior.value.values()
    else:
        raise ValueError(
            f"Stack: {type(posterior).__name__} is not stacked here; use WalshHadamard without a flow, "
            "MeanField without a cap, or Dropout"
        )
    points: list[Tensor] = list(network.network.parameters())
    if points:
        found["points"] = points
    if isinstance(network.likelihood, Gaussian) and isinstance(network.likelihood.raw_noise, nn.Parameter):
        found["raw_noise"] = [network.likelihood.raw_noise]
    return found


def _prior_stds(network: BayesianNetwork) -> Tensor:
    """Prior standard deviation of each Gaussian of a network, [P]."""
    prior, posterior = network.prior.draw(1), network.posterior
    stds = [
        torch.full((value.numel(),), float(prior.std[name]), dtype=torch.float64)
        for name, value in by_weight(posterior).items()
    ]
    if isinstance(posterior, WalshHadamard):
        for size in posterior.groups:
            stds.append(posterior.prior_std(size, prior).cpu().expand(-1, size).flatten().double())
    return torch.cat(stds)


def by_weight(posterior: Posterior) -> dict[str, Tensor]:
    """Means, or values under `Dropout`, that belong to one weight each, by its name: those of biases under `WalshHadamard`."""
    if isinstance(posterior, WalshHadamard):
        return dict(posterior.vectors.mean_value.items()) if isinstance(posterior.vectors, MeanField) else {}
    if isinstance(posterior, MeanField):
        return dict(posterior.mean_value.items())
    return dict(posterior.value.items()) if isinstance(posterior, Dropout) else {}


def packed_places(size: int) -> Tensor:
    """Where the entries below the diagonal lie in a flattened matrix, row by row, [D (D - 1) / 2]."""
    rows, cols = torch.tril_indices(size, size, -1)
    return rows * size + cols


def _masks(posterior: Dropout) -> dict[str, int]:
    """Inputs of each weight that dropout masks."""
    return {weight.name: int(weight.units or 0) for weight in posterior.weights if posterior.masked(weight)}


def _known_likelihood(likelihood: Likelihood | None) -> Likelihood:
    if isinstance(likelihood, Categorical) or (isinstance(likelihood, Gaussian) and likelihood.raw_noise.ndim == 0):
        return likelihood
    raise ValueError(f"Stack: the likelihood is {likelihood}; give Gaussian with one variance, or Categorical")


def _known_layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    layers = list(network.named_children())
    plain = (nn.Linear, nn.ReLU, nn.Tanh)
    if not isinstance(network, nn.Sequential) or not all(isinstance(layer, plain) for _, layer in layers):
        raise ValueError("Stack: the network is no perceptron; give a Sequential of Linear, ReLU and Tanh (models.mlp)")
    return layers
