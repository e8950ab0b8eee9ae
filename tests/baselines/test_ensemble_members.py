"""Members trained one after the other take the steps of members trained together, with the memory of one."""

import copy

import pytest
import torch
from cases import mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import baselines, deep_gp, likelihoods, posteriors
from bayesify.training import Steps

MEMBERS = 4


def conv():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*layers).double()


def ensemble(net, likelihood):
    torch.manual_seed(1)
    return bayesify.bayesianize(net, posteriors.Ensemble(MEMBERS), likelihood=likelihood)


def images(n=24):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (n,), generator=generator)


def regression(n=24):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, torch.cat((x.sum(1, keepdim=True), x[:, :1]), 1)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_steps_are_those_of_fit(kind):
    """Batch statistics, shared point estimates and a learned noise too."""
    if kind == "conv":
        bnn, data = ensemble(conv(), likelihoods.Categorical()), images()
    else:
        bnn, data = ensemble(mlp().double(), likelihoods.Gaussian(0.3)), regression()
    together = copy.deepcopy(bnn)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    history = baselines.fit_members(bnn, [data], 5, optimizer=sgd, seed=0, progress=False)
    joint = bayesify.fit(together, [data], epochs=5, optimizer=sgd, num_draws=MEMBERS, seed=0, progress=False)
    for name, value in together.state_dict().items():
        torch.testing.assert_close(bnn.state_dict()[name], value, rtol=1e-9, atol=1e-10, msg=name)
    assert history.column("nll") == pytest.approx(joint.column("nll"), rel=1e-9)
    assert history.column("kl") == pytest.approx(joint.column("kl"), rel=1e-9)


def held_bytes(train):
    """Most bytes that were saved for backward passes at a time."""
    held, most = 0, 0

    class Saved:
        def __init__(self, tensor):
            nonlocal held, most
            self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
            held += self.size
            most = max(most, held)

        def __del__(self):
            nonlocal held
            held -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        train()
    return most


def test_activations_of_one_member_are_held():
    data = images(200)
    bnn = ensemble(conv(), likelihoods.Categorical())
    one = held_bytes(lambda: baselines.fit_members(bnn, [data], 1, seed=0, progress=False))
    together = held_bytes(lambda: bayesify.fit(bnn, [data], epochs=1, num_draws=MEMBERS, seed=0, progress=False))
    assert together > 0.8 * MEMBERS * one


def test_small_networks_run_together_and_convolutions_in_a_loop():
    for net, mode in ((mlp(), "vmap"), (conv(), "loop")):
        bnn = bayesify.bayesianize(net, posteriors.Ensemble(MEMBERS), likelihood="categorical")
        assert bnn.draw(MEMBERS).runner.mode(MEMBERS) == mode


def test_interrupted_training_continues_to_the_same_result(tmp_path):
    loader = DataLoader(TensorDataset(*images()), batch_size=8, shuffle=True)
    path = tmp_path / "run.safetensors"
    whole, first, rest = (ensemble(conv(), likelihoods.Categorical()) for _ in range(3))
    baselines.fit_members(whole, loader, 4, seed=1, scheduler="constant")
    baselines.fit_members(first, loader, 2, seed=1, scheduler="constant", checkpoint=path)
    baselines.fit_members(rest, loader, 4, seed=1, scheduler="constant", checkpoint=path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, rest.state_dict()[name]), name


def test_draws_of_any_posterior_are_taken_in_turn():
    """The gradient of three draws of a mean-field posterior, with a loss that is differentiated by scales and noise too."""
    data, found = regression(), []
    for in_turn in (False, True):
        torch.manual_seed(0)
        bnn = bayesify.bayesianize(mlp().double(), "mean_field", likelihood=likelihoods.Gaussian(0.3))
        steps = Steps(draws_in_turn=in_turn)
        options = {"optimizer": lambda values: torch.optim.SGD(values, 0.01), "steps": steps, "num_draws": 3}
        history = bayesify.fit(bnn, [data], epochs=3, seed=0, progress=False, **options)
        found.append([*bnn.state_dict().values(), torch.tensor(history.column("elbo"))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    model = deep_gp.DeepGP(*regression(), num_inducing=4).double()
    with pytest.raises(ValueError, match="DeepGP has no draws"):
        bayesify.fit(model, [data], epochs=1, steps=Steps(draws_in_turn=True))


def test_bad_input():
    with pytest.raises(TypeError, match="not an Ensemble"):
        baselines.fit_members(bayesify.bayesianize(mlp(), "point", likelihood="gaussian"), [], 1)
    bnn = ensemble(mlp().double(), likelihoods.Gaussian(0.3))
    with pytest.raises(ValueError, match="learning_rate=0"):
        baselines.fit_members(bnn, [regression()], 1, learning_rate=0)
    with pytest.raises(ValueError, match="num_data=3, but the loader has 24"):
        baselines.fit_members(bnn, DataLoader(TensorDataset(*regression())), 1, num_data=3)
