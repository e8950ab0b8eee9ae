import math

import numpy as np
import pytest
import torch
from scipy import integrate

from bayesify import likelihoods, metrics
from bayesify.metrics.ranking import areas
from bayesify.predictive.base import Outputs


def gaussian(outputs, noise=0.25):
    return likelihoods.Gaussian(noise=noise).predictive(Outputs(outputs))


def categorical(outputs):
    return likelihoods.Categorical().predictive(Outputs(outputs))


def bernoulli(outputs):
    return likelihoods.Bernoulli().predictive(Outputs(outputs))


def from_probs(*rows):
    """A classification with exactly these probabilities, one draw."""
    return categorical(torch.tensor(rows, dtype=torch.float64).log().unsqueeze(0))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestRegression:
    def test_one_gaussian_by_hand(self):
        mean, y = torch.zeros(1, 4, 1, dtype=torch.float64), torch.tensor([0.0, 0.5, -1.0, 1.05], dtype=torch.float64)
        scores = metrics.evaluate(gaussian(mean, noise=0.25), y)
        squares = [0.0, 0.25, 1.0, 1.1025]
        nll = [0.5 * (s / 0.25 + math.log(2 * math.pi * 0.25)) for s in squares]
        assert scores["nll"] == pytest.approx(sum(nll) / 4)
        assert scores["rmse"] == pytest.approx(math.sqrt(sum(squares) / 4))
        # In standard deviations the targets lie 0, 1, 2 and 2.1 from the mean: the intervals end at 0.674, 1.645 and 1.960.
        assert scores["coverage_50"] == 0.25
        assert scores["coverage_90"] == 0.5
        assert scores["coverage_95"] == 0.5
        assert set(scores) == {"nll", "rmse", "crps", "coverage_50", "coverage_90", "coverage_95"}
        assert all(type(score) is float for score in scores.values())

    def test_crps_of_one_gaussian_is_scoringrules(self):
        scoringrules = pytest.importorskip("scoringrules")
        mean, y = random(1, 20, 1), random(20, 1, seed=1)
        expected = scoringrules.crps_normal(y.numpy(), mean[0].numpy(), 0.5).mean()
        assert metrics.evaluate(gaussian(mean), y)["crps"] == pytest.approx(expected, rel=1e-9)

    def test_crps_of_a_mixture_is_its_integral(self):
        mean, y = 2 * random(7, 5, 2), random(5, 2, seed=1)
        found = gaussian(mean).crps(y).numpy()
        z = np.linspace(-20, 20, 200_001)
        for b in range(5):
            for o in range(2):
                scaled = torch.from_numpy(z[:, None] - mean[:, b, o].numpy()) / 0.5
                cdf = torch.special.ndtr(scaled).mean(1).numpy()
                integrand = (cdf - (z >= float(y[b, o]))) ** 2
                # The trapezoid rule is off by at most one step of 2e-4 at the jump.
                assert integrate.trapezoid(integrand, z) == pytest.approx(found[b, o], abs=2e-4)

    def test_coverage_agrees_with_the_intervals(self):
        predictive, y = gaussian(2 * random(9, 300, 2)), 2 * random(300, 2, seed=4)
        scores = metrics.evaluate(predictive, y)
        for level in (50, 90, 95):
            lower, upper = predictive.interval(level / 100)
            assert scores[f"coverage_{level}"] == float(((y >= lower) & (y <= upper)).double().mean())

    def test_coverage_of_the_truth_is_the_level(self):
        n = 4000
        mean = random(6, n, 1)
        chosen = mean[torch.randint(6, (n,), generator=torch.Generator().manual_seed(1)), torch.arange(n)]
        y = chosen + 0.5 * random(n, 1, seed=2)
        scores = metrics.evaluate(gaussian(mean), y)
        for level in (0.5, 0.9, 0.95):
            assert abs(scores[f"coverage_{100 * level:.0f}"] - level) < 5 * math.sqrt(level * (1 - level) / n)
        curve = metrics.calibration_curve(gaussian(mean), y)
        assert len(curve.expected) == 19
        error = (curve.observed - curve.expected).abs()
        assert (error < 5 * (curve.expected * (1 - curve.expected) / n).sqrt()).all()
        assert curve.error == pytest.approx(float(error.mean()))

    def test_calibration_curve_tells_too_narrow_from_too_wide(self):
        y = random(500, 1)
        mean = torch.zeros(1, 500, 1, dtype=torch.float64)
        for noise, sign in ((0.1, -1), (10.0, 1)):
            curve = metrics.calibration_curve(gaussian(mean, noise), y, levels=[0.3, 0.6, 0.9])
            assert (sign * (curve.observed - curve.expected) > 0).all()

    def test_several_outputs_sum_in_nll_and_average_elsewhere(self):
        mean, y = random(3, 6, 2), random(6, 2, seed=1)
        both, left, right = (
            metrics.evaluate(gaussian(mean[..., part]), y[:, part]) for part in (slice(0, 2), slice(0, 1), slice(1, 2))
        )
        assert both["crps"] == pytest.approx((left["crps"] + right["crps"]) / 2)
        assert both["rmse"] == pytest.approx(math.sqrt((left["rmse"] ** 2 + right["rmse"] ** 2) / 2))
        single = metrics.evaluate(gaussian(mean[:1]), y)["nll"]
        parts = [metrics.evaluate(gaussian(mean[:1, :, o : o + 1]), y[:, o])["nll"] for o in range(2)]
        assert single == pytest.approx(sum(parts))

    def test_outputs_that_were_not_kept_score_the_same(self):
        mean, y = random(4, 10, 1), random(10, 1, seed=3)
        chunked = likelihoods.Gaussian(noise=0.25).predictive(Outputs(chunks=lambda: iter(mean.split(3, dim=1))))
        assert metrics.evaluate(chunked, y) == pytest.approx(metrics.evaluate(gaussian(mean), y))


class TestClassification:
    PROBS = ((0.7, 0.2, 0.1), (0.05, 0.93, 0.02), (0.29, 0.3, 0.41), (0.62, 0.3, 0.08))
    Y = torch.tensor([0, 1, 0, 1])

    def test_by_hand(self):
        scores = metrics.evaluate(from_probs(*self.PROBS), self.Y)
        assert scores["accuracy"] == 0.5
        assert scores["nll"] == pytest.approx(-sum(math.log(p) for p in (0.7, 0.93, 0.29, 0.3)) / 4)
        brier = [0.09 + 0.04 + 0.01, 0.0025 + 0.0049 + 0.0004, 0.5041 + 0.09 + 0.1681, 0.3844 + 0.49 + 0.0064]
        assert scores["brier"] == pytest.approx(sum(brier) / 4)
        # Four bins of one example each.
        assert scores["ece"] == pytest.approx((0.3 + 0.07 + 0.41 + 0.62) / 4)
        assert set(scores) == {"accuracy", "nll", "ece", "brier"}
        assert all(type(score) is float for score in scores.values())

    def test_brier_agrees_with_the_sum_written_out(self):
        outputs, y = random(5, 40, 4), torch.arange(40) % 4
        predictive = categorical(outputs)
        probs = outputs.softmax(-1).mean(0)
        expected = sum((float(probs[i, c]) - float(y[i] == c)) ** 2 for i in range(40) for c in range(4)) / 40
        assert metrics.evaluate(predictive, y)["brier"] == pytest.approx(expected)
        assert (metrics.brier(predictive.class_probs, y) <= 2).all()

    def test_reliability_by_hand(self):
        diagram = metrics.reliability(from_probs(*self.PROBS), self.Y, num_bins=5)
        assert diagram.count.tolist() == [0, 0, 1, 2, 1]
        assert diagram.confidence[2:].tolist() == pytest.approx([0.41, 0.66, 0.93])
        assert diagram.accuracy[2:].tolist() == pytest.approx([0.0, 0.5, 1.0])
        assert diagram.confidence[:2].isnan().all()
        assert diagram.ece == pytest.approx((0.41 + 2 * 0.16 + 0.07) / 4)

    def test_reliability_and_evaluate_agree_also_at_certainty(self):
        outputs = 6 * random(3, 200, 3)
        outputs[:, :20] *= 1000  # probabilities of exactly 1
        y = torch.arange(200) % 3
        for made in (outputs, outputs.float()):
            predictive = categorical(made)
            assert (predictive.confidence == 1).any()
            diagram = metrics.reliability(predictive, y)
            assert diagram.count.sum() == 200
            assert diagram.ece == pytest.approx(metrics.evaluate(predictive, y)["ece"], abs=1e-9)

    def test_certainty_shares_the_last_bin(self):
        predictive, y = from_probs((0.95, 0.05), (1.0, 0.0)), torch.tensor([0, 1])
        assert metrics.evaluate(predictive, y)["ece"] == pytest.approx(0.975 - 0.5)
        assert metrics.reliability(predictive, y).ece == pytest.approx(0.975 - 0.5)

    def test_ece_is_the_one_of_the_top_class(self):
        from torchmetrics.functional.classification import multiclass_calibration_error

        outputs, y = 2 * random(3, 300, 4), torch.arange(300) % 4
        predictive = categorical(outputs)
        expected = multiclass_calibration_error(predictive.probs, y, num_classes=4, n_bins=15, norm="l1")
        assert metrics.evaluate(predictive, y)["ece"] == pytest.approx(float(expected), abs=1e-6)

    def test_one_logit_scores_as_two_classes(self):
        logit, y = random(6, 50, 1), torch.arange(50) % 2
        two = categorical(torch.cat((torch.zeros_like(logit), logit), dim=-1))
        for target in (y, y[:, None], y.float()):
            assert metrics.evaluate(bernoulli(logit), target) == pytest.approx(metrics.evaluate(two, y))
        one = bernoulli(logit)
        assert metrics.evaluate(one, y)["brier"] == pytest.approx(2 * float((one.probs[:, 0] - y).square().mean()))

    def test_several_labels_count_as_so_many_predictions(self):
        outputs = random(4, 30, 3)
        y = (random(30, 3, seed=2) > 0).float()
        scores = metrics.evaluate(bernoulli(outputs), y)
        parts = [metrics.evaluate(bernoulli(outputs[..., o]), y[:, o]) for o in range(3)]
        for name in ("accuracy", "brier"):
            assert scores[name] == pytest.approx(sum(part[name] for part in parts) / 3)
        single = metrics.evaluate(bernoulli(outputs[:1]), y)["nll"]
        assert single == pytest.approx(
            sum(metrics.evaluate(bernoulli(outputs[:1, :, o]), y[:, o])["nll"] for o in range(3))
        )


class TestOod:
    def test_auroc_is_the_share_of_ordered_pairs(self):
        inside, outside = categorical(4 * random(8, 40, 3)), categorical(2 * random(8, 30, 3, seed=1))
        found = metrics.ood(inside, outside)
        assert set(found) == {
            f"{kind}_{name}"
            for kind in ("auroc", "aupr")
            for name in ("max_probability", "entropy", "mutual_information")
        }
        for name, low, high in (
            ("max_probability", -inside.confidence, -outside.confidence),
            ("entropy", inside.entropy, outside.entropy),
            ("mutual_information", inside.mutual_information, outside.mutual_information),
        ):
            pairs = (high[:, None] > low[None, :]).double() + 0.5 * (high[:, None] == low[None, :]).double()
            assert found[f"auroc_{name}"] == pytest.approx(float(pairs.mean()), abs=1e-6)

    def test_average_precision_by_hand(self):
        # By entropy from high to low: outside, inside, outside, inside.
        inside = from_probs((0.6, 0.4), (0.99, 0.01))
        outside = from_probs((0.5, 0.5), (0.8, 0.2))
        found = metrics.ood(inside, outside)
        assert found["aupr_entropy"] == pytest.approx((1 / 1 + 2 / 3) / 2)
        assert found["auroc_entropy"] == pytest.approx(3 / 4)

    def test_a_single_function_cannot_rank_by_mutual_information(self):
        point = random(1, 60, 5).float().expand(32, 60, 5).contiguous()
        found = metrics.ood(categorical(point[:, :30]), categorical(0.1 * point[:, 30:]))
        assert found["auroc_mutual_information"] == 0.5
        assert found["auroc_entropy"] > 0.9
        mean = 100 * random(1, 60, 1).float().expand(32, 60, 1).contiguous()
        assert metrics.ood(gaussian(mean[:, :30]), gaussian(mean[:, 30:]))["auroc_epistemic"] == 0.5

    def test_regression_ranks_by_variance_of_any_size(self):
        spread = torch.logspace(3, 6, 20, dtype=torch.float64)[:, None]
        direction = torch.tensor([-1.0, 1.0], dtype=torch.float64)[:, None, None]
        inside, outside = gaussian(direction * spread[:12]), gaussian(direction * spread[12:])
        assert metrics.ood(inside, outside) == {
            "auroc_epistemic": 1.0, "aupr_epistemic": 1.0, "auroc_variance": 1.0, "aupr_variance": 1.0
        }  # fmt: skip
        assert metrics.ood(outside, inside)["auroc_variance"] == 0.0

    @pytest.mark.parametrize(("low", "high"), [(3, 7), (12, 8), (49, 100), (1000, 37)])
    def test_perfect_and_hopeless_are_exact(self, low, high):
        """Areas of counts, not sums of rounded steps: 1 and 0 for any number of examples, 1/2 for ties."""
        ranks = torch.arange(low + high)
        assert areas(ranks[:low], ranks[low:]) == (1.0, 1.0)
        assert areas(ranks[high:], ranks[:high])[0] == 0.0
        equal = torch.zeros(low + high, dtype=torch.long)
        assert areas(equal[:low], equal[low:]) == (0.5, high / (low + high))

    def test_areas_with_ties_are_torchmetrics(self):
        from torchmetrics.functional.classification import binary_auroc, binary_average_precision

        ranks = torch.randint(15, (200,), generator=torch.Generator().manual_seed(0))
        target = (torch.arange(200) >= 120).long()
        found = areas(ranks[:120], ranks[120:])
        scores = ranks / 15  # float32, as torchmetrics adds up: 1e-5 is some steps of it
        assert found[0] == pytest.approx(float(binary_auroc(scores, target)), abs=1e-5)
        assert found[1] == pytest.approx(float(binary_average_precision(scores, target)), abs=1e-5)

    def test_several_labels_give_one_score_per_example(self):
        found = metrics.ood(bernoulli(5 * random(4, 20, 3)), bernoulli(0.1 * random(4, 25, 3, seed=1)))
        assert found["auroc_entropy"] == 1.0
        assert found["auroc_max_probability"] == 1.0

    def test_two_kinds_are_refused(self):
        with pytest.raises(ValueError, match="two predictions of the same kind"):
            metrics.ood(gaussian(random(2, 3, 1)), categorical(random(2, 3, 4)))


class TestRejection:
    def test_by_hand(self):
        predictive = from_probs((0.9, 0.1), (0.8, 0.2), (0.7, 0.3), (0.6, 0.4))
        curve = metrics.rejection_curve(predictive, torch.tensor([0, 0, 1, 0]), num_points=4)
        assert curve.rejected.tolist() == [0.0, 0.25, 0.5, 0.75]
        assert curve.accuracy.tolist() == pytest.approx([3 / 4, 2 / 3, 1.0, 1.0])
        assert curve.best.tolist() == pytest.approx([3 / 4, 1.0, 1.0, 1.0])
        assert curve.area == pytest.approx((3 / 4 + 2 / 3 + 2) / 4)

    def test_examples_from_elsewhere_are_errors(self):
        predictive = from_probs((0.9, 0.1), (0.8, 0.2))
        outside = from_probs((0.7, 0.3), (0.85, 0.15))
        curve = metrics.rejection_curve(predictive, torch.zeros(2), outside=outside, num_points=4, by="max_probability")
        assert curve.accuracy.tolist() == pytest.approx([2 / 4, 2 / 3, 1 / 2, 1.0])

    def test_ties_are_the_expectation_over_orders(self):
        predictive = from_probs((0.9, 0.1), (0.6, 0.4), (0.6, 0.4), (0.6, 0.4))
        curve = metrics.rejection_curve(predictive, torch.tensor([0, 0, 1, 1]), num_points=4)
        third = 1 / 3
        assert curve.accuracy.tolist() == pytest.approx([0.5, (1 + 2 * third) / 3, (1 + third) / 2, 1.0])

    @pytest.mark.parametrize("by", ["max_probability", "entropy", "mutual_information"])
    def test_all_orders_start_at_the_accuracy(self, by):
        predictive, y = categorical(random(5, 77, 3)), torch.arange(77) % 3
        curve = metrics.rejection_curve(predictive, y, by=by)
        assert len(curve.accuracy) == 100
        assert float(curve.accuracy[0]) == pytest.approx(metrics.evaluate(predictive, y)["accuracy"])
        assert (curve.accuracy <= curve.best + 1e-12).all()

    def test_an_example_with_several_labels_is_right_if_all_are(self):
        outputs = torch.tensor([[[3.0, 3.0], [3.0, -3.0]]])
        curve = metrics.rejection_curve(bernoulli(outputs), torch.ones(2, 2), num_points=1)
        assert curve.accuracy.tolist() == [0.5]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.evaluate(gaussian(random(2, 3, 1)), torch.ones(4)), ValueError, "do not fit"),
        (
            lambda: metrics.evaluate(gaussian(random(2, 3, 1)), torch.tensor([1.0, math.nan, 0.0])),
            ValueError,
            "hold nan",
        ),
        (
            lambda: metrics.evaluate(categorical(random(2, 3, 4)), torch.tensor([0, 4, 1])),
            ValueError,
            "label 4 is not one",
        ),
        (lambda: metrics.evaluate(categorical(random(2, 3, 4)), torch.tensor([0, -100, 1])), ValueError, "label -100"),
        (lambda: metrics.evaluate(bernoulli(random(2, 3)), torch.tensor([0.5, 0, 1])), ValueError, "label 0.5"),
        (lambda: metrics.evaluate(categorical(random(2, 3, 4)), torch.zeros(3, 4)), ValueError, "do not fit"),
        (lambda: metrics.evaluate(random(2, 3), torch.zeros(3)), TypeError, "give a Predictive"),
        (lambda: metrics.reliability(categorical(random(2, 3, 4)), torch.zeros(3), 0), ValueError, "num_bins=0"),
        (
            lambda: metrics.calibration_curve(gaussian(random(2, 3, 1)), torch.ones(3), [1.0]),
            ValueError,
            "strictly between 0 and 1",
        ),
        (lambda: metrics.rejection_curve(categorical(random(2, 3, 4)), torch.zeros(3), by="x"), ValueError, "by='x'"),
        (
            lambda: metrics.rejection_curve(gaussian(random(2, 3, 1)), torch.zeros(3)),
            TypeError,
            "give a ClassificationPredictive",
        ),
        (
            lambda: metrics.ood(categorical(math.nan * random(2, 3, 4)), categorical(random(2, 3, 4))),
            ValueError,
            "not finite",
        ),
    ],
)
def test_bad_values_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
