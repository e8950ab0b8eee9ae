"""What `fit` does around the steps: modes, schedulers, early stopping, callbacks, precision, errors."""

import copy
import itertools
import json
import math

import pytest
import torch
from runs import same
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import bayesify
from bayesify import KLSchedule, likelihoods, posteriors
from bayesify.training import Checkpointing, Devices, Steps, Validation

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def classifier(posterior=None, *extra):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), *extra, nn.Tanh(), nn.Linear(5, 2))
    return bayesify.bayesianize(net, posterior or posteriors.MeanField(), likelihood=likelihoods.Categorical())


def batches(size=8):
    return DataLoader(TensorDataset(X, Y), batch_size=size)


def fit(bnn, loader=None, **options):
    return bayesify.fit(
        bnn, loader if loader is not None else batches(), **{"epochs": 1, "seed": 0, "progress": False} | options
    )


def test_modes_and_gradients_are_left_as_found():
    bnn = classifier(None, nn.BatchNorm1d(5)).eval()
    bnn.network[0].train()
    before = {name: module.training for name, module in bnn.named_modules()}
    seen = []
    attributes = {name: set(vars(module)) for name, module in bnn.named_modules()}
    fit(bnn, callbacks=[lambda net, history: seen.append(all(module.training for module in net.modules()))])
    assert seen == [True]
    assert {name: module.training for name, module in bnn.named_modules()} == before
    assert all(parameter.grad is None for parameter in bnn.parameters())
    assert {name: set(vars(module)) for name, module in bnn.named_modules()} == attributes
    assert bnn.network[1].num_batches_tracked == 3


def test_history_is_plain_data_and_reads_well():
    history = fit(classifier(), epochs=3, map_epochs=1, validation=batches())
    rows = json.loads(json.dumps(history))
    assert rows == list(history)
    assert list(rows[0]) == [
        "epoch",
        "phase",
        "nll",
        "kl",
        "kl_weight",
        "elbo",
        "learning_rate",
        "validation_nll",
        "validation_accuracy",
        "seconds",
    ]
    assert history.column("epoch") == [1, 2, 3, 4]
    text = repr(history)
    assert "validation_nll" in text
    assert "variational" in text
    assert len(text.splitlines()) == 6
    assert repr(bayesify.History()) == "History(no epochs)"
    with pytest.raises(ValueError, match="key='loss' is not a column; give one of"):
        history.column("loss")


def test_the_number_of_draws_is_what_the_posterior_recommends():
    bnn = classifier(posteriors.Ensemble(members=3))
    assert bnn.posterior.training_draws > 1
    seen = []
    original = bnn.elbo_terms
    bnn.elbo_terms = lambda *args, **kwargs: seen.append(kwargs["num_draws"]) or original(*args, **kwargs)
    fit(bnn)
    fit(bnn, num_draws=2)
    assert seen == [bnn.posterior.training_draws] * 3 + [2] * 3


def test_optimizers_and_schedulers_in_each_form():
    results = []
    for form in ("instance", "function"):
        bnn = classifier()
        if form == "instance":
            optimizer = torch.optim.SGD(bnn.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        else:
            optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
            scheduler = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        history = fit(bnn, epochs=3, optimizer=optimizer, scheduler=scheduler)
        assert history.column("learning_rate") == [0.1, 0.05, 0.025]
        results.append(bnn)
    assert same(*results)
    exponential = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    history = fit(classifier(), epochs=2, learning_rate=0.8, scheduler=exponential, steps=Steps(scheduler="step"))
    assert history.column("learning_rate") == pytest.approx([0.1, 0.0125])

    def plateau(optimizer):  # nothing counts as progress: every epoch lowers it
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=9)

    history = fit(classifier(), epochs=3, learning_rate=0.1, scheduler=plateau)
    assert history.column("learning_rate") == pytest.approx([0.1, 0.01, 0.001])


def test_default_adam_equals_adam():
    """The default is Adam at the given learning rate, up to the rounding of its fused form; the rate falls by default."""
    steps = 2 * len(batches())

    def half_cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))

    adam = {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01)}
    for default, other in (
        ({"scheduler": "constant"}, adam),
        ({}, adam | {"scheduler": half_cosine, "steps": Steps(scheduler="step")}),
    ):
        mine, explicit = classifier(), classifier()
        fit(mine, epochs=2, learning_rate=0.01, **default)
        fit(explicit, epochs=2, **other)
        for name, value in explicit.named_parameters():
            torch.testing.assert_close(mine.get_parameter(name), value, rtol=1e-4, atol=1e-6)


def test_the_rate_falls_over_the_variational_phase():
    rates = fit(classifier(), epochs=4, map_epochs=2, learning_rate=0.1).column("learning_rate")
    assert rates[:2] == [0.1, 0.1]
    assert all(earlier > later > 0 for earlier, later in itertools.pairwise(rates[1:]))
    assert rates[-1] < 0.02
    only_map = fit(classifier(), epochs=0, map_epochs=3, learning_rate=0.1).column("learning_rate")
    assert only_map[-1] < 0.03


@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("posterior", [posteriors.MeanField(init_std=0.3), posteriors.InducingWeights(rows=2, cols=2)])
def test_predictions_follow_the_optimizer(posterior, form):
    """Nothing that was computed for an earlier prediction is used after a step; fused steps do not raise versions."""
    bnn = classifier(posterior)
    for _ in range(3):
        fit(bnn, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.3, **form))
        fresh = copy.deepcopy(bnn)  # has nothing to remember
        pair = [net.predict(X, 4, generator=torch.Generator().manual_seed(0)).probs for net in (bnn, fresh)]
        assert torch.equal(*pair)
        assert torch.equal(bnn.kl().detach(), fresh.kl().detach())


def test_early_stopping_restores_the_best_epoch():
    """The validation labels are flipped, so its NLL grows as training goes on: the first epoch is the best."""
    flipped = [(X, 1 - Y)]
    states = []
    bnn = classifier()
    history = fit(
        bnn,
        epochs=20,
        learning_rate=0.1,
        validation=flipped,
        patience=3,
        callbacks=[lambda net, history: states.append(copy.deepcopy(net))],
    )
    best = min(range(len(history)), key=lambda index: history[index]["validation_nll"])
    assert len(history) == best + 1 + 3
    assert same(bnn, states[best])
    assert not same(bnn, states[-1])


def test_early_stopping_waits_for_the_whole_kl():
    """Epochs of the MAP phase and of a KL that is not yet whole neither count as best nor as waited."""
    history = fit(
        classifier(),
        epochs=20,
        map_epochs=2,
        learning_rate=0.1,
        kl_schedule=KLSchedule(zero_epochs=1, linear_epochs=3),
        validation=[(X, 1 - Y)],
        patience=1,
    )
    assert len(history) >= 2 + 4 + 1
    assert history[6]["kl_weight"] == 1.0


def test_validation_scores_are_those_of_predict():
    bnn = classifier(posteriors.MeanField(init_std=1e-4))
    weights = torch.rand(24)
    row = fit(bnn, learning_rate=1e-30, validation=[(X[:10], Y[:10], weights[:10]), (X[10:], Y[10:], weights[10:])])[0]
    prediction = bnn.predict(X, num_draws=2)  # every draw is the mean up to its standard deviation of 1e-4
    nll = -(weights * prediction.log_prob(Y)).sum() / weights.sum()
    assert row["validation_nll"] == pytest.approx(nll.item(), abs=1e-3)
    right = (prediction.labels == Y).float()
    assert row["validation_accuracy"] == pytest.approx(((weights * right).sum() / weights.sum()).item(), rel=1e-5)
    net = bayesify.bayesianize(nn.Linear(3, 2), posteriors.MeanField(1e-6), likelihood=likelihoods.Gaussian())
    targets = torch.randn(24, 2)
    row = fit(net, [(X, targets)], learning_rate=1e-30, validation=[(X[:9], targets[:9]), (X[9:], targets[9:])])[0]
    rmse = (net.predict(X).mean - targets).square().mean().sqrt()
    assert row["validation_rmse"] == pytest.approx(rmse.item(), abs=1e-4)


def test_a_callback_ends_the_run():
    history = fit(classifier(), epochs=9, callbacks=[lambda net, history: len(history) == 4])
    assert len(history) == 4


def test_bf16_trains_the_network_in_bf16_and_keeps_the_rest():
    bnn, plain = classifier(posteriors.KTied(2)), classifier(posteriors.KTied(2))
    plain.load_state_dict(bnn.state_dict())
    types = []
    bnn.network[0].register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    row = fit(bnn, precision="bf16", learning_rate=1e-30)[0]
    exact = fit(plain, learning_rate=1e-30)[0]
    assert set(types) == {torch.bfloat16}
    assert row["kl"] == pytest.approx(exact["kl"], rel=1e-6)  # summed in float32
    assert row["nll"] == pytest.approx(exact["nll"], rel=2**-6)  # bfloat16 has 8 bits
    assert all(parameter.dtype == torch.float32 for parameter in bnn.parameters())


def test_device_moves_the_network():
    bnn = classifier()
    fit(bnn, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            fit(bnn, device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "at least one epoch"),
        ({"epochs": -1}, "epochs=-1"),
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"map_epochs": -1}, "map_epochs=-1"),
        ({"num_draws": 0}, "num_draws=0"),
        ({"num_data": 0}, "num_data=0"),
        ({"num_data": 3}, "num_data=3, but the loader has 24 examples"),
        ({"patience": 0, "validation": [(X, Y)]}, "patience=0"),
        ({"patience": 2}, "needs validation data"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"kl_weight": -0.1}, "kl_weight=-0.1"),
        ({"precision": "float16"}, "give 'float32' or 'bf16' .float16 is not supported"),
        ({"precision": "int8"}, "give 'float32' or 'bf16'"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "LBFGS"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)}, "no parameter of this network"),
        ({"validation": []}, "validation loader yields no examples"),
        ({"device": "gpu"}, "device='gpu'; give a device such as 'cpu' or 'cuda:0'"),
        ({"checkpoint": "."}, "checkpoint='.' is a folder; give the path of a file"),
    ],
)
def test_bad_arguments(options, message):
    bnn = classifier()
    before = copy.deepcopy(bnn)
    with pytest.raises(ValueError, match=message):
        fit(bnn, **{"learning_rate": 1e-30} | options)
    assert same(bnn, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Steps(accumulate=0), "accumulate=0"),
        (lambda: Steps(clip_norm=-1.0), "clip_norm=-1.0"),
        (lambda: Steps(scheduler="batch"), "scheduler='batch'; give 'epoch' or 'step'"),
        (lambda: Devices(0), "count=0"),
        (lambda: Devices(2, launch="spawn"), "launch='spawn'; give 'script' or 'fork'"),
        (lambda: Checkpointing("run", every=0), "every=0"),
        (lambda: Checkpointing("run", resume="no"), "resume='no'; give True or False"),
        (lambda: Validation([(X, Y)], 0), "num_draws=0"),
    ],
)
def test_bad_groups_of_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


NAN = X.clone()
NAN[9, 1] = float("nan")
HIGH = Y.clone()
HIGH[9] = 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "no examples"),
        (DataLoader(TensorDataset(X[:0], Y[:0])), "no examples"),
        (DataLoader(TensorDataset(X, Y), batch_size=32, drop_last=True), "no batches in epoch 1"),
        (DataLoader(TensorDataset(NAN, Y), batch_size=24), r"epoch 1, batch 1: inputs hold nan at index \[9, 1\]"),
        (DataLoader(TensorDataset(X, HIGH), batch_size=24), "epoch 1, batch 1: .*label 2 is out of range"),
        (DataLoader(TensorDataset(X, Y.float()), batch_size=24), "epoch 1, batch 1: .*labels must be integers"),
        (DataLoader(TensorDataset(X), batch_size=24), "epoch 1, batch 1: a batch has 1 entries"),
        (DataLoader(TensorDataset(X[:, :2], Y), batch_size=24), "epoch 1, batch 1"),
    ],
)
def test_bad_data_changes_nothing(loader, message):
    bnn = classifier(None, nn.BatchNorm1d(5)).eval()
    before = copy.deepcopy(bnn)
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(bnn, loader, num_data=24 if "batch" in message else None)
    assert same(bnn, before)  # the buffers of batch norm too
    assert not bnn.training


def test_bad_data_later_names_epoch_and_batch():
    bnn, stepped = classifier(), classifier()
    with pytest.raises(
        ValueError, match=r"epoch 1, batch 2: inputs hold nan.*; the network keeps the steps taken before this error: 1"
    ):
        fit(bnn, DataLoader(TensorDataset(NAN, Y), batch_size=8))
    fit(stepped, [(X[:8], Y[:8])], num_data=24)
    assert same(bnn, stepped)
    with pytest.raises(
        ValueError,
        match=r"validation batch 1: inputs hold nan.*; the network keeps the steps taken before this error: 3",
    ):
        fit(classifier(), validation=[(NAN, Y)])
    entries = [(X, Y), (X, Y, X, Y)]
    with pytest.raises(
        ValueError, match=r"epoch 1, batch 2: a batch has 4 entries.*keeps the steps taken before this error: 1"
    ):
        fit(classifier(), entries, num_data=48)


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_example_weights_that_mean_nothing(value):
    weights = torch.ones(24)
    weights[5] = value
    bnn = classifier()
    before = copy.deepcopy(bnn)
    with pytest.raises(ValueError, match=r"epoch 1, batch 1: .*example_weights= holds a negative or non-finite number"):
        fit(bnn, DataLoader(TensorDataset(X, Y, weights), batch_size=8))
    assert same(bnn, before)


class Unsized:
    """Batches without a length."""

    def __iter__(self):
        yield from batches()


def test_num_data_below_the_number_of_examples():
    """Too few is an error that names both numbers; more is allowed, for augmented data."""
    data = TensorDataset(X, Y)
    sampled = DataLoader(data, batch_sampler=BatchSampler(range(24), 8, drop_last=False))
    for loader, epoch in ((batches(), 0), (Unsized(), 1), (sampled, 1), ([(X, Y)], 0)):
        bnn = classifier()
        before = copy.deepcopy(bnn)
        with pytest.raises(ValueError, match=r"num_data=23.* 24"):
            fit(bnn, loader, num_data=23)
        assert same(bnn, before) == (epoch == 0)
        fit(bnn, loader, num_data=100)
    fit(classifier(), DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(range(10))), num_data=10)
    fit(classifier(), DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(torch.ones(24), 60)), num_data=24)
    oversampled = BatchSampler(WeightedRandomSampler(torch.ones(24), 60), 8, drop_last=False)
    fit(classifier(), DataLoader(data, batch_sampler=oversampled), num_data=24)


def test_a_dataset_of_batches_is_counted_by_example():
    whole = [(X[:16], Y[:16]), (X[16:], Y[16:])]
    by_count, by_hand = classifier(), classifier()
    fit(by_count, DataLoader(whole, batch_size=None))
    fit(by_hand, DataLoader(whole, batch_size=None), num_data=24)
    assert same(by_count, by_hand)
    with pytest.raises(ValueError, match="num_data=20, but the loader has 24 examples"):
        fit(classifier(), DataLoader(whole, batch_size=None), num_data=20)


def test_what_is_not_a_network_or_a_loader():
    with pytest.raises(
        TypeError, match="model=Linear; give a Trainable, such as a BayesianNetwork; bayesianize makes one"
    ):
        bayesify.fit(nn.Linear(3, 2), [(X, Y)], epochs=1)
    without = bayesify.bayesianize(nn.Linear(3, 2), "mean_field")
    with pytest.raises(ValueError, match="no likelihood"):
        fit(without)
    with pytest.raises(TypeError, match=r"optimizer='adam'; give an Optimizer or a function"):
        fit(classifier(), optimizer="adam")
    with pytest.raises(TypeError, match="train_loader=3; give batches, such as a DataLoader"):
        fit(classifier(), 3)
    with pytest.raises(TypeError, match="can be iterated only once"):
        fit(classifier(), iter([(X, Y)]))
    frozen = classifier().requires_grad_(False)
    with pytest.raises(ValueError, match="trainable"):
        fit(frozen)
    bnn = classifier()
    other = torch.optim.SGD(classifier().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="another optimizer"):
        fit(bnn, scheduler=torch.optim.lr_scheduler.ExponentialLR(other, 0.5))


def test_the_progress_bar_shows_nll_and_kl_apart(monkeypatch, capsys):
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(classifier(), epochs=2, progress=True)
    shown = capsys.readouterr().err
    assert "NLL" in shown
    assert "KL" in shown
