"""Curvature of networks with many outputs: sampled vectors, and the last layer without a pass backwards."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods
from bayesify.jacobians import Jacobians
from bayesify.laplace.linearized import NUM_CURVATURE_SAMPLES, NUM_DIRECTIONS
from bayesify.laplace.subnetwork import Subset
from bayesify.predictive.gaussian import LowRank
from bayesify.running.runner import Runner
from bayesify.weights.catalog import catalog

CASES = {
    "classes": (likelihoods.Categorical(), (3, 12), lambda: torch.randint(12, (3,))),
    "certain": (likelihoods.Categorical(), (3, 12), lambda: torch.randint(12, (3,))),
    "positions": (likelihoods.Categorical(class_axis=1), (3, 5, 4), lambda: torch.tensor([[0, 1, -100, 3]] * 3)),
    "numbers": (likelihoods.Gaussian(noise=[0.5, 1.0, 2.0, 4.0, 0.1]), (3, 5), lambda: torch.zeros(3, 5)),
    "labels": (likelihoods.Bernoulli(), (3, 5), lambda: torch.zeros(3, 5)),
}


def products(vectors: Tensor) -> Tensor:
    flat = vectors.detach().flatten(2)
    return torch.einsum("kbi,kbj->bij", flat, flat)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_sampled_vectors_have_the_fisher_matrix_as_their_mean(case: str, count: int) -> None:
    likelihood, shape, targets = CASES[case]
    torch.manual_seed(0)
    outputs, y = torch.randn(shape) * (4 if case == "certain" else 1), targets()
    exact = products(likelihood.fisher_factor(outputs, y))
    rounds = 3000
    repeated, labels = outputs.repeat(rounds, *[1] * (outputs.ndim - 1)), y.repeat(rounds, *[1] * (y.ndim - 1))
    found = likelihood.fisher_samples(repeated, count, labels, generator=torch.Generator().manual_seed(1))
    assert found.shape == (count, *repeated.shape)
    each = products(found).unflatten(0, (rounds, len(outputs)))
    error = (each.mean(0) - exact).abs()
    # a class that comes less than once in all rounds has not been seen, and no spread either
    assert (error <= 5 * each.std(0) / rounds**0.5 + 3 / rounds).all()


@pytest.mark.parametrize("case", CASES)
def test_as_many_vectors_as_outputs_are_exact(case: str) -> None:
    likelihood, shape, targets = CASES[case]
    outputs, y = torch.randn(shape), targets()
    found = likelihood.fisher_samples(outputs, outputs[0].numel(), y)
    assert torch.allclose(products(found), products(likelihood.fisher_factor(outputs, y)), atol=1e-6)


def small_net(classes: int = 30) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, classes)).eval()


def images(count: int = 24, classes: int = 30) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 6, 6), torch.randint(classes, (count,))


@pytest.mark.parametrize("covariance", ["full", "diagonal", "kronecker"])
def test_laplace_by_samples_is_near_the_exact_one(covariance: str) -> None:
    net, batch = small_net(), images(400)
    subset = ["0.weight", "0.bias"]

    def fitted(**options):
        made = bayesify.Laplace(net, likelihoods.Categorical(), subset, covariance, prior_precision=1.0, **options)
        return made.fit([batch])

    exact = fitted().covariance_matrix()
    near = fitted(num_samples=16, seed=3).covariance_matrix()
    error = (near - exact).norm() / exact.norm()
    assert 0 < error < 0.1
    again = fitted(num_samples=16, seed=3)
    assert torch.equal(near, again.covariance_matrix())
    assert not torch.equal(near, fitted(num_samples=16, seed=4).covariance_matrix())
    assert torch.allclose(fitted(num_samples=30).covariance_matrix(), exact, rtol=1e-4, atol=1e-7)


def test_samples_are_stored_and_refused_with_the_empirical_matrix(tmp_path) -> None:
    net, batch = small_net(6), images(classes=6)
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), "last_layer", num_samples=5, seed=2).fit([batch])
    bayesify.save(laplace, tmp_path / "laplace.safetensors")
    loaded = bayesify.load(tmp_path / "laplace.safetensors", net)
    assert (loaded.num_samples, loaded.seed) == (5, 2)
    assert torch.allclose(loaded.covariance_matrix(), laplace.covariance_matrix())
    with pytest.raises(ValueError, match="num_samples= does not apply to curvature='empirical'"):
        bayesify.Laplace(net, likelihoods.Categorical(), curvature="empirical", num_samples=5)


class Ending(nn.Module):
    """A network that does something to what its last layer puts out."""

    def __init__(self, body: nn.Sequential, end) -> None:
        super().__init__()
        self.body, self.last, self.end = body[:-1], body[-1], end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(self.body(x)))


@pytest.mark.parametrize(
    ("end", "direct"),
    [
        (lambda out: out, True),
        (lambda out: 2 * out, False),
        (lambda out: out.mul_(3), False),
        (lambda out: out.view(len(out), -1, 2), False),
        (lambda out: out.relu_(), False),
    ],
)
def test_vectors_reach_the_last_layer_directly_only_where_it_is_the_end(end, direct: bool) -> None:
    net = Ending(small_net(6), end)
    x = torch.randn(5, 1, 6, 6)
    weights = catalog(net).weights
    names = ["last.weight", "last.bias"]
    point = Jacobians(Runner(net, weights, evaluate=True), names).at((x,), {})
    assert point.direct is direct
    found = point.pull(point.identity()).dense("last.weight").detach()
    values = {name: value.detach() for name, value in net.named_parameters()}

    def outputs(weight: Tensor) -> Tensor:
        return torch.func.functional_call(net, {**values, "last.weight": weight}, (x,)).flatten(1)

    exact = torch.autograd.functional.jacobian(outputs, values["last.weight"])
    assert torch.allclose(found.movedim(0, 1), exact, atol=1e-5)
    every = Jacobians(Runner(net, weights, evaluate=True), list(weights)).at((x,), {})
    assert not every.direct


def test_flat_indices_are_told_apart_by_weight() -> None:
    weights = catalog(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).weights
    flat = torch.tensor([25, 0, 11, 12, 13, 14, 15, 16, 3])  # the whole of the first bias
    subset = Subset.of_flat(weights, flat)
    assert subset.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert torch.equal(subset.flat(), flat.sort().values)
    assert subset.entries["0.bias"] is None
    assert subset.entries["0.weight"].tolist() == [0, 3, 11]


def test_every_weight_but_padding_is_trained() -> None:
    net = nn.Sequential(nn.Embedding(4, 2, padding_idx=1), nn.Linear(2, 2))
    subset = Subset.trained(net, catalog(net).weights)
    assert subset.entries["0.weight"].tolist() == [0, 1, 4, 5, 6, 7]
    assert subset.entries["1.weight"] is None


@pytest.mark.thin(2)
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_classes_are_taken_in_proportion_and_none_twice(spread: float) -> None:
    """Fewer errors than independent draws have: certain classes have none."""
    probs = (spread * torch.randn(50, 30)).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    taken = likelihoods.categorical._proportional_sample
    for count in (1, 5, 29):
        classes, weights = taken(probs, count, generator)
        assert all(len(set(row)) == count for row in classes.tolist())
        torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    rounds = torch.stack([torch.zeros_like(probs).scatter_add(-1, *taken(probs, 5, generator)) for _ in range(2000)])
    share = (1 / 5 - probs).clamp_min(0) * probs  # variance of a weight of 1/5 that comes with chance 5 p, at most
    error = (rounds.mean(0) - probs).abs()
    assert (error <= 5 * (share / 2000).sqrt() + 1e-6 + 3 / 5 / 2000).all()


def many_classes(**options) -> tuple[bayesify.Laplace, Tensor]:
    """A posterior over a first layer of a network with 200 classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 200)).eval()
    x = torch.randn(40, 3)
    made = bayesify.Laplace(net, likelihoods.Categorical(), ["0.weight"], "full", 1.0, **options)
    return made.fit([(x, torch.randint(200, (40,)))]), x


def test_many_outputs_are_sampled_by_default_and_the_error_is_said() -> None:
    laplace, x = many_classes()
    expected = "200 outputs sampled (relative errors: curvature 0.056, predicted standard deviations 0.12)"
    assert expected in repr(laplace)
    with pytest.warns(
        UserWarning, match=r"Laplace.fit: 200 outputs take up to 400 passes .* leave out num_samples='exact'"
    ):
        exact, _ = many_classes(num_samples="exact")
    assert "sampled" not in repr(exact)
    assert torch.equal(
        laplace.covariance_matrix(), many_classes(num_samples=NUM_CURVATURE_SAMPLES)[0].covariance_matrix()
    )
    near, truth = laplace.covariance_matrix(), exact.covariance_matrix()
    assert 0 < (near - truth).norm() / truth.norm() < 0.2
    with pytest.warns(UserWarning, match=r"Laplace.predict: 200 outputs take up to 400 passes"):
        wanted = exact.predict(x)
    # the same weights' Gaussian, so that only the draws differ; a variance of n draws is off by sqrt(2 / n), n = 32
    exact.num_samples = None
    found = exact.predict(x)
    assert isinstance(found._gaussian.spread, LowRank)
    ratio = found._gaussian.variance.mean() / wanted._gaussian.variance.mean()
    assert abs(ratio - 1) < 5 * (2 / NUM_DIRECTIONS) ** 0.5
    assert (found.probs - wanted.probs).abs().max() < 0.01
    assert found.outputs.shape == (32, 40, 200)
    assert found.mutual_information.min() >= 0
    torch.testing.assert_close(exact.predict(x[:5]).probs, found.probs[:5])


def test_draws_that_are_fewer_than_outputs_are_pushed_forward() -> None:
    laplace, x = many_classes()

    def outputs() -> Tensor:
        return laplace.predict(x, 3, method="linearized_mc", generator=torch.Generator().manual_seed(1)).outputs

    found = outputs()
    subset, posterior = laplace.fitted()
    point = Jacobians(laplace._runner, subset.names).at((x,), {})
    jacobians = point.pull(point.identity()).dense("0.weight").flatten(2)  # [O, B, S]
    offsets = posterior.draw(3, torch.Generator().manual_seed(1))
    exact = point.outputs + torch.einsum("obs,ns->nbo", jacobians, offsets)
    torch.testing.assert_close(found, exact.detach(), rtol=1e-4, atol=1e-5)


def test_a_grid_of_sampled_outputs_says_what_it_takes() -> None:
    laplace, x = many_classes()
    with pytest.warns(UserWarning, match=r"Laplace.tune_prior_precision: 200 outputs take up to"):
        laplace.tune_prior_precision([(x, torch.randint(200, (40,)))], grid=(0.1, 1.0, 10.0, 100.0), fine=False)


def test_the_last_layer_of_many_outputs_is_exact_and_quiet() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 200)).eval()
    x, y = torch.randn(30, 3), torch.randint(200, (30,))
    laplace = bayesify.Laplace(net, likelihoods.Categorical(), "last_layer", "kronecker").fit([(x, y)])
    assert "sampled" not in repr(laplace)
    exact = products(likelihoods.Categorical().fisher_factor(net(x))).sum(0)
    torch.testing.assert_close(laplace.fitted()[1].tensors()["slopes/2"], exact)
    assert laplace.predict(x)._gaussian.spread is not None


def test_a_slow_choice_of_the_precision_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)), torch.randn(20, 2), torch.arange(20) % 4
    monkeypatch.setattr("bayesify.laplace.laplace.MAX_QUIET_OPERATIONS", 20 * 4**3 - 1)
    with pytest.warns(
        UserWarning, match="full covariance with 4 outputs takes half a minute .* covariance='kronecker'"
    ):
        bayesify.Laplace(net, "categorical").fit([(x, y)])
    with warnings.catch_warnings(record=True) as seen:
        bayesify.Laplace(net, "categorical", prior_precision=1.0).fit([(x, y)])
    assert not any("half a minute" in str(one.message) for one in seen)
