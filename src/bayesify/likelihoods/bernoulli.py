"""Binary labels (yes or no): one label per example, or several at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bayesify.likelihoods.base import Likelihood
from bayesify.maths.gamma import as_float
from bayesify.predictive import ClassificationPredictive, Outputs
from bayesify.predictive.gaussian import GaussianClassPredictive, Link, OutputGaussian


class Bernoulli(Likelihood):
    r"""A binary label for each output: $p(y = 1 | f) = \operatorname{sigmoid}(f)$. Several outputs mean several labels
    at once.

    The Fisher matrix is $\operatorname{diag}(p (1 - p))$. Targets are 0 or 1 and have the outputs' shape; a last axis
    of length 1 may be missing from the targets or from the outputs.
    """

    name = "bernoulli"
    task = "classification"

    def check_values(self, outputs: Tensor, y: Tensor) -> None:
        """Raise `ValueError` unless every target is 0 or 1."""
        wrong = (y != 0) & (y != 1)
        if bool(wrong.any()):
            raise ValueError(f"likelihoods.Bernoulli: a target is {y[wrong][0].item()}; give targets that are 0 or 1")

    def log_density(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log-probability of each entry."""
        return F.logsigmoid(torch.where(y.bool(), outputs, -outputs))

    def predictive(self, outputs: Outputs) -> ClassificationPredictive:
        """A mixture of the draws' probabilities."""
        return ClassificationPredictive(outputs, _binary_log_probs, binary=True)

    def closed_form(self, outputs: OutputGaussian, link: Link = "mc") -> ClassificationPredictive:
        """See `GaussianClassPredictive`."""
        return GaussianClassPredictive(outputs, None, link)

    def fisher(self, outputs: Tensor) -> Tensor:
        """`diag(p (1 - p))`."""
        probs = as_float(outputs).sigmoid()
        return torch.diag_embed(probs * (1 - probs))


def _binary_log_probs(outputs: Tensor) -> Tensor:
    outputs = as_float(outputs)
    return torch.stack((F.logsigmoid(-outputs), F.logsigmoid(outputs)), dim=-1)
