"""Pruned posteriors: what is kept, counted, trained, stored and refused."""

import copy

import pytest
import torch
from torch import nn

import bayesify
from bayesify import likelihoods, models, posteriors
from bayesify.maths.value_checks import deferred_checks

POSTERIORS = {
    "mean_field": lambda: posteriors.MeanField(init_std=0.1),
    "local": lambda: posteriors.MeanField(init_std=0.1, local_reparameterization=True),
    "inducing": lambda: posteriors.InducingWeights(4, 4, fit_to_layer=False),
}


def network(name: str):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    return net, bayesify.bayesianize(net, POSTERIORS[name](), likelihood=likelihoods.Categorical())


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (0.5, 3_106_678),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.75, 4_408_790), (0.25, 1_804_566))),
    ],
)
def test_counts_of_the_pruned_resnet50(keep, expected):
    bnn = bayesify.bayesianize(models.resnet50(), posteriors.InducingWeights(64, 64, fit_to_layer=False, init="random"))
    assert bayesify.count_parameters(bayesify.prune(bnn, keep)) == expected
    assert bnn.summary().after == expected


def test_mean_field_keeps_the_largest_signal_to_noise():
    _, bnn = network("mean_field")
    with torch.no_grad():
        for raw in bnn.posterior.raw_std.values():
            raw.add_(torch.randn_like(raw))
    mean, std = bnn.posterior.mean(), {name: value.sqrt() for name, value in bnn.posterior.variance().items()}
    ratios = torch.cat([(mean[name].abs() / std[name]).flatten() for name in mean])
    threshold = ratios.sort(descending=True).values[round(0.3 * ratios.numel()) - 1]
    bayesify.prune(bnn, 0.3)
    for name, value in bnn.posterior.mean().items():
        assert torch.equal(value != 0, mean[name].abs() / std[name] >= threshold)
        assert torch.equal(value[value != 0], mean[name][value != 0])
    draws = bnn.draw(2)
    for name, value in draws.weights.items():
        assert torch.equal(value != 0, (bnn.posterior.mean()[name] != 0).expand_as(value))


def test_inducing_weights_keep_the_largest_entries_of_each_z():
    _, bnn = network("inducing")
    before = {name: bnn.posterior.augmentations[0].z_row.dense(name).detach().clone() for name in ("0", "1")}
    bayesify.prune(bnn, 0.5)
    for name, dense in before.items():
        after = bnn.posterior.augmentations[0].z_row.dense(name)
        assert int((after != 0).sum()) == dense.numel() // 2
        assert dense[after == 0].abs().max() <= dense[after != 0].abs().min()


@pytest.mark.parametrize("name", POSTERIORS)
def test_kl_of_a_pruned_posterior_is_finite_and_its_parts_add_up(name):
    _, bnn = network(name)
    bayesify.prune(bnn, 0.5)
    assert torch.isfinite(bnn.kl())
    if name != "inducing":  # only what is kept has a prior and a posterior
        bnn.set_to_prior()
        assert abs(bnn.kl().item()) < 1e-3


@pytest.mark.parametrize("name", POSTERIORS)
def test_masks_survive_training_saving_and_loading(name, tmp_path):
    net, bnn = network(name)
    bayesify.prune(bnn, 0.5)
    pattern = {key: value != 0 for key, value in bnn.posterior.mean().items()}
    x, y = torch.randn(16, 2, 8), torch.randint(0, 3, (16,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    before = copy.deepcopy(bnn.state_dict())
    bayesify.fit(bnn, loader, epochs=2, seed=0, progress=False)
    after = bnn.state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before if not key.endswith(":mask"))
    assert all(torch.equal(before[key], after[key]) for key in before if key.endswith(":mask"))
    if name != "inducing":
        assert all(torch.equal(value != 0, pattern[key]) for key, value in bnn.posterior.mean().items())
    bayesify.save(bnn, tmp_path / "pruned.safetensors")
    again = bayesify.load(tmp_path / "pruned.safetensors", net)
    for key, value in bnn.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    assert bayesify.count_parameters(again) == bayesify.count_parameters(bnn)
    bayesify.fit(again, loader, epochs=1, seed=0, progress=False)


def test_a_pruned_file_is_smaller(tmp_path):
    net = nn.Linear(200, 200)
    whole = bayesify.bayesianize(net, "mean_field")
    bayesify.save(whole, tmp_path / "whole")
    bayesify.save(bayesify.prune(copy.deepcopy(whole), 0.25), tmp_path / "quarter")
    numbers = 2 * 200 * 201
    expected = numbers * 4 * 0.25 + numbers / 8  # a quarter of the floats, and a bit for the place of each
    sizes = {name: (tmp_path / name).stat().st_size for name in ("whole", "quarter")}
    assert sizes["whole"] - sizes["quarter"] == pytest.approx(numbers * 4 - expected, rel=0.02)


def test_pruning_again_keeps_a_subset():
    _, bnn = network("mean_field")
    bayesify.prune(bnn, 0.6)
    first = {key: value != 0 for key, value in bnn.posterior.mean().items()}
    bayesify.prune(bnn, 0.2)
    total = sum(mask.numel() for mask in first.values())
    kept = {key: value != 0 for key, value in bnn.posterior.mean().items()}
    assert sum(int(mask.sum()) for mask in kept.values()) == round(0.2 * total)
    assert all((first[key] | ~mask).all() for key, mask in kept.items())
    with pytest.raises(ValueError, match=r"only 0\.2"):
        bayesify.prune(bnn, 0.5)


@pytest.mark.parametrize("keep", [0, -0.1, 1.5])
def test_impossible_fractions_are_refused(keep):
    _, bnn = network("mean_field")
    with pytest.raises(ValueError, match=r"prune: keep=.*; give a (positive number|number of at most 1)"):
        bayesify.prune(bnn, keep)


def test_other_posteriors_say_which_can_be_pruned_and_nothing_changes():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    bnn = bayesify.bayesianize(net, {"0": "mean_field", "1": "ensemble"})
    count = bayesify.count_parameters(bnn)
    with pytest.raises(ValueError, match="Ensemble cannot be pruned"):
        bayesify.prune(bnn, 0.5)
    assert bayesify.count_parameters(bnn) == count


def test_a_pruned_state_does_not_go_into_an_unpruned_network_nor_the_other_way():
    _, pruned = network("inducing")
    _, whole = network("inducing")
    state = whole.state_dict()
    bayesify.prune(pruned, 0.5)
    with pytest.raises(RuntimeError, match="pruned, but this network is not"):
        whole.load_state_dict(pruned.state_dict())
    with pytest.raises(RuntimeError, match="not pruned, but this network is"):
        pruned.load_state_dict(state)


def test_a_state_with_other_masks_moves_the_kept_entries():
    _, one = network("inducing")
    _, other = network("inducing")
    with torch.no_grad():
        for z in other.posterior.augmentations[0].z_col.values():
            z.copy_(z.flip(-1))
    for bnn in (one, other):
        bayesify.prune(bnn, 0.5)
    ours, theirs = (bnn.posterior.augmentations[0].z_col for bnn in (one, other))
    assert not torch.equal(ours.mask("0"), theirs.mask("0"))
    one.load_state_dict(other.state_dict())
    for name in theirs:
        assert torch.equal(ours.dense(name), theirs.dense(name))


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_step_of_a_pruned_network_reads_no_value(name):
    """The sizes of all results are known beforehand. Otherwise a GPU would have to wait, and `fit` could not capture the step."""
    _, bnn = network(name)
    bayesify.prune(bnn, 0.5)
    with deferred_checks(), torch.autograd.profiler.profile() as profile:
        bnn.elbo(torch.randn(4, 2, 8), torch.tensor([0, 1, 2, 0]), num_data=4).backward()
    called = {event.name for event in profile.function_events}
    assert "aten::scatter" in called
    assert not called & {"aten::nonzero", "aten::masked_select", "aten::index_put_"}


def test_every_tensor_keeps_at_least_one_number() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))
    posterior = posteriors.InducingWeights(6, 6, init="network", fit_to_layer=True)
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Gaussian(noise=0.1))
    bayesify.prune(bnn, keep=0.5)  # Z of the last layer has one row of one number
    assert bool(bnn.mean_network()[2].weight.any())


def test_what_is_not_a_bayesian_network_is_refused() -> None:
    with pytest.raises(TypeError, match="give a BayesianNetwork; bayesianize makes one"):
        bayesify.prune(nn.Linear(2, 2), keep=0.5)  # type: ignore[arg-type]
