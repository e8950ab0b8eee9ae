"""Naive dense versions in float64 of the library's structured computations."""

import math
from itertools import product

import torch
from torch import Tensor

from bayesify.posteriors import FullCovariance, KTied, MatrixNormal, MeanField, Posterior
from bayesify.weights.catalog import Layer, Weight


def matrix_entry(weight: Weight, index: tuple[int, ...]) -> tuple[int, int]:
    """Row (output) and column (input) of one entry of a weight."""
    if len(weight.shape) == 0:
        return 0, 0
    if len(weight.shape) == 1:
        return index[0], 0
    if weight.kind == "lookup":
        return index[1], index[0]
    output, within, *kernel = index
    inputs, sizes = weight.shape[1], weight.shape[2:]
    if weight.transposed:
        inputs = weight.shape[0] // weight.groups
        output, within = index[0] // inputs * weight.shape[1] + index[1], index[0] % inputs
    if weight.balanced:
        return output * sizes[0] + kernel[0], flat_index((within, *kernel[1:]), (inputs, *sizes[1:]))
    return output, flat_index((within, *kernel), (inputs, *sizes))


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Row-major position of an entry."""
    position = 0
    for where, size in zip(index, shape, strict=True):
        position = position * size + where
    return position


def entries(layer: Layer) -> list[tuple[str, int, int]]:
    """Weight name, row and column in `[W b]` of every scalar of a layer, weight by weight, each row-major."""
    found, offset = [], 0
    for weight in layer.weights:
        width = 0
        for index in product(*(range(size) for size in weight.shape)):
            row, col = matrix_entry(weight, index)
            found.append((weight.name, row, col + offset))
            width = max(width, col + 1)
        offset += width
    return found


def softplus(raw: Tensor) -> Tensor:
    """log(1 + exp(raw))."""
    return torch.log1p(torch.exp(raw.double()))


def relative_factor(packed: Tensor, raw_diagonal: Tensor) -> Tensor:
    """Lower triangle filled row by row with multiples of the row's diagonal entry."""
    n = raw_diagonal.shape[0]
    factor, position = torch.zeros(n, n, dtype=torch.float64), 0
    for row in range(n):
        for col in range(row):
            factor[row, col] = packed[position] * softplus(raw_diagonal[row])
            position += 1
        factor[row, row] = softplus(raw_diagonal[row])
    return factor


@torch.no_grad()
def gaussian(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Mean [P] and covariance [P, P] of all weights, in the order of `posterior.weights`, each row-major."""
    means, blocks = [], []
    for layer in posterior.layers:
        mean, block = layer_gaussian(posterior, layer)
        means.append(mean)
        blocks.append(block)
    return torch.cat(means), torch.block_diag(*blocks)


def layer_gaussian(posterior: Posterior, layer: Layer) -> tuple[Tensor, Tensor]:
    """Mean and covariance of one layer's weights."""
    where = entries(layer)
    if isinstance(posterior, MeanField):
        mean = torch.cat([posterior.mean_value[weight.name].flatten() for weight in layer.weights])
        raw = torch.cat([posterior.raw_std[weight.name].flatten() for weight in layer.weights])
        cap = posterior.max_std
        std = raw.exp() if cap is None else cap / (1 + (-raw).exp())
        return mean, torch.diag(std**2)
    if isinstance(posterior, FullCovariance):
        factor = relative_factor(posterior.lower[layer.name], posterior.raw_diagonal[layer.name])
        return posterior.mean_value[layer.name], factor @ factor.T
    if isinstance(posterior, KTied):
        rows, cols = softplus(posterior.raw_row[layer.name]), softplus(posterior.raw_col[layer.name])
        mean = torch.stack([posterior.mean_value[layer.name][row, col] for _, row, col in where])
        std = torch.stack([(rows[row] * cols[col]).sum() for _, row, col in where])
        return mean, torch.diag(std**2)
    if isinstance(posterior, MatrixNormal):
        name = layer.name
        row_factor = relative_factor(posterior.row_lower[name], posterior.row_raw_diagonal[name])
        col_factor = relative_factor(posterior.col_lower[name], posterior.col_raw_diagonal[name])
        row_cov, col_cov = row_factor @ row_factor.T, col_factor @ col_factor.T
        mean = torch.stack([posterior.mean_value[name][row, col] for _, row, col in where])
        covariance = torch.stack(
            [torch.stack([row_cov[r1, r2] * col_cov[c1, c2] for _, r2, c2 in where]) for _, r1, c1 in where]
        )
        return mean, covariance
    raise NotImplementedError(f"no dense reference for {type(posterior).__name__}; write one in dense_reference.py")


def kl_normals(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> Tensor:
    """KL(N(mean, covariance) || N(other_mean, other_covariance)) by inverse and determinant."""
    precision = torch.linalg.inv(other_covariance)
    difference = other_mean - mean
    trace = torch.trace(precision @ covariance)
    log_det = torch.logdet(other_covariance) - torch.logdet(covariance)
    return 0.5 * (trace + difference @ precision @ difference - mean.numel() + log_det)


class LinearRegression:
    """y = X w + noise with w ~ N(0, prior_variance): exact posterior and evidence.

    Args:
        num_data: Number of rows N.
        num_features: Number of inputs. A column of ones for the bias follows them.
        noise: Noise variance.
        prior_variance: Prior variance of every weight.
    """

    def __init__(
        self, num_data: int = 30, num_features: int = 3, noise: float = 0.25, prior_variance: float = 1.0
    ) -> None:
        generator = torch.Generator().manual_seed(11)
        x = torch.randn(num_data, num_features, generator=generator, dtype=torch.float64)
        x[:, 0] += 0.5 * x[:, -1]  # correlated inputs, so that a factorized posterior is not exact
        self.x, self.noise, self.prior_variance = x + 0.3, noise, prior_variance
        self.design = torch.cat([self.x, torch.ones(num_data, 1, dtype=torch.float64)], dim=1)
        truth = torch.randn(num_features + 1, generator=generator, dtype=torch.float64)
        error = torch.randn(num_data, generator=generator, dtype=torch.float64)
        self.y = self.design @ truth + noise**0.5 * error
        self.precision = self.design.T @ self.design / noise + torch.eye(num_features + 1) / prior_variance
        self.covariance = torch.linalg.inv(self.precision)
        self.mean = self.covariance @ self.design.T @ self.y / noise

    @property
    def log_evidence(self) -> Tensor:
        """log N(y; 0, X X^T prior_variance + noise I)."""
        n = len(self.y)
        covariance = self.prior_variance * self.design @ self.design.T + self.noise * torch.eye(n, dtype=torch.float64)
        return -0.5 * (
            self.y @ torch.linalg.solve(covariance, self.y) + torch.logdet(covariance) + n * math.log(2 * math.pi)
        )

    def expected_log_likelihood(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """E_q log p(y | X w) for q = N(mean, covariance)."""
        n = len(self.y)
        residual = self.y - self.design @ mean
        spread = torch.trace(self.design @ covariance @ self.design.T)
        return -0.5 * (residual @ residual + spread) / self.noise - 0.5 * n * math.log(2 * math.pi * self.noise)
