"""Conformal prediction: exact thresholds, the promised coverage in simulation, MAPIE as an independent check."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import bayesify
from bayesify import conformal, deep_gp, likelihoods
from bayesify.conformal.sets import row_numbers
from bayesify.predictive import Outputs, RegressionPredictive

ROUNDS, N, M = 80, 39, 100


def heteroscedastic(x: Tensor, shift: float = 0.0) -> RegressionPredictive:
    """A wrong model of `targets`: its mean is off, its deviation too small, but larger where the noise is."""
    outputs = torch.cat((x.sin() + 0.3 + shift, (0.1 + 0.2 * x.abs()).square().log()), 1).unsqueeze(0)
    found = likelihoods.HeteroscedasticGaussian().predictive(Outputs(kept=outputs))
    assert isinstance(found, RegressionPredictive)
    return found


def draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = 3 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return x, x.sin() + (0.1 + x) * noise


def check_coverage(held: list[float], level: float, rows: int, upper: bool = True) -> None:
    """The mean of ROUNDS coverages, between level and level + 1 / (n + 1), within 5 standard errors of what was seen."""
    error = 5 * float(np.std(held)) / math.sqrt(len(held))
    assert np.mean(held) > level - error
    assert not upper or np.mean(held) < level + 1 / (rows + 1) + error


@pytest.mark.parametrize("level", [0.5, 0.75, 0.9])
def test_coverage_is_exact_over_all_orders(level: float) -> None:
    """Of n + 1 exchangeable rows, each is the new one equally often: coverage is ceil((n + 1) level) / (n + 1)."""
    scores = torch.tensor([0.1, 0.7, 0.3, 2.0, 1.1])
    held = []
    for new in range(len(scores)):
        others = torch.cat((scores[:new], scores[new + 1 :]))
        held.append(bool(scores[new] <= conformal.threshold(others, level)))
    assert np.mean(held) == math.ceil(len(scores) * level) / len(scores)


@pytest.mark.parametrize(
    ("rows", "level", "known"), [(8, 0.9, False), (9, 0.9, True), (18, 0.95, False), (19, 0.95, True)]
)
def test_too_few_rows_for_a_level(rows: int, level: float, known: bool) -> None:
    assert math.isfinite(conformal.threshold(torch.arange(rows).double(), level)) == known
    assert conformal.enough_rows(rows, level) == known
    arrays = (np.zeros(rows), np.ones(rows))
    lower, upper = conformal.Intervals("scaled").fit(arrays, np.arange(rows)).interval(arrays, level)
    assert bool(torch.isfinite(lower).all() & torch.isfinite(upper).all()) == known


def test_factor_is_a_quantile_of_standardized_residuals() -> None:
    y, mean, std = np.arange(1.0, 20.0), np.zeros(19), np.full(19, 2.0)
    fitted = conformal.Intervals("scaled").fit((mean, std), y)
    for level, factor in ((0.9, 18), (0.5, 10)):
        lower, upper = fitted.interval((np.array([5.0]), np.array([4.0])), level)
        assert (float(lower), float(upper)) == (5 - factor / 2 * 4, 5 + factor / 2 * 4)


@pytest.mark.parametrize("score", ["absolute", "scaled", "quantiles", "centrality"])
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_intervals_hold_what_they_say(score: Any, level: float) -> None:
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(ROUNDS):
        (x, y), (new, truth) = draw(N, generator), draw(M, generator)
        fitted = conformal.Intervals(score).fit(heteroscedastic(x), y)
        lower, upper = fitted.interval(heteroscedastic(new), level)
        held.append(float(((lower <= truth) & (truth <= upper)).double().mean()))
    check_coverage(held, level, N, upper=(score, level) != ("centrality", 0.9))  # ties: targets beyond its last digit


def test_groups_hold_what_they_say_each() -> None:
    """Without groups the noisy half is covered less; with them neither is."""
    generator = torch.Generator().manual_seed(0)
    held: dict[tuple[bool, bool], list[float]] = {}
    for _ in range(ROUNDS):
        (x, y), (new, truth) = draw(2 * N, generator), draw(M, generator)
        for grouped in (False, True):
            old, now = (x[:, 0] > 1.5, new[:, 0] > 1.5) if grouped else (None, None)
            fitted = conformal.Intervals("absolute").fit(heteroscedastic(x), y, groups=old)
            lower, upper = fitted.interval(heteroscedastic(new), 0.8, groups=now)
            inside = ((lower <= truth) & (truth <= upper))[:, 0].double()
            for part in (False, True):
                held.setdefault((grouped, part), []).append(float(inside[(new[:, 0] > 1.5) == part].mean()))
    assert np.mean(held[False, True]) < 0.75
    for part in (False, True):
        check_coverage(held[True, part], 0.8, 20)  # at least about 20 rows in each


def design(x: Tensor) -> Tensor:
    return torch.cat((x, torch.ones_like(x)), 1)


def line(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.lstsq(design(x), y).solution


@pytest.mark.parametrize("folds", [4, 16])
@pytest.mark.parametrize("score", ["absolute", "scaled"])
def test_cross_intervals_hold_what_they_say(folds: int, score: Any) -> None:
    """Lines fitted without each fold in turn; the promise is 1 - 2 alpha less a little, the practice about the level."""
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(ROUNDS):
        (x, y), (new, truth) = draw(32, generator), draw(M, generator)
        before, after, targets = [], [], []
        for k in range(folds):
            out = torch.arange(32) % folds == k
            weight = line(x[~out], y[~out])
            before.append((design(x[out]) @ weight, 0.1 + x[out]))
            after.append((design(new) @ weight, 0.1 + new))
            targets.append(y[out])
        lower, upper = conformal.CrossIntervals(score).fit(before, targets).interval(after, 0.8)
        held.append(float(((lower <= truth) & (truth <= upper)).double().mean()))
    assert np.mean(held) > 0.6
    assert 0.75 < np.mean(held) < 0.88


def test_cross_intervals_are_their_formula() -> None:
    """Against Barber et al.'s definition by loops, the jackknife+."""
    generator = torch.Generator().manual_seed(0)
    center, new = torch.randn(9, 1, generator=generator), torch.randn(9, 3, generator=generator)
    y = torch.randn(9, generator=generator)
    fitted = conformal.CrossIntervals("absolute").fit(
        [(center[i], torch.ones(1)) for i in range(9)], [y[i : i + 1] for i in range(9)]
    )
    lower, upper = fitted.interval([(new[i], torch.ones(3)) for i in range(9)], 0.8)
    for row in range(3):
        low = sorted(float(new[i, row] - (y[i] - center[i, 0]).abs()) for i in range(9))
        high = sorted(float(new[i, row] + (y[i] - center[i, 0]).abs()) for i in range(9))
        assert float(lower[row]) == pytest.approx(low[math.floor(10 * 0.2 + 1e-9) - 1])
        assert float(upper[row]) == pytest.approx(high[math.ceil(10 * 0.8 - 1e-9) - 1])


def test_members_that_left_out_folds() -> None:
    """One predictive of an ensemble is one of each member."""
    outputs = torch.randn(3, 6, 1)
    both = likelihoods.Gaussian(0.2).predictive(Outputs(kept=outputs))
    members = [both.with_outputs(outputs[k : k + 1]) for k in range(3)]
    fitted = conformal.CrossIntervals().fit(members, [torch.randn(6) for _ in range(3)])
    lower, upper = fitted.interval(members, 0.8)
    assert lower.shape == upper.shape == (6, 1)
    assert bool((lower < upper).all())


# -- classes -----------------------------------------------------------------------------------------------------------


def classes(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Probabilities that are too sharp, and labels from the right ones."""
    logits = 1.5 * torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return (2 * logits).softmax(1), labels


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"score": "probability", "empty": True}, True),
        ({"score": "adaptive", "empty": True}, True),
        ({"score": "adaptive", "regularization": 0.05, "free": 2, "empty": True}, True),
        ({"score": "adaptive"}, False),
        ({"score": "adaptive", "randomized": False}, False),
    ],
)
def test_sets_hold_what_they_say(options: dict[str, Any], exact: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    held = []
    for round_ in range(ROUNDS):
        (probs, labels), (new, truth) = classes(N, generator), classes(M, generator)
        sets = conformal.Sets(**options, seed=round_).fit(probs, labels).sets(new, 0.8)
        held.append(float(sets[torch.arange(M), truth].double().mean()))
    check_coverage(held, 0.8, N, upper=exact)


@pytest.mark.parametrize("empty", [False, True])
def test_sets_of_single_rows_are_those_of_a_batch(empty: bool) -> None:
    """Row by row, in float32 noise too, and with coverage of the level for every seed: 4 seeds of 60 rounds, 3 standard errors."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(4):
        held = []
        for _ in range(60):
            (probs, labels), (new, truth) = classes(99, generator), classes(M, generator)
            fitted = conformal.Sets(seed=seed, empty=empty).fit(probs, labels)
            sets = fitted.sets(new, 0.8)
            held.append(float(sets[torch.arange(M), truth].double().mean()))
        assert torch.equal(sets, torch.cat([fitted.sets(row.unsqueeze(0), 0.8) for row in new]))
        rounded = new * (1 + 1e-7 * torch.randn(new.shape, generator=generator, dtype=torch.float64))
        assert float((fitted.sets(rounded, 0.8) == sets).double().mean()) > 0.99
        error = 3 * float(np.std(held)) / math.sqrt(len(held))
        assert 0.8 - error < np.mean(held) < (0.83 if empty else 0.9) + error


@pytest.mark.parametrize("kinds", [1, 2, 7])
def test_sets_of_rows_that_are_alike(kinds: int) -> None:
    """A classifier with few different answers, each of them right: ties make coverage larger, never smaller, for every seed."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(kinds, 5, generator=generator, dtype=torch.float64).softmax(1)
    for seed in range(4):
        held = []
        for _ in range(60):
            rows = table[torch.randint(kinds, (N + M,), generator=generator)]
            labels = torch.multinomial(rows, 1, generator=generator)[:, 0]
            sets = conformal.Sets(seed=seed, empty=True).fit(rows[:N], labels[:N]).sets(rows[N:], 0.8)
            held.append(float(sets[torch.arange(M), labels[N:]].double().mean()))
        assert np.mean(held) > 0.8 - 3 * float(np.std(held)) / math.sqrt(len(held))


def test_row_numbers_are_uniform() -> None:
    """Against the uniform distribution, 4,000 rows of 2 to 200 classes, sure and unsure; and different for each seed."""
    generator = torch.Generator().manual_seed(2)
    for count, scale in ((2, 0.1), (2, 5.0), (10, 12.0), (200, 2.0)):
        probs = (scale * torch.randn(4000, count, generator=generator, dtype=torch.float64)).softmax(1)
        first, second = row_numbers(probs, 0), row_numbers(probs, 1)
        assert scipy.stats.kstest(first.numpy(), "uniform").pvalue > 1e-4
        assert abs(float(torch.corrcoef(torch.stack((first, second)))[0, 1])) < 5 / math.sqrt(4000)
        assert abs(float(torch.corrcoef(torch.stack((first, probs.amax(1))))[0, 1])) < 5 / math.sqrt(4000)


def test_adaptive_scores_by_hand() -> None:
    probs = torch.tensor([[0.2, 0.5, 0.3]])
    fitted = conformal.Sets(randomized=False, regularization=0.1, free=1).fit(probs.repeat(9, 1), torch.full((9,), 2))
    # Scores: 0.5 for class 1, 0.8 + 0.1 for class 2, 1.0 + 0.2 for class 0; the threshold is that of class 2.
    assert fitted.sets(probs, 0.9).tolist() == [[False, True, True]]
    alike = conformal.Sets(randomized=False).fit(probs.repeat(9, 1), torch.full((9,), 1))
    assert alike.sets(torch.tensor([[0.1, 0.3, 0.6], [0.45, 0.3, 0.25]]), 0.9).tolist() == [
        [False, False, True],  # its most probable class, always in
        [True, False, False],
    ]


def test_credible_sets() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.34, 0.33, 0.33]])
    assert conformal.credible_sets(probs, 0.85).tolist() == [
        [True, True, False],
        [True, True, True],
        [True, True, True],
    ]
    assert conformal.credible_sets(probs, 0.5).sum(1).tolist() == [1, 1, 2]


# -- over predictors, and what is refused ------------------------------------------------------------------------------


def test_over_a_network() -> None:
    generator = torch.Generator().manual_seed(0)
    bnn = bayesify.bayesianize(nn.Linear(1, 2), "ensemble", likelihood=likelihoods.StudentT(None)).double()
    (x, y), (new, truth) = draw(200, generator), draw(400, generator)
    for score in ("scaled", "centrality"):
        fitted = conformal.Conformal(bnn, conformal.Intervals(score)).fit(x, y)  # type: ignore[arg-type]
        lower, upper = fitted.interval(new, 0.9)
        inside = float(((lower <= truth) & (truth <= upper)).double().mean())
        assert abs(inside - 0.9) < 5 * math.sqrt(0.09 / 200 + 0.09 / 400)
    assert conformal.Conformal(bnn).fit(x, y).interval(new)[0].shape == (400, 1)
    with pytest.raises(TypeError, match="sets are not calibrated"):
        fitted.sets(new)
    classifier = bayesify.bayesianize(nn.Linear(1, 3), "ensemble", likelihood=likelihoods.Categorical()).double()
    sets = conformal.Conformal(classifier).fit(x, torch.randint(3, (200,))).sets(new)
    assert sets.shape == (400, 3)
    assert bool(sets.any(1).all())


def test_files_hold_what_was_calibrated(tmp_path: Path) -> None:
    generator, path = torch.Generator().manual_seed(0), tmp_path / "m.safetensors"
    (x, y), (new, _) = draw(60, generator), draw(20, generator)
    groups, asked = [("low", "high")[int(row > 1)] for row in x], ["low", "high"] * 10
    net = nn.Linear(1, 2).double()
    bnn = bayesify.bayesianize(net, "ensemble", likelihood=likelihoods.HeteroscedasticGaussian())
    for score in ("absolute", "scaled", "centrality"):
        made = conformal.Conformal(bnn, conformal.Intervals(score)).fit(x, y, groups=groups)  # type: ignore[arg-type]
        bayesify.save(made, path)
        for stored, found in zip(
            made.interval(new, 0.8, groups=asked),
            bayesify.load(path, net).interval(new, 0.8, groups=asked),
            strict=True,
        ):
            torch.testing.assert_close(stored, found)
    by_quantiles = conformal.Conformal(bnn, conformal.Intervals("quantiles")).fit(x, y)
    with pytest.raises(ValueError, match="calibrate again after loading, or use 'scaled'"):
        bayesify.save(by_quantiles, path)
    bayesify.save(conformal.Conformal(bnn), path)
    assert bayesify.load(path, net).rule is None
    net = nn.Linear(1, 3).double()
    classifier = bayesify.bayesianize(net, "ensemble", likelihood=likelihoods.Categorical())
    sets = conformal.Conformal(classifier, conformal.Sets(regularization=0.1)).fit(x, torch.randint(3, (60,)))
    bayesify.save(sets, path)
    assert torch.equal(bayesify.load(path, net).sets(new), sets.sets(new))
    process = conformal.Conformal(deep_gp.DeepGP(x, y, num_inducing=5)).fit(x, y, generator=generator)
    bayesify.save(process, path)
    again = bayesify.load(path)  # a model without a network of the user's needs none
    first, second = (
        model.interval(new, 0.8, generator=torch.Generator().manual_seed(1))[0] for model in (process, again)
    )
    torch.testing.assert_close(first, second)


def test_whole_and_positive_numbers_stay_so() -> None:
    law = likelihoods.NegativeBinomial(0.5)
    f = torch.randn(1, 60, 1)
    y = torch.poisson(f[0].exp() + 0.3)
    lower, upper = (
        conformal.Intervals("centrality")
        .fit(law.predictive(Outputs(kept=f)), y)
        .interval(law.predictive(Outputs(kept=f)), 0.9)
    )
    assert bool((lower >= 0).all() & (lower == lower.round()).all() & (upper == upper.round()).all())


@pytest.mark.parametrize("level", [0.6, 0.8])
def test_intervals_of_counts_hold_what_they_say(level: float) -> None:
    """One rate for all rows: a score that ties with the threshold is inside its interval."""
    generator, held = torch.Generator().manual_seed(0), []
    for _ in range(ROUNDS):
        f = torch.full((1, N + M, 1), 0.7, dtype=torch.float64)
        y = torch.poisson(f[0].exp(), generator=generator)
        old, new = (likelihoods.Poisson().predictive(Outputs(kept=part)) for part in (f[:, :N], f[:, N:]))
        lower, upper = conformal.Intervals("centrality").fit(old, y[:N]).interval(new, level)
        held.append(float(((lower <= y[N:]) & (y[N:] <= upper)).double().mean()))
    check_coverage(held, level, N, upper=False)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: conformal.Intervals().interval((np.zeros(2), np.ones(2))), ValueError, "call fit"),
        (lambda: conformal.Sets().sets(np.full((2, 2), 0.5)), ValueError, "call fit"),
        (lambda: conformal.threshold(torch.ones(3), 1.0), ValueError, "level=1.0; give a probability"),
        (lambda: conformal.threshold(torch.tensor([1.0, math.nan]), 0.5), ValueError, "scores= contains NaN"),
        (
            lambda: conformal.Intervals().fit(np.zeros(3), np.zeros(3)),
            TypeError,
            "ndarray is not a prediction of numbers",
        ),
        (lambda: conformal.Intervals("centrality").fit((np.zeros(3), np.ones(3)), np.zeros(3)), TypeError, "predict"),
        (lambda: conformal.Sets().fit(np.full((2, 2), 0.7), [0, 1]), ValueError, "sum to 1"),
        (lambda: conformal.Sets().fit(np.full((2, 2), 0.5), [0, 2]), ValueError, "one label per row"),
        (
            lambda: conformal.CrossIntervals().fit([(np.zeros(3), np.ones(3))], [np.zeros(3)]),
            ValueError,
            "at least two",
        ),
        (lambda: conformal.Conformal(nn.Linear(1, 1)), TypeError, "model=Linear; give a predictor"),
    ],
)
def test_what_is_refused(act: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def test_groups_that_do_not_fit() -> None:
    arrays = (np.zeros(4), np.ones(4))
    fitted = conformal.Intervals().fit(arrays, np.arange(4.0), groups=["a", "a", "b", "b"])
    with pytest.raises(ValueError, match="group 'c' has no calibration row"):
        fitted.interval(arrays, 0.5, groups=["a", "b", "c", "a"])
    with pytest.raises(ValueError, match="fit was called with groups="):
        fitted.interval(arrays, 0.5)
    with pytest.raises(ValueError, match="groups= is given, but fit was called without groups="):
        conformal.Intervals().fit(arrays, np.arange(4.0)).interval(arrays, 0.5, groups=["a", "a", "b", "b"])
    with pytest.raises(ValueError, match="groups= has length 3, but there are 4 rows"):
        fitted.interval(arrays, 0.5, groups=["a", "b", "a"])


# -- MAPIE -------------------------------------------------------------------------------------------------------------


def test_split_intervals_and_sets_are_those_of_mapie() -> None:
    mapie = pytest.importorskip("mapie")
    from mapie.classification import SplitConformalClassifier
    from mapie.regression import SplitConformalRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression

    assert mapie.__version__
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(150, 2)), generator.normal(size=150)
    model = LinearRegression().fit(x[:50], y[:50])
    theirs = SplitConformalRegressor(model, confidence_level=0.8, prefit=True).conformalize(x[50:100], y[50:100])
    _, expected = theirs.predict_interval(x[100:])
    ones = np.ones(50)
    ours = conformal.Intervals("absolute").fit((model.predict(x[50:100]), ones), y[50:100])
    lower, upper = ours.interval((model.predict(x[100:]), ones), 0.8)
    np.testing.assert_allclose(lower[:, 0].numpy(), expected[:, 0, 0], rtol=1e-10)
    np.testing.assert_allclose(upper[:, 0].numpy(), expected[:, 1, 0], rtol=1e-10)
    labels = (x[:, 0] + y > 0).astype(int) + (x[:, 1] > 1)
    classifier = LogisticRegression().fit(x[:50], labels[:50])
    split = SplitConformalClassifier(classifier, confidence_level=0.8, prefit=True, conformity_score="lac")
    _, sets = split.conformalize(x[50:100], labels[50:100]).predict_set(x[100:])
    found = conformal.Sets("probability", empty=True).fit(classifier.predict_proba(x[50:100]), labels[50:100])
    assert np.array_equal(found.sets(classifier.predict_proba(x[100:]), 0.8).numpy(), sets[:, :, 0])
