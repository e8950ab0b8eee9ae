"""A file that holds the posterior draws from it: the numbers, the networks and their spread are torch's."""

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from scipy import stats

import bayesify
from bayesify import likelihoods, posteriors
from bayesify.adapters import export_onnx
from bayesify.adapters import onnx as adapter
from bayesify.adapters.onnx import moments
from bayesify.adapters.onnx_sampling import GivenNoise, normals

pytestmark = pytest.mark.usefixtures("operators_looked_up_once")
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def network(posterior, width=8):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    return bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical())


def run(made, **inputs):
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    return dict(zip(made.outputs, session.run(list(made.outputs), {"x": X.numpy(), **inputs}), strict=True))


def test_numbers_are_standard_normal():
    found = np.stack([normals(seed, draw, 20001) for seed in (0, 1, -5, 2**40) for draw in (0, 1)])
    assert found.shape == (8, 20001)
    assert found.dtype == np.float32
    for row in found:
        assert stats.kstest(row, "norm").pvalue > 1e-4
        assert abs(row.var() - 1) < 0.05
        assert 3.5 < abs(row).max() < 4.9
    # Streams, the halves of one, and neighbors in one have nothing to do with each other.
    correlations = np.corrcoef(found) - np.eye(8)
    assert abs(correlations).max() < 5 / np.sqrt(20001)
    assert abs(np.corrcoef(found[0][:10000], found[0][10001:20001])[0, 1]) < 0.05
    assert abs(np.corrcoef(found[0][:-1], found[0][1:])[0, 1]) < 0.05
    np.testing.assert_array_equal(normals(3, 1, 11), normals(3, 1, 12)[:11])


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A network with two kinds of posteriors, and its file of two draws."""
    bnn = network({"2": posteriors.InducingWeights(rows=4, cols=4), "*": posteriors.MeanField(init_std=0.3)})
    return bnn, export_onnx(bnn, tmp_path_factory.mktemp("onnx") / "model.onnx", X, num_draws=2, sample=True)


@pytest.mark.slow
def test_the_noise_is_not_written_again(exported):
    """A draw works in place on its pieces of the noise; as scatters over all of it that took 96 % of a run's time."""
    nodes = [node.op_type for node in onnx.load(exported[1].path).graph.node]
    assert "Gemm" in nodes
    assert not [kind for kind in nodes if kind.startswith("Scatter")]


@pytest.mark.slow
def test_stored_matrices_may_be_8_bits(tmp_path, monkeypatch):
    """Rows are off by at most 1/254 of their largest entry, so that probabilities of the same draws differ by little."""
    export, programs = adapter._exported, {}

    def export_once(graph, *given, **options):
        """The two files are made from the same programs."""
        if type(graph) not in programs:
            programs[type(graph)] = export(graph, *given, **options)
        return programs[type(graph)]

    monkeypatch.setattr(adapter, "_exported", export_once)
    bnn = network(posteriors.MeanField(init_std=0.1), width=64)
    files = [
        export_onnx(bnn, tmp_path / f"{int8}.onnx", X, num_draws=1, sample=True, int8=int8) for int8 in (False, True)
    ]
    plain, rounded = (run(made, seed=np.array(3))["probs"] for made in files)
    assert 0 < abs(plain - rounded).max() < 0.02
    saved = files[0].path.stat().st_size - files[1].path.stat().st_size
    assert saved > 0.9 * 3 * 2 * 64**2  # three bytes for each entry of means and deviations of the 64 x 64 layer
    with pytest.raises(ValueError, match="int8=True works only with sample=True"):
        export_onnx(bnn, tmp_path / "fixed.onnx", X, int8=True)


def test_a_seed_decides_the_draws(exported):
    bnn, made = exported
    assert made.inputs == ("x", "seed")
    assert made.largest_difference < 1e-5
    first, again, other = (run(made, seed=np.array(seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first["probs"], again["probs"])
    assert abs(first["probs"] - other["probs"]).max() > 1e-3
    draws = [bnn.draw(1, generator=GivenNoise(torch.from_numpy(normals(7, s, made.noise_size)))) for s in range(2)]
    wanted = moments(torch.cat([draw(X) for draw in draws]).detach(), likelihoods.Categorical())
    for name, value in zip(made.outputs, wanted, strict=True):
        np.testing.assert_allclose(first[name], value.numpy(), atol=1e-5)
    # Over many seeds: the posterior predictive.
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    probs = [session.run(["probs"], {"x": X.numpy(), "seed": np.array(seed)})[0] for seed in range(1000)]
    exact = bnn.predict(X, 4000, generator=torch.Generator().manual_seed(1)).probs.numpy()
    np.testing.assert_allclose(np.mean(probs, 0), exact, atol=0.015)


@pytest.mark.slow
def test_the_file_of_an_inducing_posterior_is_smaller_than_the_network(tmp_path):
    """That such a file draws what torch draws is checked when the guide for small devices makes one."""
    bnn = network(posteriors.InducingWeights(4, 4), width=300)
    made = export_onnx(bnn, tmp_path / "model.onnx", X, num_draws=2, sample="noise")
    assert made.inputs == ("x", "noise")
    plain = 4 * sum(weight.numel for weight in bnn.weights.values())
    assert made.path.stat().st_size < 0.3 * plain
    noise = torch.randn(2, made.noise_size, generator=torch.Generator().manual_seed(2))
    draws = torch.cat([bnn.draw(1, generator=GivenNoise(values.clone()))(X) for values in noise]).detach()
    found = run(made, noise=noise.numpy())
    np.testing.assert_allclose(found["probs"], draws.softmax(-1).mean(0).numpy(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "posterior",
    [
        posteriors.KTied(),
        posteriors.MatrixNormal(),
        posteriors.WalshHadamard(),
        posteriors.Dropout(rate=0.3),
        posteriors.InducingWeights(2, 2, q="full"),
        {"4": posteriors.FullCovariance(init_std=0.2)},
    ],
    ids=["k_tied", "matrix_normal", "walsh_hadamard", "dropout", "inducing", "last_layer"],
)
def test_other_families(tmp_path, posterior):
    made = export_onnx(network(posterior), tmp_path / "model.onnx", X, num_draws=2, sample=True)
    assert made.largest_difference < 1e-5
    first, other = (run(made, seed=np.array(seed))["probs"] for seed in (1, 2))
    assert abs(first - other).max() > 1e-5


def test_refusals_name_the_remedy(tmp_path):
    for posterior, message in [
        (posteriors.Point(), "nothing to draw.*sample=False"),
        (posteriors.Ensemble(members=3), "choose a random ensemble member.*sample=False"),
        (posteriors.GlobalInducing(inputs=X[:4]), "GlobalInducing must run the network .*sample=False"),
    ]:
        with pytest.raises(ValueError, match=message):
            export_onnx(network(posterior), tmp_path / "a.onnx", X, sample=True)
    with pytest.raises(TypeError, match="needs a BayesianNetwork"):
        export_onnx(
            network("mean_field").draw(2), tmp_path / "a.onnx", X, likelihood=likelihoods.Categorical(), sample=True
        )
    assert list(tmp_path.iterdir()) == []
