"""Claims in figures of the paper on Walsh-Hadamard; see `tools.paper_claims`."""

import statistics
from pathlib import Path
from typing import Any

from tools.markdown import table
from tools.paper_claims.reading import Verdict, matching, read

NUM_TRAININGS = 90
"""Number of training runs of the random features' command: functions x seeds x systems x sizes."""


NUM_SETTINGS = 15
"""Number of settings in which two systems are compared: functions x sizes."""


def _distances(folder: Path) -> tuple[dict[int, float], float]:
    """Median distance of a random matrix to the nearest WHVI matrix by D, and the distance to the matrix of zeros."""
    rows = read(folder / "approximability.json")["rows"]
    return {row["size"]: row["median"] for row in rows}, max(row["zero_matrix"] for row in rows)


def distances(folder: Path) -> str:
    """Table of the median distances."""
    found, _ = _distances(folder)
    return "The table shows the median distance of a random D x D matrix to the nearest WHVI matrix.\n\n" + table(
        ["D", *map(str, found)], [["median distance", *(f"{one:.2f}" for one in found.values())]]
    )


def approximability(folder: Path) -> Verdict:
    """The distance of a random matrix to the nearest WHVI matrix stays bounded as D grows."""
    found, zero = _distances(folder)
    return max(found.values()) < zero + 0.01, (
        f"The median distance is {found[max(found)]:.2f} for D = {max(found)}. The distance to the matrix of zeros, {zero:.2f}, is "
        "an upper bound. The median distance approaches this bound because 3 D parameters cannot fit D^2 random numbers"
    )


def random_features_beat_fourier(folder: Path, covariance: str = "diagonal") -> Verdict:
    """With diagonal covariances, WHVI over reshaped features largely outperforms Fourier features with as many parameters."""
    found = _features(folder, "fourier", covariance)
    ratios = sorted(own / rival for own, rival in found)
    wins, middle = sum(ratio < 1 for ratio in ratios), statistics.median(ratios)
    shown = wins > 0.75 * len(found) and middle < 0.8
    enough = wins > 0.75 * NUM_SETTINGS
    return None if shown and not enough else shown, (
        f"WHVI has the lower RMSE in {wins} of the {len(found)} settings that we ran. The RMSE of WHVI divided by the "
        "RMSE of Fourier features is "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}, with a median of {middle:.2f}"
    )


def full_random_features_beat_fourier(folder: Path) -> Verdict:
    """The same with full covariances."""
    return random_features_beat_fourier(folder, "full")


def inducing_points_beat_features(folder: Path) -> Verdict:
    """With diagonal covariances, WHVI over reshaped features has a higher RMSE than inducing points."""
    found = _features(folder, "inducing_points", "diagonal")
    wins = sum(rival < own for own, rival in found)
    return wins > len(found) / 2, f"inducing points have the lower RMSE in {wins} of {len(found)} settings"


def _feature_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in matching(folder, "random_features*.json") for row in read(path)["rows"]]


def random_features_setting(folder: Path) -> str:
    """Number of finished runs, and the rule of the claims."""
    return (
        f"We made {len(_feature_rows(folder))} of the command's {NUM_TRAININGS} training runs, each with one seed. WHVI "
        f"counts as largely outperforming Fourier features if it has the lower RMSE in more than three quarters of {NUM_SETTINGS} "
        "settings (five functions, three sizes), and if the median of its RMSE divided by the RMSE of Fourier features "
        "is below 0.8."
    )


def _features(folder: Path, rival: str, covariance: str) -> list[tuple[float, float]]:
    """Mean RMSE of WHVI and of a rival in the settings with both."""
    groups: dict[Any, dict[str, list[float]]] = {}
    for row in _feature_rows(folder):
        if row["covariance"] == covariance:
            own = groups.setdefault((row["function"], row["block"]), {})
            own.setdefault(row["system"], []).append(row["rmse"])
    means = [{system: statistics.fmean(values) for system, values in own.items()} for own in groups.values()]
    return [(own["walsh_hadamard"], own[rival]) for own in means if {"walsh_hadamard", rival} <= own.keys()]


def _on_cpu(folder: Path) -> dict[int, float]:
    rows = read(folder / "transform_time.json")["rows"]
    return {row["size"]: row["ratio"] for row in rows if row["by"] == "features"}


def _on_gpu(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Ratios on a GPU, as calls and replayed from a CUDA graph."""
    figures = read(folder.parents[2] / "benchmarks" / "results" / "hadamard_gpu.json")["figures"]
    first, second = (
        {size: figures[f"{name}_{size}_over_dense"] for size in (512, 4096, 16384)}
        for name in ("transform", "recorded_transform")
    )
    return first, second


def times(folder: Path) -> str:
    """Times of the transform over those of a dense product."""
    calls, recorded = _on_gpu(folder)
    found = {"one core": _on_cpu(folder), "H200 with tf32": calls, "H200 with tf32, CUDA graph": recorded}
    sizes = sorted({size for own in found.values() for size in own})
    rows = [[name, *(f"{own[size]:.2f}" if size in own else "" for size in sizes)] for name, own in found.items()]
    return (
        "The table shows the time of the transform divided by the time of the dense product, for D features and batches of 512.\n\n"
        + table(["D", *map(str, sizes)], rows)
    )


def transform_on_cpu(folder: Path) -> Verdict:
    """On a CPU, the transform is faster than a dense product from 1,024 features on."""
    found = _on_cpu(folder)
    even = min(size for size in found if all(found[other] < 1 for other in found if other >= size))
    return even <= 1024, (
        f"The transform is faster for D of {even} or more. The ratio is {found[even]:.2f} for D = {even}"
    )


def transform_on_gpu(folder: Path) -> Verdict:
    """On a GPU, the transform is faster than a dense product at every size."""
    found, recorded = _on_gpu(folder)
    return max(found.values()) < 1, (
        f"For D = 512, the ratio of the times is {found[512]:.2f}. If both operations are replayed from a CUDA graph, the ratio is "
        f"{recorded[512]:.2f}"
    )


def geometry(folder: Path) -> Verdict:
    """W is a rotation of g stretched along the axes: vec W = L Q g with L diagonal and the columns of Q orthonormal."""
    rows = read(folder / "geometry.json")["rows"]
    far = max(max(row["from_product"], row["from_orthonormal"]) for row in rows)
    sizes = [row["size"] for row in rows]
    return far < 1e-12, (
        f"In float64, for D from {min(sizes)} to {max(sizes)}, the largest entry of vec W - L Q g and of Q^T Q - I is {far:.0e}"
    )
