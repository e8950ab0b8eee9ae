"""The five functions have their known values, and samples of them fill the box."""

from __future__ import annotations

import math

import pytest
import torch
from bayesify_papers.walsh_hadamard import computer_experiments
from bayesify_papers.walsh_hadamard.computer_experiments import SIMULATORS, sample


def at(name: str, *x: float) -> float:
    return float(SIMULATORS[name](torch.tensor(x, dtype=torch.float64)))


def test_hartmann_at_its_minimum():
    place = (0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573)
    assert at("hartmann6", *place) == pytest.approx(-3.32237, abs=5e-6)
    x = torch.tensor(place, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(computer_experiments.hartmann(x), x)
    assert float(slope.abs().max()) < 1e-3  # the place is given to six digits, curvatures are below 100
    assert float(sample("hartmann6", 4096)[1].min()) > -3.3224


def test_hartmann_at_a_center():
    first = computer_experiments.HARTMANN_CENTERS[0]
    rest = 0.0
    for height, widths, center in zip(
        (1.2, 3.0, 3.2),
        computer_experiments.HARTMANN_WIDTHS[1:],
        computer_experiments.HARTMANN_CENTERS[1:],
        strict=True,
    ):
        rest += height * math.exp(-sum(a * (x - p) ** 2 for a, x, p in zip(widths, first, center, strict=True)))
    assert at("hartmann6", *first) == pytest.approx(-1.0 - rest, rel=1e-12)


def test_rastrigin():
    assert at("rastrigin5", 0, 0, 0, 0, 0) == 0.0
    assert at("rastrigin5", 1, -2, 3, 0, 0) == pytest.approx(14.0)  # at integers the waves are at their lowest
    assert at("rastrigin5", 0.5, 0.5, 0.5, 0.5, 0.5) == pytest.approx(5 * (10 + 0.25 + 10))


def test_borehole_at_the_middle_of_its_box():
    # By hand: the flow through three resistances in a row, that of the ground around, of the pipe and of the lower aquifer.
    ground = math.log(25050 / 0.1) / (2 * math.pi * 89335)
    pipe = 1400 / (math.pi * 0.1**2 * 10950)
    lower = math.log(25050 / 0.1) / (2 * math.pi * 89.55)
    expected = (1050 - 760) / (ground + pipe + lower)
    assert at("borehole", 0.1, 25050, 89335, 1050, 89.55, 760, 1400, 10950) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(70.87291, abs=1e-5)


def test_robot_arm():
    assert at("robot_arm", 0, 0, 0, 0, 1, 1, 1, 1) == pytest.approx(4.0)
    quarter = math.pi / 2
    assert at("robot_arm", 0, quarter, quarter, quarter, 1, 1, 1, 1) == pytest.approx(0.0, abs=1e-15)  # a square
    assert at("robot_arm", 1.0, quarter, 0, 0, 0.6, 0.8, 0, 0) == pytest.approx(1.0)  # a right angle, legs 0.6 and 0.8
    assert at("robot_arm", 0.3, math.pi, 0, 0, 0.9, 0.4, 0, 0) == pytest.approx(0.5)


def test_otl_circuit():
    # By hand: V_b = 12 * 50 / 150 = 4, g = 100 * (1 + 9) = 1000; 4740 / 1002 + 22.7 / 1002 + 1480 / 2004.
    assert at("otl_circuit", 100, 50, 2, 2, 1, 100) == pytest.approx((4740 + 22.7 + 740) / 1002, rel=1e-12)


@pytest.mark.parametrize("name", SIMULATORS)
def test_samples_fill_the_box(name):
    simulator = SIMULATORS[name]
    x, y = sample(name, 1024, seed=3)
    assert x.shape == (1024, simulator.num_inputs)
    assert y.shape == (1024, 1)
    within = x.double().sort(dim=0).values * 1024 - torch.arange(1024)[:, None]
    assert float(within.min()) > -1e-4  # a Sobol net has one point in each of 1024 slices; x is rounded to float32
    assert float(within.max()) < 1 + 1e-4
    values = simulator(simulator.rescale(x.double()))
    torch.testing.assert_close(y[:, 0].double(), values, rtol=1e-4, atol=1e-4)


def test_sizes_and_dimensions_are_the_papers():
    found = {name: (simulator.num_points, simulator.num_inputs) for name, simulator in SIMULATORS.items()}
    assert found == {
        "borehole": (200_000, 8),
        "hartmann6": (30_000, 6),
        "rastrigin5": (10_000, 5),
        "robot_arm": (150_000, 8),
        "otl_circuit": (20_000, 6),
    }
    assert len(sample("rastrigin5")[0]) == 10_000


def test_seeds():
    first, again, other = (sample("otl_circuit", 64, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bad_arguments():
    with pytest.raises(ValueError, match="unknown function 'ackley'; known: borehole"):
        sample("ackley")
    with pytest.raises(ValueError, match="x has 3 inputs; give 8: r_w, r"):
        SIMULATORS["borehole"](torch.zeros(2, 3))
