"""Gaussian processes with random features: linear models whose weights can have any posterior of the library."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, Inputs, Memory, Positive, Seed, checked
from bayesify.configuration import find_posterior, make_likelihood, make_posterior
from bayesify.likelihoods import Gaussian, Likelihood, objectives
from bayesify.maths.constraints import positive, raw_relative_tril
from bayesify.maths.noise import Randomness
from bayesify.maths.value_checks import should_check
from bayesify.maths.walsh_hadamard import dyadic_sums
from bayesify.network import BayesianNetwork
from bayesify.posteriors import FullCovariance, KTied, MeanField, Point, Posterior, WalshHadamard
from bayesify.posteriors.walsh_hadamard.families import Full
from bayesify.predictive.base import Predictive
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.priors import Standard
from bayesify.random_features.features import RandomFeatureNetwork, RandomFourierFeatures
from bayesify.running.generators import own_generators
from bayesify.running.inputs_and_outputs import checked_inputs
from bayesify.running.memory import MEMORY_BUDGET, parse_bytes
from bayesify.storage.serializers import register_predictor
from bayesify.transforms import hadamard
from bayesify.weights.module_state import put_tensors


def has_moments(posterior: Posterior) -> bool:
    """Whether `linear_moments` supports this posterior."""
    if isinstance(posterior, WalshHadamard):
        return posterior.covariance != "flow"
    return isinstance(posterior, (Point, MeanField, KTied, FullCovariance))


def linear_moments(posterior: Posterior, names: Sequence[str], features: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of $\phi^\top w_o$ for weights $w_o$ of single-output layers.

    For independent weights, the mean is $\phi^\top m$ and the variance is $(\phi^2)^\top s^2$. For a dense Gaussian, the variance
    is $\lVert L^\top \phi \rVert^2$. Walsh-Hadamard weights are linear in the diagonal g. Let $\Phi$ be the features $\phi$,
    reshaped to the shape of the weight matrix. Then $\phi^\top w = a^\top g$ with $a = \operatorname{diag}(H S_1 \Phi S_2 H)$. A
    variance therefore costs O(n) for n features, not O(n^2).

    The weights are [1, n] each, one per output, and the features $\phi$ are [B, n]. Mean and variance are [B, O]. Raises
    `ValueError` for a posterior for which `has_moments` is false.
    """
    if not has_moments(posterior):
        raise ValueError(
            f"linear_moments: the moments of {type(posterior).__name__} have no closed form; use MeanField, "
            "FullCovariance, or WalshHadamard without a flow"
        )
    if isinstance(posterior, WalshHadamard):
        found = zip(*(_walsh_hadamard(posterior, name, features) for name in names), strict=True)
        mean, variance = (torch.stack(parts, -1) for parts in found)
        return mean, variance
    means = posterior.mean()
    mean = features @ torch.cat([means[name] for name in names]).T
    if isinstance(posterior, FullCovariance):
        layers = {weight.name: layer.name for layer in posterior.layers for weight in layer.weights}
        spread = [(features @ posterior.scale_tril(layers[name])).square().sum(-1) for name in names]
        return mean, torch.stack(spread, -1)
    if isinstance(posterior, Point):
        return mean, torch.zeros_like(mean)
    variances = posterior.variance()
    return mean, features.square() @ torch.cat([variances[name] for name in names]).T


def _walsh_hadamard(posterior: WalshHadamard, name: str, features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one output, [B] each."""
    size, part = next(
        (size, part) for size, parts in posterior.groups.items() for part in parts if part.weight.name == name
    )
    left, right = posterior.left[str(size)][part.start], posterior.right[str(size)][part.start]
    family = posterior.family(size)
    entries = F.pad(features, (0, size * size - features.shape[-1])).unflatten(-1, (size, size))
    sums = dyadic_sums(entries * (left.unsqueeze(-1) * right))  # [B, D]
    slope = hadamard(sums) / math.sqrt(size)  # a
    mean = slope @ family.mean_value[part.start]
    if isinstance(family, Full):
        return mean, (slope @ family.factor()[part.start]).square().sum(-1)
    return mean, slope.square() @ family.variance()[part.start]


INIT_STD = 0.1
"""Initial standard deviation of the weights. It lies between the prior's 1 and typical values after training."""
INIT_NOISE = 0.02**2
"""Initial variance of the noise, for outputs of variance 1 (Rossi et al. 2020, appendix D.4)."""

POSTERIORS_BY_NAME: dict[str, Posterior] = {
    posterior.name: posterior
    for posterior in (MeanField(init_std=INIT_STD), FullCovariance(init_std=INIT_STD), WalshHadamard(init_std=INIT_STD))
}
"""Posteriors by name, with an initial standard deviation that suits weights of prior variance 1."""


@register_predictor
class RandomFeatureGP(BayesianNetwork):
    r"""A Gaussian process in the span of random features of an RBF kernel (Rossi et al. 2020, appendix D.4; eq. 15).

    $$ f_o(x) = \phi(x)^\top w_o, \qquad w_o \sim \mathcal{N}(0, I), \qquad \phi(x)^\top \phi(x') \approx k(x, x') $$

    It is a `BayesianNetwork` over a `RandomFeatureNetwork`, with the usual `fit`, `predict`, `draw` and `save`. The posterior
    covers the weights. The lengthscales and the amplitude of the kernel, and the noise, are point estimates. With
    `"walsh_hadamard"`, the n weights of an output form one block of $\sqrt n \times \sqrt n$ and need $4 \sqrt n$ parameters.

    With a Gaussian likelihood the bound needs no draws, because f is linear in w and therefore
    $\mathbb{E}_q \log p(y | f) = \log \mathcal{N}(y; \mathbb{E} f, \sigma^2) - \operatorname{Var}(f) / 2 \sigma^2$.

    Args:
        num_inputs: Number of inputs D.
        num_features: Number of features n, which must be even. If n is a power of 4, the features fill the block of
            `"walsh_hadamard"` completely.
        num_outputs: Number of outputs O. The outputs are independent processes with the same kernel.
        posterior: A posterior, a name, or a dict with a name and options. If `"mean_field"`, `"full_covariance"` or
            `"walsh_hadamard"` is passed as a name, the standard deviations of this posterior start at 0.1.
        likelihood: Likelihood p(y | f); by default Gaussian with a learned variance that starts at 0.0004.
        lengthscale: Initial lengthscales: one number, or one number per input. The default is $\sqrt{D} / 2$ and suits
            inputs from 0 to 1.
        amplitude: Initial standard deviation of f under the prior.
        learn_kernel: Whether lengthscales and amplitude are trained.
        exact_bound: Whether to use the closed form of the bound if likelihood and posterior have one; otherwise draws are used.
        seed: Seed of the frequencies and of the initial weights.

    Raises:
        ValueError: If a number is out of range or a name is unknown.
    """

    network: RandomFeatureNetwork

    @checked
    def __init__(
        self,
        num_inputs: Count,
        num_features: Count = 1024,
        num_outputs: Count = 1,
        posterior: Posterior | str | Mapping[str, Any] = "walsh_hadamard",
        *,
        likelihood: Likelihood | str | Mapping[str, Any] | None = None,
        lengthscale: Positive | Sequence[Positive] | None = None,
        amplitude: Positive = 1.0,
        learn_kernel: bool = True,
        exact_bound: bool = True,
        seed: Seed = 0,
    ) -> None:
        if isinstance(posterior, str):
            posterior = POSTERIORS_BY_NAME.get(find_posterior(posterior).name, posterior)
        chosen = make_posterior(posterior)
        noise = make_likelihood(likelihood) if likelihood is not None else Gaussian(noise=INIT_NOISE)
        with own_generators():
            torch.manual_seed(seed)
            net = RandomFeatureNetwork(num_inputs, num_features, num_outputs, lengthscale, amplitude, learn_kernel)
            super().__init__(net, [("heads", chosen)], likelihood=noise, prior=Standard())
        self.exact_bound = exact_bound

    @property
    def features(self) -> RandomFourierFeatures:
        """The feature layer, with `lengthscale` and `amplitude`."""
        return self.network.features

    @property
    def has_exact_bound(self) -> bool:
        """Whether `elbo` is in closed form."""
        return self.exact_bound and isinstance(self.likelihood, Gaussian) and has_moments(self.posterior)

    # -- functions -------------------------------------------------------------------------------------------------

    @checked
    def function_moments(self, x: Tensor, *, memory: Memory = MEMORY_BUDGET) -> tuple[Tensor, Tensor]:
        """Mean and variance of f under the posterior, in closed form; differentiable.

        Args:
            x: Inputs, [B, D].
            memory: Memory budget of the features in bytes. The budget applies only if gradients are disabled.

        Returns:
            Mean and variance, [B, O] each.

        Raises:
            ValueError: If the moments have no closed form under this posterior.
        """
        checked_inputs(x)
        names = list(self.weights)
        per_row = 4 * self.features.num_features * x.element_size()
        rows = len(x) if torch.is_grad_enabled() else max(1, memory // per_row)
        parts = [linear_moments(self.posterior, names, self.features(chunk)) for chunk in x.split(max(1, rows))]
        return torch.cat([mean for mean, _ in parts]), torch.cat([variance for _, variance in parts])

    def elbo_terms(
        self,
        x: Any,
        y: Tensor,
        *,
        num_data: int,
        num_draws: int = 1,
        example_weights: Tensor | None = None,
        generator: Randomness = None,
        antithetic: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `elbo`, separately. Each has shape [1] if the bound has a closed form, otherwise [S]."""
        if not self.has_exact_bound:
            return super().elbo_terms(
                x,
                y,
                num_data=num_data,
                num_draws=num_draws,
                example_weights=example_weights,
                generator=generator,
                antithetic=antithetic,
            )
        assert isinstance(self.likelihood, Gaussian)
        mean, variance = self.function_moments(x)
        moments, likelihood = (mean.unsqueeze(0), variance.unsqueeze(0)), self.likelihood
        data = objectives.integrated_log_likelihood(*moments, y, likelihood, num_data, example_weights)
        kl = self.kl().expand(1)
        if should_check(data) and not bool(torch.isfinite((data - kl).detach()).all()):
            objectives.check_result((data - kl).sum(), self.posterior.mean(), mean)
        return data, kl

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Inputs,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
        method: Literal["draws", "closed_form", "moments"] = "draws",
        **options: Any,
    ) -> Predictive:
        """The predictive distribution of a batch of inputs [B, D]; see `BayesianNetwork.predict` for the other arguments.

        Args:
            method: `"draws"` gives a mixture over functions. `"closed_form"` uses `function_moments`. It is exact for a
                Gaussian likelihood; class probabilities are averages over draws of the outputs. For
                `"moments"` see `BayesianNetwork.predict`.
            options: Further arguments of `BayesianNetwork.predict`, for `"draws"` and `"moments"`.

        Raises:
            ValueError: If the method is unknown, if the posterior has no closed form, or if inputs are not finite.
        """
        if method in ("draws", "moments"):
            return super().predict(x, num_draws, generator=generator, memory=memory, method=method, **options)
        if options:
            names = ", ".join(options)
            raise TypeError(
                f"RandomFeatureGP.predict: only method='draws' and method='moments' accept {names}; use one of these methods, "
                f"or leave out {names}"
            )
        likelihood = self.require_likelihood("predict")
        mean, variance = self.function_moments(x, memory=MEMORY_BUDGET if memory is None else parse_bytes(memory))
        return likelihood.closed_form(OutputGaussian(mean, torch.diag_embed(variance), seed=0))

    def config(self) -> dict[str, Any]:
        """The network's configuration and the option `exact_bound`, as a plain dict."""
        return {"network": super().config(), "exact_bound": self.exact_bound}

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """Restore the process, with a copy of the given `RandomFeatureNetwork`, which must have the same sizes."""
        if not isinstance(net, RandomFeatureNetwork):
            raise ValueError(
                f"RandomFeatureGP: net= is {type(net).__name__}; give a RandomFeatureNetwork of the same sizes"
            )
        features, stored = net.features, config["network"]
        process = cls(
            features.num_inputs,
            features.num_features,
            len(net.heads),
            stored["posterior"]["heads"],
            likelihood=stored["likelihood"],
            learn_kernel=features.raw_lengthscale.requires_grad,
            exact_bound=config["exact_bound"],
        ).to(features.raw_lengthscale)
        put_tensors(process, state)
        return process.train(net.training)

    @torch.no_grad()
    @checked
    def condition(self, x: Tensor, y: Tensor, *, memory: Memory = MEMORY_BUDGET) -> None:
        r"""Set a `FullCovariance` posterior, in place, to the exact posterior given the current kernel and noise.

        $$ q(w) = \mathcal{N}(A^{-1} \Phi^\top y / \sigma^2, A^{-1}), \qquad A = \Phi^\top \Phi / \sigma^2 + I $$

        At this posterior, `elbo` is the log evidence of Bayesian linear regression on the features. The computation uses float64.

        Args:
            x: All training inputs, [N, D].
            y: Targets, [N, O], or [N] for one output.
            memory: Memory budget of the features in bytes.

        Raises:
            ValueError: If the posterior is not `FullCovariance`, if the likelihood is not `Gaussian`, or if shapes do
                not match.
        """
        posterior, likelihood, names = self.posterior, self.likelihood, list(self.weights)
        if not isinstance(posterior, FullCovariance) or not isinstance(likelihood, Gaussian):
            raise ValueError(
                "RandomFeatureGP.condition: the model does not have both posterior='full_covariance' and a Gaussian "
                "likelihood; make it with both"
            )
        targets = y.unsqueeze(-1) if y.ndim == 1 else y
        if targets.shape != (len(x), len(names)):
            raise ValueError(
                f"RandomFeatureGP.condition: x has shape {tuple(x.shape)} and y has shape {tuple(y.shape)}; give [N, D] and "
                f"[N, {len(names)}]"
            )
        checked_inputs(x)
        size = self.features.num_features
        gram = torch.zeros(size, size, dtype=torch.float64, device=x.device)
        inner = torch.zeros(size, len(names), dtype=torch.float64, device=x.device)
        rows = max(1, memory // (16 * size))
        for inputs, outputs in zip(x.split(rows), targets.split(rows), strict=True):
            features = self.features(inputs).double()
            gram += features.T @ features
            inner += features.T @ outputs.double()
        noises = positive(likelihood.raw_noise.double()).expand(len(names))
        for index, (layer, noise) in enumerate(zip(posterior.layers, noises, strict=True)):
            precision = gram / noise + torch.eye(size, dtype=torch.float64, device=x.device)
            covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
            lower, raw_diagonal = raw_relative_tril(torch.linalg.cholesky(covariance))
            posterior.mean_value[layer.name].copy_(covariance @ inner[:, index] / noise)
            posterior.raw_diagonal[layer.name].copy_(raw_diagonal)
            posterior.lower[layer.name].copy_(lower)
