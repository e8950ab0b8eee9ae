"""How a `RandomFeatureGP` goes to disk and comes back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bayesify.random_features.features import RandomFeatureNetwork
from bayesify.random_features.process import RandomFeatureGP
from bayesify.storage.serializers import SERIALIZERS, Serializer, register_serializer

NETWORK = "BayesianNetwork"


def _config(process: RandomFeatureGP) -> dict[str, Any]:
    return {"network": SERIALIZERS[NETWORK].config(process), "exact_bound": process.exact_bound}


def _restore(net: nn.Module, config: Any, state: dict[str, Tensor]) -> RandomFeatureGP:
    if not isinstance(net, RandomFeatureNetwork):
        raise ValueError(f"the network given is {type(net).__name__}; give a RandomFeatureNetwork of the same sizes")
    stored = SERIALIZERS[NETWORK].restore(net, config["network"], state)
    process = RandomFeatureGP(
        net.features.num_inputs,
        net.features.num_features,
        len(net.heads),
        config["network"]["posterior"]["heads"],
        likelihood=config["network"]["likelihood"],
        learn_kernel=net.features.raw_lengthscale.requires_grad,
        exact_bound=config["exact_bound"],
    )
    process.to(net.features.raw_lengthscale).load_state_dict(stored.state_dict())
    return process.train(net.training)


register_serializer(
    Serializer(
        kind=RandomFeatureGP,
        name="RandomFeatureGP",
        config=_config,
        state=lambda process: SERIALIZERS[NETWORK].state(process),
        fingerprint=lambda process: SERIALIZERS[NETWORK].fingerprint(process),
        restore=_restore,
    )
)
