"""Functions on which emulators of computer codes are compared, and data from these functions.

Formulas and domains are those of the virtual library of simulation experiments (Surjanovic & Bingham 2013); each function
names its own source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Simulator:
    """A function of several inputs on a box.

    Args:
        function: Function from inputs in their own units, [..., D], to values [...].
        inputs: Names of the inputs.
        low: Lower end of each input.
        high: Upper end of each input.
        num_points: Number of evaluations in the Walsh-Hadamard paper (its table 1).
    """

    function: Callable[[Tensor], Tensor]
    inputs: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_points: int

    @property
    def num_inputs(self) -> int:
        """Number of inputs D."""
        return len(self.inputs)

    def __call__(self, x: Tensor) -> Tensor:
        """Values at inputs in their own units: [..., D] -> [...].

        Raises:
            ValueError: If the number of inputs is not D.
        """
        if x.shape[-1] != self.num_inputs:
            raise ValueError(
                f"computer_experiments: x has {x.shape[-1]} inputs; give {self.num_inputs}: {', '.join(self.inputs)}"
            )
        return self.function(x)

    def rescale(self, unit: Tensor) -> Tensor:
        """Inputs in their own units from inputs between 0 and 1: [..., D]."""
        low, high = unit.new_tensor(self.low), unit.new_tensor(self.high)
        return low + (high - low) * unit


def borehole(x: Tensor) -> Tensor:
    r"""Flow of water through a borehole between two aquifers, in cubic meters per year (Harper & Gupta 1983).

    $$ \frac{2 \pi T_u (H_u - H_l)}{\ln(r / r_w) \Bigl(1 + \frac{2 L T_u}{\ln(r / r_w)\, r_w^2 K_w} + \frac{T_u}{T_l}\Bigr)} $$

    Args:
        x: Radius of the borehole $r_w$ and of influence r, transmissivity $T_u$ and head $H_u$ of the upper aquifer, $T_l$ and
            $H_l$ of the lower aquifer, length L and conductivity $K_w$ of the borehole, [..., 8].
    """
    radius, influence, upper, upper_head, lower, lower_head, length, conductivity = x.unbind(-1)
    log_ratio = (influence / radius).log()
    leak = 2 * length * upper / (log_ratio * radius.square() * conductivity)
    return 2 * math.pi * upper * (upper_head - lower_head) / (log_ratio * (1 + leak + upper / lower))


HARTMANN_HEIGHTS = (1.0, 1.2, 3.0, 3.2)
HARTMANN_WIDTHS = (
    (10.0, 3.0, 17.0, 3.5, 1.7, 8.0),
    (0.05, 10.0, 17.0, 0.1, 8.0, 14.0),
    (3.0, 3.5, 1.7, 10.0, 17.0, 8.0),
    (17.0, 8.0, 0.05, 10.0, 0.1, 14.0),
)
HARTMANN_CENTERS = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)


def hartmann(x: Tensor) -> Tensor:
    r"""Four wells in six dimensions, with minimum -3.32237 (Hartman 1973; Dixon & Szegö 1978).

    $$ -\sum_{i=1}^4 \alpha_i \exp\Bigl(-\sum_{j=1}^6 A_{ij} (x_j - P_{ij})^2\Bigr) $$

    Args:
        x: Inputs, [..., 6].
    """
    heights, widths, centers = (x.new_tensor(table) for table in (HARTMANN_HEIGHTS, HARTMANN_WIDTHS, HARTMANN_CENTERS))
    distances = (widths * (x.unsqueeze(-2) - centers).square()).sum(-1)  # [..., 4]
    return -(heights * (-distances).exp()).sum(-1)


def rastrigin(x: Tensor) -> Tensor:
    r"""A bowl with regular waves, 0 at 0 (Rastrigin 1974): $10 D + \sum_j x_j^2 - 10 \cos 2 \pi x_j$.

    Args:
        x: Inputs, [..., D], for any D.
    """
    return 10 * x.shape[-1] + (x.square() - 10 * (2 * math.pi * x).cos()).sum(-1)


def robot_arm(x: Tensor) -> Tensor:
    r"""Distance between the shoulder and the end of a robot arm with four segments (An & Owen 2001).

    $$ \Bigl| \sum_{i=1}^4 L_i \exp\Bigl(\mathrm{i} \sum_{j \le i} \theta_j\Bigr) \Bigr| $$

    Args:
        x: Angles $\theta_1 \dots \theta_4$, then lengths $L_1 \dots L_4$, [..., 8].
    """
    angles, lengths = x.chunk(2, dim=-1)
    total = angles.cumsum(-1)
    return torch.hypot((lengths * total.cos()).sum(-1), (lengths * total.sin()).sum(-1))


def otl_circuit(x: Tensor) -> Tensor:
    r"""Midpoint voltage of a push-pull circuit without output transformer (Ben-Ari & Steinberg 2007).

    With $V_b = 12 R_{b2} / (R_{b1} + R_{b2})$ and $g = \beta (R_{c2} + 9)$,

    $$ \frac{(V_b + 0.74)\, g}{g + R_f} + \frac{11.35\, R_f}{g + R_f} + \frac{0.74\, R_f\, g}{(g + R_f) R_{c1}} $$

    Args:
        x: Resistances $R_{b1}, R_{b2}, R_f, R_{c1}, R_{c2}$ in kiloohm and current gain $\beta$, [..., 6].
    """
    base1, base2, feedback, collector1, collector2, gain = x.unbind(-1)
    voltage = 12 * base2 / (base1 + base2)
    amplified = gain * (collector2 + 9)
    inner = (voltage + 0.74) * amplified + 11.35 * feedback + 0.74 * feedback * amplified / collector1
    return inner / (amplified + feedback)


SIMULATORS: dict[str, Simulator] = {
    "borehole": Simulator(
        borehole,
        ("r_w", "r", "T_u", "H_u", "T_l", "H_l", "L", "K_w"),
        (0.05, 100.0, 63070.0, 990.0, 63.1, 700.0, 1120.0, 9855.0),
        (0.15, 50000.0, 115600.0, 1110.0, 116.0, 820.0, 1680.0, 12045.0),
        200_000,
    ),
    "hartmann6": Simulator(hartmann, tuple(f"x_{i}" for i in range(1, 7)), (0.0,) * 6, (1.0,) * 6, 30_000),
    "rastrigin5": Simulator(rastrigin, tuple(f"x_{i}" for i in range(1, 6)), (-5.12,) * 5, (5.12,) * 5, 10_000),
    "robot_arm": Simulator(
        robot_arm,
        (*(f"theta_{i}" for i in range(1, 5)), *(f"L_{i}" for i in range(1, 5))),
        (0.0,) * 8,
        (2 * math.pi,) * 4 + (1.0,) * 4,
        150_000,
    ),
    "otl_circuit": Simulator(
        otl_circuit,
        ("R_b1", "R_b2", "R_f", "R_c1", "R_c2", "beta"),
        (50.0, 25.0, 0.5, 1.2, 0.25, 50.0),
        (150.0, 70.0, 3.0, 2.5, 1.2, 300.0),
        20_000,
    ),
}
"""The five functions of the Walsh-Hadamard paper's comparison of Gaussian processes, by name."""


def sample(name: str, n: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Evaluate a simulator at points of a scrambled Sobol sequence, which fill its box evenly.

    Args:
        name: A name of `SIMULATORS`.
        n: Number of points N; by default the paper's.
        seed: Seed of the scrambling.

    Returns:
        Inputs, each rescaled to the range from 0 to 1, [N, D], and outputs, [N, 1], in float32.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in SIMULATORS:
        raise ValueError(f"computer_experiments.sample: unknown function {name!r}; known: {', '.join(SIMULATORS)}")
    simulator = SIMULATORS[name]
    count = simulator.num_points if n is None else n
    points = torch.quasirandom.SobolEngine(simulator.num_inputs, scramble=True, seed=seed)
    unit = points.draw(count, dtype=torch.float64)
    return unit.float(), simulator(simulator.rescale(unit)).float().unsqueeze(-1)
