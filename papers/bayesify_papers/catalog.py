"""Every experiment of the five papers: its name, what runs it, what it costs, and what reads its results."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from bayesify_papers import rows

PAPERS = {
    "inducing-weights": "Ritter et al. 2021",
    "subnetwork": "Daxberger et al. 2021",
    "function-space": "Rudner et al. 2022",
    "walsh-hadamard": "Rossi et al. 2020",
    "global-inducing": "Ober & Aitchison 2021",
}

Reader = Callable[[Path], list[rows.Row]]


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper.

    Args:
        name: `paper/what`.
        about: One line.
        module: Below `bayesify_papers`; its `main(arguments)` writes to the folder after `--out`.
        read: From that folder to rows.
        arguments: Of the real run, after the module's defaults.
        parts: Runs that are independent of each other by name, each with further arguments.
        smoke: Arguments of the quick run; `None` where another experiment's quick run is the same.
        cost: Hardware and time of the real run: a core of an aarch64 machine, an H200.
        results: Where our own results lie in the repository; empty if there are none yet.
    """

    name: str
    about: str
    module: str
    read: Reader
    arguments: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    smoke: tuple[str, ...] | None = ("--smoke",)
    cost: str = ""
    results: str = ""

    @property
    def paper(self) -> str:
        """Authors and year."""
        return PAPERS[self.name.partition("/")[0]]

    @property
    def target(self) -> str:
        """Dotted name of the module."""
        return f"bayesify_papers.{self.module}"

    @property
    def available(self) -> bool:
        """Whether the module is there."""
        try:
            return find_spec(self.target) is not None
        except ImportError:
            return False

    def main(self, arguments: list[str]) -> int:
        """Run it."""
        status: int = importlib.import_module(self.target).main(arguments)
        return status

    def runs(self, smoke: bool) -> dict[str, tuple[str, ...]]:
        """Arguments of each run by the name of the part, which is empty for the only run."""
        if smoke:
            return {} if self.smoke is None else {"": self.smoke}
        return {part: (*self.arguments, *more) for part, more in (self.parts or {"": ()}).items()}


def _each(option: str, *values: str | int) -> dict[str, tuple[str, ...]]:
    return {str(value): (option, str(value)) for value in values}


_UCI = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
_TABLES = tuple(name for name in _UCI if name != "wine")

CATALOG: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "inducing-weights/regression",
            "two-cluster regression under five posteriors and NUTS (figure 2)",
            "inducing_weights.regression",
            rows.cosine_regression,
            cost="1 core, 15 min",
            results="papers/results/inducing_weights/regression_*.json",
        ),
        Experiment(
            "inducing-weights/cifar10",
            "ResNet on CIFAR-10: accuracy, calibration, corruptions, other images (tables 3, 5, 11, 12)",
            "inducing_weights.classification",
            rows.inducing_classification,
            arguments=("--dataset", "cifar10"),
            cost="GPU, not timed",
        ),
        Experiment(
            "inducing-weights/fashion",
            "the same study on Fashion-MNIST, caps chosen on held-out images, three seeds",
            "inducing_weights.fashion",
            rows.inducing_fashion,
            cost="GPU, 1 to 2 min a training",
            results="papers/results/inducing_weights/fashion_mnist.json",
        ),
        Experiment(
            "inducing-weights/ablation",
            "sizes of U and caps on lambda and the standard deviation (figure 4)",
            "inducing_weights.ablation",
            rows.inducing_ablation,
            cost="GPU, 1 to 2 min a training",
        ),
        Experiment(
            "inducing-weights/pruning",
            "pruned posteriors, with and without fine-tuning (table 7)",
            "inducing_weights.pruning",
            rows.inducing_pruning,
            cost="GPU, 1 to 2 min a training",
        ),
        Experiment(
            "inducing-weights/parameters",
            "parameters of a ResNet-50 under each posterior, counted (tables 9, 10)",
            "inducing_weights.parameters",
            rows.inducing_parameters,
            cost="1 core, 1 min",
        ),
        Experiment(
            "inducing-weights/run-time",
            "draws and training steps over deterministic ones, from what benchmarks.resnets measured (figure 3)",
            "inducing_weights.run_time",
            rows.inducing_run_time,
            smoke=None,
            cost="after python -m benchmarks.resnets",
        ),
        Experiment(
            "subnetwork/toy",
            "one-dimensional regressions under Laplace subnetworks (figure 2)",
            "subnetwork.toy",
            rows.subnetwork_toy,
            parts=_each("--dataset", "cosine", "matern"),
            cost="1 core, minutes",
            results="papers/results/subnetwork/toy-*",
        ),
        Experiment(
            "subnetwork/uci",
            "subnetworks of small and large networks, standard and gap splits (figure 3)",
            "subnetwork.uci",
            rows.subnetwork_uci,
            parts=_each("--datasets", "kin8nm", "wine", "protein"),
            cost="1 core, hours",
            results="papers/results/subnetwork/uci-*",
        ),
        Experiment(
            "subnetwork/rotated-mnist",
            "ResNet-18 on rotated MNIST and Fashion-MNIST (figure 4, tables 1 to 14)",
            "subnetwork.rotated_mnist",
            rows.rotated_mnist,
            parts=_each("--seed", 0, 1, 2),
            cost="GPU, 10 min a seed",
            results="papers/results/subnetwork/rotated_mnist.json",
        ),
        Experiment(
            "subnetwork/corrupted-cifar",
            "ResNet-18 on corrupted CIFAR-10 and SVHN (figure 4, tables 1, 15 to 20)",
            "subnetwork.corrupted_cifar",
            rows.corrupted_cifar,
            parts=_each("--seed", 0, 1, 2),
            cost="GPU, not timed",
        ),
        Experiment(
            "function-space/toy",
            "Snelson-like regression and two moons (figures 1, 3, 4)",
            "function_space.toy",
            rows.function_space_toy,
            smoke=("--seeds", "1", "--epochs", "3"),
            cost="1 core, minutes",
            results="papers/results/function_space/toy.json",
        ),
        Experiment(
            "function-space/fashion",
            "Fashion-MNIST in, MNIST out (table 1, figures 2, 5 to 8)",
            "function_space.fashion",
            rows.function_space_images,
            cost="GPU, not timed",
            results="papers/results/function_space/fashion_mnist.json",
        ),
        Experiment(
            "function-space/cifar10",
            "CIFAR-10 in, SVHN out (table 1)",
            "function_space.fashion",
            rows.function_space_images,
            arguments=("--dataset", "cifar10"),
            smoke=None,
            cost="GPU, not timed",
        ),
        Experiment(
            "walsh-hadamard/approximability",
            "how near random matrices are to the family (figure 2)",
            "walsh_hadamard.approximability",
            rows.approximability,
            cost="1 core, 4 min",
            results="papers/results/walsh_hadamard/approximability.json",
        ),
        Experiment(
            "walsh-hadamard/table2",
            "UCI regressions, one hidden layer, standard splits (table 2)",
            "walsh_hadamard.shallow_regression",
            rows.walsh_hadamard_table2,
            parts=_each("--datasets", *_TABLES),
            cost="1 core, 3 min a data set",
            results="papers/results/walsh_hadamard/table2",
        ),
        Experiment(
            "walsh-hadamard/deep",
            "UCI regressions, two hidden layers of four widths (tables 7, 8)",
            "walsh_hadamard.deep_regression",
            rows.walsh_hadamard_deep,
            parts=_each("--datasets", *_TABLES),
            cost="1 core, not timed",
        ),
        Experiment(
            "walsh-hadamard/table9",
            "UCI classifications, two and three hidden layers (table 9)",
            "walsh_hadamard.classification",
            rows.walsh_hadamard_table9,
            cost="1 core, not timed",
        ),
        Experiment(
            "walsh-hadamard/random-features",
            "Gaussian processes by structured and plain random features (figure 4)",
            "walsh_hadamard.random_features",
            rows.random_features,
            cost="1 core, 2 h",
            results="papers/results/walsh_hadamard/random_features.json",
        ),
        Experiment(
            "walsh-hadamard/transform-time",
            "time of the transform beside a dense product (figure 8)",
            "walsh_hadamard.transform_time",
            rows.transform_time,
            arguments=("--measure",),
            cost="1 core, 1 min",
            results="papers/results/walsh_hadamard/transform_time.json",
        ),
        Experiment(
            "global-inducing/cubic",
            "uncertainty in the gap of a cubic, beside NUTS (figure 1)",
            "global_inducing.cubic",
            rows.global_inducing_cubic,
            cost="1 core, not timed",
            results="papers/results/global_inducing/cubic",
        ),
        Experiment(
            "global-inducing/deep-linear",
            "bounds of deep linear networks against the evidence (figure 2)",
            "global_inducing.deep_linear",
            rows.deep_linear,
            cost="1 core, 1 h",
            results="papers/results/global_inducing/deep_linear",
        ),
        Experiment(
            "global-inducing/uci",
            "UCI regressions under factorized and global inducing posteriors, standard splits (figure 3)",
            "global_inducing.uci",
            rows.global_inducing_uci,
            parts=_each("--datasets", *_UCI),
            cost="1 core, about 15 min a data set (estimated)",
            results="papers/results/global_inducing",
        ),
        Experiment(
            "global-inducing/cifar10",
            "ResNet on CIFAR-10 under four posteriors and two priors (table 1)",
            "global_inducing.cifar",
            rows.global_inducing_cifar,
            parts={
                f"{system}-{prior}": ("--systems", system, "--priors", prior)
                for prior in ("spatial", "scale")
                for system in ("fac", "li", "fac-gi", "gi")
            },
            cost="GPU, 2 to 5 min a training of 75 epochs",
            results="papers/results/global_inducing/cifar10",
        ),
    )
}


def select(patterns: list[str]) -> list[Experiment]:
    """Experiments by name, by paper, or by a pattern such as `*/uci`, in the order of the catalog.

    Raises:
        ValueError: If a pattern fits none; the message has the nearest name.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = {name for name in CATALOG if fnmatchcase(name, pattern) or name.partition("/")[0] == pattern}
        if not found:
            from difflib import get_close_matches

            near = get_close_matches(pattern, [*CATALOG, *PAPERS], n=1, cutoff=0.3)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"there is no experiment {pattern!r}; {hint}see bayesify reproduce --list")
        chosen |= found
    return [experiment for name, experiment in CATALOG.items() if name in chosen]
