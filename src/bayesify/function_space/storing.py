"""How a `FunctionSpaceVI` goes to disk and comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bayesify.function_space.contexts import restore_context
from bayesify.function_space.moments import Covariance
from bayesify.function_space.priors import FunctionPrior, restore_prior
from bayesify.function_space.variational import FunctionSpaceVI
from bayesify.storage.serializers import SERIALIZERS, Serializer, register_serializer

NETWORK = "BayesianNetwork"


class UnknownPrior(FunctionPrior):
    """The place of a prior whose code was not stored with its model; using it says so.

    Args:
        name: The kind of prior that it was.
    """

    def __init__(self, name: str) -> None:
        self.was = name

    name = "unknown"

    def moments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Tensor, kind: Covariance
    ) -> tuple[Tensor, Tensor]:
        """Raises `ValueError`."""
        raise ValueError(
            f"FunctionSpaceVI: the prior ({self.was}) is code, which a file does not hold; set model.prior"
        )

    def config(self) -> dict[str, Any]:
        """What it was."""
        return {"name": self.was}


def _config(model: FunctionSpaceVI) -> dict[str, Any]:
    return {"network": SERIALIZERS[NETWORK].config(model.bnn), "function_space": model.config()}


def _restore(net: nn.Module, config: Any, state: dict[str, Tensor]) -> FunctionSpaceVI:
    chosen = dict(config["function_space"])
    prior, context = chosen.pop("prior"), chosen.pop("context")
    known = prior["name"] in ("constant", "neural_tangent")
    return FunctionSpaceVI(
        SERIALIZERS[NETWORK].restore(net, config["network"], state),
        prior=restore_prior(prior) if known else UnknownPrior(prior["name"]),
        context=restore_context(context),
        **chosen,
    )


register_serializer(
    Serializer(
        kind=FunctionSpaceVI,
        name="FunctionSpaceVI",
        config=_config,
        state=lambda model: SERIALIZERS[NETWORK].state(model.bnn),
        fingerprint=lambda model: SERIALIZERS[NETWORK].fingerprint(model.bnn),
        restore=_restore,
    )
)
