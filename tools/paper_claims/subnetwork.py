"""Claims in figures of the paper on subnetworks; see `tools.paper_claims`."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bayesify_papers.shared.published import published

from tools.paper_claims.reading import NAMES, Verdict, at, listed, matching, medians_by_system, read

TIMES = ("train_seconds", "select_seconds", "fit_seconds")
"""Costs of a system on images before it predicts."""


def _kept(folder: Path, place: str = "in_gap") -> dict[str, dict[str, float]]:
    """Share of the full posterior's std in the gap that a system keeps, in percent, by data and system; medians over seeds."""
    found: dict[str, dict[str, float]] = {}
    for name in ("matern", "cosine"):
        outcomes = read(folder / f"toy-{name}" / "toy.json")["outcomes"]
        full = {one["seed"]: one[place] for one in outcomes if one["system"] == "Full"}
        found[name] = medians_by_system(
            [{**one, "share": 100 * one[place] / full[one["seed"]]} for one in outcomes], "share"
        )
    return found


RULES = {
    "Live weights": "curvature rule for live weights",
    "Largest variance": "curvature rule for all weights",
    "SWAG variance": "SGD rule",
    "Random": "random choice",
}
"""Rules of selection, by their titles in the files."""
RULES_IN_WORDS = (
    "The curvature rule for live weights takes the largest 1 / (H + lambda) among weights that change the output. The curvature "
    "rule for all weights, which is the rule in the paper's text, takes the largest 1 / (H + lambda) among all weights. The SGD "
    "rule takes the largest variance over SGD iterates"
)


def _kept_by_rule(folder: Path, sizes: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Definition of the rules, and the share of the full posterior's std in the gap that every rule keeps, in words."""
    words = [RULES_IN_WORDS]
    for name, own in _kept(folder).items():
        kept = {told: [own[f"{title} {size}"] for size in sizes] for title, told in RULES.items()}
        kept |= {told: [own[title]] for title, told in others.items()}
        parts = (f"{told} {' and '.join(f'{one:.0f} %' for one in shares)}" for told, shares in kept.items())
        words.append(f"Shares on the data `{name}`: {', '.join(parts)}")
    return ". ".join(words)


def _half_keeps(folder: Path, rule: str) -> Verdict:
    at_data = [f"{own['Diagonal'] / 100:.1f}" for own in _kept(folder, "at_data").values()]
    shown = all(own[f"{rule} 50%"] > 90 > own["Diagonal"] for own in _kept(folder).values())
    return shown, (
        "A share is the std in the gap divided by the full posterior's std in the gap. Four rules select half of the weights. "
        f"{_kept_by_rule(folder, ('50%',), {'Diagonal': 'diagonal posterior'})}. A share above 90 % counts as kept. At the "
        f"data, the std of the diagonal posterior is {at_data[0]} times the full posterior's std on `matern`, and {at_data[1]} "
        "times on `cosine`"
    )


def toy_keeps_uncertainty(folder: Path) -> Verdict:
    """Half of the weights keep the full posterior's uncertainty between clusters; a diagonal posterior does not."""
    return _half_keeps(folder, "Live weights")


def toy_keeps_uncertainty_by_text(folder: Path) -> Verdict:
    """The same, if the weights are chosen by the rule in the text of the paper."""
    return _half_keeps(folder, "Largest variance")


def toy_random_beats_diagonal(folder: Path) -> Verdict:
    """Half of the weights, chosen at random, keep more uncertainty between clusters than a diagonal posterior."""
    shown = all(own["Random 50%"] > own["Diagonal"] for own in _kept(folder).values())
    return shown, _half_keeps(folder, "Random")[1]


def toy_beats_last_layer(folder: Path) -> Verdict:
    """Half of the weights are nearer to the uncertainty of the full posterior between clusters than the last layer."""
    found = _kept(folder).values()
    shown = all(abs(own["Live weights 50%"] - 100) < abs(own["Last layer"] - 100) for own in found)
    return shown, (
        "A share is the std in the gap divided by the full posterior's std in the gap. Four rules select half of the weights. "
        f"{_kept_by_rule(folder, ('50%',), {'Last layer': 'last layer'})}"
    )


def _small_beats_random(folder: Path, rule: str) -> Verdict:
    shown = all(
        own[f"{rule} {size}"] > own[f"Random {size}"] for own in _kept(folder).values() for size in ("3%", "1%")
    )
    return shown, (
        "A share is the std in the gap divided by the full posterior's std in the gap. Four rules select weights. The first "
        "share of a rule is for 3 % of the weights, and the second share is for 1 % of the weights. "
        f"{_kept_by_rule(folder, ('3%', '1%'))}"
    )


def toy_variance_beats_random(folder: Path) -> Verdict:
    """Small subnetworks with the largest variances over iterates of SGD keep more uncertainty than random ones."""
    return _small_beats_random(folder, "SWAG variance")


def toy_variance_beats_random_by_text(folder: Path) -> Verdict:
    """Small subnetworks with the largest 1 / (H + lambda) keep more uncertainty than random ones."""
    return _small_beats_random(folder, "Largest variance")


UciScores = dict[str, dict[Any, dict[int, float]]]
"""Test log-likelihoods by data set, then by split, hidden layers and width, then by the number of weights (0 is MAP)."""


def _uci(folder: Path) -> UciScores:
    groups: UciScores = {}
    for path in matching(folder, "uci-*/uci.jsonl"):
        lines = () if path.parent.name.endswith("-plain") else path.read_text().splitlines()
        for row in map(json.loads, lines):
            key = (row["split"], row["hidden_layers"], row["width"])
            own = groups.setdefault(f"{row['dataset']}{', gap splits' * row['gap']}", {})
            own.setdefault(key, {})[row["num_weights"]] = row["log_likelihood"]
    return {name: {key: found for key, found in own.items() if len(found) > 1} for name, own in groups.items()}


def _not_run(found: Iterable[str]) -> str:
    """Which data sets of the paper have no standard splits, to be printed after the numbers."""
    missing = [name for name in ("wine", "kin8nm", "protein") if name not in set(found)]
    return f". Not run: {', '.join(missing)}" if missing else ""


def uci_more_weights(folder: Path) -> Verdict:
    """In most networks and standard splits of each data set, the largest subnetwork is above MAP; gap splits are listed too."""
    shares, words = {}, []
    for name, own in _uci(folder).items():
        shares[name] = statistics.fmean(found[max(found)] > found[0] for found in own.values())
        most, splits = max(max(found) for found in own.values()), len({key[0] for key in own})
        words.append(f"{100 * shares[name]:.0f} % ({name}: {splits} split{'s' * (splits > 1)}, up to {most:,} weights)")
    shown = all(share > 0.5 for name, share in shares.items() if "gap" not in name)
    about = "We count the networks and splits in which the largest subnetwork has a higher log-likelihood than MAP. Their share"
    return shown, f"{about}: {', '.join(words)}{_not_run(shares)}"


def _by_network(
    own: Mapping[Any, Mapping[int, float]], value: Callable[[Mapping[int, float]], float]
) -> dict[str, float]:
    """Means over the splits that have all networks, by network, from the smallest to the largest."""
    networks = sorted({key[1:] for key in own})
    splits = [one for one in {key[0] for key in own} if all((one, *net) in own for net in networks)]
    return {
        f"{layers}x{width}": statistics.fmean(value(own[split, layers, width]) for split in splits)
        for layers, width in networks
    }


def uci_larger_map(folder: Path) -> Verdict:
    """On standard splits, the largest network has a higher test log-likelihood under MAP than the smallest."""
    found = {name: _by_network(own, lambda one: one[0]) for name, own in _uci(folder).items()}
    words = ". ".join(f"{name}: {at(own, '({})', 3)}" for name, own in found.items())
    shown = all(own["2x100"] > own["1x50"] for name, own in found.items() if "gap" not in name)
    return shown, (
        "The numbers are test log-likelihoods of MAP, averaged over complete splits. Parentheses give layers x width. "
        f"{words}{_not_run(found)}"
    )


def uci_larger_gain(folder: Path) -> Verdict:
    """On standard splits, with subnetworks of the smallest network's size, the largest network gains more over its MAP."""
    found = {}
    for name, own in _uci(folder).items():
        size = min(weights for scores in own.values() for weights in scores if weights)
        found[name] = _by_network(own, lambda one, size=size: one[size] - one[0])  # type: ignore[misc]
    words = ". ".join(f"{name}: {at(own, '({})', 4)}" for name, own in found.items())
    shown = all(own["2x100"] > own["1x50"] for name, own in found.items() if "gap" not in name)
    return shown, (
        "The subnetworks have as many weights as the smallest network. The numbers are "
        "gains over MAP in nats. Parentheses give layers x width. "
        f"{words}{_not_run(found)}"
    )


def _gain(path: Path) -> Verdict:
    """Gain of a subnetwork's log-likelihood over MAP's under rotation."""
    content = read(path)
    scores, systems = content["scores"], content["systems"]
    above = {
        f"{angle} degrees": own["nll"] - scores["subnetwork"]["shifted"][angle]["nll"]
        for angle, own in scores["map"]["shifted"].items()
        if int(angle) >= 30
    }
    spent = sum(systems[name].get(step, 0) for name in ("map", "subnetwork") for step in TIMES)
    words = (
        f"Gain over MAP in nats: {listed(above)}. We ran one seed with a prior precision of 500, {spent:.0f} s on a GPU"
    )
    return min(above.values()) > 0, words


def _gain_share(folder: Path, system: str) -> Verdict:
    """Whether a system has at least 70 % of the paper's gain over MAP from 60 to 120 degrees."""
    content, theirs = read(folder / "rotated_mnist_256.json"), published("subnetwork")["mnist"]
    scores, angles = content["scores"], published("subnetwork")["angles"]
    ours, paper = {}, {}
    for angle in ("60", "75", "90", "105", "120"):
        place = [str(one) for one in angles].index(angle)
        ours[angle] = scores["map"]["shifted"][angle]["nll"] - scores[system]["shifted"][angle]["nll"]
        paper[angle] = theirs["subnetwork"]["ll"][place] - theirs["map"]["ll"][place]
    upright = scores["map"]["shifted"]["0"]["nll"] - scores[system]["shifted"]["0"]["nll"]
    words = ", ".join(f"{own:.2f} at {angle} degrees (paper: {paper[angle]:.2f})" for angle, own in ours.items())
    precision = content["systems"][system]["prior_precision"]
    return min(ours[angle] / paper[angle] for angle in ours) >= 0.7, (
        f"Gain over MAP in nats at a prior precision of {precision:.3g}, with one seed and 2,500 test images: {words}. Gain on "
        f"upright digits: {upright:.2f} (paper: {theirs['subnetwork']['ll'][0] - theirs['map']['ll'][0]:.2f})"
    )


def gain_at_the_precision(folder: Path) -> Verdict:
    """At the paper's prior precision, subnetwork inference gains at least 70 % of the paper's gain over MAP."""
    return _gain_share(folder, "subnetwork")


def gain_at_the_cost(folder: Path) -> Verdict:
    """At the smallest precision with a validation loss of at most 0.06 nats, it gains at least 70 % of the paper's gain."""
    return _gain_share(folder, "subnetwork_widest")


def by_level(own: Mapping[str, Any], key: str) -> dict[str, float]:
    """Means over corruptions by level; level 0 has the clean test images."""
    levels: dict[str, list[float]] = {}
    for name, scores in own["shifted"].items():
        levels.setdefault(name.rpartition("-")[2], []).append(scores[key])
    return {level: statistics.fmean(values) for level, values in sorted(levels.items())}


def _on_cifar10(folder: Path) -> dict[str, Any]:
    """Scores of all systems trained on CIFAR-10. Two runs have the same MAP estimate, whose scores are those of the first run."""
    first, second = (read(folder / f"corrupted_cifar{name}.json")["scores"] for name in ("", "_others"))
    return {**first, **second, **first}


def cifar10_outside_as_map(folder: Path) -> Verdict:
    """Trained on CIFAR-10, subnetworks detect out-of-distribution images as well as MAP."""
    content = _on_cifar10(folder)
    sets = {
        outside: {name: own["ood"][outside]["auroc_entropy"] for name, own in content.items()}
        for outside in ("fashion_mnist", "notmnist")
    }
    shown = all(abs(own[name] - own["map"]) < 0.02 for own in sets.values() for name in ("subnetwork", "random"))
    words = ". ".join(f"AUROC on {NAMES[name]}: {listed(own, 3)}" for name, own in sets.items())
    paper = listed({"map": 0.86, "subnetwork": 0.85, "random": 0.86})
    return shown, (
        "The out-of-distribution images are gray images in three channels, detected by entropy. "
        f"{words}. AUROC on SVHN in the paper: {paper}"
    )


def resnet50_gain(folder: Path) -> Verdict:
    """A subnetwork of a ResNet-50 still improves on MAP."""
    return _gain(folder / "rotated_mnist_resnet50.json")


def random_subnetworks_worse(folder: Path) -> Verdict:
    """Random subnetworks are substantially worse than selected ones."""

    def gained(file: str, names: Iterable[str], angles: Iterable[str]) -> dict[str, float]:
        scores = read(folder / file)["scores"]
        return {
            f"{name.removesuffix('_widest').replace('_', ' ')} at {angle} degrees": scores["map"]["shifted"][angle][
                "nll"
            ]
            - scores[name]["shifted"][angle]["nll"]
            for angle in angles
            for name in names
        }

    above = gained("rotated_mnist.json", ("subnetwork", "random"), ("60", "90", "120"))
    other = gained("rotated_mnist_hessian.json", ("subnetwork_widest", "random_widest", "last_layer_widest"), ("60",))
    gains = list(above.values())
    shown = all(chosen > 2 * random for chosen, random in zip(gains[::2], gains[1::2], strict=True))
    return shown, (
        f"Gain over MAP in nats (prior precision 500, one seed): {listed(above)}. On an earlier network the claim did not hold. "
        "For that network, weights were selected by 1 / (H + lambda), and the precision was the smallest one that lowers the "
        f"log-likelihood on validation images by at most 0.06 nats. The gains over MAP in nats were: {listed(other)}"
    )


def _rejected(scores: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy in percent by system, if half of a set mixed with Fashion-MNIST is rejected by entropy."""
    return {
        name: 100 * own["rejection"]["fashion_mnist"][5]
        for name, own in scores.items()
        if name in ("map", "subnetwork", "random", "swag", "ensemble", "dropout", "diagonal")
    }


def rejection(folder: Path) -> Verdict:
    """Rejecting by entropy, subnetwork inference is more accurate than MAP when half of the images are out of distribution."""
    runs = ("rotated_mnist_256", "rotated_mnist", "rotated_mnist_others")
    found, earlier, others = (_rejected(read(folder / f"{name}.json")["scores"]) for name in runs)
    return found["subnetwork"] > found["map"], (
        "We reject half of the images by entropy. Accuracy in percent on MNIST mixed with Fashion-MNIST, prior precision 500: "
        f"{listed(found, 1)}. In an earlier run, with 20 snapshots and 2,000 test images: {listed(earlier, 1)}. In a third run: "
        f"{listed(others, 1)}"
    )


def rejection_of_photographs(folder: Path) -> Verdict:
    """The same for a network trained on CIFAR-10."""
    found = _rejected(_on_cifar10(folder))
    return found["subnetwork"] > found["map"], (
        f"We reject half of the images by entropy. Accuracy in percent on CIFAR-10 mixed with Fashion-MNIST: {listed(found, 2)}. "
        "We ran one seed with 500 images of each set"
    )
