"""Local reparameterisation keeps each example's distribution over outputs: mean and variance in closed form."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, convert, generator
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.maths.noise import NoiseSource
from bayesify.weights.structured import LocalGaussian


def dense_moments(module: nn.Module, part: posteriors.MeanField, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each entry of a layer's output, from the Jacobian by every single weight."""
    mean, variance = part.mean(), part.variance()
    names = list(mean)

    def run(*weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))

    values = tuple(mean[name].detach() for name in names)
    jacobians = torch.autograd.functional.jacobian(run, values)
    output = run(*values)
    spread = sum(
        (jacobian.square() * variance[name].detach()).flatten(output.ndim).sum(-1)
        for name, jacobian in zip(names, jacobians, strict=True)
    )
    return output, torch.as_tensor(spread)


class Steps(NoiseSource):
    """One step more for each number in place of random ones."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def normal(self, count: int, like: Tensor) -> Tensor:
        return self.step * torch.arange(1, count + 1, dtype=like.dtype)


@pytest.mark.parametrize(("bias", "prior"), [(True, priors.Neal()), (False, priors.Scale())])
def test_moments_of_each_example(bias: bool, prior: priors.Prior) -> None:
    """Noise of 0 gives the mean, noise of n adds n standard deviations; each output of each example has its own."""
    module = nn.Linear(3, 2, bias=bias).double()
    posterior = posteriors.MeanField(init_std=0.3, local_reparameterization=True)
    bnn = bayesify.bayesianize(module, posterior, prior=prior)
    part = bnn.posterior
    assert isinstance(part, posteriors.MeanField)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected_mean, expected_variance = dense_moments(module, part, x)

    def with_noise(step: float) -> Tensor:
        with torch.no_grad():
            draws = bnn.draw(1, generator=Steps(step), local=True)
            assert all(isinstance(weight, LocalGaussian) for weight in draws.weights.values())
            output: Tensor = draws(x)[0]
        return output

    mean, shifted = with_noise(0.0), with_noise(1.0)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-8, atol=1e-10)
    noise = torch.arange(1, 9, dtype=torch.float64).view(4, 2)
    torch.testing.assert_close(shifted - mean, expected_variance.sqrt() * noise, rtol=1e-8, atol=1e-10)


def test_inputs_of_zero_have_gradients() -> None:
    """Of their outputs' variance, 0, the root has none."""
    local = LocalGaussian(torch.randn(2, 3), torch.ones(2, 3, requires_grad=True), generator())
    local.begin_pass(4)
    x = torch.zeros(4, 3, requires_grad=True)
    F.linear(x, local).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert local.components_[1].grad.isfinite().all()


def test_gradients_of_the_local_rule() -> None:
    """The hand-written backward pass against finite differences, and its own, with the same noise in every call."""
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    spread = (0.1 + torch.rand_like(weight)).detach().requires_grad_()
    bias_spread = (0.1 + torch.rand_like(bias)).detach().requires_grad_()

    def run(x: Tensor, weight: Tensor, spread: Tensor, bias: Tensor, bias_spread: Tensor) -> Tensor:
        fixed = generator(4)
        local, local_bias = LocalGaussian(weight, spread, fixed), LocalGaussian(bias, bias_spread, fixed)
        local.begin_pass(2)
        return F.linear(x, local, local_bias)

    assert torch.autograd.gradcheck(run, (x, weight, spread, bias, bias_spread))
    assert torch.autograd.gradgradcheck(run, (x, weight, spread, bias, bias_spread))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)[:, :1]


class Flattened(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(*x.shape).mean(1)[:, :1]


class Twice(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x[:, 0]) - self.layer(x[:, 1]))[:, :1]


class Functional(Positions):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x[:, 0])
        return (hidden * (x[:, 0] @ self.layer.weight.T + self.layer.bias))[:, :1]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).mean(2)


class Routed(Positions):
    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0, 0] > 0
        h = x[:, 0].clone()
        h[chosen] = self.layer(h[chosen])
        return h[:, :1]


@pytest.mark.thin(2)
@pytest.mark.filterwarnings("ignore:.*vmap refused")
@pytest.mark.parametrize("name", ["mean_field", "walsh_hadamard"])
@pytest.mark.parametrize("kind", [Positions, Flattened, Twice, Functional, Convolved, Routed])
def test_the_objective_of_layers_that_see_an_example_more_than_once(kind: type[nn.Module], name: str) -> None:
    """The expected data term is that of weight draws; n = 500 draws each, k = 5 standard errors of the difference.

    Two positions are equal, so that `Twice` is 0 whatever the weights are: with other weights in the second use, as if nobody
    looked, the difference is 20 standard errors, and 6 in `Functional`.
    """
    n, k = 500, 5.0
    torch.manual_seed(0)
    net, x, y = kind(), torch.randn(3, 5, 2), torch.randn(3, 1)
    x[:, 1] = x[:, 0]
    found = []
    for local in (False, True):
        torch.manual_seed(1)
        options = {"init_std": 0.5} if name == "mean_field" else {}
        posterior = (posteriors.MeanField if name == "mean_field" else posteriors.WalshHadamard)(
            local_reparameterization=local, **options
        )
        bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Gaussian(0.5, learn=False))
        bnn.set_to_prior()
        with torch.no_grad():
            terms, _ = bnn.elbo_terms(x, y, num_data=3, num_draws=n, generator=generator(int(local)))
        found.append(terms.double())
    error = (found[0].var() / n + found[1].var() / n).sqrt()
    rounding = 1e-5 * (1 + abs(float(found[0].mean())))
    assert abs(float(found[0].mean() - found[1].mean())) < k * float(error) + rounding


def test_what_was_found_out_does_not_change_the_numbers() -> None:
    """The first objective of a network equals that of one which knows already, running statistics included."""

    class Net(Twice):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.stack([self.norm(x[:, 0]), x[:, 1]], dim=1))

    torch.manual_seed(0)
    posterior = posteriors.MeanField(init_std=0.3, local_reparameterization=True)
    first = bayesify.bayesianize(Net(), posterior, likelihood=likelihoods.Gaussian(0.5))
    second = copy.deepcopy(first)
    x, y = torch.randn(4, 2, 2), torch.randn(4, 1)
    for part in second.posteriors:
        part.materialized, part.looked = {"layer.weight", "layer.bias"}, True
    for source in (None, generator):
        values = []
        for bnn in (first, second):
            torch.manual_seed(3)
            values.append(float(bnn.elbo(x, y, num_data=4, generator=source and source(2)).detach()))
        assert values[0] == values[1]
    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))


@pytest.mark.parametrize("kind", [Positions, Twice])
def test_a_first_objective_gives_out_no_global_number_twice(kind: type[nn.Module]) -> None:
    """Another thread takes global numbers in the middle of the first pass, which finds a weight that is used twice."""
    posterior = posteriors.MeanField(init_std=0.3, local_reparameterization=True)
    bnn = bayesify.bayesianize(kind(), posterior, likelihood=likelihoods.Gaussian(0.5))
    taken: list[float] = []
    bnn.network.register_forward_pre_hook(lambda *_: taken.extend(torch.rand(3, dtype=torch.float64).tolist()))
    x, y = torch.randn(4, 2, 2), torch.randn(4, 1)
    bnn.elbo(x, y, num_data=4)
    taken += torch.rand(8, dtype=torch.float64).tolist()
    assert len(set(taken)) == len(taken) == 11  # hooks see the pass itself alone


@pytest.mark.parametrize("kind", [Positions, Twice])
def test_the_look_before_a_first_objective_calls_no_hooks_and_leaves_them(kind: type[nn.Module]) -> None:
    posterior = posteriors.MeanField(init_std=0.3, local_reparameterization=True)
    bnn = bayesify.bayesianize(kind(), posterior, likelihood=likelihoods.Gaussian(0.5))
    modes: list[bool] = []
    bnn.network.register_forward_hook(lambda module, *_: modes.append(module.training))
    for count in (1, 2):
        bnn.elbo(torch.randn(4, 2, 2), torch.randn(4, 1), num_data=4)
        assert modes == [True] * count
    assert all(part.looked for part in bnn.posteriors)


def test_only_the_training_objective_uses_it() -> None:
    bnn = convert("mean_field", CASES["linear"], local_reparameterization=True)
    bnn.likelihood = likelihoods.Gaussian()
    x = torch.randn(1, 3).expand(6, -1)
    with torch.no_grad():
        local = bnn.draw(1, generator=generator(), local=True)(x)[0]
        assert not torch.allclose(local[0], local[1]), "examples have noise of their own in training"
        for outputs in (bnn(x), bnn.draw(2)(x)[1], bnn.predict(x, 2).outputs[0]):
            torch.testing.assert_close(outputs[0], outputs[1]), "a prediction is a function of x"


def test_the_objective_is_unbiased() -> None:
    """One layer with a Gaussian likelihood: E of the data term is the closed form; n = 1000, k = 5 standard errors."""
    n, k = 1000, 5.0
    net = nn.Linear(3, 1).double()
    bnn = bayesify.bayesianize(
        net,
        posteriors.MeanField(init_std=0.4, local_reparameterization=True),
        likelihood=likelihoods.Gaussian(noise=0.5, learn=False),
    )
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    with torch.no_grad():
        terms, kl = bnn.elbo_terms(x, y, num_data=5, num_draws=n, generator=generator())
        spread = 0.16 * (x.square().sum(-1, keepdim=True) + 1)
        exact = -0.5 * (((y - net(x)).square() + spread) / 0.5 + torch.log(torch.tensor(2 * torch.pi * 0.5))).sum()
    assert abs(float(terms.mean() - exact)) < k * float(terms.std()) / n**0.5
    torch.testing.assert_close(kl.mean(), bnn.kl())


def test_a_tied_weight_is_drawn_once() -> None:
    """Two uses of one weight must see one value, so a tied weight is never local."""
    bnn = convert("mean_field", CASES["tied"], local_reparameterization=True)
    weights = bnn.draw(1, generator=generator(), local=True).weights
    assert not isinstance(weights["embedding.weight"], LocalGaussian)
    assert isinstance(weights["body.weight"], LocalGaussian)


def test_a_formed_weight_is_the_same_in_every_use() -> None:
    """A cell uses its weights at each step: one draw of them is one function of the sequence."""
    case = CASES["gru_cell"]
    bnn = convert("mean_field", case, local_reparameterization=True)
    x = case.batch()[0]
    with torch.no_grad():
        draw = bnn.draw(1, generator=generator(), local=True)[0]
        output = draw(x)
        materialized = {name: weight.materialize() for name, weight in draw.weights.items()}
        torch.testing.assert_close(output, torch.func.functional_call(bnn.network, materialized, (x,)))
    weight = LocalGaussian(torch.zeros(2, 3), torch.ones(2, 3), generator())
    weight.begin_pass(4)
    inputs = torch.randn(4, 3)
    torch.testing.assert_close(inputs @ weight.T, F.linear(inputs, weight))


def test_weights_in_low_precision_take_their_noise_in_the_order_of_the_layers() -> None:
    """Not in the order of a set, which differs between processes: a seed gave other numbers in each."""
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6))).bfloat16()
    part = posteriors.MeanField(local_reparameterization=True)
    bnn = bayesify.bayesianize(net, part, likelihood=likelihoods.Categorical())
    named: list[str] = []

    class Noted(dict[str, Tensor]):
        def __setitem__(self, name: str, value: Tensor) -> None:
            named.append(name)
            super().__setitem__(name, value)

    bnn.layout.cast(Noted(bnn.draw(1, local=True).weights))
    assert list(dict.fromkeys(named)) == list(bnn.posterior.sizes())
