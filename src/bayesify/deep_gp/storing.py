"""How a `DeepGP` goes to disk and comes back; no network is needed for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bayesify.deep_gp.model import DeepGP
from bayesify.storage.serializers import Serializer, register_serializer


def _state(model: DeepGP) -> dict[str, Tensor]:
    return dict(model.state_dict(keep_vars=True))


def _restore(net: nn.Module, config: Any, state: dict[str, Tensor]) -> DeepGP:
    given = dict(config)
    widths, count = given.pop("widths"), given.pop("num_inducing")
    first = state["inducing_inputs" if given["inducing"] == "global" else "layers.0.inducing_inputs"]
    # Inducing inputs may have moved together, which k-means or a Cholesky factor of their start would not survive.
    apart = torch.arange(first.numel(), dtype=torch.float64).sin().reshape(first.shape)
    model = DeepGP(
        apart, depth=len(widths) - 1, width=widths[1:-1], num_outputs=widths[-1], num_inducing=count, **given
    )
    model = model.to(first)
    model.load_state_dict(state)
    return model


register_serializer(
    Serializer(
        kind=DeepGP,
        name="DeepGP",
        config=DeepGP.config,
        state=_state,
        fingerprint=lambda model: {},
        restore=_restore,
        needs_network=False,
    )
)
