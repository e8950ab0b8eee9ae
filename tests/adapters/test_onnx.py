"""An exported file predicts in ONNX Runtime what the library predicts from the same draws."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.adapters import onnx as adapter
from bayesify.adapters.onnx import export_onnx

pytestmark = pytest.mark.usefixtures("operators_looked_up_once")
X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def seeded():
    return torch.Generator().manual_seed(3)


def network(posterior, likelihood, outputs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, outputs))
    return bayesify.bayesianize(net, posterior, likelihood=likelihood)


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def close(found, prediction, rows=slice(None)):
    for name, value in found.items():
        np.testing.assert_allclose(value, getattr(prediction, name)[rows].numpy(), atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "names"),
    [
        (likelihoods.Gaussian([0.1, 0.4]), 2, {"mean", "variance", "epistemic"}),
        pytest.param(
            likelihoods.HeteroscedasticGaussian(), 4, {"mean", "variance", "epistemic"}, marks=pytest.mark.slow
        ),
        pytest.param(likelihoods.Categorical(), 3, {"probs", "entropy", "mutual_information"}, marks=pytest.mark.slow),
        pytest.param(likelihoods.Bernoulli(), 2, {"probs", "entropy", "mutual_information"}, marks=pytest.mark.slow),
    ],
    ids=["gaussian", "heteroscedastic", "categorical", "bernoulli"],
)
def test_the_file_predicts_what_the_network_predicts(tmp_path, likelihood, outputs, names):
    bnn = network(posteriors.MeanField(init_std=0.3), likelihood, outputs)
    wanted = bnn.predict(X, 3, generator=seeded())
    made = export_onnx(bnn, tmp_path / "model.onnx", X, num_draws=3, generator=seeded())
    assert made.num_draws == 3
    assert made.inputs == ("x",)
    assert set(made.outputs) == names
    assert made.largest_difference < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    found = run(made.path, x=X.numpy())
    assert found.keys() == names
    close(found, wanted)
    close(run(made.path, x=X[2:3].numpy()), wanted, slice(2, 3))
    many = X.repeat(9, 1)
    close(run(made.path, x=many.numpy()), bnn.predict(many, 3, generator=seeded()))
    assert b".py" not in made.path.read_bytes(), "it tells where it was made"


@pytest.mark.slow
@pytest.mark.parametrize(
    "posterior",
    [
        posteriors.InducingWeights(2, 2),
        posteriors.WalshHadamard(),
        posteriors.Ensemble(members=3),
        {"3": posteriors.FullCovariance(init_std=0.2)},
    ],
    ids=["inducing", "walsh_hadamard", "ensemble", "last_layer"],
)
def test_every_kind_of_draw(tmp_path, posterior):
    bnn = network(posterior, likelihoods.Categorical(), 3)
    export_onnx(bnn, tmp_path / "model.onnx", X, num_draws=3, generator=seeded())
    close(run(tmp_path / "model.onnx", x=X.numpy()), bnn.predict(X, 3, generator=seeded()))


@pytest.mark.slow
def test_convolutions_with_batch_statistics_of_each_member(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    bnn = bayesify.bayesianize(net, posteriors.Ensemble(members=2), likelihood=likelihoods.Categorical())
    images = torch.randn(4, 1, 6, 6)
    bnn.elbo(images, torch.tensor([0, 1, 0, 1]), num_data=4, num_draws=2)  # each member sees its own statistics
    export_onnx(bnn, tmp_path / "model.onnx", images, num_draws=2, generator=seeded())
    close(run(tmp_path / "model.onnx", x=images.numpy()), bnn.predict(images, 2, generator=seeded()))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, tokens, mask):
        hidden = self.embed(tokens) * mask.unsqueeze(-1)
        return {"hidden": hidden, "logits": self.out(hidden.mean(1))}


def test_keyword_inputs_and_several_outputs(tmp_path):
    """Of a classifier: what is said of it is said of classes."""
    bnn = bayesify.bayesianize(
        Keywords(), {"out": posteriors.MeanField(init_std=0.5)}, likelihood=likelihoods.Categorical()
    )
    x = {"tokens": torch.randint(7, (4, 5)), "mask": torch.ones(4, 5)}
    made = export_onnx(bnn, tmp_path / "model.onnx", x, num_draws=3, generator=seeded())
    assert made.inputs == ("tokens", "mask")
    found = run(made.path, **{name: value.numpy() for name, value in x.items()})
    assert found.keys() == {"probs", "entropy", "mutual_information"}
    close(found, bnn.predict(x, 3, generator=seeded()))


@pytest.mark.slow
def test_weights_without_a_posterior_are_stored_once(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    bnn = bayesify.bayesianize(net, {"4": posteriors.MeanField()}, likelihood=likelihoods.Gaussian())
    made = export_onnx(bnn, tmp_path / "model.onnx", X, num_draws=8)
    assert made.path.stat().st_size < 1.2 * 4 * bayesify.count_parameters(net)
    nodes = [node.op_type for node in onnx.load(made.path).graph.node]
    assert nodes.count("Gemm") == 2 + 8  # what no draw changes runs once


def test_a_graph_of_draws_of_the_last_layer_runs_the_whole_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    laplace = bayesify.Laplace(net, likelihoods.Gaussian(0.1), subset="last_layer").fit([(X, X[:, :1])])
    draws = laplace.draw(3, generator=seeded())
    mean, _, epistemic = adapter.PredictiveGraph(draws, laplace.likelihood, None, ())(X)
    torch.testing.assert_close(mean, draws(X).mean(0))
    torch.testing.assert_close(epistemic, draws(X).var(0, unbiased=False))


def test_a_file_that_is_not_right_is_not_written(tmp_path, monkeypatch):
    bnn = bayesify.bayesianize(nn.Linear(3, 3), posteriors.MeanField(), likelihood=likelihoods.Categorical())
    monkeypatch.setattr(adapter, "_exported", _export_another(adapter._exported))
    with pytest.raises(ValueError, match=r"in probs, torch and ONNX Runtime differ by .* no file was written"):
        export_onnx(bnn, tmp_path / "model.onnx", X, num_draws=2)
    assert list(tmp_path.iterdir()) == []


def _export_another(export):
    def wrong(graph, *rest):
        other = adapter.copy.deepcopy(graph)
        for parameter in other.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return export(other, *rest)

    return wrong


def test_mistakes_are_named(tmp_path):
    bnn = network(posteriors.MeanField(), likelihoods.Categorical(), 3)
    with pytest.raises(ValueError, match="at least 2 examples"):
        export_onnx(bnn, tmp_path / "a.onnx", X[:1])
    with pytest.raises(ValueError, match="no likelihood"):
        export_onnx(bnn.draw(2), tmp_path / "a.onnx", X, num_draws=2)
    with pytest.raises(TypeError, match="Linear has no draws"):
        export_onnx(nn.Linear(3, 1), tmp_path / "a.onnx", X)
    for sample in (False, True):  # by torch itself, before the exporter and its many lines
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            export_onnx(bnn, tmp_path / "a.onnx", torch.zeros(2, 17), sample=sample)
    with pytest.raises(ValueError, match=r"does not support bfloat16.*model.float\(\)"):
        export_onnx(bnn, tmp_path / "a.onnx", X.bfloat16())
    assert list(tmp_path.iterdir()) == []


def test_draws_that_can_be_counted_are_all_exported(tmp_path, monkeypatch):
    written = SimpleNamespace(save=lambda path, **_: Path(path).touch())
    monkeypatch.setattr(adapter, "_exported", lambda *_: written)
    monkeypatch.setattr(adapter._Trial, "difference", lambda *_: 0.0)
    bnn = bayesify.bayesianize(nn.Linear(2, 1), "mean_field", likelihood=likelihoods.Gaussian(0.1))
    made = export_onnx(bnn.draw(4), tmp_path / "four.onnx", torch.randn(3, 2), likelihood=bnn.likelihood)
    assert made.num_draws == 4
    ensemble = bayesify.bayesianize(nn.Linear(2, 1), "ensemble", likelihood=likelihoods.Gaussian(0.1))
    assert export_onnx(ensemble, tmp_path / "members.onnx", torch.randn(3, 2)).num_draws == 5
