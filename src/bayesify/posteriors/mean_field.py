"""Fully factorized Gaussians."""

import math
from collections.abc import Mapping, MutableMapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.arguments.checks import Positive, checked
from bayesify.maths.constraints import raw_positive
from bayesify.maths.fused_draws import DrawPlan, make_plan
from bayesify.maths.gaussian import UNIT_ENTROPY, diagonal_kl, diagonal_moments, draw_diagonals
from bayesify.maths.philox import TILE
from bayesify.maths.value_checks import transforming
from bayesify.posteriors.common.base import DrawRequest, Posterior, fixed_stds, repeat_draws
from bayesify.posteriors.common.gpu_draws import draw_by_kernels, kernels_suit
from bayesify.priors import PriorDraw
from bayesify.weights.named_parameters import NamedParameters, first_parameter, largest
from bayesify.weights.structured import LocalGaussian


class MeanField(Posterior):
    r"""Independent Gaussians over all weights (FFG-W; Blundell et al. 2015).

    $$ q(w) = \mathcal{N}(m, \operatorname{diag}(s^2)), \qquad
       \mathrm{KL} = \sum_i \log\frac{\sigma}{s_i} + \frac{s_i^2 + m_i^2}{2\sigma^2} - \frac12 $$

    The stored parameter `mean_value` is measured in `units` and starts at the network's weights. `raw_std` is the log of the
    standard deviation. If `max_std` is given, `raw_std` is instead the input of a scaled sigmoid. Both weights and biases are
    Gaussian. One call draws the noise of the whole network.

    Args:
        init_std: Standard deviations before training. The default is a tenth of the root mean square of the layer's weights, or
            less if the layer comes before a BatchNorm layer.
        max_std: Upper bound on every standard deviation.
        local_reparameterization: Whether the training objective draws noise at the outputs of linear layers that see each example
            once (see `LocalGaussian`). In other layers, and in predictions, weights are drawn. With noise at the outputs,
            gradients are less noisy than with drawn weights, but a step takes longer.
        units: Units of the stored means. With `"weight"` a stored mean is the mean itself. With `"prior"`, a stored mean is the
            mean divided by the prior's standard deviation. If the prior draws its standard deviation, the divisor is the initial
            mean of this standard deviation. With `"prior"`, a step of Adam moves each mean by the learning rate times the prior's
            standard deviation, in layers of any width. The code of Ober & Aitchison (2021) uses the units `"prior"` too. With
            `"weight"` and a learning rate of 0.01, a step of Adam moves the means of a layer with 288 inputs by 0.17 prior
            standard deviations. With such large steps, training diverges if later layers have a `GlobalInducing` posterior.

    Raises:
        ValueError: If a standard deviation is not positive, or if `init_std` is not below `max_std`.
    """

    name = "mean_field"
    title, paper = "Mean-field", "Blundell et al. 2015"
    cost = "2 P"
    aliases = ("ffg-w", "mfvi")
    correlated_priors = True
    independent = True

    @checked
    def __init__(
        self,
        init_std: Positive | None = None,
        max_std: Positive | None = None,
        local_reparameterization: bool = False,
        units: Literal["weight", "prior"] = "weight",
    ) -> None:
        super().__init__()
        if max_std is not None and init_std is not None and init_std >= max_std:
            raise ValueError(
                f"MeanField: init_std={init_std} is not below max_std={max_std}; give init_std= a smaller value"
            )
        self.init_std, self.max_std, self.units = init_std, max_std, units
        self.local_reparameterization = local_reparameterization
        self.capturable = not local_reparameterization

    def build(self, values: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        """Set the initial means to the network's weights, and the initial standard deviations to `start_std`. If `init_std` is
        not given, standard deviations start at no more than `max_std / 2`."""
        self.unit = {weight.name: self._unit(weight.name) for weight in self.weights}
        self.mean_value = NamedParameters({name: values[name] / unit for name, unit in self.unit.items()})
        starts: dict[str, Tensor] = {}
        for layer in self.layers:
            std = self.start_std(layer, values)
            if self.init_std is None and self.max_std is not None:
                std = min(std, 0.5 * self.max_std)
            starts |= {weight.name: torch.full_like(values[weight.name], self._raw(std)) for weight in layer.weights}
        self.raw_std = NamedParameters(starts)

    def _unit(self, name: str) -> float:
        if self.units == "weight" or self.bound_prior is None:
            return 1.0
        return float(torch.as_tensor(self.bound_prior.std[name]).detach().mean())

    def _means(self) -> list[Tensor]:
        if self.units == "weight":
            return self.mean_value.values()
        return [value * self.unit[name] for name, value in self.mean_value.items()]

    def _raw(self, std: float) -> float:
        return math.log(std) if self.max_std is None else raw_positive(std, self.max_std)

    def log_std(self) -> dict[str, Tensor]:
        """Log standard deviation of each entry, by name."""
        if self.max_std is None:
            return dict(self.raw_std.items())
        return {name: math.log(self.max_std) + F.logsigmoid(raw) for name, raw in self.raw_std.items()}

    def draw(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor]:
        """`m + s * noise`. With `local_reparameterization`, the training objective uses local Gaussians instead of drawn
        weights."""
        if self.draws_fused(request) and (fused := self._draw_fused(request)) is not None:
            return fused
        names, means, logs = list(self.mean_value), self._means(), list(self.log_std().values())
        prior_stds = [float(request.prior.std[name]) for name in names] if request.prior.fixed else None
        if request.local and self.local_reparameterization:
            return self._draw_locally(request, means, logs, prior_stds)
        tile = TILE if request.noise.by_kernel(means[0]) else 1
        flat = request.normals([mean.numel() for mean in means], means[0], tile)
        noise = [like_layout(part, mean) for part, mean in zip(flat, means, strict=True)]  # [S, *shape]
        if torch.is_grad_enabled() or transforming():
            if prior_stds is not None:
                drawn, kl = draw_diagonals(means, logs, noise, prior_stds)
            else:
                drawn = [torch.addcmul(mean, log.exp(), eps) for mean, log, eps in zip(means, logs, noise, strict=True)]
                kl = self.kl(request.prior)
        else:
            stds = list(torch._foreach_exp(logs))
            kl = self.kl(request.prior) if prior_stds is None else diagonal_kl(prior_stds, means, logs, stds)
            # Nobody else holds the noise, so its memory serves as the output buffer.
            drawn = [torch.addcmul(*parts, out=parts[2]) for parts in zip(means, stds, noise, strict=True)]
        return {name: self.mean_value.scatter(name, draw) for name, draw in zip(names, drawn, strict=True)}, kl

    def draws_fused(self, request: DrawRequest) -> bool:
        """See `Posterior`. A kernel can be used only if `max_std` is `None`, `units` is `"weight"`, and no entry is pruned."""
        return (
            kernels_suit(request, first_parameter(self.mean_value))
            and self.max_std is None
            and self.units == "weight"
            and not (request.local and self.local_reparameterization)
            and not self.mean_value.is_pruned
        )

    def _draw_fused(self, request: DrawRequest) -> tuple[MutableMapping[str, Tensor], Tensor] | None:
        """The same draws as `draw`, made by one kernel if all weights have the same dtype.

        For a bfloat16 network, the kernel writes bfloat16 directly.
        """
        means, log_stds = self.mean_value.values(), self.raw_std.values()

        def make(stds: list[float]) -> DrawPlan | None:
            dtypes = [request.dtype(name) for name in self.unit]
            return make_plan(means, log_stds, stds, request.num_draws, request.antithetic, dtypes)

        return draw_by_kernels(self, request, list(self.unit), [*means, *log_stds], make)

    def _draw_locally(
        self, request: DrawRequest, means: list[Tensor], logs: list[Tensor], prior_stds: list[float] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        if prior_stds is not None:
            locations, variances, kl = diagonal_moments(means, logs, prior_stds)
        else:
            locations, variances, kl = means, [(2 * value).exp() for value in logs], self.kl(request.prior)
        whole = self.materialized | {weight.name for weight in self.weights if weight.aliases}
        weights: dict[str, Tensor] = {}
        for name, location, variance in zip(self.mean_value, locations, variances, strict=True):
            if name in whole:  # all uses of a weight must see one value
                (eps,) = request.normals([location.numel()], location)
                one = torch.addcmul(location, variance.sqrt(), like_layout(eps, location))
                weights[name] = self.mean_value.scatter(name, one)
                continue
            moments = [self.mean_value.scatter(name, moment) for moment in (location, variance)]
            mean, spread = (repeat_draws(moment, request.num_draws) for moment in moments)
            weights[name] = LocalGaussian(mean, spread, request.noise, name)
        return weights, kl

    def mean(self) -> dict[str, Tensor]:
        """Means m, with 0 at pruned entries."""
        names = list(self.mean_value)
        return {name: self.mean_value.scatter(name, mean) for name, mean in zip(names, self._means(), strict=True)}

    def variance(self) -> dict[str, Tensor]:
        """Variances $s^2$, with 0 at pruned entries."""
        return {name: self.mean_value.scatter(name, (2 * log_std).exp()) for name, log_std in self.log_std().items()}

    def entropy(self) -> Tensor:
        """Sum of the entries' entropies, `log s + log(2 pi e) / 2`."""
        constant = sum(self.sizes().values()) * UNIT_ENTROPY
        return torch.stack([log_std.sum() for log_std in self.log_std().values()]).sum() + constant

    def sizes(self) -> dict[str, int]:
        """For each weight by name, the number of its entries that are not pruned."""
        return {name: mean.numel() for name, mean in self.mean_value.items()}

    @torch.no_grad()
    def prune(self, keep: float) -> None:
        """Keep the weights with the largest |mean| / std in the network. The other weights become 0 permanently (Graves 2011)."""
        prior = self.bound_prior
        if prior is not None and any(name in prior.factor or name in prior.mean for name in self.sizes()):
            raise ValueError(
                "prune: pruned weights are 0, but the prior correlates the positions of a kernel or has a mean other "
                "than 0; use a fixed prior with mean 0, such as Neal()"
            )
        log_std = self.log_std()
        scores = {
            name: self.mean_value.scatter(name, mean.abs().log() - log_std[name])
            for name, mean in zip(log_std, self._means(), strict=True)
        }
        for name, mask in largest(scores, {name: self.mean_value.mask(name) for name in scores}, keep).items():
            self.raw_std.prune(name, mask)
            self.mean_value.prune(name, mask)

    @torch.no_grad()
    def set_to_prior(self, prior: PriorDraw) -> None:
        """Set the means to 0 and the standard deviations to those of the prior."""
        stds = fixed_stds(self, prior)
        for name, std in stds.items():
            if self.max_std is not None and std >= self.max_std:
                raise ValueError(
                    f"MeanField: q cannot be set to the prior, because the prior std of {name} is {std:.3g}, which "
                    f"is not below max_std={self.max_std}; give max_std= a larger value"
                )
        for name, std in stds.items():
            self.mean_value[name].zero_()
            self.raw_std[name].fill_(self._raw(std))


def like_layout(flat: Tensor, like: Tensor) -> Tensor:
    """View noise [S, numel] as [S, *shape] with the memory layout of `like`. Elementwise kernels are faster if both tensors have
    the same layout."""
    size = (flat.shape[0], *like.shape)
    if like.is_contiguous() or flat.stride(0) not in (like.numel(), -(-like.numel() // TILE) * TILE):
        return flat.view(size)
    return flat.as_strided(size, (flat.stride(0), *like.stride()))
