"""Variational inference over functions: a posterior over a network's weights, trained with a prior over functions."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, DataCount, Inputs, NonNegative, Positive, Probability, checked
from bayesify.draws import Draws
from bayesify.function_space.contexts import Box, Context, restore_context
from bayesify.function_space.divergence import DivergenceCapture, check_kl, gaussian_kl
from bayesify.function_space.moments import Covariance, output_covariance
from bayesify.function_space.priors import Constant, FunctionPrior, restore_prior
from bayesify.jacobians import Jacobians, check_deterministic
from bayesify.jacobians.general import Args, Kwargs
from bayesify.likelihoods import Likelihood
from bayesify.maths.autograd_functions import sum_of_pieces
from bayesify.network import BayesianNetwork
from bayesify.posteriors import KTied, MeanField
from bayesify.predictive.base import Predictive
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.predictor import Batch, Drawable, Phase, Trainable
from bayesify.running.generators import draw_seed
from bayesify.running.inputs_and_outputs import (
    as_inputs,
    batch_size,
    checked_inputs,
    explain_shape_errors,
    select_output,
    split_rows,
)
from bayesify.running.last_layer import last_layer
from bayesify.running.memory import count_activation_bytes, parse_bytes
from bayesify.running.modes import full_precision
from bayesify.running.runner import Runner
from bayesify.storage.serializers import register_predictor
from bayesify.training.fitting import fit
from bayesify.training.history import History
from bayesify.weights.catalog import owner_of
from bayesify.weights.named_parameters import first_parameter

DEFAULT_PRIOR_VARIANCE = 10.0
INDEPENDENT_POSTERIORS = (MeanField, KTied)
"""Posteriors whose weights are independent Gaussians, which assumption 1 of the paper requires."""


@register_predictor
class FunctionSpaceVI(Drawable, Trainable):
    r"""A posterior over a network's weights, trained with a prior over functions (Rudner et al., proposition 2).

    $$ \mathcal{F} = \frac{N}{B} \sum_b \mathbb{E}_{q(w)} \log p(y_b | f(x_b; w))
       - \mathrm{KL}\bigl(\tilde q(f_X) \,\|\, p(f_X)\bigr), \qquad
       \tilde q(f_X) = \mathcal{N}\bigl(f(X; m),\ J_m(X) \operatorname{diag}(s^2) J_m(X)^\top\bigr) $$

    The likelihood term is a Monte Carlo estimate that uses the network itself, not its linearization. This term is scaled from
    the batch to the dataset. The KL term is not scaled. The KL is computed for the network linearized around the means m, at
    context inputs X that are drawn anew in each step. Uncertainty grows where there are context inputs but no data. The KL is
    finite only if the covariance of $\tilde q(f_X)$ has full rank. Otherwise, `"full"` and `"joint"` add a relative jitter to
    both covariances (see `divergence.dense_kl`). `"full"` and `"joint"` raise an error if there are more function values than
    weights and no `jitter` is given.

    Args:
        bnn: A Bayesian network with the posterior `MeanField` or `KTied`. It is trained in place, in its current mode
            (train or eval).
        prior_mean: Mean of the function values under the prior: a number, or one per output.
        prior_variance: Variance of the function values under the prior: a number, or one per output; 10 by default. If
            `fit` estimates the noise, this default is multiplied by $u^2$, where u is the power of ten nearest to the
            standard deviation of the targets.
        context: Distribution of the inputs at which functions are compared; by default a `Box()`. For images, the
            default box has pixels from 0 to 1, or a wider range if a pixel of the training batch lies outside this range.
            For other inputs, the default box has the range of each feature in the training batch, with a margin.
        covariance: Covariances in the KL: `"diagonal"` uses only variances, as the paper does; `"full"` uses covariances between
            context inputs for each output; `"joint"` also uses covariances between outputs.
        prior: A prior over functions (`GaussianProcess`, `NeuralTangent`) that replaces `prior_mean` and `prior_variance`.
        layers: Weights in which the network is linearized: `"all"`, or `"last"` for the last layer's weights only. With `"last"`,
            the KL does not act on the other layers' standard deviations, so the likelihood alone shrinks them. To avoid this, put
            a posterior on the last layer only, or use `"all"`.
        jitter: Share of the mean variance that is added to the covariances' diagonals in `"full"` and `"joint"`. By default, a
            share is added only if a covariance does not have full rank.
        memory: Memory budget of the linearization: bytes, or a string such as `"1GiB"`. The default is an eighth of the GPU's
            memory, or 1 GiB on a CPU.

    Raises:
        TypeError: If `bnn` is not a `BayesianNetwork`.
        ValueError: If the posterior is of the wrong type, if a variance is not positive, or if the network has batch
            normalization or dropout in training mode.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("map", "variational")
    keeps_mode = True

    @checked
    def __init__(
        self,
        bnn: BayesianNetwork,
        prior_mean: float | Sequence[float] = 0.0,
        prior_variance: Positive | Sequence[Positive] | None = None,
        context: Context | None = None,
        covariance: Literal["diagonal", "full", "joint"] = "diagonal",
        *,
        prior: FunctionPrior | None = None,
        layers: Literal["all", "last"] = "all",
        jitter: Probability | None = None,
        memory: Budget = None,
    ) -> None:
        _check_network(bnn)
        self.bnn, self.output = bnn, bnn.output
        self.context = context if context is not None else Box()
        self.covariance, self.layers, self.jitter = covariance, layers, jitter
        self._memory = None if memory is None else parse_bytes(memory)
        self._settled = layers == "all"
        self._jacobians = Jacobians(Runner(bnn.network, bnn.weights), list(bnn.weights), output=bnn.output)
        variance = DEFAULT_PRIOR_VARIANCE if prior_variance is None else prior_variance
        self.prior = copy.deepcopy(prior) if prior is not None else Constant(prior_mean, variance)
        self._in_units = prior is None and prior_variance is None
        self._bind()
        self._capture = DivergenceCapture(bnn)
        self._records = covariance == "diagonal" and isinstance(self.prior, Constant)
        self._bytes_per_row: dict[Any, tuple[float, tuple[int, ...]]] = {}
        self._output_shape: tuple[int, ...] = ()
        self._evaluated: Jacobians | None = None

    def _bind(self) -> None:
        means = {key: mean.detach() for key, mean in self._means().items()}
        self.prior.bind(self._jacobians, means, self.bnn.prior.typical().std, self.memory)

    def _settle(self, args: Args, kwargs: Kwargs) -> None:
        """Find the network's last layer by running the network on the first inputs."""
        if self._settled:
            return
        runner, weights = self._jacobians.runner, self.bnn.weights
        values = {name: mean.detach() for name, mean in self._means().items()}
        with explain_shape_errors(args, kwargs):
            names = last_layer(runner, weights, args, kwargs, self.bnn.output, values=values, owner="FunctionSpaceVI")
        self._jacobians, self._evaluated = Jacobians(runner, names, output=self.bnn.output), None
        self._bind()
        self._settled = True

    @property
    def likelihood(self) -> Likelihood | None:  # type: ignore[override]
        """Likelihood of the network."""
        return self.bnn.likelihood

    def draw(self, num_draws: int = 1, *, generator: torch.Generator | None = None) -> Draws:
        """Draw `num_draws` functions from `bnn`."""
        return self.bnn.draw(num_draws, generator=generator)

    def prediction_draws(self, num_draws: int | None = None, *, generator: torch.Generator | None = None) -> Draws:
        """Draws for prediction; see `BayesianNetwork.prediction_draws`."""
        return self.bnn.prediction_draws(num_draws, generator=generator)

    # -- moments ---------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> int:
        """Memory budget of the linearization in bytes; by default an eighth of a GPU's memory, or 1 GiB on a CPU."""
        if self._memory is not None:
            return self._memory
        device = next(self.bnn.parameters()).device
        return int(torch.cuda.get_device_properties(device).total_memory) // 8 if device.type == "cuda" else 2**30

    def _means(self) -> dict[str, Tensor]:
        """Posterior means of all weights, converted to the dtypes of the network and to the units of its weights."""
        means = {name: mean.unsqueeze(0) for part in self.bnn.posteriors for name, mean in part.mean().items()}
        self.bnn.layout.cast(means)
        found = {name: mean.squeeze(0) for name, mean in means.items()}
        # Detach, because a view of a parameter claims to require gradients even if they are disabled.
        return found if torch.is_grad_enabled() else {name: mean.detach() for name, mean in found.items()}

    def _variances(self) -> dict[str, Tensor]:
        found = {name: value for part in self.bnn.posteriors for name, value in part.variance().items()}
        units = self.bnn.layout.units
        return {
            name: found[name] * units[name] ** 2 if name in units else found[name] for name in self._jacobians.names
        }

    @checked
    def function_moments(
        self,
        x: Any,
        covariance: Literal["diagonal", "full", "joint", "example"] | None = None,
        *,
        memory: Budget = None,
    ) -> tuple[Tensor, Tensor]:
        r"""Mean and covariance of the linearized network's outputs (proposition 1); differentiable.

        Args:
            x: Inputs of B examples: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            covariance: Part of the covariance to compute; by default the model's argument `covariance`. `"example"` is the
                covariance between the outputs of each example.
            memory: Memory budget of the linearization if gradients are disabled; by default the model's budget.

        Returns:
            The mean [B, O], and a variance or covariance: [B, O] for `"diagonal"`, [O, B, B] for `"full"`, [B O, B O]
            for `"joint"` (ordered by example, then by output), and [B, O, O] for `"example"`.

        Raises:
            ValueError: If inputs are not finite or do not fit the network.
        """
        args, kwargs = checked_inputs(x)
        kind = covariance or self.covariance
        self._settle(args, kwargs)
        means, variances = self._means(), self._variances()
        rows = self._rows(args, kwargs, means, self.memory if memory is None else parse_bytes(memory))
        if torch.is_grad_enabled() or kind in ("full", "joint") or rows >= batch_size(args, kwargs):
            return self._moments((args, kwargs), kind, means, variances)
        parts = [self._moments(part, kind, means, variances) for part in split_rows(args, kwargs, rows)]
        mean, found = (torch.cat(list(kept)) for kept in zip(*parts, strict=True))
        return mean, found

    def _moments(
        self, inputs: tuple[Any, Any], kind: Covariance, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        self._jacobians.check_deterministic()
        point = self._jacobians.at(*inputs, means, differentiable=torch.is_grad_enabled())
        gradients = point.pull(point.identity())
        found = output_covariance(self._jacobians, gradients, variances, kind, self.memory)
        mean = point.outputs.reshape(point.outputs.shape[0], -1).to(found.dtype)  # [B, O]
        mean = mean if torch.is_grad_enabled() else mean.detach()
        return mean, found.T if kind == "diagonal" else found

    def _rows(self, args: Args, kwargs: Kwargs, means: Mapping[str, Tensor], memory: int) -> int:
        if batch_size(args, kwargs) == 0:
            raise ValueError("FunctionSpaceVI: the batch is empty; give at least one example")
        shapes = tuple(tuple(value.shape[1:]) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if shapes not in self._bytes_per_row:
            with explain_shape_errors(args, kwargs):
                size, output = count_activation_bytes(self._jacobians.runner, args, kwargs, means)
            shape = tuple(select_output(output, self._jacobians.output).shape[1:])
            # Count one forward pass and one backward pass per output, whose activations are kept so that it can be differentiated.
            self._bytes_per_row[shapes] = size * (1 + 3 * math.prod(shape)), shape
        size, self._output_shape = self._bytes_per_row[shapes]
        return max(1, int(memory / 2 / max(1.0, size)))  # the other half is for products with inputs

    # -- divergence ------------------------------------------------------------------------------------------------

    @checked
    def function_kl(self, context_inputs: Inputs) -> Tensor:
        r"""KL from the linearized variational process to the prior at given inputs: a differentiable scalar, in nats.

        For `"diagonal"`, all function values count as independent. For `"full"`, each output has a joint Gaussian over the
        inputs, and the KL is summed over outputs. For `"joint"`, one Gaussian covers all inputs and outputs.

        Args:
            context_inputs: Inputs of the network.

        Raises:
            ValueError: If the inputs do not fit, if the KL is not finite, or if `"full"` or `"joint"` has more function values
                than weights and no jitter is given.
        """
        args, kwargs = checked_inputs(context_inputs)
        try:
            self._settle(args, kwargs)
            means, variances = self._means(), self._variances()
            rows = self._rows(args, kwargs, means, self.memory)
            part, given = self._kl_of(means, variances)
            if self.covariance == "diagonal" and rows < batch_size(args, kwargs):
                kl = sum_of_pieces(part, list(split_rows(args, kwargs, rows)), *given)
            elif self._records:
                kl = self._capture(part, (args, dict(kwargs)), given)
            else:
                kl = self._kl((args, kwargs), means, variances)
        except ValueError as error:
            if str(error).startswith("inputs of"):
                raise ValueError(f"context {error}") from error
            raise
        check_kl(kl)
        return kl

    def _kl(self, inputs: tuple[Any, Any], means: Mapping[str, Tensor], variances: Mapping[str, Tensor]) -> Tensor:
        kind = self.covariance
        mean, found = self._moments(inputs, kind, means, variances)
        center, variance = self.prior.moments(*inputs, mean.detach(), kind)
        unit = next(iter(self.bnn.layout.units.values()), 1.0) if self._in_units else 1.0
        prior = (center, variance * unit**2 if unit != 1 else variance)
        weights = sum(value.numel() for value in variances.values())
        return gaussian_kl(kind, (mean, found), prior, weights, self.jitter)

    def _kl_of(
        self, means: Mapping[str, Tensor], variances: Mapping[str, Tensor]
    ) -> tuple[Callable[[tuple[Any, Any], Sequence[Tensor]], Tensor], tuple[Tensor, ...]]:
        """Two results: a function that computes the KL from inputs and a list of tensors; and this list, which contains all
        tensors that need gradients."""
        points = {name: value for name, value in self.bnn.network.named_parameters() if value.requires_grad}
        first, second = len(means), len(means) + len(variances)

        def part(inputs: tuple[Any, Any], given: Sequence[Tensor]) -> Tensor:
            moved = dict(zip(points, given[second:], strict=True))
            values = {**moved, **dict(zip(means, given[:first], strict=True))}
            return self._kl(inputs, values, dict(zip(variances, given[first:second], strict=True)))

        return part, (*means.values(), *variances.values(), *points.values())

    # -- the objective ---------------------------------------------------------------------------------------------

    @checked
    def objective(
        self,
        x: Inputs,
        y: Tensor,
        *,
        num_data: DataCount,
        num_draws: Count = 1,
        kl_weight: NonNegative = 1.0,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Estimate of the function-space bound for the whole dataset from one batch: a scalar in nats, to be maximized.

        The arguments are the same as in `BayesianNetwork.elbo`. The generator also draws the context inputs.
        """
        data, kl = self.objective_terms(
            x, y, num_data=num_data, num_draws=num_draws, example_weights=example_weights, generator=generator
        )
        return data.mean() - kl_weight * kl

    def objective_terms(
        self,
        x: Any,
        y: Tensor,
        *,
        num_data: int,
        num_draws: int = 1,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `objective`, separately: the data term of each draw [S], and the KL, a scalar."""
        check_deterministic(self.bnn.network)
        _check_trainable(self.bnn)
        draws = self.bnn.draw(num_draws, generator=generator, num_data=num_data)
        data, _ = self.bnn.terms_of(draws, x, y, num_data=num_data, example_weights=example_weights)
        with full_precision(first_parameter(self.bnn.posteriors).device.type):
            return data, self.function_kl(self.context.draw(x, generator))

    def fit(self, train_loader: Iterable[Any], *, epochs: Count, **options: Any) -> History:
        """Train the network in place by maximizing `objective`; everything else is as in `bayesify.fit`.

        Args:
            train_loader: Batches of inputs and targets.
            epochs: Passes over the data.
            options: Further arguments of `bayesify.fit`: optimizer, learning rate, schedules, validation, checkpoint, seed.
        """
        return fit(self, train_loader, epochs=epochs, **options)

    @property
    def module(self) -> BayesianNetwork:
        """The network."""
        return self.bnn

    @property
    def training_draws(self) -> int:
        """Number of draws per step that the posterior recommends."""
        return self.bnn.training_draws

    def check_ready(self) -> None:
        """Raise `ValueError` if there is no likelihood, or if layers of the network are random or mix the examples of a batch."""
        self.bnn.check_ready()
        check_deterministic(self.bnn.network)

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `objective` for a batch of `fit`. In the MAP phase, the terms come from `BayesianNetwork.terms`
        instead."""
        if phase == "map":
            return self.bnn.terms(batch, phase=phase, num_data=num_data, num_draws=num_draws, generator=generator)
        data, kl = self.objective_terms(
            batch.x, batch.y, num_data=num_data, num_draws=num_draws, example_weights=batch.weights, generator=generator
        )
        return data, kl.expand(1)

    # -- prediction ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Inputs,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        method: Literal["draws", "linearized"] = "draws",
        **options: Any,
    ) -> Predictive:
        """The predictive distribution of a batch; see `Predictor.predict` for the other arguments.

        Args:
            memory: Memory budget in bytes, or a string such as `"1GiB"`; for `"linearized"`, the default is the model's budget.
            method: `"draws"` runs the network with draws of its weights. `"linearized"` uses the closed-form Gaussian over the
                outputs of the linearized network. For Gaussian noise, the prediction of the linearized network is exact. For a
                classification, the prediction is an average over draws from this Gaussian.
            options: Further arguments of `BayesianNetwork.predict`.

        Raises:
            ValueError: If there is no likelihood, if the method is unknown, or if inputs are not valid.
        """
        if method == "draws":
            return self.bnn.predict(x, num_draws, generator=generator, memory=memory, **options)
        if options:
            names = ", ".join(options)
            raise TypeError(f"predict: only method='draws' accepts {names}; use method='draws', or leave out {names}")
        likelihood = self.bnn.require_likelihood("predict")
        self._settle(*as_inputs(x))
        self._evaluated = self._evaluated or self._jacobians.evaluating()
        alone = copy.copy(self)  # a copy, so that other threads are not affected
        alone._jacobians = self._evaluated
        mean, found = alone.function_moments(x, "example", memory=memory)
        outputs = mean.reshape(-1, *alone._output_shape)
        return likelihood.closed_form(OutputGaussian(outputs, found, draw_seed(generator)))

    def config(self) -> dict[str, Any]:
        """All arguments of the network and of the prior over functions, as plain data."""
        chosen = {
            "context": self.context.config(),
            "covariance": self.covariance,
            "prior": self.prior.config() or {"name": self.prior.name},
            "layers": self.layers,
            "jitter": self.jitter,
        }
        return {"network": self.bnn.config(), "function_space": chosen}

    def state(self) -> dict[str, Tensor]:
        """Tensors of the network."""
        return self.bnn.state()

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The model with its prior over functions, built on a copy of `net`."""
        chosen = dict(config["function_space"])
        prior, context = restore_prior(chosen.pop("prior")), restore_context(chosen.pop("context"))
        bnn = BayesianNetwork.restore(net, config["network"], state)
        return cls(bnn, prior=prior, context=context, **chosen)

    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of the network."""
        return self.bnn.fingerprint()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the network to a device or type, in place."""
        self.bnn.to(*args, **kwargs)
        return self

    def __repr__(self) -> str:
        return (
            f"FunctionSpaceVI({type(self.prior).__name__} prior, {type(self.context).__name__} of {self.context.n}, "
            f"covariance={self.covariance!r}, layers={self.layers!r})"
        )


def _check_network(bnn: BayesianNetwork) -> None:
    for part in bnn.posteriors:
        if not isinstance(part, INDEPENDENT_POSTERIORS):
            raise ValueError(
                f"FunctionSpaceVI: {type(part).__name__} is not a posterior of independent Gaussian weights; use MeanField or KTied"
            )
    bnn.prior.typical().require_fixed("FunctionSpaceVI")


def _check_trainable(bnn: BayesianNetwork) -> None:
    for name in bnn.weights:
        if isinstance(owner_of(bnn.network, name)[0], nn.EmbeddingBag):
            raise ValueError(
                f"FunctionSpaceVI: {name} belongs to an EmbeddingBag, which torch cannot differentiate twice; replace it by "
                f"nn.Embedding and a sum over words, or leave {name} out of the posterior"
            )
