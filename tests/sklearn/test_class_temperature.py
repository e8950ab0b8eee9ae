"""The temperature of the default classifier."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")

import bayesify
from bayesify.likelihoods import Categorical
from bayesify.predictive.base import Outputs
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.sklearn import BayesianClassifier, recipe
from bayesify.sklearn.rows import Rows

NUM_FOLDS = 5
LOG_STEP = -np.log(recipe.MIN_TEMPERATURE) / (recipe.NUM_TEMPERATURES - 1)


def _held_out(confidence: float, num_classes: int = 3, num_rows: int = 200) -> tuple[np.ndarray, Rows, np.ndarray]:
    """Logits [N, C] of classes drawn with the probabilities softmax(confidence * logits), rows of weight 0.5 to 2, and folds."""
    generator = np.random.default_rng(0)
    logits = 2 * generator.standard_normal((num_rows, num_classes))
    noise = generator.gumbel(size=logits.shape)
    y, weights = (confidence * logits + noise).argmax(1), generator.uniform(0.5, 2, num_rows)
    return logits, Rows(np.zeros((num_rows, 1)), y, weights), np.arange(num_rows) % NUM_FOLDS


def _fitted(logits: np.ndarray, rows: Rows, folds: np.ndarray) -> np.ndarray:
    found = Categorical().predictive(Outputs(kept=torch.from_numpy(logits)[None]))
    assert isinstance(found, ClassificationPredictive)
    return recipe.fit_temperatures(found, rows, folds).numpy()


def _penalized(logits: np.ndarray, rows: Rows, log_temperature: float) -> float:
    scaled = logits / np.exp(log_temperature)
    log_probs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    loss = -(rows.weights * log_probs[np.arange(len(rows.y)), rows.y]).sum()
    return float(loss + log_temperature**2 / (2 * recipe.LOG_TEMPERATURE_STD**2))


@pytest.mark.parametrize("num_classes", [2, 3, 20])
def test_temperatures_minimize_the_penalized_loss(num_classes: int) -> None:
    logits, rows, folds = _held_out(2.0, num_classes)
    dense = np.linspace(np.log(0.2), 0.0, 161)
    found = _fitted(logits, rows, folds)
    for temperature, used in zip(found, [folds >= 0, *(folds != fold for fold in range(NUM_FOLDS))], strict=True):
        best = dense[np.argmin([_penalized(logits[used], rows[used], log) for log in dense])]
        assert abs(np.log(temperature) - best) <= LOG_STEP / 2 + 0.01
        assert temperature < 0.8


@pytest.mark.parametrize("confidence", [0.3, 0.8])
def test_networks_that_are_too_certain_keep_their_probabilities(confidence: float) -> None:
    assert (_fitted(*_held_out(confidence)) == 1).all()


def test_weights_count_as_copies() -> None:
    logits, rows, folds = _held_out(2.0)
    counts = np.arange(len(folds)) % 3 + 1
    again = np.repeat(np.arange(len(folds)), counts)
    weighted = _fitted(logits, Rows(rows.x, rows.y, counts.astype(float)), folds)
    copies = _fitted(logits[again], Rows(rows.x[again], rows.y[again], np.ones(len(again))), folds[again])
    assert (weighted == copies).all()
    assert (weighted != _fitted(logits, rows, folds)).any()


def test_a_class_that_no_other_fold_has_keeps_the_probabilities() -> None:
    """The only row of its class has a probability of about exp(-50). Sharper probabilities would cost this row more than all other
    rows would gain."""
    logits, rows, folds = _held_out(2.0)
    logits = np.concatenate((logits, np.full((len(logits), 1), -50.0)), 1)
    rows.y[7] = 3
    found = _fitted(logits, rows, folds)
    assert found[0] == 1
    assert found[1 + folds[7]] < 0.8


def test_sharper_probabilities_can_lower_the_loss_of_overconfident_predictions() -> None:
    """The rows are right less often than their probabilities say, but the wrong rows are unsure. The log-loss falls."""
    margins = np.concatenate((np.full(80, 3.0), np.full(20, 0.5)))
    logits, y = np.stack((margins, np.zeros(100)), 1), np.repeat([0, 1], [80, 20])
    rows = Rows(np.zeros((100, 1)), y, np.ones(100))
    assert (y == 0).mean() < (1 / (1 + np.exp(-margins))).mean()
    temperature = _fitted(logits, rows, np.arange(100) % NUM_FOLDS)[0]
    assert temperature < 1
    loss, sharper = (_penalized(logits, rows, log) - log**2 / (2 * 0.35**2) for log in (0.0, np.log(temperature)))
    assert sharper < loss


@pytest.mark.parametrize("heavy", [1.0, 1e16, 1e30])
def test_the_temperature_of_the_other_folds_does_not_depend_on_a_fold(heavy: float) -> None:
    logits, rows, folds = _held_out(2.0)
    others, scale = folds != 2, np.where(folds == 2, heavy, 1.0)
    weighted = _fitted(logits, Rows(rows.x, rows.y, scale * rows.weights), folds)
    assert weighted[3] == _fitted(logits[others], rows[others], folds[others])[0]


def _separable() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((90, 3))
    return x, (x[:, 0] > 0.4).astype(int) + (x[:, 0] > -0.4)


def test_the_last_layer_contains_the_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = _separable()
    outputs, given = [], list[ClassificationPredictive]()
    for temperatures in ([1.0] * 6, [0.5, *[0.25] * 5]):

        def fit(found: ClassificationPredictive, *_: object, values: list[float] = temperatures) -> torch.Tensor:
            given.append(found)
            return torch.tensor(values).double()

        monkeypatch.setattr(recipe, "fit_temperatures", fit)
        model = BayesianClassifier(epochs=30, random_state=0).fit(x, y)
        outputs.append(model.predictive(x).outputs)
        held = model.fitted_.held_out
        assert held is not None
        # Each fold is scored at the temperature of the other folds; two networks predict each row.
        logits = given[-1].outputs.double() / temperatures[1]  # [2, N, C], with merged rows in sorted order
        expected = logits.softmax(-1).mean(0)[np.argsort(np.lexsort(x.T[::-1]))]
        np.testing.assert_allclose(held.probs, expected, rtol=1e-5)
        loss = -np.log(held.probs[np.arange(len(y)), y]).mean()
        assert model.choices_["out_of_fold"]["log_loss"] == pytest.approx(loss, rel=1e-6)
        notes = [note for note in model.choices_["left_out"] if "temperature 0.50), because this lowers" in note]
        assert len(notes) == (temperatures[0] < 1)
    torch.testing.assert_close(outputs[1], 2 * outputs[0], rtol=1e-12, atol=0)


def test_a_separable_table_is_sharpened_and_stored(tmp_path: Path) -> None:
    x, y = _separable()
    model = BayesianClassifier(epochs=60, random_state=0).fit(x, y)
    said = [note for note in model.choices_["left_out"] if "(temperature 0." in note]
    assert len(said) == 1
    bayesify.save(model, tmp_path / "model.safetensors")
    loaded: Any = bayesify.load(tmp_path / "model.safetensors")
    assert np.array_equal(model.predict_proba(x), loaded.predict_proba(x))
    assert loaded.choices_["left_out"] == model.choices_["left_out"]
    weighted = BayesianClassifier(epochs=60, random_state=0).fit(x, y, sample_weight=np.full(len(y), 2.0))
    assert np.array_equal(
        weighted.predict_proba(x),
        BayesianClassifier(epochs=60, random_state=0)
        .fit(np.concatenate((x, x)), np.concatenate((y, y)))
        .predict_proba(x),
    )
