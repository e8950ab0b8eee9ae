"""Fully factorised Gaussians."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bayesify.maths.constraints import positive, raw_positive
from bayesify.posteriors.base import DrawRequest, NamedParameters, Posterior, check_positive
from bayesify.posteriors.local_gaussian import LocalGaussian
from bayesify.priors import PriorDraw


class MeanField(Posterior):
    r"""Independent Gaussians over all weights (FFG-W; Blundell et al. 2015).

    $$ q(w) = \mathcal{N}(m, \operatorname{diag}(s^2)), \qquad
       \mathrm{KL} = \sum_i \log\frac{\sigma}{s_i} + \frac{s_i^2 + m_i^2}{2\sigma^2} - \frac12 $$

    Stored: `mean_value` freely, starting at the network's weights; `raw_std` through softplus, or through a
    scaled sigmoid under a cap. Weights and biases both; a draw of the whole network takes its noise in one call.

    Args:
        init_std: Standard deviation of every weight before training.
        max_std: Upper bound on every standard deviation.
        local_reparameterization: Draw noise at the outputs of linear and convolution layers in the training
            objective (see `LocalGaussian`); predictions always draw weights.

    Raises:
        ValueError: If a standard deviation is not positive, or `init_std` is not below `max_std`.
    """

    name = "mean_field"

    def __init__(
        self, init_std: float = 1e-4, max_std: float | None = None, local_reparameterization: bool = False
    ) -> None:
        super().__init__()
        check_positive("MeanField", init_std=init_std, max_std=max_std)
        if max_std is not None and init_std >= max_std:
            raise ValueError(f"MeanField: init_std={init_std} is not below max_std={max_std}; give a smaller init_std")
        self.init_std, self.max_std = init_std, max_std
        self.local_reparameterization = local_reparameterization

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Means at the network's weights, every standard deviation at `init_std`."""
        raw = raw_positive(self.init_std, self.max_std)
        self.mean_value = NamedParameters({weight.name: values[weight.name].clone() for weight in self.weights})
        self.raw_std = NamedParameters(
            {weight.name: torch.full_like(values[weight.name], raw) for weight in self.weights}
        )

    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each entry, by name."""
        return {name: positive(raw, self.max_std) for name, raw in self.raw_std.items()}

    def draw(self, request: DrawRequest) -> tuple[dict[str, Tensor], Tensor]:
        """`m + s * noise`, or local Gaussians inside the training objective if asked for."""
        std = self.std()
        kl = self._kl(request.prior, std)
        if request.local and self.local_reparameterization:
            axis = (request.num_draws,)
            return {
                name: LocalGaussian(
                    mean.expand(axis + mean.shape), std[name].expand(axis + mean.shape), request.generator
                )
                for name, mean in self.mean_value.items()
            }, kl
        means = self.mean_value.values()
        noise = request.normals([mean.numel() for mean in means], means[0])
        weights = {}
        for (name, mean), eps in zip(self.mean_value.items(), noise, strict=True):
            shaped = like_layout(eps, mean)
            if torch.is_grad_enabled():
                weights[name] = torch.addcmul(mean, std[name], shaped)
            else:  # the noise is ours alone: no second buffer
                weights[name] = torch.addcmul(mean, std[name], shaped, out=shaped)
        return weights, kl

    def mean(self) -> dict[str, Tensor]:
        """m."""
        return dict(self.mean_value.items())

    def variance(self) -> dict[str, Tensor]:
        """s squared."""
        return {name: std.square() for name, std in self.std().items()}

    def entropy(self) -> Tensor:
        """Sum of the entries' entropies, `log s + log(2 pi e) / 2`."""
        return _entropy(self.std())

    def kl(self, prior: PriorDraw) -> Tensor:
        """Closed form; see the class."""
        return self._kl(prior, self.std())

    def _kl(self, prior: PriorDraw, std: Mapping[str, Tensor]) -> Tensor:
        squares = {
            name: torch.dot(mean.flatten(), mean.flatten()) + torch.dot(std[name].flatten(), std[name].flatten())
            for name, mean in self.mean_value.items()
        }
        return prior.cross_entropy(squares, self.sizes()) - _entropy(std)

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Means to 0, standard deviations to the prior's."""
        for name in self.sizes():
            std = float(prior.std[name])
            if self.max_std is not None and std >= self.max_std:
                raise ValueError(
                    f"MeanField: the prior's std {std:.3g} of {name} is not below max_std={self.max_std}; raise the cap"
                )
        for name in self.sizes():
            self.mean_value[name].zero_()
            self.raw_std[name].fill_(raw_positive(float(prior.std[name]), self.max_std))


def _entropy(std: Mapping[str, Tensor]) -> Tensor:
    total = sum(value.log().sum() + value.numel() * 0.5 * math.log(2 * math.pi * math.e) for value in std.values())
    return torch.as_tensor(total)


def like_layout(flat: Tensor, like: Tensor) -> Tensor:
    """See [S, numel] noise as [S, *shape] with the memory layout of `like`, so that elementwise kernels stay fast."""
    size = (flat.shape[0], *like.shape)
    if like.is_contiguous() or flat.stride(0) != like.numel():
        return flat.view(size)
    return flat.as_strided(size, (like.numel(), *like.stride()))
