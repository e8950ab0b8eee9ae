"""Subnetworks for `Laplace`. A subnetwork is the set of weights of a trained network that get a posterior."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from numbers import Integral
from random import Random
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, NonNegative, Positive, Probability, Seed, checked
from bayesify.jacobians import Gradients
from bayesify.maths.gamma import widened
from bayesify.maths.positive_definite import stable_eigh
from bayesify.weights.catalog import Weight, padding_entries

__all__ = [
    "Candidates",
    "Selector",
    "as_selector",
    "everything",
    "from_indices",
    "from_mask",
    "from_names",
    "largest_magnitude",
    "largest_swag_variance",
    "largest_variance",
    "last_layer",
    "posterior_gap",
    "random",
]


class SgdOptions(TypedDict):
    """Arguments of `SWAG.fit` for the iterates of SGD."""

    epochs: int
    learning_rate: float | None
    momentum: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Candidates:
    """Facts about a network that a selector may use.

    Args:
        weights: The trainable weights by name, in the order of `named_parameters()`.
        values: Point estimates of the weights.
        frozen: Names of weights that are not trained.
        curvatures: Function that computes the diagonal of the curvature in a pass over all data or over the first examples. The
            result has one tensor for each weight name.
        precisions: Prior precisions by name.
        last: Function that returns the names of the weights of the layer that runs last.
        iterates: Function that takes arguments of `SWAG.fit` and computes the variance of each weight over the iterates
            of SGD, by name.
        fixed: Flat indices of entries that cannot be chosen: padding rows of embeddings.
        remarks: List of notes on the choice. A selector appends its notes.
    """

    weights: Mapping[str, Weight]
    values: Mapping[str, Tensor]
    frozen: Sequence[str]
    curvatures: Callable[[int | None], Mapping[str, Tensor]]
    precisions: Callable[[], Mapping[str, Tensor]]
    last: Callable[[], Sequence[str]]
    iterates: Callable[[SgdOptions], Mapping[str, Tensor]]
    fixed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    remarks: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of trainable scalars, including scalars that cannot be chosen."""
        return sum(weight.numel for weight in self.weights.values())

    @property
    def free(self) -> int:
        """Number of scalars that can be chosen."""
        return self.total - len(self.fixed)

    def without_fixed(self, index: Tensor) -> Tensor:
        """The given indices, without the entries that cannot be chosen."""
        return index[~torch.isin(index.cpu(), self.fixed)] if len(self.fixed) else index

    def scored(self, scores: Tensor, count: int) -> Tensor:
        """Indices of the `count` largest of the `scores` [P], among the weights that can be chosen."""
        scores = scores.clone()
        scores[self.fixed.to(scores.device)] = -torch.inf
        return scores.topk(count).indices

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenate tensors, given by name, to a vector [P]."""
        return torch.cat([values[name].reshape(-1) for name in self.weights])


class Selector(ABC):
    """A rule that chooses entries of a network's trainable weights."""

    @abstractmethod
    def count(self, candidates: Candidates) -> int:
        """Number of entries that the selector will choose; the count takes no pass over the data.

        Raises:
            ValueError: If the network lacks weights that the selector needs.
        """

    @abstractmethod
    def select(self, candidates: Candidates) -> Tensor:
        """Indices of the chosen entries in the vector of all trainable weights; see `from_indices`."""


class _OfSize(Selector):
    """Selector of a given number or share of the weights. `choose` is a function that takes the candidates and the
    number of weights to choose."""

    def __init__(self, name: str, size: int | float, choose: Callable[[Candidates, int], Tensor]) -> None:
        if not size > 0 or (size > 1 and not isinstance(size, Integral)):
            raise ValueError(
                f"subnetwork.{name}: size={size} is not valid; give an integer number of weights, or a share between 0 "
                "and 1"
            )
        self.size: int | float = int(size) if isinstance(size, Integral) else float(size)
        self.choose = choose

    def count(self, candidates: Candidates) -> int:
        total = candidates.free
        if isinstance(self.size, float):
            return max(1, round(self.size * total))
        if self.size > total:
            raise ValueError(
                f"subnetwork: size={self.size}, but the network has {total} trainable weights; give at most {total}"
            )
        return self.size

    def select(self, candidates: Candidates) -> Tensor:
        return self.choose(candidates, self.count(candidates))


MIN_CURVATURE_RATIO = 0.1
"""Smallest ratio of curvature to prior precision at which the data are informative about a weight."""


def _by_variance(candidates: Candidates, count: int, num_examples: int | None, skip_flat: bool) -> Tensor:
    curvature = candidates.flat(candidates.curvatures(num_examples))
    precision = candidates.flat(candidates.precisions())
    variances = 1 / (curvature + precision)
    if not skip_flat:
        return candidates.scored(variances, count)
    curved = int((curvature > 0).sum())
    if curved == 0:
        raise ValueError(
            "subnetwork.largest_variance: no weight has any curvature, because the outputs do not depend on the weights "
            "near the data; check the network's outputs, or give skip_flat=False"
        )
    if curved < len(curvature):
        candidates.remarks.append(
            f"{1 - curved / len(curvature):.1%} of all weights have no curvature and are left out"
        )
    # Nearly flat weights get scores below every variance.
    last = torch.where(curvature > 0, curvature / precision - 1, -2.0)
    return candidates.scored(
        torch.where(curvature >= MIN_CURVATURE_RATIO * precision, variances, last), min(count, curved)
    )


def _by_iterates(candidates: Candidates, count: int, options: SgdOptions) -> Tensor:
    return candidates.scored(candidates.flat(candidates.iterates(options)), count)


def _by_magnitude(candidates: Candidates, count: int) -> Tensor:
    return candidates.scored(candidates.flat(candidates.values).abs(), count)


def _at_random(candidates: Candidates, count: int, seed: int) -> Tensor:
    free = candidates.without_fixed(torch.arange(candidates.total))
    return free[Random(seed).sample(range(len(free)), count)]


class _Entries(Selector):
    """Selector of given entries. `find` is a function that returns their indices for given candidates."""

    def __init__(self, find: Callable[[Candidates], Tensor]) -> None:
        self.find = find

    def count(self, candidates: Candidates) -> int:
        return len(self.select(candidates))

    def select(self, candidates: Candidates) -> Tensor:
        return candidates.without_fixed(self.find(candidates))


def _of_weights(candidates: Candidates, names: Collection[str]) -> Tensor:
    parts, start = [], 0
    for name, weight in candidates.weights.items():
        if name in names:
            parts.append(torch.arange(start, start + weight.numel))
        start += weight.numel
    return torch.cat(parts)


def _last(candidates: Candidates) -> Tensor:
    return _of_weights(candidates, candidates.last())


def _named(candidates: Candidates, names: Sequence[str]) -> Tensor:
    chosen: set[str] = set()
    for name in names:
        if any(sign in name for sign in "*?["):
            matched = [known for known in candidates.weights if fnmatchcase(known, name)]
            if not matched:
                raise ValueError(
                    f"subnetwork: {name!r} matches no trainable parameter; the network has {', '.join(candidates.weights)}"
                )
            chosen.update(matched)
            continue
        chosen.add(name)
        if name in candidates.frozen:
            raise ValueError(
                f"subnetwork: {name} is frozen (requires_grad=False); leave this name out, or unfreeze the parameter"
            )
        if name not in candidates.weights:
            raise ValueError(
                f"subnetwork: the network has no parameter {name!r}; it has {', '.join(candidates.weights)}"
            )
    return _of_weights(candidates, chosen)


def _indexed(candidates: Candidates, indices: Tensor) -> Tensor:
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= candidates.total:
        wrong = low if low < 0 else high
        raise ValueError(
            f"subnetwork.from_indices: index {wrong} is out of range; the network has {candidates.total} trainable weights"
        )
    return indices


def _masked(candidates: Candidates, mask: dict[str, Tensor] | Tensor) -> Tensor:
    if isinstance(mask, Tensor):
        flat = mask.reshape(-1).cpu().clone()
        if flat.numel() != candidates.total:
            raise ValueError(
                f"subnetwork.from_mask: the mask has {flat.numel()} entries, but the network has {candidates.total} trainable "
                "weights; give one entry per weight"
            )
    else:
        unknown = set(mask) - set(candidates.weights)
        if unknown:
            why = "is frozen" if min(unknown) in candidates.frozen else "is not a parameter of the network"
            raise ValueError(f"subnetwork.from_mask: the mask names {min(unknown)!r}, which {why}; leave this name out")
        parts = []
        for name, weight in candidates.weights.items():
            part = mask.get(name, torch.zeros(weight.shape, dtype=torch.bool))
            if part.shape != weight.shape:
                raise ValueError(
                    f"subnetwork.from_mask: the mask of {name} has shape {tuple(part.shape)}; give the weight's shape "
                    f"{tuple(weight.shape)}"
                )
            parts.append(part.reshape(-1).cpu())
        flat = torch.cat(parts)
    flat[candidates.fixed] = False
    return _checked_mask(flat).nonzero().squeeze(-1)


def _checked_mask(*parts: Tensor) -> Tensor:
    """The first of the given masks. Raises `ValueError` if no mask has a true entry."""
    if not any(bool(part.any()) for part in parts):
        raise ValueError("subnetwork.from_mask: the mask selects no weight; set at least one entry to True")
    return parts[0]


def as_mask(values: Any) -> Tensor:
    """Convert values that are true and false, or 1 and 0, to a boolean tensor."""
    found = torch.as_tensor(values)
    if found.dtype != torch.bool and not bool(((found == 0) | (found == 1)).all()):
        raise ValueError(
            "subnetwork: the mask has entries other than True and False (or 1 and 0); give a mask of these values, "
            "or use from_indices for positions"
        )
    return found.bool()


@checked
def largest_variance(size: Count | float, num_examples: Count | None = None, *, skip_flat: bool = True) -> Selector:
    r"""The weights with the largest variance $1 / (H_{dd} + \lambda)$ under the diagonal Laplace posterior.

    This is the strategy of Daxberger et al. 2021, section 4. Among subnetworks of the same size, the weights with the largest
    variances under the full posterior minimize `posterior_gap`, the squared 2-Wasserstein distance between the full posterior and
    the Gaussian that keeps only the covariance of the chosen weights. The diagonal Laplace posterior approximates the variances
    of the full posterior.

    Args:
        size: Number of weights S, or a share of all trainable weights as a float between 0 and 1.
        num_examples: Number of examples, from the start of the data, that are used for the variances. By default all
            examples are used.
        skip_flat: Whether to leave out weights without curvature, such as the weights of units that no example
            activates. The `repr` of the fitted posterior shows the share of such weights. If `skip_flat` is true, weights whose
            curvature is below `MIN_CURVATURE_RATIO` times the prior precision are chosen only after all other weights. Weights
            without curvature have the largest possible variance, about that of the prior, but do not change predictions near the
            data. The paper's formula chooses such weights first.

    Raises:
        ValueError: If the size is not positive, or if a share is above 1.
    """
    choose = partial(_by_variance, num_examples=num_examples, skip_flat=skip_flat)
    return _OfSize("largest_variance", size, choose)


@checked
def largest_swag_variance(
    size: Count | float,
    *,
    epochs: Count = 40,
    learning_rate: Positive | None = None,
    momentum: Probability = 0.9,
    weight_decay: NonNegative = 3e-4,
    seed: Seed = 0,
) -> Selector:
    """The weights with the largest variance over iterates of SGD from the trained network (SWAG's diagonal; Maddox et al. 2019).

    The code of Daxberger et al. 2021 uses this rule for images, with 256 epochs. Weights whose gradient is always 0 change only
    by the weight decay, so they are rarely chosen. The rule costs a training run: a copy of the network trains for the given
    number of epochs, and each epoch gives an iterate.

    Args:
        size: Number of weights S, or a share of all trainable weights as a float between 0 and 1.
        epochs: Number of epochs, which is also the number of iterates.
        learning_rate: Learning rate of SGD; by default the learning rate of `SWAG.fit`.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        seed: Seed of the order of the batches, if the loader uses torch's global random numbers.

    Raises:
        ValueError: If the size or the number of epochs is out of range.
    """
    if epochs < 2:
        raise ValueError(
            "subnetwork.largest_swag_variance: epochs=1 is too few, because a variance needs two iterates; give at "
            "least 2"
        )
    options = SgdOptions(
        epochs=epochs, learning_rate=learning_rate, momentum=momentum, weight_decay=weight_decay, seed=seed
    )
    return _OfSize("largest_swag_variance", size, partial(_by_iterates, options=options))


@checked
def random(size: Count | float, seed: Seed = 0) -> Selector:
    """Weights chosen uniformly at random: the baseline of Daxberger et al. 2021.

    Args:
        size: Number of weights, or a share as a float.
        seed: Seed of the choice.
    """
    return _OfSize("random", size, partial(_at_random, seed=seed))


@checked
def largest_magnitude(size: Count | float) -> Selector:
    """The weights with the largest absolute value.

    Args:
        size: Number of weights, or a share as a float.
    """
    return _OfSize("largest_magnitude", size, _by_magnitude)


def last_layer() -> Selector:
    """All weights of the layer that runs last (the neural-linear model)."""
    return _Entries(_last)


def everything() -> Selector:
    """All trainable weights."""
    return _Entries(partial(_named, names=["*"]))


@checked
def from_indices(indices: Tensor | Sequence[int]) -> Selector:
    """Weights that are given by their indices in the vector of all trainable weights.

    The vector joins all trainable parameters in the order of `named_parameters()`, each flattened in row-major order.

    Args:
        indices: Distinct integers, in any order.
    """
    found = torch.as_tensor(indices)
    if found.numel() == 0:
        raise ValueError("subnetwork.from_indices: indices= is empty; give at least one index")
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            "subnetwork.from_indices: indices= is not a list of integers; give integers, or use from_mask for a mask"
        )
    if len(found.unique()) != len(found):
        raise ValueError("subnetwork.from_indices: an index appears twice; give each index once")
    return _Entries(partial(_indexed, indices=found.long().cpu()))


@checked
def from_names(names: Sequence[str]) -> Selector:
    """Whole parameters that are given by their names in `named_parameters()`.

    Args:
        names: At least one name or glob, such as `"*lora_*"`. A glob selects the trainable parameters that it matches.
    """
    if isinstance(names, str) or not names:
        raise ValueError(
            f"subnetwork.from_names: names={names!r} is not a list of names; give a list with at least "
            "one parameter's name"
        )
    return _Entries(partial(_named, names=list(names)))


@checked
def from_mask(mask: Mapping[str, Tensor] | Tensor) -> Selector:
    """The weights for which a mask is true.

    Args:
        mask: Boolean tensors by name, each with the shape of its parameter, or one vector over all trainable weights. If the name
            of a parameter is missing, none of its entries is chosen.
    """
    if isinstance(mask, Mapping):
        named = {str(key): as_mask(part) for key, part in mask.items()}
        _checked_mask(*named.values())
        return _Entries(partial(_masked, mask=named))
    return _Entries(partial(_masked, mask=_checked_mask(as_mask(mask))))


def as_selector(subset: Any) -> Selector:
    """The selector for a `subset` argument: `"all"`, `"last_layer"`, a list of names, a mask by name, or a selector."""
    if isinstance(subset, Selector):
        return subset
    if isinstance(subset, str) and subset in ("all", "last_layer"):
        return everything() if subset == "all" else last_layer()
    if isinstance(subset, (Mapping, Tensor)):
        return from_mask(subset)
    named = isinstance(subset, Sequence) and not isinstance(subset, str)
    if not named or not all(isinstance(name, str) for name in subset):
        raise ValueError(
            f"Laplace: subset={subset!r} is not valid; give 'all', 'last_layer', a list of parameter names, or a "
            "selector such as bayesify.subnetwork.largest_variance(size=1000)"
        )
    return from_names(list(subset))


@checked
def posterior_gap(covariance: Tensor, mask: Tensor) -> Tensor:
    r"""The posterior gap: the squared 2-Wasserstein distance between $\mathcal{N}(m, \Sigma)$ and $\mathcal{N}(m, M \odot
    \Sigma)$.

    $$ \operatorname{tr}\Sigma + \operatorname{tr}(M \odot \Sigma) - 2 \operatorname{tr}\,(\Sigma\,(M \odot \Sigma))^{1/2} $$

    This is equation 12 of Daxberger et al. (2021), with $M = m m^\top$ for a mask m. The trace of $(\Sigma\,(M \odot
    \Sigma))^{1/2}$ is the sum of the square roots of the eigenvalues of $\Sigma\,(M \odot \Sigma)$. These eigenvalues equal the
    eigenvalues of the symmetric $R^\top \Sigma R$ with $R R^\top = M \odot \Sigma$.

    Args:
        covariance: $\Sigma$, [P, P].
        mask: Mask m, which is true for the weights of the subnetwork, [P].

    Returns:
        A scalar. It is 0 for a mask that is true everywhere.

    Raises:
        ValueError: If the shapes do not fit together, or if the matrix is not a covariance.
    """
    covariance, chosen = torch.as_tensor(covariance), as_mask(mask).reshape(-1)
    covariance = covariance if covariance.is_floating_point() else covariance.double()
    dtype = covariance.dtype
    if covariance.ndim != 2 or covariance.shape != (chosen.numel(), chosen.numel()):
        raise ValueError(
            f"posterior_gap: the covariance has shape {tuple(covariance.shape)}, but the mask has {chosen.numel()} "
            "entries; for P weights, give a covariance [P, P] and a mask [P]"
        )
    scale = covariance.abs().amax()
    symmetric = bool(torch.isfinite(scale)) and bool((covariance - covariance.T).abs().amax() <= 1e-4 * scale)
    if not symmetric or bool((covariance.diagonal() < 0).any()):
        raise ValueError(
            "posterior_gap: the covariance is not finite, is not symmetric, or has a negative variance; give a "
            "covariance matrix"
        )
    covariance = widened(covariance)
    least = stable_eigh(0.5 * (covariance + covariance.T), "posterior_gap: the covariance")[0].amin()
    if bool(least < -1e-4 * scale):
        raise ValueError(
            "posterior_gap: the covariance is not positive definite, because it has the eigenvalue "
            f"{float(least):.3g}; give a positive definite matrix"
        )
    inside = covariance[chosen][:, chosen]
    values, vectors = stable_eigh(inside, "posterior_gap: the covariance")
    root = vectors * values.clamp_min(0).sqrt()  # inside = root root^T
    middle = root.T @ inside @ root
    roots = stable_eigh(0.5 * (middle + middle.T), "posterior_gap: the product")[0].clamp_min(0).sqrt()
    return (covariance.diagonal().sum() + inside.diagonal().sum() - 2 * roots.sum()).to(dtype)


@dataclass(frozen=True)
class Subset:
    """S entries of weights, in the order of `named_parameters()` and row-major within a weight.

    For each chosen weight, `entries` contains the ascending flat indices of the chosen entries, [n], or `None` if all entries are
    chosen.
    """

    weights: Mapping[str, Weight]  # all weights that could be chosen, by name, in order
    entries: Mapping[str, Tensor | None]

    @classmethod
    def of_flat(cls, weights: Mapping[str, Weight], index: Tensor) -> Self:
        """Subset made from distinct indices into the concatenated weights; the indices may be in any order."""
        ascends = bool((index[1:] > index[:-1]).all())  # sorting millions of indices takes longer than a pass
        index = index if ascends else index.sort().values
        entries: dict[str, Tensor | None] = {}
        ends = torch.tensor([weight.numel for weight in weights.values()]).cumsum(0)
        parts = index.tensor_split(torch.searchsorted(index, ends)[:-1].tolist())
        for (name, weight), end, inside in zip(weights.items(), ends.tolist(), parts, strict=True):
            if len(inside):
                entries[name] = None if len(inside) == weight.numel else inside - (end - weight.numel)
        return cls(weights, entries)

    @classmethod
    def trained(cls, network: nn.Module, weights: Mapping[str, Weight]) -> Self:
        """Subset of all entries except the padding rows of embeddings, which torch does not train."""
        padding = padding_entries(network, weights)
        if not len(padding):
            return cls(weights, dict.fromkeys(weights))
        chosen = torch.ones(sum(weight.numel for weight in weights.values()), dtype=torch.bool)
        chosen[padding] = False
        return cls.of_flat(weights, chosen.nonzero()[:, 0])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights with at least one chosen entry."""
        return tuple(self.entries)

    def count(self, name: str) -> int:
        """Number of chosen entries of one weight."""
        index = self.entries[name]
        return self.weights[name].numel if index is None else len(index)

    @property
    def size(self) -> int:
        """Number S of chosen entries."""
        return sum(self.count(name) for name in self.entries)

    @property
    def total(self) -> int:
        """Number of entries that could be chosen."""
        return sum(weight.numel for weight in self.weights.values())

    def flat(self) -> Tensor:
        """Indices of the chosen entries in the concatenated weights, [S]."""
        parts, start = [], 0
        for name, weight in self.weights.items():
            if name in self.entries:
                index = self.entries[name]
                parts.append((torch.arange(weight.numel) if index is None else index.cpu()) + start)
            start += weight.numel
        return torch.cat(parts)

    def take(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the chosen entries of weights, given by name, to a vector [S]."""
        return torch.cat([self.pick(name, values[name].reshape(-1)) for name in self.entries])

    def pick(self, name: str, flat: Tensor) -> Tensor:
        """The chosen entries of one weight: [..., numel] -> [..., n]."""
        index = self.entries[name]
        return flat if index is None else flat[..., index.to(flat.device)]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a vector over the subset into one part per weight: [..., S] -> [..., n] for each weight."""
        return dict(zip(self.entries, flat.split([self.count(name) for name in self.entries], dim=-1), strict=True))

    def gradients(self, gradients: Gradients, name: str) -> Tensor:
        """Gradients with respect to the chosen entries of one weight, [K, B, n]."""
        index = self.entries[name]
        if index is None:
            return gradients.dense(name).reshape(*gradients.shape, -1)
        return gradients.columns(name, index.to(gradients.device))

    def rows(self, gradients: Gradients) -> Tensor:
        """Gradients with respect to all chosen entries, [K, B, S]."""
        return torch.cat([self.gradients(gradients, name) for name in self.entries], dim=-1)

    def move(self, gradients: Gradients, offsets: Tensor) -> Tensor:
        """Changes of the linearized outputs, [S, K, B], if offsets [S, n] are added to the chosen entries."""
        moved = offsets.new_zeros(len(offsets), *gradients.shape)
        for name, part in self.split(offsets).items():
            moved += torch.einsum("kbn,sn->skb", self.gradients(gradients, name).detach(), part)
        return moved

    def spread(self, offsets: Tensor) -> dict[str, Tensor]:
        """Convert offsets [n, S] to one tensor [n, *shape] per weight name, with 0 for entries that are not chosen. If all
        entries of a weight are chosen, its tensor is a view of the offsets."""
        found = {}
        for name, part in self.split(offsets).items():
            shape, index = self.weights[name].shape, self.entries[name]
            if index is not None:
                part = part.new_zeros(len(part), self.weights[name].numel).index_copy(1, index.to(part.device), part)
            found[name] = part.unflatten(-1, shape) if shape else part.squeeze(-1)
        return found

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the chosen entries of tensors [n, *shape], given by name, to a tensor [n, S]."""
        return torch.cat([self.pick(name, values[name].flatten(1)) for name in self.entries], dim=-1)

    def fill(self, offsets: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For each weight with chosen entries, the complete tensor: the point estimates, with offsets [n, S] added to the chosen
        entries. Each tensor is [n, *shape]."""
        moved = self.spread(offsets).items()
        return {name: (values[name].to(part.dtype) + part).to(values[name].dtype) for name, part in moved}
