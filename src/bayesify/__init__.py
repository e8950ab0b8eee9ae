"""bayesify turns any PyTorch network into a Bayesian one.

bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
bayesify.fit(bnn, train_loader, epochs=10)
bnn.predict(x).probs
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bayesify.version import __version__ as __version__

if TYPE_CHECKING:
    from bayesify.public import *  # noqa: F403
    from bayesify.public import __all__ as __all__


def __getattr__(name: str) -> Any:
    # Names are loaded lazily so that the command line, which also imports this package, can report a missing file before it
    # imports torch.
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    try:
        value = getattr(import_module("bayesify.public"), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
