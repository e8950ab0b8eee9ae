"""How the width of the default prior is chosen: by the rule that is written down, on rows made by hand."""

from pathlib import Path

import pytest

from benchmarks import defaults
from benchmarks import prior_widths as widths
from tools import defaults_page as page

FINE = {
    "accuracy": 0.9,
    "nll": 0.3,
    "ece": 0.01,
    "mutual_information": 0.01,
    "mutual_information_outside": 0.05,
    "auroc_entropy": 0.9,
    "seconds": 1.0,
}


def made(change):
    """A row for every cell: that of the plain network, with what `change(width, network, method, more)` says."""
    rows = []
    for seed in widths.SEEDS:
        names = (*widths.OUTSIDE_NETWORKS, *widths.SUITE_NETWORKS)
        rows += [{"network": name, "seed": seed, "method": "network", **FINE} for name in names]
        for network, method, more in widths.pairs():
            for width in widths.WIDTHS:
                key = f"{method},{widths.variant(width, more)}"
                row = {"network": network, "seed": seed, "method": key, **FINE}
                rows.append(row | change(width, network, method, more))
    return rows


def chosen(change):
    found = widths.judged(made(change))
    assert len(found) == len(widths.pairs())
    return widths.choose(widths.totals(found))


def test_cells_are_of_seeds_that_are_not_reported():
    plain, cells = widths.jobs(Path("none"), "cpu")
    assert {job[1] for job in plain + cells} == {10, 11}
    assert {job[:2] for job in cells} == {job[:2] for job in plain}
    assert len(cells) == len(set(cells)) == 2 * 4 * 6 * (7 + 2)


def test_the_most_bounds_are_chosen():
    def change(width, network, method, more):
        return {"nll": 0.33} if width != 8 and network == "strided_cnn" else {"nll": 0.3 - width / 1000}

    assert chosen(change) == 8


def test_the_lowest_nll_is_chosen_where_bounds_hardly_differ():
    def change(width, network, method, more):
        misses = width == 16 and (network, method, more) in widths.pairs()[:2]
        return {"ece": 0.05} if misses else {"nll": 0.29 if width == 16 else 0.3}

    assert chosen(change) == 16


def test_a_width_that_costs_the_suite_its_bounds_is_out():
    def change(width, network, method, more):
        if width == 32:
            return {"accuracy": 0.88} if network == "gru" and not more else {}
        return {"nll": 0.4} if network in widths.OUTSIDE_NETWORKS else {"nll": 0.3 - width / 1000}

    assert widths.totals(widths.judged(made(change)))[32]["kept"] > 6 * len(widths.pairs()) - 10
    assert chosen(change) == 16


def test_an_error_keeps_no_bound_and_leaves_the_nll_to_other_pairs():
    def change(width, network, method, more):
        failed = width == 8 and method == "rank_one" and network == "cnn"
        return (
            {"error": "ValueError"} if failed else {"nll": 0.31 if method == "rank_one" and network == "cnn" else 0.3}
        )

    sums = widths.totals(widths.judged(made(change)))
    assert sums[4]["kept"] - sums[8]["kept"] == 6
    assert sums[4]["nll"] == sums[8]["nll"] == pytest.approx(0.0)


def test_a_pair_with_a_cell_that_was_cut_is_not_judged():
    rows = made(lambda *_: {})
    network, method, more = widths.pairs()[3]
    cut = next(
        row for row in rows if row["method"] == f"{method},{widths.variant(16, more)}" and row["network"] == network
    )
    found = widths.judged([row for row in rows if row is not cut])
    assert set(widths.pairs()) - set(found) == {widths.pairs()[3]}


def test_networks_outside_the_suite_are_those_of_a_user():
    sizes = {
        name: sum(weight.numel() for weight in defaults.NETWORKS[name][0]().parameters())
        for name in widths.OUTSIDE_NETWORKS
    }
    assert sizes == {"strided_cnn": 106_122, "mlp_6000": 178_110}
    assert set(page.NETWORKS) == {*widths.SUITE_NETWORKS, "normalized_cnn"}  # which came later
    assert not any(page.judged((name, "mean_field")) for name in widths.OUTSIDE_NETWORKS)


def test_a_cell_that_would_end_too_late_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(widths, "begun", lambda job, end: end)
    (tmp_path / "cnn-10-dropout,prior=neal8.json").write_text('{"training": 3.0}')
    job = ("cnn", 10, "dropout", "prior=neal8", tmp_path, "cpu")
    assert widths._begin(job, 100.0) == 100.0
    assert widths._begin((*job[:3], "prior=neal8,epochs=30", *job[4:]), 100.0) == 70.0
    assert widths._begin((*job[:3], "prior=neal4,epochs=30", *job[4:]), 100.0) == 100.0


def test_results_that_are_there_are_read_when_the_time_is_over(tmp_path):
    job = ("cnn", 10, "dropout", "prior=neal8", tmp_path, "cpu")
    assert widths._begin(job, 0.0) is None
    (tmp_path / "cnn-10-dropout,prior=neal8.json").write_text('{"training": 3.0}')
    assert widths._begin(job, 0.0) == {"training": 3.0}
