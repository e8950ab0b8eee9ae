"""Deep Gaussian processes with global or local inducing points."""

import copy
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify.arguments.checks import Budget, Count, DataCount, NonNegative, Positive, Seed, checked
from bayesify.configuration import make_likelihood
from bayesify.deep_gp.layers import KERNELS, Conditional, GlobalLayer, LocalLayer
from bayesify.deep_gp.starts import (
    around_centers,
    as_function_values,
    choose_centers,
    count_outputs,
    layer_widths,
    projection,
)
from bayesify.likelihoods import Gaussian, Likelihood, objectives
from bayesify.maths.gamma import widened
from bayesify.maths.noise import Randomness, standard_normal
from bayesify.maths.value_checks import should_check
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.regression import RegressionPredictive, pair
from bayesify.predictor import DEFAULT_NUM_DRAWS, Batch, Phase, Predictor, Trainable
from bayesify.running.generators import draw_seed
from bayesify.running.inputs_and_outputs import checked_inputs
from bayesify.running.memory import MEMORY_BUDGET, parse_bytes
from bayesify.storage.serializers import register_predictor
from bayesify.training.fitting import fit
from bayesify.training.history import History


class ProcessPredictive(RegressionPredictive):
    r"""$p(y) = \frac1S \sum_s \mathcal{N}(y; \mu_s, v_s + \text{noise})$, where $\mu$ and v are [S, B, O] and the noise is a
    scalar or [O].

    $\mu_s$ and $v_s$ are the mean and the variance of f given draw s of the previous layers. With one layer there is nothing to
    draw.
    """

    is_mixture = False

    def __init__(self, mean: Tensor, variance: Tensor, noise: Tensor, seed: int) -> None:
        self._mean, self._variance, self._seed = mean, variance, seed
        self._noise = noise.to(mean).expand(mean.shape[1:])
        super().__init__(Outputs(kept=torch.stack((mean, variance + self._noise), dim=-1)), pair)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of f, variance of f (between draws plus within draws), and variance of the noise."""
        spread = self._mean.var(0, unbiased=False) + self._variance.mean(0)
        return self._mean.mean(0), spread, self._noise

    @property
    def outputs(self) -> Tensor:
        """One draw of f per draw of the previous layers: [S, B, O]. Given the previous layers, the values at different
        inputs are independent."""
        generator = torch.Generator().manual_seed(self._seed)
        noise = torch.randn(self._mean.shape, generator=generator, dtype=self._mean.dtype).to(self._mean.device)
        return self._mean + self._variance.sqrt() * noise


HIDDEN_NOISE_STD = 0.3
"""Initial noise of the pseudo-outputs of hidden layers, as a standard deviation relative to the process's standard deviation."""
DEFAULT_BATCH_SIZE = 256


@register_predictor
class DeepGP(nn.Module, Predictor, Trainable):
    r"""A deep Gaussian process: a composition of Gaussian processes $f = f_L \circ \dots \circ f_1$.

    Each output of layer l has the prior $\mathcal{GP}(\text{skip}_l, k_l)$; outputs of a layer share its kernel.

    `inducing="global"` (Ober & Aitchison 2021): only the inducing inputs $U_0$ of the first layer are learned. The
    values $U_l$ at the inducing inputs are drawn layer by layer from $q(U_l | U_{l-1})$. This q is the posterior of a regression
    from the drawn $U_{l-1}$ onto learned pseudo-outputs (see `GlobalLayer`). $U_l$ are then the inducing inputs of the next
    layer, so that the posteriors of the layers depend on each other. The last layer's posterior is optimal if $U_0$ contains the
    training inputs, the pseudo-outputs V are their targets, and $\Lambda$ is the precision of the noise.

    `inducing="local"` (Salimbeni & Deisenroth 2017, DSVI): each layer has its own inducing inputs and its own posterior (see
    `LocalLayer`).

    Whether the inducing points are global or local, the hidden layers' values at the data are drawn given the inducing values,
    independently for each example. The last layer's values are integrated out. The bound is

    $$ \mathrm{ELBO} = \frac1S \sum_s \Bigl[ \frac NB \sum_b \mathbb{E}_{q(f_b | s)} \log p(y_b | f_b)
       - \sum_l \mathrm{KL}_{l,s} \Bigr], $$

    where the expectation is computed in closed form for Gaussian noise, and from one draw of $f_b$ for other
    likelihoods. With one layer and Gaussian noise, nothing is drawn, and the model is a sparse Gaussian process.

    First standardize the inputs and, in a regression, the targets, because kernels start with amplitude 1 and
    lengthscales $\sqrt D$. Kernel matrices are computed in float64 if the device supports it, whatever the dtype of the
    parameters and data.

    Args:
        inputs: Training inputs [N, D]. The inducing inputs start at all training inputs, or at `num_inducing` centers
            of k-means.
        targets: Targets of the inputs (optional). They determine the initial last layer and the number of outputs.
        depth: Number of layers L.
        width: Number of outputs of each hidden layer: one number, or L - 1 numbers; by default D, but at most 30.
        num_outputs: Number of outputs O; required if no targets are given.
        num_inducing: Number of inducing points M, at most N.
        inducing: `"global"` or `"local"`.
        kernel: `"squared_exponential"`, `"matern12"`, `"matern32"`, `"matern52"` or `"linear"`, each with a scale per input (ARD).
        likelihood: Likelihood p(y | f), as an instance, a name or a plain dict; `Gaussian(noise=0.1)` by default. It is
            copied.
        skip: Whether a hidden layer's prior mean is its input instead of 0. If the layer has fewer outputs than inputs, the mean is
            the projection of the input on its first principal axes. If the layer has more outputs than inputs, the mean is the
            input padded with zeros. At the start of training, hidden layers compute approximately this mean.
        lengthscale: Initial value of all lengthscales; $\sqrt D$ by default.
        jitter: Jitter that is added to the diagonal of each kernel matrix, as a share of the diagonal's mean.
        seed: Seed of k-means.

    Raises:
        ValueError: If inputs are not [N, D] or not finite, if targets do not match the inputs, if a count is below 1,
            or if a name is unknown.
    """

    likelihood: Likelihood
    output = None
    training_draws = 4
    noise_per_example = True

    @checked
    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        depth: Count = 2,
        width: Count | Sequence[Count] | None = None,
        num_outputs: Count | None = None,
        num_inducing: Count = 100,
        inducing: Literal["global", "local"] = "global",
        kernel: str = "squared_exponential",
        likelihood: Likelihood | str | dict[str, Any] | None = None,
        skip: bool = True,
        lengthscale: Positive | None = None,
        jitter: Positive = 1e-6,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        if inputs.ndim != 2 or not inputs.numel() or not inputs.is_floating_point():
            raise ValueError(
                f"DeepGP: inputs have shape {tuple(inputs.shape)} and type {inputs.dtype}; give floating-point inputs [N, D]"
            )
        checked_inputs(inputs)
        if targets is not None and not bool(torch.isfinite(targets).all()):
            raise ValueError("DeepGP: targets contain NaN or infinity; give finite targets, or remove their rows")
        if kernel not in KERNELS:
            raise ValueError(f"DeepGP: kernel={kernel!r}; give one of {', '.join(KERNELS)}")
        self.likelihood = copy.deepcopy(make_likelihood(likelihood)) or Gaussian(noise=0.1)
        self.widths = layer_widths(width, depth, inputs.shape[-1], count_outputs(self.likelihood, targets, num_outputs))
        self.inducing, self.kernel, self.skip, self.jitter = inducing, kernel, skip, jitter
        self.lengthscale = lengthscale
        centers = choose_centers(inputs, num_inducing, seed)
        self._build(inputs, centers, as_function_values(self.likelihood, targets, inputs, self.widths[-1]))
        self.to(inputs)

    def _build(self, inputs: Tensor, centers: Tensor, targets: Tensor | None) -> None:
        layers: list[nn.Module] = []
        data, below = inputs.detach(), centers
        for place, (num_inputs, num_outputs) in enumerate(zip(self.widths[:-1], self.widths[1:], strict=True), start=1):
            last = place == len(self.widths) - 1
            matrix = None if last else projection(data, num_outputs)
            more: dict[str, Any] = {"skip": matrix if self.skip else None, "place": place}
            more |= {"lengthscale": self.lengthscale, "jitter": self.jitter}
            start = centers.new_zeros(len(centers), num_outputs)
            if matrix is not None and not self.skip:
                start = below @ matrix
            precision = centers.new_full((len(centers),), HIDDEN_NOISE_STD**-2)
            if last:
                precision = torch.ones_like(precision)
                if targets is not None:
                    start, counts = around_centers(inputs, targets, centers)
                    likelihood, curvature = self.likelihood, 0.25  # curvature of log p(y | f)
                    if isinstance(likelihood, Gaussian):
                        curvature = 1 / float(likelihood.noise.detach().mean())
                    precision = (counts * curvature).clamp_min(1e-2)
            if self.inducing == "global":
                layers.append(GlobalLayer(self.kernel, start, precision, num_inputs, **more))
            else:
                layer = LocalLayer(self.kernel, below, num_outputs, **more).to(centers)
                layers.append(layer.start_at(start, precision))
            if matrix is not None:
                data, below = data @ matrix, below @ matrix
        self.layers = nn.ModuleList(layers)
        self.inducing_inputs = nn.Parameter(centers.clone()) if self.inducing == "global" else None

    # -- drawing ---------------------------------------------------------------------------------------------------

    def conditionals(self, num_draws: int, generator: Randomness = None) -> tuple[list[Conditional], Tensor]:
        """Every layer's process, given S draws of the previous layers' values at the inducing inputs; and the KL of each draw.

        With global inducing points, hidden layers are conditioned on their drawn values, and the last layer's values are integrated
        out. With local inducing points, the values of all layers are integrated out. If a parameter is not finite, a `ValueError`
        names it.

        Returns:
            One conditional per layer, and the KL [S] in nats.
        """
        total: Tensor | float = 0.0
        parts: list[Conditional] = []
        below = None if self.inducing_inputs is None else widened(self.inducing_inputs).unsqueeze(0)
        try:
            for layer in self.layers:
                if below is None:
                    conditional, kl = layer.condition()  # type: ignore[operator]
                elif layer is self.layers[-1]:
                    conditional, kl = layer.condition(below)  # type: ignore[operator]
                else:
                    conditional, kl, below = layer.draw(below, num_draws, generator)  # type: ignore[operator]
                parts.append(conditional)
                total = kl + total
        except ValueError:
            self._check_parameters()
            raise
        return parts, torch.as_tensor(total).expand(num_draws)

    def propagate(
        self, parts: Sequence[Conditional], x: Tensor, num_draws: int, generator: Randomness = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, [S, B, O] each, at inputs [B, D], given draws of the hidden layers' values at these inputs.

        Args:
            parts: Conditionals of the layers; see `conditionals`.
            x: Inputs.
            num_draws: Number of draws S.
            generator: Source of randomness. Given the conditionals, draws at different inputs are independent.
        """
        values = widened(x).unsqueeze(0)
        for part in parts[:-1]:
            mean, variance = part.moments(values)
            drawn = self._draw_values(mean.expand(num_draws, -1, -1), variance, generator)
            values = part.layer.skip(values) + drawn
        mean, variance = parts[-1].moments(values)
        mean = mean + parts[-1].layer.skip(values)
        return mean.expand(num_draws, -1, -1), variance.expand(num_draws, -1, mean.shape[-1])

    # -- the bound -------------------------------------------------------------------------------------------------

    @checked
    def elbo(
        self,
        x: Tensor,
        y: Tensor,
        *,
        num_data: DataCount,
        num_draws: Count = 1,
        kl_weight: NonNegative = 1.0,
        example_weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Evidence lower bound of the whole dataset, estimated from a batch of inputs [B, D]: a scalar in nats, to be
        maximized.

        The arguments are the same as in `BayesianNetwork.elbo`.

        Raises:
            ValueError: If inputs, targets or the result are not finite, or if inputs and targets do not match.
        """
        data, kl = self.elbo_terms(
            x, y, num_data=num_data, num_draws=num_draws, example_weights=example_weights, generator=generator
        )
        return objectives.elbo(data, kl, kl_weight)

    @checked
    def elbo_terms(
        self,
        x: Tensor,
        y: Tensor,
        *,
        num_data: DataCount,
        num_draws: Count = 1,
        example_weights: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `elbo`, separately: the data term and the KL of each draw, each of shape [S] and in nats."""
        self._check(x)
        parts, kl = self.conditionals(num_draws, generator)
        mean, variance = self.propagate(parts, x, num_draws, generator)
        likelihood = self.likelihood
        if isinstance(likelihood, Gaussian):
            data = objectives.integrated_log_likelihood(mean, variance, y, likelihood, num_data, example_weights)
        else:
            values = self._draw_values(mean, variance, generator)
            data = objectives.expected_log_likelihood(values, y, likelihood, num_data, example_weights)
        if should_check(data) and not bool(torch.isfinite(data - kl).all()):
            self._check_parameters()
            raise ValueError(
                "elbo is not finite, although all parameters are finite; standardize the inputs and targets"
            )
        return data, kl

    @staticmethod
    def _draw_values(mean: Tensor, variance: Tensor, generator: Randomness) -> Tensor:
        noise = standard_normal(mean.numel(), mean, generator).view(mean.shape)
        return mean + variance.clamp_min(1e-12).sqrt() * noise

    def _check_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(f"DeepGP: {name} contains NaN or infinity; lower the learning rate") from None

    def _check(self, x: Any) -> None:
        checked_inputs(x)
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[-1] != self.widths[0]:
            shape = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
            raise ValueError(f"DeepGP: x is {shape}; give a tensor [B, {self.widths[0]}]")

    @checked
    def kl(self, num_draws: Count = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """KL of the inducing values in nats, a scalar. With global inducing points and hidden layers, it is a mean over draws."""
        return self.conditionals(num_draws, generator)[1].mean()

    # -- training --------------------------------------------------------------------------------------------------

    @checked
    def fit(
        self,
        data: Iterable[Any] | tuple[Tensor, Tensor],
        *,
        epochs: Count = 200,
        learning_rate: Positive = 0.02,
        seed: Seed | None = None,
        **options: Any,
    ) -> History:
        """Train the process in place by maximizing `elbo`; everything else is as in `bayesify.fit`.

        Args:
            data: Batches of inputs and targets, or a pair of tensors, which is split into shuffled batches of 256.
            epochs: Passes over the data.
            learning_rate: Learning rate of Adam.
            seed: Seed of all randomness.
            options: Further arguments of `bayesify.fit`: `num_draws` (4 by default), validation, patience, checkpoint and others.

        Returns:
            The history, one entry per epoch.
        """
        if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
            data = DataLoader(TensorDataset(*data), batch_size=DEFAULT_BATCH_SIZE, shuffle=True)
        return fit(self, data, epochs=epochs, learning_rate=learning_rate, seed=seed, **options)

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `elbo` for a batch of `fit`, each [S]."""
        return self.elbo_terms(
            batch.x, batch.y, num_data=num_data, num_draws=num_draws, example_weights=batch.weights, generator=generator
        )

    # -- prediction ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Tensor,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
    ) -> Predictive:
        """The predictive distribution of a batch of inputs [B, D]; see `Predictor.predict` for `generator`.

        Args:
            num_draws: Number of draws S; 32 by default, or 1 if nothing is drawn (one layer with Gaussian noise).
            memory: Memory budget of kernel matrices: bytes, or a string such as `"1GiB"`; 256 MiB by default.

        Raises:
            ValueError: If inputs do not have shape [B, D] or are not finite.
        """
        self._check(x)
        if not len(x):
            raise ValueError("predict: the batch is empty; give at least one example")
        random = len(self.layers) > 1 or not isinstance(self.likelihood, Gaussian)
        count = num_draws or (DEFAULT_NUM_DRAWS if random else 1)
        budget = MEMORY_BUDGET if memory is None else parse_bytes(memory)
        parts, _ = self.conditionals(count, generator)
        size = max(part.weights.shape[-2] * max(2 * part.weights.shape[-1], 4) for part in parts)
        pieces = x.split(max(1, budget // (8 * count * size)))
        moments = [self.propagate(parts, piece, count, generator) for piece in pieces]  # shared inducing values
        mean, variance = (torch.cat(found, dim=1) for found in zip(*moments, strict=True))
        if isinstance(self.likelihood, Gaussian):
            noise = self.likelihood.noise.detach().clone()
            return ProcessPredictive(mean.to(x.dtype), variance.to(x.dtype), noise, draw_seed(generator))
        return self.likelihood.predictive(Outputs(kept=self._draw_values(mean, variance, generator).to(x.dtype)))

    def config(self) -> dict[str, Any]:
        """Sizes and arguments as a plain dict."""
        kept = ("inducing", "kernel", "skip", "lengthscale", "jitter", "num_inducing")
        own = {"widths": list(self.widths), "likelihood": self.likelihood.config()}
        return own | {name: getattr(self, name) for name in kept}

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return dict(self.state_dict(keep_vars=True))

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The process that `config()` and `state()` describe; `net` is not used."""
        given = dict(config)
        widths, count = given.pop("widths"), given.pop("num_inducing")
        first = state["inducing_inputs" if given["inducing"] == "global" else "layers.0.inducing_inputs"]
        # Build with distinct inputs: trained inducing inputs may coincide, and k-means or a Cholesky factor would then fail.
        apart = torch.arange(first.numel(), dtype=torch.float64).sin().reshape(first.shape)
        depth, hidden, outputs = len(widths) - 1, widths[1:-1], widths[-1]
        model = cls(apart, num_inducing=count, depth=depth, width=hidden, num_outputs=outputs, **given).to(first)
        model.load_state_dict(state)
        return model

    @property
    def num_inducing(self) -> int:
        """Number of inducing points M."""
        first = self.inducing_inputs if self.inducing_inputs is not None else self.layers[0].inducing_inputs
        return len(first)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Widths, kind of inducing points, and kernel."""
        return f"{' -> '.join(map(str, self.widths))}, {self.inducing} inducing points, {self.kernel}"
