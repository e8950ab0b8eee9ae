"""Claims in figures of the paper on inducing weights; see `tools.paper_claims`."""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.paper_claims.reading import NAMES, Verdict, at, listed, matching, medians_by_system, read


def _gap_ratios(folder: Path) -> tuple[dict[str, float], str]:
    """Median over seeds of the std between the clusters divided by the std at the data, for the paper's and the short schedule."""

    def medians(paths: Iterable[Path]) -> dict[str, float]:
        outcomes = [one for path in paths for one in read(path)["outcomes"]]
        return medians_by_system(outcomes, "gap_ratio")

    short = medians(folder / f"regression_{part}.json" for part in ("inducing", "others"))
    published = medians(matching(folder, "regression_published_*.json"))
    return published, (
        "We divide the std in the gap by the std at the data, and take medians over seeds. After the paper's 20,000 steps of 32 "
        f"draws (three seeds): {listed(published, 1)}. After 1,500 steps of 8 draws (two or five seeds): "
        f"{listed({name: short[name] for name in published}, 1)}. NUTS (one seed): {short['NUTS']:.1f}"
    )


def inducing_widen_more_than_factorized(folder: Path) -> Verdict:
    """The inducing posteriors widen more between the clusters than FFG-W."""
    found, words = _gap_ratios(folder)
    return min(found[name] for name in ("FFG-U", "FCG-U", "Ensemble-U")) > found["FFG-W"], words


def correlated_widen_more(folder: Path) -> Verdict:
    """FCG-W, FCG-U and Ensemble-U capture more of the variance between clusters than FFG-U."""
    found, words = _gap_ratios(folder)
    wider = [name for name in ("FCG-W", "FCG-U", "Ensemble-U") if found[name] > found["FFG-U"]]
    return len(wider) == 3, f"This holds for {' and '.join(wider) or 'none'}. {words}"


def run_times(folder: Path) -> Verdict:
    """With several draws, inducing weights increase the run time by a small factor, which is smallest on the larger network."""
    content = read(folder.parents[2] / "benchmarks" / "results" / "resnets_gpu.json")
    found = {
        name: [content["figures"][f"{network}/inducing/{key}"] for key in ("one_at_a_time", "5_draws")]
        for name, network in (("ResNet-18", "resnet18"), ("ResNet-50", "resnet50"))
    }
    less = all(five < one for one, five in found.values())
    words = (
        f"On a {name}, we divide the time of a draw with its forward pass by the time of a deterministic forward pass. The ratio "
        "is "
        f"{one:.2f} if draws are made one at a time, and {five:.2f} if five draws are made together"
        for name, (one, five) in found.items()
    )
    shown = less and found["ResNet-50"][1] < found["ResNet-18"][1] < 1.5
    return shown, f"{'. '.join(words)}. We used batches of {content['batch']} on an {content['hardware']['gpu']}"


def constant_ece(folder: Path) -> Verdict:
    """The ECE of FFG-W stays within a factor of 1.5 over the severities."""
    means = read(folder / "fashion_mnist.json")["mean"]
    found = {name: [100 * own[f"corrupted/{severity}/ece"] for severity in range(1, 6)] for name, own in means.items()}
    words = "; ".join(f"{NAMES[name]} {', '.join(f'{one:.1f}' for one in own)}" for name, own in found.items())
    return max(found["ffg_w"]) < 1.5 * min(found["ffg_w"]), (
        f"ECE in percent at severities 1 to 5: {words}. We ran one to three seeds and six corruptions of Fashion-MNIST"
    )


def quarter_of_the_parameters(folder: Path) -> Verdict:
    """FFG-U and Ensemble-U of M = 64 have at most 24.3 % of a single network's parameters."""
    counts = {system: count for table, system, count, _ in read(folder / "parameters.json")["rows"] if table == "sizes"}
    found = {name: 100 * counts[f"{name}, M=64"] / counts["Deterministic"] for name in ("FFG-U", "Ensemble-U")}
    return max(found.values()) <= 24.3, f"Percentage of the parameters of a ResNet-50: {listed(found)}"


def _ablation(folder: Path) -> tuple[list[dict[str, Any]], str]:
    content = read(folder / "ablation.json")
    rows: list[dict[str, Any]] = content["rows"]
    seeds = max(row.get("seeds", 1) for row in rows)
    cut = f". We made {len(rows)} of the 17 training runs" if len(rows) < 17 else ""
    return rows, (
        f"Training: {content['num_train']:,} images of Fashion-MNIST, {content['settings']['epochs']} epochs, "
        f"{seeds} seed{'s' * (seeds > 1)}{cut}"
    )


def _by_size(folder: Path, score: str) -> tuple[dict[str, dict[int, float]], str]:
    """A score in percent by system and M under the usual caps, and a description of the setting."""
    found = {}
    rows, about = _ablation(folder)
    for system in ("ffg_u", "ensemble_u"):
        usual = statistics.mode((row["max_lambda"], row["max_std"]) for row in rows if row["system"] == system)
        found[system] = {
            row["inducing"]: 100 * row[score]
            for row in rows
            if row["system"] == system and (row["max_lambda"], row["max_std"]) == usual
        }
    words = "; ".join(f"{NAMES[system]} {at(own, '(M = {})')}" for system, own in found.items())
    return found, f"{ {'accuracy': 'Accuracy', 'ece': 'ECE'}[score] } in percent: {words}. {about}"


def ablation_size(folder: Path) -> Verdict:
    """Accuracy improves with M."""
    found, words = _by_size(folder, "accuracy")
    return all(list(own.values()) == sorted(own.values()) for own in found.values()), words


def ablation_size_ece(folder: Path) -> Verdict:
    """ECE improves with M."""
    found, words = _by_size(folder, "ece")
    return all(list(own.values()) == sorted(own.values(), reverse=True) for own in found.values()), words


def ablation_128(folder: Path) -> Verdict:
    """M = 128 has a higher accuracy and a higher ECE than M = 64."""
    (accuracy, words), (ece, more) = _by_size(folder, "accuracy"), _by_size(folder, "ece")
    numbers, _, _ = words.partition(". Training")
    return all(own[128] > own[64] for part in (accuracy, ece) for own in part.values()), f"{numbers}. {more}"


def ablation_caps(folder: Path) -> Verdict:
    """The best cap on lambda is small and above 0."""
    (rows, about), words, shown = _ablation(folder), [], True
    for system in ("ffg_u", "ensemble_u"):
        own = [row for row in rows if row["system"] == system and row["inducing"] == 64]
        std = statistics.mode(row["max_std"] for row in own)
        eces = {row["max_lambda"]: 100 * row["ece"] for row in own if row["max_std"] == std}
        best = min(eces, key=lambda cap: eces[cap])
        shown = shown and 0 < best < max(eces)
        words.append(f"{NAMES[system]} {at(eces, '(cap {:g})')}")
    return shown, f"ECE in percent by the cap on lambda: {'; '.join(words)}. {about}"


def _pruned(folder: Path) -> tuple[dict[tuple[str, float], Mapping[str, Any]], str]:
    """Rows by system and kept share (fine-tuned if pruned), and a description of them."""
    content = read(folder / "pruning.json")
    found = {(row["system"], row["keep"]): row for row in content["rows"] if row["keep"] == 1 or row["fine_tuned"]}
    words = [
        f"{NAMES[name]}: "
        + ", ".join(
            f"{100 * row['accuracy']:.2f} and {100 * row['ece']:.2f} ({100 * keep:g} % kept)"
            for (system, keep), row in found.items()
            if system == name
        )
        for name in dict.fromkeys(system for system, _ in found)
    ]
    seeds = found["ffg_u", 1.0]["seeds"]
    return found, (
        f"Accuracy and ECE in percent of {'. Accuracy and ECE in percent of '.join(words)}. Training: Fashion-MNIST, {seeds} "
        f"seed{'s' * (seeds > 1)}, "
        f"{content['settings']['epochs']} epochs, then {content['fine_tuning']} epochs of fine-tuning (50 in the paper)"
    )


def pruning_halves(folder: Path) -> Verdict:
    """Without half of the entries of Z, accuracy stays the same and calibration gets slightly worse."""
    found, words = _pruned(folder)
    whole, half = found["ffg_u", 1.0], found["ffg_u", 0.5]
    return half["accuracy"] > whole["accuracy"] - 0.005 and half["ece"] >= whole["ece"], words


def pruning_weights(folder: Path) -> Verdict:
    """FFG-W keeps its accuracy with a tenth of its weights, and does not with a hundredth."""
    found, words = _pruned(folder)
    least = found["ffg_w", 1.0]["accuracy"] - 0.005
    return found["ffg_w", 0.1]["accuracy"] > least > found["ffg_w", 0.01]["accuracy"], words


def pruning_weights_ece(folder: Path) -> Verdict:
    """FFG-W has a higher ECE with a tenth of its weights than with all."""
    found, words = _pruned(folder)
    return found["ffg_w", 0.1]["ece"] > found["ffg_w", 1.0]["ece"], words
