"""Some entries of a network's weights, in one fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesify.jacobians import Gradients
from bayesify.weights.catalog import Weight, padding_entries


@dataclass(frozen=True)
class Subset:
    """S entries of weights, in the order of `named_parameters()` and row-major within a weight.

    For each chosen weight, `entries` contains the ascending flat indices of the chosen entries, [n], or `None` if all entries are
    chosen.
    """

    weights: Mapping[str, Weight]  # all weights that could be chosen, by name, in order
    entries: Mapping[str, Tensor | None]

    @classmethod
    def of_flat(cls, weights: Mapping[str, Weight], index: Tensor) -> Subset:
        """Subset made from distinct indices into the concatenated weights, in any order."""
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
    def trained(cls, network: nn.Module, weights: Mapping[str, Weight]) -> Subset:
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
        """The chosen entries of weights that are given by name, concatenated, [S]."""
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
        """Offsets [n, S] as tensors [n, *shape] by name, with 0 for entries that are not chosen. If all entries of a weight are
        chosen, its tensor is a view of the offsets."""
        found = {}
        for name, part in self.split(offsets).items():
            shape, index = self.weights[name].shape, self.entries[name]
            if index is not None:
                part = part.new_zeros(len(part), self.weights[name].numel).index_copy(1, index.to(part.device), part)
            found[name] = part.unflatten(-1, shape) if shape else part.squeeze(-1)
        return found

    def gather(self, values: Mapping[str, Tensor]) -> Tensor:
        """The chosen entries of tensors [n, *shape] that are given by name, concatenated, [n, S]."""
        return torch.cat([self.pick(name, values[name].flatten(1)) for name in self.entries], dim=-1)

    def fill(self, offsets: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Complete weight tensors by name: the point estimates, with offsets [n, S] added to the chosen entries. Each tensor is
        [n, *shape]."""
        moved = self.spread(offsets).items()
        return {name: (values[name].to(part.dtype) + part).to(values[name].dtype) for name, part in moved}
