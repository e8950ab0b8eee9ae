"""Many models of one architecture that train as one: their parameters are stacked, and `vmap` runs them together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from bayesify.maths.noise import NoiseSource, Randomness, StackedNoise, source_of
from bayesify.network import BayesianNetwork
from bayesify.posteriors.common.base import Posterior
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.priors.varied import Varied
from bayesify.running.runner import SLOW_VMAP
from bayesify.training.batches import StackedBatch
from bayesify.weights.module_state import swapped

SEPARATOR = "|"
"""Stands for the dots in the names of stacked parameters, which torch does not allow in a parameter's name."""
NO_BATCHING_RULE = (nn.RNNBase, nn.RNNCellBase, nn.EmbeddingBag, nn.MultiheadAttention)


class ModelStack(nn.Module, Trainable):
    r"""R models of one architecture that train together: a trainable whose objective is the sum of theirs.

    $$ \sum_r \mathbb{E}_{q_r} \log p_r(\mathcal{D}_r | w) - \beta\,\mathrm{KL}(q_r \| p_r) $$

    The gradient of each model's parameters is that of the model alone, and so is every step of an optimizer that treats entries
    independently, such as Adam. Small models cost calls rather than arithmetic, so that R of them together take little more
    time than one. Each has its own parameters, prior, noise variance, rows of data and seed; they share the architecture, the
    kinds of posterior and likelihood, and the number of draws.

    The models run by `vmap`. Recurrent layers, attention, BatchNorm and whatever else `vmap` refuses run in a loop over the models
    instead, as convolutions do, which are faster that way: the numbers are the same, and `loop_reason` says why.

    Args:
        models: Trainables that are modules (`BayesianNetwork`, `DeepGP`), all alike; they are not changed before `unstack`.
        seeds: One per model, so that its random numbers are those of the model alone, whatever stands beside it; by default all
            numbers come from the generator that `terms` is given, in one call.
        num_data: N of each model where they differ; by default that of `terms`.
        vectorize: False runs the models in a loop.

    Raises:
        ValueError: If there is no model, or they differ in more than values.
    """

    def __init__(
        self,
        models: Sequence[Any],
        *,
        seeds: Sequence[int] | None = None,
        num_data: Sequence[int] | None = None,
        vectorize: bool = True,
    ) -> None:
        super().__init__()
        _check_alike(models)
        for key, given in (("seeds", seeds), ("num_data", num_data)):
            if given is not None and len(given) != len(models):
                raise ValueError(f"ModelStack: {len(given)} {key} for {len(models)} models; give one per model")
        self._models = list(models)
        template = _template(models)
        self._template = (template,)  # in a tuple: not a submodule, whose parameters would train as well
        self.phases = template.phases  # type: ignore[misc]
        self._own_num_data = list(num_data) if num_data is not None else None
        self._sources = None if seeds is None else [NoiseSource(torch.Generator().manual_seed(seed)) for seed in seeds]
        self._names: dict[str, str] = {}
        owners = {id(value): name for name, value in template.named_parameters()}
        frozen: dict[str, list[Tensor]] = {}
        for name, value in template.named_parameters(remove_duplicate=False):
            first = owners[id(value)]
            self._names[name] = first.replace(".", SEPARATOR)
            if first != name:
                continue
            rows = [model.get_parameter(name).detach() for model in models]
            if value.requires_grad:
                self.register_parameter(self._names[name], nn.Parameter(torch.stack(rows)))
            else:
                frozen[name] = rows
        normalizes = any(isinstance(module, _BatchNorm) for module in template.modules())
        for name, _ in template.named_buffers():
            if isinstance(template, BayesianNetwork) and isinstance(template.prior, Varied) and name == "prior.scales":
                frozen[name] = list(template.prior.every)
                continue
            rows = [model.get_buffer(name) for model in models]
            if normalizes or not all(torch.equal(rows[0], row) for row in rows[1:]):
                frozen[name] = rows
        for name, rows in frozen.items():
            self._names[name] = name.replace(".", SEPARATOR)
            self.register_buffer(self._names[name], torch.stack(rows))
        self.loop_reason = _loop_reason(template) if vectorize else "vectorize=False"
        self.train(models[0].training)

    # -- the contract ----------------------------------------------------------------------------------------------

    @property
    def training_draws(self) -> int:
        """Draws per step that suit each model."""
        return self._template[0].training_draws

    @property
    def num_models(self) -> int:
        """R."""
        return len(self)

    @property
    def noise_per_example(self) -> bool:
        """Whether the models have noise for each example."""
        return self._template[0].noise_per_example

    def check_ready(self) -> None:
        """Raise `ValueError` if something that training needs is missing in a model."""
        for model in self._models:
            model.check_ready()

    def config(self) -> dict[str, Any]:
        """The choices of each model."""
        return {"models": [model.config() for model in self._models], "num_data": self._own_num_data}

    def terms(
        self,
        batch: Batch,
        *,
        phase: Phase = "variational",
        num_data: int,
        num_draws: int = 1,
        generator: Randomness = None,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of each model's objective, in nats over its whole dataset.

        Args:
            batch: The same rows for all models, or a `StackedBatch` with rows of each model's own.
            phase: See `Trainable.terms`.
            num_data: N.
            num_draws: S.
            generator: Source of randomness where the models have no seeds of their own.

        Returns:
            Expected log-likelihood and KL, [R, S] each.
        """
        options = {"phase": phase, "num_data": num_data, "num_draws": num_draws}
        watched = torch.is_grad_enabled()
        captured = next(self.parameters()).is_cuda and torch.cuda.is_current_stream_capturing()
        before = [] if captured else self._random_state(generator)
        with torch.enable_grad():  # without gradients, posteriors work in place on what `vmap` does not see
            if self.loop_reason is None:
                try:
                    sources = self._sources if self._sources is not None else source_of(generator)
                    found = self.together(batch, phase, num_data, num_draws, sources)
                except (RuntimeError, NotImplementedError, UserWarning) as refusal:
                    if isinstance(refusal, torch.OutOfMemoryError) or captured:
                        raise
                    self._set_random_state(generator, before)
                    found = self._one_by_one(batch, options, generator)  # a mistake fails here too
                    self.loop_reason = f"vmap refused ({str(refusal).strip().splitlines()[0]})"
                    if not isinstance(refusal, UserWarning):
                        warnings.warn(f"ModelStack: {self.loop_reason}; the models run one by one", stacklevel=3)
                else:
                    if not captured and not bool(torch.isfinite(found[0].detach().sum() + found[1].detach().sum())):
                        self._set_random_state(generator, before)  # a factor that needs care, or an error with a name
                        found = self._one_by_one(batch, options, generator)
            else:
                found = self._one_by_one(batch, options, generator)
        data, kl = found
        if self._own_num_data is not None:
            data = data * (data.new_tensor(self._own_num_data) / num_data).unsqueeze(-1)
        return (data, kl) if watched else (data.detach(), kl.detach())

    # -- models ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._models)

    def stacked(self, name: str) -> nn.Parameter:
        """A parameter of all models by its name in one of them, [R, *shape]."""
        return self.get_parameter(self._names[name])

    @torch.no_grad()
    def unstack(self) -> list[Any]:
        """The models that were given, with the parameters and buffers as they are now."""
        for index, model in enumerate(self._models):
            own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, key in self._names.items():
                if name in own and isinstance(value := getattr(self, key), Tensor):
                    own[name].copy_(value[index])
            model.train(self.training)
        return self._models

    def train(self, mode: bool = True) -> ModelStack:
        """Set the mode of all models."""
        self._template[0].train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._template[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def get_extra_state(self) -> Tensor | None:
        """Where the models' own random numbers stand."""
        states = self._random_state(None) if self._sources is not None else None
        return torch.stack(states) if states is not None else None

    def set_extra_state(self, state: Tensor | None) -> None:
        """Continue from `get_extra_state`."""
        if state is not None:
            self._set_random_state(None, list(state))

    # -- running ---------------------------------------------------------------------------------------------------

    def together(
        self, batch: Batch, phase: Phase, num_data: int, num_draws: int, sources: Sequence[NoiseSource] | NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """The two terms of all models at once, [R, S] each; a subclass may know a faster way for some of them.

        Args:
            batch: See `terms`.
            phase: See `terms`.
            num_data: N.
            num_draws: S.
            sources: Of random numbers, one per model, or one for all.
        """
        options = {"phase": phase, "num_data": num_data, "num_draws": num_draws}
        axis = 0 if isinstance(batch, StackedBatch) else None

        def one(index: Tensor, values: dict[str, Tensor], rows: Any) -> tuple[Tensor, Tensor]:
            return self._run(values, Batch(*rows), options, StackedNoise(sources, index))

        rows = (batch.x, batch.y, batch.weights)
        values = {key: getattr(self, key) for key in dict.fromkeys(self._names.values())}
        index = torch.arange(len(self), device=next(iter(values.values())).device)
        dims = pytree.tree_map(lambda leaf: axis if isinstance(leaf, Tensor) else None, rows)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=SLOW_VMAP)
            found: tuple[Tensor, Tensor] = torch.func.vmap(one, in_dims=(0, 0, dims), randomness="different")(
                index, values, rows
            )
        return found

    def _one_by_one(self, batch: Batch, options: dict[str, Any], generator: Randomness) -> Any:
        keys = list(dict.fromkeys(self._names.values()))
        found = []
        for index, row in enumerate(zip(*(getattr(self, key).unbind(0) for key in keys), strict=True)):
            source = self._sources[index] if self._sources is not None else source_of(generator)
            part = batch.model(index) if isinstance(batch, StackedBatch) else batch
            values = dict(zip(keys, row, strict=True))
            found.append(self._run(values, part, options, source))
        return tuple(torch.stack(part) for part in zip(*found, strict=True))

    def _run(
        self, values: dict[str, Tensor], batch: Batch, options: dict[str, Any], noise: NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """The two terms of one model, [S] each, with its parameters and buffers in the template."""
        template = self._template[0]
        with swapped(template, {name: values[key] for name, key in self._names.items()}):
            return template.terms(batch, generator=noise, **options)

    def _random_state(self, generator: Randomness) -> list[Tensor]:
        sources = self._sources if self._sources is not None else [source_of(generator)]
        return [_generator_of(source).get_state() for source in sources]

    def _set_random_state(self, generator: Randomness, states: Sequence[Tensor]) -> None:
        sources = self._sources if self._sources is not None else [source_of(generator)]
        for source, state in zip(sources, states, strict=True):
            _generator_of(source).set_state(state.cpu().clone())


def _generator_of(source: NoiseSource) -> torch.Generator:
    return source.generator if source.generator is not None else torch.default_generator


# -- what can be stacked -------------------------------------------------------------------------------------------


def _description(model: nn.Module) -> Any:
    """What models of one stack must have in common: architecture, kinds of posterior and likelihood; not values."""
    if not isinstance(model, BayesianNetwork):
        return type(model), repr(model)
    config = model.config()
    numbers = ("noise", "scale", "degrees", "dispersion")  # start values, but whether the network says them is no value
    likelihood = {
        key: value is None if key in numbers else value for key, value in (config["likelihood"] or {}).items()
    }
    prior = None if model.prior.draw(1).fixed else config["prior"]
    return repr(model.network), config["posterior"], likelihood, config["output"], prior, model.frozen_statistics


def _check_alike(models: Sequence[Any]) -> None:
    if not models:
        raise ValueError("ModelStack: no models; give at least one")
    first = models[0]
    wanted = {name: (value.shape, value.dtype, value.requires_grad) for name, value in first.named_parameters()}
    for place, model in enumerate(models[1:], start=1):
        if _description(model) != _description(first):
            raise ValueError(
                f"ModelStack: model {place} differs from model 0 in architecture, posterior or likelihood; stack models that "
                "differ in values only (weights, noise, the scale of a fixed prior)"
            )
        found = {name: (value.shape, value.dtype, value.requires_grad) for name, value in model.named_parameters()}
        for name in {**wanted, **found}:
            if wanted.get(name) != found.get(name):
                raise ValueError(
                    f"ModelStack: {name} is {found.get(name, 'missing')} in model {place} and {wanted.get(name, 'missing')} "
                    "in model 0; make them all alike"
                )


def _template(models: Sequence[Any]) -> Any:
    """A copy of the first model, with prior scales as buffers where the models' priors differ."""
    template = copy.deepcopy(models[0])
    if not isinstance(template, BayesianNetwork):
        return template
    scales = [model.prior.draw(1) for model in models]
    if all(scale.fixed for scale in scales) and any(scale.std != scales[0].std for scale in scales):
        reference = next(template.parameters())
        template.prior = Varied.of(template.prior, [scale.std for scale in scales], reference)
        for part in template.modules():
            if isinstance(part, Posterior):
                part.bound_prior = template.prior.live()
    return template


def _loop_reason(template: nn.Module) -> str | None:
    """Why models of this kind run one by one; `None` where they run together."""
    frozen = template.frozen_statistics if isinstance(template, BayesianNetwork) else ()
    for path, module in template.named_modules():
        if isinstance(module, NO_BATCHING_RULE):
            return f"{path} ({type(module).__name__}) has no batching rule"
        if isinstance(module, _BatchNorm) and path.removeprefix("network.") not in frozen:
            return f"{path} ({type(module).__name__}) updates statistics of each model in training"
        if isinstance(module, _ConvNd):
            return f"{path} ({type(module).__name__}) is faster for one model after the other"
    return None
