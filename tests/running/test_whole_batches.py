"""Networks whose forward mixes rows, or takes inputs of the whole batch: `split_batch=False`, and who says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesify
from bayesify import Laplace, baselines, likelihoods

B, D = 12, 3


class Graph(nn.Module):
    """One convolution over a graph: rows are nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(edges @ torch.tanh(self.first(x)))


class Attention(nn.Module):
    """Every row sees the mean of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def inputs(name: str) -> Any:
    x = torch.randn(B, D)
    return (x, torch.rand(B, B)) if name == "graph" else x


def predictors(net: nn.Module, x: Any) -> dict[str, Any]:
    likelihood = likelihoods.Gaussian(0.1)
    bnn = bayesify.bayesianize(net, "mean_field", likelihood=likelihood)
    loader = [(x, torch.zeros(B, 2))]
    return {
        "network": bnn,
        "draws": baselines.FixedDraws(bnn.draw(3).detach(), likelihood),
        "swag": baselines.SWAG(net, likelihood, rank=0).fit(
            loader, epochs=3, learning_rate=1e-3, seed=0, progress=False
        ),
        "scaled": baselines.TemperatureScaling(bnn),
    }


@pytest.mark.parametrize("name", ["graph", "attention"])
def test_the_whole_batch_goes_through_at_once(name: str) -> None:
    torch.manual_seed(0)
    net, x = Graph() if name == "graph" else Attention(), inputs(name)
    args = x if isinstance(x, tuple) else (x,)
    for key, model in predictors(net, x).items():
        prediction = model.predict(x, 3, generator=torch.Generator().manual_seed(0), memory=1, split_batch=False)
        streamed = {} if key == "scaled" else {"keep_outputs": False}
        again = model.predict(x, 3, generator=torch.Generator().manual_seed(0), split_batch=False, **streamed)
        source = model.model if key == "scaled" else model
        draws = source.draw(3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(prediction.outputs, draws(*args))
        torch.testing.assert_close(again.mean, prediction.mean)


def test_a_network_that_cannot_take_a_part_of_the_batch_says_so() -> None:
    bnn = bayesify.bayesianize(Graph(), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    with pytest.raises(
        ValueError, match=r"accepts the whole batch of 12 rows but not the first 4 rows.*split_batch=False"
    ):
        bnn.predict(inputs("graph"))


def test_inputs_of_different_lengths_say_so() -> None:
    bnn = bayesify.bayesianize(Graph(), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    x = (torch.randn(B, D), torch.rand(5, B))
    with pytest.raises(ValueError, match=r"first axes of the inputs have 12 and 5 entries.*split_batch=False"):
        bnn.predict(x)
    assert bnn.predict(x, 2, split_batch=False).mean.shape == (5, 2)


def test_inputs_that_do_not_fit_at_all_are_named_as_ever() -> None:
    bnn = bayesify.bayesianize(nn.Linear(D, 2), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    with pytest.raises(ValueError, match=r"inputs of shape \(12, 4\) .* do not fit the network"):
        bnn.predict(torch.randn(B, 4))


def test_mixing_is_noticed_when_the_batch_is_cut() -> None:
    bnn = bayesify.bayesianize(Attention(), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    x = torch.randn(500, D) + torch.linspace(0, 5, 500).unsqueeze(1)
    with pytest.warns(UserWarning, match="depend on the other rows.*split_batch=False"):
        bnn.predict(x, 3, memory=20_000)
    plain = bayesify.bayesianize(nn.Linear(D, 2), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn.predict(x, 3)  # not cut: right
        bnn.predict(x, 3, memory=20_000, split_batch=False)
        plain.predict(x, 3, memory=2_000)


def test_laplace_takes_it_for_draws_of_the_network() -> None:
    laplace = Laplace(nn.Linear(D, 2), likelihoods.Gaussian(0.1)).fit([(torch.randn(B, D), torch.zeros(B, 2))])
    x, first = torch.randn(B, D), torch.Generator().manual_seed(0)
    whole = laplace.predict(x, 3, generator=first, method="network_mc", split_batch=False, memory=1)
    torch.testing.assert_close(whole.outputs, laplace.draw(3, generator=torch.Generator().manual_seed(0))(x))
    with pytest.raises(
        ValueError, match=r"split_batch=False does not apply to method='closed_form'; use method='network_mc'"
    ):
        laplace.predict(x, split_batch=False)
