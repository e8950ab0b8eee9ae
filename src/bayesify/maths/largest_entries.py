"""Choose the entries that pruning keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def largest(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor | None], keep: float) -> dict[str, Tensor]:
    """Masks of the largest scores over several tensors together.

    Args:
        scores: Scores by weight name, each with the shape of the unpruned weight.
        masks: Masks of the entries that earlier pruning left, by name; `None` if all entries are left.
        keep: Fraction of all entries, including pruned ones, to keep.

    Returns:
        A mask per name. Exactly `round(keep * entries)` entries, but at least one, are true. Pruned entries stay false.

    Raises:
        ValueError: If fewer entries are left than `keep` asks for.
    """
    left: dict[str, Tensor] = {}
    for name, score in scores.items():
        earlier = masks[name]
        left[name] = torch.ones_like(score, dtype=torch.bool) if earlier is None else earlier
    total = sum(score.numel() for score in scores.values())
    alive = sum(int(mask.sum()) for mask in left.values())
    wanted = max(1, round(keep * total))  # at least one, because a layer without entries could not be trained
    if wanted > alive:
        raise ValueError(
            f"prune: keep={keep}, but only {alive / total:.3g} of the parameters are left; give a smaller keep"
        )
    flat = torch.cat([score.masked_fill(~left[name], -torch.inf).flatten() for name, score in scores.items()])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(wanted, sorted=False).indices] = True
    parts = chosen.split([score.numel() for score in scores.values()])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}
