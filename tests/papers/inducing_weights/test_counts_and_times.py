"""Tables of parameters."""

import pytest
from bayesify_papers.inducing_weights import parameters
from bayesify_papers.shared.tables import table

from bayesify.posteriors import MeanField


def test_counts_are_the_published_ones(smoke):
    done = smoke("inducing-weights/parameters")
    assert "1,384,662" in done.printed
    assert [row["difference"] for row in done.rows if row["metric"] == "parameters"] == [0.0] * 3
    assert parameters.count(MeanField()) == 46_988_564


def test_a_size_that_is_not_published():
    with pytest.raises(ValueError, match="no number for M=17; choose from 16"):
        parameters.rows([17])


def test_tables_align():
    text = table(["name", "n"], [["a", "1"], ["long name", "200"]], "title")
    assert text.splitlines() == ["title", "name         n", "---------  ---", "a            1", "long name  200"]
