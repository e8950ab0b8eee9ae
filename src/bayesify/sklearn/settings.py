"""Checked parameters of an estimator, and the length of training at each level of effort."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from bayesify.methods import Method
from bayesify.priors import Neal
from bayesify.sklearn.rows import Batches, Rows

AUTO = "auto"
"""Name of the default method, and value of a parameter that the default method chooses."""
TEMPERATURE = "temperature_scaled"
"""Name of a method that only the estimators have: the plain network with one factor fitted to unseen rows (Guo et al. 2017)."""
EffortName = Literal["full", "quick"]
FULL_BATCH_ROWS, BATCH_ROWS = 1024, 256
"""With at most `FULL_BATCH_ROWS` rows, every training step of a named method sees all rows. Larger tables are cut into batches
of `BATCH_ROWS` rows."""


@dataclass(frozen=True)
class Effort:
    """Length of training.

    Args:
        member_steps: Maximum number of optimizer steps of the default method's members.
        steps: Number of optimizer steps in the main phase of a named method, if the rows fit into one batch.
        slow_steps: Number of optimizer steps in the main phase of a method for which `Method.slow` is true.
        min_epochs: Minimum number of epochs, if the rows do not fit into one batch.
        chain_steps: Number of steps of a Markov chain after the warm-up, which has the same number of steps.
        max_chain_rows: Maximum number of rows on which a Markov chain is run.
        num_draws: Number of draws of the weights per training step.
    """

    member_steps: int
    steps: int
    slow_steps: int
    min_epochs: int
    chain_steps: int
    max_chain_rows: int
    num_draws: int


EFFORTS: dict[EffortName, Effort] = {
    "full": Effort(2_000, 500, 200, 20, 200, 1_000, 4),
    "quick": Effort(300, 150, 120, 4, 20, 400, 2),
}


@dataclass(frozen=True)
class Settings:
    """An estimator's checked parameters; `None` means the method's default.

    The estimators describe the parameters that are not listed here.

    Args:
        method: The named method; `None` for the default method.
        temperature: Whether the method is `TEMPERATURE`.
        options: Arguments of the method's posterior or function. Missing arguments take the defaults for small problems.
        epochs: For named methods, the number of passes over the data in the main phase; for the default method, the maximum
            number of steps.
        num_classes: Number of classes of the table; 0 for a regression.
        num_scaled: Number of network inputs that are scaled numbers. They come before the piecewise-linear encodings.
        linear: Whether the default method trains linear models instead of networks.
        owner: Name of the estimator, for messages.
    """

    method: Method | None = None
    temperature: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    likelihood: str = AUTO
    transform: str = AUTO
    noise: float | None = None
    hidden: tuple[int, ...] | None = None
    activation: str | None = None
    network: nn.Module | None = None
    prior_scale: float = 2.0
    epochs: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    num_draws: int | None = None
    prediction_draws: int = 100
    standardize: bool = True
    effort: EffortName = "full"
    seed: int = 0
    progress: bool = False
    num_classes: int = 0
    num_scaled: int = 0
    linear: bool = False
    owner: str = "BayesianRegressor"

    @property
    def method_name(self) -> str:
        """The method's name as the user gives it."""
        return TEMPERATURE if self.temperature else AUTO if self.method is None else self.method.name

    @property
    def prior(self) -> Neal:
        """The prior of a named method."""
        return Neal(self.prior_scale)

    @property
    def step_draws(self) -> int:
        """Number of draws of the weights per training step."""
        return self.num_draws or EFFORTS[self.effort].num_draws

    def batches(self, rows: Rows) -> Batches:
        """A loader of the rows for a named method."""
        size = self.batch_size or (len(rows) if len(rows) <= FULL_BATCH_ROWS else BATCH_ROWS)
        return Batches(rows, min(size, len(rows)))

    def count_epochs(self, num_batches: int) -> int:
        """Number of epochs in the main phase of a named method, given the number of batches per epoch."""
        amount = EFFORTS[self.effort]
        if self.epochs is not None:
            return self.epochs
        if self.method is not None and self.method.is_chain:
            return amount.chain_steps
        if self.method is not None and self.method.slow:
            return amount.slow_steps
        return max(math.ceil(amount.steps / num_batches), min(amount.steps, amount.min_epochs))
