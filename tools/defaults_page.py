"""The tables of docs/defaults.md and docs/defaults-evidence.md, made from results of `benchmarks.defaults` and others."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tools.markdown import replaced, table

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("defaults.md", "defaults-evidence.md")]
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- {}: by python -m tools.defaults_page -->", "<!-- end -->"
TITLES = {
    "network": "the network itself",
    "temperature": "[temperature scaling](methods/temperature-scaling.md)",
    "ensemble": "[ensemble](methods/ensemble.md) of 5, trained as long",
    "laplace_last_layer": "[Laplace](methods/laplace.md), last layer",
    "laplace_kronecker": "Laplace, Kronecker",
    "laplace_diagonal": "Laplace, diagonal",
    "subnetwork_variance": "[subnetwork](methods/subnetwork.md) `largest_variance(1000)`",
    "subnetwork_swag": "subnetwork `largest_swag_variance(1000)`",
    "mean_field": "[mean-field](methods/mean-field.md)",
    "k_tied": "[k-tied](methods/k-tied.md)",
    "matrix_normal": "[matrix normal](methods/matrix-normal.md)",
    "rank_one": "[rank-one](methods/rank-one.md)",
    "inducing": '[inducing weights](methods/inducing.md), `init="network"`',
    "walsh_hadamard": '[Walsh-Hadamard](methods/walsh-hadamard.md), `init="residual"`',
    "dropout": "[dropout](methods/dropout.md)",
    "swag": "[SWAG](methods/swag.md)",
    "function_space": "[function space](methods/function-space.md)",
}
REFERENCE_METHODS = ("network", "temperature", "ensemble")
NETWORKS = {
    "cnn": "CNN",
    "mlp": "MLP",
    "transformer": "Transformer",
    "gru": "GRU",
    "normalized_cnn": "CNN with BatchNorm",
}
Row = dict[str, Any]
BOUNDS: dict[str, Callable[[Row, Row], bool]] = {
    "accuracy": lambda row, plain: row["accuracy"] >= plain["accuracy"] - 0.01,
    "NLL": lambda row, plain: row["nll"] <= plain["nll"] + 0.02,
    "ECE": lambda row, plain: row["ece"] <= max(0.04, plain["ece"]),
    "information": lambda row, _: row["mutual_information"] > 1e-3,
    "unfamiliar": lambda row, _: row["mutual_information_outside"] >= 2 * row["mutual_information"],
    "AUROC": lambda row, plain: row["auroc_entropy"] >= plain["auroc_entropy"] - 0.01,
}
"""Bounds that a method with default arguments must keep, relative to the plain network. Both scores are means over seeds."""
LINKS = ("mc", "probit", "bridge", "bridge_norm")
"""Links of laplace-torch."""
KINDS = ("digits", "letters")
KEYS = ("accuracy", "nll", "ece", "mutual_information", "mutual_information_outside", "auroc_entropy", "seconds")


def stored(name: str) -> list[Row]:
    """The rows of a results file."""
    return list(json.loads((RESULTS / f"{name}.json").read_text())["figures"].values())


def means(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Scores by network and method, averaged over seeds, with the plain network's scores for the same seeds; or an error."""
    found: dict[tuple[str, str], Row] = {}
    for key in dict.fromkeys((row["network"], row["method"]) for row in rows):
        group = [row for row in rows if (row["network"], row["method"]) == key]
        errors = [row["error"] for row in group if "error" in row]
        if errors:
            found[key] = {"error": errors[0]}
            continue
        seeds = {row["seed"] for row in group}
        plain = [row for row in rows if (row["network"], row["method"]) == (key[0], "network") and row["seed"] in seeds]
        names = [name for name in group[0] if name.startswith(KEYS)]
        found[key] = {name: mean(row[name] for row in group) for name in names}
        found[key]["plain"] = {name: mean(row[name] for row in plain) for name in KEYS}
    return found


def missed(row: Row) -> list[str]:
    """The bounds that a method does not keep."""
    return [name for name, keeps in BOUNDS.items() if not keeps(row, row["plain"])]


def judged(key: tuple[str, str]) -> bool:
    """Whether a network and method have to keep the bounds."""
    return key[0] in NETWORKS and key[1] in TITLES and key[1] not in REFERENCE_METHODS


def exceptions(found: dict[tuple[str, str], Row]) -> dict[tuple[str, str], list[str]]:
    """The bounds that are missed, by network and method."""
    pairs = ((key, row) for key, row in found.items() if judged(key))
    listed = {key: ["error"] if "error" in row else missed(row) for key, row in pairs}
    return {key: names for key, names in listed.items() if names}


REASONS: dict[str, dict[str, str]] = {
    "mlp": {
        "swag": "three epochs of SGD give few iterates, and these spread only along directions of the training images (the "
        "paper uses tens of epochs)",
        "walsh_hadamard": "presumably because one vector of 1,024 numbers varies all weights of a layer, in directions that "
        "clothes use more than digits do",
    },
    "normalized_cnn": {
        "laplace_kronecker": "too wide: BatchNorm with fixed statistics amplifies the noise of the weights before it. Take the "
        "last layer, a subnetwork, or a larger `prior_precision`",
        "laplace_diagonal": "the same as for Kronecker",
        "swag": "presumably the learning rate, which suits networks without BatchNorm: the iterates leave the optimum",
        "inducing": "presumably because more training makes the model more confident on digits, on which the network is already "
        "more confident than on clothes",
        "dropout": "the same as for inducing weights; the bound is missed by 0.001",
    },
}
"""Why a method misses a bound on a network, by network and method."""


def exception_table(found: dict[tuple[str, str], Row]) -> str:
    """Table of missed bounds with the shortfall and its cause."""
    rows, out = [], exceptions(found)
    for (network, method), names in out.items():
        row = found[network, method]
        said = ["fails: " + row["error"]] if "error" in row else [shortfall(name, row) for name in names]
        why = REASONS.get(network, {}).get(method, "not explained")
        rows.append([TITLES[method], NETWORKS[network], "; ".join(said), why])
    pairs = sum(map(judged, found))
    head = f"{len(out)} of {pairs} pairs of method and network miss a bound, judged by means over three seeds:\n\n"
    return head + table(["", "network", "misses", "why"], rows)


def shortfall(name: str, row: Row) -> str:
    """The numbers of a missed bound."""
    plain = row["plain"]
    if name == "unfamiliar":
        return f"mutual information on unfamiliar images is only {_ratio(row):.1f} times as high as on test images (bound: 2)"
    if name == "information":
        return f"mutual information {row['mutual_information']:.4f} (asked 0.001)"
    key = {"accuracy": "accuracy", "NLL": "nll", "ECE": "ece", "AUROC": "auroc_entropy"}[name]
    return f"{name} {row[key]:.3f} (the network's {plain[key]:.3f})"


def _ratio(row: Row, kind: str = "") -> float:
    return row[f"mutual_information_outside{kind}"] / max(row["mutual_information"], 1e-12)


def network_table(found: dict[tuple[str, str], Row], network: str) -> str:
    """All methods on one network."""
    rows, out = [], exceptions(found)
    for method, title in TITLES.items():
        row = found.get((network, method))
        if row is None:
            continue
        if "error" in row:
            rows.append([title, *[""] * 6, "error"])
            continue
        inside, outside = row["mutual_information"], row["mutual_information_outside"]
        information = "" if method in ("network", "temperature") else f"{inside:.3f} / {outside:.3f}"
        scores = [f"{row[key]:.3f}" for key in ("accuracy", "nll", "ece", "auroc_entropy")]
        misses = ", ".join(out.get((network, method), []))
        rows.append([title, *scores[:3], information, scores[3], f"{row['seconds']:.0f}", misses])
    head = ["", "accuracy", "NLL", "ECE", "mutual information, test / unfamiliar images", "AUROC", "seconds", "misses"]
    return f"### {NETWORKS[network]}\n\n{table(head, rows)}"


def summary(found: dict[tuple[str, str], Row]) -> str:
    """Table of differences from the plain network, averaged over networks."""
    lines = []
    for method, title in TITLES.items():
        rows = [found.get((network, method)) for network in NETWORKS]
        both = [(row, row["plain"]) for row in rows if row is not None and "error" not in row]
        if len(both) < len(NETWORKS) or method == "network":
            continue
        changes = [
            mean(row[key] - plain[key] for row, plain in both) for key in ("accuracy", "nll", "ece", "auroc_entropy")
        ]
        shown = "" if method == "temperature" else f"{mean(_ratio(row) for row, _ in both):.1f}"
        lines.append([title, f"{100 * changes[0]:+.1f}", *(f"{change:+.3f}" for change in changes[1:]), shown])
    head = ["", "accuracy, points", "NLL", "ECE", "AUROC", "mutual information, unfamiliar / test images"]
    return table(head, lines)


def trials(found: dict[tuple[str, str], Row], method: str, variants: Sequence[tuple[str, str]]) -> str:
    """A method under several variants: accuracy, NLL and ECE on each network."""
    networks = [name for name in NETWORKS if any((name, f"{method},{key}") in found for key, _ in variants)]
    lines = []
    for key, title in (("", "the network"), *variants):
        rows = [found.get((name, f"{method},{key}" if key else "network")) for name in networks]
        scores = ("accuracy", "nll", "ece")
        lines.append([title, *(", ".join(f"{row[key]:.3f}" for key in scores) if fine(row) else "" for row in rows)])
    return table(["", *(NETWORKS[name] for name in networks)], lines)


def fine(row: Row | None) -> bool:
    """Whether there is a row without an error."""
    return row is not None and "error" not in row


def widths() -> str:
    """Table of priors of four widths: kept bounds, and NLL minus the plain network's, on the suite's and on a user's networks."""
    file = json.loads((RESULTS / "default_prior_widths.json").read_text())
    found = means(list(file["figures"].values()))
    lines = []
    head = [
        "",
        "bounds kept by all networks",
        "bounds kept by the suite's networks after 3 epochs",
        "NLL of the suite's networks after 3 epochs",
        "after 30 epochs",
    ]
    head += ["a user's, 3 epochs", "30 epochs"]
    for name, totals in file["totals"].items():
        variant = f"prior={name.lower().replace('(', '').replace(')', '')}"
        cells = [f"{totals[key]:.0f}" for key in ("kept", "suite")]
        for suite in (True, False):
            for ending in (variant, f"{variant},epochs=30"):
                own = [
                    row
                    for (network, method), row in found.items()
                    if (network in NETWORKS) == suite and method.split(",", 1)[-1] == ending
                ]
                cells.append(f"{mean(row['nll'] - row['plain']['nll'] for row in own):+.4f}")
        lines.append([f"`{name}`", *cells])
    pairs = [key for key in found if "," in key[1]]
    count, own = (
        len(part) // 4 * len(BOUNDS) for part in (pairs, [k for k in pairs if k[0] in NETWORKS and "30" not in k[1]])
    )
    return (
        table(head, lines)
        + f"\n\nThe largest possible counts of kept bounds are {count} (all) and {own} (the suite's)."
    )


def outside() -> str:
    """Table of bounds and scores on networks outside the suite, under the default prior."""
    found = means(stored("defaults_outside"))
    lines = []
    for method, title in TITLES.items():
        cells = []
        for network in ("strided_cnn", "mlp_6000"):
            row = found.get((network, method))
            if not fine(row):
                cells.append("" if row is None else "error")
                continue
            shown = f"{row['nll']:.3f}, {row['ece']:.3f}"
            if method not in ("network", "temperature"):
                shown += f", {_ratio(row):.1f}"
            cells.append(
                shown + ("" if method in REFERENCE_METHODS or not missed(row) else f"; {', '.join(missed(row))}")
            )
        if any(cells):
            lines.append([title, *cells])
    return table(["NLL, ECE, ratio of mutual information (unfamiliar / test images), misses", "CNN", "MLP"], lines)


def kinds(found: dict[tuple[str, str], Row]) -> str:
    """Table of mutual information on unfamiliar images divided by its value on test images, by kind of image."""
    lines = []
    for method, title in TITLES.items():
        rows = [found.get((network, method)) for network in NETWORKS]
        if method in ("network", "temperature") or not any(rows):
            continue
        cells = [" / ".join(f"{_ratio(row, f'_{kind}'):.1f}" for kind in KINDS) if fine(row) else "" for row in rows]
        lines.append([title, *cells])
    below = {
        kind: sum(
            row.get(f"mutual_information_outside_{kind}", math.inf) < 2 * row.get("mutual_information", 0.0)
            for key, row in found.items()
            if judged(key)
        )
        for kind in KINDS
    }
    said = " and ".join(f"{count} on {kind}" for kind, count in below.items())
    whole = table(["digits / letters", *NETWORKS.values()], lines)
    return whole + f"\n\nOf {sum(map(judged, found))} pairs of method and network, these have a ratio below 2: {said}."


def links() -> str:
    """Last-layer Laplace next to laplace-torch's: means over the suite's seeds and over later ones, and the worst seed of each."""
    figures = json.loads((RESULTS / "laplace_links.json").read_text())["figures"]
    lines = []
    head = ["NLL", "the network", "ours, default", "1,000 draws of the same posterior", "laplace-torch's default"]
    head += ["its best link, untuned", "which link", "ours minus this link", "the same on the worst seed"]
    head += ["ours minus its best of 8 (also tuned by its evidence)", "ours minus its best of 4 at our precision"]

    def best(row: Row, *precisions: str) -> str:
        """Name of laplace-torch's best link for the given precisions."""
        keys = [f"laplace-torch, {part}, {link}" for part in precisions for link in LINKS]
        return min(keys, key=lambda key: row[key])

    def group(name: str) -> tuple[str, str]:
        network, seed = name.split(", seed ")
        return network, "seeds 0 to 2" if int(seed) < 3 else "seeds 3 to 5"

    keys, rows = [key for key in figures if ", seed" in key], []
    for place in dict.fromkeys(
        map(group, sorted(keys, key=lambda key: (list(figures).index(key.split(", ")[0]), key)))
    ):
        seeds = [figures[key] for key in keys if group(key) == place]
        row = {key: mean(entry[key] for entry in seeds) for key in seeds[0]}
        rows.append(row)
        chosen = best(row, "default")
        shown = ("network", "ours", "mc_of_the_same", "laplace-torch, default, probit", chosen)
        cells = [*(f"{row[key]:.4f}" for key in shown), chosen.rsplit(", ", 1)[1]]
        less = [row["ours"] - row[chosen], max(entry["ours"] - entry[best(entry, "default")] for entry in seeds)]
        less += [row["ours"] - row[best(row, *names)] for names in (("default", "evidence"), ("ours",))]
        cells += [f"{value:+.4f}" for value in less]
        lines.append([f"{NETWORKS.get(place[0], 'CNN, digits')}, {place[1]}", *cells])
    over = {key: mean(row[key] for row in rows) for key in rows[0]}
    untuned, tuned = best(over, "default"), best(over, "default", "evidence")
    said = f"{over['ours']:.4f} for ours, {over[untuned]:.4f} for laplace-torch's best link ({untuned.rsplit(', ', 1)[1]}), and "
    said += f"{over[tuned]:.4f} for its best of 8 ({tuned.split(', ', 1)[1]})"
    return table(head, lines) + f"\n\nMean NLL over these networks: {said}."


def regression() -> str:
    """Table of regressions under the defaults, with the estimators' earlier scores."""
    return _by_method("defaults_regression", "NLL (before), share in intervals of 50 and 90 %, seconds", "_before")


def noisy() -> str:
    """Table of regressions of made tables with much noise."""
    return _by_method("defaults_regression_noise", "NLL, share in intervals of 50 and 90 %, seconds")


def _by_method(name: str, title: str, before: str | None = None) -> str:
    figures = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    earlier = json.loads((RESULTS / f"{name}{before}.json").read_text())["figures"] if before else {}
    sets = dict.fromkeys(key.split(", ")[0] for key in figures)
    methods = dict.fromkeys(key.split(", ")[1] for key in figures)
    lines = []
    for method in methods:
        cells = []
        for one in sets:
            row, old = figures.get(f"{one}, {method}"), earlier.get(f"{one}, {method}")
            if row is None:
                cells.append("")
                continue
            was = "" if old is None else f" ({old['nll']:.2f})"
            inside = f"{100 * row['coverage_50']:.0f} and {100 * row['coverage_90']:.0f} %"
            cells.append(f"{row['nll']:.2f}{was}, {inside}, {row['seconds']:.0f} s")
        lines.append([TITLES.get(method, method).split(",")[0].split(" of 5")[0], *cells])
    rows = list(figures.values())
    within = sum(0.85 <= row["coverage_90"] <= 0.95 for row in rows)
    whole = table(
        [title, *(one.replace("noise_", "") + " rows" if one.startswith("noise_") else one for one in sets)], lines
    )
    return whole + f"\n\nThe 90 % intervals contain 85 to 95 % of the targets in {within} of {len(rows)} cells."


PRIORS = [(f"prior=neal{scale}", f"`Neal({scale})`") for scale in (1, 2, 4, 8)] + [("prior=standard", "`Standard()`")]
LONG_PRIORS = [(f"{key},epochs=30", title) for key, title in PRIORS if "1" not in key and "8" not in key]
STARTS = [
    ("prior=neal4,std=0.03", "0.03"),
    ("prior=neal4", "0.1"),
    ("prior=neal4,std=0.3", "0.3"),
    ("prior=neal4,rate=constant", "0.1, at a constant rate"),
]


FILES = {
    "links": "laplace_links.json",
    "regression": "defaults_regression.json",
    "noisy": "defaults_regression_noise.json",
    "widths": "default_prior_widths.json",
    "outside": "defaults_outside.json",
}


def main() -> None:
    """Write the pages, and print the exceptions."""
    found, tried = means(stored("defaults")), means(stored("default_trials"))
    parts = {
        "summary": summary(found),
        "exceptions": exception_table(found),
        "networks": "\n\n".join(network_table(found, network) for network in NETWORKS),
        "kinds": kinds(found),
        **{
            make.__name__: make()
            for make in (links, regression, noisy, widths, outside)
            if (RESULTS / FILES[make.__name__]).exists()
        },
        "priors": trials(tried, "point", PRIORS),
        "long": trials(tried, "point", LONG_PRIORS),
        "starts": trials(tried, "mean_field", STARTS),
    }
    for page in PAGES:
        text = page.read_text()
        for name, body in parts.items():
            if START.format(name) in text:
                text = replaced(text, START.format(name), END, body)
        page.write_text(text)
    for (network, method), names in exceptions(found).items():
        print(network, method, *names)


if __name__ == "__main__":
    main()
