"""Training of a deep ensemble with the memory of one member."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.baselines.epochs import run_epochs
from bayesify.draws import Draws
from bayesify.network import BayesianNetwork
from bayesify.posteriors.base import DrawRequest
from bayesify.posteriors.ensemble import Ensemble
from bayesify.running.runner import Runner
from bayesify.training.batches import Batch, BatchReader, check_num_data, count_examples, min_examples
from bayesify.training.history import History


def fit_members(
    bnn: BayesianNetwork,
    loader: Iterable[Any],
    epochs: int,
    *,
    learning_rate: float = 1e-3,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    num_data: int | None = None,
    read_batch: BatchReader | None = None,
    checkpoint: str | Path | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> History:
    r"""Train a deep ensemble (Lakshminarayanan et al. 2017) one member after the other in each step, in place.

    A step is that of `bayesify.fit` with all members, the gradient of

    $$ \frac1K \sum_k \frac{N}{B} \sum_b \log p(y_b | f_k(x_b)) + \log p(w_k), $$

    but each member's gradient is taken before the next member runs, so that the activations of one member are held at a time.
    `bayesify.fit` runs them together, which is faster for small networks.

    Args:
        bnn: A network with an `Ensemble` posterior and a likelihood; it is changed.
        loader: Iterable of batches that starts anew each epoch.
        epochs: Passes over the data.
        learning_rate: Of Adam.
        optimizer: A function from parameters to another optimizer than Adam.
        num_data: N; counted if left out.
        read_batch: A function from what the loader yields to inputs and targets.
        checkpoint: File in which the run is stored after each epoch; a run whose file exists continues.
        seed: Of everything random; taken from torch's global generator if left out.
        progress: Whether to show a progress bar on the terminal.

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
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise ValueError(f"fit_members: learning_rate={learning_rate}; give a positive number")
    bnn.require_likelihood("fit_members")
    total = count_examples(loader, read_batch) if num_data is None else num_data
    check_num_data(total, min_examples(loader))
    trainable = [parameter for parameter in bnn.parameters() if parameter.requires_grad]
    made = optimizer(trainable) if optimizer is not None else torch.optim.Adam(trainable, lr=learning_rate)
    members = parts[0].members

    def step(data: Batch, generator: torch.Generator, share: float) -> dict[str, float]:
        made.zero_grad()
        sums = [0.0, 0.0]
        for member in range(members):
            draws = draw_member(bnn, parts, member)
            log_likelihood, kl = bnn.terms_of(draws, data.x, data.y, num_data=total, example_weights=data.weights)
            (-(log_likelihood - kl).sum() / (total * members)).backward()
            sums[0] -= float(log_likelihood.detach().sum()) / (total * members)
            sums[1] += float(kl.detach().sum()) / members
        made.step()
        return {"nll": sums[0], "kl": sums[1]}

    def set_state(state: Any) -> None:
        bnn.load_state_dict(state["bnn"])
        made.load_state_dict(state["optimizer"])

    was_training = bnn.training
    bnn.train()
    try:
        return run_epochs(
            "fit_members",
            step,
            loader,
            epochs=epochs,
            device=trainable[0].device,
            get_state=lambda: {"bnn": dict(bnn.state_dict()), "optimizer": made.state_dict()},
            set_state=set_state,
            seed=seed,
            read_batch=read_batch,
            checkpoint=checkpoint,
            progress=progress,
        )
    finally:
        bnn.train(was_training)


def draw_member(bnn: BayesianNetwork, parts: list[Ensemble], member: int) -> Draws:
    """One member of an ensemble as a draw, with its own batch statistics, differentiable by its weights."""
    chosen = {parts[0].members: torch.tensor([member], device=next(parts[0].parameters()).device)}
    request = DrawRequest(1, bnn.prior.draw(1), networks=chosen)
    weights: dict[str, Tensor] = {}
    kl = torch.zeros(())
    for part in parts:
        drawn, part_kl = part.draw(request)
        weights |= drawn
        kl = kl.to(part_kl) + part_kl
    bnn.layout.cast(weights)
    return Draws(Runner(bnn.network, bnn.weights), weights, kl.expand(1), parts[0].buffers_for(request))
