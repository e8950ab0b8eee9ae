"""Low-rank adapters under posteriors, beside linear models that have closed forms."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import Laplace, likelihoods, posteriors
from bayesify.adapters import bayesianize_lora
from bayesify.posteriors.inducing_weights.augmentation import network_start

POSTERIORS = ["mean_field", "k_tied", "inducing"]


class LowRank(nn.Module):
    """W x + scaling B A x, W frozen."""

    def __init__(self, d_in, d_out, rank, scaling=2.0):
        super().__init__()
        self.base_layer = nn.Linear(d_in, d_out).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
        self.scaling = scaling

    def forward(self, x):
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


def network(d_in=6, hidden=5, rank=2):
    torch.manual_seed(0)
    return nn.Sequential(LowRank(d_in, hidden, rank), nn.Tanh(), LowRank(hidden, 3, rank)).double()


def classes(count=60, d_in=6):
    x = torch.randn(count, d_in, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def test_laplace_of_a_linear_adapter_is_bayesian_linear_regression():
    torch.manual_seed(0)
    model = LowRank(4, 1, 3).double()
    model.lora_A.requires_grad_(False)
    x, noise, precision = torch.randn(20, 4, dtype=torch.float64), 0.3, 2.5
    y = torch.randn(20, 1, dtype=torch.float64)
    features = 2.0 * x @ model.lora_A.weight.T  # [N, 3]
    covariance = torch.linalg.inv(features.T @ features / noise + precision * torch.eye(3))
    with torch.no_grad():
        mean = covariance @ features.T @ (y - model.base_layer(x)) / noise
        model.lora_B.weight.copy_(mean.T)
    laplace = Laplace(model, likelihoods.Gaussian(noise), ["*lora_*"], prior_precision=precision).fit([(x, y)])
    prediction, new = laplace.predict(x), features @ covariance @ features.T
    torch.testing.assert_close(laplace.output_covariance(x, joint=True), new, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(prediction.mean, model.base_layer(x) + features @ mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(prediction.variance[:, 0], new.diagonal() + noise, rtol=1e-8, atol=1e-10)
    total = noise * torch.eye(20) + features @ features.T / precision
    wanted = torch.distributions.MultivariateNormal(torch.zeros(20).double(), total)
    torch.testing.assert_close(laplace.log_evidence(), wanted.log_prob((y - model.base_layer(x))[:, 0]))


@pytest.mark.parametrize("posterior", [posteriors.MeanField(init_std=0.2), posteriors.KTied(1, init_std=0.2)])
def test_moments_of_an_update_are_those_of_a_product_of_gaussians(posterior):
    torch.manual_seed(0)
    model = LowRank(4, 3, 2).double()
    bnn = bayesianize_lora(model, posterior, likelihood="gaussian")
    x, count = torch.randn(4, dtype=torch.float64), 20_000
    outputs = bnn.draw(count, generator=torch.Generator().manual_seed(0))(x.unsqueeze(0))[:, 0].detach()  # [S, 3]
    variance = bnn.posterior.variance()
    a, var_a, b, var_b = (
        part.detach()
        for name in ("lora_A.weight", "lora_B.weight")
        for part in (bnn.posterior.mean()[name], variance[name])
    )
    inner_var = var_a @ x.square()  # of A x, [r]
    mean = model.base_layer(x) + 2.0 * b @ a @ x
    spread = 4.0 * (var_b @ (a @ x).square() + (b.square() + var_b) @ inner_var)
    # standard errors: of the mean sqrt(var / S); of the variance, by the fourth moments of the draws themselves
    assert ((outputs.mean(0) - mean).abs() < 5 * (spread / count).sqrt()).all()
    squares = (outputs - mean).square()
    assert ((squares.mean(0) - spread).abs() < 5 * squares.std(0) / count**0.5).all()


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_the_kl_is_a_sum_over_adapter_weights_alone(posterior):
    model = network()
    bnn = bayesianize_lora(model, posterior)
    assert list(bnn.weights) == [name for name, _ in model.named_parameters() if "lora_" in name]
    if posterior == "inducing":  # of (W, U): one layer after the other
        parts = [(name, bayesianize_lora(model, posterior, names=(name,))) for name in bnn.weights]
        wanted = sum(part.kl() for _, part in parts)
    else:
        means, variances = bnn.posterior.mean(), bnn.posterior.variance()
        wanted = 0.0
        for name, weight in bnn.weights.items():
            q = torch.distributions.Normal(means[name], variances[name].sqrt())
            wanted = (
                wanted
                + torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 0.5 / weight.fan_in**0.5)).sum()
            )
    torch.testing.assert_close(bnn.kl(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_training_moves_the_posterior_and_nothing_else(posterior):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bnn = bayesianize_lora(model, posterior)
    shared = bnn.network[0].base_layer.weight
    assert shared is model[0].base_layer.weight
    x, y = classes()
    start = -bnn.predict(x, generator=torch.Generator().manual_seed(0)).log_prob(y).mean()
    trained = [value.clone() for value in bnn.posteriors.parameters()]
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    bayesify.fit(bnn, loader, epochs=30, learning_rate=0.03, kl_weight=0.1, seed=0, progress=False)
    end = -bnn.predict(x, generator=torch.Generator().manual_seed(0)).log_prob(y).mean()
    assert end < start - 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(value, old) for value, old in zip(bnn.posteriors.parameters(), trained, strict=True))
    assert {name for name, value in bnn.named_parameters() if value.requires_grad} == {
        f"posteriors.{name}" for name, _ in bnn.posteriors.named_parameters()
    }


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_a_stored_adapter_predicts_the_same(posterior, tmp_path):
    model = network()
    bnn = bayesianize_lora(model, posterior)
    bayesify.save(bnn, tmp_path / "adapter.safetensors")
    again = bayesify.load(tmp_path / "adapter.safetensors", network())
    x, _ = classes(5)
    wanted, got = (part.predict(x, 4, generator=torch.Generator().manual_seed(0)).probs for part in (bnn, again))
    assert torch.equal(wanted, got)


def test_inducing_adapters_start_at_the_adapter_and_are_hardly_larger():
    torch.manual_seed(0)
    rank, width = 4, 200
    model = LowRank(width, width, rank)
    bnn = bayesianize_lora(model)  # the default
    means = bnn.posterior.mean()
    for name in bnn.weights:
        torch.testing.assert_close(means[name], model.get_parameter(name), rtol=1e-4, atol=1e-5)
    numbers = bayesify.count_parameters(bnn.posteriors) / sum(weight.numel for weight in bnn.weights.values())
    assert numbers == pytest.approx(1 + (3 * rank + 2 + 1 / rank) / width)
    assert numbers < 1.2


def test_members_of_an_ensemble_start_as_fresh_adapters_beside_the_one_there_is():
    """A random B would move the model as far as its own weights do."""
    model = network()
    bnn = bayesianize_lora(model, "ensemble")
    for name, members in bnn.posterior.value.items():
        assert torch.equal(members[0], model.get_parameter(name))
        assert len({tuple(member.flatten().tolist()) for member in members.detach()}) == (2 if "lora_B" in name else 5)
        assert not ("lora_B" in name and members[1:].any())
    x, _ = classes(4)
    base = nn.Sequential(model[0].base_layer, nn.Tanh(), model[2].base_layer)
    outputs = bnn.draw(5)(x).detach()
    assert sum(torch.equal(outputs[member], base(x)) for member in range(5)) == 4
    around = bayesianize_lora(model, posteriors.Ensemble(3, init="network")).posterior.value["0.lora_B.weight"]
    assert all(member.any() for member in around)


def test_members_of_an_ensemble_of_embeddings_start_at_the_model():
    """peft starts the other factor of an embedding at 0: members with both at 0 would never move."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(12, 3))
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    bnn = bayesianize_lora(model, "ensemble")
    x = torch.randint(7, (5, 2))
    outputs = bnn.draw(5)(x)
    torch.testing.assert_close(outputs, net(x).expand_as(outputs))
    outputs.logsumexp(-1).sum().backward()
    fresh = {name: value.grad[1:].abs().sum((1, 2)) for name, value in bnn.posterior.value.items()}
    moved = sum(
        torch.stack([sizes > 0 for name, sizes in fresh.items() if mark in name]).long() for mark in ("_A", "_B")
    )
    assert (moved == 1).all()  # of each pair the one that is 0 has a gradient


def test_inducing_weights_of_a_fresh_adapter_reach_every_output():
    z_row, z_col, u = network_start(2, 2, torch.zeros(50, 2), True)
    assert not u.any()
    assert (z_row.abs() > 1e-3).float().mean() > 0.9  # unit vectors would have 2 of 100
    torch.testing.assert_close(z_row @ z_row.T, torch.eye(2))
    torch.testing.assert_close(z_col @ z_col.T, torch.eye(2))


def test_weights_for_laplace_by_pattern():
    model, (x, y) = network(), classes()
    names = [name for name, _ in model.named_parameters() if "lora_" in name]
    by_name, by_pattern = (
        Laplace(model, "categorical", subset, "kronecker", num_samples=2).fit([(x, y)])
        for subset in (names, ["*lora_*"])
    )
    torch.testing.assert_close(by_name.log_evidence(), by_pattern.log_evidence())
    with pytest.raises(ValueError, match=r"'\*lorra_\*' matches no trainable parameter"):
        Laplace(model, "categorical", ["*lorra_*"]).fit([(x, y)])


def test_a_prior_of_the_size_of_the_weights():
    model, (x, y) = network(), classes()
    sizes = {
        name: float(value.detach().square().mean()) for name, value in model.named_parameters() if value.requires_grad
    }
    by_hand, by_name = (
        Laplace(model, "categorical", ["*lora_*"], "kronecker", given).fit([(x, y)])
        for given in ({name: 1 / size for name, size in sizes.items()}, "size")
    )
    torch.testing.assert_close(by_name.covariance_matrix(), by_hand.covariance_matrix())
    assert by_name.prior_precision == pytest.approx(by_hand.prior_precision)


def test_vectors_alone_can_vary():
    bnn = bayesianize_lora(nn.Sequential(nn.Linear(2, 2)), names=("0.bias",))
    assert not torch.equal(*bnn.draw(2).weights["0.bias"])


def test_mistakes_name_the_remedy():
    with pytest.raises(ValueError, match="give a list, each entry a string"):
        bayesianize_lora(network(), names="*lora_*")
    with pytest.raises(ValueError, match="give a tuple of glob patterns"):
        bayesianize_lora(network(), names=())
    with pytest.raises(ValueError, match=r"no weight of Linear is called \*lora_\*.*pip install .*'peft>="):
        bayesianize_lora(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="change this or drop the selector"):
        bayesianize_lora(copy.deepcopy(network()).requires_grad_(False))
    with pytest.raises(TypeError, match=r"model='gpt2'; give a torch.nn.Module"):
        bayesianize_lora("gpt2")
