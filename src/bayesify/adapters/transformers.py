"""Bayesian last layers for Hugging Face models, and training of any Bayesian network by `transformers.Trainer`."""

import inspect
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, DataCount, NonNegative, checked
from bayesify.arguments.installing import load
from bayesify.configuration import make_posterior
from bayesify.conversion import bayesianize
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictive.classification import ClassificationPredictive
from bayesify.predictive.regression import RegressionPredictive
from bayesify.priors import Prior

_transformers: Any = load("transformers", extra="transformers", owner="bayesify.adapters.transformers")
_Trainer: Any = _transformers.Trainer

HEAD_NAMES = ("classifier", "score", "qa_outputs", "lm_head", "cls", "fc")
"""Usual names of a model's last layer."""


def bayesianize_head(
    model: nn.Module,
    posterior: Any = "mean_field",
    *,
    likelihood: Likelihood | str | Mapping[str, Any] | None = "categorical",
    prior: Prior | str | Mapping[str, Any] | None = None,
    head: str | None = None,
) -> BayesianNetwork:
    """A model in which only the last layer is Bayesian. All other weights stay point estimates; frozen weights stay frozen.

    Args:
        model: A `PreTrainedModel` with a head, or any other module with a head. It is copied.
        posterior: Posterior of the head: an instance, a name, or a dict with its name and options.
        likelihood: p(y | logits).
        prior: p(weights); `Neal(8.0)` by default.
        head: Dotted name of the last layer; by default the names in `HEAD_NAMES`, such as `classifier`, are tried.

    Raises:
        ValueError: If no module has this name.
    """
    if head is None:
        children = dict(model.named_children())
        head = next((name for name in HEAD_NAMES if name in children), None)
        if head is None:
            raise ValueError(
                f"bayesianize_head: {type(model).__name__} has no module {', '.join(HEAD_NAMES[:-1])} or "
                f"{HEAD_NAMES[-1]} (its modules are {', '.join(children)}); give head= the name of the last layer"
            )
    return bayesianize(model, {head: make_posterior(posterior)}, likelihood=likelihood, prior=prior, output="logits")


class TrainerModel(nn.Module):
    """A Bayesian network with the interface of a Hugging Face model: it takes labels and returns the loss and the logits.

    In training, the loss is the negative evidence lower bound per example. In evaluation, the loss is the NLL of the
    mixture over `prediction_draws` draws, which are the same each time. In evaluation of a classification, `logits` are the
    mixture's log-probabilities (their softmax is `predict(x).probs`), and `uncertainty` is the mutual information in nats. In
    evaluation of a regression, `logits` are the mean, and `uncertainty` is the epistemic variance.
    """

    accepts_loss_kwargs = False

    def __init__(
        self, bnn: BayesianNetwork, num_data: int, num_draws: int, kl_weight: float, prediction_draws: int
    ) -> None:
        super().__init__()
        self.bnn = bnn
        self.num_data, self.num_draws, self.kl_weight = num_data, num_draws, kl_weight
        self.prediction_draws = prediction_draws

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
        """The loss (if labels are given), the logits and, in evaluation, the uncertainty."""
        if self.training and labels is not None:
            bound = self.bnn.elbo(
                inputs, labels, num_data=self.num_data, num_draws=self.num_draws, kl_weight=self.kl_weight
            )
            return {"loss": -bound / self.num_data}
        generator = torch.Generator().manual_seed(0)
        prediction = self.bnn.predict(inputs, self.prediction_draws, generator=generator)
        if isinstance(prediction, ClassificationPredictive):
            found = {"logits": prediction.class_probs.log(), "uncertainty": prediction.mutual_information}
        else:
            assert isinstance(prediction, RegressionPredictive)
            found = {"logits": prediction.mean, "uncertainty": prediction.epistemic}
        if labels is not None:
            found = {"loss": -prediction.log_prob(labels).mean(), **found}
        return found


class BayesianTrainer(_Trainer):
    """`transformers.Trainer` for a Bayesian network. It takes the same arguments and maximizes the evidence lower bound.

    Evaluation and prediction average over draws. `eval_loss` is the NLL of the mixture. `predict(...).predictions` is a
    pair: the log-probabilities of the mixture and each example's mutual information. For a regression, `predictions` is the pair
    of the mean and the epistemic variance. The trained network is `trainer.bnn`.

    Args:
        model: The result of `bayesianize`, `bayesianize_head` or `bayesianize_lora`.
        args: `transformers.TrainingArguments`, without weight decay, because the prior replaces it.
        num_data: Number of training examples N; the length of `train_dataset` by default.
        num_draws: Number of draws S per step.
        kl_weight: Factor on the KL; a value below 1 tempers the posterior.
        prediction_draws: Number of draws in evaluation and prediction.
        options: Options of `transformers.Trainer`, such as `train_dataset`, `eval_dataset` or `compute_metrics`.

    Raises:
        TypeError: If the model is not a `BayesianNetwork`.
        ValueError: If the network has no likelihood, if a number is out of range, if N is unknown, or if `args` has
            weight decay.
    """

    @checked
    def __init__(
        self,
        model: BayesianNetwork,
        args: Any = None,
        *,
        num_data: DataCount | None = None,
        num_draws: Count = 1,
        kl_weight: NonNegative = 1.0,
        prediction_draws: Count = 16,
        **options: Any,
    ) -> None:
        model.require_likelihood("BayesianTrainer")
        if getattr(args, "weight_decay", 0.0):
            raise ValueError(
                f"BayesianTrainer: weight_decay={args.weight_decay}; set it to 0, because the prior already regularizes the weights"
            )
        dataset = options.get("train_dataset")
        if num_data is None and isinstance(dataset, Sized):
            num_data = len(dataset)
        if num_data is None:
            raise ValueError("BayesianTrainer: the number of training examples is unknown; give num_data= this number")
        super().__init__(TrainerModel(model, num_data, num_draws, kl_weight, prediction_draws), args, **options)

    _signature_columns: list[str] | None

    @property
    def bnn(self) -> BayesianNetwork:
        """The Bayesian network."""
        found: BayesianNetwork = self.accelerator.unwrap_model(self.model).bnn
        return found

    def _set_signature_columns_if_needed(self) -> None:
        """Keep only those columns of a dataset that are labels or inputs of the network."""
        if self._signature_columns is None:
            network: Any = self.bnn.network
            base = network.get_base_model() if hasattr(network, "get_base_model") else network
            known = list(inspect.signature(base.forward).parameters)
            self._signature_columns = list(dict.fromkeys([*known, "label", "label_ids", *self.label_names]))
