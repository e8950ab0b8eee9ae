"""Curvature of a network's loss: products of Jacobians, summed over the data in pieces that fit into memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayesify.jacobians import FeatureCost, Features, Gradients, Jacobians, Linearization
from bayesify.jacobians.general import Args, Kwargs
from bayesify.jacobians.rules import layer_factors
from bayesify.laplace.subnetwork import Subset
from bayesify.likelihoods import Likelihood
from bayesify.maths.gamma import as_float, widened
from bayesify.predictor import Batch
from bayesify.running.inputs_and_outputs import as_inputs, checked_inputs
from bayesify.running.progress import Display
from bayesify.training.batches import BatchReader, batches_all_over, check_repeatable, parse_batch
from bayesify.training.rules import Score
from bayesify.weights.catalog import Layer, Weight, group_layers

Curvature = Literal["ggn", "empirical"]
Structure = Literal["full", "diagonal", "kronecker", "sampled"]
"""Structure of the curvature, and of the covariance that follows from the curvature."""


MAX_DIAGONALIZED_WEIGHTS = 8192
"""Largest subset whose full curvature is diagonalized once, in float64, for all prior precisions. For a larger subset,
each precision needs its own factorization, computed in the network's type."""


def first_batch(loader: Iterable[Any]) -> Any:
    """The first item of a loader. Raises `ValueError` if the loader cannot be iterated again or is empty."""
    check_repeatable(loader)
    for item in loader:
        return item
    raise ValueError("Laplace: the loader has no examples; give a loader with at least one example")


@dataclass
class OutputCurvature:
    """The curvature $H_n$ of the loss with respect to an example's outputs, as vectors whose outer products sum to $H_n$.

    `"ggn"` is the Fisher matrix, which is the Hessian for Gaussian, categorical and Bernoulli likelihoods.
    `"empirical"` is the outer product of g with itself, where g is the gradient of the log-likelihood at the observed target. By
    default, `"ggn"` has one vector per output, and the sum is exact. If `num_samples` is given, that many random vectors per
    example replace the exact vectors. The expected sum of the random vectors' outer products is the Fisher matrix.
    """

    likelihood: Likelihood
    kind: Curvature = "ggn"
    num_samples: int | None = None
    seed: int = 0
    _generator: torch.Generator | None = None

    @property
    def count(self) -> int | None:
        """Number of vectors per example; `None` for one vector per output."""
        return self.num_samples if self.kind == "ggn" else 1

    def vectors(self, outputs: Tensor, batch: Batch) -> Tensor:
        r"""Vectors $r_{kn}$, [K, B, ...], with $\sum_k r_{kn} r_{kn}^\top = H_n$."""
        outputs = outputs.detach()
        if self.kind == "empirical":
            with torch.enable_grad():
                leaf = as_float(outputs.clone())
                leaf.requires_grad_()
                log_prob = self.likelihood.log_prob(leaf, batch.y, has_draws=False).sum()
                vectors = torch.autograd.grad(log_prob, leaf)[0].unsqueeze(0)
        elif self.num_samples is None:
            vectors = self.likelihood.fisher_factor(outputs, batch.y)
        else:
            if self._generator is None or self._generator.device != outputs.device:
                self._generator = torch.Generator(outputs.device).manual_seed(self.seed)
            vectors = self.likelihood.fisher_samples(outputs, self.num_samples, batch.y, generator=self._generator)
        if batch.weights is not None:
            vectors = vectors * batch.weights.sqrt().reshape(1, -1, *[1] * (vectors.ndim - 2)).to(vectors)
        return vectors.detach()


@dataclass
class DataTerm:
    """Sums over the data, such as the log-likelihood and the number of examples, computed in the same pass as the curvature."""

    log_likelihood: float = 0.0
    num_data: int = 0
    total_weight: float = 0.0  # sum of the examples' weights
    squared_error: float = 0.0  # sum of squared residuals, for Gaussian noise

    def __post_init__(self) -> None:
        self._waiting: Tensor | None = None
        self._targets: Tensor | None = None  # see `_target_sums`; set in a pass over the data

    def add(self, likelihood: Likelihood, outputs: Tensor, batch: Batch) -> None:
        """Add one piece. The sums stay on the device until `sum_over_processes`, so that the host does not wait."""
        log_prob = likelihood.log_prob(outputs.detach(), batch.y, has_draws=False).double()
        weights = batch.weights.to(log_prob) if batch.weights is not None else torch.ones_like(log_prob)
        sums = [(weights * log_prob).sum(), weights.sum()]
        if likelihood.name == "gaussian":
            residual = outputs.detach().double().reshape(len(batch), -1) - batch.y.double().reshape(len(batch), -1)
            sums.append((weights * residual.square().sum(-1)).sum())
        found = torch.stack(sums)
        self._waiting = found if self._waiting is None else self._waiting + found
        targets = _target_sums(likelihood, outputs, batch, weights)
        self._targets = targets if self._targets is None or targets is None else self._targets + targets
        self.num_data += len(batch)

    def sum_over_processes(self) -> None:
        """Add up the sums over all pieces and processes."""
        waiting = [] if self._waiting is None else self._waiting.tolist()
        sums = [float(self.num_data), *waiting, *[0.0] * (3 - len(waiting))]
        total = sum_over_processes(torch.tensor(sums, dtype=torch.float64)).tolist()
        self.num_data, self._waiting = int(total[0]), None
        self.log_likelihood, self.total_weight, self.squared_error = total[1:]
        if self._targets is not None:
            self._targets = sum_over_processes(self._targets)

    def score(self) -> Score:
        """Score of the network on the data. It includes the score of the best constant guess if this score is known."""
        nll, targets = -self.log_likelihood / max(self.total_weight, 1e-30), self._targets
        if targets is None:
            return Score(nll, None, self.num_data)
        if targets.ndim == 1:
            shares = targets / targets.sum().clamp_min(1e-30)
            entropy = -float(torch.xlogy(shares, shares).sum())
            return Score(nll, None, self.num_data, guess=entropy * float(targets.sum()) / max(self.total_weight, 1e-30))
        count, total, squares = targets  # [O]
        variance = (squares / count - (total / count).square()).mean().clamp_min(0)
        rmse = (self.squared_error / float(count.sum())) ** 0.5
        return Score(nll, None, self.num_data, rmse, float(variance.sqrt()))


def _target_sums(likelihood: Likelihood, outputs: Tensor, batch: Batch, weights: Tensor) -> Tensor | None:
    """For Gaussian noise, the weighted sums of 1, y and y squared, [3, O]. For a classification, the sum of the example weights
    of each class, [K]. Otherwise `None`."""
    y = batch.y.reshape(len(batch), -1)
    if likelihood.name == "gaussian":
        powers = (torch.ones_like(y, dtype=weights.dtype), y.double(), y.double().square())
        return torch.stack([weights @ part for part in powers])
    axis = likelihood.logit_axis(outputs.ndim)
    if axis is None or y.is_floating_point():
        return None
    num_classes = outputs.shape[axis]
    counted = weights.unsqueeze(1) * ((y >= 0) & (y < num_classes))  # an ignored label may be any number
    places = y.long().clamp(0, num_classes - 1).flatten()
    return torch.zeros(num_classes, dtype=weights.dtype, device=y.device).index_add_(0, places, counted.flatten())


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of a tensor over the processes of `torch.distributed`; the tensor itself if there is only one process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return tensor
    moved = tensor.cuda() if distributed.get_backend() == "nccl" and not tensor.is_cuda else tensor
    distributed.all_reduce(moved)
    return moved.to(tensor.device)


@dataclass(frozen=True)
class Examples:
    """The data to which an approximation is fitted. Iteration yields all batches on the device, without examples of
    weight 0."""

    loader: Iterable[Any]
    reader: BatchReader | None
    device: torch.device
    progress: bool

    def __iter__(self) -> Iterator[Batch]:
        for item in self.loader:
            batch = parse_batch(item, self.reader).to(self.device).weighed()
            if len(batch):
                yield batch

    def all_over(self, count: int) -> list[Batch]:
        """Batches that come from all parts of the data and together hold about `count` examples."""
        return [batch.to(self.device) for batch in batches_all_over(self.loader, count, self.reader)]


@dataclass
class Pieces:
    """A pass over examples, in pieces whose Jacobians fit into a memory budget.

    For each piece, iteration yields the linearized network, the vectors of its `OutputCurvature`, and the weights of
    the examples. Iteration also adds up the data term.
    """

    examples: Examples
    jacobians: Jacobians
    loss: OutputCurvature
    memory: int  # budget in bytes
    per_row: int  # number of entries of the Jacobian that are held per example and vector
    num_examples: int | None = None  # number of examples after which to stop
    one_by_one: bool = False  # whether vectors are pulled back one after the other
    progress: Callable[[int], None] | None = None  # called after each piece with the number of examples
    store: torch.device | None = None  # device that adds up Kronecker factors; by default the network's

    def __post_init__(self) -> None:
        self.data = DataTerm()

    def __iter__(self) -> Iterator[tuple[Linearization, Tensor, Tensor | None]]:
        data = DataTerm()
        for piece, (args, kwargs) in self.read(data, self._rows):
            point = self.jacobians.at(args, kwargs)
            data.add(self.loss.likelihood, point.outputs, piece)
            yield point, self.loss.vectors(point.outputs, piece), piece.weights
            del point  # free its activations before the next piece runs
        self.close(data)

    def features(self) -> Iterator[tuple[Features, Batch]]:
        """A pass over the examples that yields the inputs of the network's last layer instead of derivatives.

        Raises `FeaturesEnd` if any process finds a batch in which the network's outputs are not the outputs of its last layer.
        """
        data, ended = DataTerm(), False
        with self.jacobians.held() as jacobians:
            for piece, (args, kwargs) in self.read(data, self._feature_rows):
                found = jacobians.features(args, kwargs)
                ended = found is None
                if found is None:
                    break
                data.add(self.loss.likelihood, found.outputs, piece)
                yield found, piece
        if float(sum_over_processes(torch.tensor(float(ended)))):
            raise FeaturesEnd
        self.close(data)

    def _rows(self, args: Args, kwargs: Kwargs) -> int:
        return rows_at_once(
            self.jacobians, args, kwargs, self.memory, self.per_row, self.loss.count, one_by_one=self.one_by_one
        )

    def _feature_rows(self, args: Args, kwargs: Kwargs) -> int:
        cost = self.jacobians.feature_cost(args, kwargs)
        return 1 if cost is None else feature_rows(cost, self.memory)

    def read(
        self, data: DataTerm, count_rows: Callable[[Args, Kwargs], int]
    ) -> Iterator[tuple[Batch, tuple[Any, Any]]]:
        """Pieces of the batches and the inputs of each piece, until `num_examples` examples have been read."""
        check_repeatable(self.examples.loader)
        rows = 0
        for batch in self.examples:
            if self.num_examples is not None:
                batch = batch.rows(slice(0, self.num_examples - data.num_data))
            inputs = checked_inputs(batch.x)
            rows = rows or count_rows(*inputs)
            step = -(-len(batch) // -(-len(batch) // rows))  # pieces of equal size
            for start in range(0, len(batch), step):
                piece = batch.rows(slice(start, start + step))
                yield piece, as_inputs(piece.x)
                if self.progress is not None:
                    self.progress(len(piece))
            if self.num_examples is not None and data.num_data >= self.num_examples:
                break

    def close(self, data: DataTerm) -> None:
        """Store the data term of a finished pass, summed over processes."""
        if data.num_data == 0:
            raise ValueError(
                "Laplace: every example of the loader has weight 0; give at least one example a positive weight"
            )
        data.sum_over_processes()
        self.data = data

    @contextmanager
    def shown(self, title: str, show: bool) -> Iterator[None]:
        """Show the number of finished examples if there is a terminal and `rich` is installed."""
        dataset: Any = getattr(self.examples.loader, "dataset", None)
        total = len(dataset) if hasattr(dataset, "__len__") else None
        if self.num_examples is not None:
            total = min(self.num_examples, total or self.num_examples)
        with show_progress(title, total, show) as self.progress:
            yield


@contextmanager
def show_progress(
    title: str, total: int | None, show: bool, *, transient: bool = False
) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar, and yield a function that advances it by a number of steps; `None` if there is no bar."""
    columns = ("{task.description}", "bar", "percent", "left")
    with Display(*columns, show=show, total=total, transient=transient, description=title) as bar:
        yield (lambda count: bar.update(advance=count)) if bar.shown else None


class FeaturesEnd(Exception):
    """Raised if the network's outputs are not the outputs of its last layer, so that derivatives have to be
    computed."""


def feature_rows(cost: FeatureCost, memory: int, per_row: int = 0) -> int:
    """Largest number of examples, but at least 1, whose `Features` fit into a budget of bytes in one pass. Each example takes
    `per_row` extra numbers."""
    held = cost.activations + 12 * cost.inputs + 40 * cost.outputs + 8 * per_row
    return max(1, int(memory // held))


def rows_at_once(
    jacobians: Jacobians,
    args: Args,
    kwargs: Kwargs,
    memory: int,
    per_row: int,
    vectors: int | None = None,
    *,
    one_by_one: bool = False,
) -> int:
    """Number of examples whose activations, vectors, gradients at the layers and Jacobian entries fit into a budget of bytes."""
    cost = jacobians.cost(args, kwargs)
    count = min(vectors or cost.outputs, cost.outputs)
    pulled = (1 if one_by_one else count) * (cost.per_vector + 8 * per_row)
    return max(1, int(memory // (2 * cost.activations + 4 * count * cost.outputs + pulled)))


def full_curvature(pieces: Pieces, subset: Subset) -> dict[str, Tensor]:
    r"""The curvature $\sum_n J_n^\top H_n J_n$, [S, S], of the chosen weights (Daxberger et al. 2021, equation 6), stored under
    the key `curvature`."""
    total = torch.zeros(0)
    for point, vectors, _ in pieces:
        rows = subset.rows(point.pull(vectors)).detach().flatten(0, 1)  # [K B, S]
        total = total if len(total) else rows.new_zeros(subset.size, subset.size)
        total.addmm_(rows.T, rows)
        del point, rows
    return {"curvature": sum_over_processes(total)}


def diagonal_curvature(pieces: Pieces, subset: Subset) -> dict[str, Tensor]:
    """The diagonal [S] of the curvature that `full_curvature` computes, stored under the key `curvature`."""
    totals: dict[str, Tensor] = {}
    for point, vectors, _ in pieces:
        for vector in vectors:
            _add_squares(totals, subset.names, point.pull(vector.unsqueeze(0)), subset, pieces.memory)
        del point
    return {"curvature": sum_over_processes(torch.cat([totals[name] for name in subset.names]))}


def _add_squares(
    totals: dict[str, Tensor], names: Iterable[str], gradients: Gradients, subset: Subset, memory: int
) -> None:
    """Square the gradients of some weights, sum the squares over vectors and examples, and add the sums [n] to `totals` by
    name."""
    for name in names:
        index = subset.entries[name]
        index = None if index is None else index.to(gradients.device)
        squares = gradients.sum_of_squares(name, memory, index).detach()
        totals[name] = totals[name] + squares if name in totals else squares


def kronecker_curvature(pieces: Pieces, subset: Subset) -> dict[str, Tensor]:
    r"""Kronecker-factored curvature $A \otimes G$ of linear maps and convolutions, and the diagonal for all other weights.

    $A = \frac{1}{N T} \sum_{n,t} \omega_n a_{nt} a_{nt}^\top$ and $G = \sum_{n,t,k} \omega_n g_{ntk} g_{ntk}^\top$.
    Here n runs over the examples, which have weights $\omega_n$ with $N = \sum_n \omega_n$; t runs over the positions
    at which the layer is applied; and k runs over the vectors of $H_n$ (Martens & Grosse 2015; Grosse & Martens 2016).
    The curvature is exact for one example and one position. A layer that does not see every example of every batch
    (because of routing or masks) gets the diagonal, which takes a second pass over the data.

    Returns:
        For each linear map and each convolution without groups: `inputs/<layer>`, which is A over $[W\ b]$, and
        `slopes/<layer>`, which is G. For each other weight: `diagonal/<name>`, [n].
    """
    grouped = group_layers(subset.weights[name] for name in subset.names)
    layers = [layer for layer in grouped if all(map(_is_one_map, layer.weights))]
    covered = {weight.name for layer in layers for weight in layer.weights}
    apart = [name for name in subset.names if name not in covered]
    sums: dict[str, Tensor] = {}  # sums of a a^T and g g^T
    counts = dict.fromkeys((layer.name for layer in layers), 0.0)  # N T
    squares: dict[str, Tensor] = {}
    missed: set[str] = set()
    for point, vectors, weights in pieces:
        gradients = point.pull(vectors)  # the vectors include the roots of the example weights
        total = float(len(point.outputs) if weights is None else weights.double().sum())
        _add_squares(squares, apart, gradients, subset, pieces.memory)
        missed |= {layer.name for layer in layers if not has_factors(layer, gradients)}
        for layer in layers:
            if layer.name not in missed:
                counts[layer.name] += total * _add_factors(sums, layer, gradients, weights, pieces.store)
        del point, gradients
    # A layer that did not see all examples of some batch, in any process, has no factors.
    bad = sum_over_processes(torch.tensor([float(layer.name in missed) for layer in layers]))
    chosen = [layer for layer, count in zip(layers, bad.tolist(), strict=True) if not count]
    found: dict[str, Tensor] = {}
    for layer in chosen:
        count = float(sum_over_processes(torch.tensor(counts[layer.name], dtype=torch.float64)))
        found[f"inputs/{layer.name}"] = sum_over_processes(sums[f"inputs/{layer.name}"]) / count
        found[f"slopes/{layer.name}"] = sum_over_processes(sums[f"slopes/{layer.name}"])
    rest = [weight.name for layer in layers if layer not in chosen for weight in layer.weights]
    diagonals = {name: sum_over_processes(total).to(pieces.store or total.device) for name, total in squares.items()}
    if rest:
        partial = Subset(subset.weights, dict.fromkeys(rest))
        more = partial.split(diagonal_curvature(pieces, partial)["curvature"])
        diagonals |= {name: value.to(pieces.store or value.device) for name, value in more.items()}
    return found | {f"diagonal/{name}": diagonals[name] for name in subset.names if name in diagonals}


def _add_factors(
    sums: dict[str, Tensor], layer: Layer, gradients: Gradients, weights: Tensor | None, store: torch.device | None
) -> int:
    """Add a layer's products a a^T and g g^T to the sums, on the device of the sums, and count the layer's positions."""
    positions = 0
    for use, kept, grads in gradients.calls(layer.weights[0].name):
        a, g = layer_factors(use.rule, kept, grads, layer)
        positions += a.shape[1]
        a = a if weights is None else a * weights.to(a).sqrt().view(-1, 1, 1)
        for key, factor in ((f"inputs/{layer.name}", a), (f"slopes/{layer.name}", g)):
            rows = factor.flatten(0, -2)
            size, home = rows.shape[-1], store or rows.device
            total = sums.setdefault(key, rows.new_zeros(size, size, device=home))
            if home == rows.device:
                total.addmm_(rows.T, rows)
            else:
                total.add_((rows.T @ rows).to(home))
    return positions


CURVATURES: dict[Structure, Callable[[Pieces, Subset], dict[str, Tensor]]] = {
    "full": full_curvature,
    "diagonal": diagonal_curvature,
    "kronecker": kronecker_curvature,
}
"""Functions that compute the tensors of a curvature for `covariances.from_curvature`, by the structure of the covariance."""


def has_factors(layer: Layer, gradients: Gradients) -> bool:
    """Whether a linear map has seen all examples of a batch, so that its inputs and the gradients at its outputs are complete."""
    if not gradients.calls(layer.weights[0].name):
        return False
    uses = [gradients.uses(weight.name) for weight in layer.weights]
    return all(len(own) == 1 and own[0].rule.has_factors for own in uses)


def _is_one_map(weight: Weight) -> bool:
    return weight.kind == "matrix" and weight.groups == 1 and not weight.transposed and not weight.aliases


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
    """For each of a position's R groups of classes, a mask of the rows of W that belong to the group: [R, T, K]."""
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
    r"""The curvature $\sum_{n,t} H_{nt} \otimes a_{nt} a_{nt}^\top$ of a layer with inputs a, computed without derivatives.

    Tensors have the names that the functions in `CURVATURES` use. The results equal the curvature from the Jacobian, even for
    Kronecker factors. Raises `FeaturesEnd` if the network's outputs are not the layer's outputs in some batch.
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
    """For each entry of `[W b]`, its index in the subset: [K, D]."""
    places = subset.split(torch.arange(subset.size))
    return torch.cat([places[weight.name].reshape(layer.rows, -1) for weight in layer.weights], dim=1)


def _kronecker_sums(piece: Piece, memory: int) -> dict[str, Tensor]:
    """Sums of `a a^T` and of H, and the number of positions. Each position counts with the weight of its example."""
    flat, a = piece.products.flatten(0, 1), piece.inputs
    slopes = torch.diag(piece.diagonal.sum(0)).addmm_(flat.T, flat, alpha=-1)
    weights = torch.ones_like(piece.diagonal[:, 0]) if piece.weights is None else piece.weights
    rows = a if piece.weights is None else a * weights.to(a).unsqueeze(1)
    return {"inputs": rows.T @ a, "slopes": slopes, "count": weights.sum()}


def _diagonal_sums(piece: Piece, memory: int) -> dict[str, Tensor]:
    """The squared inputs times the diagonal of H, summed over positions, for each entry of [W b]."""
    diagonal = (piece.diagonal - piece.products.square().sum(0)).clamp_min_(0)
    return {"curvature": (diagonal.to(piece.inputs).T @ piece.inputs.square()).flatten()}


def _full_sums(piece: Piece, memory: int) -> dict[str, Tensor]:
    """Full curvature of [W b], summed over positions, [K D, K D], in float64 for at most `MAX_DIAGONALIZED_WEIGHTS` weights."""
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
