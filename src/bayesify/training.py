"""`fit`: training of a Bayesian network, a convenience around `bnn.elbo`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from bayesify.batches import check_repeatable, count_examples, read_batch
from bayesify.history import History
from bayesify.network import BayesianNetwork


def fit(
    bnn: BayesianNetwork,
    train_loader: Iterable[Any],
    *,
    epochs: int,
    num_data: int | None = None,
    learning_rate: float = 1e-3,
    num_draws: int | None = None,
    kl_weight: float = 1.0,
    seed: int | None = None,
    progress: bool = True,
) -> History:
    """Train a Bayesian network by its evidence lower bound."""
    check_repeatable(train_loader)
    num_data = num_data or count_examples(train_loader)
    draws = num_draws or max(posterior.training_draws for posterior in bnn.posteriors)
    device = next(bnn.parameters()).device
    optimizer = torch.optim.Adam(bnn.parameters(), lr=learning_rate)
    history = History()
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    generator = torch.Generator(device).manual_seed(seed)
    training = bnn.training
    bnn.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for epoch in range(1, epochs + 1):
            start, nll, total_kl, steps, seen = time.perf_counter(), 0.0, 0.0, 0, 0
            for item in train_loader:
                batch = read_batch(item).to(device)
                optimizer.zero_grad()
                data, kl = bnn.elbo_terms(
                    batch.x,
                    batch.y,
                    num_data=num_data,
                    num_draws=draws,
                    example_weights=batch.weights,
                    generator=generator,
                )
                loss = -(data.mean() - kl_weight * kl.mean()) / num_data
                loss.backward()
                optimizer.step()
                nll -= float(data.detach().mean()) / num_data * len(batch)
                total_kl += float(kl.detach().mean())
                steps, seen = steps + 1, seen + len(batch)
            row = {"epoch": epoch, "nll": nll / seen, "kl": total_kl / steps, "seconds": time.perf_counter() - start}
            history.append(row)
    bnn.train(training)
    return history
