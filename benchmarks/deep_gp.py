"""A step of our deep Gaussian process compared with gpytorch's: 2 layers, 100 inducing points, batch 256, 10 draws.

gpytorch's model is doubly stochastic variational inference as in its documentation: each of 8 hidden outputs has its own kernel and
inducing inputs. In `gpytorch_shared`, all hidden outputs share one kernel and one set of inducing inputs, as in Salimbeni &
Deisenroth's code and in ours. gpytorch's models run in float32; ours computes kernel matrices in float64.
"""

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesify import likelihoods
from bayesify.deep_gp import DeepGP

from .runs import parser
from .timing import adam_step, clock, ratios, record

INPUTS, BATCH, INDUCING, DRAWS, NUM_DATA = 8, 256, 100, 10, 10_000


def ours(x: Tensor, y: Tensor, inducing: str) -> Callable[[], None]:
    """One step of our model."""
    start = torch.randn(INDUCING, INPUTS, device=x.device)
    model = DeepGP(start, num_outputs=1, inducing=inducing, likelihood=likelihoods.Gaussian(0.1)).to(x)  # type: ignore[arg-type]
    return adam_step(model, lambda: -model.elbo(x, y, num_data=NUM_DATA, num_draws=DRAWS) / NUM_DATA)


def peer(x: Tensor, y: Tensor, shared: bool) -> Callable[[], None]:
    """One step of gpytorch's model."""
    import gpytorch
    from gpytorch.models.deep_gps import DeepGPLayer

    class Layer(DeepGPLayer):
        def __init__(self, inputs: int, outputs: int | None) -> None:
            batch = torch.Size([]) if outputs is None else torch.Size([outputs])
            kernels = torch.Size([1]) if shared and outputs is not None else batch
            points = torch.randn(*kernels, INDUCING, inputs)
            q = gpytorch.variational.CholeskyVariationalDistribution(INDUCING, batch_shape=batch)
            strategy = gpytorch.variational.VariationalStrategy(self, points, q, learn_inducing_locations=True)
            super().__init__(strategy, inputs, outputs)
            self.mean_module = gpytorch.means.ConstantMean() if outputs is None else gpytorch.means.LinearMean(inputs)
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.RBFKernel(batch_shape=kernels, ard_num_dims=inputs), batch_shape=kernels
            )

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Model(gpytorch.models.deep_gps.DeepGP):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.last = Layer(INPUTS, INPUTS), Layer(INPUTS, None)
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, x: Tensor) -> Any:
            return self.last(self.hidden(x))

    model = Model().to(x)
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(model.likelihood, model, NUM_DATA))

    def loss() -> Tensor:
        with gpytorch.settings.num_likelihood_samples(DRAWS):
            value: Tensor = -bound(model(x), y)
        return value

    return adam_step(model, loss)


def main() -> None:
    seconds = parser(__doc__, seconds=20.0).parse_args().seconds
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(BATCH, INPUTS, device=device)
    y = torch.sin(x.sum(-1))
    steps = [ours(x, y, "global"), ours(x, y, "local"), peer(x, y, shared=True)]
    base = peer(x, y, shared=False)
    found = ratios(base, *steps, seconds=seconds)
    figures = dict(zip(("global", "local", "gpytorch_shared"), found, strict=True))
    figures["gpytorch_ms"] = 1e3 * statistics.median(clock(base) for _ in range(9))
    record(
        f"deep_gp_{'gpu' if device == 'cuda' else 'cpu'}",
        figures,
        digits=3,
        unit="time of an Adam step divided by the time of gpytorch's doubly stochastic model in the same run",
        versions_of_peers={"gpytorch": __import__("gpytorch").__version__},
    )


if __name__ == "__main__":
    main()
