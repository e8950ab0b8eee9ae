r"""Attention by linearization.

With the attention A of the means, outputs $o_i = \sum_j A_{ij} v_j$ change by $\sum_j A_{ij}\,\delta v_j$, where values of one
channel vary together over positions, and by $\sum_j A_{ij}\,\delta S_{ij}\,(v_j - o_i)$, where the scores
$S_{ij} = q_i \cdot k_j / \sqrt d$ count as independent. Channels that vary together behind it do not, so that most of the spread
of a transformer's outputs is lost; a warning says so.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.linear import linear
from bayesify.moments.tensors import Moments, NoRule, in_pieces, moments_of, use

ATTENTION_WARNING = (
    "predict: method='moments' loses most of the spread behind attention: mutual information was a sixth of that of draws on a "
    "small transformer, probabilities closer to theirs than the mean network's; where the spread matters, use method='draws'"
)


def attend(
    queries: Any, keys: Any, values: Any, mask: Tensor | None, scale: float, show: bool = True
) -> tuple[Tensor, ...]:
    """Means and variances of outputs [B, ..., T, D], and, to show it, the attention [B, ..., T, J], from those of queries, keys and
    values."""
    warnings.warn(ATTENTION_WARNING, stacklevel=2)
    units: tuple[Any, ...] = (*queries, *keys, *values)
    kept = 3 if show else 2
    if len({len(part) for part in units if part is not None}) > 1:  # examples that share keys
        return _attend(scale, *(*units, mask))[:kept]
    if mask is not None:
        before = queries[0].ndim - mask.ndim
        mask = mask.expand(len(queries[0]), *[1] * (before - 1), *(mask.shape if before else mask.shape[1:]))
    return in_pieces(lambda *parts: _attend(scale, *parts)[:kept], *units, mask)


def _attend(
    scale: float,
    query: Tensor,
    query_spread: Tensor | None,
    key: Tensor,
    key_spread: Tensor | None,
    value: Tensor,
    value_spread: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    query = scale * query
    scores = query @ _turned(key)
    attention = (scores if mask is None else scores + mask).softmax(-1)
    if value_spread is None:
        mean = attention @ value
        spread = torch.zeros_like(mean)
    else:
        mean, std = (attention @ torch.cat((value, value_spread.sqrt()), -1)).chunk(2, -1)
        spread = std.square()
    pairs = []
    if query_spread is not None:
        second = key.square() if key_spread is None else torch.addcmul(key_spread, key, key)
        pairs.append((scale**2 * query_spread, second))
    if key_spread is not None:
        pairs.append((query.square(), key_spread))
    if pairs:
        left, right = (torch.cat(parts, -1) for parts in zip(*pairs, strict=True))
        weights = (left @ _turned(right)).mul_(attention).mul_(attention)  # [..., T, J]
        first, second = (weights @ torch.cat((value, value.square()), -1)).chunk(2, -1)
        moved = torch.addcmul(first, mean, weights.sum(-1, keepdim=True), value=-0.5)
        spread = spread.add_(torch.addcmul(second, mean, moved, value=-2).clamp_min_(0))
    return mean, spread, attention


def _turned(keys: Tensor) -> Tensor:
    """Keys [..., J, D] as [..., D, J]; a transposed view would be up to a hundred times slower in products on ARM."""
    return keys.mT.contiguous()


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


@Moments.rule(F.scaled_dot_product_attention)
def _scaled_dot_product(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Moments:
    if dropout_p or enable_gqa:
        raise NoRule("attention with dropout, or with groups of queries, has no rule")
    mean = moments_of(query)[0]
    mask = attn_mask if attn_mask is None or attn_mask.dtype != torch.bool else ~attn_mask
    if is_causal:
        mask = torch.ones(mean.shape[-2], key.shape[-2], dtype=torch.bool, device=mean.device).triu(1)
    scale = scale or mean.shape[-1] ** -0.5
    found, spread = attend(
        moments_of(query), moments_of(key), moments_of(value), _additive(mask, mean), scale, show=False
    )
    return Moments(found, spread, max(part.channels_ for part in (query, key, value) if isinstance(part, Moments)))


@Moments.rule(F.multi_head_attention_forward)
def _multi_head(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Inputs and outputs [T, B, E], as torch calls it."""
    if bias_k is not None or bias_v is not None or add_zero_attn or use_separate_proj_weight or query.ndim != 3:
        raise NoRule("attention with further keys, weights of their own for keys, or without a batch axis has no rule")
    if dropout_p and training:
        raise NoRule("attention with dropout has no rule")
    same = query is key and key is value
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))  # as most networks have them in memory
    if same:  # one product in place of three
        projections = _thirds(linear(query, in_proj_weight, in_proj_bias), -1)
    else:
        use(in_proj_weight)
        use(in_proj_bias)
        weights, biases = _thirds(in_proj_weight), [None] * 3 if in_proj_bias is None else _thirds(in_proj_bias)
        projections = [linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]
    heads = []
    for projected in projections:
        mean, spread = moments_of(projected)
        parts = [mean] if spread is None else [mean, spread]
        split = [part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts]  # [B, heads, T, D]
        heads.append((split[0], split[1] if len(split) > 1 else None))
    mean = heads[0][0]
    mask = _additive(attn_mask, mean)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, mean)[:, None, None]  # type: ignore[index]
        mask = padding if mask is None else mask + padding
    queries, keys, values = heads
    found, spread, *shown = attend(queries, keys, values, mask, mean.shape[-1] ** -0.5, need_weights)
    found, spread = (part.transpose(1, 2).flatten(2) for part in (found, spread))
    joined = Moments(found, spread)
    attention = (shown[0].mean(1) if average_attn_weights else shown[0]) if need_weights else None
    return linear(joined, out_proj_weight, out_proj_bias).transpose(0, 1), attention


def _thirds(value: Any, axis: int = 0) -> list[Any]:
    """Three parts of what torch keeps as one: weights, or the outputs of their product."""
    mean, spread = moments_of(value)
    if spread is None:
        return list(mean.chunk(3, axis))
    return [Moments(*parts, pass_=None) for parts in zip(mean.chunk(3, axis), spread.chunk(3, axis), strict=True)]
