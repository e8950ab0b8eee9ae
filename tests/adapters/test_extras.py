"""Adapters load nothing before they are asked for, and say which extra is missing."""

import importlib
import sys

import pytest
import torch
from torch import nn

import bayesify
from bayesify import adapters, likelihoods, posteriors
from bayesify.arguments import installing

PACKAGES = {
    "lightning": "lightning",
    "transformers": "transformers",
    "torchmetrics": "metrics",
    "arviz": "arviz",
    "onnx": "onnx",
    "botorch": "botorch",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_names_its_extra(package, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(installing, "import_module", missing)
    monkeypatch.delitem(sys.modules, f"bayesify.adapters.{package}", raising=False)
    monkeypatch.setitem(vars(adapters), package, None)
    bnn = bayesify.bayesianize(nn.Linear(1, 1), posteriors.MeanField(), likelihood=likelihoods.Gaussian())

    def use():
        module = importlib.import_module(f"bayesify.adapters.{package}")
        return module.to_inference_data(bnn) if package == "arviz" else module.export_onnx(bnn, "a", torch.zeros(2, 1))

    with pytest.raises(ImportError) as error:
        use()
    if package == "lightning":  # it stands on the metrics too
        assert "; pip install '" in str(error.value)
    else:
        assert f"{package} is not installed; pip install '{package}" in str(error.value)
        assert f"(bayesify's extra {PACKAGES[package]!r})" in str(error.value)


def test_names_are_where_the_list_says():
    assert sorted(adapters.__all__) == dir(adapters)
    for name in adapters.__all__:
        try:
            found = getattr(adapters, name)
        except ImportError:
            continue
        assert importlib.import_module(found.__module__).__name__ == f"bayesify.adapters.{adapters._HOMES[name]}"
    with pytest.raises(AttributeError, match="no attribute 'export_onx'"):
        adapters.export_onx  # noqa: B018
