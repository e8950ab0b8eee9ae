"""Derivatives with respect to one layer's weights, computed from its inputs and the gradients at its outputs, for each example."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bayesify.maths.gamma import as_float
from bayesify.weights.catalog import Layer

MAX_GATHERED_PRODUCTS = 2**24
"""Largest number of products that are held at once while chosen entries are gathered."""

DENSE_PRODUCT_SPEEDUP = 16
"""Approximate cost of a gathered product relative to a product inside a matrix multiplication."""


class Rule(ABC):
    """How the outputs of one kind of layer depend on its weights.

    For one call of the layer on a batch of B examples, `kept` contains the inputs, and `g` [K, B, ...] contains K gradients at
    the layer's outputs. A rule turns `kept` and `g` into gradients with respect to the weight, one for each of the K vectors and
    each example.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]]
    has_factors = False
    """Whether the layer is one linear map, possibly applied at several positions."""
    channel_axis = -1
    """Axis of the layer's outputs that corresponds to the rows of its weight."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def keep(self, inputs: Tensor) -> Tensor:
        """The part of the layer's inputs that the derivative needs, [B, ...]."""
        return inputs

    def dense(self, leaf: str, kept: Tensor, g: Tensor) -> Tensor:
        """Gradient with respect to every entry of the weight or bias called `leaf`: [K, B, *shape]."""
        return self._bias(as_float(g)) if leaf == "bias" else self._weight(kept, as_float(g))

    def columns(self, leaf: str, kept: Tensor, g: Tensor, index: Tensor) -> Tensor:
        """Gradient [K, B, n] with respect to n entries, whose flat indices are `index` [n]."""
        if leaf == "bias":
            return self._bias(as_float(g)).flatten(2)[..., index]
        return self._columns(kept, as_float(g), index)

    def _bias(self, g: Tensor) -> Tensor:
        return g.flatten(3).sum(-1)

    @abstractmethod
    def _weight(self, kept: Tensor, g: Tensor) -> Tensor:
        """Gradient with respect to every entry of the weight, not of the bias: [K, B, *shape]."""

    def _columns(self, kept: Tensor, g: Tensor, index: Tensor) -> Tensor:
        """The chosen entries of `_weight`. Some subclasses compute only the chosen entries."""
        return self._weight(kept, g).flatten(2)[..., index]

    def factors(self, kept: Tensor, g: Tensor) -> tuple[Tensor, Tensor] | None:
        """Inputs [B, T, d_in] and gradients [K, B, T, d_out] of a linear map at T positions; `None` for other layers."""
        return None

    def positions(self, kept: Tensor, outputs: Tensor) -> Tensor:
        """Inputs [B, T, d_in] of a linear map at each of the T positions of its outputs [B, ...]."""
        return kept


class LinearRule(Rule):
    r"""Rule of a linear layer: $\partial / \partial W_{ij} = \sum_t g_{ti} a_{tj}$ over the positions t at which the layer is
    applied."""

    kinds = (nn.Linear,)
    has_factors = True

    def keep(self, inputs: Tensor) -> Tensor:
        """Inputs with all positions on one axis: [B, T, d_in]."""
        return as_float(inputs).reshape(inputs.shape[0], -1, inputs.shape[-1])

    def _bias(self, g: Tensor) -> Tensor:
        return self._at_positions(g).sum(2)

    def _weight(self, kept: Tensor, g: Tensor) -> Tensor:
        return fold_product(self._at_positions(g).movedim(2, -1), kept)

    def _columns(self, kept: Tensor, g: Tensor, index: Tensor) -> Tensor:
        g = self._at_positions(g)
        rows, cols = index // kept.shape[-1], index % kept.shape[-1]
        if kept.shape[1] == 1:
            return g[:, :, 0, rows] * kept[:, 0, cols]
        return gather_products(g.movedim(2, -1), kept.transpose(1, 2), rows, cols)

    def factors(self, kept: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return kept, self._at_positions(g)

    @staticmethod
    def _at_positions(g: Tensor) -> Tensor:
        return as_float(g).reshape(*g.shape[:2], -1, g.shape[-1])


class ConvRule(Rule):
    r"""Rule of a convolution: $\partial / \partial W_{o c k} = \sum_p g_o(p)\, x_c(s p + d k)$ over output positions p, with x
    padded."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    channel_axis = 1

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.has_factors = module.groups == 1 and not module.transposed

    def keep(self, inputs: Tensor) -> Tensor:
        """Padded inputs, [B, C, ...]; inputs of a transposed convolution are not padded."""
        module = self.module
        if inputs.ndim != len(module.kernel_size) + 2:
            raise ValueError(
                "a convolution got inputs without a batch axis, which its derivative rule does not support"
            )
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padding = () if module.transposed else module._reversed_padding_repeated_twice
        return F.pad(as_float(inputs), padding, mode=mode) if any(padding) else as_float(inputs)

    def patches(self, padded: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """A view of padded feature maps [B, C, ...] that has one window for each output position: [B, C, *k, *sizes]."""
        module = self.module
        strides = padded.stride()
        windows = [stride * dilation for stride, dilation in zip(strides[2:], module.dilation, strict=True)]
        steps = [stride * step for stride, step in zip(strides[2:], module.stride, strict=True)]
        shape = (*padded.shape[:2], *module.kernel_size, *sizes)
        return padded.as_strided(shape, (*strides[:2], *windows, *steps), padded.storage_offset())

    def _weight(self, kept: Tensor, g: Tensor) -> Tensor:
        groups, (kernels, batch) = self.module.groups, g.shape[:2]
        sizes = tuple(g.shape[3:])
        columns = self.patches(kept, sizes).reshape(batch, groups, -1, math.prod(sizes))  # [B, G, c k, P]
        rows = g.reshape(kernels, batch, groups, -1, math.prod(sizes)).movedim(0, 2)  # [B, G, K, o, P]
        product: Tensor = rows.flatten(2, 3) @ columns.transpose(-1, -2)  # [B, G, K o, c k]
        return torch.unflatten(product, 2, (kernels, -1)).movedim(2, 0).reshape(kernels, batch, *self._shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        module = self.module
        return (module.out_channels, module.in_channels // module.groups, *module.kernel_size)

    def _columns(self, kept: Tensor, g: Tensor, index: Tensor) -> Tensor:
        return self._gather(g.flatten(3), kept, tuple(g.shape[3:]), index)

    def _gather(self, g: Tensor, padded: Tensor, sizes: tuple[int, ...], index: Tensor) -> Tensor:
        """Products of `g` [K, B, rows, P] and windows of `padded`, summed over P positions, for n entries: [K, B, n]."""
        kernel, (first, inside) = self.module.kernel_size, self._shape[:2]
        size = math.prod(kernel)
        rows, column = index // (inside * size), index % (inside * size)
        column = column + (rows // (first // self.module.groups)) * inside * size  # over the channels of all groups
        columns, place_of = column.unique(return_inverse=True)
        window = torch.unravel_index(columns % size, kernel)
        seen = self.patches(padded, sizes)[(slice(None), columns // size, *window)].flatten(2)  # [B, c, P]
        return gather_products(g, seen, rows, place_of)

    def factors(self, kept: Tensor, g: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.has_factors:
            return None
        return self.positions(kept, g[0]), as_float(g).flatten(3).transpose(2, 3)

    def positions(self, kept: Tensor, outputs: Tensor) -> Tensor:
        sizes = tuple(outputs.shape[2:])
        return self.patches(kept, sizes).reshape(kept.shape[0], -1, math.prod(sizes)).transpose(1, 2)


class TransposedConvRule(ConvRule):
    """Rule of a transposed convolution: windows are taken from the gradient and weighted by the inputs."""

    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

    @property
    def _shape(self) -> tuple[int, ...]:
        module = self.module
        return (module.in_channels, module.out_channels // module.groups, *module.kernel_size)

    def _pad(self, g: Tensor) -> Tensor:
        return F.pad(g, [side for size in reversed(self.module.padding) for side in (size, size)])

    def _weight(self, kept: Tensor, g: Tensor) -> Tensor:
        groups, batch, sizes = self.module.groups, kept.shape[0], tuple(kept.shape[2:])
        rows = kept.reshape(batch, groups, -1, math.prod(sizes))  # [B, G, c_in, P]
        found = []
        for vector in self._pad(g.flatten(0, 1)).unflatten(0, g.shape[:2]):
            windows = self.patches(vector, sizes).reshape(batch, groups, -1, math.prod(sizes))
            found.append((rows @ windows.transpose(-1, -2)).reshape(batch, *self._shape))
        return torch.stack(found)

    def _columns(self, kept: Tensor, g: Tensor, index: Tensor) -> Tensor:
        found = [
            self._gather(kept.flatten(2).unsqueeze(0), vector, tuple(kept.shape[2:]), index)[0]
            for vector in self._pad(g.flatten(0, 1)).unflatten(0, g.shape[:2])
        ]
        return torch.stack(found)


class LookupRule(Rule):
    """Rule of an embedding table: the gradient at each position is added to the row that was looked up there, unless that is the
    padding row."""

    kinds = (nn.Embedding,)

    def keep(self, inputs: Tensor) -> Tensor:
        """Indices of the looked-up rows, with all positions on one axis: [B, T]."""
        if self.module.max_norm is not None or self.module.scale_grad_by_freq:
            raise ValueError(
                "an embedding has max_norm= or scale_grad_by_freq=, which its derivative rule does not support"
            )
        return inputs.reshape(inputs.shape[0], -1)

    def _weight(self, kept: Tensor, g: Tensor) -> Tensor:
        g = self.without_padding(kept, g)  # [K, B, T, D]
        table = g.new_zeros(g.shape[0], g.shape[1], self.module.num_embeddings, g.shape[-1])
        index = kept.unsqueeze(-1).expand(g.shape)
        return table.scatter_add(2, index, g)

    def _columns(self, kept: Tensor, g: Tensor, index: Tensor) -> Tensor:
        g = self.without_padding(kept, g)
        rows, cols = index // g.shape[-1], index % g.shape[-1]
        parts = []
        for part in chunk_entries(len(index), g[..., :1].numel()):
            hit = (kept.unsqueeze(-1) == rows[part]).to(g.dtype)  # [B, T, n]
            parts.append((g[..., cols[part]] * hit).sum(2))
        return torch.cat(parts, dim=-1)

    def without_padding(self, kept: Tensor, g: Tensor) -> Tensor:
        """Gradients [K, B, T, D], set to 0 at the padding index."""
        g = as_float(g).reshape(*g.shape[:2], -1, g.shape[-1])
        if self.module.padding_idx is None:
            return g
        return g * torch.ne(kept, self.module.padding_idx).unsqueeze(-1).to(g.dtype)


class NormRule(Rule):
    r"""Rule of a normalization layer: $\sum_t g_t \hat x_t$ for the scale and $\sum_t g_t$ for the shift."""

    kinds = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

    def keep(self, inputs: Tensor) -> Tensor:
        """Normalized inputs: [B, ...]."""
        x, module = as_float(inputs), self.module
        if isinstance(module, _BatchNorm):
            if module.running_mean is None or module.running_var is None:
                raise ValueError("a batch normalization has no running statistics, which its derivative rule needs")
            mean, variance = module.running_mean.to(x), module.running_var.to(x)
            return F.batch_norm(x, mean, variance, None, None, False, 0.0, module.eps)
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, None, None, module.eps)
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        return F.rms_norm(x, module.normalized_shape, None, module.eps)

    def _weight(self, kept: Tensor, g: Tensor) -> Tensor:
        return self._bias(g * kept)

    def _bias(self, g: Tensor) -> Tensor:
        if isinstance(self.module, (_BatchNorm, nn.GroupNorm)):
            return g.flatten(3).sum(-1) if g.ndim > 3 else g
        return g.reshape(*g.shape[:2], -1, *self.module.normalized_shape).sum(2)


RULES: tuple[type[Rule], ...] = (LinearRule, ConvRule, TransposedConvRule, LookupRule, NormRule)


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a layer; `None` if the layer has no rule."""
    for rule in RULES:
        if isinstance(module, rule.kinds):
            return rule(module)
    return None


def layer_factors(rule: Rule, kept: Tensor, g: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Inputs [B, T, d_in] of one call of a linear map, with a column of ones for a bias, and gradients [K, B, T, d_out]."""
    factors = rule.factors(kept.detach(), g.detach())
    assert factors is not None
    return with_ones(factors[0], layer), factors[1]


def with_ones(a: Tensor, layer: Layer) -> Tensor:
    """Inputs [B, T, d_in] of a linear map, with a column of ones for a bias, in the column order of `[W b]`: [B, T, D]."""
    ones = a.new_ones(*a.shape[:2], 1)
    return torch.cat([ones if weight.is_bias else a for weight in layer.weights], dim=-1)


def fold_product(g: Tensor, a: Tensor) -> Tensor:
    """`sum_t g[k, b, i, t] a[b, t, j]`, [K, B, i, j], computed as one product per example, without a copy of `a` for each k."""
    if a.shape[1] == 1:
        return g * a
    product = g.movedim(0, 1).flatten(1, 2) @ a  # [B, K i, j]
    return torch.unflatten(product, 1, (g.shape[0], -1)).movedim(1, 0)


def gather_products(g: Tensor, a: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """`sum_t g[k, b, rows[n], t] a[b, cols[n], t]`: [K, B, n], by gathering or by one dense product, whichever is cheaper."""
    some_rows, row_place = rows.unique(return_inverse=True)
    some_cols, col_place = cols.unique(return_inverse=True)
    if len(some_rows) * len(some_cols) <= DENSE_PRODUCT_SPEEDUP * len(rows):
        block = fold_product(g[:, :, some_rows], a[:, some_cols].transpose(1, 2))
        return block[:, :, row_place, col_place]
    parts = [
        torch.einsum("kbnt,bnt->kbn", g[:, :, rows[part]], a[:, cols[part]])
        for part in chunk_entries(len(rows), g[:, :, :1].numel())
    ]
    return torch.cat(parts, dim=-1)


def chunk_entries(total: int, size: int) -> list[slice]:
    """Slices that cover `total` entries of `size` products each. A slice has at most `MAX_GATHERED_PRODUCTS` products."""
    step = max(1, MAX_GATHERED_PRODUCTS // max(1, size))
    return [slice(start, start + step) for start in range(0, total, step)]
