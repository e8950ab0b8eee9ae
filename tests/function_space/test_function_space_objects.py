"""Function-space inference as a user meets it: contexts, bad input, training, prediction, storage."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.function_space import (
    Box,
    Context,
    DatasetContext,
    FunctionSpaceVI,
    GaussianProcess,
    Mixture,
    NeuralTangent,
    NoisyContext,
)


def network(outputs: int = 2, **options: float) -> bayesify.BayesianNetwork:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs))
    posterior = posteriors.MeanField(init_std=0.1)
    likelihood = likelihoods.Gaussian(noise=0.1) if outputs == 1 else likelihoods.Categorical()
    return bayesify.bayesianize(net, posterior, likelihood=likelihood)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X, Y = torch.randn(20, 3, generator=generator()), torch.arange(20) % 2


class TestContexts:
    def test_box_fills_its_ends(self) -> None:
        low, high = torch.tensor([-1.0, 0.0, 5.0]), torch.tensor([1.0, 0.5, 6.0])
        found = Box(low, high, 500).draw(X, generator())
        assert found.shape == (500, 3)
        assert (found >= low).all()
        assert (found <= high).all()
        # the extremes of 500 uniform numbers miss an end by more than 5 % with probability 0.95^500 < 1e-11
        assert (found.amin(0) < low + 0.05 * (high - low)).all()
        assert (found.amax(0) > high - 0.05 * (high - low)).all()

    def test_box_around_data(self) -> None:
        box = Box.around(X, 2.0, 7)
        width = X.amax(0) - X.amin(0)
        torch.testing.assert_close(box.low.float(), X.amin(0) - 2 * width)
        torch.testing.assert_close(box.high.float(), X.amax(0) + 2 * width)

    def test_default_box_of_images_spans_pixels(self) -> None:
        found = Box().draw(torch.zeros(4, 1, 5, 5, dtype=torch.float64), generator())
        assert found.shape == (10, 1, 5, 5)
        assert found.dtype == torch.float64
        assert torch.equal(found, Box(0.0, 1.0).draw(torch.zeros(4, 1, 5, 5, dtype=torch.float64), generator()))
        wide = torch.stack([torch.full((1, 5, 5), -2.0), torch.full((1, 5, 5), 3.0)])
        torch.testing.assert_close(Box().draw(wide, generator()), Box(-2.0, 3.0).draw(wide, generator()))

    @pytest.mark.parametrize("shape", [(3,), (6, 2)])
    def test_default_box_of_other_inputs_follows_the_batch(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(8, *shape, generator=generator())
        x[..., 0, None] = 2.0 if shape == (3,) else x[..., 0, None]
        low, high = x.amin(0), x.amax(0)
        found = Box(n=500).draw(x, generator())
        constant = low == high
        assert torch.equal(found[:, constant], low[constant].expand(500, -1))
        given = Box(low - (high - low), high + (high - low) + constant, 500).draw(x, generator())
        torch.testing.assert_close(found[:, ~constant], given[:, ~constant])

    def test_default_box_refuses_integers(self) -> None:
        with pytest.raises(ValueError, match=r"torch\.int64.*DatasetContext"):
            Box().draw(torch.zeros(4, 3, dtype=torch.long))

    @pytest.mark.parametrize("bare", [True, False])
    def test_loader_draws_each_row_at_most_once(self, bare: bool) -> None:
        rows = torch.arange(60.0).reshape(20, 3)
        dataset = TensorDataset(rows) if bare else TensorDataset(rows, torch.zeros(20))
        state = torch.get_rng_state()
        found = DatasetContext(DataLoader(dataset, batch_size=6, shuffle=True), 8).draw(X, generator())
        assert torch.equal(state, torch.get_rng_state())
        assert len(found.unique(dim=0)) == 8
        assert all(any(torch.equal(row, other) for other in rows) for row in found)
        assert DatasetContext(rows, 50).draw(X, generator()).shape == (50, 3)
        assert DatasetContext(DataLoader(dataset, batch_size=6), 2, keep=7).draw(X, generator()).shape == (2, 3)

    def test_jitter_has_its_std(self) -> None:
        found = NoisyContext(torch.zeros(5, 3), 0.5, 3000).draw(X, generator())
        # n = 9000 normal numbers: standard error of a variance 0.25 sqrt(2 / n), k = 5
        assert abs(float(found.square().mean()) - 0.25) < 5 * 0.25 * (2 / 9000) ** 0.5

    def test_mixture_and_keyword_inputs(self) -> None:
        mixture = Mixture(Box(5.0, 6.0, 3), DatasetContext(X, 2))
        found = mixture.draw({"x": X}, generator())["x"]
        assert mixture.n == len(found) == 5
        assert (found[:3] >= 5).all()
        assert (found[3:] < 5).all()
        (single,) = mixture.draw((X,), generator())
        assert torch.equal(single, found)

    def test_bad_contexts(self) -> None:
        with pytest.raises(ValueError, match="not below high"):
            Box(1.0, 0.0, 5)
        with pytest.raises(ValueError, match="only one of low= and high="):
            Box(1.0)
        with pytest.raises(ValueError, match="n=0"):
            Box(0.0, 1.0, 0)
        with pytest.raises(ValueError, match="finite"):
            Box(0.0, float("inf"), 3)
        with pytest.raises(ValueError, match="the same shape"):
            Box(torch.zeros(2), torch.ones(3), 5)
        with pytest.raises(ValueError, match=r"low= and high= have shape \[2\], but inputs have shape \[3\]"):
            Box(torch.zeros(2), torch.ones(2), 5).draw(X)
        with pytest.raises(ValueError, match="std=0"):
            NoisyContext(X, 0.0)
        with pytest.raises(ValueError, match="at least two"):
            Mixture(Box(0.0, 1.0))
        with pytest.raises(ValueError, match="same shape"):
            DatasetContext(torch.zeros(4, 5)).draw(X)
        with pytest.raises(ValueError, match="no inputs"):
            DatasetContext(torch.zeros(0, 3)).draw(X)
        with pytest.raises(ValueError, match="several inputs"):
            Box(0.0, 1.0).draw((X, X))


class TestBadInput:
    def test_context_inputs_of_another_shape(self) -> None:
        space = FunctionSpaceVI(network(), context=Box(0.0, 1.0, 4))
        with pytest.raises(ValueError, match=r"context inputs of shape \(4, 5\).* do not fit the network"):
            space.function_kl(torch.zeros(4, 5))

    @pytest.mark.parametrize("variance", [0.0, -1.0, float("nan"), [1.0, 0.0]])
    def test_prior_variance(self, variance: float) -> None:
        with pytest.raises(ValueError, match=r"prior_variance.*positive"):
            FunctionSpaceVI(network(), prior_variance=variance)

    def test_prior_of_other_outputs(self) -> None:
        with pytest.raises(ValueError, match="for 2 outputs"):
            FunctionSpaceVI(network(), prior_variance=[1.0, 2.0, 3.0]).function_kl(X)

    @pytest.mark.parametrize("posterior", [posteriors.Point(), posteriors.FullCovariance(), posteriors.Ensemble()])
    def test_other_posteriors(self, posterior: posteriors.Posterior) -> None:
        bnn = bayesify.bayesianize(nn.Linear(3, 2), posterior)
        with pytest.raises(ValueError, match=f"{type(posterior).__name__}.*use MeanField or KTied"):
            FunctionSpaceVI(bnn)

    def test_batch_norm_in_training_mode(self) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
        with pytest.raises(ValueError, match=r"batch normalization.*eval"):
            FunctionSpaceVI(bnn)
        space = FunctionSpaceVI(bnn.eval(), context=Box(-1.0, 1.0, 3))
        space.fit([(X, Y)], epochs=1, progress=False)
        assert not bnn.training
        bnn.train()
        with pytest.raises(ValueError, match="batch normalization"):
            space.objective(X, Y, num_data=20)
        with pytest.raises(ValueError, match="batch normalization"):
            space.fit([(X, Y)], epochs=1, progress=False)

    def test_variance_of_zero(self) -> None:
        bnn = bayesify.bayesianize(nn.Linear(3, 2, bias=False), posteriors.MeanField())
        with pytest.raises(ValueError, match="variance of the linearized network is 0"):
            FunctionSpaceVI(bnn).function_kl(torch.zeros(2, 3))

    def test_choices(self) -> None:
        with pytest.raises(TypeError, match="BayesianNetwork"):
            FunctionSpaceVI(nn.Linear(3, 2))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="context"):
            FunctionSpaceVI(network(), context=X)  # type: ignore[arg-type]
        for key, value in {"covariance": "dense", "layers": "first", "jitter": 2.0, "memory": 0}.items():
            with pytest.raises(ValueError, match=key):
                FunctionSpaceVI(network(), **{key: value})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="method="):
            FunctionSpaceVI(network()).predict(X, method="laplace")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="kernel"):
            GaussianProcess(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"the kernel returns shape \[3\]"):
            FunctionSpaceVI(network(), prior=GaussianProcess(lambda a, b: a[0])).function_kl(X)
        with pytest.raises(ValueError, match="std=-1"):
            NeuralTangent(std=-1.0)


class TestTraining:
    @pytest.mark.parametrize("kind", ["regression", "binary", "classes"])
    def test_every_task(self, kind: str) -> None:
        likelihood, outputs, y = {
            "regression": (likelihoods.Gaussian(noise=0.1), 1, X[:, :1]),
            "binary": (likelihoods.Bernoulli(), 1, Y.float()[:, None]),
            "classes": (likelihoods.Categorical(), 3, Y),
        }[kind]
        bnn = bayesify.bayesianize(nn.Linear(3, outputs), posteriors.MeanField(init_std=0.1), likelihood=likelihood)
        space = FunctionSpaceVI(bnn, context=Box(-2.0, 2.0, 3))
        history = space.fit([(X, y)], epochs=30, learning_rate=0.05, seed=0, progress=False)
        assert history[-1]["elbo"] > history[0]["elbo"]
        for method in ("draws", "linearized"):
            assert torch.isfinite(space.predict(X, method=method).log_prob(y)).all()

    def test_same_seed_same_result_and_resumed(self, tmp_path: Path) -> None:
        def train(epochs: int, **options: object) -> Tensor:
            space = FunctionSpaceVI(network(), context=Box(-2.0, 2.0, 3))
            loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)
            # a rate that falls towards the end knows how many epochs there are
            space.fit(loader, epochs=epochs, seed=3, progress=False, scheduler="constant", **options)
            return space.bnn.posterior.mean()["0.weight"].detach()

        whole = train(4)
        assert torch.equal(whole, train(4))
        path = tmp_path / "run.safetensors"
        train(2, checkpoint=path)
        assert torch.equal(whole, train(4, checkpoint=path))
        other = FunctionSpaceVI(network(), prior_variance=3.0, context=Box(-2.0, 2.0, 3))
        with pytest.raises(ValueError, match=r"function_space\.prior\.variance"):
            other.fit(
                DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True),
                epochs=6,
                seed=3,
                checkpoint=path,
                scheduler="constant",
                progress=False,
            )

    def test_own_context(self) -> None:
        class Corners(Context):
            name, n = "corners", 2

            def draw(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
                return torch.stack((x.amin(0), x.amax(0)))

        space = FunctionSpaceVI(network(), context=Corners())
        torch.testing.assert_close(
            space.objective_terms(X, Y, num_data=20)[1], space.function_kl(torch.stack((X.amin(0), X.amax(0))))
        )


class TestStorage:
    @pytest.mark.parametrize("prior", ["constant", "tangent"])
    def test_round_trip(self, prior: str, tmp_path: Path) -> None:
        bnn = network()
        options = (
            {"prior": NeuralTangent()} if prior == "tangent" else {"prior_mean": 0.5, "prior_variance": [1.0, 2.0]}
        )
        space = FunctionSpaceVI(bnn, context=Box(torch.zeros(3), torch.ones(3), 4), covariance="full", **options)
        space.fit([(X, Y)], epochs=2, seed=0, progress=False)
        bayesify.save(space, tmp_path / "model.safetensors")
        loaded = bayesify.load(
            tmp_path / "model.safetensors", nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        )
        assert isinstance(loaded, FunctionSpaceVI)
        assert repr(loaded) == repr(space)
        torch.testing.assert_close(loaded.function_kl(X[:4]), space.function_kl(X[:4]))
        torch.testing.assert_close(loaded.context.draw(X, generator()), space.context.draw(X, generator()))

    def test_what_a_file_does_not_hold(self, tmp_path: Path) -> None:
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        prior = GaussianProcess(lambda a, b: torch.exp(-torch.cdist(a, b)))
        space = FunctionSpaceVI(network(), context=DatasetContext(X, 4), prior=prior)
        bayesify.save(space, tmp_path / "model.safetensors")
        loaded = bayesify.load(tmp_path / "model.safetensors", net)
        torch.testing.assert_close(loaded.function_moments(X), space.function_moments(X))
        with pytest.raises(ValueError, match=r"set model\.context"):
            loaded.objective(X, Y, num_data=20)
        with pytest.raises(ValueError, match=r"set model\.prior"):
            loaded.function_kl(X)

    def test_deepcopy_is_apart(self) -> None:
        space = FunctionSpaceVI(network(), context=Box(-2.0, 2.0, 3))
        before = space.function_kl(X)
        copy.deepcopy(space).fit([(X, Y)], epochs=2, progress=False)
        torch.testing.assert_close(space.function_kl(X), before)


class HeadFirst(nn.Module):
    """The layer that runs last is made first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


@pytest.mark.parametrize("prior", [None, NeuralTangent()])
def test_the_last_layer_is_the_one_that_runs_last(prior: NeuralTangent | None) -> None:
    net = HeadFirst()
    whole = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.1))
    alone = bayesify.bayesianize(net, {"head": posteriors.MeanField(init_std=0.1)})
    found = FunctionSpaceVI(whole, layers="last", prior=prior)
    exact = FunctionSpaceVI(alone, prior=prior)
    torch.testing.assert_close(found.function_moments(X, "joint"), exact.function_moments(X, "joint"))
    torch.testing.assert_close(found.function_kl(X[:3]), exact.function_kl(X[:3]))


def test_predictions_of_several_input_sizes() -> None:
    bnn = bayesify.bayesianize(
        nn.Conv1d(1, 1, 3, padding=1), posteriors.MeanField(), likelihood=likelihoods.Gaussian(noise=0.1)
    )
    space = FunctionSpaceVI(bnn, context=Box(-1.0, 1.0, 2))
    for size in (3, 6, 3):
        assert space.predict(torch.randn(4, 1, size), method="linearized").mean.shape == (4, 1, size)


def test_a_tangent_prior_follows_the_network_to_another_type() -> None:
    space = FunctionSpaceVI(network(), context=DatasetContext(X, 3), prior=NeuralTangent())
    before = space.function_kl(X[:3])
    torch.testing.assert_close(
        space.to(torch.float64).function_kl(X[:3].double()), before.double(), rtol=1e-4, atol=1e-4
    )


def test_a_checkpoint_under_a_tangent_prior_holds_no_weights_as_text(tmp_path: Path) -> None:
    loader, sizes = DataLoader(TensorDataset(X, Y), batch_size=10), []
    for width in (100, 400):
        net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
        bnn = bayesify.bayesianize(net, posteriors.MeanField(), likelihood=likelihoods.Categorical())
        space, path = (
            FunctionSpaceVI(bnn, context=DatasetContext(X, 3), prior=NeuralTangent()),
            tmp_path / f"{width}.safetensors",
        )
        space.fit(loader, epochs=1, seed=0, progress=False, checkpoint=path)
        sizes.append(int.from_bytes(path.read_bytes()[:8], "little"))
        space.fit(loader, epochs=2, seed=0, progress=False, checkpoint=path)
    assert abs(sizes[1] - sizes[0]) < 500, "the description grows with the network"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FunctionSpaceVI(network(), prior=lambda a, b: torch.eye(len(a))),
            "prior=<lambda>; give a FunctionPrior",
        ),
        (lambda: FunctionSpaceVI(network(), memory="much"), "memory='much'"),
        (lambda: FunctionSpaceVI(network()).function_moments(X, "banana"), "covariance='banana'"),  # type: ignore[arg-type]
        (lambda: FunctionSpaceVI(network()).function_kl(X[:0]), "the batch is empty"),
        (
            lambda: FunctionSpaceVI(network()).predict(X, method="linearized", chunk=3),
            "only method='draws' accepts chunk",
        ),
        (lambda: Mixture(Box(0.0, 1.0), X), "Tensor is not a Context"),  # type: ignore[arg-type]
        (lambda: Box.around(X, widths=-1.0), "widths=-1.0"),
        (lambda: NoisyContext(Y, 0.5, 3).draw(Y), "to which no noise can be added"),
        (
            lambda: FunctionSpaceVI(network(), prior=GaussianProcess(lambda a, b: -torch.eye(len(a)))).function_kl(X),
            "the kernel returns a variance of 0 or below",
        ),
        (
            lambda: FunctionSpaceVI(
                bayesify.bayesianize(nn.EmbeddingBag(6, 3), posteriors.MeanField(), likelihood=likelihoods.Gaussian())
            ).objective(Y[:4].view(2, 2), X[:2], num_data=2),
            "cannot differentiate twice",
        ),
    ],
)
def test_more_bad_input(make, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
