"""The whole choice as plain data: a dict or a JSON file makes the same kind of network again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, POSTERIORS, posterior
from torch import nn

import bayesify
from bayesify import BayesianNetwork, likelihoods, posteriors, priors


def kinds(bnn: BayesianNetwork) -> Any:
    return (
        [(type(part).__name__, part.config()) for part in bnn.posteriors],  # type: ignore[operator]
        (type(bnn.prior).__name__, bnn.prior.config()),
        None if bnn.likelihood is None else (type(bnn.likelihood).__name__, bnn.likelihood.config()),
        [(row.name, row.treatment, row.after, row.remark) for row in bnn.summary().rows],
        {key: value.shape for key, value in bnn.state_dict().items()},
    )


def through_file(config: Any, folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", POSTERIORS)
def test_every_posterior(name: str, tmp_path: Path) -> None:
    case = CASES["linear"]
    bnn = bayesify.bayesianize(case.network(), posterior(name, case), likelihood=likelihoods.Categorical())
    for data in (bnn.config(), json.loads(json.dumps(bnn.config())), through_file(bnn.config(), tmp_path)):
        again = bayesify.bayesianize(case.network(), data)
        assert kinds(again) == kinds(bnn)
        again.load_state_dict(bnn.state_dict())


@pytest.mark.parametrize(
    "prior", [priors.Gaussian(0.3), priors.Standard(), priors.Neal(4.0)], ids=lambda prior: prior.name
)
@pytest.mark.parametrize(
    "likelihood",
    [
        likelihoods.Gaussian([0.1, 0.2], learn=False),
        likelihoods.Gaussian(0.5),
        likelihoods.HeteroscedasticGaussian(),
        likelihoods.Categorical(class_axis=1, ignore_index=-1),
        likelihoods.Bernoulli(),
        None,
    ],
    ids=str,
)
def test_priors_and_likelihoods(prior: priors.Prior, likelihood: likelihoods.Likelihood | None, tmp_path: Path) -> None:
    net = CASES["linear"].network()
    bnn = bayesify.bayesianize(net, "mean_field", prior=prior, likelihood=likelihood)
    again = bayesify.bayesianize(net, Path(through_file(bnn.config(), tmp_path)))
    assert kinds(again) == kinds(bnn)


def test_selectors(tmp_path: Path) -> None:
    net = CASES["encoder"].network()
    choice = {"linear1": posteriors.Ensemble(3), net.linear2: posteriors.KTied(3), "norm1": "point", "*": "mean_field"}
    bnn = bayesify.bayesianize(net, choice, output="logits")
    again = bayesify.bayesianize(net, through_file(bnn.config(), tmp_path))
    assert kinds(again) == kinds(bnn)
    assert list(bnn.config()["posterior"]) == ["linear1", "linear2", "norm1", "*"]
    assert again.config() == bnn.config()


def test_only_the_posterior_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "posterior.json"
    path.write_text('{"0": {"name": "mean_field", "init_std": 0.5}, "*": "point"}')
    bnn = bayesify.bayesianize(CASES["linear"].network(), path)
    assert bnn.posteriors[0].init_std == 0.5
    assert isinstance(bnn.posteriors[1], posteriors.Point)


def test_arguments_win_over_the_file() -> None:
    net = CASES["linear"].network()
    config = bayesify.bayesianize(net, "mean_field", likelihood="gaussian", prior="standard").config()
    bnn = bayesify.bayesianize(net, config, likelihood="categorical", prior=priors.Neal(2.0))
    assert isinstance(bnn.likelihood, likelihoods.Categorical)
    assert isinstance(bnn.prior, priors.Neal)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"posterior": ')
    with pytest.raises(ValueError, match=r"broken.json: not valid JSON .*; write the file with json.dump"):
        bayesify.bayesianize(nn.Linear(2, 2), str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"likelihood": "gausian"}, r"unknown likelihood 'gausian'; did you mean 'gaussian'\?"),
        ({"likelihood": "classification"}, "unknown likelihood 'classification'; for classification: categorical"),
        ({"prior": "neel"}, r"unknown prior 'neel'; did you mean 'neal'\?"),
        ({"prior": {"name": "neal", "std": 2}}, r"Neal: .*'std'; its options are scale"),
        ({"prior": {"name": "gaussian", "std": -2}}, r"priors.Gaussian: std=-2; give a positive number"),
        ({"likelihood": {"name": "gaussian", "noise": -1.0}}, r"noise=-1.0; give a positive number"),
    ],
)
def test_bad_names_and_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bayesify.bayesianize(nn.Linear(2, 2), "mean_field", **arguments)


def test_aliases_name_the_same_method() -> None:
    net = nn.Linear(2, 2)
    assert isinstance(bayesify.bayesianize(net, "FFG-W").posterior, posteriors.MeanField)
    assert isinstance(bayesify.bayesianize(net, "fcg_w").posterior, posteriors.FullCovariance)
    assert torch.equal(bayesify.bayesianize(net, "map").posterior.mean()["weight"], net.weight)
