"""Random Fourier features of a squared exponential kernel, and the network that is linear in them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayesify.arguments.checks import Count, Positive, checked
from bayesify.maths.kernels import KernelScales


class RandomFourierFeatures(KernelScales):
    r"""Cosines and sines whose inner products are, on average, a squared exponential (RBF) kernel (Rahimi & Recht 2007).

    $$ \phi(x) = \frac{a}{\sqrt m} \bigl[\cos \Omega (x / \ell),\ \sin \Omega (x / \ell)\bigr], \qquad
       \Omega_{ij} \sim \mathcal{N}(0, 1) $$

    $$ \mathbb{E}_\Omega\, \phi(x)^\top \phi(x') = a^2 \exp\Bigl(-\tfrac12 \sum_d (x_d - x'_d)^2 / \ell_d^2\Bigr) $$

    with a variance of at most $a^4 / 2m$. For x = x', $\phi(x)^\top \phi(x) = a^2$ is exact. The m frequencies are
    drawn once and stay fixed. The D lengthscales $\ell$ and the amplitude a are learned.

    Stored parameters: `raw_lengthscale` and `raw_amplitude`, which softplus maps to positive values. `frequencies` is a
    buffer.

    Shapes:
        frequencies: [m, D]; raw_lengthscale: [D]; raw_amplitude: [].

    Args:
        num_inputs: Number of inputs D.
        num_features: Number of features 2 m, which must be even.
        lengthscale: Initial lengthscales: one number, or one number per input. The default is $\sqrt{D} / 2$, as in
            Rossi et al. 2020, and suits inputs from 0 to 1.
        amplitude: Initial amplitude a, which is a standard deviation.
        learn: Whether lengthscales and amplitude are trained.
        generator: Source of randomness of the frequencies; the global generator by default.

    Raises:
        ValueError: If a count is below 1, if `num_features` is odd, if a scale is not positive and finite, or if the
            number of lengthscales is wrong.
    """

    @checked
    def __init__(
        self,
        num_inputs: Count,
        num_features: Count,
        lengthscale: Positive | Sequence[Positive] | None = None,
        amplitude: Positive = 1.0,
        learn: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if num_features % 2:
            raise ValueError(
                f"RandomFourierFeatures: num_features={num_features}; give an even number (a cosine and a sine per frequency)"
            )
        super().__init__(starting_lengthscales("RandomFourierFeatures", num_inputs, lengthscale), amplitude, learn)
        self.num_inputs, self.num_features = num_inputs, num_features
        place = generator.device if generator is not None else torch.get_default_device()
        drawn = torch.randn(num_features // 2, num_inputs, generator=generator, device=place)
        self.register_buffer("frequencies", drawn.to(self.raw_lengthscale))
        self.frequencies: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [..., D] -> features [..., 2 m].

        Raises:
            ValueError: If the number of inputs is not D.
        """
        if x.shape[-1] != self.num_inputs:
            raise ValueError(f"RandomFourierFeatures: x has {x.shape[-1]} columns; give {self.num_inputs} columns")
        phases = x @ (self.frequencies / self.lengthscale).T  # [..., m]
        scale = self.amplitude / math.sqrt(self.num_features // 2)
        return scale * torch.cat((phases.cos(), phases.sin()), dim=-1)

    def kernel(self, x: Tensor, other: Tensor) -> Tensor:
        """The kernel that inner products of the features approximate: [N, D] and [M, D] -> [N, M]."""
        first, second = x / self.lengthscale, other / self.lengthscale
        squares = (first.unsqueeze(-2) - second.unsqueeze(-3)).square().sum(-1)
        return self.amplitude.square() * (-0.5 * squares).exp()

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_inputs={self.num_inputs}, num_features={self.num_features}"


class RandomFeatureNetwork(nn.Module):
    r"""$f_o(x) = \phi(x)^\top w_o$: random features and a linear layer without bias for each output (Rossi et al. 2020, eq. 15).

    Each output has its own layer (`heads.0`, `heads.1`, ...), and therefore its own weight in the posterior. If $w \sim
    \mathcal{N}(0, I)$, the outputs are independent Gaussian processes with the features' kernel.

    Args:
        num_inputs: Number of inputs D.
        num_features: Number of features; see `RandomFourierFeatures`.
        num_outputs: Number of outputs O.
        lengthscale: See `RandomFourierFeatures`.
        amplitude: See `RandomFourierFeatures`.
        learn: See `RandomFourierFeatures`.
        generator: See `RandomFourierFeatures`.

    Raises:
        ValueError: If an argument is not valid for `RandomFourierFeatures`, or if `num_outputs` is below 1.
    """

    @checked
    def __init__(
        self,
        num_inputs: Count,
        num_features: Count,
        num_outputs: Count = 1,
        lengthscale: Positive | Sequence[Positive] | None = None,
        amplitude: Positive = 1.0,
        learn: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.features = RandomFourierFeatures(num_inputs, num_features, lengthscale, amplitude, learn, generator)
        self.heads = nn.ModuleList(nn.Linear(num_features, 1, bias=False) for _ in range(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [B, D] -> outputs [B, O]."""
        features = self.features(x)
        return torch.cat([head(features) for head in self.heads], dim=-1)


def starting_lengthscales(owner: str, num_inputs: int, given: float | Sequence[float] | None) -> list[float]:
    r"""D lengthscales from one number or D numbers; $\sqrt{D} / 2$ by default."""
    if given is None:
        return [math.sqrt(num_inputs) / 2] * num_inputs
    scales = [float(given)] * num_inputs if isinstance(given, (int, float)) else [float(scale) for scale in given]
    if len(scales) != num_inputs:
        raise ValueError(
            f"{owner}: {len(scales)} lengthscales are given for {num_inputs} inputs; give one number, or one per input"
        )
    return scales
