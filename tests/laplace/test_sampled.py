"""Sampled linearized Laplace: draws by perturbed regressions against the dense posterior in float64."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import likelihoods
from bayesify.jacobians import Jacobians
from bayesify.laplace import Sampled
from bayesify.laplace import sampled as sampled_module
from bayesify.laplace.curvature import Examples
from bayesify.running.runner import Runner
from bayesify.weights.catalog import catalog

pytestmark = [
    pytest.mark.filterwarnings("ignore:Laplace.fit. .* passes:UserWarning"),
    pytest.mark.filterwarnings("ignore:Laplace.fit. the draws did not converge:UserWarning"),
]
EXACT = Sampled(num_draws=600, iterations=40, at_once=600, tolerance=1e-4, settle=False)


def convolutional() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(8, 3)
    )
    net.double()(torch.randn(40, 1, 5, 5, dtype=torch.float64))  # statistics of the batch
    return net


def problem(kind: str) -> tuple[nn.Module, likelihoods.Likelihood, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    weights = torch.rand(24, dtype=torch.float64) + 0.5
    if kind == "classes":
        x, y = torch.randn(24, 1, 5, 5, dtype=torch.float64), torch.randint(3, (24,))
        return convolutional().eval(), likelihoods.Categorical(), (x, y, weights)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x = torch.randn(24, 2, dtype=torch.float64)
    if kind == "labels":
        return net, likelihoods.Bernoulli(), (x, (torch.rand(24, 2) > 0.5).double(), weights)
    y = torch.stack([x[:, 0].sin(), x.prod(1)], 1)
    return net, likelihoods.Gaussian(noise=[0.1, 0.3]), (x, y, weights)


def batches(data: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(part.split(10) for part in data), strict=True))


def dense(net: nn.Module, likelihood: likelihoods.Likelihood, data: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Curvature H and gradient of the loss, over all weights."""
    x, y, weights = data
    values = {name: value.detach() for name, value in net.named_parameters()}
    outputs = torch.func.functional_call(net, values, (x,))
    jacobian = torch.func.jacrev(lambda given: torch.func.functional_call(net, given, (x,)))(values)
    flat = torch.cat([part.flatten(2) for part in jacobian.values()], 2)  # [N, O, P]
    fisher = likelihood.fisher(outputs) * weights[:, None, None]
    leaf = outputs.detach().requires_grad_()
    slope = torch.autograd.grad((weights * likelihood.log_prob(leaf, y, has_draws=False)).sum(), leaf)[0]
    flat, fisher = flat.detach(), fisher.detach()
    return torch.einsum("nop,noq,nqr->pr", flat, fisher, flat), -torch.einsum("nop,no->p", flat, slope)


def jacobian_at(net: nn.Module, x: Tensor) -> Tensor:
    values = {name: value.detach() for name, value in net.named_parameters()}
    found = torch.func.jacrev(lambda given: torch.func.functional_call(net, given, (x,)))(values)
    return torch.cat([part.flatten(2) for part in found.values()], 2)


@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_draws_have_the_dense_posterior_as_their_law(kind: str) -> None:
    net, likelihood, data = problem(kind)
    laplace = bayesify.Laplace(net, likelihood, covariance=EXACT, prior_precision=2.0).fit(batches(data))
    curvature, _ = dense(net, likelihood, data)
    exact = torch.linalg.inv(curvature + 2.0 * torch.eye(len(curvature), dtype=torch.float64))
    x = data[0][:4] + 0.1
    jacobian = jacobian_at(net, x)
    truth = jacobian.flatten(0, 1) @ exact @ jacobian.flatten(0, 1).T
    found = laplace.output_covariance(x, joint=True)
    # A covariance of n draws has standard error sqrt((C_ij^2 + C_ii C_jj) / n).
    error = ((truth.square() + truth.diagonal()[:, None] * truth.diagonal()) / EXACT.num_draws).sqrt()
    assert ((found - truth).abs() <= 5 * error).all()
    moved = laplace.predict(x, 600, method="linearized_mc").outputs - net(x).detach()
    mean = moved.mean(0)
    assert (mean.abs() <= 5 * (truth.diagonal().reshape(mean.shape) / 600).sqrt()).all()
    assert torch.allclose(moved.square().mean(0).flatten(), found.diagonal(), rtol=1e-6)


@pytest.mark.parametrize(("kind", "left"), [("labels", 0.004), ("numbers", 0.05)])
def test_minibatches_end_at_the_solutions_of_conjugate_gradients(kind: str, left: float) -> None:
    net, likelihood, data = problem(kind)
    found = {}
    for solver, steps in (("conjugate_gradients", 1), ("minibatch", 20), ("minibatch", 160)):
        options = Sampled(3, iterations=40, at_once=3, tolerance=1e-9, solver=solver, steps=steps, batch=10)  # type: ignore[arg-type]
        laplace = bayesify.Laplace(net, likelihood, covariance=options, prior_precision=2.0).fit(batches(data))
        found[solver, steps] = laplace.posterior.draws
    exact, few, many = found.values()
    # Batches of 10, 10 and 4: a step that weighs them by their size leaves 1 % however many steps there are.
    assert float((many - exact).norm()) < left * float(exact.norm())
    assert float((many - exact).norm()) < 0.3 * float((few - exact).norm())


@pytest.mark.slow
def test_the_defaults_reach_the_exact_draws() -> None:
    net, likelihood, data = problem("classes")
    jacobian = jacobian_at(net, data[0] + 0.1).flatten(0, 1)
    found = []
    for options in (Sampled(16, at_once=16), Sampled(16, 200, 16, 1e-9)):
        laplace = bayesify.Laplace(net, likelihood, covariance=options, prior_precision=0.02).fit(batches(data))
        found.append(laplace.posterior.draws @ jacobian.T)
    ours, exact = found
    assert float((ours - exact).norm() / exact.norm()) < sampled_module.MAX_DRAW_ERROR
    ratio = ours.square().mean(0).sqrt() / exact.square().mean(0).sqrt()
    assert float((ratio - 1).abs().mean()) < 0.1


def test_a_precision_whose_draws_are_refused_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, _ = small()
    options, seen = Sampled(8, 30, 8, 1e-4), []

    def losses(self, rows, posterior, factors) -> list[float]:
        seen.append(float(posterior.draws.square().sum()))
        return [0.0 if seen[-1] < limit else 1.0] * len(factors)

    monkeypatch.setattr(bayesify.Laplace, "_losses_of_draws", losses)
    limit = math.inf
    free = bayesify.Laplace(net, "categorical", covariance=options).fit(data)
    limit, last = 0.2 * seen[-1], free.posterior.factor
    raised = bayesify.Laplace(net, "categorical", covariance=options).fit(data)
    assert raised.posterior.factor > 1.5 * last
    # The last draws are accepted, and the precision is at most MIN_PRECISION_GAP above one that was refused.
    assert limit * math.exp(-2 * sampled_module.MIN_PRECISION_GAP) < seen[-1] < limit


def test_a_large_network_is_solved_one_draw_at_a_time() -> None:
    options, size = Sampled(), 25_557_032
    assert options.group(size) == 1
    assert options.count_bytes(size, torch.float32) == 3 * 4 * size
    assert options.group(20_000) == 4
    # 16 draws, each with 20 iterations and the start, over a fifth of the data
    assert options.count_passes(size, 50_000) == math.ceil(16 * 6 * 22 / 5)
    # plus 12 precisions for a draw and the mode, each with 10 iterations and the start, over 1,000 examples
    assert options.count_passes(size, 50_000, searches=True) == math.ceil(12 * 10 * 11 / 50 + 16 * 6 * 22 / 5)


def test_chosen_examples_stand_for_all() -> None:
    net, likelihood, (x, y, weights) = problem("classes")
    laplace = bayesify.Laplace(net, likelihood, covariance=Sampled(2, 2), prior_precision=2.0)
    laplace.fit(batches((x, y, weights)))
    examples = Examples(batches((x, y, weights)), None, laplace.device, progress=False)
    pieces = laplace._draw_equations(laplace.subset, examples, (weights, None)).pieces  # type: ignore[arg-type]
    h = net(x).softmax(1).detach()
    traces = weights * (h - h.square()).sum(1)
    chance = (4 * (weights / weights.sum() + traces / traces.sum())).clamp_max(1)
    seeds, sums, sizes = 100, [], []
    for seed in range(seeds):
        chosen = sampled_module.choose_examples(pieces, 8, seed)
        sums.append(sum(one.weights @ one.x.flatten(1)[:, 0].square() for one in chosen))
        sizes.append(float(sum(map(len, chosen))))
    found, spread = torch.stack(sums), x.flatten(1)[:, 0].square()
    error = (weights.square() * spread.square() * (1 - chance) / chance).sum().sqrt() / math.sqrt(seeds)
    assert abs(float(found.mean() - weights @ spread)) < 5 * float(error)
    deviation = float((chance * (1 - chance)).sum() / seeds) ** 0.5
    assert abs(sum(sizes) / seeds - float(chance.sum())) < 5 * deviation


def test_the_choice_of_examples_does_not_depend_on_their_order() -> None:
    net, likelihood, data = problem("classes")
    laplace = bayesify.Laplace(net, likelihood, covariance=Sampled(2, 2), prior_precision=2.0).fit(batches(data))
    order, chosen = torch.randperm(len(data[0])), []
    for rows in (data, tuple(part[order] for part in data)):
        examples = Examples(
            batches(tuple(torch.cat([part, part]) for part in rows)), None, laplace.device, progress=False
        )
        pieces = laplace._draw_equations(laplace.subset, examples, (data[2], None)).pieces  # type: ignore[arg-type]
        found = sampled_module.choose_examples(pieces, 16, 2**50)
        chosen.append([torch.cat([getattr(one, key) for one in found]) for key in ("x", "y", "weights")])
    torch.testing.assert_close(*chosen)  # also their order
    assert len(chosen[0][0]) < 2 * len(data[0])
    assert len(chosen[0][0].unique(dim=0)) not in (len(chosen[0][0]), len(chosen[0][0]) // 2)  # copies are chosen apart


def test_a_large_seed_is_accepted() -> None:
    net, likelihood, data = problem("labels")
    options = {"covariance": Sampled(2, 2), "prior_precision": 2.0}
    bayesify.Laplace(net, likelihood, seed=2**62, **options).fit(batches(data))  # type: ignore[arg-type]


def test_a_learning_rate_that_is_too_large_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    net, likelihood, data = problem("labels")
    monkeypatch.setattr(sampled_module, "STEPS_BETWEEN_CHECKS", 10)
    options = Sampled(2, at_once=2, solver="minibatch", steps=60, batch=10)
    right = bayesify.Laplace(net, likelihood, covariance=options, prior_precision=2.0).fit(batches(data))
    monkeypatch.setattr(sampled_module, "RELATIVE_RATE", 5.0)
    found = bayesify.Laplace(net, likelihood, covariance=options, prior_precision=2.0).fit(batches(data))
    error = (found.posterior.draws - right.posterior.draws).norm() / right.posterior.draws.norm()
    assert float(error) < 0.1


def test_draws_that_did_not_converge_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.laplace.sampled.Equations.error", lambda *_: 67.0)
    net, likelihood, data = problem("labels")
    options = Sampled(2, at_once=2, solver="minibatch", steps=5, batch=10)
    with pytest.warns(UserWarning, match=r"did not converge: their relative error is 67 .* give more steps"):
        bayesify.Laplace(net, likelihood, covariance=options, prior_precision=2.0).fit(batches(data))


@pytest.mark.slow
def test_draws_do_not_depend_on_the_preconditioner() -> None:
    net, likelihood, data = problem("classes")
    options = Sampled(num_draws=3, iterations=80, at_once=2, tolerance=1e-9)
    draws = [
        bayesify.Laplace(net, likelihood, covariance=options, prior_precision=0.5, num_samples=count).fit(batches(data))
        for count in (1, "exact")
    ]
    assert torch.allclose(draws[0].posterior.draws, draws[1].posterior.draws, atol=1e-6)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_the_prior_precision_has_the_largest_evidence(kind: str) -> None:
    net, likelihood, data = problem(kind)
    laplace = bayesify.Laplace(net, likelihood, covariance=EXACT).fit(batches(data))
    curvature, gradient = dense(net, likelihood, data)
    scale = laplace.posterior.prior
    root = scale.rsqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * curvature * root)
    values = values.clamp_min(0)
    mean = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    target = vectors.T @ (root * (curvature @ mean - gradient))

    factors = torch.logspace(-5, 4, 4000, dtype=torch.float64)[:, None]
    # Evidence of the quadratic model around w*, up to a constant.
    evidence = 0.5 * (target.square() / (values + factors)).sum(1) - 0.5 * (values / factors).log1p().sum(1)
    best = factors[evidence.argmax(), 0]
    # The effective dimension has a standard error of sqrt(2 gamma / n), and updates end at changes of 2 %.
    gamma = float((values / (values + best)).sum())
    assert abs(math.log(laplace.posterior.factor / best)) < 0.04 + 5 * math.sqrt(2 / (gamma * EXACT.num_draws))


def test_noise_that_was_not_given_follows_the_targets() -> None:
    net, _, (x, y, _) = problem("numbers")
    options = Sampled(num_draws=64, iterations=30, at_once=64, tolerance=1e-6)
    found = [
        bayesify.Laplace(scaled(net, unit), likelihoods.Gaussian(), covariance=options).fit([(x, unit * y)])
        for unit in (1.0, 10.0)
    ]
    noises = [float(one.likelihood.noise.detach()) for one in found]
    assert noises[1] == pytest.approx(100 * noises[0], rel=1e-2)
    assert noises[0] > float((net(x) - y).detach().square().mean())  # the residuals of a fit are smaller than the noise


def scaled(net: nn.Module, unit: float) -> nn.Module:
    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return unit * self.net(x)

    return Unit().eval()


def small() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)).eval()
    x, y = torch.randn(30, 1, 5, 5), torch.randint(4, (30,))
    return net, [(x[:20], y[:20]), (x[20:], y[20:])], x


@pytest.mark.parametrize("solver", ["conjugate_gradients", "minibatch"])
def test_a_stopped_run_continues_to_the_same_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solver: sampled_module.Solver
) -> None:
    net, data, _ = small()
    monkeypatch.setattr(sampled_module, "MIN_SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(sampled_module, "STEPS_BETWEEN_CHECKS", 3)  # three writes a group, and one at its end
    options = Sampled(num_draws=4, iterations=4, at_once=2, tolerance=1e-9, solver=solver, steps=8, batch=7)
    path = tmp_path / "draws"
    whole = bayesify.Laplace(net, "categorical", covariance=options).fit(data)

    def stop(after: int) -> None:
        written = 0
        write = sampled_module.DrawsFile.write

        def stopping(self, facts, tensors) -> None:
            nonlocal written
            write(self, facts, tensors)
            written += 1
            if written == after:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sampled_module.DrawsFile, "write", stopping)
            with pytest.raises(KeyboardInterrupt):
                bayesify.Laplace(net, "categorical", covariance=options).fit(data, checkpoint=path)

    stop(2)  # within the first group
    stop(4)  # within the second
    continued = bayesify.Laplace(net, "categorical", covariance=options).fit(data, checkpoint=path)
    assert torch.allclose(continued.posterior.draws, whole.posterior.draws, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="was written with draws="):
        bayesify.Laplace(net, "categorical", covariance=Sampled(num_draws=5)).fit(data, checkpoint=path)


def test_saved_draws_predict_the_same(tmp_path: Path) -> None:
    net, data, x = small()
    laplace = bayesify.Laplace(net, "categorical", covariance=Sampled(4, 3)).fit(data)
    bayesify.save(laplace, tmp_path / "model.safetensors")
    loaded = bayesify.load(tmp_path / "model.safetensors", net)
    assert torch.equal(loaded.predict(x).probs, laplace.predict(x).probs)
    assert loaded.sampling == laplace.sampling
    assert loaded.prior_precision == laplace.prior_precision


def test_training_rows_bear_the_default() -> None:
    net, data, x = small()
    y = torch.cat([part for _, part in data])
    laplace = bayesify.Laplace(net, "categorical", covariance=Sampled(8, 6)).fit(data)
    plain = -nn.functional.cross_entropy(net(x).detach(), y)
    # 0.005 nats, and the difference between the noise of two Monte Carlo estimates
    assert float(laplace.predict(x).log_prob(y).mean()) > float(plain) - 0.03


def test_what_draws_cannot_do_is_said() -> None:
    net, data, x = small()
    laplace = bayesify.Laplace(net, "categorical", covariance=Sampled(4, 2)).fit(data)
    assert "4 draws" in repr(laplace)
    with pytest.raises(ValueError, match="no determinant"):
        laplace.log_evidence()
    with pytest.raises(ValueError, match="prior precision cannot be changed"):
        laplace.set_prior_factor(2.0)
    assert laplace.draw(6).kl.isnan().all()
    assert laplace.draw(6)(x).shape == (6, 30, 4)
    with pytest.raises(ValueError, match="more than memory"):
        bayesify.Laplace(net, "categorical", covariance="sampled", memory=2000).fit(data)
    with pytest.raises(ValueError, match="checkpoint= works only with covariance='sampled'"):
        bayesify.Laplace(net, "categorical", covariance="diagonal").fit(data, checkpoint="draws")

    words, targets = torch.randint(6, (9, 2)), torch.randint(4, (9,))
    bag = nn.Sequential(nn.EmbeddingBag(6, 4))
    with pytest.raises(
        ValueError, match=r"cannot compute for this network .*embedding_bag.*; use covariance='kronecker'"
    ):
        bayesify.Laplace(bag, "categorical", covariance="sampled").fit([(words, targets)])

    class Changing:
        def __iter__(self):
            return iter([(torch.randn_like(data[0][0]), data[0][1])])

    with pytest.raises(ValueError, match="different examples in each pass"):
        bayesify.Laplace(net, "categorical", covariance=Sampled(4, 2)).fit(Changing())


def test_a_long_run_says_so_before_it_starts() -> None:
    net, data, _ = small()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        bayesify.Laplace(net, "categorical", covariance=Sampled(16, 6)).fit(data[:1])
    assert any("passes of the network" in str(one.message) for one in seen)


@pytest.mark.parametrize("net", [convolutional(), nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()])
def test_pushed_and_pulled_vectors_are_those_of_the_jacobian(net: nn.Module) -> None:
    net = net.eval().requires_grad_(False)
    known = catalog(net.requires_grad_(True))
    x = torch.randn(3, *((1, 5, 5) if isinstance(net[0], nn.Conv2d) else (2,)), dtype=torch.float64)
    jacobians = Jacobians(Runner(net, known.weights, evaluate=True), list(known.trainable))
    jacobian = jacobian_at(net, x)
    for refused in (set(), {"pushes", "pulls"}):  # together by vmap, and one by one
        jacobians.runner.decisions().vmaps.refused.update(refused)
        along = {name: torch.randn(4, *value.shape, dtype=torch.float64) for name, value in net.named_parameters()}
        flat = torch.cat([part.flatten(1) for part in along.values()], 1)
        outputs, changes = jacobians.push((x,), {}, along)
        assert torch.allclose(outputs, net(x))
        assert torch.allclose(changes, torch.einsum("nop,sp->sno", jacobian, flat))
        vectors = torch.randn(4, 3, jacobian.shape[1], dtype=torch.float64)
        pulled = jacobians.pull((x,), {}, vectors)
        found = torch.cat([pulled[name].flatten(1) for name in along], 1)
        assert torch.allclose(found, torch.einsum("nop,sno->sp", jacobian, vectors))


def test_the_error_of_many_narrow_draws_is_found_in_float32() -> None:
    # u^T b and c u^T u are two million here, and their difference is 0.2: less than a float32 of that size resolves.
    factor, weights = 1e7, 2_000_000
    u = torch.randn(1, weights, generator=torch.Generator().manual_seed(0)) / math.sqrt(factor)
    group = sampled_module.Group(target=u + factor * u, solution=u, residual=torch.zeros_like(u), direction=u)
    found = sampled_module.Equations._error(
        SimpleNamespace(factor=factor),  # type: ignore[arg-type]
        group,
        torch.tensor([[0.01]]),
    )
    assert found == pytest.approx(math.sqrt(0.01 / float(u.double().square().sum())), rel=0.05)
