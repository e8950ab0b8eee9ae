"""Bad input at every door of the core: an error that names the thing and the remedy, and nothing half-changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, POSTERIORS, Case, convert, logits_network, mlp
from torch import Tensor, nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors


def network(likelihood: likelihoods.Likelihood | None = None, net: nn.Module | None = None) -> BayesianNetwork:
    return bayesify.bayesianize(
        net or mlp(), posteriors.MeanField(0.1), likelihood=likelihood or likelihoods.Gaussian(0.1)
    )


def unchanged(bnn: BayesianNetwork, error: type[Exception], message: str, action: Callable[[], Any]) -> None:
    """The action fails with the message, and parameters, buffers, gradients and modes are as before."""
    before = {key: value.clone() for key, value in bnn.state_dict().items()}
    modes = [module.training for module in bnn.modules()]
    with pytest.raises(error, match=message):
        action()
    assert all(torch.equal(value, before[key]) for key, value in bnn.state_dict().items())
    assert [module.training for module in bnn.modules()] == modes
    assert all(parameter.grad is None for parameter in bnn.parameters())
    for weight in bnn.weights.values():
        path, _, leaf = weight.name.rpartition(".")
        assert bnn.network.get_submodule(path)._parameters[leaf] is None, "a draw was left in the network"


X, Y = torch.zeros(4, 3), torch.zeros(4, 2)


def with_value(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[2, 1] = value
    return tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite(value: float) -> None:
    bnn = network()
    for action in (
        lambda: bnn.elbo(with_value(X, value), Y, num_data=4),
        lambda: bnn.predict(with_value(X, value)),
        lambda: bnn.map_objective(with_value(X, value), Y, num_data=4),
    ):
        unchanged(bnn, ValueError, r"inputs hold -?(nan|inf) at index \[2, 1\]; remove or impute", action)


def test_a_keyword_input_that_is_not_finite() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, *, features: Tensor) -> Tensor:
            return self.layer(features)

    bnn = network(net=Keyword())
    unchanged(
        bnn, ValueError, r"inputs 'features' hold nan", lambda: bnn.predict({"features": with_value(X, math.nan)})
    )


def test_large_inputs_are_not_called_infinite() -> None:
    """Their sum overflows, they do not."""
    bnn = network()
    assert bool(torch.isfinite(bnn.predict(torch.full((4, 3), 3e38), 2).mean).all())  # type: ignore[attr-defined]


def test_targets_that_are_not_finite() -> None:
    bnn = network()
    unchanged(
        bnn,
        ValueError,
        r"targets hold nan at index \[2, 1\]; ",
        lambda: bnn.elbo(X, with_value(Y, math.nan), num_data=4),
    )


@pytest.mark.parametrize("shape", [(4, 5), (4, 1, 4), (4,)])
@pytest.mark.parametrize("num_draws", [1, 3])
def test_inputs_of_the_wrong_shape(shape: tuple[int, ...], num_draws: int) -> None:
    bnn, x = network(), torch.zeros(shape)
    message = r"inputs of shape \(4.*float32.* do not fit the network: .*; give"
    unchanged(bnn, ValueError, message, lambda: bnn.elbo(x, Y, num_data=4, num_draws=num_draws))
    unchanged(bnn, ValueError, message, lambda: bnn.predict(x, num_draws))


def test_inputs_of_the_wrong_type() -> None:
    bnn = network()
    message = r"inputs of shape \(4, 3\) and type float64 do not fit the network: .*; give"
    unchanged(bnn, ValueError, message, lambda: bnn.predict(X.double()))
    unchanged(bnn, ValueError, message, lambda: bnn.elbo(X.double(), Y, num_data=4))
    loader = [(X.double(), Y)]
    unchanged(
        bnn, ValueError, f"fit: epoch 1, batch 1: {message}", lambda: bayesify.fit(bnn, loader, num_data=4, epochs=1)
    )


def test_the_recurrent_network_is_whole_after_an_error() -> None:
    bnn = convert("mean_field", CASES["lstm"])
    unchanged(bnn, ValueError, r"do not fit the network", lambda: bnn.predict(torch.zeros(2, 3, 7)))
    assert bnn.predict(CASES["lstm"].batch(), 2).mean.shape == (3, 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(4, 3), (5, 2), (4,), (8,)])
def test_targets_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    bnn = network()
    message = r"targets of shape .* do not fit outputs of shape .*; give targets in the outputs' shape"
    unchanged(bnn, ValueError, message, lambda: bnn.elbo(X, torch.zeros(shape), num_data=8))


@pytest.mark.parametrize("label", [4, -1])
def test_labels_out_of_range(label: int) -> None:
    bnn = network(likelihoods.Categorical(), logits_network())
    y = torch.tensor([0, 1, label, 2])
    unchanged(bnn, ValueError, rf"label {label} is out of range for 4 outputs", lambda: bnn.elbo(X, y, num_data=4))


@pytest.mark.parametrize("num_data", [3, 0, -5])
def test_num_data_below_the_batch(num_data: int) -> None:
    bnn = network()
    remedy = (
        "is below the batch size 4; give the size of the whole dataset" if num_data > 0 else "; give an integer of at"
    )
    message = rf"num_data={num_data} ?{remedy}"
    unchanged(bnn, ValueError, message, lambda: bnn.elbo(X, Y, num_data=num_data))


@pytest.mark.parametrize("num_draws", [0, -1, 1.5])
def test_num_draws(num_draws: Any) -> None:
    bnn = network()
    message = rf"num_draws={num_draws}; give an integer of at least 1"
    for action in (
        lambda: bnn.draw(num_draws),
        lambda: bnn.predict(X, num_draws),
        lambda: bnn.elbo(X, Y, num_data=4, num_draws=num_draws),
    ):
        unchanged(bnn, ValueError, message, action)


def test_example_weights() -> None:
    bnn = network()
    message = r"example_weights= has shape \(3,\); give one weight per example, \[4\]"
    unchanged(bnn, ValueError, message, lambda: bnn.elbo(X, Y, num_data=4, example_weights=torch.ones(3)))


def test_no_likelihood() -> None:
    bnn = bayesify.bayesianize(mlp(), "mean_field")
    for action in (lambda: bnn.predict(X), lambda: bnn.elbo(X, Y, num_data=4)):
        unchanged(bnn, ValueError, r"this network has no likelihood; pass one to bayesianize", action)


def test_an_empty_batch() -> None:
    bnn = network()
    unchanged(bnn, ValueError, r"the batch is empty; give at least one example", lambda: bnn.predict(X[:0]))
    unchanged(
        bnn, ValueError, r"the batch is empty; give at least one example", lambda: bnn.elbo(X[:0], Y[:0], num_data=4)
    )


@pytest.mark.parametrize("memory", [0, -1])
def test_memory(memory: int) -> None:
    bnn = network()
    unchanged(
        bnn, ValueError, rf"memory={memory}; give a positive number of bytes", lambda: bnn.predict(X, memory=memory)
    )


@pytest.mark.parametrize("name", POSTERIORS)
def test_half_precision_is_refused(name: str) -> None:
    """float16 cannot hold a small standard deviation; the message says what can."""
    case = Case("half", lambda: mlp().half(), lambda size: (torch.randn(size, 3),))
    net = mlp().half()
    with pytest.raises(ValueError, match=r"0.weight is float16.*; use net.float\(\) or net.bfloat16\(\)"):
        bayesify.bayesianize(net, name) if name in ("point",) else convert(name, case, torch.float16)
    assert all(parameter is not None and parameter.dtype == torch.float16 for parameter in net.parameters())


def test_a_weight_that_is_not_finite_is_named() -> None:
    bnn = network()
    with torch.no_grad():
        bnn.posterior.mean_value["2.weight"][0, 0] = math.nan  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"elbo is nan: a draw of 2.weight is not finite; lower the learning rate"):
        bnn.elbo(X, Y, num_data=4)


def test_outputs_that_are_not_finite_are_named() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).abs().mul(0).log()

    bnn = network(net=Log())
    with pytest.raises(
        ValueError, match=r"the network's weights are finite, but its outputs are not; standardize the inputs"
    ):
        bnn.elbo(X, Y, num_data=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: posteriors.MeanField(init_std=0.0), r"MeanField: init_std=0.0; give a positive number"),
        (lambda: posteriors.MeanField(init_std=0.2, max_std=0.1), r"init_std=0.2 is not below max_std=0.1"),
        (lambda: posteriors.MeanField(max_std=-1), r"MeanField: max_std=-1; give a positive number"),
        (lambda: posteriors.FullCovariance(init_std=-1), r"FullCovariance: init_std=-1; give a positive number"),
        (lambda: posteriors.MatrixNormal(init_std=math.nan), r"MatrixNormal: init_std=nan; give a positive number"),
        (lambda: posteriors.KTied(rank=0), r"KTied: rank=0; give an integer of at least 1"),
        (lambda: posteriors.KTied(rank=1.5), r"KTied: rank=1.5; give an integer of at least 1"),
        (lambda: posteriors.RankOne(components=0), r"RankOne: components=0; give an integer of at least 1"),
        (lambda: posteriors.RankOne(factor_prior_std=0), r"RankOne: factor_prior_std=0; give a positive number"),
        (lambda: posteriors.Ensemble(members=0), r"Ensemble: members=0; give an integer of at least 1"),
        (lambda: posteriors.Ensemble(init="zeros"), r"Ensemble: init='zeros'; give 'reset' or 'network'"),
        (lambda: posteriors.Dropout(rate=1.0), r"Dropout: rate=1.0; give a number of at least 0 and below 1"),
        (lambda: posteriors.Dropout(rate=-0.1), r"Dropout: rate=-0.1; give a number of at least 0 and below 1"),
        (lambda: priors.Gaussian(std=0), r"priors.Gaussian: std=0; give a positive number"),
        (lambda: priors.Neal(scale=-1), r"priors.Neal: scale=-1; give a positive number"),
    ],
)  # fmt: skip
def test_bad_values_are_found_when_the_object_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_too_large_for_a_dense_covariance() -> None:
    with pytest.raises(ValueError, match=r"FullCovariance: layer 0 has 22650 weights.*select smaller layers, or use"):
        bayesify.bayesianize(nn.Sequential(nn.Linear(150, 150)), posteriors.FullCovariance())


def test_a_prior_above_the_cap() -> None:
    bnn = bayesify.bayesianize(mlp(), posteriors.MeanField(0.1, max_std=0.5))
    unchanged(
        bnn,
        ValueError,
        r"prior std of 0.weight is 4.62, which is not below max_std=0.5; give max_std= a larger value$",
        bnn.set_to_prior,
    )


def test_set_to_prior_of_several_posteriors_is_all_or_nothing() -> None:
    bnn = bayesify.bayesianize(mlp(), {"0": posteriors.MeanField(0.1), "2": posteriors.Point()})
    unchanged(bnn, ValueError, r"Point: q cannot be set to the prior", bnn.set_to_prior)


def test_several_posteriors_have_no_single_one() -> None:
    bnn = bayesify.bayesianize(mlp(), {"0": "mean_field", "2": "point"})
    with pytest.raises(ValueError, match=r"2 posteriors; choose one with bnn.posteriors\[i\]"):
        _ = bnn.posterior


@pytest.mark.parametrize("index", [3, -4, slice(5, 9)])
def test_draws_out_of_range(index: Any) -> None:
    with pytest.raises(IndexError, match=r"Draws: "):
        network().draw(3)[index]


def test_a_bayesian_network_is_not_made_bayesian_again():
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field")
    with pytest.raises(TypeError, match="already a BayesianNetwork"):
        bayesify.bayesianize(bnn, "mean_field")


def test_an_unknown_key_of_a_configuration_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown key 'priors'.*'prior'"):
        bayesify.bayesianize(nn.Linear(2, 1), {"posterior": "mean_field", "priors": "standard"})


def test_float16_by_a_later_conversion_is_refused():
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field")
    for lower in (bnn.half, lambda: bnn.to(torch.float16)):
        with pytest.raises(ValueError, match="float16"):
            lower()
    assert next(bnn.parameters()).dtype == torch.float32


@pytest.mark.parametrize("weights", [[1.0, -1.0], [1.0, float("nan")]])
def test_example_weights_must_be_finite_and_not_negative(weights):
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field", likelihood="gaussian")
    with pytest.raises(ValueError, match="example_weights"):
        bnn.elbo(torch.zeros(2, 2), torch.zeros(2, 1), num_data=2, example_weights=torch.tensor(weights))


def test_a_negative_kl_weight_is_refused():
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field", likelihood="gaussian")
    with pytest.raises(ValueError, match="kl_weight=-1"):
        bnn.elbo(torch.zeros(2, 2), torch.zeros(2, 1), num_data=2, kl_weight=-1.0)


def test_arrays_of_another_library_are_refused_with_the_way_out():
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field", likelihood="gaussian")
    with pytest.raises(TypeError, match="from_numpy"):
        bnn.predict(torch.zeros(2, 2).numpy())


def test_a_loss_is_not_a_likelihood() -> None:
    message = r"likelihood=CrossEntropyLoss; give a Likelihood, such as likelihoods\.Categorical\(\) for classes or .*, or a string"
    with pytest.raises(ValueError, match=message):
        bayesify.bayesianize(nn.Linear(3, 2), "mean_field", likelihood=nn.CrossEntropyLoss())  # type: ignore[arg-type]


def test_inputs_without_a_tensor() -> None:
    with pytest.raises(ValueError, match=r"none of the inputs \(list\) is a tensor .*; give at least one"):
        network().predict([[1.0, 2.0, 3.0]])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("owner", ["bayesianize", "Laplace", "SWAG"])
def test_weights_that_hooks_compute(norm: Callable[[nn.Module], nn.Module], owner: str) -> None:
    """Such modules cannot be copied: the message names the weight and what to use; what is named works."""
    net = nn.Sequential(nn.Sequential(norm(nn.Linear(2, 3))), nn.Linear(3, 1))
    net(torch.ones(4, 2))
    make = {
        "bayesianize": lambda net: bayesify.bayesianize(net, "mean_field", likelihood="gaussian"),
        "Laplace": lambda net: bayesify.Laplace(net, "gaussian"),
        "SWAG": lambda net: bayesify.baselines.SWAG(net, "gaussian"),
    }[owner]
    with pytest.raises(
        ValueError, match=rf"{owner}: 0\.0\.weight was computed .* use torch\.nn\.utils\.parametrizations"
    ):
        make(net)
    for better in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        made = nn.Sequential(better(nn.Linear(2, 3)), nn.Linear(3, 1))
        made(torch.ones(4, 2))
        make(made)
