"""What `fit` and `check` tell: each finding on a small real problem that deserves it, and none on healthy trainings."""

import copy
import inspect
import math
import re
import sys
from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import torch
from runs import same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import likelihoods, posteriors, priors
from bayesify.predictive.base import Outputs
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.predictor import Batch
from bayesify.training import ModelStack, rules
from bayesify.training.rules import Score
from bayesify.training.validation import Totals
from bayesify.training.watch import Watch, start_network

WIDE = priors.Gaussian(1.0)


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]


@pytest.fixture(scope="module")
def data():
    x, y = digits()
    train, test = TensorDataset(x[:640], y[:640]), TensorDataset(x[640:1440], y[640:1440])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=800)


def fresh():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.fixture(scope="module")
def trained(data):
    net = fresh()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(25):
        for x, y in data[0]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net


def train(net, posterior, loader, epochs, prior=WIDE, **options):
    bnn = bayesify.bayesianize(net, posterior, likelihood=likelihoods.Categorical(), prior=prior)
    return bnn, bayesify.fit(bnn, loader, epochs=epochs, **{"seed": 0, "progress": False} | options)


# -- rules ---------------------------------------------------------------------------------------------------------


def test_a_trend_is_exact_on_a_line_and_robust_to_outliers():
    change, certainty = rules.trend([1.0 - 0.1 * place for place in range(11)])
    assert change == pytest.approx(-1.0)
    assert certainty == pytest.approx(-55 / math.sqrt(11 * 10 * 27 / 18))
    spoiled = [1.0 - 0.1 * place for place in range(11)]
    spoiled[5] = 100.0
    assert rules.trend(spoiled)[0] == pytest.approx(-1.0, rel=0.1)
    assert rules.trend([1.0]) == (0.0, 0.0)


def test_noise_alone_is_hardly_ever_taken_for_a_trend():
    """The statistic is standard normal without a trend: beyond 3 in one direction for 1.35 of 1,000 series (at most 8 of 2,000 in
    999 of 1,000 cases), however heavy the tails."""
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(2000, 30, generator=generator) / torch.rand(2000, 30, generator=generator)
    beyond = sum(rules.trend(row.tolist())[1] < -rules.TREND_SIGNIFICANCE_STDS for row in series)
    assert beyond <= 8
    assert NormalDist().cdf(-rules.TREND_SIGNIFICANCE_STDS) == pytest.approx(0.00135, abs=1e-5)


@pytest.mark.parametrize(
    ("curve", "found"),
    [
        (lambda t: 0.3 + 2 * math.exp(-8 * t), False),  # converged
        (lambda t: 0.3 + 2 * math.exp(-2 * t), True),
        (lambda t: 2.3 - 0.25 * t, True),  # slow, but as fast at its end as at its start
        (lambda t: 0.3 + 0.2 * t, False),  # rises
        (lambda t: 0.02 + 0.02 * (1 - t), False),  # too little to matter
        (lambda t: math.nan, False),
    ],
)
def test_convergence_of_a_noisy_curve(curve, found):
    noise = 0.02 * torch.randn(90, generator=torch.Generator().manual_seed(1))
    values = [curve(place / 89) + float(noise[place]) for place in range(90)]
    assert bool(rules.convergence(values, values)) is found
    assert not rules.convergence(values[:6], values[:6])  # too few to say


def test_scores_of_held_out_data_are_compared_more_closely():
    start = Score(0.30, 0.90, 10_000)
    assert rules.worse_than_start(start, Score(0.33, 0.90, 10_000), held_out=True)
    assert rules.worse_than_start(start, Score(0.30, 0.88, 10_000), held_out=True)
    assert not rules.worse_than_start(start, Score(0.30, 0.88, 100), held_out=True)  # within chance
    assert not rules.worse_than_start(start, Score(0.33, 0.88, 10_000), held_out=False)
    assert rules.worse_than_start(start, Score(0.33, 0.80, 10_000), held_out=False)
    assert not rules.worse_than_start(Score(0.3, None, 100), Score(0.2, None, 100), held_out=True)


def test_chance_is_that_of_the_difference_on_the_same_examples():
    """The NLL of an example varies by 1 nat, but two predictions of the same example differ by 0.03 +- 0.1."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(200, generator=generator).double()
    apart = torch.randn(200, generator=generator).double()
    apart = (apart - apart.mean()) / apart.std()

    def told(mean, std, numbers=1):
        after = before + mean + std * apart
        scores = [
            Score(float(part.mean()), None, 200, numbers=numbers, losses=tuple(part.tolist()))
            for part in (before, after)
        ]
        return bool(rules.worse_than_start(*scores, held_out=True))

    assert told(0.03, 0.1)  # two standard errors are 0.014
    assert not told(0.03, 0.3)  # two standard errors are 0.042
    assert not told(0.019, 0.01)  # too little to matter
    assert not told(0.03, 0.1, numbers=2)  # 0.015 per target


@pytest.mark.parametrize(
    ("coverage", "count", "found"),
    [(63 / 64, 64, False), (1.0, 64, False), (1.0, 100, True), (0.97, 100, False), (0.97, 2000, True), (0.7, 64, False),
     (0.7, 200, True), (0.83, 2000, False), (0.0, 64, True)],
)  # fmt: skip
def test_coverage_beyond_chance(coverage, count, found):
    """The interval of 64 rows that holds 63 of them holds 95 % or less of all rows in one case of six."""
    assert bool(rules.coverage_off(Score(0.0, None, count, 1.0, coverage=coverage), held_out=False)) is found


def test_training_rows_are_judged_as_new_rows():
    """With a noise of twice the squared residuals, 90 % intervals hold 98 % of the training rows and 90 % of new ones."""
    residual = torch.linspace(-1, 1, 2003)[1:-1].erfinv().double() * math.sqrt(2)  # standard normal quantiles
    predictive = likelihoods.Gaussian(2.0).predictive(Outputs(kept=torch.zeros(1, 2001, 1)))
    found = {}
    for ratio in (1.0, 2.0):
        totals = Totals(seen=True, ratio=ratio)
        totals.add(predictive, Batch(torch.zeros(2001, 1), residual[:, None].float()))
        found[ratio] = totals.means()["coverage_90"]
    assert found[1.0] == pytest.approx(2 * NormalDist().cdf(1.6449 * math.sqrt(2)) - 1, abs=2e-3)
    assert found[2.0] == pytest.approx(0.9, abs=2e-3)


def test_accuracy_and_error_are_compared_on_the_same_examples():
    right, errors = 900 * (0.0,) + 100 * (1.0,), tuple(float(place % 10) for place in range(1000))
    fewer = 13 * (1.0,) + right[13:]  # 13 more mistakes: 1.3 points, and two standard errors are 0.7
    start = Score(0.3, 0.9, 1000, errors=right)
    assert rules.worse_than_start(start, Score(0.3, 0.887, 1000, errors=fewer), held_out=True)
    assert not rules.worse_than_start(
        replace(start, errors=()), Score(0.3, 0.887, 1000), held_out=True
    )  # 1.9 by chance
    worse = tuple(1.13 * error for error in errors)
    rmse = [math.sqrt(sum(part) / 1000) for part in (errors, worse)]
    start, now = (Score(0.3, None, 1000, rmse[place], None, errors=part) for place, part in enumerate((errors, worse)))
    assert rules.worse_than_start(start, now, held_out=True)
    assert not rules.worse_than_start(replace(start, errors=()), now, held_out=True)


@pytest.mark.parametrize(
    ("before", "after", "count", "found"),
    [(0.80, 0.74, 400, True), (0.80, 0.86, 1000, True), (0.75, 0.745, 400, False), (0.80, 0.77, 400, False),
     (0.80, 0.74, 100, False), (0.86, 0.75, 400, False)],
)  # fmt: skip
def test_calibration_is_compared_with_the_given_network(before, after, count, found):
    """The accuracy is 0.8. With 400 rows its standard error is 0.02, with 100 rows 0.04, and 0.06 is then within chance."""
    errors = tuple(float(place % 5 == 0) for place in range(count))
    scores = [
        Score(0.5, 0.8, count, guess=1.0, errors=errors, confidences=count * (value,)) for value in (before, after)
    ]
    told = rules.less_calibrated(*scores)
    assert bool(told) is found
    assert (
        not told or f"is {after:.3f} at an accuracy of 0.800 (given network: {before:.3f} at 0.800)" in told[0].sentence
    )
    assert not rules.less_calibrated(replace(scores[0], confidences=()), scores[1])
    assert not rules.less_calibrated(replace(scores[0], nll=0.95), scores[1])  # an untrained network


def test_a_change_of_calibration_must_exceed_chance():
    """Of 400 rows, 50 become right and 50 wrong: the gap rises by 0.045, and its standard error is 0.025."""
    right = 320 * (0.0,) + 80 * (1.0,)
    other = 50 * (1.0,) + 270 * (0.0,) + 30 * (1.0,) + 50 * (0.0,)
    start = Score(0.5, 0.8, 400, guess=1.0, errors=right, confidences=400 * (0.8,))
    assert rules.less_calibrated(start, Score(0.5, 0.8, 400, guess=1.0, errors=right, confidences=400 * (0.845,)))
    assert not rules.less_calibrated(start, Score(0.5, 0.8, 400, guess=1.0, errors=other, confidences=400 * (0.845,)))


# -- healthy trainings ---------------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("posterior", "validate"),
    [
        (posteriors.MeanField(init_std=0.02), False),
        (posteriors.MeanField(init_std=0.02), True),
        (posteriors.Point(), True),
        (posteriors.Ensemble(members=3, init="network"), False),
        ({"2": posteriors.FullCovariance(init_std=0.02)}, True),
    ],
)
def test_nothing_is_said_of_a_healthy_training(data, trained, posterior, validate):
    options = {"validation": data[1]} if validate else {}
    bnn, history = train(trained, posterior, data[0], 4, **options)
    assert history.findings == [], history.findings
    assert ("give validation=" in str(history.findings)) == (not validate)
    assert bayesify.check(bnn, data[1], start=trained, held_out=True, num_data=640) == []


def test_nothing_is_said_of_a_healthy_regression():
    from sklearn.datasets import load_diabetes

    rows = load_diabetes()
    x = torch.tensor(rows.data / rows.data.std(0), dtype=torch.float32)
    y = torch.tensor((rows.target - rows.target.mean()) / rows.target.std(), dtype=torch.float32)[:, None]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))
    bnn = bayesify.bayesianize(net, posteriors.MeanField(init_std=0.1), likelihood=likelihoods.Gaussian(0.5))
    loader = DataLoader(TensorDataset(x, y), batch_size=221, shuffle=True)
    history = bayesify.fit(bnn, loader, epochs=100, learning_rate=3e-2, seed=0, progress=False)
    assert history.findings == [], history.findings
    assert bayesify.check(bnn, loader, start=net) == []


def regression(rows=800):
    x = torch.randn(rows, 5)
    y = torch.sin(x[:, :1] * x[:, 1:2]) + x[:, 2:3] + 0.2 * torch.randn(rows, 1)
    return DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)


@pytest.fixture(scope="module")
def regressor():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, loader = nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 1)), regression()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(40):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
    return net


def options_of(kind, init):
    options = {key: value for key, value in kind.small_options.items() if key != "init"}
    if kind.starts_at_rows is not None:
        options[kind.starts_at_rows] = torch.randn(20, 5)
    return options | ({"init": init} if init is not None else {})


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", posteriors.REGISTRY.values(), ids=posteriors.REGISTRY)
def test_posteriors_say_whether_they_start_at_the_network(kind, regressor):
    has_init = "init" in inspect.signature(kind).parameters
    x = torch.randn(500, 5)
    for init in (None, *([kind.keeping_init] if has_init else [])):
        posterior = kind(**options_of(kind, init))
        bnn = bayesify.bayesianize(regressor, posterior, likelihood="gaussian")
        with torch.no_grad():
            given, mean = regressor(x), bnn.mean_network()(x)
            assert torch.equal(start_network(bnn)(x), mean if posterior.starts_at_network else given)
        kept = float((given - mean).square().mean() / given.var()) < 0.25
        assert kept == posterior.starts_at_network
        assert kept or init is None


STARTS_ELSEWHERE = ["walsh_hadamard", "ensemble", "local_inducing", "global_inducing"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("name", STARTS_ELSEWHERE)
def test_a_trained_regressor_that_the_posterior_does_not_start_at(name, validated, regressor):
    """Told before the training, and after it where the given network was better; in regression as for classes."""
    kind, loader = posteriors.REGISTRY[name], regression()
    options = {"validation": regression(200)} if validated else {}
    bnn = bayesify.bayesianize(regressor, kind(**options_of(kind, None)), likelihood="gaussian")
    with pytest.warns(UserWarning, match=rf"RMSE .* {kind.__name__} does not start .*init='{kind.keeping_init}'"):
        history = bayesify.fit(bnn, loader, epochs=2, seed=0, progress=False, **options)
    assert {"starts_elsewhere", "worse_than_start"} <= set(history.findings.codes)
    assert re.search(r"worse than the given network: RMSE .* \(was 0\.", str(history.findings))
    assert not bnn.given_weights


def test_random_networks_of_a_curve_do_not_count_as_trained():
    """The best of 200 random networks has 0.89 of the RMSE of a constant guess; below 0.9, `fit` took it for a trained network."""
    told = []
    for seed in range(200):
        torch.manual_seed(seed)
        x = 4 * torch.rand(300, 1) - 2
        y = torch.sin(2 * x) + 0.2 * torch.randn_like(x)
        net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        rmse, guess = float((net(x) - y).square().mean().sqrt().detach()), float(y.std())
        score = Score(0.0, None, 300, rmse=rmse, guess=guess)
        told += rules.starts_elsewhere(score, [posteriors.Ensemble(2)])
    assert not told


@pytest.mark.parametrize("name", STARTS_ELSEWHERE)
def test_nothing_is_said_of_where_a_fresh_network_starts(name, recwarn):
    kind, net = posteriors.REGISTRY[name], nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 1))
    bnn = bayesify.bayesianize(net, kind(**options_of(kind, None)), likelihood="gaussian")
    history = bayesify.fit(bnn, regression(), epochs=2, seed=0, progress=False)
    assert not {"starts_elsewhere", "worse_than_start"} & set(history.findings.codes)
    assert not [warning for warning in recwarn if "does not start" in str(warning.message)]


@pytest.mark.parametrize("dropout", [0.3, 0.6])
def test_dropout_is_no_sign_of_a_prior_that_pulls(dropout, data):
    """Training batches are with dropout, the given network's predictions without it: the two are not compared."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(15):
        for x, y in data[0]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    _, history = train(net, "mean_field", data[0], 3, prior=None)
    assert "kl_dwarfs" not in history.findings.codes


@pytest.mark.thin(2)
@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize(("noise", "kind"), [(1e-4, "narrow"), (0.04, None), (4.0, "wide")])
def test_intervals_that_hold_too_few_or_too_many(noise, kind, validated, regressor):
    options = {"validation": regression(400)} if validated else {}
    likelihood = likelihoods.Gaussian(noise, learn=False)
    bnn = bayesify.bayesianize(regressor, posteriors.MeanField(init_std=0.01), likelihood=likelihood)
    history = bayesify.fit(bnn, regression(), epochs=4, seed=0, progress=False, **options)
    found = {finding.code: finding.sentence for finding in history.findings}
    assert ("coverage_off" in found) == (kind is not None)
    assert kind is None or f"too {kind}" in found["coverage_off"]


def test_leverage_stands_for_rows_left_out():
    """A linear model with many weights for its rows: rows in its 90 % intervals, corrected, as many as of those left out."""
    torch.manual_seed(0)
    x = torch.randn(60, 20)
    y = x @ torch.randn(20, 1) + torch.randn(60, 1)

    def posterior(rows):
        covariance = (x[rows].T @ x[rows] + torch.eye(20)).inverse()
        return covariance @ x[rows].T @ y[rows], covariance

    def inside(rows, of, seen):
        mean, covariance = posterior(rows)
        spread = (x[of] @ covariance * x[of]).sum(1, keepdim=True)
        outputs = OutputGaussian(x[of] @ mean, spread[..., None], 0, None)
        totals = Totals(seen=seen)
        totals.add(likelihoods.Gaussian(1.0).closed_form(outputs), Batch(x[of], y[of], None))
        return totals.means()["coverage_90"]

    every = torch.arange(60)
    left_out = [inside(every[every != row], every[row : row + 1], False) for row in range(60)]
    assert inside(every, every, True) == pytest.approx(sum(left_out) / 60, abs=1e-6)
    assert inside(every, every, False) > sum(left_out) / 60


def test_numbers_that_are_guessed(regressor):
    bnn = bayesify.bayesianize(nn.Linear(5, 1), "mean_field", likelihood="gaussian")
    history = bayesify.fit(bnn, regression(), epochs=3, learning_rate=1e-6, seed=0, progress=False)
    assert "learned_little" in history.findings.codes
    assert "predicting the mean of the targets" in str(history.findings)


# -- trainings that deserve a finding ------------------------------------------------------------------------------


def test_a_training_that_is_cut_short(data):
    _, history = train(fresh(), posteriors.Point(), data[0], 8, learning_rate=2e-3)
    assert "not_converged" in history.findings.codes
    assert re.search(r"NLL still fell by 0\.\d+ nats per example.*; train for more epochs", str(history.findings))
    assert str(history.findings[0]) in repr(history)
    _, history = train(fresh(), posteriors.Point(), data[0], 8, learning_rate=2e-3, validation=data[1])
    assert "not_converged" in history.findings.codes


def test_scales_that_never_moved(data, trained):
    bnn, history = train(trained, posteriors.MeanField(init_std=1e-4), data[0], 4)
    assert "scales_still" in history.findings.codes
    assert "init_std" in str(history.findings)
    assert "no_uncertainty" in bayesify.check(bnn, data[1]).codes


def scales_first(rate):
    """Adam that moves the scales alone, fast enough for them to arrive in a short training."""
    return lambda bnn: torch.optim.Adam([value for name, value in bnn.named_parameters() if "raw_std" in name], lr=rate)


@pytest.mark.thin(2)
@pytest.mark.parametrize("validated", [False, True])
def test_scales_that_destroy_a_trained_network(validated, data, trained):
    """A posterior as wide as the bound asks for, with many weights for its rows, and one whose scales are bounded."""
    codes = []
    for max_std in (None, 0.02):
        posterior = posteriors.MeanField(init_std=0.01, max_std=max_std)
        bnn = bayesify.bayesianize(trained, posterior, likelihood=likelihoods.Categorical(), prior=priors.Neal(8.0))
        options = {"validation": data[1]} if validated else {}
        optimizer = scales_first(0.1)(bnn)
        history = bayesify.fit(
            bnn, data[0], epochs=10, optimizer=optimizer, kl_weight=10.0, seed=0, progress=False, **options
        )
        codes.append(history.findings.codes)
        if max_std is None:
            assert re.search(
                r"weights vary by .* times as large as at the start.*max_std=.*IVON", str(history.findings)
            )
    assert {"worse_than_start", "scales_wide"} <= set(codes[0])
    assert not {"worse_than_start", "scales_wide"} & set(codes[1])


def test_a_prior_that_pulls(data, trained):
    """Both from training batches and from validation data."""
    for options in ({}, {"validation": data[1]}):
        options |= {"learning_rate": 3e-3, "prior": priors.Gaussian(0.01)}
        bnn, history = train(trained, posteriors.MeanField(init_std=0.02), data[0], 10, **options)
        assert {"kl_dwarfs", "worse_than_start"} <= set(history.findings.codes)
        # More epochs would make it worse, and it is the means that have gone.
        assert not {"not_converged", "scales_wide"} & set(history.findings.codes)
    found = bayesify.check(bnn, data[1], start=trained, held_out=True, num_data=640)
    assert {"kl_dwarfs", "worse_than_start"} <= set(found.codes)


@pytest.mark.parametrize("classes", [2, 3])
def test_class_labels_under_a_gaussian(classes):
    x = torch.randn(300, 5)
    labels = torch.arange(300) % classes
    kind = "Bernoulli" if classes == 2 else r"Categorical\(\) with 3"
    for y, told in ((labels, True), (labels.float(), False), (labels + 1, False)):
        bnn = bayesify.bayesianize(nn.Linear(5, 1), "mean_field", likelihood="gaussian")
        history = bayesify.fit(bnn, [(x, y)] * 10, epochs=1, seed=0, progress=False)
        assert ("labels_as_numbers" in history.findings.codes) is told
        found = bayesify.check(bnn, [(x, y)])
        assert bool(re.search(f"labels_as_numbers.*{kind}", str(found))) is told
    many = bayesify.bayesianize(nn.Linear(5, classes), "mean_field", likelihood="gaussian")
    with pytest.raises(ValueError, match=r"likelihoods\.Categorical\(\)"):
        bayesify.fit(many, [(x, labels)] * 10, epochs=1, progress=False)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_small_loss_on_validation_data(task, data, trained, regressor):
    """A prior that pulls a little costs a few hundredths of a nat: seen on held-out rows, and said to be unseen without."""
    if task == "classification":
        net, loader, held_out, rate = trained, data[0], data[1], 1e-3
    else:
        net, loader, held_out, rate = regressor, regression(), regression(400), 3e-3
    for prior in (None, priors.Gaussian(0.02)):
        told = {}
        for options in ({}, {"validation": held_out}):
            bnn = bayesify.bayesianize(
                net,
                posteriors.MeanField(init_std=1e-3),
                likelihood={"classification": "categorical", "regression": "gaussian"}[task],
                prior=prior,
            )
            history = bayesify.fit(bnn, loader, epochs=3, learning_rate=rate, seed=0, progress=False, **options)
            told[bool(options)] = "worse_than_start" in history.findings.codes
            assert ("comparison" in history.notes) is not bool(options)
        assert told == {False: False, True: prior is not None}
    assert "give validation=" in repr(bayesify.fit(bnn, loader, epochs=2, seed=0, progress=False))


def test_draws_that_make_a_classifier_underconfident(data, trained):
    """Dropout of 15 % of the units lowers the confidence by several points, which only held-out rows show."""
    codes = {}
    for rate in (None, 0.15):
        _, history = train(trained, posteriors.Dropout(rate), data[0], 3, None, validation=data[1])
        codes[rate] = history.findings.codes
    assert "less_calibrated" in codes[0.15]
    assert not codes[None]


def test_a_learning_rate_that_destroys_the_network(data, trained):
    _, history = train(trained, posteriors.MeanField(init_std=0.02), data[0], 8, learning_rate=1.0)
    assert {"worse_than_start", "learned_little"} & set(history.findings.codes)


def test_members_that_are_behind(data, trained):
    bnn, history = train(trained, posteriors.Ensemble(members=3), data[0], 3)
    assert "members_apart" in history.findings.codes
    assert "2 of 3 members of the ensemble have not converged" in str(history.findings)
    assert "members_apart" in bayesify.check(bnn, data[1]).codes
    models = [
        bayesify.bayesianize(net, posteriors.Point(), likelihood=likelihoods.Categorical(), prior=WIDE)
        for net in (trained, fresh())
    ]
    history = bayesify.fit(ModelStack(models), data[0], epochs=3, seed=0, progress=False)
    assert "1 of 2 models of the stack have not converged" in str(history.findings)
    assert "nsemble" not in str(history.findings)


def test_classes_that_are_guessed(data):
    bnn, history = train(fresh(), posteriors.MeanField(init_std=0.02), data[0], 3, learning_rate=1e-5)
    assert "learned_little" in history.findings.codes
    assert "learned_little" in bayesify.check(bnn, data[0]).codes


def test_probabilities_given_as_logits(data, trained):
    net = nn.Sequential(copy.deepcopy(trained), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="outputs are probabilities .* remove the softmax"):
        bnn, history = train(net, posteriors.MeanField(init_std=0.02), data[0], 3)
    assert "probabilities_as_logits" in history.findings.codes
    assert "probabilities_as_logits" in bayesify.check(bnn, data[1]).codes


def test_a_search_at_its_edge(data, trained):
    laplace = bayesify.Laplace(trained, likelihoods.Categorical(), subset="last_layer").fit(data[0])
    assert bayesify.check(laplace, data[1]) == []
    laplace.tune_prior_precision(data[1], grid=[1e5, 1e6])
    found = bayesify.check(laplace, data[1])
    assert "search_at_edge" in found.codes
    assert "give a wider grid=" in str(found)
    laplace.tune_prior_precision()
    assert "search_at_edge" not in bayesify.check(laplace, data[1]).codes


def test_a_search_on_training_data(data, trained):
    laplace = bayesify.Laplace(trained, likelihoods.Categorical(), subset="last_layer").fit(data[0])
    with pytest.warns(UserWarning, match=r"leaves almost no uncertainty; .* give held-out data"):
        laplace.tune_prior_precision(data[0])
    assert "no_uncertainty" in [finding.code for finding in laplace.findings]
    laplace.tune_prior_precision()
    assert not laplace.findings


def test_a_short_run_says_that_it_was_not_checked(data, trained):
    _, history = train(trained, posteriors.MeanField(), list(data[0])[:9], 1, num_data=576)
    assert str(history.findings).endswith("fewer than 10 steps, which is too short for most checks")
    _, history = train(trained, posteriors.MeanField(), data[0], 1)
    assert "fewer than" not in str(history.findings)


# -- one's own loop ------------------------------------------------------------------------------------------------


def test_check_takes_the_losses_of_ones_own_loop(data, trained):
    bnn = bayesify.bayesianize(trained, posteriors.MeanField(init_std=0.02), likelihood=likelihoods.Categorical())
    falling = [2.0 * math.exp(-step / 500) + 0.01 * math.sin(step) for step in range(600)]
    assert bayesify.check(bnn, data[1], losses=falling).codes == ["not_converged"]
    settled = [2.0 * math.exp(-step / 50) + 0.01 * math.sin(step) for step in range(600)]
    found = bayesify.check(bnn, data[1], losses=settled)
    assert found == []
    assert str(found) == "nothing to report"


def test_check_changes_nothing(data, trained):
    bnn = bayesify.bayesianize(trained, posteriors.MeanField(), likelihood=likelihoods.Categorical()).train()
    unshuffled = list(data[1])
    before, state = copy.deepcopy(bnn), torch.get_rng_state()
    bayesify.check(bnn, unshuffled, start=trained)
    assert same(bnn, before)
    assert bnn.training
    assert torch.equal(state, torch.get_rng_state())


def test_check_says_what_it_cannot_do(data, trained):
    bnn = bayesify.bayesianize(trained, posteriors.MeanField(), likelihood=likelihoods.Categorical())
    with pytest.raises(ValueError, match="check: the loader yields no examples"):
        bayesify.check(bnn, [])
    with pytest.raises(TypeError, match="check: ModelStack does not predict"):
        bayesify.check(ModelStack([bnn]), data[1])


def test_fit_judges_what_predict_says(data, trained, monkeypatch):
    """Statistics that leave the data: training batches, normalized by themselves, do not see it; predictions do."""
    net = nn.Sequential(copy.deepcopy(trained[0]), nn.BatchNorm1d(32), *copy.deepcopy(trained[1:]))
    with torch.no_grad():
        hidden = trained[0](data[0].dataset.tensors[0])
        net[1].weight.copy_(hidden.std(0))
        net[1].bias.copy_(hidden.mean(0))
        net[1].momentum = None
        net(data[0].dataset.tensors[0])
        net[1].momentum = 0.0

    def leave(bnn, history):
        if len(history) == 4:
            bnn.network[1].running_mean.add_(10 * net[1].running_var.sqrt())

    def findings(*callbacks):
        bnn = bayesify.bayesianize(
            net, posteriors.MeanField(), likelihood=likelihoods.Categorical(), prior=WIDE, batch_statistics="train"
        )
        return set(bayesify.fit(bnn, data[0], epochs=4, seed=0, progress=False, callbacks=callbacks).findings.codes)

    wrong = {"worse_than_start", "statistics_differ"}
    assert not wrong & findings()
    assert not wrong & findings(leave)  # draws have statistics of their own

    def fail(*args, **options):
        raise MemoryError("too many weights")

    monkeypatch.setattr("bayesify.training.batch_statistics.keep_draws", fail)
    with pytest.warns(UserWarning, match="cannot have their own batch statistics .too many weights"):
        assert wrong <= findings(leave)


# -- without a trace -----------------------------------------------------------------------------------------------


def test_watching_changes_no_bit(data, trained, monkeypatch):
    """Neither the run nor the generators of loaders see that somebody looks."""
    results = []
    for quiet in (False, True):
        generator = torch.Generator().manual_seed(5)
        shuffled = DataLoader(data[0].dataset, batch_size=64, shuffle=True, generator=generator)
        validation = DataLoader(data[1].dataset, batch_size=64, shuffle=True, generator=generator)
        if quiet:
            monkeypatch.setattr("bayesify.training.watch.MIN_WATCHED_STEPS", 10**9)
        net = nn.Sequential(copy.deepcopy(trained[0]), nn.Dropout(0.2), *copy.deepcopy(trained[1:]))
        bnn, history = train(net, posteriors.MeanField(), shuffled, 3, validation=validation)
        results.append((bnn, [{**row, "seconds": 0} for row in history]))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_continued_run_tells_the_same(data, trained, tmp_path):
    options = {"posterior": posteriors.MeanField(init_std=1e-4), "loader": data[0], "prior": priors.Gaussian(0.01)}
    options["scheduler"] = "constant"
    _, whole = train(trained, epochs=6, **options)
    path = tmp_path / "run.safetensors"
    train(trained, epochs=3, checkpoint=path, **options)
    _, continued = train(trained, epochs=6, checkpoint=path, **options)
    assert whole.findings.codes
    assert continued.findings == whole.findings


def test_a_look_that_fails_does_not_end_the_training(data, trained, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no look")

    for name in ("weight_spread", "start_network", "member_nll"):
        monkeypatch.setattr(f"bayesify.training.watch.{name}", fail)
    _, history = train(trained, posteriors.MeanField(), data[0], 3)
    assert len(history) == 3


# -- on screen -----------------------------------------------------------------------------------------------------


def test_findings_and_lines_without_a_terminal(data, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    train(fresh(), posteriors.Point(), data[0], 4, progress=False)
    assert capsys.readouterr().err == ""
    train(fresh(), posteriors.Point(), data[0], 8, learning_rate=2e-3, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("fit: ")] == []  # a short training
    assert any(line.startswith("fit: not converged") for line in lines)
    monkeypatch.setattr("bayesify.running.progress.FIRST_LINE_SECONDS", 1e-9)
    train(fresh(), posteriors.Point(), data[0], 4, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("fit: ")]
    assert lines
    assert all(re.fullmatch(r"epoch \d/4  NLL \d+\.\d+  KL -?\d+\.\d nats  batch \d+/10", line) for line in lines)


def test_lines_become_rare(monkeypatch, capsys):
    from bayesify.running.progress import ProgressBar

    now = [0.0]
    monkeypatch.setattr("bayesify.running.progress.monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with ProgressBar(True, 1, None) as bar:
        for second in range(600):
            now[0] = float(second)
            bar.step(1, second, lambda: (1.0, 2.0))
    assert len(capsys.readouterr().err.splitlines()) == 3 + 8  # after 10, 30 and 70 seconds, then one a minute


def test_example_weights_are_not_taken_for_statistics_that_differ():
    torch.manual_seed(0)
    x = torch.randn(640, 4)
    y = (x[:, 0] + x[:, 1] + torch.randn(640) > 0).long()
    net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    bnn = bayesify.bayesianize(net, "mean_field", likelihood="categorical")
    loader = DataLoader(TensorDataset(x, y, torch.full((640,), 0.3)), batch_size=64, shuffle=True)
    history = bayesify.fit(bnn, loader, epochs=12, learning_rate=1e-2, seed=0, progress=False)
    assert "statistics_differ" not in [finding.code for finding in history.findings]


def test_a_continued_run_is_judged_by_the_best_epoch_even_if_it_came_before():
    """With patience, the run returns the first epoch, so the worse scores after the interruption do not matter."""
    settings = SimpleNamespace(patience=2, total_epochs=2, steps=bayesify.training.Steps(), num_data=8)
    bnn = bayesify.bayesianize(nn.Linear(2, 2), "mean_field")
    watch, continued = (Watch(bnn, settings, None, torch.device("cpu")) for _ in range(2))
    watch.start, watch._validated = Score(0.3, 0.9, 1000), Score(0.3, 0.9, 1000, losses=(0.1, 0.5))
    continued.load(watch.state(), torch.zeros(4))
    assert continued._validated == watch._validated
    worse = Score(0.8, 0.6, 1000)
    continued.after_validation(SimpleNamespace(means=lambda: {"nll": worse.nll}, score=lambda: worse))
    for one, expected in ((continued, False), (Watch(bnn, settings, None, torch.device("cpu")), True)):
        one.start, one._validated = watch.start, one._validated or worse
        found = one._predictions([], True, None)
        assert any(finding.code == "worse_than_start" for part in found for finding in part) is expected
