"""Networks side by side start as said, have the evidence as their bound where it is known, and do not touch each other."""

import math

import pytest
import torch
from bayesify_papers.global_inducing import stacked_training
from bayesify_papers.global_inducing.networks import FILLED_PRECISION, Design, make, stack
from torch import Tensor, nn

import bayesify
from bayesify.training import StackedBatch

SIZES = (2, 5, 4, 1)


def data(replicas: int = 2, rows: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(replicas, rows, 2, generator=generator), torch.randn(replicas, rows, 1, generator=generator)


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of a network's posteriors by the end of their names."""
    return {name.partition(".")[2].partition(".")[2]: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kinds", [("gi",) * 3, ("fac", "fac", "gi"), ("rand", "rand", "gi")])
@pytest.mark.parametrize("rows", [4, 9])
def test_global_inducing_points_start_at_data_in_the_last_layer(kinds: tuple[str, ...], rows: int) -> None:
    """Six points: all four rows and two standard normal ones of little precision, or six of nine rows that stand for all."""
    x, y = (part[0] for part in data(rows=rows))
    start = named(make(Design(SIZES, kinds, points=6), x, y, 0.5))
    both = torch.cat((start["inducing_inputs.learned.input 0"], start["pseudo_outputs.4"]), 1).tolist()
    assert sum(row in torch.cat((x, y), 1).tolist() for row in both) == min(rows, 6)
    known, filled = math.log(max(1, rows / 6) / 0.5), math.log(FILLED_PRECISION)
    assert start["log_precision.4"].tolist() == pytest.approx([known] * min(rows, 6) + [filled] * max(0, 6 - rows))
    assert ("pseudo_outputs.0" in start) == (kinds[0] == "gi")
    if kinds[0] == "gi":
        assert start["log_precision.2"].tolist() == pytest.approx([math.log(0.1)] * 6)


def test_other_layers_start_as_they_are_said_to() -> None:
    x, y = (part[0] for part in data())
    start = named(make(Design(SIZES, ("li",) * 3, points=6), x, y, 0.5))
    assert not start["pseudo_outputs.4"].any()
    assert start["log_precision.4"].tolist() == pytest.approx([math.log(9 / 6 / 0.5)] * 6)
    assert start["log_precision.2"].tolist() == pytest.approx([math.log(0.1)] * 6)
    start = named(make(Design((400, 300, 1), ("fac",) * 2, "standard", start_std=0.3), torch.zeros(3, 400), y[:3], 0.5))
    assert float(start["raw_std.0/weight"].unique().exp()) == pytest.approx(0.3 / 20)
    assert float(start["raw_std.2/bias"].unique().exp()) == pytest.approx(0.3 / math.sqrt(300))
    means = start["mean_value.0/weight"]  # n = 120,000, k = 5 standard errors of a deviation
    assert float(means.std()) == pytest.approx(1 / 20, rel=5 / math.sqrt(2 * means.numel()))


def test_bound_of_one_linear_layer_is_the_evidence() -> None:
    """With U_0 = X, V = Y and the noise's precision; n draws, k = 5 standard errors."""
    made = bayesify.datasets.toy.linear(30, 3, prior_std=math.sqrt(1 / 3), noise=0.2)
    design = Design((3, 1), ("gi",), "neal", points=30, bias=False, linear=True)
    alone = stack(design, made.x[None], made.y[None], 0.2)
    with torch.no_grad():
        data, kl = alone.terms(StackedBatch(made.x[None], made.y[None]), num_data=30, num_draws=200)
    values = data - kl
    error = float(values.std()) / math.sqrt(200)
    assert abs(float(values.mean()) - made.posterior.log_evidence) < 5 * error


@pytest.mark.parametrize(
    "kinds", [("fac",) * 3, ("li",) * 3, ("gi",) * 3, ("fac", "fac", "gi"), ("rand", "rand", "gi")]
)
def test_networks_of_a_stack_are_apart_and_all_learn(kinds: tuple[str, ...]) -> None:
    x, y = data()
    both = stack(Design(SIZES, kinds, "scale", points=5), x, y)
    terms = both.terms(StackedBatch(x, y), num_data=9, num_draws=1)
    (terms[0] - terms[1])[0].sum().backward()
    assert both.loop_reason is None
    for name, parameter in both.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad[1].abs().sum()) == 0, name
        if "alpha" in name or "beta" in name:
            continue
        assert float(parameter.grad[0].abs().sum()) > 0, name


def test_designs_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="2 kinds for 3 layers"):
        Design(SIZES, ("fac", "gi"))
    with pytest.raises(ValueError, match="kinds='hmc'; give one of fac"):
        Design(SIZES, ("fac", "gi", "hmc"))
    with pytest.raises(ValueError, match="prior='laplace'; give one of neal"):
        Design(SIZES, ("gi",) * 3, "laplace")
    for kinds in (("gi", "gi", "fac"), ("li", "li", "gi"), ("fac", "rand", "gi"), ("rand",) * 3):
        with pytest.raises(ValueError, match="one kind for all layers, or gi after layers of fac or rand"):
            Design(SIZES, kinds)


def test_the_weight_of_the_kl_rises() -> None:
    schedule = stacked_training.Schedule(steps=100, learning_rate=0.1, warmup=0.2, first_weight=0.1)
    assert schedule.kl_weight(0) == pytest.approx(0.1)
    assert schedule.kl_weight(10) == pytest.approx(0.55)
    assert schedule.kl_weight(20) == 1.0


def test_factorized_layers_below_global_inducing_points_train_without_a_skipped_step() -> None:
    """fac-gi at the papers' learning rate, for inputs of the usual size and of thirty times that, in float32."""
    x, y = data(rows=40)
    x, y = torch.tensor([1.0, 30.0])[:, None, None] * x, (x.sum(-1, keepdim=True) + 0.1 * y).tanh()
    both = stack(Design(SIZES, ("fac", "fac", "gi"), "neal", points=12), x, y, seed=1)
    before = stacked_training.bounds(both, x, y)
    outcome = stacked_training.train(both, x, y, stacked_training.Schedule(steps=80, learning_rate=2e-2))
    assert outcome.skipped_steps == [0, 0]
    assert bool((stacked_training.bounds(both, x, y) > before + 10).all())
