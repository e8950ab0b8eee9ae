"""A Lightning trainer makes the steps that a loop by hand makes, and its scores are those of `metrics.evaluate`."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import KLSchedule, adapters, likelihoods, metrics, posteriors

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
"""Lightning takes seconds to load: the tests load it, not their collection, which every worker does."""

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1 * torch.randn(24, 1, generator=torch.Generator().manual_seed(1))


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=8)


def network(posterior=None, likelihood=None, outputs=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))
    return bayesify.bayesianize(
        net, posterior or posteriors.MeanField(init_std=0.1), likelihood=likelihood or likelihoods.Gaussian(0.1)
    )


def trainer(tmp_path, epochs=2, **options):
    from lightning.pytorch import Trainer

    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


def test_training_is_that_of_the_loop_by_hand(tmp_path):
    bnn = network()
    by_hand = copy.deepcopy(bnn)
    schedule = KLSchedule(linear_epochs=2)
    module = adapters.BayesianModule(bnn, learning_rate=0.01, num_draws=2, kl_weight=0.5, kl_schedule=schedule)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        trainer(tmp_path).fit(module, loader())
    assert module.num_data == 24

    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.01)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for epoch in range(2):
            for index, (x, y) in enumerate(loader()):
                optimizer.zero_grad()
                beta = 0.5 * schedule(epoch + index / 3)
                loss = -by_hand.elbo(x, y, num_data=24, num_draws=2, kl_weight=beta) / 24
                loss.backward()
                optimizer.step()
    moved = False
    for (name, got), wanted in zip(bnn.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
        moved = moved or not torch.equal(wanted, dict(network().named_parameters())[name])
    assert moved


def test_scores_are_those_of_evaluate(tmp_path):
    labels = (Y[:, 0] > 0).long()
    bnn = network(likelihood=likelihoods.Categorical(), outputs=2)
    module = adapters.BayesianModule(bnn, prediction_draws=5)
    batches = DataLoader(TensorDataset(X, labels), batch_size=7)
    runner = trainer(tmp_path, callbacks=[adapters.PredictiveScores()])
    found = runner.validate(module, batches, verbose=False)[0]
    prediction = bnn.predict(X, 5, generator=torch.Generator().manual_seed(0))
    wanted = metrics.evaluate(prediction, labels)
    assert {name.removeprefix("val_"): pytest.approx(value, abs=1e-5) for name, value in found.items()} == wanted
    tested = runner.test(module, batches, verbose=False)[0]
    assert tested == {name.replace("val_", "test_"): value for name, value in found.items()}


def test_predictions_with_and_without_targets(tmp_path):
    bnn = network()
    module = adapters.BayesianModule(bnn, prediction_draws=4)
    wanted = bnn.predict(X, 4, generator=torch.Generator().manual_seed(0)).mean
    for data in (TensorDataset(X, Y), TensorDataset(X)):
        parts = trainer(tmp_path).predict(module, DataLoader(data, batch_size=10))
        torch.testing.assert_close(torch.cat([part.mean for part in parts]), wanted)
    assert module(X).shape == (24, 1)


def test_checkpoints_bring_the_network_back(tmp_path):
    module = adapters.BayesianModule(network(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    runner = trainer(tmp_path, epochs=1)
    runner.fit(module, loader())
    runner.save_checkpoint(tmp_path / "run.ckpt")
    again = adapters.BayesianModule.load_from_checkpoint(tmp_path / "run.ckpt", bnn=network())
    for got, wanted in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": 0}, "num_data=0; give an integer of at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"kl_weight": -1.0}, "kl_weight=-1.0"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adapters.BayesianModule(network(), **options)


def test_what_is_no_bayesian_network_is_refused():
    with pytest.raises(TypeError, match="BayesianModule: bnn=Linear; give a BayesianNetwork"):
        adapters.BayesianModule(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="no likelihood"):
        adapters.BayesianModule(bayesify.bayesianize(nn.Linear(1, 1), posteriors.MeanField()))
