"""Stacked networks have the means, covariances and KLs of the library's posteriors, and do not touch each other."""

from __future__ import annotations

import math

import pytest
import torch
from bayesify_papers.global_inducing import stacked, stacked_training
from bayesify_papers.global_inducing.stacked import Design, StackedNetworks
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.posteriors.base import DrawRequest

SIZES = (2, 5, 4, 1)
LAYERS = ("0", "2", "4")


def data(replicas: int = 2, rows: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(replicas, rows, 2, generator=generator), torch.randn(replicas, rows, 1, generator=generator)


def library(kind: str, stack: StackedNetworks, replica: int, prior: priors.Prior) -> bayesify.BayesianNetwork:
    """A network of the library with the parameters of one of the stack."""
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    start = {name: value[replica].detach().double() for name, value in stack.start.items()}
    points = stack.design.points
    made = {
        "fac": posteriors.MeanField(),
        "li": posteriors.LocalInducing(points),
        "gi": posteriors.GlobalInducing(torch.randn(points, 2)),
    }[kind]
    bnn = bayesify.bayesianize(net, made, likelihood=likelihoods.Gaussian(), prior=prior)
    with torch.no_grad():
        for layer, name in enumerate(LAYERS):
            if kind == "fac":
                for key, target in (("mean", bnn.posterior.mean_value), ("log_std", bnn.posterior.raw_std)):
                    target[f"{name}.weight"].copy_(start[f"{key}_{layer}"][:-1].T)
                    target[f"{name}.bias"].copy_(start[f"{key}_{layer}"][-1])
                continue
            bnn.posterior.pseudo_outputs[name].copy_(start[f"outputs_{layer}"])
            bnn.posterior.log_precision[name].copy_(start[f"log_precision_{layer}"])
            if kind == "li":
                bnn.posterior.points_value[name].copy_(start[f"inputs_{layer}"])
        if kind == "gi":
            bnn.posterior.inducing_inputs.learned["input 0"].copy_(start["inputs"])
    return bnn


@pytest.mark.parametrize("kind", ["fac", "li", "gi"])
@pytest.mark.parametrize("prior", ["neal", "standard"])
@torch.no_grad()
def test_means_and_kls_are_the_library_s(kind: str, prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    stack = StackedNetworks(Design(SIZES, (kind,) * 3, prior, points=6), x, y, seed=1)
    monkeypatch.setattr(stacked, "standard_normal", lambda count, like, generator=None: like.new_zeros(count))
    monkeypatch.setattr(
        DrawRequest,
        "normals",
        lambda self, sizes, like, tile=1: [like.new_zeros(self.num_draws, size) for size in sizes],
    )
    drawn = stack.draw(1)
    for replica in range(2):
        bnn = library(kind, stack, replica, priors.Neal() if prior == "neal" else priors.Standard())
        wanted = bnn.posterior.mean()
        for layer, name in enumerate(LAYERS):
            matrix = torch.cat((wanted[f"{name}.weight"].T, wanted[f"{name}.bias"][None]))
            torch.testing.assert_close(drawn.weights[layer][replica, 0], matrix.float(), rtol=1e-5, atol=1e-6)
        assert float(drawn.kl[replica, 0]) == pytest.approx(float(bnn.draw(1).kl), rel=1e-5)


def test_draws_of_a_regression_have_its_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw is linear in its noise: one unit vector of noise per draw gives the columns of a root of the covariance."""
    x, y = data(1, 4)
    stack = StackedNetworks(Design((2, 1), ("gi",), "neal", points=4), x, y, noise=0.3)
    numbers = 3 + 4

    def units(count: int, like: Tensor, generator: object = None) -> Tensor:
        eye = torch.eye(numbers).to(like)
        return torch.cat((eye[:, :3].reshape(-1), eye[:, 3:].reshape(-1)))[:count]

    monkeypatch.setattr(stacked, "standard_normal", units)
    columns = stack.draw(numbers).weights[0][0, ..., 0]
    monkeypatch.setattr(stacked, "standard_normal", lambda count, like, generator=None: like.new_zeros(count))
    columns = (columns - stack.draw(1).weights[0][0, ..., 0]).double()  # [7, 3]
    seen = torch.cat((stack.start["inputs"][0], torch.ones(4, 1)), 1).detach().double()
    precision = torch.diag(stack.start["log_precision_0"][0].detach().double().exp())
    wanted = torch.linalg.inv(2 * torch.eye(3).double() + seen.T @ precision @ seen)
    torch.testing.assert_close(columns.T @ columns, wanted, rtol=1e-5, atol=1e-7)


def test_bound_of_one_linear_layer_is_the_evidence() -> None:
    """With U_0 = X, V = Y and the noise's precision; n draws, k = 5 standard errors."""
    made = bayesify.datasets.toy.linear(30, 3, prior_std=math.sqrt(1 / 3), noise=0.2)
    design = Design((3, 1), ("gi",), "neal", points=30, bias=False, linear=True)
    stack = StackedNetworks(design, made.x[None], made.y[None], 0.2)
    with torch.no_grad():
        values = torch.cat([stack.elbo(made.x[None], made.y[None], 30, 1) for _ in range(200)])
    error = float(values.std()) / math.sqrt(200)
    assert abs(float(values.mean()) - made.posterior.log_evidence) < 5 * error


@torch.no_grad()
def test_scale_prior_draws_and_pays_for_its_scales() -> None:
    x, y = data()
    stack = StackedNetworks(Design(SIZES, ("fac",) * 3, "scale"), x, y)
    prior = library("fac", stack, 0, priors.Scale()).prior
    stds, kl = stack.scales(4000, torch.Generator().manual_seed(0))
    assert float(kl[0].detach()) == pytest.approx(float(prior.kl()), rel=1e-5)
    typical = prior.typical()
    for layer, name in enumerate(LAYERS):
        found = stds[layer][0, :, 0, 0].detach()
        error = float(found.std()) / math.sqrt(4000)
        assert abs(float(found.mean()) - float(typical.std[f"{name}.weight"])) < 5 * error


def test_noise_at_outputs_has_the_moments_of_noise_in_weights() -> None:
    """One layer, n = 20000, k = 5 standard errors of mean and variance."""
    x, y = data(1, 2)
    stack = StackedNetworks(Design((2, 3), ("fac",), start_std=0.5), x, y.expand(-1, -1, 3), seed=2)
    count = 20_000
    with torch.no_grad():
        local = stack.forward_locally(x.repeat(1, count, 1))[0, 0].view(count, 2, 3)
        mean, variance = stack.start["mean_0"][0], (2 * stack.start["log_std_0"][0]).exp()
    seen = torch.cat((x[0], torch.ones(2, 1)), 1)
    wanted, spread = seen @ mean, seen.square() @ variance
    assert bool(((local.mean(0) - wanted).abs() < 5 * (spread / count).sqrt()).all())
    assert bool(((local.var(0) - spread).abs() < 5 * spread * math.sqrt(2 / count)).all())


@pytest.mark.parametrize(
    "kinds", [("fac",) * 3, ("li",) * 3, ("gi",) * 3, ("fac", "fac", "gi"), ("rand", "rand", "gi")]
)
def test_networks_of_a_stack_are_apart_and_all_learn(kinds: tuple[str, ...]) -> None:
    x, y = data()
    stack = StackedNetworks(Design(SIZES, kinds, "scale", points=5), x, y)
    stack.elbo(x, y, 9)[0].backward()
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad[1].abs().sum()) == 0, name
        if "alpha" in name or "beta" in name:
            continue
        assert float(parameter.grad[0].abs().sum()) > 0, name


def test_a_gradient_that_is_not_finite_stops_one_network_only() -> None:
    values = [torch.zeros(2, 3), torch.zeros(2)]
    for value, grad in zip(values, (torch.tensor([[3.0, 4.0, 0.0], [1.0, math.nan, 1.0]]), torch.ones(2)), strict=True):
        value.requires_grad_()
        value.grad = grad
    stacked_training._clip(values, 2.0)
    assert values[0].grad is not None
    assert values[1].grad is not None
    assert float(torch.cat((values[0].grad[0], values[1].grad[:1])).norm()) == pytest.approx(2.0)
    assert float(values[0].grad[1].abs().sum()) + float(values[1].grad[1]) == 0


def test_designs_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="2 kinds for 3 layers"):
        Design(SIZES, ("fac", "gi"))
    with pytest.raises(ValueError, match="kinds='hmc'; give one of fac"):
        Design(SIZES, ("fac", "gi", "hmc"))
    with pytest.raises(ValueError, match="prior='laplace'; give one of neal"):
        Design(SIZES, ("gi",) * 3, "laplace")


def test_schedule_rises_and_falls() -> None:
    schedule = stacked_training.Schedule(steps=100, learning_rate=0.1, warmup=0.2, first_weight=0.1)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(50) == pytest.approx(0.05)
    assert schedule.kl_weight(0) == pytest.approx(0.1)
    assert schedule.kl_weight(10) == pytest.approx(0.55)
    assert schedule.kl_weight(20) == 1.0


class Parabolas(nn.Module):
    """Models whose bound is a parabola; that of the second has no finite gradient at some steps."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.scale = nn.Parameter(torch.tensor([0.5, 0.7]))
        self.bad, self.calls, self.seen = bad, 0, []

    def elbo(self, x: Tensor, *_: object) -> Tensor:
        self.seen.append([self.values.detach().clone(), self.scale.detach().clone()])
        factor = torch.ones(2)
        factor[1] = float("nan") if self.calls in self.bad else 1.0
        self.calls += 1
        return -(self.values.square().sum(1) + self.scale.square()) * factor


def test_steps_without_a_finite_gradient_change_nothing_and_are_counted() -> None:
    """The second model stays where it is, moments included: as if the step had not been; the first does not notice."""
    x, y = data()
    schedule = stacked_training.Schedule(steps=12, learning_rate=0.1, warmup=0.0)
    whole, broken = Parabolas(), Parabolas(bad=(0, 4, 5, 11))
    assert stacked_training.train(whole, x, y, schedule).skipped_steps == [0, 0]
    outcome = stacked_training.train(broken, x, y, schedule)
    assert outcome.skipped_steps == [0, 4]
    assert outcome.facts()["skipped_steps"] == [0, 4]
    broken.seen.append([broken.values.detach(), broken.scale.detach()])
    for step in (0, 4, 5, 11):
        for before, after in zip(broken.seen[step], broken.seen[step + 1], strict=True):
            assert torch.equal(before[1], after[1])
    for step in (1, 2, 3, 6, 7):
        assert not torch.equal(broken.seen[step][0][1], broken.seen[step + 1][0][1])
    for ours, theirs in zip(whole.parameters(), broken.parameters(), strict=True):
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_factorized_layers_below_global_inducing_points_train_without_a_skipped_step(scale: float) -> None:
    """fac-gi at the papers' learning rate, for inputs of the usual size and of thirty times that, in float32."""
    x, y = data(rows=40)
    x, y = scale * x, (x.sum(-1, keepdim=True) + 0.1 * y).tanh()
    stack = StackedNetworks(Design(SIZES, ("fac", "fac", "gi"), "neal", points=12), x, y, seed=1)
    before = stacked_training.bounds(stack, x, y)
    outcome = stacked_training.train(stack, x, y, stacked_training.Schedule(steps=150, learning_rate=1e-2))
    assert outcome.skipped_steps == [0, 0]
    assert bool((stacked_training.bounds(stack, x, y) > before + 10).all())


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_library_s_factorized_layers_below_global_inducing_points_train(scale: float) -> None:
    """The same with `fit`, which raises where a gradient is not finite: the bound rises by nats."""
    x, y = (part[0] for part in data(rows=40))
    x, y = scale * x, (x.sum(-1, keepdim=True) + 0.1 * y).tanh()
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    below = posteriors.MeanField(units="prior")
    bnn = bayesify.bayesianize(
        net,
        {"0": below, "2": below, "4": posteriors.GlobalInducing(x[:12])},
        likelihood=likelihoods.Gaussian(0.1),
        prior=priors.Neal(),
    )
    history = bayesify.fit(bnn, [(x, y)], epochs=150, learning_rate=1e-2, seed=0, progress=False)
    assert history[-1]["elbo"] > history[0]["elbo"] + 10
    assert all(math.isfinite(row["elbo"]) for row in history)
