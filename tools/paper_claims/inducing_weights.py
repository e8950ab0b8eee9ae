"""Claims in figures of the paper on inducing weights; see `tools.paper_claims`."""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.paper_claims.reading import Verdict, listed, matching, medians_by_system, read


def _gap_ratios(folder: Path) -> tuple[dict[str, float], str]:
    """Median over seeds of the std between the clusters divided by the std at the data, for the paper's and the short schedule."""

    def medians(paths: Iterable[Path]) -> dict[str, float]:
        outcomes = [one for path in paths for one in read(path)["outcomes"]]
        return medians_by_system(outcomes, "gap_ratio")

    short = medians(folder / f"regression_{part}.json" for part in ("inducing", "others"))
    published = medians(matching(folder, "regression_published_*.json"))
    words = ", ".join(f"{name} {value:.1f} ({short[name]:.1f})" for name, value in published.items())
    return published, (
        "std in the gap divided by std at the data, medians over three seeds, after the paper's 20,000 steps of 32 draws (in "
        f"parentheses: over two or five seeds, after 1,500 steps of 8 draws): {words}; NUTS, one seed, {short['NUTS']:.1f}"
    )


def inducing_widen_more_than_factorized(folder: Path) -> Verdict:
    """The inducing posteriors widen more between the clusters than FFG-W."""
    found, words = _gap_ratios(folder)
    return min(found[name] for name in ("FFG-U", "FCG-U", "Ensemble-U")) > found["FFG-W"], words


def correlated_widen_more(folder: Path) -> Verdict:
    """FCG-W, FCG-U and Ensemble-U capture more of the variance between clusters than FFG-U."""
    found, words = _gap_ratios(folder)
    wider = [name for name in ("FCG-W", "FCG-U", "Ensemble-U") if found[name] > found["FFG-U"]]
    return len(wider) == 3, (f"this holds for {' and '.join(wider) or 'none'}: {words}")


def run_times(folder: Path) -> Verdict:
    """Inducing weights with several draws cost a small factor of run time, least on the larger network."""
    content = read(folder.parents[2] / "benchmarks" / "results" / "resnets_gpu.json")
    found = {
        f"{network}, {name}": content["figures"][f"{network}/inducing/{key}"]
        for network in ("resnet18", "resnet50")
        for name, key in (("one draw", "one_at_a_time"), ("five draws", "5_draws"))
    }
    less = all(found[f"{network}, five draws"] < found[f"{network}, one draw"] for network in ("resnet18", "resnet50"))
    shown = less and found["resnet50, five draws"] < found["resnet18, five draws"] < 1.5
    about = f"batch {content['batch']}, {content['hardware']['gpu']}"
    return (
        shown,
        f"time of a draw and its forward pass, in passes of the deterministic network, {about}: {listed(found)}",
    )


def constant_ece(folder: Path) -> Verdict:
    """The ECE of FFG-W stays within a factor of 1.5 over the severities."""
    means = read(folder / "fashion_mnist.json")["mean"]
    found = {name: [100 * own[f"corrupted/{severity}/ece"] for severity in range(1, 6)] for name, own in means.items()}
    words = "; ".join(f"{name} {', '.join(f'{one:.1f}' for one in own)}" for name, own in found.items())
    return max(found["ffg_w"]) < 1.5 * min(found["ffg_w"]), (
        f"six corruptions of Fashion-MNIST, one to three seeds, ECE in percent at severities 1 to 5: {words}"
    )


def quarter_of_the_parameters(folder: Path) -> Verdict:
    """FFG-U and Ensemble-U of M = 64 have at most 24.3 % of a single network's parameters."""
    counts = {system: count for table, system, count, _ in read(folder / "parameters.json")["rows"] if table == "sizes"}
    found = {name: 100 * counts[name] / counts["Deterministic"] for name in ("FFG-U, M=64", "Ensemble-U, M=64")}
    return max(found.values()) <= 24.3, f"a ResNet-50, percent of its parameters: {listed(found)}"


def _ablation(folder: Path) -> tuple[list[dict[str, Any]], str]:
    content = read(folder / "ablation.json")
    rows: list[dict[str, Any]] = content["rows"]
    seeds = max(row.get("seeds", 1) for row in rows)
    cut = f", stopped after {len(rows)} of 17 training runs" if len(rows) < 17 else ""
    epochs = content["settings"]["epochs"]
    return rows, f"Fashion-MNIST, {content['num_train']:,} training images, {epochs} epochs, seeds: {seeds}{cut}"


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
    words = "; ".join(f"{system} by M: {listed(own)}" for system, own in found.items())
    return found, f"{about}, {score} in percent of {words}"


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
    return all(own[128] > own[64] for part in (accuracy, ece) for own in part.values()), f"{words}; {more}"


def ablation_caps(folder: Path) -> Verdict:
    """The best cap on lambda is small and above 0."""
    (rows, about), words, shown = _ablation(folder), [], True
    for system in ("ffg_u", "ensemble_u"):
        own = [row for row in rows if row["system"] == system and row["inducing"] == 64]
        std = statistics.mode(row["max_std"] for row in own)
        eces = {row["max_lambda"]: 100 * row["ece"] for row in own if row["max_std"] == std}
        best = min(eces, key=lambda cap: eces[cap])
        shown = shown and 0 < best < max(eces)
        words.append(f"{system} by the cap on lambda: {listed(eces)}")
    return shown, f"{about}, ECE in percent of {'; '.join(words)}"


def _pruned(folder: Path) -> tuple[dict[tuple[str, float], Mapping[str, Any]], str]:
    """Rows by system and kept share (fine-tuned if pruned), and a description of them."""
    content = read(folder / "pruning.json")
    found = {(row["system"], row["keep"]): row for row in content["rows"] if row["keep"] == 1 or row["fine_tuned"]}
    words = [
        f"{system} at {100 * keep:g} %: {100 * row['accuracy']:.2f}, {100 * row['ece']:.2f}"
        for (system, keep), row in found.items()
    ]
    return found, (
        f"Fashion-MNIST, {content['settings']['epochs']} epochs and {content['fine_tuning']} of fine-tuning (the paper: 50), "
        f"seeds: {found['ffg_u', 1.0]['seeds']}, accuracy and ECE in percent of {'; '.join(words)}"
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
