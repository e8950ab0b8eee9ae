"""The members of the default classifier: two networks per fold, of which one sees no piecewise-linear encodings."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.7")

from bayesify.sklearn import BayesianClassifier, recipe
from bayesify.training.hold_out import make_folds
from bayesify.training.random_streams import derive_seed


def _table(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Two number columns with eight or 16 bins each, a column of zeros and ones without bins, and three classes."""
    generator = np.random.default_rng(0)
    x = np.column_stack((generator.standard_normal((num_rows, 2)), generator.integers(0, 2, num_rows)))
    return x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.3)


def _first_layer(model: BayesianClassifier) -> torch.Tensor:
    """Weights of the first layer of each network, [networks, H, E]."""
    return next(iter(model.model_.posterior.value.values()))


def test_half_of_the_networks_see_only_scaled_numbers() -> None:
    x, y = _table(120)
    model = BayesianClassifier(epochs=40, random_state=0, method_options={"members": 3}).fit(x, y)
    weights, num_scaled = _first_layer(model), model.fitted_.encoding.num_scaled
    assert weights.shape[::2] == (6, 3 + 2 * 8)
    assert num_scaled == 3
    assert (weights[:3] != 0).all()
    assert (weights[3:, :, num_scaled:] == 0).all()
    assert (weights[3:, :, :num_scaled] != 0).all()
    assert model.choices_["members"] == len(model.choices_["steps"]) == 6


def test_each_row_is_judged_by_the_two_networks_that_have_not_seen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = _table(1100)  # so many rows are neither merged nor split for stopping
    monkeypatch.setattr(recipe, "fit_temperatures", lambda *_: torch.ones(6))
    model = BayesianClassifier(epochs=40, random_state=0).fit(x, y)
    net, inputs = model.fitted_.network.make(0).eval(), model.fitted_.encode(x)
    members = [{name: value[k] for name, value in model.model_.posterior.value.items()} for k in range(10)]
    with torch.no_grad():
        logits = torch.stack([torch.func.functional_call(net, weights, inputs) for weights in members])
    probs = logits.softmax(-1).numpy()  # [10, N, C]
    folds = make_folds(len(y), 5, derive_seed(model.fitted_.seed, "folds"), y)
    rows = np.arange(len(y))
    expected = (probs[folds, rows] + probs[5 + folds, rows]) / 2
    held = model.fitted_.held_out
    assert held is not None
    np.testing.assert_allclose(held.probs, expected, rtol=1e-4, atol=1e-6)
    loss = -np.log(expected[rows, y]).mean()
    assert model.choices_["out_of_fold_score"] == pytest.approx(loss, rel=1e-5)
