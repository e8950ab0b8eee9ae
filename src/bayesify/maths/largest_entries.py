"""Choose the entries that pruning keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def largest(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor | None], keep: float) -> dict[str, Tensor]:
    """Masks of the largest scores over several tensors together, by weight name.

    Exactly `round(keep * entries)` entries, but at least one, are true. Entries that earlier pruning removed (see `masks`)
    count as entries and stay false. Raises `ValueError` if fewer entries are left than `keep` asks for.
    """
    all_left = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
    left = all_left | {name: mask for name, mask in masks.items() if mask is not None}
    total = sum(score.numel() for score in scores.values())
    alive = sum(int(mask.sum()) for mask in left.values())
    wanted = max(1, round(keep * total))  # at least one, because a layer without entries could not be trained
    if wanted > alive:
        raise ValueError(f"prune: keep={keep}, but only {alive / total:.3g} of the parameters are left; lower keep")
    flat = torch.cat([score.masked_fill(~left[name], -torch.inf).flatten() for name, score in scores.items()])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(wanted, sorted=False).indices] = True
    parts = chosen.split([score.numel() for score in scores.values()])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}
