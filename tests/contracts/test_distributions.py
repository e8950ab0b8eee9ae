"""Every predictive distribution tells one story: cdf, quantiles, intervals, centrality, densities, atoms, scores and moments agree.

Families are those of the likelihoods of the registry, and predictives are all classes of the package: a new likelihood is tested
without a line here, and a family or a class of predictives that no case builds fails `test_every_class_is_built`.
Each case is one distribution, repeated in as many rows as places are asked for. The references are integrals by Gauss and
Legendre's rule between quantiles; their own error is what halving the pieces changes.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import bayesify
import bayesify.predictive.families.gaussian
from bayesify import ClassificationPredictive, RegressionPredictive, likelihoods
from bayesify.deep_gp.model import ProcessPredictive
from bayesify.predictive.base import Outputs
from bayesify.predictive.families.base import Family
from bayesify.predictive.gaussian import Link, OutputGaussian
from bayesify.predictive.transformed import TargetTransform, TransformedPredictive, TransformName
from bayesify.sklearn.recalibration import Recalibration
from bayesify.sklearn.units import UnitsPredictive

Builder = Callable[[int], RegressionPredictive]
NUMBERS = {name: law for name, law in likelihoods.REGISTRY.items() if law.task == "regression"}
CLASSES = {name: law for name, law in likelihoods.REGISTRY.items() if law.task == "classification"}
SPREAD = Recalibration((-2.1, -0.4, 0.3, 1.5), (-1.6, -0.5, 0.6, 1.4))
REACH = 6.0
"""Normal scores of the outermost quantiles that references use: 1e-9 is left beyond each."""


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_draws(name: str, outputs: int, draws: int = 3, spread: float = 0.7) -> Builder:
    law = NUMBERS[name]().double()
    f = spread * noise(draws, 1, outputs * law.outputs_per_target, seed=len(name) + outputs) + 0.4
    return lambda rows: law.predictive(Outputs(kept=f.expand(-1, rows, -1)))  # type: ignore[return-value]


def in_closed_form(name: str, outputs: int) -> Builder:
    law = NUMBERS[name]().double()
    width = outputs * law.outputs_per_target
    root, mean = 0.5 * noise(width, width, seed=3), 0.5 * noise(1, width, seed=4)
    covariance = (root @ root.mT).unsqueeze(0)
    return lambda rows: law.closed_form(OutputGaussian(mean.expand(rows, -1), covariance.expand(rows, -1, -1), 0))  # type: ignore[return-value]


def process(outputs: int) -> Builder:
    mean, variance = noise(3, 1, outputs, seed=5), 0.1 + noise(3, 1, outputs, seed=6).square()
    part = torch.tensor(0.2, dtype=torch.float64)
    return lambda rows: ProcessPredictive(mean.expand(-1, rows, -1), variance.expand(-1, rows, -1), part, 0)


def transformed(inner: Builder, name: str) -> Builder:
    scale = torch.linspace(0.4, 0.6, inner(1).mean.shape[1], dtype=torch.float64)
    made = TargetTransform(name, 0.3 * scale, scale, 0.5 + 0 * scale, 2 * scale)  # type: ignore[arg-type]
    return lambda rows: TransformedPredictive(inner(rows), made)


def in_units(
    inner: Builder,
    name: str = "none",
    mass: float | None = None,
    map_: Recalibration | None = None,
    scale: float = 0.5,
    stretch: float = 1.0,
) -> Builder:
    """In units, with a floor that a given probability lies below in the first output."""

    @functools.cache
    def units() -> tuple[Any, ...]:
        """What the test needs is computed when it runs, not when tests are collected."""
        ones = torch.ones(inner(1).mean.shape[1], dtype=torch.float64)
        discrete = inner(1).family.discrete
        shift, scales = (0 * ones, ones) if discrete else (0.6 * scale * ones, scale * ones)
        plain = UnitsPredictive(inner(1), shift, scales, name, map_)
        return shift, scales, name, map_, -math.inf if mass is None else float(plain.quantile(mass)[0, 0])

    def build(rows: int) -> UnitsPredictive:
        wider = None if stretch == 1 else torch.full((rows, 1), stretch, dtype=torch.float64)
        return UnitsPredictive(inner(rows), *units(), stretch=wider)

    return build


def cases() -> dict[str, tuple[Builder, int]]:
    found: dict[str, tuple[Builder, int]] = {}
    for outputs in (1, 2):
        drawn = {name: by_draws(name, outputs) for name in NUMBERS}
        other = {"one_draw": by_draws("gaussian", outputs, 1), "far_apart": by_draws("gaussian", outputs, 3, 6.0)}
        other |= {
            f"{name}_closed": in_closed_form(name, outputs) for name in NUMBERS if NUMBERS[name].integrates_gaussians
        }
        other |= {"process": process(outputs)}
        for name, base in {**drawn, **other}.items():
            made, often = {"": base}, outputs == 1 and name in drawn
            if not base(1).family.discrete:
                kinds = get_args(TransformName) if often else ("sqrt",)
                if base(1).family.least is not None:  # amounts are exponentials already; theirs have no number
                    kinds = [kind for kind in kinds if not kind.startswith("log")]
                else:
                    made |= {"log1p_floor": in_units(base, "log1p", 0.4)}
                made |= {kind: transformed(base, kind) for kind in kinds}
                made |= {f"scale_{scale:g}": in_units(base, scale=scale) for scale in ((1e-9, 1e9) if often else ())}
            made |= {
                f"floor_{mass:g}": in_units(base, mass=mass)
                for mass in ((1e-6, 0.3, 0.85, 1 - 1e-6) if often else (0.7,))
            }
            made |= {"recalibrated": in_units(base, map_=SPREAD), "both": in_units(base, map_=SPREAD, mass=0.7)}
            made |= {"stretched": in_units(base, map_=SPREAD, stretch=1.3)} if often else {}
            found |= {f"{name}-{kind}-{outputs}": (builder, outputs) for kind, builder in made.items()}
    return found


CASES = cases()
STEPS = 120
GRID = torch.linspace(-REACH, REACH, STEPS + 1, dtype=torch.float64)
LEVELS = torch.from_numpy(stats.norm.cdf(GRID.numpy()))


@functools.lru_cache(maxsize=len(CASES))
def quantiles(name: str) -> Tensor:
    """At all levels: [levels, O]."""
    return CASES[name][0](1).quantile(LEVELS.tolist())[:, 0]


def evaluate(name: str, what: str, y: Tensor, output: int) -> Tensor:
    """One of the predictive's functions at places of one output, in their shape; other outputs stay at their medians."""
    builder, outputs = CASES[name]
    targets = quantiles(name)[STEPS // 2].expand(y.numel(), outputs).clone()
    targets[:, output] = y.reshape(-1)
    found = getattr(builder(len(targets)), what)(targets)
    return (found if found.ndim == 1 else found[:, output]).reshape(y.shape)


def jump(name: str, place: Tensor, output: int) -> Tensor:
    return evaluate(name, "cdf", place, output) - evaluate(name, "below", place, output)


class Rule(NamedTuple):
    """Where to add up functions of a distribution: pieces of the line, or whole numbers; and an atom at the lower end."""

    edges: Tensor  # [P + 1]
    at: Tensor  # [P, nodes]
    weights: Tensor
    atom: Tensor | None  # [1]


def rule(name: str, output: int, stride: int = 1, nodes: int = 4) -> Rule:
    """Between some of the quantiles; next to an atom, where densities may have poles, in ever shorter pieces."""
    edges = quantiles(name)[::stride, output].unique()
    if CASES[name][0](1).family.discrete:
        k = torch.arange(float(edges[0]), float(edges[-1]) + 8).double()
        return Rule(torch.cat((k, k[-1:] + 1)), k.unsqueeze(1), torch.ones_like(k).unsqueeze(1), None)
    atom = edges[:1] if float(jump(name, edges[:1], output)) > 1e-13 else None
    if atom is not None:
        edges = edges if len(edges) > 1 else torch.cat((edges, edges + 1e-6 * (1 + edges.abs())))
        pieces = edges[0] + (edges[1] - edges[0]) * torch.logspace(-8, 0, 17, dtype=edges.dtype)
        edges = torch.cat((edges[:1], pieces, edges[2:])).unique()
    width = edges.diff()
    long = width > 4 * torch.minimum(torch.cat((width[1:], width[-1:])), torch.cat((width[:1], width[:-1])))
    graded = torch.tensor([1e-3, 4e-3, 0.015, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.985, 0.996, 0.999])
    inside = edges[:-1][long].unsqueeze(1) + width[long].unsqueeze(1) * graded.double()
    edges = torch.cat((edges, inside.flatten())).sort().values  # across a gap between modes
    place, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(nodes))
    half = 0.5 * edges.diff().unsqueeze(1)
    return Rule(edges, edges[:-1].unsqueeze(1) + half * (1 + place), half * weights, atom)


QUICK = (
    "--1",
    "-floor_0.85-1",
    "-both-1",
    "gaussian_closed-floor_0.7-2",
    "poisson-floor_0.7-2",
    "far_apart-floor",
    "far_apart-sqrt-1",
)
"""Parts of the names of cases that every run takes; the others are slow only because they are many."""


def each(*numbers: int) -> pytest.MarkDecorator:
    """All cases with these numbers of outputs."""
    chosen = [name for name, (_, outputs) in CASES.items() if outputs in numbers]
    slow = {name: () if any(part in name for part in QUICK) else pytest.mark.slow for name in chosen}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=slow[name]) for name in chosen])


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("--1")])
def test_quantiles_are_accurate_far_in_the_lower_tail(name: str) -> None:
    """Relative to the level, not only up to 1e-16: a recalibration turns levels of 1e-15 into levels of 1e-9."""
    levels = torch.logspace(-20, -1, 20, dtype=torch.float64)
    at = CASES[name][0](1).quantile(levels.tolist())[:, 0, 0]
    reached, before = evaluate(name, "cdf", at, 0), evaluate(name, "below", at, 0)
    assert bool((reached >= levels * (1 - 1e-9)).all())
    assert bool((before <= levels * (1 + 1e-9)).all())


@pytest.mark.parametrize("level", [1e-9, 0.001, 0.025, 0.05, 0.3, 0.5, 0.975])
@pytest.mark.parametrize("apart", [1.0, 1000.0])
def test_quantiles_of_many_rows_take_few_steps(level: float, apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding at the solution must not start the bisection again. 60 steps are the limit, at which rows would be wrong."""
    family, calls = bayesify.predictive.families.gaussian.GAUSSIAN, []
    cdf = family.cdf
    monkeypatch.setattr(family, "cdf", lambda *parts: calls.append(1) or cdf(*parts))
    mean, std = apart * noise(5, 1000, 1, seed=0), 0.5 * (0.3 * noise(5, 1000, 1, seed=1)).exp()
    at = family.quantiles([level], mean, std.square())[0]
    assert len(calls) <= 30
    reached = stats.norm.cdf(at.numpy(), mean.numpy(), std.numpy()).mean(0)
    if apart == 1.0:
        np.testing.assert_allclose(reached, level, rtol=1e-12)


@each(1, 2)
def test_cdf(name: str) -> None:
    """It rises from 0 to 1, is continuous from the right, and quantiles are its inverse in the generalized sense."""
    for output in range(CASES[name][1]):
        at = quantiles(name)[:, output].contiguous()
        assert bool((at.diff() >= 0).all())
        reached, before = evaluate(name, "cdf", at, output), evaluate(name, "below", at, output)
        assert bool((reached >= LEVELS - 1e-9).all())
        assert bool((before <= LEVELS + 1e-9).all())
        far = float(at[-1] - at[0] + at.abs().max()) + 1
        around = torch.linspace(float(at[0]) - far, float(at[-1]) + far, 99, dtype=torch.float64)
        ends = torch.tensor([float(at[0]) - 1e6 * far, float(at[-1]) + 1e6 * far], dtype=torch.float64)
        grid = torch.cat((at, around, ends)).sort().values
        values, below = evaluate(name, "cdf", grid, output), evaluate(name, "below", grid, output)
        assert values[0] == pytest.approx(0, abs=1e-8)
        assert values[-1] == pytest.approx(1, abs=1e-8)
        assert bool((values.diff() >= -1e-12).all())
        assert bool(((values >= 0) & (values <= 1) & (below >= 0) & (below <= values + 1e-15)).all())
        after = evaluate(name, "cdf", torch.nextafter(at, at.new_tensor(math.inf)), output)
        torch.testing.assert_close(after, reached, rtol=0, atol=1e-6)


@each(1, 2)
def test_intervals_hold_what_centrality_says(name: str) -> None:
    """Row by row the same; weighted by their probabilities, intervals hold at least what their level says."""
    y, share = quantiles(name), torch.from_numpy(np.diff(stats.norm.cdf(GRID[:-1].numpy() + 0.05), prepend=0, append=1))
    predictive = CASES[name][0](len(y))
    centrality = predictive.centrality(y)
    assert bool(((centrality >= 0) & (centrality <= 1)).all())
    atoms = bool((predictive.cdf(y) > predictive.below(y)).any())
    for level in (0.0123, 0.1234, 0.5017, 0.9011, 0.9531):
        lower, upper = predictive.interval(level)
        inside = (y >= lower) & (y <= upper)
        assert torch.equal(inside, centrality <= level), level
        held = share @ inside.double()
        assert bool((held >= level - 0.041).all())  # places are 0.1 normal scores apart
        assert atoms or bool((held <= level + 0.041).all())


@each(1)
def test_densities_and_atoms(name: str) -> None:
    """Integrals of the density are differences of the cdf, atoms are its jumps, and all of them add up to 1."""
    coarse, fine = rule(name, 0, 2), rule(name, 0)
    rough, total = ((evaluate(name, "log_prob", part.at, 0).exp() * part.weights).sum(1) for part in (coarse, fine))
    if CASES[name][0](1).family.discrete:
        # Probabilities next to 1 are rounded by 1e-16. Normal scores divided by 1.3 turn this into jumps of up to 2.3e-10.
        atol = 3e-10 if "stretched" in name else 1e-10
        torch.testing.assert_close(total, jump(name, fine.at[:, 0], 0), rtol=1e-7, atol=atol)
        assert float(total.sum()) == pytest.approx(1, abs=1e-7)
        return
    mass = evaluate(name, "cdf", fine.edges, 0).diff()
    error = 8 * float((total.sum() - rough.sum()).abs()) + 5e-6
    atom = 0.0 if fine.atom is None else float(evaluate(name, "log_prob", fine.atom, 0).exp())
    if fine.atom is not None:
        assert atom == pytest.approx(float(jump(name, fine.atom, 0)), rel=1e-6)
    assert float(total.sum()) + atom == pytest.approx(1, abs=error)
    assert float((total - mass).abs().max()) < (1e-5 if error < 1e-5 else 0.03)  # densities may jump inside a piece


@each(2)
def test_joint_densities_and_atoms(name: str) -> None:
    """Summed over the second output, the joint density is that of the first, atoms included."""
    first, second = (rule(name, output, 3, 2) for output in (0, 1))
    places, shares = [], []
    for part in (first, second):
        places.append(part.at.flatten() if part.atom is None else torch.cat((part.at.flatten(), part.atom)))
        ones = part.weights.new_ones(len(places[-1]) - part.at.numel())
        shares.append(torch.cat((part.weights.flatten(), ones)))
    pairs = torch.cartesian_prod(*places)
    joint = CASES[name][0](len(pairs)).log_prob(pairs).exp().view(len(places[0]), len(places[1]))
    mass = (joint @ shares[1]) * shares[0]
    assert float(mass.sum()) == pytest.approx(1, abs=0.1)  # a coarse rule, across jumps of some densities
    pieces = mass[: first.at.numel()].view(first.at.shape).sum(1)
    exact = evaluate(name, "cdf", first.edges, 0).diff()
    if CASES[name][0](1).family.discrete:
        exact = jump(name, first.at[:, 0], 0)
    torch.testing.assert_close(pieces, exact, rtol=0, atol=0.05)
    if first.atom is not None:
        assert float(mass[-1]) == pytest.approx(float(jump(name, first.atom, 0)), abs=0.02)


@each(1, 2)
def test_scores_and_moments_are_integrals(name: str) -> None:
    """`crps` is that of (F(x) - [y <= x])^2; mean and variance are those of 1 - F.

    Where a transform may leave a heavy tail without a mean, moments are those of the middle 99.9 %.
    """
    predictive = CASES[name][0](1)
    close = 1e-2 if isinstance(predictive, TransformedPredictive) else 2e-4
    torch.testing.assert_close(predictive.epistemic + predictive.aleatoric, predictive.variance)
    torch.testing.assert_close(predictive.std.square(), predictive.variance)
    assert bool((predictive.epistemic >= 0).all() & (predictive.aleatoric >= 0).all())
    for output in range(CASES[name][1]):
        part, edges = rule(name, output), quantiles(name)[:, output]
        cdf, y = evaluate(name, "cdf", part.at, output), edges[[30, 50, 60, 75, 95]]
        std = float(predictive.std[0, output])
        parts = [((cdf - (part.at >= at).double()).square() * part.weights).sum() for at in y]
        start = float(edges[0])
        expected = torch.stack(parts) + (start - y).clamp_min(0)
        found = evaluate(name, "crps", y, output)
        torch.testing.assert_close(found, expected, rtol=close, atol=close * std)
        if heavy(predictive):
            low, high = stats.norm.cdf([-3.25, 3.25])
            start, end = predictive.quantile([low, high])[:, 0, output].tolist()
            part = part._replace(weights=part.weights * ((part.at > start) & (part.at < end)))
            cdf = ((cdf - low) / (high - low)).clamp(0, 1)
        mean = start + ((1 - cdf) * part.weights).sum()
        variance = 2 * ((part.at - start) * (1 - cdf) * part.weights).sum() - (mean - start) ** 2
        if predictive.family.discrete:
            variance = variance + (mean - start)
        assert float(predictive.mean[0, output]) == pytest.approx(float(mean), rel=close, abs=close * std)
        # The 1e-9 beyond the last quantile holds up to a tenth of the second moment of log-normal amounts.
        most = 5 * close if predictive.family.least is None else 0.1
        assert std == pytest.approx(math.sqrt(max(float(variance), 0.0)), rel=most, abs=1e-6 * abs(start))


def heavy(predictive: RegressionPredictive) -> bool:
    if not isinstance(predictive, TransformedPredictive) or predictive.family.light_tailed:
        return False
    return predictive.transform.name != "none"


@pytest.mark.parametrize("outputs", [2, 4])
def test_censored_outputs_of_a_gaussian(outputs: int) -> None:
    """Against scipy's normal distribution of several variables: densities times what the others' orthant has given them."""
    law, root = likelihoods.Gaussian(0.3).double(), noise(outputs, outputs, seed=outputs)
    mean, y = noise(1, outputs, seed=1), noise(1, outputs, seed=2)
    covariance = root @ root.mT
    total = (covariance + law.noise.detach() * torch.eye(outputs, dtype=torch.float64)).numpy()
    for count in range(outputs + 1):
        mask = torch.arange(outputs) < count
        c, d = mask.numpy(), ~mask.numpy()
        gain = total[np.ix_(c, d)] @ np.linalg.inv(total[np.ix_(d, d)])
        center, gap = mean[0].numpy(), (y - mean)[0].numpy()
        expected = stats.multivariate_normal(center[d], total[np.ix_(d, d)]).logpdf(y[0].numpy()[d]) if d.any() else 0.0
        if c.any():
            spread = total[np.ix_(c, c)] - gain @ total[np.ix_(d, c)]
            expected += np.log(stats.multivariate_normal.cdf(gap[c], gain @ gap[d], spread, abseps=1e-8, releps=1e-8))
        predictive = law.closed_form(OutputGaussian(mean, covariance.unsqueeze(0), 0))
        assert isinstance(predictive, RegressionPredictive)
        found = float(predictive.censored_log_prob(y, mask.unsqueeze(0)))
        assert found == pytest.approx(expected, abs=1e-9 if count < 2 else 1e-2)


def test_targets_that_cannot_be_have_little_left() -> None:
    """Below a floor scores are finite, worse than those of targets that can be, and worse the further away."""
    found = in_units(by_draws("gaussian", 1), "sqrt", 0.4)(1)
    floor = found.quantile(1e-6)
    scores = [float(found.log_prob(floor - below)) for below in (0.0, 1e-3, 1.0, 100.0)]
    assert scores[0] == pytest.approx(math.log(0.4))
    assert -60 < scores[3] < scores[2] < scores[1] < -20


def test_counts_are_whole() -> None:
    units = in_units(by_draws("poisson", 1), map_=SPREAD)(1)
    with pytest.raises(ValueError, match="counts are whole numbers"):
        units.log_prob(torch.tensor([[0.5]]))


def concrete(kind: type) -> list[type]:
    root = Path(bayesify.__file__).parent
    for path in root.rglob("*.py"):
        if re.search(r"^class \w+\(.*(Predictive|Family)\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(".".join(("bayesify", *path.relative_to(root).with_suffix("").parts)))
    found, new = set(), [kind]
    while new:
        one = new.pop()
        new += one.__subclasses__()
        if one.__module__.startswith("bayesify.") and not getattr(one, "__abstractmethods__", None):
            found.add(one)
    return sorted(found, key=lambda one: one.__name__)


def test_every_class_is_built() -> None:
    made = [builder(1) for builder, _ in CASES.values()]
    inner = [one.inner if isinstance(one, TransformedPredictive) else one for one in made]  # whose moments are quick
    assert [one.mean.shape[1] for one in inner] == [outputs for _, outputs in CASES.values()]
    families, kinds = {type(one.family) for one in made}, {type(one) for one in made}
    kinds |= {type(one) for one in classifications().values()}
    missing = [one.__name__ for one in concrete(Family) if one not in families]
    assert not missing, f"no likelihood of likelihoods.REGISTRY has the families {missing}"
    wanted = [*concrete(RegressionPredictive), *concrete(ClassificationPredictive)]
    missing = [one.__name__ for one in wanted if one not in kinds]
    assert not missing, f"no case above builds the predictives {missing}"


# -- classes -----------------------------------------------------------------------------------------------------------


def classifications() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, law in CLASSES.items():
        f = 2 * noise(4, 50, 3, seed=1)
        found[name] = law().double().predictive(Outputs(kept=f))
        for scale in (0.1, 1.0, 10.0):
            root = scale * noise(50, 3, 3, seed=2)
            outputs = OutputGaussian(f[0], root @ root.mT, 0)
            for link in get_args(Link):
                found[f"{name}-{link}-{scale:g}"] = law().double().closed_form(outputs, link)
    return found


@pytest.mark.parametrize("name", classifications())
def test_classes(name: str) -> None:
    """Probabilities add up to 1, `log_prob` of every label is theirs, labels follow, and the two parts of the entropy add up."""
    predictive = classifications()[name]
    probs = predictive.class_probs
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))
    torch.testing.assert_close(predictive.entropy, stats_entropy(probs))
    assert torch.equal(predictive.labels, probs.argmax(-1))
    parts = predictive.mutual_information, predictive.aleatoric_entropy
    torch.testing.assert_close(sum(parts), predictive.entropy)
    assert all(bool((part >= 0).all()) for part in parts)
    outputs = probs.shape[1] if probs.ndim == 3 else 1
    labels = torch.cartesian_prod(*[torch.arange(probs.shape[-1])] * outputs).view(-1, outputs)
    total = torch.zeros(len(probs), dtype=torch.float64)
    for row in labels:
        y = row.expand(len(probs), outputs)
        total += predictive.log_prob(y if probs.ndim == 3 else y[:, 0]).exp()
    torch.testing.assert_close(total, torch.ones_like(total))


def stats_entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)
