"""Claims in figures of the paper on Walsh-Hadamard; see `tools.paper_claims`."""

import statistics
from pathlib import Path
from typing import Any

from tools.paper_claims.reading import Verdict, at, matching, read

NUM_TRAININGS = 90
"""Number of training runs of the random features' command: functions x seeds x systems x sizes."""


def approximability(folder: Path) -> Verdict:
    """The distance of a random matrix to the nearest WHVI matrix stays bounded as D grows."""
    rows = read(folder / "approximability.json")["rows"]
    found, zero = {row["size"]: row["median"] for row in rows}, max(row["zero_matrix"] for row in rows)
    return max(found.values()) < zero + 0.01, (
        f"Median distance: {at(found, '(D = {})')}. The distance of a random matrix to the matrix of zeros is {zero:.2f}, which "
        "is an upper bound. The median distance approaches this bound because 3 D parameters cannot fit D^2 random numbers"
    )


def random_features_beat_fourier(folder: Path, covariance: str = "diagonal") -> Verdict:
    """With diagonal covariances, WHVI over reshaped features largely outperforms Fourier features with as many parameters."""
    found, about = _features(folder, "fourier", covariance)
    ratios = sorted(own / rival for own, rival in found)
    wins = sum(ratio < 1 for ratio in ratios)
    return wins > 0.75 * len(found) and min(ratios) < 0.8, (
        f"{about}, WHVI has the lower RMSE in {wins} of {len(found)} settings. RMSE of WHVI divided by RMSE of Fourier features: "
        f"{', '.join(f'{one:.2f}' for one in ratios)}. "
        "The claim counts as shown if WHVI has the lower RMSE in three quarters of the settings, and in at least one setting by a "
        "fifth"
    )


def full_random_features_beat_fourier(folder: Path) -> Verdict:
    """The same with full covariances."""
    return random_features_beat_fourier(folder, "full")


def inducing_points_beat_features(folder: Path) -> Verdict:
    """With diagonal covariances, WHVI over reshaped features has a higher RMSE than inducing points."""
    found, about = _features(folder, "inducing_points", "diagonal")
    wins = sum(rival < own for own, rival in found)
    return wins > len(found) / 2, (f"{about}, inducing points have the lower RMSE in {wins} of {len(found)} settings")


def _features(folder: Path, rival: str, covariance: str) -> tuple[list[tuple[float, float]], str]:
    """Mean RMSE of WHVI and of a rival in the settings with both, and a description of the finished runs."""
    groups: dict[Any, dict[str, list[float]]] = {}
    rows = [row for path in matching(folder, "random_features*.json") for row in read(path)["rows"]]
    for row in rows:
        if row["covariance"] == covariance:
            own = groups.setdefault((row["function"], row["block"]), {})
            own.setdefault(row["system"], []).append(row["rmse"])
    means = [{system: statistics.fmean(values) for system, values in own.items()} for own in groups.values()]
    whole = [(own["walsh_hadamard"], own[rival]) for own in means if {"walsh_hadamard", rival} <= own.keys()]
    return whole, f"After {len(rows)} of the command's {NUM_TRAININGS} training runs, each with one seed"


def transform_on_cpu(folder: Path) -> Verdict:
    """On a CPU, the transform is faster than a dense product from 1,024 features on."""
    rows = read(folder / "transform_time.json")["rows"]
    found = {row["size"]: row["ratio"] for row in rows if row["by"] == "features"}
    even = min(size for size in found if all(found[other] < 1 for other in found if other >= size))
    earlier = ", earlier than in the paper" if even < 512 else ""
    return even <= 1024, (
        f"Time of the transform divided by the time of the dense product: {at(found, '(D = {})')}. The transform is faster from "
        f"D = {even} on{earlier}. We used batches of 512 on one core"
    )


def transform_on_gpu(folder: Path) -> Verdict:
    """On a GPU, the transform is faster than a dense product at every size."""
    figures = read(folder.parents[2] / "benchmarks" / "results" / "hadamard_gpu.json")["figures"]
    found = {size: figures[f"transform_{size}_over_dense"] for size in (512, 4096, 16384)}
    recorded = {size: figures[f"recorded_transform_{size}_over_dense"] for size in found}
    return max(found.values()) < 1, (
        f"Time of the transform divided by the time of the dense product with tf32: {at(found, '(D = {})')}. If both operations "
        "are replayed "
        f"from a CUDA graph: {at(recorded, '(D = {})')}. We used batches of 512 on an H200"
    )


def geometry(folder: Path) -> Verdict:
    """W is a rotation of g stretched along the axes: vec W = L Q g with L diagonal and the columns of Q orthonormal."""
    rows = read(folder / "geometry.json")["rows"]
    far = max(max(row["from_product"], row["from_orthonormal"]) for row in rows)
    sizes = ", ".join(str(row["size"]) for row in rows)
    return far < 1e-12, (
        f"With D = {sizes}, in float64, the largest entry of vec W - L Q g and of Q^T Q - I is {far:.0e}"
    )
