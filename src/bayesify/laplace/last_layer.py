r"""Curvature of a network's last layer, computed from the layer's inputs without derivatives:
$\sum_{n,t} H_{nt} \otimes a_{nt} a_{nt}^\top$."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.jacobians import Features
from bayesify.laplace.curvature import MAX_DIAGONALIZED_WEIGHTS, FeaturesEnd, Pieces, Structure, sum_over_processes
from bayesify.laplace.subset import Subset
from bayesify.likelihoods import Likelihood
from bayesify.maths.gamma import widened
from bayesify.predictor import Batch
from bayesify.weights.catalog import Layer, group_layers


def layer_of(subset: Subset) -> Layer | None:
    """The layer to which the weights of a subset belong. `None` if they belong to several layers, or if only some entries of a
    weight are in the subset."""
    layers = group_layers(subset.weights[name] for name in subset.names)
    return layers[0] if len(layers) == 1 and all(index is None for index in subset.entries.values()) else None


@dataclass(frozen=True)
class Piece:
    r"""Data of the last layer at N positions: the inputs of the layer, and the curvature $H = \operatorname{diag}(h) -
    \sum_r q_r q_r^\top$ over its outputs.

    h is in float64 if the device supports it, because h and q q^T nearly cancel for confident predictions.
    """

    inputs: Tensor  # [N, D], with a column of ones for the bias
    diagonal: Tensor  # h, [N, K]
    products: Tensor  # q, [R, N, K], one for each group of classes at a position; R may be 0
    weights: Tensor | None  # example weight of each position, [N]; `None` if all are 1


def read_piece(features: Features, layer: Layer, likelihood: Likelihood, batch: Batch) -> Piece:
    """The inputs of the layer, and the curvature of the loss with respect to the layer's outputs.

    Raises `FeaturesEnd` if classes are spread over several positions of the layer.
    """
    a = features.of(layer)
    h, q = likelihood.fisher_parts(widened(features.outputs), batch.y)
    diagonal = features.at_positions(h.detach())
    products = diagonal.new_zeros(0, *diagonal.shape)
    if q is not None:
        products = features.at_positions(q.detach()).unsqueeze(0)
        if features.outputs.shape[1:] != (features.channels,):  # several groups of classes, or positions
            products = products * group_masks(features, likelihood).to(diagonal).unsqueeze(1)
    weights = None
    if batch.weights is not None:
        each = batch.weights.to(diagonal).reshape(-1, 1, 1)
        diagonal, products = diagonal * each, products * each.sqrt()
        weights = each.expand(-1, a.shape[1], 1).flatten()
    return Piece(a.flatten(0, 1), diagonal.flatten(0, 1), products.flatten(1, 2), weights)


def group_masks(features: Features, likelihood: Likelihood) -> Tensor:
    """Masks of the rows of W that belong to the same group of classes, [R, T, K]. Each position has R groups."""
    shape = features.outputs.shape
    axis = likelihood.logit_axis(len(shape))
    assert axis is not None
    count = shape[1:].numel() // shape[axis]
    rest = torch.arange(count).reshape(1, *[size for dim, size in enumerate(shape[1:]) if dim + 1 != axis % len(shape)])
    groups = features.at_positions(rest.unsqueeze(axis).expand(1, *shape[1:]))[0]  # [T, K]
    first = groups.amin(1, keepdim=True)
    per_position = count // len(groups) if count % len(groups) == 0 else 0
    local = groups - first
    whole = torch.equal(first.flatten().sort().values, per_position * torch.arange(len(groups)))
    if not per_position or not whole or int(local.max()) >= per_position:
        raise FeaturesEnd
    return local == torch.arange(per_position)[:, None, None]


def last_layer_curvature(pieces: Pieces, subset: Subset, structure: Structure) -> dict[str, Tensor]:
    """The curvature of a layer with a given structure, computed in a forward pass over the data.

    Tensors have the same names as in `CURVATURES`. The results equal the curvature from the Jacobian, even for Kronecker
    factors. Raises `FeaturesEnd` if the network's outputs are not the layer's outputs in some batch.
    """
    layer = layer_of(subset)
    assert layer is not None
    totals: dict[str, Tensor] = {}
    for features, batch in pieces.features():
        piece = read_piece(features, layer, pieces.loss.likelihood, batch)
        for name, value in SUMS[structure](piece, pieces.memory).items():
            totals[name] = totals[name].add_(value) if name in totals else value
    summed = {name: sum_over_processes(value) for name, value in totals.items()}
    kind = piece.inputs.dtype
    if structure == "kronecker":
        inputs = (summed["inputs"] / summed["count"]).to(kind)
        return {f"inputs/{layer.name}": inputs, f"slopes/{layer.name}": summed["slopes"].to(kind)}
    found = summed["curvature"].to(kind)
    if structure == "diagonal":
        return {"curvature": subset.take(layer.from_matrix(found.reshape(layer.rows, -1)))}
    places = matrix_order(subset, layer).flatten().to(found.device)
    order = torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=places.device))
    return {"curvature": found.index_select(0, order).index_select(1, order)}


def matrix_order(subset: Subset, layer: Layer) -> Tensor:
    """The index of each entry of `[W b]` in the subset, [K, D]."""
    places = subset.split(torch.arange(subset.size))
    return torch.cat([places[weight.name].reshape(layer.rows, -1) for weight in layer.weights], dim=1)


def _kronecker_sums(piece: Piece, memory: int) -> dict[str, Tensor]:
    """Sums of a a^T and of H, and the number of positions. Each position has the weight of its example."""
    flat, a = piece.products.flatten(0, 1), piece.inputs
    slopes = torch.diag(piece.diagonal.sum(0)).addmm_(flat.T, flat, alpha=-1)
    weights = torch.ones_like(piece.diagonal[:, 0]) if piece.weights is None else piece.weights
    rows = a if piece.weights is None else a * weights.to(a).unsqueeze(1)
    return {"inputs": rows.T @ a, "slopes": slopes, "count": weights.sum()}


def _diagonal_sums(piece: Piece, memory: int) -> dict[str, Tensor]:
    """Sums of squared inputs times the diagonal of H, over [W b]."""
    diagonal = (piece.diagonal - piece.products.square().sum(0)).clamp_min_(0)
    return {"curvature": (diagonal.to(piece.inputs).T @ piece.inputs.square()).flatten()}


def _full_sums(piece: Piece, memory: int) -> dict[str, Tensor]:
    """Sum of the full curvature over [W b], [K D, K D], in float64 for at most `MAX_DIAGONALIZED_WEIGHTS` weights."""
    outputs, columns = piece.diagonal.shape[1], piece.inputs.shape[1]
    size = outputs * columns
    a = widened(piece.inputs) if size <= MAX_DIAGONALIZED_WEIGHTS else piece.inputs
    total = a.new_zeros(outputs, columns, outputs, columns)
    step = max(1, memory // (4 * a.element_size() * size))
    for start in range(0, len(a), step):
        some, h = a[start : start + step], piece.diagonal[start : start + step].to(a)
        blocks = (h.T.unsqueeze(-1) * some).mT @ some  # [K, D, D]
        total.diagonal(dim1=0, dim2=2).add_(blocks.movedim(0, -1))
        for q in piece.products[:, start : start + step].to(a):
            rows = (q.unsqueeze(-1) * some.unsqueeze(1)).flatten(1)  # [n, K D]
            total.view(size, size).addmm_(rows.T, rows, alpha=-1)
    return {"curvature": total.view(size, size)}


SUMS = {"kronecker": _kronecker_sums, "diagonal": _diagonal_sums, "full": _full_sums}
"""Functions that compute the sums of a piece of the data, by the structure of the covariance."""
