"""Members that hold out: folds, the best state of each, and the members as one ensemble."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from bayesify import bayesianize
from bayesify.likelihoods import Gaussian, HeteroscedasticGaussian, StudentT
from bayesify.posteriors import Point
from bayesify.predictor import Batch
from bayesify.priors import Neal
from bayesify.training.batches import StackedBatch
from bayesify.training.hold_out import StoppedSteps, _Halves, make_folds, train_held_out
from bayesify.training.stack import ModelStack

ROWS, FOLDS = 60, 3


def test_folds_share_rows_and_classes():
    classes = np.repeat([0, 1], [45, 15])
    folds = make_folds(ROWS, FOLDS, 0, classes)
    assert np.bincount(folds).tolist() == [20, 20, 20]
    assert np.bincount(folds[classes == 1]).tolist() == [5, 5, 5]


def make_net(dropout=0.0):
    last = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), *last, nn.Linear(8, 2))


def make_stack(nets, *likelihoods, scale=3.0):
    return ModelStack([bayesianize(net, Point(), prior=Neal(scale)) for net in nets], likelihoods=likelihoods)


def test_terms_are_those_of_networks_alone():
    """Objective and gradients of networks that share likelihoods, two of one kind with other values, against each by itself."""
    torch.manual_seed(0)
    nets = [make_net().double() for _ in range(6)]
    x, y = torch.randn(6, 6, 2).double(), torch.randn(6, 6, 1).double()
    likelihoods = [HeteroscedasticGaussian().double(), StudentT(None).double(), StudentT(None).double()]
    with torch.no_grad():
        likelihoods[2].raw_degrees += 1.0
    members = make_stack(nets, *likelihoods)
    data, penalty = members.terms(StackedBatch(x, y), phase="variational", num_data=60, num_draws=1)
    (data - penalty).sum().backward()
    shared = torch.zeros(3, dtype=torch.float64)
    for index, net in enumerate(nets):
        own = copy.deepcopy(likelihoods[index // 2])
        alone = bayesianize(net, Point(), likelihood=own, prior=Neal(3.0))
        single, kl = alone.terms(Batch(x[index], y[index]), phase="variational", num_data=60, num_draws=1)
        assert data[index].item() == pytest.approx(single.item(), rel=1e-9)
        assert penalty[index].item() == pytest.approx(kl.item(), rel=1e-9)
        (single - kl).sum().backward()
        for name, value in alone.posteriors.named_parameters(prefix="posteriors"):
            assert torch.allclose(members.stacked(name).grad[index], value.grad, atol=1e-9)
        if index >= 2:
            shared[index // 2] += alone.likelihood.raw_degrees.grad
    for group in (1, 2):
        assert shared[group].item() == pytest.approx(members.likelihoods[group].raw_degrees.grad.item(), rel=1e-9)
    assert members.num_models is None


def test_a_likelihood_takes_the_outputs_that_it_needs():
    members = make_stack([make_net() for _ in range(4)], HeteroscedasticGaussian(), Gaussian(0.1))
    x, y = torch.randn(4, 5, 2), torch.randn(4, 5, 1)
    expected = Gaussian(0.1).log_prob(members(x)[3, :, :1], y[3]).mean()
    assert members.held_out_scores(members(x), y)[3].mean().item() == pytest.approx(expected.item(), rel=1e-6)
    found = members.terms(StackedBatch(x, y), num_data=10)[0]
    assert found[3].item() == pytest.approx(10 * expected.item(), rel=1e-6)


def test_likelihoods_that_cannot_be_shared():
    with pytest.raises(ValueError, match="2 likelihoods for 3 models"):
        make_stack([make_net() for _ in range(3)], HeteroscedasticGaussian(), HeteroscedasticGaussian())
    mean_field = [bayesianize(make_net(), "mean_field") for _ in range(2)]
    with pytest.raises(ValueError, match="more than one likelihood is supported only for perceptrons"):
        ModelStack(mean_field, likelihoods=[HeteroscedasticGaussian(), HeteroscedasticGaussian()])
    stack = ModelStack(mean_field, likelihoods=[HeteroscedasticGaussian()])  # by vmap
    stack.check_ready()
    data, _ = stack.terms(StackedBatch(torch.randn(2, 3, 2), torch.randn(2, 3, 1)), num_data=3)
    data.sum().backward()
    assert stack.likelihoods[0].raw_noise.grad is not None
    assert stack.held_out_scores(stack(torch.randn(2, 3, 2)), torch.randn(2, 3, 1)).shape == (2, 3)


def test_dropout_keeps_the_mean_and_only_in_training():
    members = make_stack([make_net(0.3) for _ in range(2)], HeteroscedasticGaussian())
    x = torch.ones(2, 400, 2)
    exact = members.eval()(x)
    assert torch.equal(exact, members(x))
    members.train()
    found = torch.stack([members(x) for _ in range(20)]).detach()
    spread = (
        found.std((0, 2)) / 20**0.5
    )  # masks of the 400 rows of a pass overlap with those of others: at most 20 independent ones
    assert bool((found.mean((0, 2)) - exact[:, 0]).abs().le(5 * spread).all())
    assert float(found.std()) > 0.01


def test_each_member_is_best_on_the_rows_it_holds_out_and_all_are_one_ensemble():
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2)
    y = x[:, :1] + 0.1 * torch.randn(ROWS, 1)
    nets = [make_net() for _ in range(FOLDS)]
    members = make_stack(nets, HeteroscedasticGaussian(), scale=10.0)
    folds = make_folds(ROWS, FOLDS, 0)
    held = np.arange(FOLDS)[:, None] == folds

    def errors():
        with torch.no_grad():
            found = members(x.expand(FOLDS, -1, -1))[..., :1]
        return [float((found[k] - y)[folds == k].square().mean()) for k in range(FOLDS)]

    before = errors()
    steps, judged = train_held_out(
        members, x, torch.stack([y] * FOLDS), held, StoppedSteps(max_steps=200, check_every=10, learning_rate=0.02)
    )
    assert all(after < 0.3 * start for after, start in zip(errors(), before, strict=True))
    assert judged is None
    assert steps.min() >= 10
    assert steps.max() <= 200
    joined = members.as_ensemble()
    with torch.no_grad():
        alone = members(x.expand(FOLDS, -1, -1))[..., :1].mean(0)
    assert torch.allclose(joined.predict(x).mean, alone, atol=1e-6)
    assert joined.num_distinct_draws == FOLDS


def test_each_half_is_told_at_the_step_that_is_best_for_the_other():
    """Networks 0 and 1 hold out rows 0, 2, 3 and 1, 4: their halves are (0, 3), (2) and (1), (4)."""
    held = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1]]).bool()
    outside = StackedBatch(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1), torch.tensor([[1.0, 1, 1], [1, 1, 0]]))
    errors = {
        1: [[0.0, 5, 5], [5, 5, 0]],
        2: [[5.0, 0, 5], [0, 9, 0]],
        3: [[5.0, 1, 9], [9, 0, 0]],
    }  # by step, [R, rows]

    judged = _Halves(outside.weights, held.numpy())
    for step, error in errors.items():
        judged.look(-torch.tensor(error), torch.arange(3.0).expand(2, 3).unsqueeze(-1) + 10 * step)
    # first halves are best at steps 1 (errors 5, 10, 14) and 2 (5, 0, 9), second ones at 2 (5, 0, 1) and 3 (5, 9, 0)
    expected = [[20.0, 0, 11, 22, 0], [0, 30, 0, 0, 21]]
    assert torch.equal(judged.of_rows()[..., 0], torch.tensor(expected))


def test_a_best_look_that_came_early_is_waited_for_less():
    def waited(steps: StoppedSteps, last: int) -> int:
        return next(count for count in range(1, 99) if steps.has_ended(last + count, last))

    assert [waited(StoppedSteps(patience=15), last) for last in (1, 10, 11, 16, 20, 50)] == [8, 8, 9, 12, 15, 15]
    assert [waited(StoppedSteps(patience=7, early_patience=5), last) for last in (1, 6, 7, 9, 50)] == [5, 5, 6, 7, 7]
    assert StoppedSteps(patience=5).has_ended(6, 1)


def test_factors_of_the_inputs_end_in_the_first_layer():
    """Training with factors equals training on scaled inputs; the first layer then takes plain inputs. A factor of 0 hides an
    input."""
    torch.manual_seed(0)
    x, factor = torch.randn(ROWS, 2), torch.tensor([2.0, 0.0])
    y, held = torch.stack([x.sum(1, keepdim=True)] * FOLDS), np.arange(FOLDS)[:, None] == make_folds(ROWS, FOLDS, 0)
    nets, steps = [make_net() for _ in range(FOLDS)], StoppedSteps(batch_size=16, max_steps=40, check_every=10)
    scaled, plain = (make_stack(nets, HeteroscedasticGaussian()) for _ in range(2))
    expected, predicted = train_held_out(scaled, x * factor, y, held, steps, halves=True)
    found, judged = train_held_out(plain, x, y, held, steps, halves=True, factors=factor.expand(FOLDS, -1))
    assert found.tolist() == expected.tolist()
    assert judged is not None
    assert predicted is not None
    assert torch.equal(judged, predicted)
    with torch.no_grad():
        outputs = plain(x.expand(FOLDS, -1, -1))
        torch.testing.assert_close(outputs, scaled((x * factor).expand(FOLDS, -1, -1)))
        assert torch.equal(outputs, plain((x + torch.tensor([0.0, 5.0])).expand(FOLDS, -1, -1)))
