"""A sparse variational Gaussian process with inducing points, from gpytorch, as a comparison for random features."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Budget, Count, DataCount, Memory, Positive, checked
from bayesify.arguments.installing import how_to_install
from bayesify.likelihoods import Gaussian
from bayesify.likelihoods.objectives import integrated_log_likelihood
from bayesify.predictive.gaussian import OutputGaussian
from bayesify.predictive.regression import RegressionPredictive
from bayesify.predictor import Batch, Phase, Predictor, Trainable
from bayesify.random_features.features import starting_lengthscales
from bayesify.random_features.process import INIT_NOISE
from bayesify.running.inputs_and_outputs import checked_inputs
from bayesify.running.memory import MEMORY_BUDGET, parse_bytes
from bayesify.storage.serializers import register_predictor
from bayesify.weights.module_state import put_tensors, tensors_of


@register_predictor
class InducingPointGP(nn.Module, Predictor, Trainable):
    r"""A Gaussian process with an RBF kernel and a Gaussian posterior over its values at M points (Hensman et al. 2015).

    $$ q(f) = \int p(f | u)\, q(u)\, du, \qquad
       \mathrm{ELBO} = \frac{N}{B} \sum_b \mathbb{E}_q \log p(y_b | f(x_b)) - \mathrm{KL}(q(u) \| p(u)) $$

    where u are the values at the inducing points, in the whitened form $u = L_K v$, and $q(v) = \mathcal{N}(m, S)$.
    Rossi et al. (2020) compare their method with this process. Inducing points, q, lengthscales, amplitude and noise
    are trained. The bound has a closed form. The class needs gpytorch (the extra `gp`).

    Args:
        inducing_inputs: Initial inducing points, [M, D], such as a random choice of training inputs.
        covariance: Form of S: `"diagonal"` or `"full"`.
        noise: Initial variance of the noise.
        lengthscale: Initial lengthscales; see `RandomFeatureGP`.
        amplitude: Initial amplitude; see `RandomFeatureGP`.
        learn_kernel: Whether lengthscales and amplitude are trained.

    Raises:
        ImportError: If gpytorch is not installed.
        ValueError: If a scale is not positive, if a name is unknown, or if the inducing inputs are not [M, D].
    """

    likelihood: Gaussian
    output = None
    training_draws = 1

    @checked
    def __init__(
        self,
        inducing_inputs: Tensor,
        covariance: Literal["diagonal", "full"] = "diagonal",
        *,
        noise: Positive = INIT_NOISE,
        lengthscale: Positive | Sequence[Positive] | None = None,
        amplitude: Positive = 1.0,
        learn_kernel: bool = True,
    ) -> None:
        super().__init__()
        self.covariance = covariance
        if inducing_inputs.ndim != 2 or not len(inducing_inputs):
            raise ValueError(
                f"InducingPointGP: inducing inputs have shape {tuple(inducing_inputs.shape)}; give [M, D] with M of at least 1"
            )
        scales = starting_lengthscales("InducingPointGP", inducing_inputs.shape[-1], lengthscale)
        self.likelihood = Gaussian(noise=noise).to(inducing_inputs)
        self.process = _make_process(inducing_inputs, covariance)
        kernel = self.process.covar_module
        kernel.base_kernel.lengthscale = torch.tensor([scales]).to(inducing_inputs)
        kernel.outputscale = torch.tensor(amplitude**2).to(inducing_inputs)
        for parameter in kernel.parameters():
            parameter.requires_grad_(learn_kernel)

    @checked
    def function_moments(self, x: Tensor, *, memory: Memory = MEMORY_BUDGET) -> tuple[Tensor, Tensor]:
        """Mean and variance of f under the posterior: [B, D] -> [B, 1] each.

        Args:
            x: Inputs.
            memory: Memory budget of the covariances in bytes. The budget applies only if gradients are disabled.
        """
        checked_inputs(x)
        # gpytorch may form the covariance between all rows, so the square of the number of rows must fit.
        rows = len(x) if torch.is_grad_enabled() else max(1, math.isqrt(memory // (4 * x.element_size())))
        means, variances = [], []
        with _quietly():
            for chunk in x.split(max(1, rows)):
                marginal = self.process(chunk)
                means.append(marginal.mean)
                variances.append(marginal.variance)
        return torch.cat(means).unsqueeze(-1), torch.cat(variances).unsqueeze(-1)

    def kl(self) -> Tensor:
        """KL(q(u) || p(u)) in nats: a scalar."""
        with _quietly():
            divergence: Tensor = self.process.variational_strategy.kl_divergence()
        return divergence

    @checked
    def elbo(self, x: Tensor, y: Tensor, *, num_data: DataCount) -> Tensor:
        """Evidence lower bound of the whole dataset in nats, estimated from one batch. Training maximizes this bound.
        The expectation over q has a closed form.

        Args:
            x: Inputs, [B, D].
            y: Targets, [B, 1].
            num_data: Number of examples N.
        """
        data, kl = self.elbo_terms(x, y, num_data=num_data)
        return data - kl

    def elbo_terms(
        self, x: Tensor, y: Tensor, *, num_data: int, example_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of `elbo`, separately, as scalars."""
        mean, variance = (part.unsqueeze(0) for part in self.function_moments(x))
        data = integrated_log_likelihood(mean, variance, y, self.likelihood, num_data, example_weights)
        return data[0], self.kl()

    # -- training --------------------------------------------------------------------------------------------------

    def terms(
        self, batch: Batch, *, phase: Phase, num_data: int, num_draws: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The two terms of the bound, [1] each."""
        data, kl = self.elbo_terms(batch.x, batch.y, num_data=num_data, example_weights=batch.weights)
        return data.expand(1), kl.expand(1)

    @torch.no_grad()
    @checked
    def predict(
        self,
        x: Tensor,
        num_draws: Count | None = None,
        *,
        generator: torch.Generator | None = None,
        memory: Budget = None,
    ) -> RegressionPredictive:
        """The predictive distribution of a batch of inputs [B, D], in closed form and without draws."""
        mean, variance = self.function_moments(x, memory=MEMORY_BUDGET if memory is None else parse_bytes(memory))
        return self.likelihood.closed_form(OutputGaussian(mean, variance.unsqueeze(-1), seed=0))

    def config(self) -> dict[str, Any]:
        """The form of the covariance; the sizes follow from the state."""
        return {"covariance": self.covariance}

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return tensors_of(self)

    @classmethod
    def restore(cls, net: nn.Module, config: Any, state: dict[str, Tensor]) -> Self:
        """The process that `config()` and `state()` describe; `net` is not used."""
        start = state["process.variational_strategy.inducing_points"]
        made = cls(torch.zeros_like(start), config["covariance"])
        put_tensors(made, state)
        return made


def count_inducing_parameters(num_inducing: int, num_inputs: int, covariance: Literal["diagonal", "full"]) -> int:
    """Number of parameters of M inducing points and q: M (D + 2), or M (D + 1) + M (M + 1) / 2 for a full covariance."""
    spread = num_inducing if covariance == "diagonal" else num_inducing * (num_inducing + 1) // 2
    return num_inducing * (num_inputs + 1) + spread


def _make_process(inducing_inputs: Tensor, covariance: str) -> Any:
    try:
        with _quietly():
            import gpytorch
    except ImportError:
        raise ImportError(f"InducingPointGP needs gpytorch; {how_to_install('gp')}") from None

    size, num_inputs = inducing_inputs.shape
    strategy, family = gpytorch.variational.VariationalStrategy, gpytorch.variational.CholeskyVariationalDistribution
    if covariance == "diagonal":
        family = gpytorch.variational.MeanFieldVariationalDistribution

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            super().__init__(strategy(self, inducing_inputs.clone(), family(size), learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=num_inputs))

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    process = Process().to(inducing_inputs)
    # Start at the prior mean; otherwise gpytorch draws the initial mean in the first pass.
    process.variational_strategy.variational_params_initialized.fill_(1)
    return process


class _quietly(warnings.catch_warnings):
    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore", DeprecationWarning)
        return entered
