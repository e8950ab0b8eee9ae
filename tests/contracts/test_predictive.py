"""Predictions: mixtures over draws against dense computation, quantiles that invert, streamed equal to kept."""

import math
import pickle
from typing import Any

import pytest
import torch
from cases import POSTERIORS, Case, convert, generator, logits_network, mlp
from torch import Tensor, nn
from torch.distributions import Normal

import bayesify
from bayesify import ClassificationPredictive, RegressionPredictive, likelihoods, posteriors
from bayesify.predictive.base import Outputs
from bayesify.predictive.gaussian import OutputGaussian

S, B, K = 6, 5, 3
LIKELIHOODS: dict[str, tuple[likelihoods.Likelihood, int]] = {
    "gaussian": (likelihoods.Gaussian(0.3), K),
    "per_output": (likelihoods.Gaussian([0.1, 0.5, 2.0]), K),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), 2 * K),
    "categorical": (likelihoods.Categorical(), K),
    "bernoulli": (likelihoods.Bernoulli(), K),
}
REGRESSION = ["gaussian", "per_output", "heteroscedastic"]


def predict(name: str, rows: int = B, scale: float = 2.0) -> tuple[Any, Tensor]:
    likelihood, width = LIKELIHOODS[name]
    f = scale * torch.randn(S, rows, width, dtype=torch.float64)
    return likelihood.double().predictive(Outputs(kept=f)), f


def components(name: str, f: Tensor) -> tuple[Tensor, Tensor]:
    if name == "heteroscedastic":
        return f[..., :K], f[..., K:].exp()
    noise = LIKELIHOODS[name][0].noise.detach()  # type: ignore[union-attr]
    return f, noise.expand_as(f)


@pytest.mark.parametrize("name", REGRESSION)
def test_regression_parts(name: str) -> None:
    prediction, f = predict(name)
    assert isinstance(prediction, RegressionPredictive)
    mu, v = components(name, f)
    torch.testing.assert_close(prediction.mean, mu.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(prediction.epistemic, ((mu - mu.mean(0)) ** 2).mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(prediction.aleatoric, v.mean(0), rtol=1e-10, atol=1e-12)
    second = (v + mu**2).mean(0) - mu.mean(0) ** 2
    torch.testing.assert_close(prediction.variance, second, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prediction.std**2, prediction.variance)
    y = torch.randn(B, K, dtype=torch.float64)
    density = Normal(mu, v.sqrt()).log_prob(y).sum(-1).exp().mean(0)
    torch.testing.assert_close(prediction.log_prob(y), density.log(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(prediction.cdf(y), Normal(mu, v.sqrt()).cdf(y).mean(0), rtol=1e-9, atol=1e-12)
    assert prediction.outputs is f or torch.equal(prediction.outputs, f)
    assert len(prediction) == B


@pytest.mark.parametrize("name", REGRESSION)
@pytest.mark.parametrize("q", [1e-4, 0.05, 0.5, 0.9, 0.9999])
def test_quantiles_invert_the_cdf(name: str, q: float) -> None:
    prediction, _ = predict(name, scale=10.0)  # components far apart: the cdf has flat parts
    value = prediction.quantile(q)
    assert value.shape == (B, K)
    torch.testing.assert_close(prediction.cdf(value), torch.full((B, K), q, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_quantiles_of_outputs_on_different_scales(dtype: torch.dtype, tolerance: float) -> None:
    """A row in ten thousands beside a row in thousandths: each converges on its own scale."""
    scale = torch.tensor([1e4, 1.0, 1e-3], dtype=dtype)
    f = torch.randn(S, B, 3, dtype=dtype) * scale
    likelihood = likelihoods.Gaussian((0.01 * scale**2).tolist()).to(dtype)
    prediction = likelihood.predictive(Outputs(kept=f))
    value = prediction.quantile([0.1, 0.75])
    assert value.shape == (2, B, 3)
    for level, row in zip((0.1, 0.75), value, strict=True):
        torch.testing.assert_close(prediction.cdf(row), torch.full_like(row, level), rtol=0, atol=tolerance)


def test_quantiles_in_single_precision() -> None:
    f = 3 * torch.randn(S, 50, 1)
    prediction = likelihoods.Gaussian(0.2).predictive(Outputs(kept=f))
    for q in (0.01, 0.3, 0.99):
        torch.testing.assert_close(prediction.cdf(prediction.quantile(q)), torch.full((50, 1), q), rtol=0, atol=1e-5)


def test_intervals() -> None:
    prediction, _ = predict("gaussian")
    lower, upper = prediction.interval(0.8)
    assert bool((lower < upper).all())
    torch.testing.assert_close(
        prediction.cdf(upper) - prediction.cdf(lower), torch.full_like(upper, 0.8), rtol=0, atol=1e-6
    )


def test_one_draw_is_a_gaussian() -> None:
    f = torch.randn(1, B, 1)
    prediction = likelihoods.Gaussian(0.25).predictive(Outputs(kept=f))
    torch.testing.assert_close(prediction.quantile(0.975), f[0] + 0.5 * 1.959964, rtol=1e-5, atol=1e-5)
    assert not prediction.epistemic.any()


def test_crps_is_the_integral_of_the_squared_distance_to_a_step() -> None:
    prediction, f = predict("heteroscedastic")
    y = torch.randn(B, K, dtype=torch.float64)
    mu, v = components("heteroscedastic", f)
    grid = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    for row, out in ((0, 0), (3, 2)):
        cdf = Normal(mu[:, row, out], v[:, row, out].sqrt()).cdf(grid[:, None]).mean(1)
        integral = torch.trapezoid((cdf - (grid >= y[row, out]).double()) ** 2, grid)
        assert prediction.crps(y)[row, out].item() == pytest.approx(integral.item(), rel=2e-3, abs=1e-3)


def test_classification_parts() -> None:
    prediction, f = predict("categorical")
    assert isinstance(prediction, ClassificationPredictive)
    p = f.softmax(-1)
    mixture = p.mean(0)
    torch.testing.assert_close(prediction.probs, mixture)
    torch.testing.assert_close(prediction.confidence, mixture.max(-1).values)
    assert torch.equal(prediction.labels, mixture.argmax(-1))
    entropy = -(mixture * mixture.log()).sum(-1)
    inside = -(p * p.log()).sum(-1).mean(0)
    divergence = (p * (p / mixture).log()).sum(-1).mean(0)  # mean KL of draws to the mixture
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.aleatoric_entropy, inside)
    torch.testing.assert_close(prediction.mutual_information, divergence, rtol=1e-9, atol=1e-10)
    y = torch.randint(K, (B,))
    torch.testing.assert_close(prediction.log_prob(y), mixture.gather(1, y[:, None])[:, 0].log())
    torch.testing.assert_close(prediction.log_prob(y[:, None]), prediction.log_prob(y))


def test_outputs_that_are_not_kept_are_computed_once_for_probabilities_and_entropies() -> None:
    f, passes = torch.randn(S, B, K, dtype=torch.float64), []
    streamed = likelihoods.Categorical().predictive(Outputs(chunks=lambda: passes.append(1) or iter(f.split(3, dim=1))))
    kept = likelihoods.Categorical().predictive(Outputs(kept=f))
    torch.testing.assert_close(streamed.probs, kept.probs)
    torch.testing.assert_close(streamed.aleatoric_entropy, kept.aleatoric_entropy)
    assert len(passes) == 1


def test_yes_or_no_parts() -> None:
    """Several labels at once: `log_prob` is that of all labels of an example together."""
    prediction, f = predict("bernoulli")
    p = f.sigmoid()
    torch.testing.assert_close(prediction.probs, p.mean(0))
    mixture = p.mean(0)
    binary = -(mixture * mixture.log() + (1 - mixture) * (1 - mixture).log())
    torch.testing.assert_close(prediction.entropy, binary)
    assert prediction.mutual_information.shape == (B, K)
    torch.testing.assert_close(prediction.confidence, torch.maximum(mixture, 1 - mixture))
    y = torch.randint(2, (B, K)).double()
    joint = torch.where(y.bool(), p, 1 - p).prod(-1).mean(0)
    torch.testing.assert_close(prediction.log_prob(y), joint.log())


def test_certain_draws_have_no_entropy() -> None:
    """Log-probabilities of minus infinity are no NaN."""
    f = torch.tensor([[[0.0, -1e30]], [[-math.inf, 0.0]]])
    prediction = likelihoods.Categorical().predictive(Outputs(kept=f))
    assert prediction.aleatoric_entropy.tolist() == [0.0]
    assert prediction.mutual_information.item() == pytest.approx(math.log(2))


def test_segmentation() -> None:
    f = torch.randn(S, B, K, 2, 2, dtype=torch.float64)
    prediction = likelihoods.Categorical(class_axis=1).predictive(Outputs(kept=f))
    assert prediction.probs.shape == (B, 2, 2, K)
    y = torch.randint(K, (B, 2, 2))
    per_draw = f.log_softmax(2).movedim(2, -1).gather(-1, y.expand(S, B, 2, 2)[..., None])[..., 0].flatten(2).sum(-1)
    torch.testing.assert_close(prediction.log_prob(y), per_draw.exp().mean(0).log())


# -- streamed and kept -------------------------------------------------------------------------------------------------

MLP = Case("mlp", mlp, lambda size: (torch.randn(size, 3),))


def compare(streamed: Any, kept: Any, y: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"outputs were not kept.*keep_outputs=True"):
        _ = streamed.outputs
    assert len(streamed) == len(kept)
    parts = ["mean", "epistemic", "aleatoric", "variance", "std"]
    if isinstance(kept, ClassificationPredictive):
        parts = ["probs", "confidence", "entropy", "aleatoric_entropy", "labels"]
    for part in parts:
        torch.testing.assert_close(getattr(streamed, part), getattr(kept, part), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(streamed.log_prob(y), kept.log_prob(y), rtol=1e-12, atol=1e-12)
    if isinstance(kept, RegressionPredictive):
        torch.testing.assert_close(streamed.quantile([0.1, 0.9]), kept.quantile([0.1, 0.9]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("memory", [None, 1, 5000])
def test_streamed_equals_kept(name: str, memory: int | None) -> None:
    bnn = convert(name, MLP, torch.float64)
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randn(11, 2, dtype=torch.float64)
    kept = bnn.predict(x, 5, generator=generator(), keep_outputs=True, memory=memory)
    streamed = bnn.predict(x, 5, generator=generator(), keep_outputs=False, memory=memory)
    assert kept.outputs.shape == (5, 11, 2)
    compare(streamed, kept, y)


def test_streamed_classification() -> None:
    bnn = bayesify.bayesianize(
        logits_network().double(), posteriors.MeanField(0.3), likelihood=likelihoods.Categorical()
    )
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(4, (40,))
    kept = bnn.predict(x, 7, generator=generator())
    streamed = bnn.predict(x, 7, generator=generator(), memory=2000)
    compare(streamed, kept, y)


@pytest.mark.parametrize("name", POSTERIORS)
def test_later_training_does_not_change_a_prediction(name: str) -> None:
    """A streamed prediction computes its outputs again from its own draws, point estimates, buffers and noise."""
    norm = nn.GroupNorm(2, 4) if POSTERIORS[name].posterior.runs_network else nn.BatchNorm1d(4)  # type: ignore[union-attr]
    case = Case("normed", lambda: nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)), MLP.inputs)
    bnn = convert(name, case, torch.float64)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    kept = bnn.predict(x, 4, generator=generator())
    streamed = bnn.predict(x, 4, generator=generator(), keep_outputs=False)
    drawn = bnn.draw(3, generator=generator()).detach()
    before = drawn(x)
    expected = [kept.mean.clone(), kept.variance.clone(), kept.log_prob(y).clone()]
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.1)
    bnn.train()
    for _ in range(2):
        (-bnn.elbo(x, y, num_data=9)).backward()
        optimizer.step()
    bnn.eval()
    for prediction in (kept, streamed):
        actual = [prediction.mean, prediction.variance, prediction.log_prob(y)]
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(drawn(x), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", POSTERIORS)
def test_predict_runs_in_evaluation_mode_and_puts_modes_back(name: str) -> None:
    case = Case(
        "mixed", lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), MLP.inputs, training=True
    )
    bnn = convert(name, case)
    bnn.network[0].eval()  # type: ignore[index]
    x = torch.randn(1, 3).expand(8, 3)
    outputs = bnn.predict(x, 2).outputs
    torch.testing.assert_close(outputs, outputs[:, :1].expand_as(outputs))
    assert [module.training for module in bnn.network] == [False, True, True]  # type: ignore[union-attr]
    assert not outputs.requires_grad


# -- bad questions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, math.nan, [0.5, 2.0]])
def test_bad_probability(q: Any) -> None:
    prediction, _ = predict("gaussian")
    with pytest.raises(ValueError, match=r"quantile: q=.*; give a.* (strictly between 0 and 1|finite number)"):
        prediction.quantile(q)
    if isinstance(q, float):
        with pytest.raises(ValueError, match=r"interval: level=.*; give a (number|finite number)"):
            prediction.interval(q)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_targets_of_the_wrong_shape(name: str) -> None:
    prediction, _ = predict(name)
    for shape in ((B + 1, K), (B, K + 2), (B + 1,)):
        y = torch.zeros(shape, dtype=torch.long if name == "categorical" else torch.float64)
        with pytest.raises(ValueError, match=r"targets"):
            prediction.log_prob(y)


def test_ignored_labels_add_nothing() -> None:
    f = torch.randn(S, B, 4, K, dtype=torch.float64)
    prediction = likelihoods.Categorical(ignore_index=-1).predictive(Outputs(kept=f))
    y = torch.randint(K, (B, 4))
    some = likelihoods.Categorical().predictive(Outputs(kept=f[:, :, :3])).log_prob(y[:, :3])
    y[:, 3] = -1
    torch.testing.assert_close(prediction.log_prob(y), some)


def test_targets_that_cannot_be() -> None:
    prediction, _ = predict("categorical")
    with pytest.raises(ValueError, match=r"label 3 is not one of the 3 classes; give integers from 0 to 2"):
        prediction.log_prob(torch.tensor([0, 1, 2, 3, 0]))
    with pytest.raises(ValueError, match=r"label 0.5 is not one of the 3 classes; give integers from 0 to 2"):
        prediction.log_prob(torch.tensor([0.0, 1.0, 2.0, 0.5, 0.0]))
    prediction, _ = predict("gaussian")
    y = torch.zeros(B, K, dtype=torch.float64)
    y[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"targets hold nan at index \[1, 2\]"):
        prediction.log_prob(y)


def reduced(prediction: Any, y: Tensor) -> list[Tensor]:
    if isinstance(prediction, RegressionPredictive):
        found = [
            prediction.mean,
            prediction.variance,
            prediction.epistemic,
            prediction.quantile(0.3),
            prediction.crps(y),
        ]
    else:
        found = [prediction.probs, prediction.entropy, prediction.mutual_information]
    return [*found, prediction.outputs, prediction.log_prob(y)]


def targets(name: str, mean: Tensor) -> Tensor:
    if name == "categorical":
        return torch.arange(len(mean)) % K
    return (torch.rand(len(mean), K) > 0.5).double() if name == "bernoulli" else torch.randn(len(mean), K).double()


def closed_form(name: str) -> Any:
    likelihood, width = LIKELIHOODS[name]
    root = torch.randn(B, width, width, dtype=torch.float64)
    return likelihood.double().closed_form(OutputGaussian(torch.randn(B, width).double(), root @ root.mT, seed=1))


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("make", [lambda name: predict(name)[0], closed_form], ids=["draws", "closed_form"])
def test_a_pickled_prediction_says_the_same(name: str, make: Any) -> None:
    prediction = make(name)
    fresh = pickle.loads(pickle.dumps(prediction))
    y = targets(name, torch.zeros(B))
    for before, after in zip(reduced(prediction, y), reduced(fresh, y), strict=True):
        assert torch.equal(before, after)
    again = pickle.loads(pickle.dumps(prediction))  # after everything was computed once
    assert type(again) is type(prediction)
    assert len(again) == B
    assert f"{B} examples" in repr(again)
    assert len(repr(again)) < 100


def test_a_streamed_prediction_says_that_it_cannot_be_pickled() -> None:
    bnn = bayesify.bayesianize(nn.Linear(3, 2), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    prediction = bnn.predict(torch.randn(50, 3), keep_outputs=False)
    assert "chunk by chunk" in repr(prediction)
    with pytest.raises(RuntimeError, match=r"cannot be pickled.*keep_outputs=True"):
        pickle.dumps(prediction)
    again = pickle.loads(pickle.dumps(prediction.materialize()))
    assert torch.equal(again.mean, prediction.mean)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_other_outputs_under_the_same_distribution(name: str) -> None:
    prediction, f = predict(name)
    y = targets(name, f[0])
    before = reduced(prediction, y)
    other = 0.5 * f.flip(1) + 0.1
    expected = reduced(LIKELIHOODS[name][0].predictive(Outputs(kept=other)), y)
    streamed = type(prediction).with_outputs(prediction, Outputs(chunks=lambda: iter(other.split(2, dim=1))))
    for made in (prediction.with_outputs(other), prediction.map_outputs(lambda f: 0.5 * f.flip(1) + 0.1)):
        for found, wanted in zip(reduced(made, y), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(streamed.log_prob(y), expected[-1])
    torch.testing.assert_close(streamed.map_outputs(lambda f: f).log_prob(y), expected[-1])
    for found, wanted in zip(reduced(prediction, y), before, strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(TypeError, match="is not a mixture over draws"):
        closed_form(name).with_outputs(f)


def twice_the_variance(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    return mean + 1, 2 * variance


@pytest.mark.parametrize("name", REGRESSION)
def test_other_gaussians_for_the_same_draws(name: str) -> None:
    prediction, f = predict(name)
    made = prediction.map_components(twice_the_variance)
    torch.testing.assert_close(made.mean, prediction.mean + 1)
    torch.testing.assert_close(made.aleatoric, 2 * prediction.aleatoric)
    torch.testing.assert_close(made.epistemic, prediction.epistemic)
    assert torch.equal(made.outputs, f)
    y = torch.randn(B, K).double()
    assert torch.equal(pickle.loads(pickle.dumps(made)).log_prob(y), made.log_prob(y))
