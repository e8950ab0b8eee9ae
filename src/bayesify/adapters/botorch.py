"""A BoTorch model made from a predictor with draws, for Bayesian optimization."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bayesify.adapters.drawn import fixed_draws, output_of
from bayesify.arguments.checks import Count, checked
from bayesify.arguments.installing import load
from bayesify.draws import Draws
from bayesify.laplace import Laplace
from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.predictive.transformed import TargetTransform
from bayesify.predictor import Drawable, Predictor, Trainable
from bayesify.running.inputs_and_outputs import select_output
from bayesify.running.runner import Runner
from bayesify.training.fitting import fit


def _load(module: str) -> Any:
    return load(module, extra="botorch", owner="bayesify.adapters.botorch")


_Model: Any = _load("botorch.models.model").Model
_Deterministic: Any = _load("botorch.models.deterministic").GenericDeterministicModel
_Ensemble: Any = _load("botorch.posteriors.ensemble").EnsemblePosterior
_Sampler: Any = _load("botorch.sampling.index_sampler").IndexSampler
_GetSampler: Any = _load("botorch.sampling.get_sampler").GetSampler
_load("torch._decomp.decompositions_for_jvp")  # otherwise torch loads it at the first derivative, with a warning

DEFAULT_NUM_DRAWS = 128
"""Number of functions for a model with infinitely many draws."""


class DrawsPosterior(_Ensemble):
    """Empirical distribution of the draws: values of S functions at q points, [*b, S, q, O].

    Mean and variance are taken over draws, so analytic acquisition functions use the Gaussian with these moments.
    """


class DrawSampler(_Sampler):
    """Sampler that takes the draws in order: sample i is draw i mod S. It uses the same draws for all points, batches
    and calls.

    If the number of samples is a multiple of S, their average equals the average over draws exactly. BoTorch's `IndexSampler` takes
    draws at random, with repetition, and takes different draws for each batch.
    """

    def _construct_base_samples(self, posterior: Any) -> None:
        index = torch.arange(self.sample_shape.numel(), device=posterior.device) % posterior.ensemble_size
        shape = (*self.sample_shape, *(1 for _ in posterior.batch_shape))
        self.base_samples = index.view(shape).expand(self.sample_shape + posterior.batch_shape)


def _draw_sampler(posterior: DrawsPosterior, sample_shape: torch.Size, *, seed: int | None = None) -> DrawSampler:
    return DrawSampler(sample_shape=sample_shape, seed=seed)


_GetSampler.register(DrawsPosterior)(_draw_sampler)


class BoTorchModel(_Model):
    r"""A `botorch.models.model.Model` made of S functions drawn from a posterior; it uses the same functions for every input.

    The value of function s at x is draw s's mean prediction, in the targets' units:
    $f_s(x) = g^{-1}(\mathbb{E}[z | \text{draw } s, x])$, where g is the transform `targets` and z = g(y). The values of a
    function at several points come from the same draw. They are differentiable with respect to x and computed in float64,
    regardless of the network's dtype. For a `Laplace`, the functions are linearized networks, $f(x; w^*) + J(x) (w_s - w^*)$, as
    in its predictions.

    Args:
        model: A `Draws`, or a model that can draw, such as a `BayesianNetwork`, `Laplace`, `SWAG`, or `FixedDraws` of a chain.
        num_draws: Number of draws S; by default all draws if their number is finite, otherwise 128.
        inputs: Differentiable function that maps points of the search space to inputs of the network, such as BoTorch's
            `Normalize`.
        targets: Transform that was applied to the targets for training, if any.
        data: Points [N, D] and targets [N, O] of the training data; needed for `condition_on_observations`.
        num_outputs: Number of outputs O; by default the number in `data`, or 1 if `data` is not given.
        likelihood: Likelihood of numeric targets; by default the model's likelihood. If `Draws` have no likelihood, the
            functions' values are the network's outputs.
        output: Name or index of the network's output to use, if there are several; see `bayesianize`.
        generator: Source of randomness.

    Attributes:
        draws: The draws that define the functions.

    Raises:
        TypeError: If the model cannot draw, or if its likelihood is not for numeric targets.
        ValueError: If the shapes of `data` do not fit.
    """

    @checked
    def __init__(
        self,
        model: Any,
        num_draws: Count | None = None,
        *,
        inputs: Callable[[Tensor], Tensor] | None = None,
        targets: TargetTransform | None = None,
        data: tuple[Tensor, Tensor] | None = None,
        num_outputs: Count | None = None,
        likelihood: Likelihood | None = None,
        output: str | int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        law = likelihood if likelihood is not None else model.likelihood if isinstance(model, Predictor) else None
        if law is not None and not isinstance(law, NumberLikelihood):
            raise TypeError(
                f"BoTorchModel: {type(law).__name__} is not a likelihood for numeric targets; use a likelihood for numeric "
                "targets, such as Gaussian"
            )
        if data is not None and not (data[0].ndim == data[1].ndim == 2 and len(data[0]) == len(data[1])):
            shapes = " and ".join(str(tuple(part.shape)) for part in data)
            raise ValueError(
                f"BoTorchModel: data= has tensors of shapes {shapes}; give points [N, D] and targets [N, O]"
            )
        self._model: list[Drawable | Draws] = [model]  # in a list, so that the model is not a submodule
        self._law = [law and copy.deepcopy(law).requires_grad_(False)]
        self._data, self._inputs, self._targets = data, inputs, targets
        self._output, self._given = output_of(model, output), (num_draws, likelihood)
        self._num_outputs = num_outputs or (data[1].shape[-1] if data is not None else 1)
        self.draws = _precise(fixed_draws(model, num_draws, generator, "BoTorchModel", DEFAULT_NUM_DRAWS))

    @property
    def num_outputs(self) -> int:
        """Number of outputs O."""
        return self._num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape, which is empty because this is a single model."""
        return torch.Size()

    def sampler(self) -> DrawSampler:
        """A sampler that takes each draw once, for Monte Carlo acquisition functions."""
        return DrawSampler(sample_shape=torch.Size([len(self.draws)]))

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint distribution of the functions' values at points.

        Args:
            X: Points, [*b, q, D].
            output_indices: Indices of the outputs; all by default.
            observation_noise: Whether to add the likelihood's noise to each draw. The noise is the same in every call and batch.
            posterior_transform: A posterior transform of BoTorch.

        Returns:
            A `DrawsPosterior` over values [*b, q, O].

        Raises:
            TypeError: If `observation_noise` is a tensor.
            ValueError: If `X` does not have shape [*b, q, D].
        """
        if not isinstance(observation_noise, bool):
            raise TypeError(
                "BoTorchModel: observation_noise= is neither True nor False; give True to add the likelihood's "
                "noise, or False to omit it"
            )
        if X.ndim < 2:
            raise ValueError(
                f"BoTorchModel: points have shape {tuple(X.shape)}; give [*b, q, D], or x.unsqueeze(0) for one point"
            )
        values = self._values(self.draws, X, observation_noise)
        values = values if output_indices is None else values[..., output_indices]
        found = DrawsPosterior(values)
        return found if posterior_transform is None else posterior_transform(found)

    def _values(self, draws: Draws, X: Tensor, noisy: bool = False) -> Tensor:
        """Values [*b, S, q, O] of the functions at the points `X`."""
        outputs = self._run(draws, self._rows(X).double()).to(X.dtype)
        outputs = outputs if outputs.ndim > 2 else outputs.unsqueeze(-1)  # [S, b q, K O]
        law, values = self._law[0], outputs
        if law is not None:
            values, variance = law.family.moments(*law.components(outputs))
            if noisy:
                shape = (len(draws), 1, X.shape[-2], values.shape[-1])
                noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=X.dtype).to(X.device)
                spread = variance.expand_as(values).sqrt().unflatten(1, (-1, X.shape[-2]))
                values = values + (spread * noise).flatten(1, 2)
        values = values if self._targets is None else self._targets.inverse(values)
        split: Tensor = values.unflatten(1, X.shape[:-1])
        return split.movedim(0, -3)

    def _run(self, draws: Draws, rows: Tensor) -> Tensor:
        """Outputs of each draw, [S, b q, ...]."""
        model = self._model[0]
        if not isinstance(model, Laplace):
            return select_output(draws(rows), self._output)
        center = {name: model.values[name].double() for name in draws.weights}

        def run(weights: dict[str, Tensor]) -> Tensor:
            return select_output(draws.runner.call(weights, (rows,), {}), self._output)

        def linearized(weights: dict[str, Tensor]) -> Tensor:
            offset = {name: weight - center[name] for name, weight in weights.items()}
            value, change = torch.func.jvp(run, (center,), (offset,))[:2]
            found: Tensor = value + change
            return found

        found: Tensor = torch.func.vmap(linearized)(dict(draws.weights))
        return found

    def _rows(self, X: Tensor) -> Tensor:
        points = X if self._inputs is None else self._inputs(X)
        return points.reshape(-1, points.shape[-1])

    def thompson_path(self, generator: torch.Generator | None = None) -> Any:
        """One function from the posterior as a deterministic BoTorch model, for Thompson sampling.

        Args:
            generator: Source of randomness.

        Returns:
            A `GenericDeterministicModel` of a fresh draw, or of an existing draw if the number of draws is finite.
        """
        model = self._model[0]
        if isinstance(model, Drawable) and model.num_distinct_draws is None:
            with torch.no_grad():
                path = _precise(model.draw(1, generator=generator).detach())
        else:
            index = int(torch.randint(len(self.draws), (), generator=generator))
            path = self.draws[index : index + 1]
        return _Deterministic(lambda X: self._values(path, X).squeeze(-3), num_outputs=self.num_outputs)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, *, epochs: int = 100, learning_rate: float = 1e-3, seed: int = 0, **options: Any
    ) -> BoTorchModel:
        """A copy of this model, trained for a few more steps on the old and the new data.

        Args:
            X: New points, [N', D].
            Y: Targets of the new points, [N', O].
            epochs: Number of steps, each on all data.
            learning_rate: Learning rate of the steps.
            seed: Seed of the steps.
            options: Further arguments of `fit`.

        Returns:
            A new model over a copy of the predictor; this model does not change.

        Raises:
            TypeError: If the predictor cannot be trained.
            ValueError: If the training data are unknown, or if points and targets are not [N, D] and [N, O].
        """
        model = self._model[0]
        if not isinstance(model, Trainable):
            raise TypeError(
                f"BoTorchModel: {type(model).__name__} cannot be trained further; fit a new predictor to all data"
            )
        if self._data is None:
            raise ValueError(
                "BoTorchModel: the training data are unknown; give data=(X, Y) when you create the BoTorchModel"
            )
        if not (X.ndim == Y.ndim == 2 and len(X) == len(Y)):
            raise ValueError(
                f"BoTorchModel: points have shape {tuple(X.shape)} and targets {tuple(Y.shape)}; give [N, D] and [N, O]"
            )
        x, y = (torch.cat((old, new.to(old))) for old, new in zip(self._data, (X, Y), strict=True))
        made, (num_draws, likelihood) = copy.deepcopy(model), self._given
        like = next(model.module.parameters())
        rows, z = self._rows(x), y if self._targets is None else self._targets.forward(y)
        loader = DataLoader(TensorDataset(rows.to(like), z.to(like)), batch_size=len(rows))
        fit(made, loader, epochs=epochs, learning_rate=learning_rate, seed=seed, **{"progress": False, **options})
        generator = torch.Generator().manual_seed(seed)
        return BoTorchModel(
            made,
            num_draws,
            inputs=self._inputs,
            targets=self._targets,
            data=(x, y),
            likelihood=likelihood,
            output=self._output,
            generator=generator,
        )


def _precise(draws: Draws) -> Draws:
    """The same draws, detached, in evaluation mode and in float64. In float32, rounding errors would make line searches
    fail."""

    def widen(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.double() if value.is_floating_point() else value for name, value in values.items()}

    runner = Runner(draws.runner.network, draws.runner.weights, widen(draws.runner.point_values), evaluate=True)
    return Draws(runner, widen(draws.weights), draws.kl, draws.buffers and [widen(part) for part in draws.buffers])
