"""Training of a deep ensemble with the memory of one member."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bayesify.arguments.checks import Count, checked
from bayesify.draws import Draws
from bayesify.maths.pieces import SumOfPieces
from bayesify.network import BayesianNetwork
from bayesify.posteriors.common.base import DrawRequest
from bayesify.posteriors.ensemble import Ensemble
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.running.runner import Runner
from bayesify.training.fitting import fit
from bayesify.training.history import History


@checked
def fit_members(bnn: BayesianNetwork, loader: Iterable[Any], epochs: Count, **options: Any) -> History:
    r"""Train a deep ensemble (Lakshminarayanan et al. 2017) one member after the other in each step, in place.

    A step is that of `bayesify.fit` with all members, the gradient of

    $$ \frac1K \sum_k \frac{N}{B} \sum_b \log p(y_b | f_k(x_b)) + \log p(w_k), $$

    but each member's gradient is taken before the next member runs, so that the activations of one member are held at a time.
    `bayesify.fit` runs them together, which is faster for small networks.

    Args:
        bnn: A network with an `Ensemble` posterior and a likelihood; it is changed.
        loader: Iterable of batches that starts again each epoch.
        epochs: Passes over the data.
        options: Further arguments of `bayesify.fit`: optimizer, learning rate, checkpoint, seed and others.

    Returns:
        One row per epoch, with `nll` per example and `kl`.

    Raises:
        TypeError: If the posterior is not an `Ensemble`.
        ValueError: If an argument is out of range, or ensembles of one network have different sizes.
    """
    parts = [part for part in bnn.posteriors if isinstance(part, Ensemble)] if isinstance(bnn, BayesianNetwork) else []
    if not parts or len(parts) < len(bnn.posteriors):
        raise TypeError("fit_members: the posterior is not an Ensemble; make the network with posteriors.Ensemble()")
    if len({part.members for part in parts}) > 1:
        raise ValueError("fit_members: ensembles of different sizes in one network; give them the same members")
    return fit(_Members(bnn, parts), loader, epochs=epochs, **options)


class _Members(Trainable):
    """An ensemble whose members run one after the other."""

    def __init__(self, bnn: BayesianNetwork, parts: list[Ensemble]) -> None:
        self.bnn, self.parts = bnn, parts

    @property
    def module(self) -> BayesianNetwork:
        return self.bnn

    @property
    def training_draws(self) -> int:
        return self.parts[0].members

    def check_ready(self) -> None:
        self.bnn.require_likelihood("fit_members")

    def config(self) -> dict[str, Any]:
        return self.bnn.config()

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        def of_member(member: int, _: Any) -> Tensor:
            draws = draw_member(self.bnn, self.parts, member)
            terms = self.bnn.terms_of(draws, batch.x, batch.y, num_data=num_data, example_weights=batch.weights)
            return terms[0].sum()

        members = self.parts[0].members
        trained = [parameter for parameter in self.bnn.parameters() if parameter.requires_grad]
        data: Tensor = SumOfPieces.apply(of_member, list(range(members)), *trained)
        return (data / members).expand(1), self.bnn.kl(generator=generator).expand(1)


def draw_member(bnn: BayesianNetwork, parts: list[Ensemble], member: int) -> Draws:
    """One member of an ensemble as a draw, with its own batch statistics, differentiable by its weights."""
    chosen = {parts[0].members: torch.tensor([member], device=next(parts[0].parameters()).device)}
    request = DrawRequest(num_draws=1, prior=bnn.prior.draw(1), networks=chosen)
    weights: dict[str, Tensor] = {}
    kl = torch.zeros(())
    for part in parts:
        drawn, part_kl = part.draw(request)
        weights |= drawn
        kl = kl.to(part_kl) + part_kl
    bnn.layout.cast(weights)
    return Draws(Runner(bnn.network, bnn.weights), weights, kl.expand(1), parts[0].buffers_for(request))
