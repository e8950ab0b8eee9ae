"""SWAG against NumPy over the iterates, its draws against the dense covariance, batch statistics against a pass over the data."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, likelihoods, priors
from bayesify.baselines import from_task
from bayesify.training.task import TrainingTask


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def walk(model, steps, swag, seed=1):
    """Random iterates, collected; returns them as one array [steps, P]."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
        swag.collect(model)
        rows.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().copy())
    return np.stack(rows)


def flat(values, start=0):
    return torch.cat([value.flatten(start) for value in values.values()], dim=-1)


@pytest.mark.parametrize("steps", [3, 9])
def test_moments_and_covariance_are_those_of_the_iterates(steps):
    rank = 5
    model = net()
    swag = baselines.SWAG(model, likelihoods.Gaussian(0.1), rank=rank, scale=0.7)
    rows = walk(model, steps, swag)
    np.testing.assert_allclose(flat(swag.mean).numpy(), rows.mean(0), rtol=1e-12)
    variance = (rows**2).mean(0) - rows.mean(0) ** 2
    np.testing.assert_allclose(flat(swag.variance()).numpy(), variance, rtol=1e-9)
    running = np.stack([rows[: index + 1].mean(0) for index in range(steps)])
    columns = (rows - running)[-rank:].T  # D, [P, K]
    np.testing.assert_allclose(flat(swag.deviations, 1).numpy(), columns.T, atol=1e-13)
    dense = 0.7 * 0.5 * (np.diag(variance) + columns @ columns.T / (columns.shape[1] - 1))
    np.testing.assert_allclose(swag.covariance_matrix().numpy(), dense, atol=1e-13)


@pytest.mark.parametrize("rank", [0, 4])
def test_draws_have_that_covariance(rank):
    model = net()
    swag = baselines.SWAG(model, likelihoods.Gaussian(0.1), rank=rank, scale=0.5)
    rows = walk(model, 6, swag)
    n = 40_000
    draws = flat(swag.draw(n, generator=torch.Generator().manual_seed(0)).weights, 1)
    covariance = swag.covariance_matrix()
    if rank == 0:
        np.testing.assert_allclose(covariance.numpy(), 0.5 * np.diag(rows.var(0)), atol=1e-13)
    spread = covariance.diagonal()
    assert ((draws.mean(0) - flat(swag.mean)).abs() <= 5 * (spread / n).sqrt()).all()
    centered = draws - flat(swag.mean)
    error = ((torch.outer(spread, spread) + covariance.square()) / n).sqrt()  # of a Gaussian's second moments
    assert ((centered.T @ centered / n - covariance).abs() <= 5 * error).all()


def test_float32_variance_survives_a_large_mean():
    model = nn.Linear(1, 1)
    swag = baselines.SWAG(model, likelihoods.Gaussian(0.1))
    for value in (1000.0, 1000.25, 1000.5):
        with torch.no_grad():
            model.weight.fill_(value)
        swag.collect(model)
    assert float(swag.variance()["weight"]) == pytest.approx(0.125 / 3, rel=1e-6)


def normed():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2)
    return nn.Sequential(*layers)


def images(n=40):
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(2, (n,), generator=generator)
    return torch.randn(n, 1, 4, 4, generator=generator) + y.view(-1, 1, 1, 1), y


def test_each_draw_gets_statistics_of_the_data_under_its_own_weights():
    x, y = images()
    model = normed()
    swag = baselines.SWAG(model, "categorical", rank=3).fit([(x[:30], y[:30]), (x[30:], y[30:])], 3, 0.05, seed=0)
    with pytest.raises(ValueError, match=r"has BatchNorm.*loader"):
        swag.draw(2)
    with pytest.raises(ValueError, match=r"mean_network\(loader\)"):
        swag.mean_network()
    loader = [(x[:30], y[:30]), (x[30:], y[30:])]
    draws = swag.draw(3, generator=torch.Generator().manual_seed(1), loader=loader)
    for index, draw in enumerate(draws):
        maps = nn.functional.conv2d(x, draw.weights["0.weight"], draw.weights["0.bias"])
        parts = maps[:30].transpose(0, 1).flatten(1).var(1), maps[30:].transpose(0, 1).flatten(1).var(1)
        own = draws.buffers[index]
        torch.testing.assert_close(own["1.running_mean"], maps.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own["1.running_var"], 0.75 * parts[0] + 0.25 * parts[1], rtol=1e-5, atol=1e-6)
    again = swag.predict(x, draws=draws)
    torch.testing.assert_close(again.outputs, draws[0:3].outputs((x,), {}).kept)
    assert swag.network[1].momentum == model[1].momentum
    assert not torch.equal(draws.buffers[0]["1.running_mean"], draws.buffers[1]["1.running_mean"])
    plain = swag.mean_network(loader).eval()
    torch.testing.assert_close(plain[1].running_mean, plain[0](x).mean((0, 2, 3)).detach(), rtol=1e-5, atol=1e-6)


def test_fit_is_sgd_with_the_priors_decay_and_leaves_the_network_alone():
    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    model = net()
    before = copy.deepcopy(model.state_dict())
    likelihood = likelihoods.Gaussian(0.5, learn=False)
    swag = baselines.SWAG(model, likelihood, rank=4)
    state = torch.get_rng_state()
    swag.fit([(x, y)], 5, 0.01, prior=priors.Gaussian(2.0), skip_epochs=1, seed=0, progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1 / (12 * 4))
    rows, noise = [], float(swag.likelihood.noise)
    for _ in range(5):
        optimizer.zero_grad()
        (0.5 * ((y - model(x)) ** 2 / noise + math.log(2 * math.pi * noise)).mean()).backward()
        optimizer.step()
        rows.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(flat(swag.mean), torch.stack(rows[1:]).mean(0), rtol=1e-12, atol=1e-12)
    assert swag.count == 4
    assert swag.history.column("collected") == [0, 1, 2, 3, 4]


def test_an_interrupted_fit_continues_to_the_same_result(tmp_path):
    x, y = images()
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    whole = baselines.SWAG(normed(), "categorical", rank=3).fit(loader, 4, 0.05, seed=5)
    path = tmp_path / "run.safetensors"
    baselines.SWAG(normed(), "categorical", rank=3).fit(loader, 2, 0.05, seed=5, checkpoint=path)
    rest = baselines.SWAG(normed(), "categorical", rank=3).fit(loader, 4, 0.05, checkpoint=path)
    assert rest.count == whole.count == 4
    assert torch.equal(flat(rest.deviations, 1), flat(whole.deviations, 1))
    assert torch.equal(rest.network[1].running_var, whole.network[1].running_var)
    with pytest.raises(ValueError, match="seed=5, but this run has 6"):
        baselines.SWAG(normed(), "categorical", rank=3).fit(loader, 4, 0.05, seed=6, checkpoint=path)


def test_save_and_load(tmp_path):
    x, y = images()
    model = normed()
    model[4].bias.requires_grad_(False)
    swag = baselines.SWAG(model, "categorical", rank=3, scale=0.5).fit([(x, y)], 4, 0.05, seed=0)
    assert "4.bias" not in swag.weights
    bayesify.save(swag, tmp_path / "swag.safetensors")
    loaded = bayesify.load(tmp_path / "swag.safetensors", normed())
    assert isinstance(loaded, baselines.SWAG)
    options = {"loader": [(x, y)], "num_draws": 4}
    first = swag.predict(x, generator=torch.Generator().manual_seed(2), **options)
    second = loaded.predict(x, generator=torch.Generator().manual_seed(2), **options)
    assert torch.equal(first.probs, second.probs)


def test_learned_noise_is_stored(tmp_path):
    x = torch.randn(20, 2)
    swag = baselines.SWAG(net(torch.float32), likelihoods.Gaussian(0.5)).fit([(x, x[:, :1])], 5, 0.01, seed=0)
    assert float(swag.likelihood.noise.detach()) != pytest.approx(0.5, abs=1e-4)
    bayesify.save(swag, tmp_path / "swag.safetensors")
    loaded = bayesify.load(tmp_path / "swag.safetensors", net(torch.float32))
    assert torch.equal(loaded.likelihood.noise, swag.likelihood.noise)


def test_bfloat16_networks_keep_their_type_and_float32_moments():
    swag = baselines.SWAG(net(torch.bfloat16), likelihoods.Gaussian(0.1))
    walk_net = net(torch.bfloat16)
    for _ in range(3):
        with torch.no_grad():
            walk_net[0].weight += 0.5
        swag.collect(walk_net)
    assert swag.mean["0.weight"].dtype == torch.float32
    assert swag.draw(2).weights["0.weight"].dtype == torch.bfloat16
    assert swag.predict(torch.randn(3, 2).bfloat16(), 2).mean.shape == (3, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"rank": -1}, "rank=-1"), ({"rank": 1}, "rank=1; give an integer of at least 2"), ({"scale": 0.0}, "scale=0.0")],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        baselines.SWAG(net(), "categorical", **options)


def test_little_noise_is_sound_by_default_and_loud_otherwise():
    """A line through 40 rows with noise 1e-4: a rate of 0.01 is 50 times what SGD takes there, the default is not."""
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64)
    y = x.sum(-1, keepdim=True)
    line = nn.Linear(2, 1).double()
    with torch.no_grad():
        line.weight.fill_(1.0)
        line.bias.zero_()
    swag = baselines.SWAG(line, likelihoods.Gaussian(1e-4, learn=False)).fit([(x, y + 0.01)], 30, progress=False)
    assert -swag.predict(x).log_prob(y).mean() < 0  # nats; the noise alone has -3.7
    with pytest.raises(ValueError, match=r"with learning_rate=0\.01, the loss rose|not finite"):
        baselines.SWAG(line, likelihoods.Gaussian(1e-4, learn=False)).fit([(x, y + 0.01)], 30, 0.01, progress=False)


def test_rows_that_stand_for_many_examples_do_not_make_its_recipe_diverge():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = x[:, :1] + 0.3 * torch.randn(60, 1)
    spread = []
    for weight in (1.0, 1000.0):
        batches, likelihood = [(x, y, torch.full((60,), weight))], likelihoods.Gaussian(noise=0.1, learn=False)
        options = {"prior": priors.Neal(2.0), "num_data": 60, "epochs": 60, "seed": 0}
        swag = from_task.fit_swag(TrainingTask(net(torch.float32), likelihood, batches, **options))
        found = swag.predict(x, 16, generator=torch.Generator().manual_seed(0))
        assert float((found.mean - y).square().mean()) < 0.3
        spread.append(float(found.epistemic.mean()))
    assert spread[1] < 0.3  # of variance 1: iterates as near to each other as those of one example a row are, or nearer


def test_an_easy_first_batch_is_no_alarm():
    """The best line through all rows leaves the first batch as it was; the second has 50 nats more per example."""
    x = torch.zeros(20, 1)
    y = torch.cat((torch.zeros(10, 1), 0.1 * torch.tensor([1.0, -1.0]).repeat(5).unsqueeze(1)))
    line = nn.Linear(1, 1)
    nn.init.zeros_(line.weight)
    nn.init.zeros_(line.bias)
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    baselines.SWAG(line, likelihoods.Gaussian(1e-4, learn=False)).fit(batches, 2, progress=False)


def test_bad_use():
    swag = baselines.SWAG(net(), likelihoods.Gaussian(0.1))
    with pytest.raises(ValueError, match="0 iterates were collected"):
        swag.predict(torch.randn(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"instead of \(3, 2\)"):
        swag.collect(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    assert swag.count == 0
    with pytest.raises(ValueError, match=r"no weight 2.weight"):
        swag.collect(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(ValueError, match="give only one of them"):
        swag.fit([(torch.ones(1, 2), torch.ones(1, 1))], 1, prior=priors.Standard(), weight_decay=0.1)
    with pytest.raises(ValueError, match="epochs=0"):
        swag.fit([(torch.ones(1, 2), torch.ones(1, 1))], 0)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        baselines.SWAG("net", "categorical")


def test_tracked_statistics_of_instance_normalization_are_those_of_each_draw():
    torch.manual_seed(0)
    x = torch.randn(6, 1, 8, dtype=torch.float64)
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    plain = nn.Sequential(nn.Conv1d(1, 2, 3), norm, nn.Flatten(), nn.Linear(12, 1)).double().eval()
    swag = baselines.SWAG(plain, likelihoods.Gaussian(0.1), rank=0)
    for _ in range(3):
        with torch.no_grad():
            plain[0].weight.add_(torch.randn_like(plain[0].weight))
        swag.collect(plain)
    with pytest.raises(ValueError, match="give loader="):
        swag.draw(2)
    draws = swag.draw(2, loader=[(x, torch.zeros(6, 1))])
    for index, outputs in enumerate(draws(x)):
        own = copy.deepcopy(plain)
        own.load_state_dict({name: value[index] for name, value in draws.weights.items()}, strict=False)
        own[1].momentum = 1.0
        own.train()(x)
        torch.testing.assert_close(outputs, own.eval()(x))


@pytest.mark.parametrize("unit", [0.01, 100.0])
def test_the_unit_of_the_targets_does_not_matter(unit):
    def fitted(unit):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        x = torch.randn(200, 3)
        y = x.sin().sum(1, keepdim=True) + 0.3 * torch.randn(200, 1)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(100):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for parameter in net[-1].parameters():
                parameter.mul_(unit)
        loader = DataLoader(TensorDataset(x, unit * y), 50)
        swag = baselines.SWAG(net, likelihoods.Gaussian()).fit(loader, 4, seed=0, progress=False)
        return swag.predict(x, generator=torch.Generator().manual_seed(0))

    plain, scaled = fitted(1.0), fitted(unit)
    torch.testing.assert_close(scaled.mean / unit, plain.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scaled.variance / unit**2, plain.variance, rtol=1e-2, atol=1e-5)


def test_a_fit_that_ends_worse_than_the_network_is_told():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = x @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.1 * torch.randn(200, 1)
    net = nn.Sequential(nn.Linear(3, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, -1.0, 0.5]]))
        net[0].bias.zero_()
    loader = DataLoader(TensorDataset(x, y), 20)
    with pytest.warns(UserWarning, match="worse than the given network"):
        swag = baselines.SWAG(net, likelihoods.Gaussian()).fit(loader, 3, 0.015, momentum=0.0, seed=0, progress=False)
    assert "worse_than_start" in swag.history.findings.codes
    assert not baselines.SWAG(net, likelihoods.Gaussian()).fit(loader, 3, seed=0, progress=False).history.findings
