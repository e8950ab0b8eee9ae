"""Many models of one architecture that train together: their parameters are stacked, and `vmap` runs them at once."""

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from bayesify.conversion import bayesianize
from bayesify.likelihoods import Likelihood
from bayesify.likelihoods.base import NumberLikelihood
from bayesify.maths.noise import NoiseSource, Randomness, StackedNoise, source_of
from bayesify.maths.value_checks import should_check
from bayesify.network import BayesianNetwork
from bayesify.posteriors.common.base import Posterior
from bayesify.posteriors.ensemble import Ensemble
from bayesify.predictor import Batch, Phase, Trainable
from bayesify.priors.fixed import Varied
from bayesify.running.runner import CHECKPOINTS, NO_BATCHING_RULE, SlowVmap, Vmaps
from bayesify.training.batches import StackedBatch
from bayesify.training.perceptrons import Perceptrons, run_all
from bayesify.weights.module_state import swapped

SEPARATOR = "|"
"""Replaces the dots in names of stacked parameters, because torch allows no dots there."""
PREFIX = "likelihood."
"""Prefix of the names of a likelihood's parameters in a model."""


class _Options(TypedDict):
    phase: Phase
    num_data: int
    num_draws: int


_Sources = Sequence[NoiseSource] | NoiseSource
"""A source of noise for each model, or one source for all models."""


class ModelStack(nn.Module, Trainable):
    r"""R models of one architecture that train together. The objective is the sum of the models' objectives.

    $$ \sum_r \mathbb{E}_{q_r} \log p_r(\mathcal{D}_r | w) - \beta\,\mathrm{KL}(q_r \| p_r) $$

    Each model's gradient is the same as if the model trained alone. The same holds for every step of an optimizer that
    treats entries independently, such as Adam. Small models spend their time on calls rather than arithmetic, so R
    models together take little more time than a single model. Each model has its own parameters, prior, noise variance,
    rows of data and seed. The models share the architecture, the kinds of posterior and likelihood, and the number of
    draws.

    Perceptrons with the posterior `Point` run as products of stacked matrices; see `Perceptrons`. Compared with `vmap`
    on a CPU, a step takes 0.6 times as long for ten 8-50-50-1 networks, and equally long for ten 100-500-500-1
    networks. Models that are not such perceptrons run with `vmap`. Models with recurrent layers, attention, BatchNorm or anything
    else that `vmap` refuses run in a loop over the models, and so do networks whose first pass changes their buffers. Models with
    convolutions also run in a loop, because a loop is faster for them. A loop gives the same results as `vmap`; `loop_reason`
    says why it is used.

    Args:
        models: Trainable modules of the same kind (`BayesianNetwork`, `DeepGP`). Only `unstack` changes them.
        seeds: One seed per model. A model with a seed has the same random numbers as if it trained alone. By default, the
            generator passed to `terms` draws the random numbers of all models in one call.
        num_data: Number of examples N of each model, if the numbers differ; by default the number passed to `terms`.
        vectorize: Whether to run the models at once; `False` runs them in a loop.
        likelihoods: G likelihoods that replace the models' own likelihoods. Each likelihood is shared by R / G
            consecutive models and trained with them. Perceptrons may have different kinds of likelihood. Each likelihood then
            uses only as many of a network's first outputs as it needs.

    Raises:
        ValueError: If there is no model, if the models differ in more than their values, or if likelihoods cannot be
            shared evenly.
    """

    def __init__(
        self,
        models: Sequence[Any],
        *,
        seeds: Sequence[int] | None = None,
        num_data: Sequence[int] | None = None,
        vectorize: bool = True,
        likelihoods: Sequence[Likelihood] | None = None,
    ) -> None:
        super().__init__()
        parameters = [dict(model.named_parameters()) for model in models]
        _check_alike(models, parameters)
        for key, given in (("seeds", seeds), ("num_data", num_data)):
            if given is not None and len(given) != len(models):
                raise ValueError(
                    f"ModelStack: there are {len(given)} {key} for {len(models)} models; give one per model"
                )
        self._models = list(models)
        template = _template(models)
        self._template = (template,)  # a tuple hides the template from `parameters()`
        self.phases = template.phases  # type: ignore[misc]
        self._own_num_data = list(num_data) if num_data is not None else None
        self._sources = None if seeds is None else [NoiseSource(torch.Generator().manual_seed(seed)) for seed in seeds]
        self._perceptrons = Perceptrons.of(models, template) if vectorize else None
        self.loop_reason = _loop_reason(template) if vectorize else "vectorize=False"
        self._vmaps, self._is_new = Vmaps(), True
        self._shared = likelihoods is not None
        if likelihoods is not None:
            self._share(likelihoods)
        self._names = self._register(parameters)
        self._keys = [self._names[name] for name in self._perceptrons.names] if self._perceptrons is not None else []
        self._own = {name.removeprefix(PREFIX): key for name, key in self._names.items() if name.startswith(PREFIX)}
        if likelihoods is not None:
            template.likelihood = likelihoods[0]
        self._likelihoods = [template.likelihood] if likelihoods is None else list(likelihoods)
        self._kinds = _group_alike(self._likelihoods)
        self.train(models[0].training)

    def _share(self, likelihoods: Sequence[Likelihood]) -> None:
        if not likelihoods or len(self) % len(likelihoods) or not isinstance(self._template[0], BayesianNetwork):
            raise ValueError(
                f"ModelStack: there are {len(likelihoods)} likelihoods for {len(self)} models of type "
                f"{type(self._template[0]).__name__}; the models must be Bayesian networks, and the number of likelihoods must "
                "divide the number of models"
            )
        if len(likelihoods) > 1 and self._perceptrons is None:
            raise ValueError(
                "ModelStack: more than one likelihood is supported only for perceptrons with the posterior Point; "
                "make a separate stack for each likelihood"
            )
        self.likelihoods = nn.ModuleList(likelihoods)
        self._template[0].likelihood = None

    def _register(self, parameters: Sequence[dict[str, nn.Parameter]]) -> dict[str, str]:
        """Stack the models' parameters and the buffers in which they differ. Return the stacked names by the names in a model."""
        models, template = self._models, self._template[0]
        names: dict[str, str] = {}
        frozen: dict[str, list[Tensor]] = {}
        owners = {id(value): name for name, value in template.named_parameters()}
        for name, value in template.named_parameters(remove_duplicate=False):
            first = owners[id(value)]
            names[name] = first.replace(".", SEPARATOR)
            if first != name:
                continue
            rows = [own[name].detach() for own in parameters]
            if value.requires_grad:
                self.register_parameter(names[name], nn.Parameter(torch.stack(rows)))
            else:
                frozen[name] = rows
        normalizes = any(isinstance(module, _BatchNorm) for module in template.modules())
        for name, _ in template.named_buffers():
            if isinstance(template, BayesianNetwork) and isinstance(template.prior, Varied) and name == "prior.scales":
                frozen[name] = list(template.prior.every)
                continue
            rows = [model.get_buffer(name) for model in models]
            own = isinstance(template, BayesianNetwork) and name.startswith("network.")  # the network may update it
            if normalizes or own or not all(torch.equal(rows[0], row) for row in rows[1:]):
                frozen[name] = rows
        for name, rows in frozen.items():
            names[name] = name.replace(".", SEPARATOR)
            self.register_buffer(names[name], torch.stack(rows))
        return names

    # -- the contract ----------------------------------------------------------------------------------------------

    @property
    def training_draws(self) -> int:
        return int(self._template[0].training_draws)

    @property
    def num_models(self) -> int | None:
        """Number of models R; `None` if models share likelihoods, whose parameters have no row per model."""
        return None if self._shared else len(self)

    @property
    def noise_per_example(self) -> bool:
        return bool(self._template[0].noise_per_example)

    def check_ready(self) -> None:
        for model in self._models if not self._shared else ():
            model.check_ready()

    def config(self) -> dict[str, Any]:
        """Configuration of each model and of the shared likelihoods."""
        shared = {"likelihoods": [likelihood.config() for likelihood in self._likelihoods]} if self._shared else {}
        return {"models": [model.config() for model in self._models], "num_data": self._own_num_data, **shared}

    def terms(
        self,
        batch: Batch,
        *,
        phase: Phase = "variational",
        num_data: int,
        num_draws: int = 1,
        generator: Randomness = None,
    ) -> tuple[Tensor, Tensor]:
        """Expected log-likelihood and KL of each model, [R, S] each, in nats, scaled to the model's whole dataset.

        The batch has rows for all models; a `StackedBatch` has separate rows for each model. Models with seeds use their own
        randomness instead of `generator`.
        """
        options: _Options = {"phase": phase, "num_data": num_data, "num_draws": num_draws}
        found = self._by_products(batch, **options)
        if found is None:
            with torch.enable_grad():  # if gradients are off, posteriors write in place, which `vmap` does not support
                found = self._by_models(batch, options, generator)
            if not torch.is_grad_enabled():
                found = found[0].detach(), found[1].detach()
        data, kl = found
        if self._own_num_data is not None:
            data = data * (data.new_tensor(self._own_num_data) / num_data).unsqueeze(-1)
        return data, kl

    # -- models ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._models)

    def stacked(self, name: str) -> nn.Parameter:
        """The stacked parameter [R, *shape] that has this name in a single model."""
        return self.get_parameter(self._names[name])

    @torch.no_grad()
    def unstack(self) -> list[Any]:
        """The models from which the stack was made, updated with the stack's current parameters and buffers."""
        for index, model in enumerate(self._models):
            own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, key in self._names.items():
                if name in own and isinstance(value := getattr(self, key), Tensor):
                    own[name].copy_(value[index])
            model.train(self.training)
        return self._models

    @torch.no_grad()
    def as_ensemble(self, group: int = 0) -> BayesianNetwork:
        """The point networks that share likelihood number `group`, as one network with an `Ensemble` posterior."""
        likelihood, count = self._likelihoods[group], len(self) // len(self._likelihoods)
        models = self.unstack()[group * count : (group + 1) * count]
        first = models[0]
        joined = bayesianize(first.mean_network(), Ensemble(count), likelihood=likelihood, prior=first.prior)
        assert isinstance(joined.posterior, Ensemble)
        for name, value in joined.posterior.value.items():
            value.copy_(torch.stack([model.posterior.mean()[name] for model in models]))
        return joined.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all models."""
        self._template[0].train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._template[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> Tensor | None:
        """State of the models' own random streams."""
        return None if self._sources is None else torch.stack(_states(self._sources))

    def set_extra_state(self, state: Tensor | None) -> None:
        """Continue from `get_extra_state`."""
        if state is not None and self._sources is not None:
            _set_states(self._sources, state)

    # -- outputs and scores ----------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [R, B, O] of the models, each for its own rows [R, B, ...] and with one draw."""
        fast, weights = self._perceptrons, self._weights()
        if fast is not None and fast.take(x, 1, weights[0]):
            return run_all(x, fast, *weights)[0] if torch.is_grad_enabled() else fast.run(x, weights)
        template, values, found = self._template[0], self._values(), []
        for index, rows in enumerate(x):
            with swapped(template, {name: values[key][index] for name, key in self._names.items()}):
                found.append(template(rows))
        return torch.stack(found)

    def held_out_scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        """`Likelihood.held_out_score` of each model's rows, [R, B], from outputs [R, B, O] and targets [R, B, ...]."""
        return self._scores(outputs, y, held_out=True)

    def _scores(self, outputs: Tensor, y: Tensor, held_out: bool = False) -> Tensor:
        """For each row of each model, [R, B], the density that training maximizes or, with `held_out`, the held-out score."""
        if self._own:
            score = partial(_score_alike, self._likelihoods, held_out)
            return torch.func.vmap(score)(outputs, y, {name: getattr(self, key) for name, key in self._own.items()})
        found, sizes = [], [len(kind) * (len(self) // len(self._likelihoods)) for kind in self._kinds]
        for kind, one, targets in zip(self._kinds, outputs.split(sizes), y.split(sizes), strict=True):
            if len(sizes) > 1 and targets.ndim == one.ndim:
                one = one[..., : kind[0].outputs_per_target * targets.shape[-1]]
            found.append(_score_alike(kind, held_out, one, targets))
        return torch.cat(found) if len(found) > 1 else found[0]

    # -- running ---------------------------------------------------------------------------------------------------

    def _weights(self) -> list[Tensor]:
        own: dict[str, Any] = self._buffers | self._parameters
        return [own[key] for key in self._keys]

    def _by_products(self, batch: Batch, phase: Phase, num_data: int, num_draws: int) -> tuple[Tensor, Tensor] | None:
        """Both terms of perceptrons' objectives; `None` if the fast path cannot run or a value is not finite (see `_by_models`)."""
        fast, weights = self._perceptrons, self._weights()
        if fast is not None and len(batch) <= num_data and isinstance(batch.x, Tensor):
            x = batch.x if isinstance(batch, StackedBatch) else batch.x.expand(len(self), *batch.x.shape)
            if fast.take(x, num_draws, weights[0]):
                outputs, penalty = run_all(x, fast, *weights)
                y = batch.y if isinstance(batch, StackedBatch) else batch.y.expand(len(self), *batch.y.shape)
                scores = self._scores(outputs, y)  # [R, B]
                mean = scores.mean(1) if batch.weights is None else (scores * batch.weights).mean(1)
                data, kl = (num_data * mean).unsqueeze(1), penalty.unsqueeze(1)
                if not self._shared and should_check(x) and not math.isfinite((data + kl).sum().item()):
                    return None
                if num_draws > 1 and phase != "map":
                    data, kl = data.expand(-1, num_draws), kl.expand(-1, num_draws)
                return data, kl
        if len(self._likelihoods) > 1:
            raise ValueError(
                "ModelStack: with several likelihoods, inputs must be rows [R, B, D] with the dtype of the networks, "
                "and autocast must be off; cast the inputs, and call the stack outside autocast"
            )
        return None

    def _by_models(self, batch: Batch, options: _Options, generator: Randomness) -> tuple[Tensor, Tensor]:
        """Both terms of each model's objective by `vmap`; one by one if `vmap` fails or a term is not finite."""
        sources = self._sources or source_of(generator)
        if self.loop_reason is not None:
            return self._one_by_one(batch, options, sources)
        if self._is_new and self._own_buffers():
            return self._by_first_pass(batch, options, sources)
        like = next(self.parameters())
        captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
        before = [] if captured else _states(sources)
        try:
            found = self._by_vmap(batch, options, sources)
        except (RuntimeError, ValueError, NotImplementedError, SlowVmap) as refusal:
            if isinstance(refusal, torch.OutOfMemoryError) or captured:
                raise
            _set_states(sources, before)
            found = self._one_by_one(batch, options, sources)  # a genuine error is raised again here
            self.loop_reason = f"vmap refused ({str(refusal).strip().splitlines()[0]})"
            if not isinstance(refusal, SlowVmap):
                warnings.warn(
                    f"ModelStack: {self.loop_reason}, so the models run one by one, which is slower", stacklevel=4
                )
            return found
        if not should_check(like) or math.isfinite((found[0] + found[1]).sum().item()):
            return found
        _set_states(sources, before)  # the loop repairs a failed factorization, or reports the error
        return self._one_by_one(batch, options, sources)

    def _by_first_pass(self, batch: Batch, options: _Options, sources: _Sources) -> tuple[Tensor, Tensor]:
        """`_one_by_one`, and find out whether the networks change their buffers. `vmap` would lose such changes."""
        before = [(buffer, buffer._version) for buffer in self._own_buffers()]
        found, self._is_new = self._one_by_one(batch, options, sources), False
        if any(buffer._version != version for buffer, version in before):
            self.loop_reason = "the networks change their buffers"
        return found

    def _own_buffers(self) -> list[Tensor]:
        """The stacked buffers of the networks."""
        found = (getattr(self, key) for name, key in self._names.items() if name.startswith("network."))
        return [buffer for buffer in found if not buffer.requires_grad]

    def _by_vmap(self, batch: Batch, options: _Options, sources: _Sources) -> tuple[Tensor, Tensor]:
        axis, values = 0 if isinstance(batch, StackedBatch) else None, self._values()

        def one(index: Tensor, values: dict[str, Tensor], rows: Any) -> tuple[Tensor, Tensor]:
            return self._run(values, Batch(*rows), options, StackedNoise(sources, index))

        rows = (batch.x, batch.y, batch.weights)
        index = torch.arange(len(self), device=next(iter(values.values())).device)
        dims = pytree.tree_map(lambda leaf: axis if isinstance(leaf, Tensor) else None, rows)
        run = torch.func.vmap(one, in_dims=(0, 0, dims), randomness="different")
        with disable_saved_tensors_hooks(CHECKPOINTS):  # a loop keeps the weights of each pass
            found: tuple[Tensor, Tensor] = self._vmaps.run(lambda: run(index, values, rows), "models")
        return found

    def _one_by_one(self, batch: Batch, options: _Options, sources: _Sources) -> tuple[Tensor, Tensor]:
        keys, stacked = zip(*self._values().items(), strict=True)
        found = []
        for index, row in enumerate(zip(*(value.unbind(0) for value in stacked), strict=True)):
            source = sources if isinstance(sources, NoiseSource) else sources[index]
            part = batch.model(index) if isinstance(batch, StackedBatch) else batch
            found.append(self._run(dict(zip(keys, row, strict=True)), part, options, source))
        data, kl = zip(*found, strict=True)
        return torch.stack(data), torch.stack(kl)

    def _run(
        self, values: dict[str, Tensor], batch: Batch, options: _Options, noise: NoiseSource
    ) -> tuple[Tensor, Tensor]:
        """Both terms of one model's objective, [S] each, by a copy of the first model with this model's parameters and buffers."""
        template = self._template[0]
        with swapped(template, {name: values[key] for name, key in self._names.items()}):
            found: tuple[Tensor, Tensor] = template.terms(batch, **options, generator=noise)
            for name, buffer in template.named_buffers():
                given = values[self._names[name]] if name in self._names else buffer
                if buffer is not given:  # the network has assigned it
                    given.detach().copy_(buffer)
        return found

    def _values(self) -> dict[str, Tensor]:
        return {key: getattr(self, key) for key in dict.fromkeys(self._names.values())}


def _generators(sources: _Sources) -> list[torch.Generator]:
    each = [sources] if isinstance(sources, NoiseSource) else sources
    return [source.generator or torch.default_generator for source in each]


def _states(sources: _Sources) -> list[Tensor]:
    return [generator.get_state() for generator in _generators(sources)]


def _set_states(sources: _Sources, states: Iterable[Tensor]) -> None:
    for generator, state in zip(_generators(sources), states, strict=True):
        generator.set_state(state.cpu().clone())


def _score_alike(
    likelihoods: Sequence[Likelihood],
    held_out: bool,
    outputs: Tensor,
    y: Tensor,
    values: dict[str, Tensor] | None = None,
) -> Tensor:
    """Scores [...] of rows with outputs [..., O]. Each of G likelihoods scores an equal part of the first axis; the likelihoods
    differ only in the values of their parameters. If there is only one likelihood, `values` replaces its parameters."""
    first, rows, count = likelihoods[0], outputs.shape[:-1], len(likelihoods)
    flat, y = outputs.flatten(0, -2), y.flatten(0, len(rows) - 1)
    wanted = first.target_shape(flat)
    if y.shape != wanted:
        if (*y.shape, 1) != wanted and y.shape != (*wanted, 1):
            first.log_prob(flat, y, has_draws=False)  # raises an error with a remedy
        y = y.reshape(wanted)
    if count > 1:
        y, named = y.unflatten(0, (count, -1)), [dict(own.named_parameters()) for own in likelihoods]
        values = {name: torch.stack([own[name] for own in named]).view(-1, 1, 1) for name in named[0]}
    with swapped(first, values) if values else nullcontext():
        score = first.held_out_score if held_out else first.training_density
        found = score(flat.unflatten(0, (count, -1)), y)
    return (found.flatten(2).sum(-1) if found.ndim > 2 else found).view(rows)


def _group_alike(likelihoods: Sequence[Likelihood]) -> list[list[Likelihood]]:
    """Groups of consecutive likelihoods that differ only in the values of scalars. One call can score all rows of a group."""
    found: list[list[Likelihood]] = []
    for own in likelihoods:
        plain = isinstance(own, NumberLikelihood) and not any(value.ndim for value in own.parameters())
        if not (found and plain and found[-1][0].config() == own.config()):
            found.append([])
        found[-1].append(own)
    return found


# -- what can be stacked -------------------------------------------------------------------------------------------


def _description(model: nn.Module) -> Any:
    """What must be the same for all models of a stack: architecture and kinds of posterior and likelihood, not values."""
    if not isinstance(model, BayesianNetwork):
        return type(model), repr(model)
    config = model.config()
    # The values of these numbers may differ, but either all models give a value or none does.
    numbers = ("noise", "scale", "degrees", "dispersion")
    likelihood = {
        key: value is None if key in numbers else value for key, value in (config["likelihood"] or {}).items()
    }
    prior = None if model.prior.draw(1).fixed else config["prior"]
    return repr(model.network), config["posterior"], likelihood, config["output"], prior, model.frozen_statistics


def _check_alike(models: Sequence[Any], parameters: Sequence[dict[str, nn.Parameter]]) -> None:
    if not models:
        raise ValueError("ModelStack: there are no models; give at least one")
    wanted, alike = _description(models[0]), _kinds(parameters[0])
    for place, model in enumerate(models[1:], start=1):
        if _description(model) != wanted:
            raise ValueError(
                f"ModelStack: model {place} differs from model 0 in architecture, posterior or likelihood; stack models that "
                "differ in values only (weights, noise, the scale of a fixed prior)"
            )
        found = _kinds(parameters[place])
        for name in {**alike, **found} if found != alike else ():
            if alike.get(name) != found.get(name):
                raise ValueError(
                    f"ModelStack: {name} is {found.get(name, 'missing')} in model {place} and {alike.get(name, 'missing')} "
                    "in model 0; give all models the same parameters"
                )


def _kinds(parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype, value.requires_grad) for name, value in parameters.items()}


def _template(models: Sequence[Any]) -> Any:
    """A copy of the first model. If the models' priors differ, the copy's prior scales are buffers."""
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
    """Reason to run models of this kind one by one; `None` if they run together."""
    frozen = template.frozen_statistics if isinstance(template, BayesianNetwork) else ()
    for path, module in template.named_modules():
        if isinstance(module, NO_BATCHING_RULE):
            return f"{path} ({type(module).__name__}) has no batching rule for vmap"
        if isinstance(module, _BatchNorm) and path.removeprefix("network.") not in frozen:
            return f"{path} ({type(module).__name__}) updates statistics of each model in training"
        if isinstance(module, _ConvNd):
            return f"{path} ({type(module).__name__}) is faster in a loop over the models"
    return None
