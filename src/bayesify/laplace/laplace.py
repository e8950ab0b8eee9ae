"""The linearized Laplace approximation of a trained network, over all weights or a subnetwork."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, Inputs, Memory, Positive, Seed, checked
from bayesify.draws import Draws
from bayesify.jacobians import Jacobians, Linearization, check_deterministic
from bayesify.laplace import curvature as curvatures
from bayesify.laplace import storing
from bayesify.laplace.arguments import Structure, check_budget, check_choices, check_whole, curved_likelihood
from bayesify.laplace.covariances import (
    DiagonalCovariance,
    FullCovariance,
    KroneckerCovariance,
    MarginalCovariance,
    WeightCovariance,
)
from bayesify.laplace.prior_precision import Precision, check_precision, default_precision, precision_of, scaled
from bayesify.laplace.settling import is_one_layer, settle_precision
from bayesify.laplace.subnetwork.selectors import Candidates, as_selector
from bayesify.laplace.subset import Subset
from bayesify.laplace.swag_variances import swag_variances
from bayesify.laplace.tuning import Method, tune_prior_precision
from bayesify.likelihoods import Likelihood
from bayesify.network import BayesianNetwork
from bayesify.predictive.base import Outputs, Predictive
from bayesify.predictive.gaussian import Link, OutputGaussian, marginals
from bayesify.predictor import Drawable
from bayesify.running.inputs import as_inputs, check_inputs, explain_shape_errors
from bayesify.running.last_layer import last_layer
from bayesify.running.memory import batch_size, in_words, parse_bytes, split_rows
from bayesify.running.outputs import select_output
from bayesify.running.runner import Runner
from bayesify.storage.serializers import register_predictor
from bayesify.training.batches import BatchReader, parse_batch
from bayesify.weights.catalog import catalog, padding_entries
from bayesify.weights.module_state import copy_network, fingerprint


@register_predictor
class Laplace(Drawable):
    r"""A Gaussian posterior around the weights of a trained network, $q(w_S) = \mathcal{N}(w^*_S, (H_{SS} + \lambda I)^{-1})$.

    $H = \sum_n J_n^\top H_n J_n$ is the generalized Gauss-Newton matrix of the data (Daxberger et al. 2021, equations 5
    and 6); the weights that are not chosen stay at $w^*$. The network is not trained again and not changed: a copy is kept.

    Args:
        net: The trained network, in evaluation mode if it has dropout or batch normalization.
        likelihood: p(y | outputs), or its name.
        subset: `"all"`, `"last_layer"`, a list of names or globs, a mask by name, or a selector from `bayesify.subnetwork`.
        covariance: `"full"`, `"diagonal"`, or `"kronecker"` (linear maps and convolutions; other weights get a diagonal).
        prior_precision: $\lambda$: a number, by name or pattern, or `"size"`, 1 over mean squares; default: `default_precision`,
            for one layer of several under a full covariance lowered by the evidence (`settle_precision`).
        link: What stands for expected class probabilities: `"mc"`, `"probit"`, `"bridge"`; see `GaussianClassPredictive`. Default:
            `"probit"` for one layer of several under a full covariance, else `"mc"`, as measured (`benchmarks.laplace_defaults`).
        temperature: A factor on the covariance in draws and predictions, $q \propto p(w, \mathcal{D})^{1 / T}$.
        curvature: `"ggn"`, or `"empirical"` for the empirical Fisher matrix.
        num_samples: K random vectors per example that stand for the matrix $H_n$ of its outputs, unbiased, made with `seed`; by
            default it is exact, at a pass backwards for each output. Diagonals are off by $\sqrt{2 / (N K)}$, last layers by more.
        marginal: Whether the subset's covariance is the part $[(H + \lambda I)^{-1}]_{SS}$ of the covariance over all weights
            (equation 11) instead of the inverse of the part; needs a network small enough for the whole matrix.
        memory: Budget for curvature, factors and Jacobians, such as `"1GiB"`, or bytes.
        output: Which of several outputs the likelihood is about; see `bayesianize`.

    Attributes:
        network: The copy.
        likelihood: A copy of the given one.
        values: The trained weights by name.
        dtype: In which curvature and covariances are computed: float64 for such a network, else float32.
        subset: The chosen weights, after `fit`.
        posterior: The Gaussian over them, after `fit`.
        data: Log-likelihood and count of the examples, after `fit`.
        outputs_per_example: O, after `fit`.
        remarks: What the choice of the weights left out, after `fit`.

    Raises:
        ValueError: If an argument is not one of these, a weight is frozen or missing, or dropout or batch normalization is
            in training mode.
    """

    likelihood: Likelihood

    @checked
    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood | str | Mapping[str, Any],
        subset: Any = "all",
        covariance: Structure = "full",
        prior_precision: float | Mapping[str, float] | Literal["size"] | None = None,
        *,
        link: Link | None = None,
        temperature: Positive = 1.0,
        curvature: curvatures.Curvature = "ggn",
        num_samples: Count | None = None,
        seed: Seed = 0,
        marginal: bool = False,
        memory: Memory | str = "1GiB",
        output: str | int | None = None,
    ) -> None:
        if isinstance(net, BayesianNetwork):
            raise TypeError("Laplace: net is a BayesianNetwork; give the plain network, or its mean_network()")
        check_choices(covariance, marginal, curvature, num_samples)
        made = curved_likelihood(likelihood, curvature)
        check_deterministic(net)
        known = catalog(net)
        self.weights = {name: weight for name, weight in known.weights.items() if name not in known.refused}
        if not self.weights:
            raise ValueError("Laplace: every parameter of the network is frozen; unfreeze some")
        for name in self.weights:
            if net.get_parameter(name).dtype == torch.float16:
                raise ValueError(
                    f"Laplace: {name} is float16, too coarse for derivatives; use net.float() or net.bfloat16()"
                )
        self._frozen = tuple(known.refused)
        self.network = copy_network(net, "Laplace").requires_grad_(False)
        reference = self.network.get_parameter(next(iter(self.weights)))
        self.likelihood = copy.deepcopy(made).to(reference.device)
        self.dtype = torch.float64 if reference.dtype == torch.float64 else torch.float32
        self.likelihood.to(self.dtype)
        self.selector = as_selector(subset)
        self.covariance, self.curvature, self.marginal = covariance, curvature, marginal
        self.num_samples, self.seed = num_samples, seed
        self.memory = parse_bytes(memory)
        self.output = output
        self._link, self.temperature = link, temperature
        self._runner = Runner(self.network, known.weights, evaluate=True)
        self.values = {name: self.network.get_parameter(name).detach() for name in self.weights}
        self._default = prior_precision is None  # until the weights are chosen
        default = default_precision(self.weights, self.values, covariance, self.weights)
        self.base_precision = check_precision(default if self._default else prior_precision, self.weights, self.values)
        self.subset: Subset | None = None
        self.posterior: WeightCovariance | None = None
        self.remarks: tuple[str, ...] = ()
        self._derivatives: dict[tuple[str, ...], Jacobians] = {}
        self.data = curvatures.DataTerm()
        self.outputs_per_example = 1

    @torch.no_grad()
    @checked
    def fit(self, loader: Iterable[Any], *, read_batch: BatchReader | None = None, progress: bool = False) -> Laplace:
        """Choose the weights and add up the curvature, in one pass over the data (two if the choice needs one).

        Args:
            loader: Yields batches as for `bayesify.fit`. Under `torch.distributed` each process gives its own part of the data.
            read_batch: A function from what the loader yields to inputs and targets.
            progress: Whether to show a progress bar.

        Returns:
            Itself.

        Raises:
            ValueError: If the subset is empty or larger than the network, or the covariance exceeds the memory budget.
        """
        self.base_precision, self.posterior, self.findings = self.prior_precision, None, ()
        first = parse_batch(curvatures.first_batch(loader), read_batch).to(self.device)
        args, kwargs = as_inputs(first.x)
        check_inputs(args, kwargs)
        every = Subset(self.weights, dict.fromkeys(self.weights))
        candidates = Candidates(
            self.weights,
            self.values,
            self._frozen,
            lambda count: self._curvature("diagonal", every, loader, read_batch, progress, count)[0],
            lambda: every.split(self.prior(every)),
            lambda: last_layer(self._runner, self.weights, args, kwargs, self.output),
            lambda options: swag_variances(self, loader, read_batch, options),
            padding_entries(self.network, self.weights),
        )
        size = candidates.free if self.marginal else self.selector.count(candidates)
        check_budget(self.covariance, size, self.weights, self.dtype, self.memory)
        # The likelihood says what does not fit before any long computation.
        with explain_shape_errors(args, kwargs):
            outputs = select_output(self._runner.call({}, *next(split_rows(args, kwargs, 2))), self.output)
        self.likelihood.log_prob(outputs, first.rows(slice(0, 2)).y, has_draws=False)
        self.outputs_per_example = outputs[0].numel()
        self.subset = Subset.of_flat(self.weights, self.selector.select(candidates).cpu())
        self.remarks = tuple(candidates.remarks)
        default, self._default = self._default, False
        if default:
            self.base_precision = default_precision(self.weights, self.values, self.covariance, self.subset.names)
        if self.covariance == "kronecker":
            check_whole(self.subset, Subset.trained(self.network, self.weights))
        found, self.data = self._curvature(self.covariance, self._over(self.subset), loader, read_batch, progress)
        self.posterior = self.covariance_from(found, self.subset)
        if default:
            settle_precision(self, loader, read_batch)
        return self

    @property
    def link(self) -> Link:
        """What stands for expected class probabilities."""
        return self._link or ("probit" if is_one_layer(self) else "mc")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.values.values())).device

    def _jacobians(self, names: Iterable[str]) -> Jacobians:
        """Derivatives by some weights; kept, since the first batch goes through a comparison."""
        chosen = tuple(names)
        known = self._derivatives.get(chosen) or Jacobians(self._runner, chosen, output=self.output)
        self._derivatives = {chosen: known}
        return known

    def _curvature(
        self,
        structure: Structure,
        over: Subset,
        loader: Iterable[Any],
        read_batch: BatchReader | None,
        progress: bool,
        num_examples: int | None = None,
    ) -> tuple[Any, curvatures.DataTerm]:
        """The curvature over some weights in a structure, and the data term, in a pass over all or the first examples."""
        loss = curvatures.OutputCurvature(self.likelihood, self.curvature, self.num_samples, self.seed)
        pieces = curvatures.Pieces(
            loader,
            self._jacobians(over.names),
            self.memory,
            over.size if structure == "full" else 0,
            read_batch,
            num_examples,
            vectors=loss.count,
            one_by_one=structure == "diagonal",
        )
        with pieces.shown(f"{structure} curvature", progress):
            return curvatures.CURVATURES[structure](pieces, over, loss)

    def _over(self, subset: Subset) -> Subset:
        """The weights that the curvature is of, for a posterior over some."""
        return Subset.trained(self.network, self.weights) if self.marginal else subset

    def covariance_from(self, found: Any, subset: Subset) -> WeightCovariance:
        """The Gaussian over a subset from a curvature of this structure: one of `bayesify.laplace.curvature`."""
        if self.covariance == "kronecker":
            blocks, rest = found
            return KroneckerCovariance(subset, blocks, rest, self.prior(subset))
        if self.covariance == "diagonal":
            return DiagonalCovariance(subset, torch.cat([found[name] for name in subset.names]), self.prior(subset))
        over = self._over(subset)
        whole = FullCovariance(over, found, self.prior(over))
        return MarginalCovariance(subset, whole) if self.marginal else whole

    def prior(self, subset: Subset) -> Tensor:
        """Prior precision of each chosen weight as it was given, before tuning: [S]."""
        counts = [(subset.count(name), precision_of(self.base_precision, name)) for name in subset.names]
        return torch.cat([torch.full((count,), value, dtype=self.dtype, device=self.device) for count, value in counts])

    @property
    def prior_precision(self) -> Precision:
        """The prior precision now, after tuning too: a number, or one per name."""
        return self.base_precision if self.posterior is None else scaled(self.base_precision, self.posterior.factor)

    def fitted(self) -> tuple[Subset, WeightCovariance]:
        """The chosen weights and the Gaussian over them.

        Raises:
            RuntimeError: Before `fit`.
        """
        if self.subset is None or self.posterior is None:
            raise RuntimeError("Laplace: not fitted yet; call fit(loader) first")
        return self.subset, self.posterior

    @torch.no_grad()
    @checked
    def draw(self, num_draws: Count = 1, *, generator: torch.Generator | None = None) -> Draws:
        """Functions from the posterior, through the network itself; chosen weights vary, all others are the point estimate.

        Args:
            num_draws: S.
            generator: Source of randomness.

        Returns:
            The draws. Their KL is that of the Gaussian to its prior, the same for each.
        """
        subset, posterior = self.fitted()
        weights = subset.fill(math.sqrt(self.temperature) * posterior.draw(num_draws, generator), self.values)
        return Draws(self._runner, weights, self.kl().expand(num_draws))

    def kl(self) -> Tensor:
        r"""KL of the posterior over the chosen weights to their prior $\mathcal{N}(0, \lambda^{-1})$ in nats, a scalar."""
        subset, posterior = self.fitted()
        mean = subset.take(self.values).to(self.dtype)
        prior = posterior.factor * self.prior(subset)
        trace = (prior * posterior.variances()).sum()
        log_det = posterior.log_det_ratio()
        if isinstance(posterior, MarginalCovariance):
            log_det = -torch.logdet(posterior.dense()) - prior.log().sum()
        return 0.5 * (trace + (prior * mean.square()).sum() - len(mean) + log_det)

    @torch.no_grad()
    def covariance_matrix(self) -> Tensor:
        """The covariance over the chosen weights, ordered as `named_parameters()`, row-major within a weight: [S, S]."""
        return self.temperature * self.fitted()[1].dense()

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        r"""The Laplace approximation of the log marginal likelihood in nats.

        $$ \log p(\mathcal{D} | w^*) + \log p(w_S^*) + \tfrac{S}{2}\log 2\pi - \tfrac12 \log\det(H_{SS} + \lambda I) $$

        The weights that are not chosen count as fixed. Exact for a linear model with Gaussian noise at its posterior mean, all
        weights chosen.
        """
        return self.evidence_of(self.fitted()[1])

    def evidence_of(self, posterior: WeightCovariance) -> Tensor:
        """`log_evidence` under another Gaussian over the chosen weights."""
        mean = posterior.curved.take(self.values).to(self.dtype)
        penalty = 0.5 * (posterior.factor * posterior.prior * mean.square()).sum()
        return self.data.log_likelihood - penalty - 0.5 * posterior.log_det_ratio()

    @checked
    def set_prior_factor(self, factor: Positive) -> None:
        """Use another common factor on the prior precisions, relative to those given; the curvature stays."""
        _, posterior = self.fitted()
        self.posterior = posterior.rescaled(factor)

    @property
    def num_outputs(self) -> float:
        """Scalars that the data term is a sum over: examples, by their weights, times outputs."""
        return self.data.total_weight * self.outputs_per_example

    @checked
    def tune_prior_precision(self, loader: Iterable[Any] | None = None, **options: Any) -> float:
        """Choose a common factor on the prior precisions; see `bayesify.laplace.tuning.tune_prior_precision`."""
        return tune_prior_precision(self, loader, **options)

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
        r"""The predictive distribution of a batch of any size.

        `"closed_form"`: the linearized network $f(x, w^*) + J(x)(w - w^*)$ has Gaussian outputs
        $\mathcal{N}(f, J \Sigma J^\top)$; exact for Gaussian noise, by the link for classes.
        `"linearized_mc"`: draws of the linearized network. `"network_mc"`: draws of the network itself.

        Args:
            x: Inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
            num_draws: Draws for the two Monte Carlo methods; 32 by default.
            generator: Source of randomness.
            memory: Budget for Jacobians and for what is kept of the outputs; that of the object by default.
            method: How.
            split_batch: Whether the batch may be cut; see `BayesianNetwork.predict`. False is for `"network_mc"` only: the
                linearized network's rows do not depend on each other.
        """
        budget = self.memory if memory is None else parse_bytes(memory)
        num_draws = 32 if num_draws is None else num_draws
        args, kwargs = as_inputs(x)
        check_inputs(args, kwargs)
        if method == "network_mc":
            outputs = self.draw(num_draws, generator=generator).outputs(
                args, kwargs, output=self.output, memory=budget, split_batch=split_batch
            )
            return self.likelihood.predictive(outputs)
        if not split_batch:
            raise ValueError(f"Laplace.predict: split_batch=False with {method!r}; it is for method='network_mc'")
        subset, posterior = self.fitted()
        means, spreads = [], []
        root = math.sqrt(self.temperature)
        offsets = root * posterior.draw(num_draws, generator) if method == "linearized_mc" else None
        for point in self.linearizations(args, kwargs, budget):
            gradients = point.pull(point.identity())
            mean = point.outputs.detach().to(self.dtype)
            if offsets is not None:
                moved = torch.zeros(num_draws, *gradients.shape, dtype=self.dtype, device=mean.device)
                for name, part in subset.split(offsets).items():
                    moved += torch.einsum("kbn,sn->skb", subset.gradients(gradients, name).detach(), part)
                spreads.append(mean + moved.movedim(1, -1).reshape(num_draws, *mean.shape))
                continue
            covariance = self.temperature * posterior.outputs(gradients)
            keeps = covariance[0].numel() * batch_size(args, kwargs) * covariance.element_size() <= budget
            means.append(mean)
            spreads.append(
                covariance if keeps else marginals(covariance, mean.shape, self.likelihood.logit_axis(mean.ndim))
            )
        if offsets is not None:
            return self.likelihood.predictive(Outputs(kept=torch.cat(spreads, dim=1)))
        seed = torch.initial_seed() % 2**31  # nothing is drawn unless asked for, and then the same each time
        if generator is not None:
            seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        return self.likelihood.closed_form(OutputGaussian(torch.cat(means), torch.cat(spreads), seed), self.link)

    @torch.no_grad()
    @checked
    def output_covariance(self, x: Inputs, *, joint: bool = False) -> Tensor:
        r"""Covariance $J \Sigma J^\top$ of the linearized network's outputs.

        Args:
            x: Inputs of B examples.
            joint: Whether across examples too.

        Returns:
            [B, O, O], or with `joint` [B O, B O], examples slowest.
        """
        _, posterior = self.fitted()
        args, kwargs = as_inputs(x)
        check_inputs(args, kwargs)
        if joint:
            rows = batch_size(args, kwargs) * self.outputs_per_example
            size = rows * (rows + 2 * posterior.held) * torch.finfo(self.dtype).bits // 8
            if size > self.memory:
                raise ValueError(
                    f"Laplace: a joint covariance of {rows} function values takes {in_words(size)}, more than "
                    f"memory={in_words(self.memory)}; give fewer examples"
                )
        budget = 2**62 if joint else self.memory
        found = []
        for point in self.linearizations(args, kwargs, budget):
            gradients = point.pull(point.identity())
            found.append(posterior.joint(gradients) if joint else posterior.outputs(gradients))
        return self.temperature * (found[0] if joint else torch.cat(found))

    def linearizations(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: int) -> Iterable[Linearization]:
        """The network linearized in the chosen weights, for pieces of a batch that stay within a budget of bytes."""
        subset, posterior = self.fitted()
        jacobians = self._jacobians(subset.names)
        if batch_size(args, kwargs) == 0:
            raise ValueError("predict: the batch is empty; give at least one example")
        rows = curvatures.rows_at_once(jacobians, args, kwargs, budget, 3 * posterior.held)
        for part_args, part_kwargs in split_rows(args, kwargs, rows):
            yield jacobians.at(part_args, part_kwargs)

    config, state = storing.config_of, storing.state_of

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The fitted approximation over a copy of the network."""
        return storing.fill(cls(**storing.arguments_of(net, config, state)), config, state)

    def fingerprint(self) -> dict[str, str]:
        """That of the network."""
        return fingerprint(self.network)

    def __repr__(self) -> str:
        chosen = f"{self.subset.size:,} of {self.subset.total:,} weights" if self.subset else "not fitted"
        facts = ", ".join((self.likelihood.name, self.covariance, chosen, *self.remarks))
        return f"Laplace({type(self.network).__name__}, {facts})"
