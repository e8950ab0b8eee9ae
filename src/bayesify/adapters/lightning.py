"""A Bayesian network as a Lightning module, and a callback that scores its predictions."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.adapters.torchmetrics import collection
from bayesify.arguments.checks import Count, DataCount, NonNegative, Positive, Seed, checked
from bayesify.arguments.installing import load
from bayesify.likelihoods import objectives
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Predictive
from bayesify.training.batches import BatchReader, count_examples, parse_batch
from bayesify.training.schedules import KLSchedule

_lightning: Any = load("lightning.pytorch", extra="lightning", owner="bayesify.adapters.lightning")
_Module: Any = _lightning.LightningModule
_Callback: Any = _lightning.Callback


class BayesianModule(_Module):
    r"""A Bayesian network that `lightning.Trainer` trains by its evidence lower bound.

    Each step minimizes the negative bound per example, as `bayesify.fit` does:

    $$ -\frac1B \sum_b \frac1S \sum_s \log p(y_b | f_s(x_b)) + \frac{\beta(t)}{N} \mathrm{KL}(q \| p) $$

    Training logs `train_loss`, `train_kl` (in nats) and `train_nll` (per example, averaged over the draws of a step). Validation
    logs `val_nll`, which uses the mixture of draws. With several processes, B is the size of each process's part of the batch,
    and Lightning averages over the processes. If the parts have equal sizes, the average is the loss of the whole batch.
    Checkpoints contain the network; `BayesianModule.load_from_checkpoint(path, bnn=bnn)` restores it.

    Args:
        bnn: The network, with a likelihood.
        num_data: Number of training examples N; counted at the start of training by default.
        optimizer: Function that makes an optimizer from parameters; Adam by default.
        learning_rate: Learning rate of the default optimizer.
        num_draws: Number of draws S per step; by default the posterior's recommendation.
        kl_weight: Constant factor on the KL; a value below 1 tempers the posterior.
        kl_schedule: Factor on the KL as a function of the number of epochs so far; see `KLSchedule`.
        prediction_draws: Number of draws for validation, test and prediction; by default the number that `predict` uses.
        prediction_seed: Seed of the prediction draws. All epochs use the same draws, so that their scores can be
            compared.
        read_batch: Function that converts an item of the loader to inputs and targets; needed if `bayesify.fit` cannot
            read the items.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork`.
        ValueError: If `bnn` has no likelihood, or if a number is out of range.
    """

    @checked
    def __init__(
        self,
        bnn: BayesianNetwork,
        *,
        num_data: DataCount | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        learning_rate: Positive = 1e-3,
        num_draws: Count | None = None,
        kl_weight: NonNegative = 1.0,
        kl_schedule: Callable[[float], float] | None = None,
        prediction_draws: Count | None = None,
        prediction_seed: Seed = 0,
        read_batch: BatchReader | None = None,
    ) -> None:
        super().__init__()
        bnn.require_likelihood("BayesianModule")
        self.bnn = bnn
        self.num_data = num_data
        self.num_draws = num_draws or max(posterior.training_draws for posterior in bnn.posteriors)
        self.kl_weight, self.kl_schedule = kl_weight, kl_schedule or KLSchedule()
        self.prediction_draws, self.prediction_seed = prediction_draws, prediction_seed
        self._make_optimizer = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=learning_rate))
        self._reader = read_batch

    def on_fit_start(self) -> None:
        """Count the training examples if their number was not given."""
        if self.num_data is None:
            self.trainer.fit_loop.setup_data()
            self.num_data = count_examples(self.trainer.train_dataloader, self._reader)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's output with one fresh draw of the weights."""
        return self.bnn(*args, **kwargs)

    def training_step(self, batch: object, batch_idx: int) -> Tensor:
        """The negative evidence lower bound per example, a scalar."""
        data = parse_batch(batch, self._reader)
        assert self.num_data is not None
        log_likelihood, kl = self.bnn.elbo_terms(
            data.x, data.y, num_data=self.num_data, num_draws=self.num_draws, example_weights=data.weights
        )
        batches = self.trainer.num_training_batches
        within = batch_idx / batches if 0 < batches < float("inf") else 0.0
        weight = self.kl_weight * self.kl_schedule(float(self.current_epoch + within))
        loss = -objectives.elbo(log_likelihood, kl, weight) / self.num_data
        values = {
            "train_loss": loss.detach(),
            "train_kl": kl.detach().mean(),
            "train_nll": -log_likelihood.detach().mean() / self.num_data,
        }
        self.log_dict(values, on_step=True, on_epoch=False, batch_size=len(data))
        return loss

    def validation_step(self, batch: object, batch_idx: int) -> Predictive:
        """Log a batch's NLL under `val_nll`, and return the batch's prediction for callbacks."""
        return self._score(batch, "val_nll")

    def test_step(self, batch: object, batch_idx: int) -> Predictive:
        """Log a batch's NLL under `test_nll`, and return the batch's prediction for callbacks."""
        return self._score(batch, "test_nll")

    def _score(self, item: object, name: str) -> Predictive:
        data = parse_batch(item, self._reader)
        prediction = self._predict(data.x)
        if data.weights is not None:
            raise ValueError(
                f"BayesianModule: a batch for {name} has example weights, which Lightning ignores when it averages "
                "over batches; leave the weights out of validation and test data, or score with "
                "bayesify.fit(validation=...)"
            )
        nll = -prediction.log_prob(data.y).mean()
        self.log(name, nll, batch_size=len(data), on_epoch=True, on_step=False, prog_bar=True, sync_dist=True)
        return prediction

    def predict_step(self, batch: object, batch_idx: int) -> Predictive:
        """The prediction for the inputs of a batch; if the batch contains targets, they are ignored."""
        try:
            inputs = parse_batch(batch, self._reader).x
        except (TypeError, ValueError):
            inputs = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 1 else batch
        return self._predict(inputs)

    def _predict(self, x: Any) -> Predictive:
        generator = torch.Generator().manual_seed(self.prediction_seed)
        return self.bnn.predict(x, self.prediction_draws, generator=generator)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer over all trainable parameters."""
        return self._make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class PredictiveScores(_Callback):
    """A callback that logs the scores of `metrics.evaluate` over all validation and test batches.

    `validation_step` and `test_step` must return a `Predictive`, as in `BayesianModule`.
    Scores are logged under their name with the prefix `val_` or `test_`, such as `val_ece` or `test_crps`.

    Args:
        read_batch: Function that converts an item of the loader to inputs and targets; needed if `bayesify.fit` cannot
            read the items.
    """

    @checked
    def __init__(self, read_batch: BatchReader | None = None) -> None:
        super().__init__()
        self._reader = read_batch
        self._scores: Any = None

    def on_validation_epoch_start(self, trainer: object, pl_module: Any) -> None:
        """Reset the scores."""
        self._scores = None

    def on_validation_batch_end(
        self, trainer: object, pl_module: Any, outputs: object, batch: object, *rest: object
    ) -> None:
        """Add a batch."""
        if not isinstance(outputs, Predictive):
            raise TypeError(
                f"PredictiveScores: the validation step returned {type(outputs).__name__}; return the result of "
                "predict(x), as BayesianModule does"
            )
        if self._scores is None:
            classes = hasattr(outputs, "class_probs")
            self._scores = collection("classification" if classes else "regression").to(pl_module.device)
        data = parse_batch(batch, self._reader)
        if data.weights is not None:
            raise ValueError(
                "PredictiveScores: a batch has example weights, which these scores do not support; leave the example weights "
                "out of the batches"
            )
        self._scores.update(outputs, data.y)

    def on_validation_epoch_end(self, trainer: object, pl_module: Any) -> None:
        """Log the scores of the epoch."""
        self._log(pl_module, "val_")

    on_test_epoch_start, on_test_batch_end = on_validation_epoch_start, on_validation_batch_end

    def on_test_epoch_end(self, trainer: object, pl_module: Any) -> None:
        """Log the scores of the epoch."""
        self._log(pl_module, "test_")

    def _log(self, module: Any, prefix: str) -> None:
        if self._scores is not None:
            values = {f"{prefix}{name}": value.float() for name, value in self._scores.compute().items()}
            values.pop(f"{prefix}nll")  # the module already logs the NLL
            module.log_dict(values)
