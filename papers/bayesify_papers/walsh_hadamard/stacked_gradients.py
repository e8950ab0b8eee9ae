"""The gradient of a stack's bound, written out: for small networks a step costs its calls, and these are fewer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesify.likelihoods import Gaussian
from bayesify.maths.constraints import positive
from bayesify.maths.walsh_hadamard import exclusive_or
from bayesify.posteriors import Dropout, WalshHadamard
from bayesify.posteriors.walsh_hadamard.blocks import Blocks
from bayesify.transforms.sign_matrices import sign_matrix
from bayesify_papers.walsh_hadamard.stacked import Stack, by_weight, packed_places


class Gradients:
    """The gradient of `Stack.bound` by all parameters of a stack, from calls that a small network's step is made of.

    Stacks with matrices that are not formed, blocks of 256 and more, are differentiated automatically: arithmetic is their cost.

    Args:
        stack: Its parameters may be exchanged later; their shapes may not.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack, posterior = stack, stack.posterior
        self.groups = list(posterior.groups.items()) if isinstance(posterior, WalshHadamard) else []
        self.written_out = not any(piece.fast for _, pieces in self.groups for piece in pieces)
        like = stack.parameters["mean"].detach()
        self.ends: list[tuple[int, int]] = list(pairwise(stack.ends))
        self.tables: list[tuple[Tensor, Tensor]] = []
        self.buffers: list[Tensor] = []
        if not self.written_out:
            return
        for size, pieces in self.groups:
            count = pieces[-1].stop
            index = exclusive_or(size, like.device)
            self.tables.append((sign_matrix(size, like) / size, index))
            self.buffers.append(like.new_zeros(len(stack), count, size, size))
        self.through = torch.zeros_like(like)
        self.of_points = torch.zeros_like(stack.parameters.get("points", like).detach())
        values = by_weight(posterior)
        self.vectors = {
            name: (span, tuple(value.shape)) for (name, value), span in zip(values.items(), self.ends, strict=False)
        }
        self.group_spans = self.ends[len(values) :]
        self.lowers = [like.new_zeros(len(stack), count, size, size) for size, count in stack.lower_blocks]
        self.places = [packed_places(size) for size, _ in stack.lower_blocks]
        self.mixed, self.growth = torch.zeros_like(like), torch.ones_like(like)
        self.precisions = stack.precisions
        if isinstance(posterior, Dropout):
            scales = [
                like.new_full((value.numel(),), 1 / (1 - posterior.rate) if name in stack.masks else 1.0)
                for name, value in values.items()
            ]
            self.precisions = stack.precisions * torch.cat(scales)

    def __call__(self, x: Tensor, y: Tensor, noise: Tensor, num_data: int) -> dict[str, Tensor]:
        """Gradients by the name of the parameter; see `Stack.bound` for the arguments."""
        stack = self.stack
        if not self.written_out:
            values = list(stack.parameters.values())
            grads = torch.autograd.grad(stack.bound(x, y, noise, num_data), values)
            return dict(zip(stack.parameters, grads, strict=True))
        with torch.no_grad():
            return self._written_out(x, y, noise, num_data)

    def _written_out(self, x: Tensor, y: Tensor, noise: Tensor, num_data: int) -> dict[str, Tensor]:
        parameters, posterior = self.stack.parameters, self.stack.posterior
        mean = parameters["mean"]
        masks: dict[str, Tensor] = {}
        if isinstance(posterior, Dropout):
            drawn, std = mean, None
            keep = (noise >= posterior.rate).to(noise.dtype) / (1 - posterior.rate)
            masks = dict(zip(self.stack.masks, keep.split(list(self.stack.masks.values()), dim=-1), strict=True))
        else:
            std = parameters["log_std"].exp()
            if self.lowers:
                plain, noise = noise, self._mix(noise)
            drawn = torch.addcmul(mean, std, noise)
        weights, kept = self._form(drawn, masks)
        inputs, outputs = self._forward(x, weights)
        found, slope = self._likelihood(outputs, y, num_data / x.shape[1])
        self._backward(slope, inputs, weights, masks)
        if self.groups:
            found["sides"] = torch.cat(
                [part for index in range(len(self.groups)) for part in self._factors(index, kept)], -1
            )
        if self.stack.points:
            found["points"] = self.of_points
        through = self.through
        found["mean"] = torch.addcmul(through, mean, self.precisions, value=-1)
        if std is not None:
            spread = (through * noise).mul_(std)
            if self.lowers:
                pull = std.square().mul_(self.precisions)
                found["lower"] = self._lower(through * std, plain, pull)
                found["log_std"] = spread.addcmul_(pull, self.growth, value=-1).add_(1)
            else:
                found["log_std"] = spread.addcmul_(std.square_(), self.precisions, value=-1).add_(1)
        return found

    def _mix(self, noise: Tensor) -> Tensor:
        """See `Stack._mix`; into buffers."""
        self.mixed.copy_(noise)
        at = 0
        for lower, places, (start, stop) in zip(self.lowers, self.places, self.group_spans, strict=True):
            count, size = lower.shape[1:3]
            number = count * len(places)
            packed = self.stack.parameters["lower"][:, at : at + number].unflatten(-1, (count, -1))
            lower.view(len(self.stack), count, -1).index_copy_(-1, places, packed)
            own = noise[:, start:stop].view(-1, count, 1, size)
            self.mixed[:, start:stop].view(-1, count, size).add_((lower * own).sum(-1))
            self.growth[:, start:stop].view(-1, count, size).copy_(lower.square().sum(-1)).add_(1)
            at += number
        return self.mixed

    def _lower(self, slope: Tensor, noise: Tensor, pull: Tensor) -> Tensor:
        """Gradient by the packed factors, from that by the mixed noise and from the KL."""
        found = []
        for lower, places, (start, stop) in zip(self.lowers, self.places, self.group_spans, strict=True):
            count, size = lower.shape[1:3]
            through = slope[:, start:stop].view(-1, count, size, 1) * noise[:, start:stop].view(-1, count, 1, size)
            through.addcmul_(lower, pull[:, start:stop].view(-1, count, size, 1), value=-1)
            found.append(through.view(-1, count, size * size).index_select(-1, places).flatten(1))
        return torch.cat(found, -1)

    def _form(self, drawn: Tensor, masks: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[tuple[Tensor, ...]]]:
        """Weights of all networks by name, [R, *shape], and what the blocks' gradients need again."""
        weights: dict[str, Tensor] = {
            name: self.stack.parameters["points"][:, start:stop].unflatten(-1, shape)
            for name, (start, stop, shape) in self.stack.points.items()
        }
        for name, ((start, stop), shape) in self.vectors.items():
            weight = drawn[:, start:stop].unflatten(-1, shape) if len(shape) > 1 else drawn[:, start:stop]
            weights[name] = weight * masks[name].unsqueeze(-2) if name in masks else weight
        kept: list[tuple[Tensor, ...]] = []
        at = 0
        for (size, pieces), (start, stop), (signs, index) in zip(
            self.groups, self.group_spans, self.tables, strict=True
        ):
            number, shape = stop - start, (len(self.stack), -1, size)
            sides = self.stack.parameters["sides"]
            left, right = sides[:, at : at + number].view(shape), sides[:, at + number : at + 2 * number].view(shape)
            at += 2 * number
            values = drawn[:, start:stop].reshape(-1, size) @ signs
            middle = values.index_select(-1, index.view(-1)).view(len(self.stack), -1, size, size)
            outer = left.unsqueeze(-1) * right.unsqueeze(-2)
            blocks = middle * outer
            for piece in pieces:
                weights[piece.weight.name] = piece.blocks.assemble(blocks[:, piece.start : piece.stop])
            kept.append((left, right, middle, outer))
        return weights, kept

    def _forward(self, x: Tensor, weights: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """What each layer was given, [R, B, *] each, and the outputs."""
        inputs = []
        for name, module in self.stack.layers:
            inputs.append(x)
            if isinstance(module, nn.Linear):
                weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"].unsqueeze(1)
                narrow = weight.shape[1] == 1  # a batch of products is a loop over them, a sum is not
                x = (x * weight).sum(-1, keepdim=True).add_(bias) if narrow else torch.baddbmm(bias, x, weight.mT)
            else:
                x = module(x)
        return inputs, x

    def _likelihood(self, outputs: Tensor, y: Tensor, scale: float) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by the noise, where it is a parameter, and by the outputs."""
        if not isinstance(self.stack.likelihood, Gaussian):
            slope = outputs.softmax(-1).neg_()
            slope.scatter_add_(-1, y.unsqueeze(-1), slope.new_ones(()).expand(*y.shape, 1))
            return {}, slope.mul_(scale)
        raw = self.stack.parameters.get("raw_noise")
        residual = y - outputs[..., : y.shape[-1]]
        if raw is None:
            return {}, _widen(residual.mul_(scale / self.stack.likelihood.noise), outputs)
        precision = positive(raw).reciprocal_()
        squares = torch.linalg.vector_norm(residual, dim=(-1, -2)).square_()
        count = y.shape[-1] * y.shape[-2]
        of_noise = squares.mul_(precision).sub_(count).mul_(precision).mul_(raw.sigmoid()).mul_(0.5 * scale)
        return {"raw_noise": of_noise}, _widen(residual.mul_((precision * scale)[:, None, None]), outputs)

    def _backward(
        self, slope: Tensor, inputs: list[Tensor], weights: dict[str, Tensor], masks: dict[str, Tensor]
    ) -> None:
        """Gradients by the weights, into `through` and the blocks' buffers."""
        where = {piece.weight.name: (index, piece) for index, (_, pieces) in enumerate(self.groups) for piece in pieces}
        for position in reversed(range(len(inputs))):
            name, module = self.stack.layers[position]
            x = inputs[position]
            if isinstance(module, nn.ReLU):
                slope = slope.mul_(x > 0)
                continue
            if isinstance(module, nn.Tanh):
                slope = slope.mul_(1 - inputs[position + 1].square())
                continue
            narrow = slope.shape[-1] == 1
            of_weight = (slope * x).sum(1, keepdim=True) if narrow else torch.bmm(slope.mT, x)
            key = f"{name}.weight"
            if key in where:
                index, piece = where[key]
                _put(piece.blocks, of_weight, self.buffers[index][:, piece.start : piece.stop])
            else:
                self._keep(key, of_weight.mul_(masks[key].unsqueeze(-2)) if key in masks else of_weight)
            self._keep(f"{name}.bias", slope.sum(1))
            if position:
                weight = weights[key]
                slope = slope * weight if narrow else torch.bmm(slope, weight)

    def _keep(self, name: str, grad: Tensor) -> None:
        """Put the gradient by a weight that is no matrix of blocks in its place."""
        if name in self.vectors:
            (start, stop), into = self.vectors[name][0], self.through
        else:
            (start, stop), into = self.stack.points[name][:2], self.of_points
        into[:, start:stop].copy_(grad.flatten(1))

    def _factors(self, index: int, kept: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Gradients by the two sides of a group's blocks, [R, K D] each; that by g goes into `through`."""
        left, right, middle, outer = kept[index]
        grad, (signs, table) = self.buffers[index], self.tables[index]
        start, stop = self.group_spans[index]
        inner = middle.mul_(grad)
        of_left = (inner * right.unsqueeze(-2)).sum(-1)
        of_right = inner.mul_(left.unsqueeze(-1)).sum(-2)
        of_values = outer.mul_(grad).gather(-1, table.expand_as(outer)).sum(-2)
        self.through[:, start:stop].copy_((of_values.view(-1, signs.shape[0]) @ signs).view(len(self.stack), -1))
        return of_left.flatten(1), of_right.flatten(1)


def _widen(slope: Tensor, outputs: Tensor) -> Tensor:
    """Zeros for outputs that are dropped."""
    dropped = outputs.shape[-1] - slope.shape[-1]
    return nn.functional.pad(slope, (0, dropped)) if dropped else slope


def _put(blocks: Blocks, matrix: Tensor, into: Tensor) -> None:
    """Write matrices [R, rows, cols] into the places of their blocks, [R, K, D, D]; what these cover beyond them stays as it is."""
    if blocks.along == "cols":
        wide = into.movedim(-3, -2)  # [R, D, K, D]
        for number, part in enumerate(matrix.split(blocks.size, dim=-1)):
            wide[:, : blocks.rows, number, : part.shape[-1]].copy_(part)
    else:
        blocks.assemble(into).copy_(matrix)
