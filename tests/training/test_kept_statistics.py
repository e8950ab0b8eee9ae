"""Draws with BatchNorm statistics of their own: each draw's are those of a pass with its weights, and they are never stale."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, posteriors
from bayesify.adapters.drawn import fixed_draws
from bayesify.training import Devices
from bayesify.training.batches import batches_all_over
from bayesify.weights.batch_statistics import checksum_of

X = torch.randn(96, 3, generator=torch.Generator().manual_seed(1)) * 2 + 1
Y = (X.sum(1) > 3).long()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=16)


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        hidden = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        super().__init__(*hidden, nn.ReLU(), nn.Linear(6, 2))


def bayesian(posterior=None, **options) -> bayesify.BayesianNetwork:
    posterior = posteriors.MeanField(init_std=0.3) if posterior is None else posterior
    return bayesify.bayesianize(Net(), posterior, likelihood=likelihoods.Categorical(), **options)


def refreshed(num_draws: int = 4, **options) -> bayesify.BayesianNetwork:
    bnn = bayesian(**options)
    bayesify.keep_draws(bnn, LOADER, num_draws)
    return bnn


def plain_network(draw: bayesify.Draw) -> nn.Module:
    """A plain network with a draw's weights whose BatchNorm layers average over all batches that they see."""
    plain = Net()
    plain.load_state_dict({name: value.detach() for name, value in draw.weights.items()}, strict=False)
    for layer in (plain[1], plain[4]):
        layer.momentum = None
    return plain


@torch.no_grad()
def expected(draws: bayesify.Draws, x: torch.Tensor) -> torch.Tensor:
    """Outputs of draws that were normalized by passes of their own, [S, B, O], with plain torch."""
    found = []
    for draw in draws:
        plain = plain_network(draw).eval()
        for layer in (plain[1], plain[4]):
            layer.train()
        for batch, _ in LOADER:
            plain(batch)
        found.append(plain.eval()(x))
    return torch.stack(found)


def test_fit_keeps_what_fits_into_memory(monkeypatch):
    size = 4 * sum(weight.numel for weight in bayesian().weights.values())
    for draws, kept in ((32.5, 32), (20.5, 20), (8.5, 8), (7.5, None)):
        monkeypatch.setattr("bayesify.training.batch_statistics.MAX_WEIGHT_BYTES", int(draws * size))
        bnn = bayesian()
        bayesify.fit(bnn, LOADER, epochs=1, seed=0, progress=False)
        assert (bnn.kept_statistics and len(bnn.kept_statistics)) == kept


@pytest.mark.parametrize(
    "posterior",
    [
        posteriors.MeanField(init_std=0.3),
        posteriors.InducingWeights(4, 4),
        posteriors.WalshHadamard(),
        {"Linear": posteriors.KTied(init_std=0.3)},
    ],
    ids=lambda given: type(given).__name__,
)
def test_each_draw_has_the_statistics_of_a_pass_with_its_weights(posterior):
    bnn = bayesian(posterior)
    bayesify.keep_draws(bnn, LOADER, 4, seed=5)
    draws = bnn.draw(4, generator=torch.Generator().manual_seed(5)).materialize()
    outputs = expected(draws, X[:7])
    torch.testing.assert_close(bnn.predict(X[:7]).outputs, outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bnn.predict(X[:7], 2).outputs, outputs[:2], rtol=1e-4, atol=1e-5)
    again = bnn.predict(X[:7], generator=torch.Generator().manual_seed(9)).outputs
    torch.testing.assert_close(again, outputs, rtol=1e-4, atol=1e-5)
    streamed = bnn.predict(X[:7], keep_outputs=False).probs  # reduced chunk by chunk
    torch.testing.assert_close(streamed, outputs.softmax(-1).mean(0), rtol=1e-4, atol=1e-5)


def test_the_network_itself_is_left_alone():
    bnn = bayesian()
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    momenta = [layer.momentum for layer in bnn.modules() if isinstance(layer, nn.BatchNorm1d)]
    modes = [module.training for module in bnn.modules()]
    batches = list(LOADER)  # a loader takes a seed from torch's global generator
    numbers = torch.get_rng_state()
    bayesify.keep_draws(bnn, batches, 2)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
    assert [layer.momentum for layer in bnn.modules() if isinstance(layer, nn.BatchNorm1d)] == momenta
    assert [module.training for module in bnn.modules()] == modes
    kept = {name: value.clone() for name, value in bnn.kept_statistics.values.items()}
    bnn.train().prediction_draws()(X)  # draws in training mode update statistics in place: copies
    assert all(torch.equal(value, kept[name]) for name, value in bnn.kept_statistics.values.items())


def test_copies_files_and_exports_predict_the_same(tmp_path):
    bnn = refreshed()
    wanted = bnn.predict(X).probs
    bayesify.save(bnn, tmp_path / "model.safetensors")
    for other in (
        bayesify.load(tmp_path / "model.safetensors", Net()),
        copy.deepcopy(bnn),
        pickle.loads(pickle.dumps(bnn)),
        baselines.TemperatureScaling(bnn),
    ):
        torch.testing.assert_close(other.predict(X).probs, wanted, rtol=0, atol=1e-6)
    fixed = baselines.FixedDraws(fixed_draws(bnn, 4, None, "test"), bnn.likelihood)  # what is exported and served
    bayesify.save(fixed, tmp_path / "draws.safetensors")
    for other in (fixed, bayesify.load(tmp_path / "draws.safetensors", Net())):
        torch.testing.assert_close(other.predict(X).probs, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_onnx_agrees(tmp_path):
    pytest.importorskip("onnxruntime")
    import onnxruntime

    from bayesify.adapters.onnx import export_onnx

    bnn = refreshed(2)
    export_onnx(bnn, tmp_path / "model.onnx", X[:4], num_draws=2)
    probs = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["probs"], {"x": X.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(probs), bnn.predict(X).probs, rtol=0, atol=1e-5)


def is_kept(bnn: bayesify.BayesianNetwork) -> bool:
    """Whether predictions are those of kept draws, which no generator changes."""
    seeded = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    return torch.equal(*(bnn.predict(X[:5], 4, generator=generator).probs for generator in seeded))


def test_any_change_of_a_parameter_drops_them(tmp_path):
    names = [name for name, _ in refreshed().named_parameters() if not name.startswith("likelihood")]
    for name in names:
        bnn = refreshed(2)
        bnn.get_parameter(name).data.view(-1)[-1] += 1e-6 + 1e-6 * bnn.get_parameter(name).data.view(-1)[-1].abs()
        assert not is_kept(bnn), name
    bnn = refreshed()
    assert is_kept(bnn)
    with torch.no_grad():
        weight = bnn.network[1].weight
        weight[0] += 1.0
        assert not is_kept(bnn)
        bayesify.save(bnn, tmp_path / "changed.safetensors")
        assert bayesify.load(tmp_path / "changed.safetensors", Net()).kept_statistics is None
        weight[0] -= 1.0
        assert is_kept(bnn)
    bnn.train()(X)  # averages move, which kept draws do not use
    assert is_kept(bnn)
    assert not is_kept(refreshed().bfloat16().float())


def test_the_checksum_sees_signs_places_and_types():
    net = nn.Linear(4, 4)
    seen = {checksum_of([net], ())}
    for change in (
        lambda value: value.neg_(),
        lambda value: value.copy_(value.flip(0)),
        lambda value: value.copy_(value.T.clone()),
        lambda value: value[0, 0].neg_(),
        lambda value: value.mul_(2),
        lambda value: value.zero_(),
    ):
        change(net.weight.data)
        seen.add(checksum_of([net], ()))
    seen.add(checksum_of([net.bfloat16()], ()))
    assert len(seen) == 8


def test_more_draws_than_were_kept_are_fresh_and_said_so():
    bnn = refreshed(2)
    with pytest.warns(UserWarning, match=r"num_draws=3, but only 2 draws have their own batch statistics.*keep_draws"):
        assert len(bnn.predict(X[:3], 3).outputs) == 3
    assert len(bnn.predict(X[:3], 2, antithetic=True).outputs) == 2


def test_fit_keeps_draws_at_its_end_bit_for_bit():
    found = []
    for _ in range(2):
        bnn = bayesian().eval()
        history = bayesify.fit(bnn, LOADER, epochs=2, seed=0, progress=False)
        assert "statistics_differ" not in history.findings.codes
        found.append(bnn.predict(X).probs)
    assert is_kept(bnn)
    assert len(bnn.kept_statistics) == 32
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "made",
    [
        lambda: bayesian(posteriors.Point()),
        lambda: bayesian(posteriors.Ensemble(2)),
        lambda: bayesian(batch_statistics="frozen"),
        lambda: bayesify.bayesianize(nn.Linear(3, 2), "mean_field", likelihood="categorical"),
    ],
    ids=["point", "ensemble", "frozen", "without"],
)
def test_networks_without_statistics_that_follow_draws(made):
    bnn = made()
    with pytest.raises(ValueError, match="keep_draws: no layer"):
        bayesify.keep_draws(bnn, LOADER)
    bayesify.fit(bnn, LOADER, epochs=1, progress=False)
    assert bnn.kept_statistics is None


def test_frozen_layers_keep_theirs_and_some_examples_will_do():
    bnn = bayesian(batch_statistics=["1"])
    bayesify.keep_draws(bnn, LOADER, 2, max_examples=48)
    assert {name.partition(".")[0] for name in bnn.kept_statistics.values} == {"4"}
    assert bnn.kept_statistics.values["4.num_batches_tracked"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="yields no batch"):
        bayesify.keep_draws(bnn, [])


def test_batches_come_from_all_over_a_loader_that_does_not_shuffle():
    batches = list(LOADER)
    seen = [batch.x for batch in batches_all_over(batches, 48, None)]
    assert [next(i for i, (x, _) in enumerate(batches) if x is found) for found in seen] == [0, 2, 4]
    seen = [batch.x for batch in batches_all_over(batches, 64)]  # two thirds, not the first ones
    assert [next(i for i, (x, _) in enumerate(batches) if x is found) for found in seen] == [0, 2, 3, 5]
    assert len(list(batches_all_over(batches, None))) == 6
    shuffled = DataLoader(LOADER.dataset, batch_size=16, shuffle=True)
    assert len(list(batches_all_over(shuffled, 40, None))) == 3


def test_threads_predict_the_same():
    bnn = refreshed()
    wanted = bnn.predict(X).probs
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: bnn.predict(X).probs, range(8)):
            assert torch.equal(found, wanted)


def test_files_with_statistics_of_another_network_are_refused(tmp_path):
    bnn = refreshed()
    bnn.kept_statistics = bnn.kept_statistics.map(lambda value: value[:, None])
    bayesify.save(bnn, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=r"batch statistics for .* that do not fit this network"):
        bayesify.load(tmp_path / "odd.safetensors", Net())


@pytest.mark.slow
def test_forked_processes_hand_them_back():
    bnn = bayesian()
    bayesify.fit(bnn, LOADER, epochs=1, seed=0, progress=False, device=Devices(2, "cpu", launch="fork"))
    assert is_kept(bnn)
