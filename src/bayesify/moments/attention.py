r"""Means and variances of the outputs of attention, computed by linearization.

Let A be the attention that is computed from the means, and let $S_{ij} = q_i \cdot k_j / \sqrt d$ be the scores. The change of an
output $o_i = \sum_j A_{ij} v_j$ is the sum of $\sum_j A_{ij}\,\delta v_j$ and
$\sum_j A_{ij}\,(\delta S_{ij} - \sum_k A_{ik}\,\delta S_{ik})\,v_j$. When the variances of units after the attention are
computed, the scores are treated as independent of each other. The values of a channel remain correlated between positions.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.moments.linear import linear
from bayesify.moments.responses import Node
from bayesify.moments.tensors import ESTIMATED, Moments, NoRule, Value, in_pieces, meet, nonlinear, units, use, value_of

MAX_SCORE_STD = 1.0
"""Maximum standard deviation of attention scores, weighted by the attention. Above this value, attention is too far from linear."""


def attend(
    query: tuple[Tensor, Tensor | None],
    key: tuple[Tensor, Tensor | None],
    value: tuple[Tensor, Tensor | None],
    share: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Means and variances of the outputs of attention, computed from the means and variances of queries, [B, ..., T, D], and of
    keys and values, [B, ..., J, D].

    `share` [B] is the correlation of the values between positions. The mask is added to the scores. The four results are the
    outputs' means, [B, ..., T, D]; the outputs' variances, [B, ..., T, D]; the attention, [B, ..., T, J]; and the
    attention-weighted variance of the scores, [B, ..., T, 1].
    """
    parts = (*query, *key, *value)
    mean = query[0]
    if mask is not None:
        before = mean.ndim - mask.ndim
        mask = mask.expand(len(mean), *[1] * (before - 1), *(mask.shape if before else mask.shape[1:]))
    return in_pieces(lambda *pieces: _attend(scale, *pieces), *parts, share.view(-1, *[1] * (mean.ndim - 1)), mask)


def _attend(
    scale: float,
    query: Tensor,
    query_spread: Tensor | None,
    key: Tensor,
    key_spread: Tensor | None,
    value: Tensor,
    value_spread: Tensor | None,
    share: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query = scale * query
    scores = query @ _turned(key)
    attention = (scores if mask is None else scores + mask).softmax(-1)
    if value_spread is None:
        mean = attention @ value
        spread = torch.zeros_like(mean)
    else:
        mean, std = (attention @ torch.cat((value, value_spread.sqrt()), -1)).chunk(2, -1)
        spread = torch.lerp(attention.square() @ value_spread, std.square(), share.expand_as(std))
    pairs, doubt = [], torch.zeros_like(attention[..., :1])
    if query_spread is not None:
        second = key.square() if key_spread is None else torch.addcmul(key_spread, key, key)
        pairs.append((scale**2 * query_spread, second))
    if key_spread is not None:
        pairs.append((query.square(), key_spread))
    if pairs:
        left, right = (torch.cat(parts, -1) for parts in zip(*pairs, strict=True))
        scores = left @ _turned(right)  # variances of the scores, [..., T, J]
        weights = scores * attention
        doubt = weights.sum(-1, keepdim=True)
        shift = _shift(scale, attention, scores, query_spread, key) @ value
        weights.mul_(attention)
        first, second = (weights @ torch.cat((value, value.square()), -1)).chunk(2, -1)
        moved = torch.addcmul(first, mean, weights.sum(-1, keepdim=True), value=-0.5)
        spread = spread.add_(torch.addcmul(second, mean, moved, value=-2).clamp_min_(0))
        mean = mean + shift
    return mean, spread, attention, doubt


def _shift(scale: float, attention: Tensor, variance: Tensor, query_spread: Tensor | None, key: Tensor) -> Tensor:
    r"""Second-order change of the mean attention due to noise in the scores, [..., T, J].

    With the covariance $\Sigma$ of a query's scores, the change is $\frac12 A_j\,(\Sigma_{jj} - 2 (\Sigma A)_j - \sum_k A_k
    \Sigma_{kk} + 2 A^\top \Sigma A)$. The noise of the query is common to all keys; the noise of different keys is independent.
    """
    if query_spread is None:
        mixed = attention * variance  # Sigma A
    else:
        common = scale**2 * query_spread
        alone = variance - common @ _turned(key.square())
        mixed = (common * (attention @ key)) @ _turned(key) + attention * alone
    change = variance - 2 * mixed
    return 0.5 * attention * (change - (attention * change).sum(-1, keepdim=True))


class AttentionWeights(Moments):
    """The second output of attention. Only its shape is known, so every function of this output raises `NoRule`."""

    rules: ClassVar[dict[Callable[..., Any], Any]] = {}

    @classmethod
    def fallback(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        raise NoRule("a function of the attention weights (the second output of attention) is not supported")


def _attended(query: Any, key: Any, value: Any, mask: Tensor | None, scale: float) -> tuple[Moments, Tensor]:
    random = [
        nonlinear(value_of(part), "attention") if isinstance(part, Moments) else None for part in (query, key, value)
    ]
    known = next(part for part in random if part is not None)
    for part in random:
        if part is not None and (part.batch != 0 or part.channels[-1] != 1 or part.channels[-2] != 0):
            raise NoRule(
                "attention whose queries, keys and values do not have the shape [B, ..., T, D] is not supported"
            )
    parents = [part for part in random if part is not None]
    for one, other in itertools.combinations(parents, 2):
        lanes = one.own_lanes(), other.own_lanes()
        if meet(*lanes) or (meet(one.stem, other.stem) and not (one.aligned == other.aligned and all(lanes))):
            raise NoRule("attention whose queries, keys and values come from the same random units is not supported")
    means = [given if own is None else own.mean for given, own in zip((query, key, value), random, strict=True)]
    spreads = [None if own is None else own.variance for own in random]
    if any(len(part) != len(known.mean) for part in means):
        raise NoRule("attention with keys shared between examples is not supported")
    together = torch.ones_like(known.together) if random[2] is None else random[2].together
    pairs = list(zip(means, spreads, strict=True))
    found, spread, attention, doubt = attend(pairs[0], pairs[1], pairs[2], together[1], mask, scale)
    shares = any(meet(one.sources, other.sources) for one, other in itertools.combinations(parents, 2))
    variance = doubt.max() if shares else doubt.mean()
    if variance > MAX_SCORE_STD**2:
        raise NoRule(
            f"attention scores vary too much between draws to be linearized (their standard deviation is "
            f"{float(variance.sqrt()):.2g}, but at most {MAX_SCORE_STD:g} is supported)"
        )

    def push(*changes: Tensor) -> Tensor:
        left = iter(changes)
        q, k, v = (None if own is None else next(left) for own in random)
        total: Any = 0.0 if v is None else attention @ v
        moved: Any = 0.0 if q is None else q @ means[1].mT
        moved = moved if k is None else moved + means[0] @ k.mT
        if q is None and k is None:
            return torch.as_tensor(total)
        weighted = attention * moved * scale
        weighted = weighted - attention * weighted.sum(-1, keepdim=True)
        found: Tensor = total + weighted @ means[2]
        return found

    node = Node(found.shape, tuple(part.node for part in parents), push, cost=2.0 * attention.numel() * found.shape[-1])
    sources = frozenset().union(*(part.sources for part in parents))
    stem = frozenset().union(*(part.stem for part in parents))
    doubt_of = max(ESTIMATED, *(part.doubt for part in parents))
    mixed = _mixed_together(attention, spread, random[2])
    made = Value(found, spread, known.channels, node, mixed, sources, stem, doubt=doubt_of)
    return units(made), attention


def _mixed_together(attention: Tensor, spread: Tensor, value: Value | None) -> Tensor:
    """Correlation between positions after attention, which mixes positions."""
    if value is None:
        return spread.new_ones(2, len(spread))
    share = value.together[1]
    count = attention.shape[-2]
    mean = attention.mean(-2, keepdim=True)  # [..., 1, J]
    common, apart = (mean @ value.variance.sqrt()).square(), mean.square() @ value.variance
    axes = tuple(range(1, spread.ndim))
    whole = spread.mean(-2, keepdim=True).sum(axes).clamp_min(1e-30)
    kept = torch.lerp(apart.sum(axes), common.sum(axes), share) / whole
    found = ((count * kept - 1) / max(1, count - 1)).clamp(0, 1)
    return torch.stack((found, found))


def _turned(keys: Tensor) -> Tensor:
    """Keys [..., J, D] as a contiguous tensor [..., D, J]. On ARM, products with a transposed view are up to a hundred times
    slower."""
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
    if dropout_p or enable_gqa or isinstance(attn_mask, Moments):
        raise NoRule("attention with dropout, grouped queries, or a random mask is not supported")
    shape, keys = query.shape, key.shape[-2]
    like = next(part.mean_ for part in (query, key, value) if isinstance(part, Moments))
    mask = attn_mask if attn_mask is None or attn_mask.dtype != torch.bool else ~attn_mask
    if is_causal:
        mask = torch.ones(shape[-2], keys, dtype=torch.bool, device=like.device).triu(1)
    return _attended(query, key, value, _additive(mask, like), scale or shape[-1] ** -0.5)[0]


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
    """Multi-head attention with inputs and outputs [T, B, E], which is the order of axes that torch passes."""
    if bias_k is not None or bias_v is not None or add_zero_attn or use_separate_proj_weight or query.ndim != 3:
        raise NoRule(
            "attention with extra keys, with separate projection weights, or without a batch axis is not supported"
        )
    if dropout_p and training:
        raise NoRule("attention with dropout is not supported")
    same = query is key and key is value
    # [B, T, E] is the memory order of most networks.
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    if same:  # one matrix product instead of three
        projections = list(_projected(query, in_proj_weight, in_proj_bias).chunk(3, -1))
    else:
        use(in_proj_weight)
        use(in_proj_bias)
        weights, biases = _thirds(in_proj_weight), [None] * 3 if in_proj_bias is None else _thirds(in_proj_bias)
        projections = [_projected(*each) for each in zip((query, key, value), weights, biases, strict=True)]
    heads = [projected.unflatten(-1, (num_heads, -1)).transpose(1, 2) for projected in projections]  # [B, heads, T, D]
    if not any(isinstance(part, Moments) for part in heads):
        raise NoRule("attention in which only the output projection is random is not supported")
    like = next(part.mean_ for part in heads if isinstance(part, Moments))
    mask = _additive(attn_mask, like)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, like)[:, None, None]  # type: ignore[index]
        mask = padding if mask is None else mask + padding
    joined, shown = _attended(heads[0], heads[1], heads[2], mask, like.shape[-1] ** -0.5)
    shown = shown.mean(1) if average_attn_weights else shown
    attention = AttentionWeights(shown, shown, name="the second output of attention") if need_weights else None
    found: Any = _projected(joined.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return found.transpose(0, 1), attention


def _projected(x: Any, weight: Any, bias: Any) -> Any:
    random = any(isinstance(part, Moments) for part in (x, weight, bias))
    return linear(x, weight, bias) if random else F.linear(x, weight, bias)


def _thirds(value: Any) -> list[Any]:
    """The three parts of a weight that torch stores as one tensor."""
    if not isinstance(value, Moments):
        return list(value.chunk(3))
    pairs = zip(value.mean_.chunk(3), value.variance_.chunk(3), strict=True)
    return [Moments(*parts, pass_=value.pass_, name=f"{value.name_}[{third}]") for third, parts in enumerate(pairs)]
