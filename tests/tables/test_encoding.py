"""Inputs of networks on tables: scaling with a soft limit, piecewise-linear encodings, weights as copies."""

import numpy as np

from bayesify.tables.encoding import NUM_BINS, SOFT_LIMIT_STD, Encoding


def test_encodings_count_the_bins_below():
    x = np.arange(17.0)[:, None]
    encoding = Encoding.piecewise(x, np.ones(17))
    found = encoding(np.array([[-5.0], [0.0], [8.0], [16.0], [1e9]]))
    assert found.shape == (5, 1 + NUM_BINS)
    assert found[:, 1:].sum(1).tolist() == [
        0,
        0,
        np.interp(8, encoding.bounds[0], range(NUM_BINS + 1)),
        NUM_BINS,
        NUM_BINS,
    ]
    assert np.abs(found[:, 0]).max() <= SOFT_LIMIT_STD
    assert found[2, 0] == 0


def test_marks_have_no_encoding_and_weights_are_copies():
    draw = np.random.default_rng(0)
    x = np.column_stack((draw.normal(size=30), draw.random(30) < 0.5))
    weights = draw.integers(1, 4, 30).astype(float)
    one = Encoding.piecewise(x, weights)
    other = Encoding.piecewise(np.repeat(x, weights.astype(int), axis=0), np.ones(int(weights.sum())))
    assert len(one.bounds[1]) == 0
    assert np.allclose(one(x), other(x))
    again = Encoding.restore(one.config())
    assert np.array_equal(again(x), one(x))
