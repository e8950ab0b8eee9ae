"""Training of a deep ensemble, one member at a time, to save memory."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from bayesify.arguments.checks import Count, checked
from bayesify.network import BayesianNetwork
from bayesify.posteriors.ensemble import Ensemble
from bayesify.training import History, Steps, fit


@checked
def fit_members(
    bnn: BayesianNetwork, loader: Iterable[Any], epochs: Count, *, steps: Steps | None = None, **options: Any
) -> History:
    r"""Train a deep ensemble (Lakshminarayanan et al. 2017) in place; in each step, the members run one after the other.

    As in `bayesify.fit`, a step follows the gradient of

    $$ \frac1K \sum_k \frac{N}{B} \sum_b \log p(y_b | f_k(x_b)) + \log p(w_k), $$

    but each member's gradient is computed before the next member runs, so that memory holds the activations of only one member.
    The function is equivalent to `bayesify.fit` with `Steps(draws_in_turn=True)`. By default, `bayesify.fit` runs all members
    together, which is faster for small networks.

    Args:
        bnn: A network with an `Ensemble` posterior and a likelihood; it is changed in place.
        loader: Iterable of batches that can be iterated once per epoch.
        epochs: Number of passes over the data.
        steps: Settings that decide how batches become steps; see `bayesify.fit`.
        options: Further arguments of `bayesify.fit`: optimizer, learning rate, checkpoint, seed and others.

    Returns:
        One entry per epoch, with `nll` (per example) and `kl`.

    Raises:
        TypeError: If the posterior is not an `Ensemble`.
        ValueError: If an argument is out of range, or if parts of the network have ensembles of different sizes.
    """
    members_of(bnn, "fit_members")
    return fit(bnn, loader, epochs=epochs, steps=replace(steps or Steps(), draws_in_turn=True), **options)


def members_of(bnn: BayesianNetwork, owner: str) -> int:
    """Number of members of a deep ensemble. Error messages name `owner`."""
    parts = bnn.posteriors if isinstance(bnn, BayesianNetwork) else ()
    sizes = {part.members for part in parts if isinstance(part, Ensemble)}
    if not sizes or not all(isinstance(part, Ensemble) for part in parts):
        raise TypeError(f"{owner}: the posterior is not an Ensemble; make the network with posteriors.Ensemble()")
    if len(sizes) > 1:
        found = "the network has ensembles of different sizes"
        raise ValueError(f"{owner}: {found}; give all of them the same number of members")
    return sizes.pop()
