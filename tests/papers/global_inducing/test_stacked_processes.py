"""Stacked deep Gaussian processes have the bounds of the library's, one by one."""

from __future__ import annotations

import pytest
import torch
from bayesify_papers.global_inducing import stacked_processes
from bayesify_papers.global_inducing.stacked_processes import StackedProcesses
from torch import Tensor

from bayesify.deep_gp import DeepGP, layers, model


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 12, 3, generator=generator), torch.randn(2, 12, 1, generator=generator)


@pytest.mark.parametrize("inducing", ["global", "local"])
@pytest.mark.parametrize("depth", [1, 3])
def test_bounds_are_the_library_s(inducing: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise, here 0.3 for every normal number, after some training."""
    for module in (stacked_processes, layers, model):
        monkeypatch.setattr(module, "standard_normal", lambda count, like, generator=None: like.new_full((count,), 0.3))
    x, y = problem()
    made = [DeepGP(x[k], y[k], depth=depth, width=2, num_inducing=5, inducing=inducing, seed=k) for k in range(2)]  # type: ignore[arg-type]
    stack = StackedProcesses(made)
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (-stack.elbo(x, y, 12).sum()).backward()
        optimizer.step()
    found = stack.elbo(x[:, :8], y[:, :8], 12, kl_weight=0.7).detach()
    for k, one in enumerate(stack.hand_back()):
        wanted = one.elbo(x[k, :8], y[k, :8], num_data=12, num_draws=1, kl_weight=0.7)
        assert float(found[k]) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert all(parameter.grad is not None and bool(parameter.grad.abs().sum() > 0) for parameter in stack.parameters())


def test_what_it_does_not_know_is_refused() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match="squared exponential"):
        StackedProcesses([DeepGP(x[0], y[0], kernel="matern52")])
    with pytest.raises(ValueError, match="num_draws=2; only 1"):
        StackedProcesses([DeepGP(x[0], y[0], num_inducing=3)]).elbo(x[:1], y[:1], 12, 2)
