"""Every method that is not a posterior: its `fit` trains from a task and gives something that predicts."""

import copy
import math
from importlib.util import find_spec
from operator import attrgetter

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, metrics, priors
from bayesify.configuration import make_posterior
from bayesify.methods import METHODS, get_method
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.training.task import TrainingTask

FROM_TASK = [name for name, method in METHODS.items() if method.fit is not None]


def problem(task):
    torch.manual_seed(0)
    x = torch.randn(24, 2)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2 if task == "classification" else 1))
    if task == "classification":
        return net, likelihoods.Categorical(), x, (x[:, 0] > 0).long()
    return net, likelihoods.Gaussian(0.1, learn=False), x, x[:, :1]


def train(name, task, seed=0):
    method = METHODS[name]
    if method.extra is not None and find_spec(method.extra) is None:
        pytest.skip(method.status)
    net, likelihood, x, y = problem(task)
    given = {"prior": priors.Neal(), "num_data": 24, "epochs": 3 if method.slow else 8, "seed": seed}
    return method.fit(TrainingTask(net, likelihood, [(x, y)], **given), **method.options), net, x, y


def test_the_baselines_are_registered():
    assert {"swag", "vogn", "ivon", "nng", "hmc"} <= set(FROM_TASK)
    assert get_method("noisy-kfac").name == "nng"


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("name", FROM_TASK)
def test_method_predicts_and_leaves_network_and_generators_alone(name, task):
    before = copy.deepcopy(problem(task)[0].state_dict())
    state = torch.get_rng_state()
    model, net, x, y = train(name, task)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    prediction = model.predict(x)
    assert isinstance(prediction, ClassificationPredictive if task == "classification" else RegressionPredictive)
    assert all(math.isfinite(value) for value in metrics.evaluate(prediction, y).values())


@pytest.mark.parametrize("name", FROM_TASK)
def test_same_seed_same_model(name):
    def numbers(seed):
        model, _, x, _ = train(name, "regression", seed)
        torch.manual_seed(3)
        return model.predict(x).mean

    assert torch.equal(numbers(1), numbers(1))


@pytest.mark.parametrize("name", FROM_TASK)
def test_bayesianize_says_that_it_is_not_a_posterior(name):
    used_as = METHODS[name].used_as
    for known in (name, *METHODS[name].aliases):
        with pytest.raises(ValueError, match=f"is not a posterior of a network; use bayesify.{used_as}$"):
            make_posterior(known)
    assert callable(attrgetter(used_as)(bayesify))
