"""Claims in figures of the paper on global inducing points; see `tools.paper_claims`."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from bayesify_papers.shared.published import published

from tools.paper_claims.reading import Verdict, at, listed, read


def cubic(folder: Path) -> Verdict:
    """Of fac, li and gi, gi is nearest to HMC in the gap."""
    scores = read(folder / "cubic" / "results.json")["scores"]
    found = {name: statistics.fmean(one["gap_std"] for one in seeds.values()) for name, seeds in scores.items()}
    far = {name: abs(found[name] - found["HMC"]) for name in ("fac", "li", "gi")}
    return min(
        far, key=lambda name: far[name]
    ) == "gi", f"Std in the middle of the gap (five seeds): {listed(found, 3)}"


def cubic_too_narrow(folder: Path) -> Verdict:
    """Fac and li have less than half of HMC's standard deviation in the gap."""
    scores = read(folder / "cubic" / "results.json")["scores"]
    found = {name: statistics.fmean(one["gap_std"] for one in seeds.values()) for name, seeds in scores.items()}
    words = f"Std in the middle of the gap (five seeds): {listed(found, 3)}"
    return max(found["fac"], found["li"]) < found["HMC"] / 2, words


def layers_depend(folder: Path) -> Verdict:
    """Taking layers from different draws costs gi more than 1 nat per example, fac and li less than 0.1."""
    content = read(folder / "composition" / "results.json")
    found = {
        name: statistics.fmean(max(one["mixing_costs"]) for one in content["scores"][name].values())
        for name in ("gi-40", "dgp-gi", "fac", "li", "dgp-dsvi")
    }
    shown = min(found["gi-40"], found["dgp-gi"]) > 1 and max(found[name] for name in ("fac", "li", "dgp-dsvi")) < 0.1
    seeds, steps = len(content["scores"]["fac"]), content["settings"]["schedule"]["steps"]
    return shown, (
        f"Loss in nats per example at the boundary between layers with the largest loss ({seeds} seeds, {steps:,} steps): "
        f"{listed(found)}"
    )


def _bounds(folder: Path) -> tuple[dict[str, float], float]:
    content = read(folder / "deep_linear" / "results.json")
    return {name: one["elbo"] for name, one in content["bounds"].items()}, content["evidence"]


def depth_costs_factorized(folder: Path) -> Verdict:
    """From 4 to 10 layers, a factorized posterior loses more than 20 times as many nats of the bound as global inducing points."""
    found, evidence = _bounds(folder)
    loss = {name: [evidence - found[f"{name}-50-{depth}"] for depth in (4, 10)] for name in ("fac", "gi", "rand-gi")}
    drop = {name: deep - shallow for name, (shallow, deep) in loss.items()}
    words = "; ".join(
        f"{name} {shallow:.1f} (depth 4) and {deep:.1f} (depth 10)" for name, (shallow, deep) in loss.items()
    )
    return drop["fac"] > 20 * max(drop["gi"], drop["rand-gi"]), (
        f"Evidence minus bound in nats, with width 50 after 2,000 steps: {words}. At depth 10, the standard "
        "error of gi and rand-gi is 0.10"
    )


def local_loses_and_width_helps(folder: Path) -> Verdict:
    """Local inducing points lose as factorized posteriors do, and global inducing points gain with width."""
    found, evidence = _bounds(folder)
    loss = {
        name: evidence - found[name] for name in ("li-50-4", "fac-50-4", "gi-50-4", "gi-250-4", "gi-5-4", "rand-gi-5-4")
    }
    shown = min(loss["li-50-4"], loss["fac-50-4"]) > 100 and loss["gi-250-4"] < loss["gi-50-4"]
    return shown, (
        f"Evidence minus bound in nats, after 2,000 steps: {at(loss, '({})', 1)}. The two numbers after the name of a posterior "
        "are its width and its depth"
    )


def random_layers_suffice(folder: Path) -> Verdict:
    """Over layers drawn from the prior and at least 50 wide, global inducing points are within 10 nats of the evidence."""
    found, evidence = _bounds(folder)
    networks = [(width, depth) for width in (5, 50, 250) for depth in (4, 10)]
    loss = {(width, depth): evidence - found[f"rand-gi-{width}-{depth}"] for width, depth in networks}
    words = ", ".join(f"{nats:.1f} (width {width}, depth {depth})" for (width, depth), nats in loss.items())
    return max(nats for (width, _), nats in loss.items() if width >= 50) < 10, (
        f"Evidence minus the bound of rand-gi in nats: {words}. Fewer than 10 nats count as close"
    )


def _mean(folder: Path, dataset: str, name: str, score: str = "log_likelihood") -> float:
    return statistics.fmean(read(folder / f"{dataset}-{name}.json")["scores"][score])


SMALL_DATASETS = ("boston", "concrete", "energy", "wine", "yacht")


def _higher_bounds(folder: Path, pairs: Iterable[tuple[str, str]]) -> tuple[int, int]:
    """Number of cases in which the first of a pair has the higher bound, and number of all cases."""
    wins = [
        _mean(folder / "uci", dataset, one, "elbo") > _mean(folder / "uci", dataset, other, "elbo")
        for one, other in pairs
        for dataset in SMALL_DATASETS
    ]
    return sum(wins), len(wins)


def networks_bound(folder: Path) -> Verdict:
    """Global inducing points have better bounds than factorized posteriors in almost every case."""
    wins, cases = _higher_bounds(folder, [(f"gi-{prior}", f"fac-{prior}") for prior in ("scale", "standard")])
    return wins >= 0.8 * cases, (
        f"The bound of gi is above the bound of fac in {wins} of {cases} cases (five data sets, Standard and Scale prior, "
        "20 splits)"
    )


def factorized_fails_under_scale(folder: Path) -> Verdict:
    """Under the Scale prior, factorized posteriors predict very poorly."""
    ahead = {
        runs: statistics.fmean(
            _mean(folder / runs, dataset, "gi-scale") - _mean(folder / runs, dataset, "fac-scale")
            for dataset in SMALL_DATASETS
        )
        for runs in ("uci", "uci_no_warm_up")
    }
    return ahead["uci"] > 0.2, (
        "We subtract the test log-likelihood of fac from the test log-likelihood of gi, and take the mean over five data sets. "
        "The "
        f"mean is {ahead['uci']:.2f} if the weight of the KL rises from 0.1, and {ahead['uci_no_warm_up']:.2f} if the KL has its "
        "full weight from the first step"
    )


def deep_gps_bound(folder: Path) -> Verdict:
    """Global inducing points have better bounds than DSVI in almost every case."""
    wins, cases = _higher_bounds(folder, [(f"dgp{layers}-gi", f"dgp{layers}-dsvi") for layers in (2, 5)])
    return wins >= 0.8 * cases, (
        f"The bound of global inducing points is above the bound of DSVI in {wins} of {cases} cases (five data sets, "
        "two and five layers, 20 splits)"
    )


def dsvi_seldom_ahead(folder: Path) -> Verdict:
    """In test log-likelihood, DSVI is ahead of global inducing points in fewer than half of the cases, by less than 0.05 nats."""
    ahead = {
        f"{dataset}, {layers} layers": _mean(folder / "uci", dataset, f"dgp{layers}-dsvi")
        - _mean(folder / "uci", dataset, f"dgp{layers}-gi")
        for dataset in SMALL_DATASETS
        for layers in (2, 5)
    }
    wins = {name: value for name, value in ahead.items() if value > 0}
    shown = len(wins) < len(ahead) / 2 and max(wins.values(), default=0) < 0.05
    words = f"DSVI is ahead in {len(wins)} of {len(ahead)} cases (20 splits)"
    return shown, f"{words}. DSVI is ahead by these amounts in nats: {at(wins, '({})', 3)}" if wins else words


def above_earlier_work(folder: Path) -> Verdict:
    """Global inducing points are more accurate on CIFAR-10 than the earlier work that the paper compares with."""
    found = 100 * read(folder / "cifar10" / "gi.json")["scores"]["gi_spatial"]["accuracy"]
    earlier = published("global_inducing")["earlier_work"]
    return found > max(earlier.values()), (
        f"Our accuracy is {found:.2f} % (one seed, SpatialIWPrior). The paper prints these accuracies of earlier work, in percent: "
        f"{listed(earlier, 1)}"
    )
