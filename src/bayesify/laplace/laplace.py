"""The linearized Laplace approximation of a trained network, over all weights or a subnetwork."""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, Inputs, Memory, Positive, Seed, checked
from bayesify.baselines.fixed_draws import FixedDraws
from bayesify.baselines.swag import SWAG
from bayesify.configuration import make_likelihood
from bayesify.draws import Draws
from bayesify.jacobians import Jacobians, check_deterministic
from bayesify.jacobians.effective import fixed_point_noise, held_out_ratio
from bayesify.laplace import leave_one_out, linearized
from bayesify.laplace import prior_precision as precisions
from bayesify.laplace.covariances import (
    DiagonalCovariance,
    FullCovariance,
    KroneckerCovariance,
    MarginalCovariance,
    WeightCovariance,
    check_budget,
    from_curvature,
    full_bytes,
)
from bayesify.laplace.curvature import (
    CURVATURES,
    MAX_DIAGONALIZED_WEIGHTS,
    Curvature,
    DataTerm,
    Examples,
    FeaturesEnd,
    OutputCurvature,
    Pieces,
    Structure,
    first_batch,
    last_layer_curvature,
    layer_of,
    show_progress,
    sum_over_processes,
)
from bayesify.laplace.linearized import Covariance, LinearizedNetwork, variances_of
from bayesify.laplace.sampled import (
    MAX_DRAW_ERROR,
    MAX_EVIDENCE_EXAMPLES,
    NUM_SCALE_SAMPLES,
    DrawsFile,
    DrawSolver,
    Equations,
    Sampled,
    SampledCovariance,
    choose_examples,
    find_factor,
    whiten,
)
from bayesify.laplace.subnetwork import Candidates, SgdOptions, Subset, as_selector, from_indices
from bayesify.likelihoods import Gaussian, Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.gaussian import Link, OutputGaussian, Spread
from bayesify.predictive.regression import RegressionPredictive, match_targets
from bayesify.predictor import DEFAULT_NUM_DRAWS, Batch, Drawable
from bayesify.running.generators import draw_seed
from bayesify.running.inputs_and_outputs import (
    as_inputs,
    batch_size,
    checked_inputs,
    explain_shape_errors,
    select_output,
    split_rows,
)
from bayesify.running.last_layer import last_layer, output_gain
from bayesify.running.memory import in_words, parse_bytes
from bayesify.running.runner import Runner
from bayesify.storage.serializers import register_predictor
from bayesify.training.batches import BatchReader, cut, parse_batch, total_count
from bayesify.training.rules import labels_as_numbers, learned_little, probabilities_as_logits
from bayesify.weights.catalog import Weight, catalog, make_gradients_plain, padding_entries
from bayesify.weights.module_state import below, copy_network, fingerprint, prefixed

Method = Literal["closed_form", "linearized_mc", "network_mc"]
"""How `Laplace.predict` makes predictions."""


PASSES_PER_VECTOR = {"full": 2, "kronecker": 4, "diagonal": 14}
"""Number of passes of a convolutional network that the curvature takes per vector of an example. A diagonal squares per-example
gradients. This took the time of 14 passes for a ResNet-50 on an H200, and of 7 passes for a ResNet-18 on two CPU cores."""

MAX_QUIET_OPERATIONS = 2e8
"""Largest product of the left-out rows and the cubed number of outputs for which `fit` chooses a precision without a warning."""
MAX_QUIET_WEIGHTS = 3000
"""Largest number of weights for which `fit` chooses a full covariance by default without a warning. There is also no
warning if the number of examples times outputs is at most half the number of weights. Diagonalizing the curvature of
4,810 weights takes 57 s on one ARM core, and a fifth of that if its rank turns out to be low."""

STORED_CHOICES = {
    "default_precision": "_default",
    "scales_by_curvature": "_scales_by_curvature",
    "default_subset": "_chooses",
    "finds_noise": "_finds_noise",
    "found_link": "_found_link",
}
"""Names on disk of the attributes that say what `fit` chooses because it was not given. A loaded approximation then
chooses again in a second `fit`, as the original does."""

MIN_RELATIVE_NOISE = 1e-12
"""Smallest noise variance that `fit` can find, relative to the targets' mean square. It is needed if a network fits
every target exactly and has no residuals."""


def _matrices(covariance: Covariance) -> Tensor:
    return covariance.dense() if isinstance(covariance, Spread) else covariance


def _parts_of(
    batches: Iterable[Batch], read: Callable[[Any], Iterable[tuple[Tensor, Any]]]
) -> Iterator[tuple[Batch, Tensor, Any]]:
    """For each piece that `read` returns, the rows of the batch, their means, and their covariances."""
    for batch in batches:
        start = 0
        for mean, covariances in read(batch.x):
            yield batch.rows(slice(start, start + len(mean))), mean, covariances
            start += len(mean)


def _check_weights(net: nn.Module, weights: dict[str, Weight]) -> dict[str, Weight]:
    if not weights:
        raise ValueError("Laplace: every parameter of the network is frozen; unfreeze at least one parameter")
    for name in weights:
        if net.get_parameter(name).dtype == torch.float16:
            raise ValueError(
                f"Laplace: {name} is float16, which is too coarse for derivatives; use net.float() or net.bfloat16()"
            )
    return weights


def _check_choices(covariance: Structure, curvature: Curvature, marginal: bool, sampled: bool) -> None:
    if marginal and covariance != "full":
        raise ValueError(f"Laplace: marginal=True does not work with covariance={covariance!r}; use covariance='full'")
    if sampled and curvature == "empirical":
        raise ValueError("Laplace: num_samples= does not apply to curvature='empirical'; leave num_samples= out")
    if covariance == "sampled" and curvature != "ggn":
        raise ValueError(
            f"Laplace: covariance='sampled' does not work with curvature={curvature!r}; use curvature='ggn'"
        )


@register_predictor
class Laplace(Drawable):
    r"""A Gaussian posterior around the weights of a trained network, $q(w_S) = \mathcal{N}(w^*_S, (H_{SS} + \lambda I)^{-1})$.

    $H = \sum_n J_n^\top H_n J_n$ is the generalized Gauss-Newton matrix of the data (Daxberger et al. 2021, equations 5
    and 6). The weights that are not chosen stay at $w^*$. The given network is neither trained again nor changed,
    because `Laplace` keeps a copy.

    Args:
        net: The trained network, in evaluation mode if it has dropout or batch normalization.
        likelihood: The likelihood p(y | outputs), or its name.
        subset: `"all"`, `"last_layer"`, a list of names or globs, masks by name, or a selector from
            `bayesify.subnetwork`. By default, `fit` chooses all weights if a full covariance over them fits into
            `memory`. Otherwise it chooses the last layer, with a full covariance if this fits and with Kronecker
            factors if not. `repr` reports the choice. If `covariance` is given without `subset`, the subset is `"all"`.
        covariance: `"full"`, `"diagonal"`, `"kronecker"` (for linear maps and convolutions; other weights get a
            diagonal), or `"sampled"` (draws; pass a `Sampled` to set options). If `subset` is given without
            `covariance`, the covariance is `"full"`.
        prior_precision: Prior precision $\lambda$: a number, a dict from names or patterns to numbers, or `"size"` for
            the inverse mean square of each layer's weights. The default is `default_precision`, which `fit` adapts to
            the data; the documentation page on Laplace gives the rules. If `fit` estimates the noise variance, the
            precision of the last layer is divided by the targets' variance, so that predictions scale with the unit of
            the targets. For `covariance="sampled"`, the default is a multiple of the diagonal of the curvature; `fit` chooses the
            multiple that maximizes the evidence.
        link: Approximation of the expected class probabilities: `"mc"`, `"probit"` or `"bridge"`; see `GaussianClassPredictive`.
            With a full covariance over one layer of a network with several layers, the default is `"probit"`; otherwise
            it is `"mc"`. With a full covariance over all weights, `fit` changes the default to `"probit"` if `"probit"`
            predicts left-out training rows better.
        temperature: Temperature T, a factor on the covariance in draws and predictions: $q \propto p(w, \mathcal{D})^{1 / T}$.
        curvature: `"ggn"`, or `"empirical"` for the empirical Fisher matrix.
        num_samples: Number K of random vectors per example that replace the matrix $H_n$ of the example's outputs. The
            resulting curvature is unbiased. The relative error of a diagonal curvature is $\sqrt{2 / (N K)}$; the Kronecker
            factors of a layer have a larger error. By default the curvature is exact for up to `MAX_EXACT_OUTPUTS` outputs and
            for the network's last layer. Otherwise the curvature uses `NUM_CURVATURE_SAMPLES` vectors. In this case, predictions
            in closed form use `NUM_DIRECTIONS` draws, so their standard deviations have a relative error of one eighth. `"exact"`
            uses a backward pass for each output.
        seed: Seed of the random vectors and draws.
        marginal: Whether to use the block $[(H + \lambda I)^{-1}]_{SS}$ of the covariance over all weights (equation
            11). Otherwise the covariance is the inverse of the block $H_{SS} + \lambda I$. If `marginal` is true, the network
            must be so small that the matrix over all its weights fits into memory.
        memory: Memory budget for curvature, factors and Jacobians: a string such as `"1GiB"`, or a number of bytes.
        output: Name or index of the output that the likelihood describes, if the network has several outputs; see `bayesianize`.

    Attributes:
        network: Copy of the network.
        likelihood: Copy of the likelihood.
        values: Trained weights by name.
        dtype: Type of curvature and covariances: float64 for a float64 network, otherwise float32.
        subset: Chosen weights, after `fit`.
        posterior: Gaussian over the chosen weights, after `fit`.
        data: Log-likelihood and number of examples, after `fit`.
        outputs_per_example: Number O of outputs, after `fit`.
        remarks: Notes on the choice of the weights and on sampling errors, after `fit`.

    Raises:
        ValueError: If an argument has an invalid value, if a chosen weight is frozen or missing, or if dropout or batch
            normalization is in training mode.
    """

    likelihood: Likelihood
    mixture_method = "linearized_mc"

    @checked
    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood | str | Mapping[str, Any],
        subset: Any = "auto",
        covariance: Structure | Sampled | None = None,
        prior_precision: float | Mapping[str, float] | Literal["size"] | None = None,
        *,
        link: Link | None = None,
        temperature: Positive = 1.0,
        curvature: Curvature = "ggn",
        num_samples: Count | Literal["exact"] | None = None,
        seed: Seed = 0,
        marginal: bool = False,
        memory: Memory | str = "1GiB",
        output: str | int | None = None,
    ) -> None:
        if isinstance(net, BayesianNetwork):
            raise TypeError("Laplace: net= is a BayesianNetwork; give the plain network, or its mean_network()")
        auto = isinstance(subset, str) and subset == "auto"
        self._chooses = auto and covariance is None and not marginal
        self.sampling = covariance if isinstance(covariance, Sampled) else Sampled()
        covariance = "sampled" if isinstance(covariance, Sampled) else covariance or "full"
        subset = "all" if auto else subset
        _check_choices(covariance, curvature, marginal, isinstance(num_samples, int))
        made = make_likelihood(likelihood)
        assert made is not None
        if curvature == "ggn" and made.no_curvature is not None:
            raise TypeError(f"Laplace: {made.no_curvature}")
        check_deterministic(net)
        known = catalog(net)
        self.weights = _check_weights(net, known.trainable)
        self._frozen = tuple(known.refused)
        self.network = copy_network(net, "Laplace").requires_grad_(False).apply(make_gradients_plain)
        reference = self.network.get_parameter(next(iter(self.weights)))
        self.likelihood = copy.deepcopy(made).to(reference.device)
        self._finds_noise = isinstance(made, Gaussian) and not made.is_settled
        self.dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
        self.likelihood.to(self.dtype)
        self.selector = as_selector(subset)
        self.covariance, self.curvature, self.marginal = covariance, curvature, marginal
        self.num_samples, self.seed = num_samples, seed
        self.memory, self.output = parse_bytes(memory), output
        self._link, self.temperature = link, temperature
        self._found_link: Link | None = None
        self._runner = Runner(self.network, known.weights, evaluate=True)
        self.values = {name: self.network.get_parameter(name).detach() for name in self.weights}
        self._default = prior_precision is None  # set to false by `set_prior_factor`
        self._scales_by_curvature = covariance == "sampled" and self._default
        default = precisions.default_precision(self.weights, self.values, covariance, self.weights)
        given = default if self._default else prior_precision
        self.base_precision = precisions.check_precision(given, self.weights, self.values)
        self.subset: Subset | None = None
        self.posterior: WeightCovariance | None = None
        self.remarks: tuple[str, ...] = ()
        self._derivatives: dict[tuple[str, ...], Jacobians] = {}
        self.data = DataTerm()
        self.outputs_per_example = 1
        self._rank_per_example = 0  # bound on the rank of an example's curvature, 0 if unknown

    # -- fitting ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def fit(
        self,
        loader: Iterable[Any],
        *,
        read_batch: BatchReader | None = None,
        progress: bool = False,
        checkpoint: str | Path | None = None,
    ) -> Self:
        """Choose the weights, sum the curvature over the data, and find the noise and the prior precision if they were not given.

        The curvature takes one pass over the data. Choosing the weights, the noise and the precision may each take one more pass.

        Args:
            loader: Iterable of batches as for `bayesify.fit`. Under `torch.distributed` each process gives its own part of the
                data.
            read_batch: Function that converts an item of the loader to inputs and targets.
            progress: Whether to show a progress bar.
            checkpoint: File for the draws of `covariance="sampled"`. After an interruption, the same call continues from this
                file.

        Returns:
            This object.

        Raises:
            ValueError: If the subset is empty or larger than the network, if the covariance exceeds the memory budget, or if the
                checkpoint belongs to another run.
        """
        self.base_precision, self.posterior, self.findings = self.prior_precision, None, ()
        self._check_sampling(checkpoint)
        examples = Examples(loader, read_batch, self.device, progress)
        first = parse_batch(first_batch(loader), read_batch).to(self.device)
        args, kwargs = checked_inputs(first.x)
        seen: list[Tensor] = []
        find_last = functools.cache(
            lambda: last_layer(self._runner, self.weights, args, kwargs, self.output, seen=seen.append)
        )
        candidates = self._candidates(examples, find_last)
        chosen_for = self._choose_extent(candidates) if self._chooses else ()
        size = candidates.free if self.marginal else self.selector.count(candidates)
        self._check_memory(size)
        with explain_shape_errors(args, kwargs):
            few = next(split_rows(args, kwargs, 2))
            outputs = seen[0] if seen else select_output(self._runner.call({}, *few), self.output)
        self._check_outputs(outputs, first)
        variance = self._start_noise(examples, outputs.shape[1] if outputs.ndim == 2 else 1)
        self._count_outputs(outputs)
        self.subset = Subset.of_flat(self.weights, self.selector.select(candidates).cpu())
        self.remarks = (*chosen_for, *candidates.remarks)
        if self._default:
            self.base_precision = self._default_precision(self.subset, variance, find_last, (args, kwargs))
        if self.covariance in ("kronecker", "sampled"):
            self._check_whole(self.subset)
        if self.covariance == "sampled":
            self._solve_draws(examples, few, checkpoint)
        else:
            self._fit_covariance(examples, first.x)
        if variance is not None and isinstance(self.posterior, FullCovariance) and not self.marginal:
            self._find_noise(examples, first.x)
        self._report_untrained()
        return self

    def _count_outputs(self, outputs: Tensor) -> None:
        """Store the number of outputs of an example, and how many are independent: K - 1 of the logits of K classes."""
        axis, count = self.likelihood.logit_axis(outputs.ndim), outputs[0].numel()
        self.outputs_per_example = count
        self._rank_per_example = count if axis is None else count - count // outputs.shape[axis]

    def _report_untrained(self) -> None:
        remedy = "train the network first, which Laplace does not do; check inputs and targets"
        self.findings = tuple(replace(finding, remedy=remedy) for finding in learned_little(self.data.score()))
        for finding in self.findings:
            warnings.warn(f"Laplace.fit: {finding}", stacklevel=5)

    def _check_outputs(self, outputs: Tensor, first: Batch) -> None:
        """Let the likelihood check the targets before any long computation. Warn if outputs are not logits or if numeric targets
        look like class labels. The check repeats the first row of outputs for the whole batch, so that an error message shows the
        shapes of the batch."""
        every = outputs[:1].expand(batch_size(*checked_inputs(first.x)), *outputs.shape[1:])
        self.likelihood.log_prob(every, first.y, has_draws=False)
        labels = labels_as_numbers(self.likelihood, [first.y])
        for finding in (*probabilities_as_logits(self.likelihood, outputs), *labels):
            warnings.warn(f"Laplace.fit: {finding}", stacklevel=5)

    def _find_noise(self, examples: Examples, x: Any) -> None:
        """Find the noise from the curvature. If all weights are chosen and the precision is the default, also find a factor on
        this precision."""
        subset, posterior = self.fitted()
        if not self.data.squared_error > 0:  # if there are no residuals, the noise stays at its lower bound
            return
        if self._is_whole(subset) and not self._is_sampled(x) and posterior.diagonalize():
            batches = self._whole_rows(examples, precisions.MAX_SETTLING_ROWS)
            if batches:
                self._leave_rows_out(examples, batches)
                return
        self._fit_noise()
        self._widen_noise(examples)

    def _is_whole(self, subset: Subset) -> bool:
        return subset.size == Subset.trained(self.network, self.weights).size

    def _whole_rows(self, examples: Examples, count: int) -> list[Batch]:
        """About `count` rows from all parts of the data. The result is empty if some row has an example weight below 1,
        because leaving out such a row would remove less than one example."""
        batches = [batch.weighed() for batch in examples.all_over(count)]
        parts = torch.tensor([float((batch.counts < 1).any()) for batch in batches if len(batch)], dtype=torch.float64)
        if float(sum_over_processes(parts.sum())) > 0:
            return []
        step = max(1, sum(map(len, batches)) // count)
        return [batch if step == 1 else batch.rows(slice(None, None, step)) for batch in batches if len(batch)]

    def _leave_rows_out(self, examples: Examples, batches: Iterable[Batch]) -> None:
        """Use left-out training rows to choose the noise and, if the precision is the default, a factor on the precision; see
        `LeftOutRows`."""
        noise = float(self._shared_noise("Laplace").noise.detach())
        model = self._linear_model(examples, noise, self.data.squared_error)
        training, ratio = model.training_penalty()
        rows = leave_one_out.LeftOutRows(model.penalties())
        factors = [penalty / noise for penalty in (training, *rows.penalties)]
        read = functools.partial(self._linearized().gaussians, budget=self.memory, factors=factors)
        for part, outputs, covariances in _parts_of(batches, read):
            residuals = math.sqrt(ratio) * (match_targets(part.y, outputs) - outputs).reshape(len(outputs), -1)
            counts = part.counts.to(self.device)
            leverages = (_matrices(one).double() / noise for one in covariances)
            if self.outputs_per_example > leave_one_out.MAX_JOINT_OUTPUTS:
                residuals, counts = residuals.reshape(-1, 1), counts.repeat_interleave(self.outputs_per_example)
                leverages = (variances_of(one).double().reshape(-1, 1, 1) / noise for one in covariances)
            rows.add(residuals, next(leverages), leverages, counts)
        rows.sums, rows.count = sum_over_processes(rows.sums), sum_over_processes(rows.count)
        variance, factor = rows.choose(moves=self._default)
        self.set_noise(max(variance, MIN_RELATIVE_NOISE * noise))
        self._rescale(factor)

    def _score(self, examples: Examples) -> Tensor:
        """Gradient of the log-likelihood with respect to the chosen weights, in a pass over the data: [S]."""
        subset, _ = self.fitted()
        given = {name: value.detach().requires_grad_() for name, value in self.values.items()}
        total = torch.zeros(subset.size, dtype=torch.float64, device=self.device)
        for batch in examples:
            with torch.enable_grad():
                outputs = select_output(self._runner.call(given, *checked_inputs(batch.x)), self.output)
                log_prob = self.likelihood.log_prob(outputs, batch.y, has_draws=False)
                score = batch.counts.to(log_prob) @ log_prob
                found = torch.autograd.grad(score, list(given.values()), allow_unused=True, materialize_grads=True)
            total += subset.take(dict(zip(given, found, strict=True)))
        return sum_over_processes(total).to(self.dtype)

    def _linear_model(self, examples: Examples, noise: float, loss: float) -> leave_one_out.LinearModel:
        """The linearized network as a least-squares regression. Its squared error, divided by the noise variance, is
        twice the negative log-likelihood of the linearized network."""
        subset, posterior = self.fitted()
        assert isinstance(posterior, FullCovariance)
        mean = posterior.prior * subset.take(self.values).to(self.dtype)
        return leave_one_out.LinearModel(
            noise * posterior.spectrum().double(),
            posterior.in_eigenbasis(mean).double(),
            noise * posterior.in_eigenbasis(self._score(examples)).double(),
            loss,
        )

    def _widen_noise(self, examples: Examples) -> None:
        """Raise the noise of a one-layer posterior, because the other layers have memorized part of the rows (see
        `held_out_ratio`). With this noise, the predictive variance of training rows equals the squared residual that the whole
        network is expected to have on new rows."""
        if not self._is_one_layer:
            return
        read = examples.all_over(precisions.MAX_SETTLING_ROWS)
        batches = [batch for batch in (each.weighed() for each in read) if len(batch)]
        if not batches:
            return
        noise, residual = float(self._shared_noise("Laplace").noise), self.data.squared_error / self._num_outputs
        inputs, counts = [checked_inputs(batch.x) for batch in batches], [batch.counts for batch in batches]
        total = self.data.total_weight
        ratio = held_out_ratio(self._runner, self.weights, inputs, residual, total, self.output, counts)
        spread = 0.0
        for batch in batches:
            found = self.predict(batch.x)
            assert isinstance(found, RegressionPredictive)
            spread += float(batch.counts.sum()) / total_count(batches) * batch.mean(found.epistemic)
        self.set_noise(max(noise, ratio * residual / (1 + spread / noise)))

    def _fit_covariance(self, examples: Examples, x: Any) -> None:
        """Sum the curvature of the chosen weights over the data, and find the precision if none was given."""
        assert self.subset is not None
        found, self.data = self._curvature(self.covariance, self._curved(self.subset), examples)
        posterior = self.posterior = self._covariance_from(found, self.subset)
        quiet = self.subset.size <= MAX_QUIET_WEIGHTS or self.device.type != "cpu" or not self._chooses
        if isinstance(posterior, FullCovariance) and not quiet and not posterior.has_low_rank:
            warnings.warn(
                f"Laplace.fit: a full covariance over all {self.subset.size:,} weights can take a minute or more on one "
                "CPU core; to save time, give subset='last_layer', which takes seconds",
                stacklevel=5,
            )
        rows, outputs = min(self.data.num_data, leave_one_out.NUM_LEFT_OUT_ROWS), self.outputs_per_example
        chooses = self._default and self.likelihood.task == "classification" and self.device.type == "cpu"
        if isinstance(posterior, FullCovariance) and chooses and rows * outputs**3 > MAX_QUIET_OPERATIONS:
            warnings.warn(
                f"Laplace.fit: choosing the prior precision of a full covariance with {outputs:,} outputs takes half "
                "a minute or more on one CPU core; to avoid this, give covariance='kronecker' or prior_precision= "
                "with a number",
                stacklevel=5,
            )
        if self.covariance == "kronecker":
            self.posterior.diagonalize()  # so that the first prediction is as fast as later predictions
        if self._is_sampled(x):
            self.remarks += (self._sampling_remark(),)
        elif self._default:
            self._settle_precision(examples)
            self._leave_labels_out(examples)

    def _check_sampling(self, checkpoint: str | Path | None) -> None:
        if checkpoint is not None and self.covariance != "sampled":
            raise ValueError("Laplace.fit: checkpoint= works only with covariance='sampled'; leave checkpoint= out")
        if self.covariance == "sampled" and float(sum_over_processes(torch.ones(()))) > 1:
            raise ValueError("Laplace.fit: covariance='sampled' runs in one process; give all data to one process")
        if self._scales_by_curvature:
            self.base_precision = 1.0

    def _check_memory(self, size: int) -> None:
        if self.covariance != "sampled":
            check_budget(self.covariance, size, self.weights, self.dtype, self.memory)
            return
        taken = self.sampling.count_bytes(size, self.dtype)
        if taken > self.memory:
            raise ValueError(
                f"Laplace: {self.sampling.num_draws} draws of {size:,} weights take {in_words(taken)}, more than "
                f"memory={in_words(self.memory)}; raise memory=, or use Sampled(num_draws=, at_once=) with smaller numbers"
            )
        if not self.sampling.stays_on_host(size):
            check_budget("kronecker", size, self.weights, self.dtype, self.memory - taken)

    def _solve_draws(self, examples: Examples, few: tuple[Any, Any], checkpoint: str | Path | None) -> None:
        """Compute draws from the linearized posterior over the chosen weights; see `Equations`. `few` are inputs of some rows."""
        subset = self.subset
        assert subset is not None
        self._check_pushes(subset, few)
        prior = None if self._scales_by_curvature else self._prior(subset)
        sampling, home = self.sampling, self._draws_home(subset)
        file = None if checkpoint is None else DrawsFile(Path(checkpoint), self._draws_settings(subset))
        facts, kept = (file.read() if file is not None else None) or ({}, {})
        if facts:
            found, self.data = below("curvature", kept), DataTerm(**facts["data"])
            found = {name: value.to(home) for name, value in found.items()}
        else:
            found, self.data = self._curvature("kronecker", subset, examples, store=home)
        passes = sampling.count_passes(subset.size, self.data.num_data, searches=prior is None and not facts)
        announced = self._announce("fit", passes)
        scale, preconditioner = whiten(subset, found, None if prior is None else prior.to(home), self.device)
        found = {} if file is None else {name: value.cpu() for name, value in found.items()}
        steps = sampling.steps + 1 if sampling.takes_minibatches else sampling.iterations + 2
        total = sampling.num_groups(subset.size) * steps
        with show_progress("draws", total, examples.progress or announced) as advance:
            equations = self._draw_equations(subset, examples, (scale, preconditioner), advance)
            if facts:
                equations.factor, equations.noise_ratio = facts["factor"], facts["noise_ratio"]
                self.likelihood.load_state_dict(below("likelihood", kept))
            elif prior is None:
                self._find_draws_factor(equations, examples)
            common = {key: getattr(equations, key) for key in ("factor", "noise_ratio")} | {"data": asdict(self.data)}
            tensors = prefixed(curvature=found, likelihood=self.likelihood.state_dict())
            keep = None if file is None else lambda more, own: file.write(common | more, tensors | own)
            solver = DrawSolver(equations, sampling, keep)
            if "done" in facts:
                solver.continue_from(facts, kept)
            self.posterior = solver.run()
        if not facts and equations.pieces.examples is examples:
            self.data = equations.pieces.data
        if prior is None and sampling.settle:
            self._narrow_draws(examples)
        self.remarks += (self._draws_remark(solver.error, equations.rate),)
        if solver.error > MAX_DRAW_ERROR:
            more = "steps" if sampling.takes_minibatches else "iterations"
            warnings.warn(
                f"Laplace.fit: the draws did not converge: their relative error is {solver.error:.2g} (about 1 for "
                f"draws from the prior); give more {more}, a larger prior_precision=, or subset='last_layer'",
                stacklevel=5,
            )

    def _draw_equations(
        self,
        subset: Subset,
        examples: Examples,
        prior: tuple[Tensor, KroneckerCovariance],
        advance: Callable[[int], None] | None = None,
        most: int | None = None,
    ) -> Equations:
        """The equations whose solutions are the draws; see `Equations`. Conjugate gradients use up to `most` examples."""
        memory = self.memory - self.sampling.count_bytes(subset.size, self.dtype)
        loss = OutputCurvature(self.likelihood)
        pieces = Pieces(examples, self._jacobians(subset.names), loss, memory, 0)
        minibatch = self.sampling.batch if self.sampling.takes_minibatches and most is None else None
        most = most or self.sampling.examples
        if minibatch is None and self.data.num_data > most:
            few = replace(examples, loader=choose_examples(pieces, most, self.seed), reader=None)
            pieces = replace(pieces, examples=few)
        at_once = self.sampling.group(subset.size)
        return Equations(pieces, subset, *prior, at_once, self.seed, advance=advance, minibatch=minibatch)

    def _draws_home(self, subset: Subset) -> torch.device:
        """Device that holds the draws and the factors of their solver."""
        return torch.device("cpu") if self.sampling.stays_on_host(subset.size) else self.device

    def _find_draws_factor(self, equations: Equations, examples: Examples) -> None:
        """Find the prior precision, and the noise if none was given, by the evidence of at most `MAX_EVIDENCE_EXAMPLES`
        examples. For a classification, the precision stays large enough to predict training rows well."""
        subset, few = equations.subset, equations
        if equations.minibatch or self.data.num_data > MAX_EVIDENCE_EXAMPLES:
            prior = equations.prior, equations.preconditioner
            few = self._draw_equations(subset, examples, prior, most=MAX_EVIDENCE_EXAMPLES)
        excess = None
        if self.sampling.settle and self.likelihood.task == "classification":
            count = precisions.NUM_WIDE_ROWS
            rows = [batch.to(torch.device("cpu")) for batch in cut(examples.all_over(count), count)]

            def excess(draws: Tensor) -> float:
                losses = self._losses_of_draws(rows, SampledCovariance(subset, draws, equations.prior, 1.0), [1.0])
                return losses[0] / precisions.MAX_TRAINING_LOSS_RISE

        find_factor(
            few,
            subset.take(self.values).to(equations.prior),
            self._num_outputs,
            self.sampling.search_iterations,
            self.sampling.tolerance,
            finds_noise=self._finds_noise,
            excess=excess,
        )
        equations.factor, equations.noise_ratio = few.factor, few.noise_ratio

    def _losses_of_draws(
        self, batches: Sequence[Batch], posterior: SampledCovariance, factors: Sequence[float]
    ) -> list[float]:
        """For each factor on the covariance of the draws: the loss on training rows with the posterior, minus the loss of the
        network alone, in nats."""
        network = LinearizedNetwork(self._jacobians(posterior.subset.names), posterior, self.likelihood, self.dtype)
        scales = [*factors, 1 / precisions.POINT_FACTOR]
        totals = torch.zeros(len(scales), dtype=torch.float64)
        read = functools.partial(network.sampled, budget=self.memory, seed=self.seed, posteriors=[posterior])
        for part, mean, (spread,) in _parts_of((batch.to(self.device) for batch in batches), read):
            for place, factor in enumerate(scales):
                made = self._closed_form(mean, spread.scaled(factor / self.temperature), 0, same_noise=True)
                totals[place] += part.counts @ made.log_prob(part.y).cpu().double()
        losses: list[float] = ((totals[-1] - totals[:-1]) / total_count(batches)).tolist()
        return losses

    def _narrow_draws(self, examples: Examples) -> None:
        """In a classification, scale the draws down until they predict training rows well enough; see `_settle_precision`."""
        if self.likelihood.task != "classification":
            return
        subset, posterior = self.fitted()
        assert isinstance(posterior, SampledCovariance)
        factors = precisions.SETTLING_FACTORS[::-1]
        batches = examples.all_over(precisions.MAX_SETTLING_ROWS)
        losses = self._losses_of_draws(batches, posterior, factors)
        limit = precisions.MAX_TRAINING_LOSS_RISE
        narrowed = next((factor for factor, loss in zip(factors, losses, strict=True) if loss <= limit), factors[-1])
        self.posterior = SampledCovariance(
            subset, posterior.draws.mul_(math.sqrt(narrowed)), posterior.prior, posterior.factor, narrowed
        )

    def _draws_remark(self, error: float, rate: float) -> str:
        _, posterior = self.fitted()
        assert isinstance(posterior, SampledCovariance)
        count = len(posterior.draws)
        facts = [f"{count} draws", f"relative error of variances {math.sqrt(2 / count):.2g}"]
        if self._scales_by_curvature:
            facts.append(f"prior precision {posterior.factor:.3g} times the curvature")
        if posterior.narrowed < 1:
            facts.append(f"covariance scaled by {posterior.narrowed:.2g} to predict training rows well")
        if self.sampling.takes_minibatches:
            facts.append(f"{self.sampling.steps} steps of {self.sampling.batch} examples at rate {rate:.2g}")
        elif self.data.num_data > self.sampling.examples:
            facts.append(f"curvature of {self.sampling.examples:,} examples")
        return ", ".join([*facts, f"relative error {error:.2g}"])

    def _draws_settings(self, subset: Subset) -> dict[str, Any]:
        return {
            "draws": asdict(self.sampling),
            "seed": self.seed,
            "weights": subset.size,
            "num_samples": self.num_samples,
            "network": self.fingerprint(),
            "prior_precision": self.base_precision,
        }

    def _choose_extent(self, candidates: Candidates) -> tuple[str, ...]:
        """Choose all weights or, if the budget requires it, the last layer. Return a remark with the reason; see the
        argument `subset`."""
        self.selector, self.covariance = as_selector("all"), "full"
        needed = full_bytes(candidates.free, self.dtype)
        if needed <= self.memory:
            return ()
        self.selector = as_selector("last_layer")
        if full_bytes(self.selector.count(candidates), self.dtype) > self.memory:
            self.covariance = "kronecker"
        whole = f"a full covariance over all {candidates.free:,} weights would take {in_words(needed)}"
        return (f"last layer, because {whole}",)

    def _start_noise(self, examples: Examples, columns: int) -> float | None:
        """Start the noise variance at the network's mean squared residual. Returns the variance of the targets around their
        column means or, for constant targets, the mean square of the targets. Returns `None` if the noise was given."""
        if not self._finds_noise or not isinstance(self.likelihood, Gaussian):
            return None
        sums = torch.zeros(3 + columns, dtype=torch.float64)
        for batch in examples:
            args, kwargs = checked_inputs(batch.x)
            outputs = select_output(self._runner.call({}, args, kwargs), self.output)
            y = match_targets(batch.y, outputs).double()
            parts = [(y - outputs).square(), y.square(), torch.ones_like(y)]
            rows = [part.reshape(len(batch), -1).sum(1, keepdim=True) for part in parts]
            sums += batch.counts @ torch.cat([*rows, y.reshape(len(batch), columns, -1).sum(2)], 1).cpu()
        squares, size, count, *totals = sum_over_processes(sums).tolist()
        if not count > 0:
            return 1.0
        self.likelihood.set_noise(max(squares, MIN_RELATIVE_NOISE * size, 1e-30) / count)
        spread = size - columns / count * sum(total**2 for total in totals)
        return (spread if spread > MIN_RELATIVE_NOISE * size else size) / count or 1.0

    def _default_precision(
        self, subset: Subset, variance: float | None, last: Callable[[], Sequence[str]], inputs: tuple[Any, Any]
    ) -> precisions.Precision:
        """The default precision of the chosen weights, for targets with the given variance; see `prior_precision`."""
        if self._scales_by_curvature:
            return 1.0
        found = precisions.default_precision(self.weights, self.values, self.covariance, subset.names)
        if variance is not None and self.covariance == "full" and not self.marginal and self._is_whole(subset):
            found = precisions.isotropic(found, self.weights)
        if variance is not None:
            with suppress(ValueError):  # the last layer is not known
                return self._in_unit(found, variance, last(), inputs)
        return found

    def _in_unit(
        self, precision: dict[str, float], variance: float, last: Sequence[str], inputs: tuple[Any, Any]
    ) -> dict[str, float]:
        """The default precision, converted to the unit of the targets. The last layer's default precision assumes outputs of
        variance 1. Weights that have no number of inputs, such as embeddings, keep their precision. Their precision is computed
        from the size of the weights, which already reflects the unit of the targets."""
        names = [name for name in last if self.weights[name].fan_in]
        gain = output_gain(self._runner, [self.weights[name] for name in names], *inputs, self.output)
        factor = gain / variance if gain else 1.0
        return {name: factor * value if name in names else value for name, value in precision.items()}

    def _candidates(self, examples: Examples, last: Callable[[], Sequence[str]]) -> Candidates:
        """Facts about the weights that a subnetwork selector may use. Facts that need a pass over the data are computed on
        demand."""
        every = Subset(self.weights, dict.fromkeys(self.weights))

        def curvatures(num_examples: int | None) -> dict[str, Tensor]:
            found, _ = self._curvature("diagonal", every, examples, num_examples)
            return every.split(found["curvature"])

        def iterates(options: SgdOptions) -> dict[str, Tensor]:
            net = copy.deepcopy(self.network)
            for name in self.weights:
                net.get_parameter(name).requires_grad_(True)
            with torch.enable_grad():
                swag = SWAG(net, copy.deepcopy(self.likelihood), rank=0, output=self.output)
                return swag.fit(examples.loader, read_batch=examples.reader, **options).variance()

        return Candidates(
            weights=self.weights,
            values=self.values,
            frozen=self._frozen,
            curvatures=curvatures,
            precisions=lambda: every.split(self._prior(every)),
            last=last,
            iterates=iterates,
            fixed=padding_entries(self.network, self.weights),
        )

    def _check_whole(self, subset: Subset) -> None:
        everything = Subset.trained(self.network, self.weights)
        for name in subset.names:
            if subset.count(name) < everything.count(name):
                raise ValueError(
                    f"Laplace: covariance='kronecker' needs whole weight tensors, but only {subset.count(name)} of "
                    f"{subset.weights[name].numel} entries of {name} are chosen; use covariance='full', or choose "
                    "the subset by names"
                )

    def _check_pushes(self, subset: Subset, few: tuple[Any, Any]) -> None:
        """Raise `ValueError` before any long computation if torch cannot push a change of the weights through the network."""
        try:
            zeros = torch.zeros(1, subset.size, dtype=self.dtype, device=self.device)
            self._jacobians(subset.names).push(*few, subset.spread(zeros))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
            raise ValueError(
                "Laplace: covariance='sampled' needs forward-mode derivatives, which torch cannot compute for this network "
                f"({reason}); use covariance='kronecker' or 'diagonal'"
            ) from error

    def _curvature(
        self,
        structure: Structure,
        over: Subset,
        examples: Examples,
        num_examples: int | None = None,
        *,
        store: torch.device | None = None,
    ) -> tuple[dict[str, Tensor], DataTerm]:
        """The curvature of some weights, with the given `structure`, and the data term. Both come from one pass over all
        examples, or over the first `num_examples` examples. The last layer's curvature is exact and needs only the layer's
        inputs; see `last_layer_curvature`."""

        def read(count: int | None) -> Pieces:
            return Pieces(
                examples,
                self._jacobians(over.names),
                OutputCurvature(self.likelihood, self.curvature, count, self.seed),
                self.memory,
                over.size if structure == "full" else 0,
                num_examples,
                one_by_one=structure == "diagonal",
                store=store,
            )

        title = f"{structure} curvature"
        few = NUM_SCALE_SAMPLES if self.covariance == "sampled" and self.num_samples is None else None
        if layer_of(over) is not None and self.curvature == "ggn" and not isinstance(self.num_samples, int):
            try:
                pieces = read(None)
                with pieces.shown(title, examples.progress):
                    return last_layer_curvature(pieces, over, structure), pieces.data
            except FeaturesEnd:
                pass
        vectors = few or self._num_vectors
        count = (vectors or self.outputs_per_example) if self.curvature == "ggn" else 0
        each = PASSES_PER_VECTOR[structure if self.outputs_per_example > linearized.MAX_EXACT_OUTPUTS else "full"]
        announced = self._announce("fit", each * count)
        pieces = read(vectors)
        with pieces.shown(title, examples.progress or announced):
            return CURVATURES[structure](pieces, over), pieces.data

    @property
    def _num_vectors(self) -> int | None:
        """Number of random vectors per example if backward passes compute the curvature; `None` means one vector per output."""
        if isinstance(self.num_samples, int):
            return self.num_samples
        return linearized.NUM_CURVATURE_SAMPLES if self._samples_outputs and self.curvature == "ggn" else None

    @property
    def _samples_outputs(self) -> bool:
        """Whether there are so many outputs that random vectors replace the exact vectors."""
        return self.outputs_per_example > linearized.MAX_EXACT_OUTPUTS and self.num_samples != "exact"

    def _sampling_remark(self) -> str:
        count, error = self._num_vectors, math.sqrt(0.5 / linearized.NUM_DIRECTIONS)
        directions = f"predicted standard deviations {error:.2g}"
        if count is None:
            return f"relative error of sampled {directions}"
        error = math.sqrt(2 / max(1.0, self.data.num_data * count))
        return f"{self.outputs_per_example:,} outputs sampled (relative errors: curvature {error:.2g}, {directions})"

    def _announce(self, call: str, num_passes: int) -> bool:
        """Warn before a call that takes more than `MAX_QUIET_PASSES` passes of the network. The warning gives the
        number of passes."""
        if num_passes <= linearized.MAX_QUIET_PASSES:
            return False
        what, remedy = f"{self.outputs_per_example:,} outputs", "give fewer rows or values to try"
        if self.covariance == "sampled" and call == "fit":
            what, remedy = f"{self.sampling.num_draws} draws", "give Sampled fewer draws or iterations"
        elif self.num_samples == "exact":
            remedy = "leave out num_samples='exact'"
        warnings.warn(
            f"Laplace.{call}: {what} take up to {num_passes:,} passes of the network over these data; {remedy}, or "
            "choose subset='last_layer', which takes one pass",
            stacklevel=4,
        )
        return True

    def _curved(self, subset: Subset) -> Subset:
        """The weights whose curvature is needed for the posterior over a subset."""
        return Subset.trained(self.network, self.weights) if self.marginal else subset

    def _covariance_from(
        self, curvature: Mapping[str, Tensor], subset: Subset, factor: float = 1.0
    ) -> WeightCovariance:
        if self.covariance == "sampled":
            return SampledCovariance(subset, curvature["draws"], curvature["prior"], factor)
        curved = self._curved(subset)
        if self.marginal:
            found: WeightCovariance = MarginalCovariance(subset, curved, curvature["curvature"], self._prior(curved))
        else:
            found = from_curvature(self.covariance, subset, curvature, self._prior(subset))
        if isinstance(found, FullCovariance):
            found.rank = self.data.num_data * (self._rank_per_example or self.outputs_per_example)
        return found

    def _prior(self, subset: Subset) -> Tensor:
        """The given prior precision of each chosen weight, before any tuning, [S]."""
        counts = [(subset.count(name), precisions.precision_of(self.base_precision, name)) for name in subset.names]
        return torch.cat([torch.full((count,), value, dtype=self.dtype, device=self.device) for count, value in counts])

    def _jacobians(self, names: Iterable[str]) -> Jacobians:
        """Derivatives with respect to some weights. The `Jacobians` are cached, because each new object compares its first batch
        with autograd."""
        chosen = tuple(names)
        known = self._derivatives.get(chosen) or Jacobians(self._runner, chosen, output=self.output)
        self._derivatives = {chosen: known}
        return known

    def _settle_precision(self, examples: Examples) -> None:
        """In a classification, adapt the default precision to the evidence and to predictions of training rows.

        The evidence takes the scale of a layer's features into account, and the default precision does not. With few
        rows per weight, however, the evidence prefers such a wide prior that the Gaussian leaves the region where the
        log-likelihood is quadratic. Predictions are then less confident than the network even on training rows. For one
        layer of at most `MAX_DIAGONALIZED_WEIGHTS` weights, the precision therefore lies between the precision that the
        evidence chooses and the default. The chosen precision is the smallest for which the loss on training rows rises by at
        most `MAX_TRAINING_LOSS_RISE` nats per label. With several layers, normalization layers amplify the spread of the outputs.
        The precision then rises from the default until the posterior adds at most `MAX_TRAINING_LOSS_RISE` nats per label to the
        training loss.
        """
        subset, posterior = self.fitted()
        one, alone = self._is_one_layer, precisions.stands_alone(self.weights, subset.names)
        exact = one and subset.size <= MAX_DIAGONALIZED_WEIGHTS
        if self.likelihood.task != "classification" or (alone and not exact):
            return
        rows = precisions.MAX_SETTLING_ROWS if one else precisions.NUM_WIDE_ROWS
        batches = examples.all_over(rows)
        if one:
            factors = list(precisions.SETTLING_FACTORS)
            pieces = [factors[precisions.best_of(self._evidences(factors)) :]]
        else:
            batches, factors = cut(batches, rows), list(precisions.WIDE_FACTORS)
            pieces = [factors[:1], factors[1:]] if posterior.diagonalize() else [[factor] for factor in factors]
        limit = precisions.MAX_TRAINING_LOSS_RISE * batches[0].y[0].numel()
        for wanted in pieces:
            losses = self._training_losses(batches, wanted)
            bearable = [factor for factor, loss in zip(wanted, losses, strict=True) if loss <= limit]
            if bearable:
                break
        self._rescale(bearable[0] if bearable else factors[-1])

    def _leave_labels_out(self, examples: Examples) -> None:
        """In a classification, change the precision of all weights if the new precision predicts left-out training rows better.

        If no link was given, the same rows also decide which link to use. The link becomes `"probit"` only if this raises the log
        density of left-out rows by more than `MAX_DENSITY_LOSS`. Training rows alone do not show that a network is overconfident
        on new rows. Left-out rows show this overconfidence, because their own effect on the network is removed (see `leave_out`).
        """
        subset, posterior = self.fitted()
        fits = isinstance(posterior, FullCovariance) and not self.marginal and self._is_whole(subset)
        if self.likelihood.task != "classification" or not fits or not posterior.diagonalize():
            return
        batches = self._whole_rows(examples, leave_one_out.NUM_LEFT_OUT_ROWS)
        if not batches:
            return
        model = self._linear_model(examples, 1.0, -2 * self.data.log_likelihood)
        factors = [*precisions.SETTLING_FACTORS[::2], *precisions.WIDE_FACTORS[1:]]
        links: list[Link] = [self._link] if self._link else ["mc", "probit"]
        totals = torch.zeros(len(links), len(factors), dtype=torch.float64)
        seed, penalties = draw_seed(torch.Generator().manual_seed(0), 2**31), [model.training_penalty()[0], *factors]
        read = functools.partial(self._linearized().gaussians, budget=self.memory, factors=penalties)
        for part, outputs, covariances in _parts_of(batches, read):
            if outputs.ndim != 2:
                return
            spreads = [_matrices(one) for one in covariances]
            for place, (mean, spread) in enumerate(leave_one_out.leave_out(self.likelihood, outputs, part.y, spreads)):
                for row, link in enumerate(links):
                    made = self._closed_form(mean, spread / self.temperature, seed, same_noise=True, link=link)
                    totals[row, place] += part.counts @ made.log_prob(part.y).cpu().double()
        densities = sum_over_processes(totals)
        better = len(links) > 1 and float(densities[1].max() - densities[0].max()) > leave_one_out.MAX_DENSITY_LOSS
        self._found_link = links[int(better)]
        self._rescale(leave_one_out.nearest_good(factors, densities[int(better)].tolist(), posterior.factor))

    def _training_losses(self, batches: Sequence[Batch], factors: list[float]) -> list[float]:
        """For each factor on the precision: the loss on training rows with the posterior, minus the loss of the network
        alone, in nats."""
        count, seed = total_count(batches), draw_seed(torch.Generator().manual_seed(0), 2**31)
        densities = self._densities(batches, [*factors, precisions.POINT_FACTOR], seed)
        sums = [count, *(count * value for value in densities)]
        found = sum_over_processes(torch.tensor(sums, dtype=torch.float64))
        losses: list[float] = ((found[-1] - found[1:-1]) / found[0]).tolist()
        return losses

    @property
    def prior_precision(self) -> precisions.Precision:
        """The current prior precision, after any tuning: a number, or one number per name."""
        factor = 1.0 if self.posterior is None else self.posterior.factor
        return precisions.scaled(self.base_precision, factor)

    def fitted(self) -> tuple[Subset, WeightCovariance]:
        """The chosen weights and the Gaussian over them.

        Raises:
            RuntimeError: Before `fit`.
        """
        if self.subset is None or self.posterior is None:
            raise RuntimeError("Laplace: this object is not fitted yet; call fit(loader) first")
        return self.subset, self.posterior

    @property
    def _is_one_layer(self) -> bool:
        """Whether the posterior is a dense Gaussian over weights of a single linear map, in a network with several
        linear maps."""
        dense = self.covariance == "full" and not self.marginal
        return self.subset is not None and dense and precisions.stands_alone(self.weights, self.subset.names)

    @property
    def link(self) -> Link:
        """Approximation of the expected class probabilities."""
        return self._link or self._found_link or ("probit" if self._is_one_layer else "mc")

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.values.values())).device

    # -- predicting ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Any,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        method: Method = "closed_form",
        split_batch: bool = True,
    ) -> Predictive:
        r"""The predictive distribution of a batch of any size; see `Predictor.predict` for `x` and `generator`.

        With `"closed_form"`, the linearized network $f(x, w^*) + J(x)(w - w^*)$ has Gaussian outputs
        $\mathcal{N}(f, J \Sigma J^\top)$. For Gaussian noise, the prediction is exact; for a classification, it uses the
        approximation that `link` names. `"linearized_mc"` uses draws of the linearized network, and `"network_mc"` uses draws of
        the network itself.

        Args:
            num_draws: Number of draws for the two Monte Carlo methods; 32 by default.
            memory: Budget for Jacobians and stored outputs; by default the budget of this object.
            split_batch: Whether the batch may be split; see `BayesianNetwork.predict`. `False` works only with
                `"network_mc"`. In the linearized network, rows do not depend on each other, so a split changes nothing.
        """
        budget = self.memory if memory is None else parse_bytes(memory)
        count = num_draws or DEFAULT_NUM_DRAWS
        if method == "network_mc":
            draws = self.draw(count, generator=generator)
            return FixedDraws(draws, self.likelihood, self.output).predict(x, memory=budget, split_batch=split_batch)
        if not split_batch:
            raise ValueError(
                f"Laplace.predict: split_batch=False does not apply to method={method!r}; use method='network_mc'"
            )
        if method == "linearized_mc":
            _, posterior = self.fitted()
            offsets = math.sqrt(self.temperature) * posterior.draw(count, generator)
            return self.likelihood.predictive(Outputs(kept=self._linearized().moved(x, budget, offsets)))
        # Draws are made from this seed when they are needed, so that every use gets the same draws.
        seed = _seed_of(generator)
        mean, covariance = self._output_gaussian(x, budget)
        return self._closed_form(mean, covariance, seed)

    def _closed_form(
        self, mean: Tensor, covariance: Covariance, seed: int, *, same_noise: bool = False, link: Link | None = None
    ) -> Predictive:
        """The predictive distribution for a Gaussian over outputs. The covariance is multiplied by the temperature."""
        warm, axis = self.temperature, self.likelihood.logit_axis(mean.ndim)
        scaled = covariance.scaled(warm) if isinstance(covariance, Spread) else warm * covariance
        gaussian = OutputGaussian(mean, scaled, seed, axis, same_noise=same_noise)
        return self.likelihood.closed_form(gaussian, link or self.link)

    def _output_gaussian(self, x: Any, budget: int) -> tuple[Tensor, Covariance]:
        network = self._linearized()
        found: list[tuple[Tensor, list[Any]]] | None = None
        if self._is_sampled(x):
            with suppress(NotImplementedError):  # some operation has no forward derivative
                found = list(network.sampled(x, budget, self.seed, [network.posterior]))
        if found is None:
            announced = self._announce("predict", self._exact_passes(x))
            total = batch_size(*as_inputs(x))
            with show_progress("covariance of outputs", total, announced, transient=True) as progress:
                found = replace(network, progress=progress).gaussians(x, budget, parts=True)
        covariances: list[Any] = [parts[0] for _, parts in found]
        first = covariances[0]
        joined = type(first).joined(covariances) if isinstance(first, Spread) else torch.cat(covariances)
        return torch.cat([mean for mean, _ in found]), joined

    def _linearized(self) -> LinearizedNetwork:
        """The network as a linear function of the chosen weights, used by every linearized prediction."""
        subset, posterior = self.fitted()
        return LinearizedNetwork(self._jacobians(subset.names), posterior, self.likelihood, self.dtype)

    def _is_sampled(self, x: Any) -> bool:
        if self.covariance == "sampled":
            return True
        return self._samples_outputs and self._linearized().feature_cost(x) is None

    def _exact_passes(self, x: Any) -> int:
        """Approximate number of passes of the network for an exact covariance of outputs."""
        return 2 * self.outputs_per_example if self._linearized().feature_cost(x) is None else 1

    @torch.no_grad()
    @checked
    def output_covariance(self, x: Inputs, *, joint: bool = False) -> Tensor:
        r"""Covariance $J \Sigma J^\top$ of the linearized network's outputs.

        Args:
            x: Inputs of B examples.
            joint: Whether to include covariances between examples.

        Returns:
            The covariance, [B, O, O]. If `joint` is true, it is [B O, B O], ordered by example and then by output.
        """
        _, posterior = self.fitted()
        args, kwargs = checked_inputs(x)
        self._announce("output_covariance", self._exact_passes(x))
        if not joint:
            return self.temperature * self._linearized().covariance(x, self.memory)
        rows = batch_size(args, kwargs) * self.outputs_per_example
        size = rows * (rows + 2 * posterior.held) * torch.finfo(self.dtype).bits // 8
        if size > self.memory:
            raise ValueError(
                f"Laplace: a joint covariance of {rows} function values takes {in_words(size)}, more than "
                f"memory={in_words(self.memory)}; give fewer examples"
            )
        return self.temperature * self._linearized().joint_covariance(x)

    # -- drawing ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @checked
    def draw(self, num_draws: Count = 1, *, generator: torch.Generator | None = None) -> Draws:
        """Draw S functions from the posterior; each function is the network with drawn weights. Weights that are not chosen keep
        their point estimates.

        Args:
            num_draws: Number S of draws.
            generator: Source of randomness.

        Returns:
            The draws. The `kl` of the draws is the KL of the Gaussian to its prior, or NaN for `covariance="sampled"`.
        """
        subset, posterior = self.fitted()
        drawn = posterior.draw(num_draws, generator).to(self.device)
        weights = subset.fill(math.sqrt(self.temperature) * drawn, self.values)
        known = not isinstance(posterior, SampledCovariance)
        kl = self.kl() if known else torch.tensor(math.nan, dtype=self.dtype, device=self.device)
        return Draws(self._runner, weights, kl.expand(num_draws))

    def kl(self) -> Tensor:
        r"""KL of the posterior over the chosen weights to their prior $\mathcal{N}(0, \lambda^{-1})$, a scalar in
        nats.
        """
        subset, posterior = self.fitted()
        mean = subset.take(self.values).to(self.dtype)
        prior = posterior.factor * self._prior(subset)
        trace = (prior * posterior.variances()).sum()
        log_det = posterior.log_det_ratio()
        if isinstance(posterior, MarginalCovariance):
            log_det = -torch.logdet(posterior.dense()) - prior.log().sum()
        return 0.5 * (trace + (prior * mean.square()).sum() - len(mean) + log_det)

    @torch.no_grad()
    def covariance_matrix(self) -> Tensor:
        """The covariance over the chosen weights, [S, S], in the order of `named_parameters()` and row-major within a weight."""
        return self.temperature * self.fitted()[1].dense()

    # -- evidence and tuning ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        r"""The Laplace approximation of the log marginal likelihood in nats.

        $$ \log p(\mathcal{D} | w^*) + \log p(w_S^*) + \tfrac{S}{2}\log 2\pi - \tfrac12 \log\det(H_{SS} + \lambda I) $$

        Weights that are not chosen count as fixed. The value is exact if the model is linear with Gaussian noise, if its weights
        are at the posterior mean, and if all weights are chosen.
        """
        return self._evidence(self.fitted()[1])

    def _evidence(self, posterior: WeightCovariance) -> Tensor:
        mean = posterior.curved.take(self.values).to(self.dtype)
        penalty = 0.5 * (posterior.factor * posterior.prior * mean.square()).sum()
        return self.data.log_likelihood - penalty - 0.5 * posterior.log_det_ratio()

    @checked
    def set_prior_factor(self, factor: Positive) -> None:
        """Set the factor by which all prior precisions are multiplied, whether they were passed to `Laplace` or are the default.
        The curvature does not change. If `fit` is called again, it keeps this precision."""
        self._rescale(factor)
        self._default = False

    def _rescale(self, factor: float) -> None:
        self.posterior = self.fitted()[1].rescaled(factor)

    @torch.no_grad()
    @checked
    def tune_prior_precision(
        self,
        loader: Iterable[Any] | None = None,
        method: Literal["validation", "evidence"] | None = None,
        *,
        grid: Sequence[Positive] = precisions.DEFAULT_GRID,
        fine: bool = True,
        noise: bool = False,
        prediction: Method = "closed_form",
        num_draws: Count = 32,
        read_batch: BatchReader | None = None,
        generator: torch.Generator | None = None,
    ) -> float:
        r"""Choose the factor on the prior precisions that predicts validation data best or gives the largest evidence.

        The search tries a logarithmic grid, then a finer grid between the neighbors of the best value (Daxberger et al. 2021,
        appendix C.3). The default grid is extended while its best value is at an end; a grid that you give is not extended. If the
        best value is still at an end, a warning says so. The curvature is diagonalized once for all values, but a full covariance
        over more than `MAX_DIAGONALIZED_WEIGHTS` weights is factorized for each value. The best value stays set after the call.

        Args:
            loader: Validation data, for `method="validation"`.
            method: Criterion. `"validation"` is the mean log predictive density of the loader's data, and `"evidence"` is
                `log_evidence()`. The default is `"validation"` if there is a loader, otherwise `"evidence"`.
            grid: Prior precisions to try. If each layer has its own precision (the default), `grid` contains factors on the
                precisions of all layers.
            fine: Whether to search a finer grid around the best value.
            noise: Whether to also choose the variance of a Gaussian likelihood by the evidence (MacKay's fixed point).
            prediction: Kind of prediction to score: `"closed_form"`, `"linearized_mc"` or `"network_mc"`.
            num_draws: Number of draws for the two Monte Carlo methods.
            read_batch: Function that converts an item of the loader to inputs and targets.
            generator: Source of randomness. Every value is scored with the same random numbers.

        Returns:
            The chosen prior precision, or the chosen factor if each layer has its own precision.
        """
        self.fitted()
        if not grid:
            raise ValueError("tune_prior_precision: grid= is empty; give at least one positive number")
        base = 1.0 if isinstance(self.base_precision, dict) else self.base_precision
        if method == "evidence" or (method is None and loader is None):
            if noise:
                self._fit_noise()
            score: precisions.Score = self._evidences
            num_fine = precisions.NUM_FINE_EVIDENCES
        else:
            if noise:
                raise ValueError(
                    "tune_prior_precision: noise=True works only with method='evidence', because method='validation' "
                    "tunes only the prior precision; leave out noise=, or use method='evidence'"
                )
            score = self._validation_scores(loader, prediction, num_draws, read_batch, generator)
            num_fine = precisions.NUM_FINE_SCORES
        chosen, finding = precisions.search_precision(score, base, grid, num_fine if fine else 0)
        kept = (old for old in self.findings if old.code not in ("search_at_edge", "no_uncertainty"))
        self.findings = (*kept, *([] if finding is None else [finding]))
        if finding is not None and tuple(grid) == precisions.DEFAULT_GRID:
            warnings.warn(f"tune_prior_precision: {finding}", stacklevel=4)
        self.set_prior_factor(chosen / base)
        return chosen

    def _evidences(self, factors: list[float]) -> list[float]:
        _, posterior = self.fitted()
        posterior.diagonalize()
        return [float(self._evidence(posterior.rescaled(factor))) for factor in factors]

    def _validation_scores(
        self,
        loader: Iterable[Any] | None,
        prediction: Method,
        num_draws: int,
        read_batch: BatchReader | None,
        generator: torch.Generator | None,
    ) -> precisions.Score:
        """A function that takes factors on the prior precisions and returns the mean log predictive densities of a
        loader's data."""
        if loader is None:
            raise ValueError(
                "tune_prior_precision: method='validation' needs loader=; give a loader over validation data"
            )
        batches = [parse_batch(item, read_batch).to(self.device) for item in loader]
        if not batches:
            raise ValueError("tune_prior_precision: the loader has no examples; give validation data")
        seed = _seed_of(generator)
        if prediction == "closed_form":
            return lambda factors: self._densities(batches, factors, seed)
        by_draws = functools.partial(self._density_of_draws, batches, prediction, num_draws, seed)
        return lambda factors: list(map(by_draws, factors))

    def _densities(self, batches: Sequence[Batch], factors: list[float], seed: int) -> list[float]:
        """For each factor on the prior precisions, the weighted mean log predictive density of some batches, in closed form."""
        _, posterior = self.fitted()
        diagonal = posterior.diagonalize()
        if not diagonal and len(factors) > 1:  # one factor at a time, because each needs its own factorization
            return [self._densities(batches, [factor], seed)[0] for factor in factors]
        network = self._linearized()
        if not diagonal:
            network = replace(network, posterior=posterior.rescaled(factors[0]))
        totals = torch.zeros(len(factors), dtype=torch.float64)
        sampled = self._is_sampled(batches[0].x)
        num_passes = 3 * linearized.NUM_DIRECTIONS * len(factors) if sampled else self._exact_passes(batches[0].x)
        self._announce("tune_prior_precision", num_passes)
        read: Any = functools.partial(network.gaussians, budget=self.memory, factors=factors if diagonal else None)
        if sampled:
            others = [posterior.rescaled(factor) for factor in factors]
            read = functools.partial(network.sampled, budget=self.memory, seed=self.seed, posteriors=others)
        for part, mean, covariances in _parts_of(batches, read):
            for place, covariance in enumerate(covariances):
                made = self._closed_form(mean, covariance, seed, same_noise=True)
                totals[place] += part.counts @ made.log_prob(part.y).cpu().double()
        return (totals / total_count(batches)).tolist()

    def _density_of_draws(
        self, batches: Sequence[Batch], prediction: Method, num_draws: int, seed: int, factor: float
    ) -> float:
        """The mean log predictive density, estimated from draws, for one factor on the prior precisions."""
        other = copy.copy(self)
        other.set_prior_factor(factor)
        total = 0.0
        for batch in batches:
            generator = torch.Generator(self.device).manual_seed(seed)
            made = other.predict(batch.x, num_draws, generator=generator, method=prediction)
            total += float(batch.counts @ made.log_prob(batch.y).cpu().double())
        return total / total_count(batches)

    def _shared_noise(self, what: str) -> Gaussian:
        """The likelihood, which must be Gaussian with one shared variance. Otherwise a `ValueError` is raised; `what` is the
        caller's name in the message."""
        if not isinstance(self.likelihood, Gaussian) or self.likelihood.noise.ndim:
            raise ValueError(
                f"{what} needs a Gaussian likelihood with the same noise variance for all outputs; use "
                "likelihoods.Gaussian() with no noise variance or with a single number"
            )
        return self.likelihood

    def _fit_noise(self) -> None:
        """Set the noise variance to MacKay's fixed point."""
        likelihood, (subset, posterior) = self._shared_noise("tune_prior_precision: noise=True"), self.fitted()
        if not isinstance(posterior, FullCovariance) or self.marginal:
            raise ValueError(
                "tune_prior_precision: noise=True works only with covariance='full' and marginal=False; change these "
                "arguments of Laplace, or leave noise= out"
            )
        mean = subset.take(self.values).double()
        variance = fixed_point_noise(
            posterior.spectrum(),
            posterior.factor,
            float(likelihood.noise.detach()),
            squared_norm=float((posterior.prior.double() * mean.square()).sum()),
            squared_error=self.data.squared_error,
            count=self._num_outputs,
        )
        self.set_noise(variance)

    @property
    def _num_outputs(self) -> float:
        """Number of scalars in the data term: the sum of example weights times the number of outputs of an example."""
        return self.data.total_weight * self.outputs_per_example

    @torch.no_grad()
    @checked
    def set_noise(self, variance: Positive) -> None:
        """Set the variance of a shared Gaussian noise. Curvature and data term are rescaled without a pass over the data."""
        likelihood, (_, posterior) = self._shared_noise("Laplace: set_noise"), self.fitted()
        if not isinstance(posterior, (FullCovariance, DiagonalCovariance)) or self.marginal:
            raise ValueError(
                "Laplace: set_noise works only with covariance='full' or 'diagonal', and with marginal=False; fit "
                "again with likelihoods.Gaussian(variance)"
            )
        ratio = float(likelihood.noise.detach()) / variance
        likelihood.set_noise(variance)
        if isinstance(posterior, FullCovariance):
            self.posterior = posterior.times(ratio)
        else:
            rescaled = DiagonalCovariance(posterior.subset, posterior.curvature * ratio, posterior.prior)
            self.posterior = rescaled.rescaled(posterior.factor)
        self.data.log_likelihood = -0.5 * (
            self._num_outputs * math.log(2 * math.pi * variance) + self.data.squared_error / variance
        )

    # -- storage ---------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """All settings of a fitted approximation as plain data."""
        _, posterior = self.fitted()
        same = ("curvature", "num_samples", "seed", "marginal", "memory", "output", "temperature")
        return {name: getattr(self, name) for name in same} | {
            "likelihood": self.likelihood.config(),
            "covariance": asdict(self.sampling) if self.covariance == "sampled" else self.covariance,
            "link": self._link,
            "prior_precision": self.base_precision,
            "factor": posterior.factor,
            "remarks": list(self.remarks),
            "choices": {name: getattr(self, attribute) for name, attribute in STORED_CHOICES.items()},
            "data": asdict(self.data),
            "outputs_per_example": self.outputs_per_example,
            "weights": list(self.weights),
        }

    def state(self) -> dict[str, Tensor]:
        """Tensors of a fitted approximation: network, likelihood, curvature and chosen weights."""
        subset, posterior = self.fitted()
        network, likelihood = self.network.state_dict(keep_vars=True), self.likelihood.state_dict()
        state = prefixed(network=network, likelihood=likelihood, posterior=posterior.tensors())
        return {**state, "subset": subset.flat()}

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The fitted approximation, rebuilt on a copy of the network. Weights that were frozen are frozen again."""
        given = dict(config)
        factor, data, outputs, names = (given.pop(key) for key in ("factor", "data", "outputs_per_example", "weights"))
        remarks, choices = given.pop("remarks", ()), given.pop("choices", {})  # old files have neither
        if isinstance(given["covariance"], dict):
            given["covariance"] = Sampled(**given["covariance"])
        net = copy_network(net, "load")
        for name in catalog(net).weights:
            net.get_parameter(name).requires_grad_(name in names)
        laplace = cls(**{**given, "net": net, "subset": from_indices(state["subset"])})
        laplace.network.load_state_dict(below("network", state))
        laplace.likelihood.load_state_dict(below("likelihood", state))
        laplace.data, laplace.outputs_per_example = DataTerm(**data), outputs
        laplace.remarks = tuple(remarks)
        for name, attribute in STORED_CHOICES.items():
            if name in choices:
                setattr(laplace, attribute, choices[name])
        laplace.subset = Subset.of_flat(laplace.weights, state["subset"].cpu())
        home = laplace._draws_home(laplace.subset) if laplace.covariance == "sampled" else laplace.device
        curvature = {name: value.to(home) for name, value in below("posterior", state).items()}
        laplace.posterior = laplace._covariance_from(curvature, laplace.subset, factor).rescaled(factor)
        return laplace

    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of the network."""
        return fingerprint(self.network)

    def __repr__(self) -> str:
        chosen = f"{self.subset.size:,} of {self.subset.total:,} weights" if self.subset else "not fitted"
        facts = ", ".join((self.likelihood.name, self.covariance, chosen, *self.remarks))
        return f"Laplace({type(self.network).__name__}, {facts})"


def _seed_of(generator: torch.Generator | None) -> int:
    """Seed for draws. It is drawn from the generator if one is given; otherwise torch's global seed determines it."""
    return torch.initial_seed() % 2**31 if generator is None else draw_seed(generator, 2**31)
