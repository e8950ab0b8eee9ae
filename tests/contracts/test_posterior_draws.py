"""Draws of every posterior through every kind of leaf: shapes, equal results whichever way they run, moments."""

import warnings

import pytest
import torch
from cases import CASES, POSTERIORS, Case, call, close, convert, generator, has_density, pairs, tensors, weights_close
from matrix import every_pair, most_pairs, some_pairs

from bayesify.running.runner import Runner

DRAWS = 4


@most_pairs
def test_shapes(name: str, case: Case) -> None:
    bnn, plain = convert(name, case), case.network()
    draws = bnn.draw(DRAWS, generator=generator())
    parameters = dict(plain.named_parameters())
    assert set(case.needs) <= set(bnn.weights)
    if case.selector is None and not any(weight.kind == "norm" for weight in bnn._catalog.weights.values()):
        assert set(bnn.weights) == set(parameters)
    assert len(draws) == DRAWS
    assert draws.kl.shape == (DRAWS,)
    assert draws.weights.keys() == bnn.weights.keys()
    for weight, value in draws.weights.items():
        assert value.shape == (DRAWS, *parameters[weight].shape), weight
        assert value.dtype == parameters[weight].dtype
    with torch.no_grad():
        expected, outputs, single = call(plain, case.batch()), call(draws, case.batch()), call(bnn, case.batch())
    assert type(outputs) is type(single) is type(expected)
    for reference, many, one in zip(tensors(expected), tensors(outputs), tensors(single), strict=True):
        assert many.shape == (DRAWS, *reference.shape)
        assert one.shape == reference.shape


@every_pair
def test_a_draw_is_a_function(name: str, case: Case) -> None:
    """`draws(x)[i]` is `draws[i](x)` and a plain network with those weights; vmap, loop and single agree up to rounding."""
    bnn, inputs = convert(name, case), case.batch()
    with torch.no_grad():
        draws = bnn.draw(DRAWS, generator=generator())
        together = tensors(call(draws, inputs))
        for index in range(DRAWS):
            close(call(draws[index], inputs), [output[index] for output in together])
        close(call(draws[1:3], inputs), [output[1:3] for output in together])
        plain = case.network()
        plain.load_state_dict({**plain.state_dict(), **draws[1].weights}, strict=True)
        close(call(plain, inputs), [output[1] for output in together])
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        runner = Runner(bnn.network, bnn.weights)
        close(runner.run(draws.weights, args, kwargs, mode="loop"), together)
        close(runner.run({k: v[:1] for k, v in draws.weights.items()}, args, kwargs, mode="single"),
              [output[:1] for output in together])  # fmt: skip
        if case.vmap:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error"
                )  # a refused vmap warns and loops: that would compare the loop with itself
                close(runner.run(draws.weights, args, kwargs, mode="vmap"), together)


@some_pairs
def test_generator_decides_the_draws(name: str, case: Case) -> None:
    bnn = convert(name, case)
    with torch.no_grad():
        state = torch.get_rng_state()
        first, again, other = (bnn.draw(DRAWS, generator=generator(seed)).weights for seed in (1, 1, 2))
        assert torch.equal(state, torch.get_rng_state()), "a draw with a generator used the global one"
    random = False
    for weight, variance in bnn.posteriors[0].variance().items():
        assert torch.equal(first[weight], again[weight])
        random |= bool((variance > 0).any()) and not torch.equal(first[weight], other[weight])
    some_variance = any(bool((variance > 0).any()) for variance in bnn.posteriors[0].variance().values())
    assert random == some_variance
    if name not in ("point", "dropout", "ensemble"):
        assert some_variance


@some_pairs
def test_antithetic_pairs(name: str, case: Case) -> None:
    """Two draws of a pair have opposite noise: for a Gaussian their average is the mean."""
    bnn = convert(name, case)
    with torch.no_grad():
        draws = bnn.draw(5, generator=generator(), antithetic=True)
        assert len(draws) == 5
        assert {value.shape[0] for value in draws.weights.values()} == {5}
        if not has_density(bnn.posterior) or bnn.posterior.runs_network:
            return
        for start in (0, 2):
            pair = {weight: value[start : start + 2].mean(0) for weight, value in draws.weights.items()}
            weights_close(pair, bnn.posterior.mean())
        for weight, value in draws.weights.items():
            assert not torch.equal(value[0], value[2]), weight
            assert not torch.equal(value[0], value[1]), weight


MOMENT_CASES = ["linear", "conv1d", "transposed1d", "embedding", "lstm", "custom", "tied", "layer_norm", "bilinear"]


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("name", "leaf"), [pair for pair in pairs(MOMENT_CASES) if not POSTERIORS[pair[0]].posterior.runs_network]
)
def test_moments(name: str, leaf: str) -> None:
    """Mean and variance over n = 4000 draws are within k = 5 standard errors of `mean()` and `variance()`.

    A posterior that runs the network has its own test of moments.

    The standard error of the mean is sqrt(v / n), that of the variance sqrt((m4 - v^2) / n) with m4 the fourth central
    moment over the draws; rounding adds 1e-5 of the scale.
    """
    n, k = 4000, 5.0
    bnn = convert(name, CASES[leaf])
    part = bnn.posterior
    with torch.no_grad():
        draws = bnn.draw(n, generator=generator()).materialize().weights
        mean, variance = part.mean(), part.variance()
    for weight, value in draws.items():
        value, m, v = value.double(), mean[weight].double(), variance[weight].double()
        rounding = 1e-5 * (1e-3 + m.square() + v)
        error = (value.mean(0) - m).abs()
        assert bool((error <= k * (v / n).sqrt() + rounding.sqrt() * 3e-3).all()), f"mean of {weight}"
        fourth = (value - m).pow(4).mean(0)
        error = ((value - m).square().mean(0) - v).abs()
        assert bool((error <= k * ((fourth - v.square()).clamp_min(0) / n).sqrt() + rounding).all()), f"var of {weight}"
