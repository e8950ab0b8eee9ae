"""Members that hold out: folds, the best state of each, and the members as one ensemble."""

import numpy as np
import torch
from torch import nn

from bayesify.likelihoods import Gaussian
from bayesify.priors import Neal
from bayesify.training.hold_out import join_members, make_folds, point_members, train_held_out

ROWS, FOLDS = 60, 3


def test_folds_share_rows_and_classes():
    classes = np.repeat([0, 1], [45, 15])
    folds = make_folds(ROWS, FOLDS, 0, classes)
    assert np.bincount(folds).tolist() == [20, 20, 20]
    assert np.bincount(folds[classes == 1]).tolist() == [5, 5, 5]


def test_each_member_is_best_on_the_rows_it_holds_out_and_all_are_one_ensemble():
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2)
    y = x[:, :1] + 0.1 * torch.randn(ROWS, 1)
    nets = [nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(FOLDS)]
    models = point_members(nets, [Gaussian(0.1, learn=False) for _ in nets], Neal(10.0))
    folds = make_folds(ROWS, FOLDS, 0)
    held = np.arange(FOLDS)[:, None] == folds
    targets = torch.stack([y] * FOLDS)

    def errors():
        return [
            float((model.predict(x[folds == member]).mean - y[folds == member]).square().mean())
            for member, model in enumerate(models)
        ]

    before = errors()
    steps = train_held_out(models, x, targets, held, max_steps=100, check_every=10, learning_rate=0.02)
    assert all(after < 0.3 * start for after, start in zip(errors(), before, strict=True))
    assert steps.min() >= 10
    assert steps.max() <= 100
    joined = join_members(nets[0], models)
    alone = torch.stack([model.predict(x).mean for model in models]).mean(0)
    assert torch.allclose(joined.predict(x).mean, alone, atol=1e-6)
    assert joined.num_distinct_draws == FOLDS
