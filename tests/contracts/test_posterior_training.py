"""What training asks of every posterior and every kind of leaf: gradients everywhere, a KL that is one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CASES, Case, can_be_prior, convert, generator, targets
from matrix import every_leaf, every_pair, every_posterior, most_pairs, some_pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

from bayesify.posteriors import MeanField


@every_pair
def test_gradients_reach_every_parameter(name: str, case: Case) -> None:
    bnn = convert(name, case)
    bnn.elbo(case.batch(), targets(case), num_data=10, num_draws=2, generator=generator()).backward()
    for key, parameter in bnn.named_parameters():
        assert parameter.grad is not None, f"{key} has no gradient"
        assert bool(torch.isfinite(parameter.grad).all()), f"{key} has a gradient that is not finite"
        if "components" not in key and parameter.numel() > 1:
            assert bool(parameter.grad.any()), f"the gradient of {key} is zero"


@every_leaf
def test_the_data_term_alone_reaches_every_weight(case: Case) -> None:
    """Without the KL, whose gradient would hide a weight that the network does not use."""
    bnn = convert("mean_field", case)
    leaves = {key: value.detach().requires_grad_() for key, value in bnn.draw(1, generator=generator()).weights.items()}
    for key, gradient in zip(leaves, _gradients(bnn, case, leaves), strict=True):
        idle = case.name == "batch_norm_training" and key == "0.bias"  # the batch's mean takes it out again
        assert idle or bool(gradient.abs().max() > 1e-6), key


def _gradients(bnn, case, leaves):  # type: ignore[no-untyped-def]
    from bayesify.running.inputs_and_outputs import select_output
    from bayesify.running.runner import Runner

    inputs = case.batch()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    outputs = select_output(Runner(bnn.network, bnn.weights).run(leaves, args, kwargs), None)
    loss = bnn.likelihood.log_prob(outputs, targets(case), has_draws=True).sum()
    return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)


@most_pairs
def test_kl_is_zero_at_the_prior_and_positive_elsewhere(name: str, case: Case) -> None:
    bnn = convert(name, case, torch.float64)
    away = bnn.kl(generator=generator()).item()
    before = {key: value.clone() for key, value in bnn.state_dict().items()}
    if not can_be_prior(bnn.posterior):
        with pytest.raises(ValueError, match=r"cannot be set to the prior; "):
            bnn.set_to_prior()
        for key, value in bnn.state_dict().items():
            assert torch.equal(value, before[key]), f"{key} changed although set_to_prior failed"
        return
    bnn.set_to_prior()
    assert bnn.kl(generator=generator()).item() == pytest.approx(0.0, abs=1e-9)
    for weight, variance in bnn.posterior.variance().items():
        std = bnn.prior.std_of(bnn.weights[weight])
        torch.testing.assert_close(variance, torch.full_like(variance, std**2), rtol=1e-6, atol=0)
        assert not bnn.posterior.mean()[weight].any()
    assert away > 1e-3


@every_posterior
def test_a_draw_carries_its_kl(name: str) -> None:
    bnn = convert(name, CASES["linear"], torch.float64)
    draws = bnn.draw(6, generator=generator())
    assert bool(torch.isfinite(draws.kl).all())
    if not bnn.posterior.runs_network:
        torch.testing.assert_close(draws.kl.mean(), bnn.kl(), rtol=1e-9, atol=1e-9)
    assert draws.kl.requires_grad


@every_leaf
def test_local_reparameterization_trains_every_leaf(case: Case) -> None:
    bnn = convert("mean_field", case, local_reparameterization=True)
    assert isinstance(bnn.posterior, MeanField)
    bnn.elbo(case.batch(), targets(case), num_data=10, num_draws=2, generator=generator()).backward()
    for key, parameter in bnn.named_parameters():
        assert parameter.grad is not None, key
        assert bool(torch.isfinite(parameter.grad).all()), key
    with torch.no_grad():
        draws = bnn.draw(2, generator=generator())
    assert all(type(value) is torch.Tensor for value in draws.weights.values()), "prediction must draw weights"
    first, again = (bnn.elbo(case.batch(), targets(case), num_data=10, generator=generator(7)).item() for _ in range(2))
    if not case.training:
        assert first == again


class Checkpointed(nn.Module):
    """A network that runs again in the backward pass, unless `reentrant` is None."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant: bool | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.reentrant is None:
            return self.inner(*args, **kwargs)
        asks = torch.zeros((), requires_grad=True)  # the older way gives no gradients if no input asks for them
        return checkpoint(lambda _: self.inner(*args, **kwargs), asks, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:.*vmap refused the network")
@pytest.mark.parametrize("reentrant", [False, True])
@some_pairs
def test_gradient_checkpointing_is_exact_or_refused(name: str, case: Case, reentrant: bool) -> None:
    bnn = convert(name, replace(case, make=lambda: Checkpointed(case.make())), torch.float64)
    assert isinstance(bnn.network, Checkpointed)
    x, y = case.batch(dtype=torch.float64), targets(case, torch.float64)

    def gradients() -> list[torch.Tensor]:
        bnn.zero_grad()
        bnn.elbo(x, y, num_data=10, num_draws=2, generator=generator()).backward()
        return [parameter.grad.clone() for parameter in bnn.parameters() if parameter.grad is not None]

    expected = gradients()
    bnn.network.reentrant = reentrant
    try:
        found = gradients()
    except RuntimeError as error:
        assert reentrant or name == "global_inducing"
        assert "turn gradient checkpointing off" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
